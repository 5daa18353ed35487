"use strict";

const byId = id => document.getElementById(id);
const people = new Map(); // etid -> name
let smq;

function showState(text, kind) {
    byId("state").textContent = text;
    byId("state").dataset.kind = kind;
}

function showPeople() {
    const items = [...people].map(([etid, name]) => {
        const item = document.createElement("li");
        item.textContent = etid === smq.gettid() ? name + " (you)" : name;
        return item;
    });
    byId("people").querySelector("ul").replaceChildren(...items);
}

function addLine(kind, text, name = "") {
    const log = byId("log"), line = document.createElement("p");
    line.className = kind;
    if (name) line.append(Object.assign(document.createElement("b"), {textContent: name}));
    line.append(text);
    log.append(line);
    log.scrollTop = log.scrollHeight;
}

function addPerson(etid, name) { // the broker sends a notification when that client disconnects
    people.set(etid, name.slice(0, 32));
    showPeople();
    smq.observe(etid, () => {
        if (people.has(etid)) addLine("note", people.get(etid) + " left");
        people.delete(etid);
        showPeople();
    });
}

function enter(name) {
    const greet = () => {
        showState("connected", "up");
        people.clear();
        smq.publish(name, "hello");
    };
    smq = SMQ.Client(SMQ.wsURL("smq.lsp"), {info: name});
    smq.onconnect = smq.onreconnect = greet;
    smq.onclose = (message, canReconnect) => {
        showState(canReconnect ? "reconnecting …" : message, "down");
        return canReconnect && 1000;
    };
    smq.subscribe("hello", {datatype: "text", onmsg: (newName, etid) => {
        addPerson(etid, newName);
        addLine("note", people.get(etid) + " joined");
        if (etid !== smq.gettid()) smq.publish(name, etid);
    }});
    smq.subscribe("self", {datatype: "text", onmsg: (otherName, etid) => addPerson(etid, otherName)});
    smq.subscribe("say", {datatype: "text", onmsg: (text, etid) => {
        addLine(etid === smq.gettid() ? "said mine" : "said", text, people.get(etid) || "somebody");
    }});
}

byId("join").onsubmit = event => {
    event.preventDefault();
    byId("join").hidden = true;
    byId("room").hidden = false;
    byId("text").focus();
    showState("connecting …", "");
    enter(byId("name").value.trim() || "somebody");
};

byId("say").onsubmit = event => {
    event.preventDefault();
    smq.publish(byId("text").value, "say");
    byId("text").value = "";
};

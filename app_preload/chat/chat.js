"use strict";

const byId = id => document.getElementById(id);
const people = new Map(); // etid -> name
const clock = new Intl.DateTimeFormat([], {hour: "2-digit", minute: "2-digit", hourCycle: "h23"});
let pending = []; // my messages that have not come back from the broker: {text, line}
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
    line.append(Object.assign(document.createElement("span"), {textContent: text}), document.createElement("small"));
    line.lastChild.textContent = clock.format();
    log.append(line);
    log.scrollTop = log.scrollHeight;
    return line;
}

function say(text) {
    const line = addLine("said mine pending", text);
    line.lastChild.textContent = "not sent yet";
    pending.push({text, line});
    if (!smq.publish(text, "say")) showLost(pending.splice(-1)); // its queue is full, or the connection has ended
}

function onMyMessage(text) { // the broker sends my messages to me too, in the order in which all clients receive them
    const index = pending.findIndex(message => message.text === text);
    if (index >= 0) pending.splice(index, 1)[0].line.remove();
    addLine("said mine", text);
}

function showLost(messages) {
    for (const {line} of messages) {
        line.className = "said mine lost";
        line.lastChild.textContent = "not delivered";
    }
    pending = pending.filter(message => !messages.includes(message));
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
    let unanswered = []; // what was pending when this client greeted
    const greet = () => {
        showState("connected", "up");
        people.clear();
        unanswered = [...pending];
        smq.publish(name, "hello"); // after the messages that were waiting for the connection
    };
    smq = SMQ.Client(SMQ.wsURL("smq.lsp"), {info: name});
    smq.onconnect = smq.onreconnect = greet;
    smq.onclose = (message, canReconnect) => {
        showState(canReconnect ? "reconnecting …" : message, "down");
        if (!canReconnect) showLost(pending);
        return canReconnect && 1000;
    };
    smq.subscribe("hello", {datatype: "text", onmsg: (newName, etid) => {
        addPerson(etid, newName);
        addLine("note", people.get(etid) + " joined");
        if (etid !== smq.gettid()) smq.publish(name, etid);
        else showLost(unanswered.filter(message => pending.includes(message))); // sent before the connection was lost
    }});
    smq.subscribe("self", {datatype: "text", onmsg: (otherName, etid) => addPerson(etid, otherName)});
    smq.subscribe("say", {datatype: "text", onmsg: (text, etid) => {
        if (etid === smq.gettid()) onMyMessage(text);
        else addLine("said", text, people.get(etid) || "somebody");
    }});
}

byId("join").onsubmit = event => {
    event.preventDefault();
    byId("door").hidden = true;
    byId("room").hidden = false;
    byId("text").focus();
    showState("connecting …", "");
    enter(byId("name").value.trim() || "somebody");
};

byId("say").onsubmit = event => {
    event.preventDefault();
    say(byId("text").value);
    byId("text").value = "";
};

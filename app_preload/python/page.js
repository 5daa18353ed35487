"use strict";

const byId = id => document.getElementById(id);
const smq = SMQ.Client(SMQ.wsURL(document.currentScript.dataset.url));
const call = makeCaller(smq);
let functions = [];

function showState(text, kind) {
    byId("state").textContent = text;
    byId("state").dataset.kind = kind;
    byId("call").querySelector("button").disabled = kind !== "up";
}

function showError(text) { // until the next call
    byId("error").textContent = text;
    byId("arguments").setAttribute("aria-invalid", text !== "");
}

function choose() {
    const {example, help} = functions.find(({name}) => name === byId("name").value);
    byId("arguments").value = example;
    byId("help").textContent = help;
}

async function showFunctions() {
    functions = await call("list");
    byId("name").replaceChildren(...functions.map(({name}) => new Option(name)));
    choose();
}

function parseArguments() {
    try {
        return JSON.parse("[" + byId("arguments").value + "]");
    } catch (error) {
        showError("These are not JSON values with commas between them: " + error.message);
    }
}

function addEntry(text) {
    const entry = document.createElement("li"), time = document.createElement("small"), result = document.createElement("output");
    entry.className = "card";
    entry.append(Object.assign(document.createElement("code"), {textContent: text}), time, result);
    byId("log").prepend(entry);
    result.textContent = "…";
    return (answer, ms, failed) => {
        result.textContent = answer;
        time.textContent = ms.toFixed(1) + " ms";
        entry.classList.toggle("failed", failed);
    };
}

async function perform(name, args) {
    const finish = addEntry(name + "(" + args.map(value => JSON.stringify(value)).join(", ") + ")");
    const start = performance.now();
    try {
        const value = await call(name, ...args);
        finish(JSON.stringify(value), performance.now() - start, false);
    } catch (error) {
        finish(error.message, performance.now() - start, true);
    }
}

smq.onconnect = smq.onreconnect = () => {
    showState("connected", "up");
    if (!functions.length) showFunctions();
};
smq.onclose = (message, canReconnect) => {
    showState(canReconnect ? "reconnecting …" : message, "down");
    return canReconnect && 1000;
};

byId("name").onchange = choose;
byId("call").onsubmit = event => {
    event.preventDefault();
    showError("");
    const args = parseArguments();
    if (args) perform(byId("name").value, args);
};

"use strict";

const byId = id => document.getElementById(id);
let smq;
let mayMove; // whether the broker permits this user the topic; undefined before it has answered

function showState(text, kind) {
    byId("state").textContent = text;
    byId("state").dataset.kind = kind;
}

function showPanel(isShown) {
    byId("login").hidden = isShown;
    byId("panel").hidden = !isShown;
}

function showRight(isConnected) {
    byId("move").disabled = !isConnected || !mayMove;
    byId("why").textContent = mayMove === false ? "Only the keeper may move the door." : "";
}

function showDoor({open, by}) {
    byId("door").textContent = open ? "open" : "closed";
    byId("door").dataset.open = open;
    byId("move").textContent = open ? "Close" : "Open";
    byId("by").textContent = by ? `Last moved by ${by}.` : "Not moved yet.";
}

function showLogin(message) {
    showState("not signed in", "");
    showPanel(false);
    byId("refusal").textContent = message;
    byId("password").select();
}

function signIn(user, password) {
    mayMove = undefined;
    smq = SMQ.Client(SMQ.wsURL("smq.lsp"), {info: user});
    smq.onauth = seed => sha1(password + seed); // called for every connection, each time with a new seed
    smq.onconnect = smq.onreconnect = () => {
        showState("signed in", "up");
        byId("who").textContent = user;
        showPanel(true);
        showRight(true);
        smq.publish("", "ask");
    };
    smq.onclose = (message, canReconnect) => {
        if (!canReconnect) return showLogin(message);
        showState("reconnecting …", "down");
        showRight(false);
        return 1000;
    };
    smq.subscribe("door", {datatype: "json", onmsg: showDoor});
    smq.subscribe("self", {datatype: "json", onmsg: showDoor});
    smq.create("move", isAllowed => {
        mayMove = isAllowed;
        showRight(true);
    });
}

byId("login").onsubmit = event => {
    event.preventDefault();
    byId("refusal").textContent = "";
    showState("signing in …", "");
    signIn(byId("user").value, byId("password").value);
};

byId("move").onclick = () => smq.publish("", "move");

byId("leave").onclick = () => {
    smq.disconnect();
    byId("password").value = "";
    showLogin("");
};

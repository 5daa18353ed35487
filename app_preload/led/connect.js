"use strict";

const byId = id => document.getElementById(id);

function showState(text, kind) {
    byId("state").textContent = text;
    byId("state").dataset.kind = kind;
}

function connect(onready, onlost = () => {}) { // onready is called after the first connect and after each reconnect
    const smq = SMQ.Client(SMQ.wsURL("smq.lsp"));
    smq.onconnect = smq.onreconnect = () => {
        showState("connected", "up");
        onready();
    };
    smq.onclose = (message, canReconnect) => {
        showState(canReconnect ? "reconnecting …" : message, "down");
        onlost();
        return canReconnect && 1000;
    };
    return smq;
}

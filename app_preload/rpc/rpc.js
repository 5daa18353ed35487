"use strict";

/* Calls functions of the server: await makeCaller(smq)("add", 2, 40). */
function makeCaller(smq, timeoutMs = 10000) {
    const SERVER = 1; // its ETID
    const open = new Map(); // id -> {resolve, reject, timer}
    let lastId = 0;

    function finish(id, settle) {
        const call = open.get(id);
        if (!call) return;
        open.delete(id);
        clearTimeout(call.timer);
        settle(call);
    }

    smq.subscribe("self", {datatype: "json", onmsg: ({id, value, error}) => {
        finish(id, call => error === undefined ? call.resolve(value) : call.reject(new Error(error)));
    }});

    return (name, ...args) => new Promise((resolve, reject) => {
        const id = ++lastId;
        const timer = setTimeout(() => finish(id, call => call.reject(new Error("no answer"))), timeoutMs);
        open.set(id, {resolve, reject, timer});
        smq.pubjson({id, name, arguments: args}, SERVER);
    });
}

"use strict";

const SHOWN = 40;
const WAYS = {in: "MQTT → SMQ", out: "SMQ → MQTT", both: "MQTT ↔ SMQ"};
const OTHER = "start this server with the address of another:", COMMAND = "MQTT_BROKER=mqtt://broker.example smqrt serve app_preload";
const TROUBLES = {
    cannotresolve: ["unknown host name", `Correct it: ${OTHER}`, COMMAND],
    cannotconnect: ["no MQTT broker at this address", `Start a broker, such as mosquitto, or ${OTHER}`, COMMAND],
    timeout: ["no response in time", "Check for a firewall in between."],
    socketclosed: ["connection closed by the broker", ""],
    socketreadfailed: ["connection lost", ""],
    sslnottrusted: ["certificate not trusted", ""],
    sslhandshake: ["TLS handshake failed", "Check that the port is for TLS."],
};
const REJECTED = ["connection rejected by the broker", "Write user and password into the address:", "MQTT_BROKER=mqtt://user:password@host"];
const byId = id => document.getElementById(id);

function showState(text, kind) {
    byId("state").textContent = text;
    byId("state").dataset.kind = kind;
}

function element(name, text, kind = "") {
    return Object.assign(document.createElement(name), {textContent: text, className: kind});
}

function stateText({connected, broker, reason}) {
    if (reason === "here") return "MQTT clients connect here";
    return connected ? "connected to " + broker : reason === "connecting" ? "connecting …" : "not connected";
}

function showBroker(state) {
    showState(stateText(state), state.connected ? "up" : "down");
    showTrouble(state);
    byId("rulebook").hidden = state.reason === "here"; // MQTT and SMQ clients share the topics of the hub
    byId("rules").replaceChildren(...Object.values(state.rules).map(rule => { // Lua encodes an empty list as {}
        const item = element("li", "");
        item.append(element("code", rule.mqtt + "#"), ` ${rule.way === "in" ? "→" : rule.way === "out" ? "←" : "↔"} `,
            element("code", rule.smq + "#"), element("span", " " + rule.data, "soft"));
        return item;
    }));
}

function showTrouble({connected, broker, reason}) {
    const [what, remedy, command = ""] = TROUBLES[reason] || (reason.startsWith("connect ") ? REJECTED : ["not connected", ""]);
    byId("trouble").hidden = connected || reason === "connecting";
    byId("trouble").replaceChildren(`${broker}: ${what} (${reason}). The bridge retries automatically. ${remedy} `, element("code", command));
}

function showCounts(counts) {
    for (const name in counts) byId(name).textContent = counts[name];
}

function row(item) {
    const line = element("p", "", item.why ? "why" : item.way);
    const topics = element("span", item.way === "in" ? item.mqtt : item.smq);
    topics.append(element("small", item.why || (item.way === "in" ? item.smq : item.mqtt)));
    line.append(element("span", WAYS[item.way].replace(" → ", "→"), "way"), topics, element("code", item.text));
    return line;
}

function addItems(items) {
    byId("nothing").hidden = byId("nothing").hidden || items.length > 0;
    for (const item of items) byId("flow").prepend(row(item));
    while (byId("flow").childElementCount > SHOWN) byId("flow").lastElementChild.remove();
}

const smq = SMQ.Client(SMQ.wsURL("smq.lsp"));
smq.onconnect = smq.onreconnect = () => {
    byId("flow").replaceChildren();
    smq.publish("", "bridge/ask");
};
smq.onclose = (message, canReconnect) => {
    showState(canReconnect ? "reconnecting …" : message, "down");
    return canReconnect && 1000;
};
smq.subscribe("self", {datatype: "json", onmsg: all => {
    showBroker(all.state);
    showCounts(all.counts);
    addItems(Object.values(all.items)); // Lua encodes an empty list as {}
}});
smq.subscribe("bridge/state", {datatype: "json", onmsg: showBroker});
smq.subscribe("bridge/flow", {datatype: "json", onmsg: news => {
    showCounts(news.counts);
    addItems(news.items);
}});

byId("send").onsubmit = event => {
    event.preventDefault();
    smq.publish(byId("text").value, byId("topic").value);
};

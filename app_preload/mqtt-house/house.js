"use strict";

const COLD = 14, HOT = 28; // °C: the two ends of the bar
const byId = id => document.getElementById(id);
const tiles = new Map(); // room -> element

function showState(text, kind) {
    byId("state").textContent = text;
    byId("state").dataset.kind = kind;
    byId("lamp").disabled = kind !== "up";
}

// ---- temperatures

function makeTile(room) {
    const tile = document.createElement("article"), name = document.createElement("h3"), value = document.createElement("output");
    const bar = document.createElement("div"), time = document.createElement("time");
    tile.className = "card room";
    name.textContent = room.replaceAll(/[-_]/g, " ");
    tile.setAttribute("aria-label", name.textContent);
    bar.className = "bar";
    tile.append(name, value, bar, time);
    const next = [...tiles.keys()].filter(other => other > room).sort()[0];
    byId("rooms").insertBefore(tile, tiles.get(next) ?? null);
    tiles.set(room, tile);
    byId("nothing").hidden = true;
    return tile;
}

function showTemperature(room, text) {
    const degrees = Number.parseFloat(text);
    if (!Number.isFinite(degrees)) return;
    const tile = tiles.get(room) ?? makeTile(room);
    const share = Math.min(Math.max((degrees - COLD) / (HOT - COLD), 0), 1);
    tile.querySelector("output").textContent = `${degrees.toFixed(1)} °C`;
    tile.style.setProperty("--share", share);
    tile.querySelector("time").textContent = `received ${new Date().toLocaleTimeString()}`;
}

// ---- lamp

function showLamp(command) {
    byId("lamp").setAttribute("aria-checked", command === "on");
    byId("command").textContent = command || "no command yet";
}

// ---- connection

const smq = SMQ.Client(SMQ.wsURL("smq.lsp"));
const subscribed = new Set();

function addRoom(room) { // each room has a topic of its own
    if (subscribed.has(room)) return;
    subscribed.add(room);
    smq.subscribe(`house/${room}/temp`, {datatype: "text", onmsg: text => showTemperature(room, text)});
}

smq.onconnect = smq.onreconnect = () => showState("connected", "up");
smq.onclose = (message, canReconnect) => {
    showState(canReconnect ? "reconnecting …" : message, "down");
    return canReconnect && 1000;
};
smq.subscribe("rooms", {datatype: "text", onmsg: addRoom});
smq.subscribe("house/lamp/set", {datatype: "text", onmsg: showLamp});

byId("lamp").onclick = () => {
    const isOn = byId("lamp").getAttribute("aria-checked") === "true";
    smq.publish(isOn ? "off" : "on", "house/lamp/set"); // comes back to this page, as to all others
};

const address = `-h ${location.hostname.replace(/[[\]]/g, "")} -p ${location.port || (location.protocol === "https:" ? 443 : 80)}`;
const secure = location.protocol === "https:" ? " --tls-use-os-certs" : "";
byId("publish").textContent = `mosquitto_pub ${address}${secure} -t house/kitchen/temp -m 21.5`;
byId("subscribe").textContent = `mosquitto_sub ${address}${secure} -t house/lamp/set -q 1`;

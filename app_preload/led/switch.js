"use strict";

const cards = new Map(); // etid -> element

function makeButton(etid, colour) {
    const button = document.createElement("button");
    button.className = "led";
    button.dataset.colour = colour;
    button.textContent = colour;
    button.setAttribute("role", "switch");
    button.onclick = () => {
        const isOn = button.getAttribute("aria-checked") === "true";
        smq.publish(isOn ? "0" : "1", etid, colour); // to this lamp only, which then publishes its new state
    };
    return button;
}

function makeCard(etid, lamp) {
    const card = document.createElement("article"), leds = document.createElement("div");
    card.className = "lamp card";
    card.setAttribute("aria-label", lamp.name);
    leds.className = "leds";
    leds.append(...Object.keys(lamp.leds).sort().reverse().map(colour => makeButton(etid, colour)));
    card.append(Object.assign(document.createElement("h2"), {textContent: lamp.name}), leds);
    byId("lamps").append(card);
    cards.set(etid, card);
    smq.observe(etid, () => { // the lamp has disconnected
        card.remove();
        cards.delete(etid);
    });
    return card;
}

function showLamp(lamp, etid) {
    const card = cards.get(etid) || makeCard(etid, lamp);
    for (const button of card.querySelectorAll(".led")) button.setAttribute("aria-checked", lamp.leds[button.dataset.colour]);
}

const smq = connect(() => {
    cards.clear();
    byId("lamps").replaceChildren();
    smq.publish("", "lamp/ask");
}, () => {
    for (const button of byId("lamps").querySelectorAll(".led")) button.disabled = true;
});
smq.subscribe("lamp/state", {datatype: "json", onmsg: showLamp});
smq.subscribe("self", {datatype: "json", onmsg: showLamp});

"use strict";

const lamp = {name: "Lamp", leds: {red: false, green: false, blue: false}};

function showBulb() {
    const {red, green, blue} = lamp.leds;
    const lit = Object.keys(lamp.leds).filter(colour => lamp.leds[colour]);
    if (lit.length) byId("bulb").style.setProperty("--light", [red, green, blue].map(isOn => isOn ? 255 : 30).join(" "));
    else byId("bulb").style.removeProperty("--light");
    byId("bulb").setAttribute("aria-label", lit.join(" and ") || "off");
}

const smq = connect(() => {
    lamp.name = "Lamp " + smq.gettid() % 1000;
    byId("name").textContent = lamp.name;
    smq.pubjson(lamp, "lamp/state");
});

for (const colour of Object.keys(lamp.leds)) {
    smq.subscribe("self", colour, {datatype: "text", onmsg: text => {
        lamp.leds[colour] = text === "1";
        showBulb();
        smq.pubjson(lamp, "lamp/state");
    }});
}
smq.subscribe("lamp/ask", {onmsg: (data, etid) => smq.pubjson(lamp, etid)});

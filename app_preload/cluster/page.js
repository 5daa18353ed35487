"use strict";

const NAMES = ["Ada", "Béla", "Chen", "Dora", "Emre", "Fay", "Gus", "Hana", "Ivo", "Juno", "Kai", "Lea", "Milo", "Nia", "Otto", "Pia"];
const byId = id => document.getElementById(id);

function makeName() {
    return `${NAMES[Math.floor(Math.random() * NAMES.length)]} ${Math.floor(Math.random() * 90) + 10}`;
}

function showState() {
    const up = views.filter(view => view.isUp).length;
    byId("state").textContent = up === views.length ? "both running" : `${up} of ${views.length} running`;
    byId("state").dataset.kind = up === views.length ? "up" : "down";
}

const views = [];
const myName = makeName();
for (const element of document.querySelectorAll(".node")) views.push(new NodeView(element, myName, showState));

// Elements that several views share.

import {foreign, h} from "../dom.js";
import * as format from "../format.js";

const SHOWN = 48;

// A text that may break after separators, but not in the name of a hidden file.
export const breakable = text => text.split(/(?<=[-/_:=]|[^/]\.)(?=.)/).flatMap((word, index) => index ? [h("wbr"), word] : [word]);

// A name from a client: short in a table, complete in the tooltip. Long names break after separators, not within words.
export function foreignName(text, attributes = {}) {
    if (!text) return h("span", {class: "soft"}, "(empty)");
    const isLong = text.length > SHOWN;
    return foreign(breakable(isLong ? `${text.slice(0, SHOWN)}…` : text), {...attributes, title: isLong ? text : undefined});
}

export const address = row => h("span", {class: "mono"}, foreign(row.address));

// A count of the chosen hub, and of all hubs if there are several.
export const countOfHub = ({hubs, hub, total, everywhere}, word) => {
    const name = hubs.find(({id}) => id === hub)?.name, counted = format.plural(total ?? 0, word);
    return `${counted}${hubs.length > 1 ? ` of ${name}, ${format.count(everywhere)} in all hubs` : ""}`;
};

// A selection of the hub; hidden with a single hub.
export class HubChoice {
    constructor(onchange) {
        this.select = h("select", {change: () => onchange(this.value)});
        this.element = h("label", {}, "Hub", this.select);
        this.element.hidden = true;
    }

    get value() {
        return this.select.value;
    }

    update(hubs, chosen) {
        const signature = JSON.stringify(hubs.map(({id, name}) => [id, name]));
        if (this.signature !== signature) {
            this.signature = signature;
            this.select.replaceChildren(...hubs.map(({id, name}) => h("option", {value: id}, name)));
            this.element.hidden = hubs.length < 2;
        }
        if (document.activeElement !== this.select) this.select.value = String(chosen);
    }
}

// A search field that searches after a pause in typing.
export function search(label, placeholder, onchange, value = "") {
    const PAUSE_MS = 250;
    let timer = 0;
    const input = h("input", {type: "search", placeholder, autocomplete: "off", spellcheck: "false", maxlength: 100, value, input: () => {
        clearTimeout(timer);
        timer = setTimeout(() => onchange(input.value.trim()), PAUSE_MS);
    }});
    return h("label", {class: "find"}, label, input);
}

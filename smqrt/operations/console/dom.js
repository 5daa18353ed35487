// Elements from data. Text becomes text nodes, so names of clients and topics can't be markup.

export function h(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) set(element, name, value);
    element.append(...children.flat(2).filter(child => child !== null && child !== undefined && child !== false));
    return element;
}

function set(element, name, value) {
    if (value === null || value === undefined || value === false) return;
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : value);
}

export const find = id => document.getElementById(id);

export function setText(element, text) { // only when it has changed: a live region would repeat it
    if (element.textContent !== text) element.textContent = text;
}

// A text from a client: isolated, so that its writing direction does not affect other text.
export const foreign = (text, attributes = {}) => h("bdi", attributes, text);

export const mark = (kind, text) => h("span", {class: "mark", "data-kind": kind}, text);

export function section(title, attributes = {}, ...more) {
    const heading = h("h2", {}, title), head = h("div", {class: "section-head"}, heading, ...more);
    const element = h("section", {class: "section", ...attributes}, head);
    return element;
}

export const empty = (title, text) => h("p", {class: "empty"}, h("strong", {}, title), text);

export const placeholder = (rows = 4) => h("div", {class: "inside", "aria-hidden": "true"},
    Array.from({length: rows}, () => h("p", {class: "empty"}, h("span", {class: "bone"}))));

export function every(element, selector, change) {
    element.querySelectorAll(selector).forEach(change);
}

// Dialogs. The element <dialog> keeps the focus inside, closes on Escape, and returns the focus.

import {h} from "./dom.js";

let number = 0; // for a unique id: several dialogs may be open

export function dialog(title, content, onclose = () => {}) {
    const id = `dialog-${++number}`;
    const close = h("button", {type: "button", "aria-label": "Close", click: () => element.close()}, "Close");
    const heading = h("h2", {id}, title);
    const inside = h("div", {class: "inside"}, content);
    const element = h("dialog", {"aria-labelledby": id}, h("div", {class: "dialog-head"}, heading, close), inside);
    element.addEventListener("close", () => {
        element.remove();
        onclose();
    });
    element.addEventListener("click", event => event.target === element && element.close());
    document.body.append(element);
    element.showModal();
    return {element, inside, close: () => element.close()};
}

// Asks for confirmation of an action. act returns an error text, or an empty text after success.
export function confirm(title, text, word, act) {
    const fault = h("p", {class: "fault", role: "alert"});
    const sure = h("button", {type: "button", class: "danger sure", click: async () => {
        sure.disabled = true;
        const error = await act();
        sure.disabled = false;
        if (!error) return box.close();
        fault.textContent = error;
    }}, word);
    const cancel = h("button", {type: "button", autofocus: true, click: () => box.close()}, "Cancel");
    const box = dialog(title, [h("p", {}, text), fault, h("div", {class: "actions"}, cancel, sure)]);
    return box;
}

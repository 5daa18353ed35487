// Applications: state, error with the lines around it, last traces; restart.

import {post, toast} from "../api.js";
import {confirm} from "../dialog.js";
import {empty, foreign, h, mark, section} from "../dom.js";
import {foreignName} from "./parts.js";

const STATES = {running: ["good", "running"], failed: ["bad", "failed"], stopped: ["off", "stopped"], changing: ["warn", "changing"]};

export function applications({live, place, ready, setSubtitle}) {
    const part = h("section", {class: "section", "aria-label": "Applications"}), shown = new Map();
    const traces = h("pre", {class: "lines", tabindex: "0"}); // of timers, events and greenlets, which belong to no application
    const others = section("Traces from timers, events and greenlets");
    others.append(h("div", {class: "inside"}, traces));
    live.watch("applications", {}, data => {
        if (!part.isConnected) {
            ready();
            place.append(part, others);
        }
        others.hidden = !data.traces.length;
        if (traces.textContent !== data.traces.join("\n")) traces.textContent = data.traces.join("\n");
        const failed = data.rows.filter(row => row.state === "failed").length;
        setSubtitle(`${data.rows.length}${failed ? `, ${failed} failed` : ""}`);
        if (!data.rows.length) return part.replaceChildren(empty("No applications", "Start the server with a folder: smqrt serve FOLDER. smqrt new FOLDER creates one."));
        const names = new Set(data.rows.map(row => row.uri));
        for (const [uri, one] of shown) if (!names.has(uri)) { one.element.remove(); shown.delete(uri); }
        for (const row of data.rows) {
            if (!shown.has(row.uri)) {
                shown.set(row.uri, new ApplicationCard());
                part.append(shown.get(row.uri).element);
            }
            shown.get(row.uri).update(row);
        }
    });
}

class ApplicationCard {
    constructor() {
        this.state = h("span");
        this.title = h("h2");
        this.where = h("span", {class: "where soft mono"});
        this.button = h("button", {type: "button", click: () => this.restart()}, "Restart …");
        this.failure = h("div", {});
        this.traces = h("pre", {class: "lines", tabindex: "0"});
        this.fold = h("details", {}, h("summary", {}, "Last traces"), this.traces);
        this.element = h("article", {class: "application"},
            h("div", {class: "application-head"}, this.title, this.state, this.button, this.where), this.failure, this.fold);
    }

    update(row) {
        const signature = JSON.stringify(row);
        if (this.signature === signature) return;
        this.signature = signature;
        this.row = row;
        const [kind, word] = STATES[row.state] ?? ["off", row.state];
        this.state.replaceChildren(mark(kind, word));
        this.title.replaceChildren(foreignName(row.name));
        this.where.replaceChildren(foreign(`${row.uri} · ${row.path}`));
        this.button.disabled = row.state === "changing";
        this.element.setAttribute("aria-label", row.name);
        this.fail(row);
        this.fold.hidden = !row.traces.length;
        this.trace(row.traces.join("\n"));
    }

    fail({error, source}) {
        if (!error) return this.failure.replaceChildren();
        const [first, ...rest] = error.split("\n");
        const lines = source && h("ol", {class: "code", "aria-label": `${source.file}, around line ${source.line}`},
            source.lines.map(([number, text]) => h("li", number === source.line ? {class: "here", "aria-current": "true"} : {}, h("span", {}, String(number)), h("span", {}, foreign(text || " ")))));
        this.failure.replaceChildren(...[h("p", {class: "failure"}, foreign(first)),
            source && h("p", {class: "small soft mono"}, foreign(`${source.file}:${source.line}`)), lines,
            rest.length && h("details", {}, h("summary", {}, "The whole error"), h("pre", {class: "lines", tabindex: "0"}, foreign(rest.join("\n"))))].filter(Boolean));
    }

    trace(text) {
        if (this.traces.textContent === text) return;
        const atEnd = this.traces.scrollHeight - this.traces.scrollTop - this.traces.clientHeight < 30;
        this.traces.textContent = text;
        if (atEnd) this.traces.scrollTop = this.traces.scrollHeight;
    }

    restart() {
        const {name, id} = this.row;
        confirm(h("span", {}, "Restart ", foreignName(name), "?"), "The application is loaded again from its files. Its clients are closed and reconnect.", "Restart", async () => {
            const error = await post(`/api/v1/apps/${encodeURIComponent(id)}/restart`);
            if (!error) toast("Restarted.");
            return error;
        });
    }
}

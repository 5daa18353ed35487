// The connection to the server. While the page is visible, it receives the pulse and the data of its view each second.

import {find, setText} from "./dom.js";

const RETRY_MS = 1500, PULSE = "pulse";

export class Live {
    constructor() {
        this.listeners = new Set(); // of the pulse
        this.shown = null;          // {view, options, serial, take}
        this.serial = 0;
        this.failures = 0;
        this.parts = [];            // of an incomplete answer
        this.smq = SMQ.Client(SMQ.wsURL("smq"), {info: "console"});
        this.smq.onconnect = this.smq.onreconnect = () => this.connected();
        this.smq.onclose = (message, canReconnect) => this.lost(message, canReconnect);
        this.smq.subscribe(PULSE, {datatype: "json", onmsg: pulse => this.receivePulse(pulse)});
        this.smq.subscribe("self", {datatype: "text", onmsg: piece => this.collect(piece)});
        document.addEventListener("visibilitychange", () => this.request());
    }

    watch(view, options, take) { // replaces the previous view
        this.shown = {view, options, take, serial: ++this.serial};
        this.request();
    }

    request() { // a hidden page requests an empty view, so that the server does no work for it
        const {view, options, serial} = this.shown ?? {view: ""};
        const wanted = document.hidden ? {view: "", options: {}, serial: 0} : {view, options, serial};
        if (this.smq.gettid()) this.smq.pubjson(wanted, 1);
    }

    connected() {
        this.failures = 0;
        this.state("up", "live", "");
        this.request();
    }

    lost(message, canReconnect) {
        this.failures += 1;
        const banner = canReconnect ? "The connection to the server is lost; trying again. The data shown is not current."
            : `The server closed the connection: ${message}. Reload the page to connect again.`;
        if (this.failures > 1 || !canReconnect) this.state("down", "not connected", banner);
        else this.state("wait", "connecting", "");
        if (this.failures % 4 === 2) this.checkLogin();
        return canReconnect ? RETRY_MS : 0;
    }

    async checkLogin() {
        try {
            const answer = await fetch("history.json", {redirect: "manual", cache: "no-store"});
            if (answer.status === 401 || answer.type === "opaqueredirect") {
                this.state("down", "not logged in", "Your login has expired. Reload the page to log in again.");
            }
        } catch { /* the server is not running */ }
    }

    state(kind, text, banner) {
        const link = find("link"), place = find("banner");
        link.dataset.kind = kind;
        setText(link, text);
        place.hidden = !banner;
        place.dataset.kind = "bad";
        setText(place, banner);
        document.body.classList.toggle("stale", kind === "down");
    }

    receivePulse(pulse) {
        for (const listener of this.listeners) listener(pulse);
    }

    collect(piece) { // "SERIAL PART PARTS" in the first line, then a part of the answer
        const end = piece.indexOf("\n"), [serial, part, parts] = piece.slice(0, end).split(" ").map(Number);
        if (part === 1) this.parts = [];
        this.parts.push(piece.slice(end + 1));
        if (part !== parts || this.parts.length !== parts) return;
        const {data, error} = JSON.parse(this.parts.join(""));
        if (!this.shown || serial !== this.shown.serial) return; // for a previous view
        if (data || this.shown.take.length > 1) this.shown.take(data, error);
        this.fault(data ? "" : error); // the hub was closed, for example
    }

    fault(text) {
        if (find("link").dataset.kind !== "up") return;
        find("banner").hidden = !text;
        find("banner").dataset.kind = "warn";
        setText(find("banner"), text);
    }
}

"use strict";

// One node on the page, which is a client of that node.
//
// The topics, all JSON:
//     who  presence, published by each client every second: {name}
//     say  a message: {name, text, page, at}

const NODE_BITS = 21; // an ETID's upper bits are the number of its node
const LINES = 6;
const MAX_SHOWN = 200; // clients: any number may connect
const nodeOf = etid => etid >>> NODE_BITS;
const pageId = Math.random();

function makeElement(name, className, text) {
    return Object.assign(document.createElement(name), {className, textContent: text});
}

function makeClient(node, name, onstate) { // of that node
    const smq = SMQ.Client(SMQ.wsURL(String(node)));
    const publishName = () => smq.pubjson({name}, "who");
    smq.onconnect = smq.onreconnect = () => {
        onstate(true);
        publishName();
    };
    smq.onclose = () => {
        onstate(false);
        return 1000; // ms until the next attempt
    };
    setInterval(publishName, 1000);
    return smq;
}

class NodeView {
    constructor(element, name, onstate) {
        this.number = Number(element.dataset.node);
        this.element = element;
        this.onstate = onstate;
        this.chips = new Map(); // etid -> element
        this.lost = new Map(); // node -> number of its clients that have disconnected in the last 50 ms
        element.append(byId("node").content.cloneNode(true));
        element.querySelector("h2").textContent = element.getAttribute("aria-label");
        this.smq = makeClient(this.number, name, isUp => this.showState(isUp));
        this.smq.subscribe("who", {datatype: "json", onmsg: (who, etid) => this.showClient(who, etid)});
        this.smq.subscribe("say", {datatype: "json", onmsg: (message, etid) => this.showMessage(message, etid)});
        element.querySelector("form").onsubmit = event => this.send(event, name);
        element.querySelector(".kill").onclick = () => this.smq.publish("", 1, "kill -9"); // 1 is the server of this node
        element.querySelector(".add").onclick = () => makeClient(this.number, makeName(), () => {});
    }

    get isUp() {
        return this.element.classList.contains("up");
    }

    showState(isUp) {
        const wasUp = this.isUp;
        this.element.classList.toggle("up", isUp);
        const state = this.element.querySelector(".state");
        state.textContent = isUp ? "running" : "not running, starts soon";
        state.dataset.kind = isUp ? "up" : "down";
        for (const button of this.element.querySelectorAll("button")) button.disabled = !isUp;
        for (const etid of [...this.chips.keys()]) this.hideClient(etid);
        if (isUp !== wasUp) this.showLine(isUp ? "This node is running." : "This node and its clients are gone.");
        this.onstate();
    }

    showClient({name}, etid) {
        if (this.chips.has(etid) || this.chips.size >= MAX_SHOWN) return;
        const node = nodeOf(etid), isHere = node === this.number;
        const chip = makeElement("li", isHere ? "here" : "elsewhere", String(name).slice(0, 20));
        chip.dataset.node = node;
        chip.append(makeElement("small", "", isHere ? "here" : `at node ${node}`));
        this.chips.set(etid, chip);
        this.element.querySelector(".clients").append(...[...this.chips].sort(([one], [other]) => one - other).map(([, item]) => item));
        if (etid !== this.smq.gettid()) this.smq.observe(etid, () => this.onDisconnect(etid)); // works for clients of both nodes
    }

    hideClient(etid) {
        this.chips.get(etid)?.remove();
        this.chips.delete(etid);
    }

    onDisconnect(etid) {
        this.hideClient(etid);
        const node = nodeOf(etid);
        if (!this.lost.has(node)) setTimeout(() => this.showLost(node), 50); // one line for clients that disconnect together
        this.lost.set(node, (this.lost.get(node) || 0) + 1);
    }

    showLost(node) {
        const count = this.lost.get(node);
        this.lost.delete(node);
        this.showLine(count === 1 ? `A client at node ${node} has disconnected.` : `${count} clients at node ${node} have disconnected.`);
    }

    send(event, name) {
        event.preventDefault();
        const field = event.target.elements.text;
        if (field.value) this.smq.pubjson({name, text: field.value, page: pageId, at: performance.now()}, "say");
        field.value = "";
    }

    showMessage({name, text, page, at}, etid) {
        const delay = page === pageId ? `, ${(performance.now() - at).toFixed(1)} ms` : "";
        this.showLine(`${String(name).slice(0, 20)}: ${String(text).slice(0, 200)}`, `from node ${nodeOf(etid)}${delay}`);
    }

    showLine(text, note = "") {
        const log = this.element.querySelector(".log"), line = makeElement("p", "", text);
        if (note) line.append(makeElement("small", "", note));
        log.append(line);
        while (log.childElementCount > LINES) log.firstElementChild.remove();
    }
}

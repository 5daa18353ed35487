// The page of the trace logger: shows what the server traces, line by line.
"use strict";
{
    const HELLO = 1, LINES = 2, TAKEN_OVER = 3;
    const MOST_LINES = 5000; // on the page; the oldest go
    const RETRY_MS = 2000;
    const BAD = /\b(error|failed|traceback|exception)\b/i;
    const HEADER = /^(w\d+: )?[<>] /; // of a request or an answer
    const find = id => document.getElementById(id);
    const [state, lines, filter, hold, take] = ["state", "lines", "filter", "hold", "take"].map(find);
    const service = new URL(document.body.dataset.service, location.href);
    const decoder = new TextDecoder();
    let held = [], rest = "", timer = 0;

    function tell(kind, text) {
        state.dataset.kind = kind;
        state.textContent = text;
        take.hidden = kind !== "taken";
    }

    const suits = text => text.toLowerCase().includes(filter.value.toLowerCase());

    function show(texts) {
        if (hold.getAttribute("aria-pressed") === "true") {
            held = held.concat(texts).slice(-MOST_LINES);
            hold.textContent = `Hold (${held.length})`;
            return;
        }
        const atEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40;
        const added = document.createDocumentFragment();
        for (const text of texts.slice(-MOST_LINES)) {
            const line = document.createElement("p");
            line.textContent = text;
            line.className = HEADER.test(text) ? "soft" : BAD.test(text) ? "bad" : "";
            line.hidden = !suits(text);
            added.append(line);
        }
        lines.append(added);
        while (lines.childElementCount > MOST_LINES) lines.firstElementChild.remove();
        if (atEnd) lines.scrollTop = lines.scrollHeight;
    }

    function received(data) {
        const kind = new Uint8Array(data, 0, 1)[0], text = decoder.decode(new Uint8Array(data, 1));
        if (kind === HELLO) tell("up", "connected");
        else if (kind === TAKEN_OVER) tell("taken", "another viewer has taken over");
        else if (kind === LINES) {
            const texts = (rest + text).split("\n");
            rest = texts.pop();
            show(texts);
        }
    }

    function connect() {
        tell("", "connecting");
        const url = new URL(service);
        url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
        const socket = new WebSocket(url);
        socket.binaryType = "arraybuffer";
        socket.onmessage = event => received(event.data);
        socket.onclose = () => {
            if (state.dataset.kind === "taken") return;
            tell("down", "not connected");
            retryLater();
        };
    }

    function retryLater() {
        clearTimeout(timer);
        timer = setTimeout(ask, RETRY_MS);
    }

    // Whether somebody looks already: he is not thrown out unasked.
    async function ask() {
        try {
            const answer = await fetch(service, {headers: {"X-Requested-With": "XMLHttpRequest"}, cache: "no-store"});
            if (answer.status === 204) connect();
            else if (answer.status === 503) tell("taken", "another viewer is connected");
            else tell("down", answer.status === 401 ? "please log in" : "there is no trace logger here");
        } catch {
            tell("down", "not connected");
            retryLater();
        }
    }

    filter.addEventListener("input", () => {
        for (const line of lines.children) line.hidden = !suits(line.textContent);
        lines.scrollTop = lines.scrollHeight;
    });
    hold.addEventListener("click", () => {
        const isHeld = hold.getAttribute("aria-pressed") !== "true";
        hold.setAttribute("aria-pressed", String(isHeld));
        hold.textContent = "Hold";
        if (!isHeld) show(held.splice(0));
    });
    find("clear").addEventListener("click", () => lines.replaceChildren());
    find("save").addEventListener("click", () => {
        const text = [...lines.children].filter(line => !line.hidden).map(line => `${line.textContent}\n`).join("");
        const link = document.createElement("a");
        link.href = URL.createObjectURL(new Blob([text], {type: "text/plain"}));
        link.download = "trace.txt";
        link.click();
        setTimeout(() => URL.revokeObjectURL(link.href));
    });
    take.addEventListener("click", connect);
    find("tools").addEventListener("submit", event => event.preventDefault());
    ask();
}

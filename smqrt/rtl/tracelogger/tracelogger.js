// The page of the trace logger: shows the trace lines of the server.
"use strict";
{
    const HELLO = 1, LINES = 2, TAKEN_OVER = 3;
    const MAX_LINES = 5000; // on the page; the oldest are removed
    const RETRY_MS = 2000;
    const BAD = /\b(error|failed|traceback|exception)\b/i;
    const HEADER = /^(w\d+: )?[<>] /; // of a request or a response
    const find = id => document.getElementById(id);
    const [state, lines, filter, hold, take] = ["state", "lines", "filter", "hold", "take"].map(find);
    const service = new URL(document.body.dataset.service, location.href);
    const decoder = new TextDecoder();
    let held = [], rest = "", timer = 0;

    function showState(kind, text) {
        state.dataset.kind = kind;
        state.textContent = text;
        take.hidden = kind !== "taken";
    }

    const matches = text => text.toLowerCase().includes(filter.value.toLowerCase());

    function show(texts) {
        if (hold.getAttribute("aria-pressed") === "true") {
            held = held.concat(texts).slice(-MAX_LINES);
            hold.textContent = `Hold (${held.length})`;
            return;
        }
        const atEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40;
        const added = document.createDocumentFragment();
        for (const text of texts.slice(-MAX_LINES)) {
            const line = document.createElement("p");
            line.textContent = text;
            line.className = HEADER.test(text) ? "soft" : BAD.test(text) ? "bad" : "";
            line.hidden = !matches(text);
            added.append(line);
        }
        lines.append(added);
        while (lines.childElementCount > MAX_LINES) lines.firstElementChild.remove();
        if (atEnd) lines.scrollTop = lines.scrollHeight;
    }

    function received(data) {
        const kind = new Uint8Array(data, 0, 1)[0], text = decoder.decode(new Uint8Array(data, 1));
        if (kind === HELLO) showState("up", "connected");
        else if (kind === TAKEN_OVER) showState("taken", "another viewer has taken over");
        else if (kind === LINES) {
            const texts = (rest + text).split("\n");
            rest = texts.pop();
            show(texts);
        }
    }

    function connect() {
        showState("", "connecting");
        const url = new URL(service);
        url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
        const socket = new WebSocket(url);
        socket.binaryType = "arraybuffer";
        socket.onmessage = event => received(event.data);
        socket.onclose = () => {
            if (state.dataset.kind === "taken") return;
            showState("down", "not connected");
            retryLater();
        };
    }

    function retryLater() {
        clearTimeout(timer);
        timer = setTimeout(ask, RETRY_MS);
    }

    // Connects unless another viewer is connected, whom a connection would replace.
    async function ask() {
        try {
            const answer = await fetch(service, {headers: {"X-Requested-With": "XMLHttpRequest"}, cache: "no-store"});
            if (answer.status === 204) connect();
            else if (answer.status === 503) showState("taken", "another viewer is connected");
            else showState("down", answer.status === 401 ? "login required" : "no trace logger at this address");
        } catch {
            showState("down", "not connected");
            retryLater();
        }
    }

    filter.addEventListener("input", () => {
        for (const line of lines.children) line.hidden = !matches(line.textContent);
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

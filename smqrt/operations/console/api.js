// Changes at the server: requests to the interface that scripts use too.

import {find} from "./dom.js";

const TOAST_MS = 6000;
let timer = 0;

export function toast(text) {
    clearTimeout(timer);
    find("toast").textContent = text;
    timer = setTimeout(() => { find("toast").textContent = ""; }, TOAST_MS);
}

// Gives why it was not done; nothing when it was.
export async function post(path, body = {}) {
    try {
        const answer = await fetch(path, {
            method: "POST", cache: "no-store", redirect: "manual",
            headers: {"Content-Type": "application/json", "X-Requested-With": "console"},
            body: JSON.stringify(body),
        });
        if (answer.ok) return "";
        if (answer.status === 401 || answer.type === "opaqueredirect") return "You are not logged in any more. Reload the page to log in.";
        return await reason(answer);
    } catch {
        return "The server did not answer. Check that it runs, and try again.";
    }
}

async function reason(answer) {
    const text = await answer.text();
    try {
        return JSON.parse(text).error || text;
    } catch {
        const isPage = (answer.headers.get("Content-Type") ?? "").startsWith("text/html");
        return isPage || !text ? `The server answered ${answer.status} ${answer.statusText}.` : text;
    }
}

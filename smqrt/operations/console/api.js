// Actions: requests to the HTTP API.

import {find} from "./dom.js";

const TOAST_MS = 6000;
let timer = 0;

export function toast(text) {
    clearTimeout(timer);
    find("toast").textContent = text;
    timer = setTimeout(() => { find("toast").textContent = ""; }, TOAST_MS);
}

// Returns the error as text; an empty text after success.
export async function post(path, body = {}) {
    try {
        const answer = await fetch(path, {
            method: "POST", cache: "no-store", redirect: "manual",
            headers: {"Content-Type": "application/json", "X-Requested-With": "console"},
            body: JSON.stringify(body),
        });
        if (answer.ok) return "";
        if (answer.status === 401 || answer.type === "opaqueredirect") return "Your login has expired. Reload the page to log in.";
        return await reason(answer);
    } catch {
        return "The server did not answer. Check that it is running, and try again.";
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

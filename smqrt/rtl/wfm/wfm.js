// The web file manager. The server generates the list; files are changed by WebDAV: PUT, MKCOL, MOVE, DELETE (RFC 4918).

const $ = (id) => document.getElementById(id);
const entries = $("entries");
const MAX_UPLOADS = 2; // concurrent ones of this page; the server accepts five from all users together

const WORDS = {
    0: "The server can't be reached.",
    401: "You are no longer logged in.",
    403: "That is not allowed here.",
    404: "The file or folder no longer exists.",
    405: "A file or folder with this name already exists.",
    409: "The folder no longer exists.",
    412: "A file or folder with this name already exists.",
    413: "The file is too large.",
    423: "The file is locked: another user is editing it.",
    503: "Too many uploads at the same time; try again later.",
    507: "The disk of the server is full.",
};

const words = (status) => WORDS[status] ?? `The server responded with status ${status}.`;

// The URL of a name in this folder; the page's own URL ends in "/".
const url = (name) => location.pathname + encodeURIComponent(name);

function say(text) {
    $("message").textContent = text;
    $("message").hidden = !text;
}

async function ask(method, target, headers = {}) {
    say("");
    const status = await fetch(target, {method, headers}).then((response) => response.status, () => 0);
    if (status < 200 || status > 299) say(words(status));
    return status >= 200 && status <= 299;
}

const rows = () => [...entries.querySelectorAll("tr")];
const named = (name) => rows().find((row) => row.dataset.name === name);
const rowOf = (element) => element?.closest?.("tr[data-name]");

function count() {
    const all = rows().filter((row) => row.dataset.name !== undefined).length;
    $("count").textContent = all === 1 ? "1 entry" : `${all} entries`;
}

// Shows times in the time zone of the browser.
function localTimes() {
    for (const time of entries.querySelectorAll("time")) {
        const date = new Date(time.dateTime);
        if (!isNaN(date)) time.textContent = date.toLocaleString([], {dateStyle: "medium", timeStyle: "short"});
    }
}

// Fetches the list again and gives the focus to the row `name`, if given.
async function refresh(name) {
    const response = await fetch(location.pathname, {cache: "no-store"}).catch(() => null);
    if (!response?.ok) return say(words(response?.status ?? 0));
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    const fresh = page.getElementById("entries");
    if (!fresh) return location.reload(); // a login page
    entries.replaceChildren(...fresh.children);
    $("nothing").hidden = page.getElementById("nothing").hidden;
    show();
    if (name !== undefined) named(name)?.querySelector("a").focus();
}

function show() {
    localTimes();
    count();
}

// ---- dialogs

// Asks for a text, or without `text` for a confirmation. Returns the text, or null when the dialog was cancelled.
function question(title, text, yes) {
    const dialog = $("ask"), input = $("answer");
    $("question").textContent = title;
    $("yes").textContent = yes;
    input.parentElement.hidden = text === undefined;
    input.required = text !== undefined;
    input.value = text ?? "";
    dialog.showModal();
    if (text === undefined) $("yes").focus();
    else input.setSelectionRange(0, text.lastIndexOf(".") > 0 ? text.lastIndexOf(".") : text.length);
    return new Promise((resolve) => { // not by the event "close": it is late, and may be that of the previous dialog
        dialog.querySelector("form").onsubmit = () => resolve(input.value);
        dialog.oncancel = () => resolve(null);
        $("cancel").onclick = () => {
            resolve(null);
            dialog.close();
        };
    });
}

// Whether a name is valid and not used in this folder; shows the fault.
function free(name) {
    const isValid = name && !/[/\\]/.test(name) && name !== "." && name !== "..";
    say(!isValid ? "A name must not be empty or contain a slash." : named(name) ? WORDS[412] : "");
    return isValid && !named(name);
}

async function newFolder() {
    const name = await question("Name of the new folder", "", "Create");
    if (name !== null && free(name) && await ask("MKCOL", url(name) + "/")) await refresh(name);
}

async function rename(row) {
    const name = row.dataset.name, end = row.dataset.kind === "folder" ? "/" : "";
    const wanted = await question(`New name of “${name}”`, name, "Rename");
    if (wanted === null || wanted === name || !free(wanted)) return;
    const destination = location.origin + url(wanted) + end;
    if (await ask("MOVE", url(name) + end, {Destination: destination, Overwrite: "F"})) await refresh(wanted);
}

async function remove(row) {
    const name = row.dataset.name, isFolder = row.dataset.kind === "folder";
    const next = (row.nextElementSibling ?? row.previousElementSibling)?.dataset.name;
    if (await question(`Delete ${isFolder ? "the folder" : ""} “${name}”${isFolder ? " and everything in it" : ""}?`, undefined, "Delete") === null) return;
    if (await ask("DELETE", url(name) + (isFolder ? "/" : ""))) await refresh(next);
}

const ACTIONS = {rename, delete: remove};

entries.addEventListener("click", (event) => {
    const action = ACTIONS[event.target.dataset?.do];
    if (action) action(rowOf(event.target));
});

// ---- uploads

const waiting = [];
let running = 0;

// Adds a line to the list of uploads.
function line(name) {
    const item = document.createElement("li"), title = document.createElement("span"), state = document.createElement("span");
    const stop = document.createElement("button"), bar = document.createElement("progress");
    title.textContent = name;
    state.textContent = "waiting";
    stop.type = "button";
    stop.className = "plain";
    stop.textContent = "Cancel";
    bar.max = 1;
    bar.value = 0;
    bar.setAttribute("aria-label", `Upload of ${name}`);
    item.append(title, state, stop, bar);
    $("uploads").append(item);
    return {item, state, stop, bar};
}

function send(file, shown) {
    return new Promise((resolve) => {
        const request = new XMLHttpRequest(); // fetch does not report the progress of uploads
        request.upload.onprogress = ({loaded, total}) => {
            shown.bar.value = total ? loaded / total : 0;
            shown.state.textContent = `${Math.floor(100 * shown.bar.value)} %`;
        };
        request.onload = () => resolve(request.status);
        request.onerror = () => resolve(0);
        request.onabort = () => resolve(-1);
        shown.stop.onclick = () => request.abort();
        request.open("PUT", url(file.name));
        request.send(file);
    });
}

const BUSY = 503, RETRY_MS = 2000, TRIES = 30; // a minute: other uploads may be large

async function upload({file, shown}) {
    let status = await send(file, shown);
    for (let tries = 1; status === BUSY && tries < TRIES && shown.item.isConnected; tries++) {
        shown.state.textContent = "waiting for other uploads";
        shown.stop.onclick = () => shown.item.remove();
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
        if (!shown.item.isConnected) return;
        status = await send(file, shown);
    }
    if (status >= 200 && status <= 299 || status === -1) {
        shown.item.remove();
        if (status !== -1) await refresh();
        return;
    }
    shown.state.textContent = words(status);
    shown.state.className = "failed";
    shown.stop.textContent = "Close";
    shown.stop.onclick = () => shown.item.remove();
}

async function work() {
    if (running >= MAX_UPLOADS) return;
    running++;
    while (waiting.length) await upload(waiting.shift());
    running--;
}

function add(files) {
    say("");
    for (const file of files) {
        if (named(file.name)?.dataset.kind === "folder") {
            say(`“${file.name}” is the name of a folder here.`);
            continue;
        }
        const job = {file, shown: line(file.name)};
        job.shown.stop.onclick = () => {
            waiting.splice(waiting.indexOf(job), 1);
            job.shown.item.remove();
        };
        waiting.push(job);
    }
    for (let i = 0; i < MAX_UPLOADS; i++) work();
}

async function addAsked(files) {
    const there = files.filter((file) => named(file.name)?.dataset.kind === "file").map((file) => file.name);
    const title = there.length === 1 ? `Replace “${there[0]}”?` : `Replace ${there.length} existing files?`;
    if (!there.length || await question(title, undefined, "Replace") !== null) add(files);
}

$("upload").onclick = () => $("files").click();
$("newfolder").onclick = newFolder;
$("files").onchange = () => {
    addAsked([...$("files").files]);
    $("files").value = "";
};
window.addEventListener("beforeunload", (event) => {
    if (running) event.preventDefault();
});

// ---- drag and drop

let depth = 0; // of nested elements: each of them receives dragenter and dragleave
const hasFiles = (event) => event.dataTransfer?.types.includes("Files");

document.addEventListener("dragenter", (event) => {
    if (hasFiles(event)) $("drop").hidden = ++depth === 0;
});
document.addEventListener("dragleave", (event) => {
    if (hasFiles(event)) $("drop").hidden = --depth <= 0;
});
document.addEventListener("dragover", (event) => {
    if (hasFiles(event)) event.preventDefault();
});
document.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    depth = 0;
    $("drop").hidden = true;
    const items = [...event.dataTransfer.items].filter((item) => item.kind === "file");
    const folders = items.filter((item) => item.webkitGetAsEntry?.()?.isDirectory).map((item) => item.webkitGetAsEntry().name);
    addAsked([...event.dataTransfer.files].filter((file) => !folders.includes(file.name)));
    if (folders.length) say(`Folders can't be dropped here; create “${folders[0]}” and drop the files into it.`);
});

// ---- keys

function step(by) {
    const all = rows(), at = all.indexOf(document.activeElement?.closest("tr"));
    const next = at < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(Math.max(at + by, 0), all.length - 1);
    all[next]?.querySelector("a").focus();
}

const KEYS = {
    ArrowDown: () => step(1),
    ArrowUp: () => step(-1),
    F2: (row) => row && rename(row),
    Delete: (row) => row && remove(row),
    Backspace: () => document.querySelector(".up a")?.click(),
    u: () => $("files").click(),
    n: newFolder,
};

document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || $("ask").open || event.target.matches("input")) return;
    const act = KEYS[event.key];
    if (!act) return;
    event.preventDefault();
    act(rowOf(document.activeElement));
});

show();

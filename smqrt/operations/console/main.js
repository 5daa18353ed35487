// The frame of the console: navigation and the current view.

import {History} from "./chart.js";
import {find, h, placeholder, setText} from "./dom.js";
import * as format from "./format.js";
import {Live} from "./live.js";
import {overview} from "./views/overview.js";
import {peers} from "./views/peers.js";
import {peer} from "./views/peer.js";
import {topics} from "./views/topics.js";
import {sessions} from "./views/sessions.js";
import {retained} from "./views/retained.js";
import {messages} from "./views/messages.js";
import {applications} from "./views/applications.js";
import {clusters} from "./views/clusters.js";
import {journals} from "./views/journals.js";
import {limits} from "./views/limits.js";
import {closes} from "./views/closes.js";
import {log} from "./views/log.js";

const VIEWS = {overview, peers, peer, topics, sessions, retained, messages, applications, journals, clusters, limits, closes, log};
const PARENTS = {peer: "peers"}; // views that are not in the navigation
const TITLE = "smqrt console";

const live = new Live(), history = new History(), main = find("main"), nav = find("nav"), menu = find("menu");
let open = null; // the current view: {name, close}

/* A view is a function of its context. It fills `main`, and may return a function that closes it.
 *   live, history      the sources of data
 *   parameters         the query in the address
 *   setSubtitle(text)  sets the text beside the title
 *   place              the element to fill
 *   ready()            removes the placeholder; called before the first data is shown
 */
function show() {
    const [, path, query] = /^#\/([a-z]+)(?:\?(.*))?$/.exec(location.hash) ?? [];
    const name = path in VIEWS ? path : "overview", isFirst = open === null;
    open?.close?.();
    document.querySelectorAll("dialog").forEach(dialog => dialog.close());
    const title = h("h1", {}, name[0].toUpperCase() + name.slice(1)), about = h("p", {class: "soft"});
    main.replaceChildren(h("div", {class: "title"}, title, about));
    const wait = main.appendChild(h("section", {class: "section", "aria-hidden": "true"}, placeholder(6)));
    main.setAttribute("aria-busy", "true");
    const ready = () => {
        if (!wait.isConnected) return;
        wait.remove();
        main.removeAttribute("aria-busy");
    };
    const close = VIEWS[name]({
        live, history, ready,
        parameters: new URLSearchParams(query),
        setSubtitle: text => setText(about, text),
        place: main,
    });
    open = {name, close};
    document.title = name === "overview" ? TITLE : `${title.textContent} · ${TITLE}`;
    for (const link of nav.querySelectorAll("a")) {
        if (link.hash === `#/${PARENTS[name] ?? name}`) link.setAttribute("aria-current", "page");
        else link.removeAttribute("aria-current");
    }
    closeMenu();
    if (isFirst) return;
    scrollTo(0, 0);
    main.focus({preventScroll: true}); // a screen reader continues at the start of the new view
}

function closeMenu() {
    nav.classList.remove("open");
    menu.setAttribute("aria-expanded", "false");
}

menu.addEventListener("click", () => {
    const isOpen = nav.classList.toggle("open");
    menu.setAttribute("aria-expanded", String(isOpen));
    if (isOpen) nav.querySelector("a").focus();
});
document.addEventListener("keydown", event => {
    if (event.key !== "Escape" || !nav.classList.contains("open")) return;
    closeMenu();
    menu.focus();
});

function showBadge(place, number) {
    place.hidden = !number;
    const text = format.plural(number ?? 0, COUNTED[place.dataset.badge]);
    if (!number || place.title === text) return;
    place.title = text;
    place.replaceChildren(h("span", {"aria-hidden": "true"}, number > 99 ? "99+" : String(number)), h("span", {class: "unseen"}, ` ${text}`));
}

const COUNTED = {alerts: "alert", apps_failed: "failed application", errors: "error"};

live.listeners.add(({counts, point}) => {
    for (const place of nav.querySelectorAll("[data-if]")) place.hidden = counts[place.dataset.if] === null;
    for (const place of nav.querySelectorAll("[data-count]")) setText(place, format.count(counts[place.dataset.count]));
    for (const place of document.querySelectorAll("[data-badge]")) showBadge(place, counts[place.dataset.badge]);
    history.add(point);
});

addEventListener("hashchange", show);
document.addEventListener("visibilitychange", () => document.hidden || history.load().catch(() => {}));
history.load().catch(() => {});
show();

// The manual: search, copy buttons, the contents list. Without scripts, the pages have the same text.
"use strict";
(() => {
    const TITLE = 8, PART = 0.5, HEADING = 5, WHOLE_WORD = 2, MAX_OCCURRENCES = 4; // as in smqrt/manual/pages.py
    const MAX_RESULTS = 40, MAX_RESULTS_PER_PAGE = 3, SNIPPET = 160;
    const WORD = "[\\p{L}\\p{N}]", WORD_OR_LINE = "[\\p{L}\\p{N}_]";

    const form = document.querySelector("form.search");
    const input = form.querySelector("input");
    const panel = form.querySelector(".results");

    // ---- the index, loaded at the first search

    let loading = null;

    function load() {
        loading ??= new Promise((resolve, reject) => {
            const script = document.createElement("script");
            script.src = form.dataset.index;
            script.onload = () => resolve(prepared(window.smqrtManual));
            script.onerror = () => { loading = null; script.remove(); reject(new Error("no index")); };
            document.head.append(script);
        });
        return loading;
    }

    function prepared({pages, sections}) {
        return sections.map(([number, anchor, heading, text]) => {
            const [name, title, weight] = pages[number];
            return {
                name, title, weight, anchor, heading, text,
                lowerPage: `${title}\n${name}`.toLowerCase(),
                lowerHeading: anchor ? heading.toLowerCase() : "",
                lowerText: text.toLowerCase(),
            };
        });
    }

    // ---- sections that match a query

    function pattern(word, flags) {
        const escaped = word.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");
        return new RegExp(`(?<!${WORD})${escaped}(${WORD_OR_LINE})?`, flags);
    }

    function points(word, text) {
        let times = 0, whole = false;
        for (const match of text.matchAll(word)) {
            times += 1;
            whole ||= match[1] === undefined;
        }
        return [times ? (whole ? WHOLE_WORD : 1) : 0, times];
    }

    function score(section, words) {
        let sum = 0, isHere = !section.anchor;
        for (const word of words) {
            const [inText, times] = points(word, section.lowerText);
            const own = HEADING * points(word, section.lowerHeading)[0]
                + Math.min(times, MAX_OCCURRENCES) * inText / WHOLE_WORD;
            const all = own + (section.anchor ? PART : TITLE) * points(word, section.lowerPage)[0];
            if (!all) return 0;
            sum += all;
            isHere ||= own > 0;
        }
        return isHere ? sum * section.weight : 0;
    }

    function find(sections, query) {
        const words = query.toLowerCase().split(/\s+/).filter(Boolean).map(word => pattern(word, "gu"));
        if (!words.length) return [];
        const ofPage = new Map();
        return sections.map(section => [score(section, words), section])
            .filter(([sum]) => sum)
            .sort(([a], [b]) => b - a)
            .map(([, section]) => section)
            .filter(({name}) => {
                ofPage.set(name, (ofPage.get(name) ?? 0) + 1);
                return ofPage.get(name) <= MAX_RESULTS_PER_PAGE;
            });
    }

    // ---- results

    function element(tag, className, ...children) {
        const made = document.createElement(tag);
        if (className) made.className = className;
        made.append(...children);
        return made;
    }

    function marked(text, query) {
        const words = query.split(/\s+/).filter(Boolean).map(word => pattern(word, "iu").source);
        const parts = [];
        let end = 0;
        for (const match of text.matchAll(new RegExp(words.join("|"), "giu"))) {
            parts.push(text.slice(end, match.index), element("mark", "", match[0]));
            end = match.index + match[0].length;
        }
        return [...parts, text.slice(end)];
    }

    function snippet(text, query) {
        const words = query.split(/\s+/).filter(Boolean).map(word => pattern(word, "iu"));
        const lines = text.split("\n");
        const counts = lines.map(line => words.filter(word => word.test(line)).length);
        const line = lines[counts.indexOf(Math.max(...counts))];
        if (line.length <= SNIPPET) return line;
        const places = words.map(word => line.search(word)).filter(place => place >= 0);
        let begin = Math.max(0, Math.min(...places, line.length) - SNIPPET / 3);
        if (!places.length) begin = 0;
        if (begin) begin = line.indexOf(" ", begin) + 1;
        const part = line.slice(begin, begin + SNIPPET);
        return `${begin ? "… " : ""}${part.trim()}${begin + SNIPPET < line.length ? " …" : ""}`;
    }

    function result({name, title, anchor, heading, text}, query) {
        const link = element("a");
        link.href = form.dataset.pages + name + form.dataset.suffix + (anchor ? `#${encodeURIComponent(anchor)}` : "");
        const short = title.replace(/:\s.*/, match => /^\d+:/.test(title) ? match : "");
        const place = element("span", "place", ...marked(short, query));
        if (anchor) place.append(" › ", ...marked(heading, query));
        link.append(place, element("span", "snippet", ...marked(snippet(text, query), query)));
        return element("li", "", link);
    }

    function show(content) {
        panel.replaceChildren(...content);
        panel.hidden = !content.length;
    }

    let asked = 0; // the number of the newest query; results of older ones are not shown

    async function search() {
        const query = input.value.trim(), number = ++asked;
        if (!query) return show([]);
        let sections;
        try {
            sections = await load();
        } catch {
            return show([element("p", "soft", "The search index can't be loaded.")]);
        }
        if (number !== asked) return;
        const found = find(sections, query);
        const shown = found.slice(0, MAX_RESULTS);
        const status = element("p", "soft", found.length ? `${found.length} places` : `Nothing found for “${query}”.`);
        if (found.length === 1) status.textContent = "1 place";
        if (found.length > shown.length) status.textContent += `, the first ${shown.length} are listed`;
        status.setAttribute("role", "status");
        show([status, element("ul", "", ...shown.map(section => result(section, query)))]);
        panel.scrollTop = 0;
    }

    function links() {
        return [...panel.querySelectorAll("a")];
    }

    function move(step) {
        const all = [input, ...links()];
        const next = all[all.indexOf(document.activeElement) + step];
        next?.focus();
    }

    function close() {
        asked += 1;
        show([]);
    }

    form.addEventListener("submit", async event => {
        event.preventDefault();
        await search();
        const first = links()[0];
        if (first) {
            first.click();
            close();
        }
    });
    input.addEventListener("focus", () => { load().catch(() => {}); if (panel.hidden) search(); });
    input.addEventListener("input", search);
    form.addEventListener("keydown", event => {
        const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
        if (step) {
            event.preventDefault();
            move(step);
        } else if (event.key === "Escape") {
            event.preventDefault();
            input.focus();
            input.value = "";
            close();
        }
    });
    panel.addEventListener("click", event => { if (event.target.closest("a")) close(); });
    document.addEventListener("pointerdown", event => { if (!form.contains(event.target)) close(); });
    form.addEventListener("focusout", event => {
        if (event.relatedTarget && !form.contains(event.relatedTarget)) close();
    });
    document.addEventListener("keydown", event => {
        const writes = event.target.closest?.("input, textarea, select, [contenteditable]");
        if (event.key === "/" && !writes && !event.ctrlKey && !event.metaKey && !event.altKey) {
            event.preventDefault();
            input.focus();
            input.select();
        }
    });
    if (matchMedia("(hover: hover)").matches) input.placeholder = "Search (press /)"; // there is a keyboard
    form.hidden = false;

    // ---- copy buttons

    function codeOf(block) {
        const text = block.textContent;
        if (!block.querySelector(".language-console")) return text;
        const commands = text.split("\n").filter(line => line.startsWith("$ ")).map(line => line.slice(2));
        return commands.length ? `${commands.join("\n")}\n` : text;
    }

    async function copy(text) {
        if (navigator.clipboard) return navigator.clipboard.writeText(text);
        const area = element("textarea", "copied", text); // pages without TLS have no navigator.clipboard
        document.body.append(area);
        area.select();
        const done = document.execCommand("copy");
        area.remove();
        if (!done) throw new Error("not copied");
    }

    for (const block of document.querySelectorAll("main pre")) {
        const button = element("button", "copy", "Copy");
        button.type = "button";
        button.addEventListener("click", async () => {
            try {
                await copy(codeOf(block));
                button.textContent = "Copied";
            } catch {
                button.textContent = "Not copied";
            }
            setTimeout(() => { button.textContent = "Copy"; }, 1500);
        });
        const frame = element("div", "code");
        block.replaceWith(frame);
        frame.append(block, button);
    }

    // ---- blocks that are wider than the screen can be scrolled with the keyboard

    const reachable = () => {
        for (const box of document.querySelectorAll("main pre, .wide")) {
            if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
            else box.removeAttribute("tabindex");
        }
    };
    addEventListener("resize", reachable);
    // a table has no width before it comes near the screen, see manual.css
    addEventListener("contentvisibilityautostatechange", () => requestAnimationFrame(reachable), true);
    reachable();

    // ---- the list of pages, scrolled to the current page

    const list = document.getElementById("all-pages");
    const current = list?.querySelector("[aria-current]");
    if (current && list.scrollHeight > list.clientHeight) {
        const offset = current.getBoundingClientRect().top - list.getBoundingClientRect().top;
        if (offset > list.clientHeight - 60) list.scrollTop = offset - list.clientHeight / 2;
    }

    // ---- the contents list: open when it has its own column; marks the current section

    const contents = document.querySelector("details.contents");
    const wide = matchMedia("(min-width: 75rem)");
    if (contents) {
        const fit = () => { contents.open = wide.matches; };
        wide.addEventListener("change", fit);
        fit();
        contents.addEventListener("click", event => {
            if (event.target.closest("a") && !wide.matches) contents.open = false;
        });
        const byId = new Map([...contents.querySelectorAll("a")].map(link => [link.hash.slice(1), link]));
        const headings = [...document.querySelectorAll("main h2[id], main h3[id]")];
        const look = () => {
            const above = headings.filter(heading => heading.getBoundingClientRect().top < 120);
            const current = byId.get(encodeURI(above.at(-1)?.id ?? ""));
            for (const link of byId.values()) link.classList.toggle("current", link === current);
            if (wide.matches && current) {
                const {top, bottom} = current.getBoundingClientRect(), frame = contents.getBoundingClientRect();
                if (top < frame.top || bottom > frame.bottom) contents.scrollTop += top - frame.top - frame.height / 2;
            }
        };
        let waits = false;
        document.addEventListener("scroll", () => {
            if (!waits) requestAnimationFrame(() => { waits = false; look(); });
            waits = true;
        }, {passive: true});
        look();
    }
})();

// The last errors and warnings of the log, the newest first.

import {empty, foreign, h, mark, section} from "../dom.js";
import * as format from "../format.js";

const KINDS = {ERROR: ["bad", "error"], CRITICAL: ["bad", "critical"], WARNING: ["warn", "warning"]};

export function log({live, place, ready, setSubtitle}) {
    const list = h("ol", {class: "entries"}), shown = new Map();
    const none = empty("No errors and no warnings", "The last ones since the start of the server are shown here.");
    const part = section("Errors and warnings", {}, h("p", {class: "soft"}, "The newest first"));
    part.append(list, none);
    live.watch("log", {}, data => {
        if (!part.isConnected) {
            ready();
            place.append(part);
        }
        setSubtitle(`${format.plural(data.errors, "error")}, ${format.plural(data.warnings, "warning")}`);
        none.hidden = Boolean(data.rows.length);
        for (const row of data.rows) {
            const key = `${row.worker} ${row.number} ${row.at}`;
            if (!shown.has(key)) shown.set(key, {at: row.at, element: entry(row)});
        }
        const rows = [...shown].sort(([, one], [, other]) => one.at < other.at ? 1 : one.at > other.at ? -1 : 0);
        for (const [key] of rows.splice(data.kept)) shown.delete(key);
        const elements = rows.map(([, one]) => one.element);
        if (elements.some((one, index) => one !== list.children[index])) list.replaceChildren(...elements);
    });
}

function entry({at: moment, level, logger, text, worker}) {
    const at = Date.parse(moment) / 1000, source = worker === undefined ? logger : `worker ${worker} · ${logger}`;
    const [kind, word] = KINDS[level] ?? ["off", level.toLowerCase()], [first, ...rest] = text.split("\n");
    const more = rest.length && h("details", {}, h("summary", {}, `${rest.length} more lines`), h("pre", {}, foreign(rest.join("\n"))));
    return h("li", {}, h("time", {title: format.moment(at)}, format.time(at)), mark(kind, word),
        h("div", {}, h("pre", {}, foreign(first)), more || null, h("span", {class: "small soft"}, source)));
}

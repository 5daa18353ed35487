// Limits: their use beside the bound, how often each was reached, and the setting that changes it.

import {foreign, h, section, setText} from "../dom.js";
import * as format from "../format.js";
import {Table} from "../table.js";
import {breakable, foreignName} from "./parts.js";

export function limits({live, place, ready, setSubtitle}) {
    const used = limitTable("Limits in use", true), unused = limitTable("Unused limits", false);
    const note = h("p", {class: "note"}, "A client that reaches a limit is refused, with a reason where the protocol has one. “In use” is the fullest hub, client, address or worker.");
    const part = section("In use or reached"), summary = h("summary", {class: "section-head"});
    part.append(used.element, note);
    const rest = h("details", {class: "section"}, summary, unused.element);
    live.watch("limits", {}, data => {
        if (!part.isConnected) {
            ready();
            place.append(part, rest);
        }
        const reached = data.rows.filter(row => row.reached).length;
        setSubtitle(reached ? `${reached} of ${data.rows.length} reached so far` : `none of ${data.rows.length} reached`);
        const shown = data.rows.filter(row => row.reached || row.used), others = data.rows.filter(row => !row.reached && !row.used);
        used.update(shown);
        unused.update(others);
        rest.hidden = !others.length;
        setText(summary, `${format.plural(others.length, "further limit")}, not reached`);
    });
}

const NONE = "–";

function quantity(value, row) {
    if (typeof value === "string") return value; // "unlimited"
    return row.unit === "bytes" ? format.bytes(value) : format.count(value);
}

function limitTable(caption, isUsed) {
    return new Table({
        caption, key: row => row.name,
        none: ["No limit is in use", "No client is connected."],
        columns: [
            {label: "Limit", named: true, signature: row => [row.title, row.name, row.setting], cell: row => [
                h("span", {}, breakable(row.title)), h("span", {class: "second mono wide"}, row.name),
                row.setting && h("span", {class: "second mono narrow"}, foreignName(row.setting)),
            ]},
            isUsed && {label: "In use", number: true, text: row => quantity(row.used, row), alert: isNearlyFull},
            {label: "Limit", number: true, text: row => quantity(row.bound, row)},
            isUsed && {label: "Reached", number: true, text: row => format.count(row.reached), alert: row => row.lately > 0},
            isUsed && {label: "Last", wide: true, signature: row => [row.last, row.last_at], cell: row => row.last_at
                ? [h("span", {}, format.moment(Date.parse(row.last_at) / 1000)), h("span", {class: "second"}, foreign(row.last))]
                : h("span", {class: "soft"}, NONE)},
            {label: "Setting", wide: true, cell: row => row.setting ? h("code", {}, row.setting) : h("span", {class: "soft"}, "none")},
        ].filter(Boolean),
    });
}

const isNearlyFull = ({used, bound}) => typeof bound === "number" && used !== null && used >= 0.9 * bound;

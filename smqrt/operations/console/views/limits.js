// Limits: rule, how often each was reached, and the setting that changes it.

import {foreign, h} from "../dom.js";
import * as format from "../format.js";
import {Table} from "../table.js";

export function limits({live, place, ready, setSubtitle}) {
    const table = new Table({
        caption: "Limits", key: row => row.name,
        none: ["No limits", "This server has none."],
        columns: [
            {label: "Limit", cell: row => [h("span", {}, row.rule), h("span", {class: "second mono"}, row.name)]},
            {label: "Reached", number: true, text: row => format.count(row.reached), alert: row => row.lately > 0},
            {label: "Last", number: true, wide: true, text: row => row.last_at ? format.moment(Date.parse(row.last_at) / 1000) : "–"},
            {label: "Last refused", wide: true, cell: row => row.last ? foreign(row.last) : h("span", {class: "soft"}, "–")},
            {label: "Setting", cell: row => row.setting ? h("code", {}, row.setting) : h("span", {class: "soft"}, "none")},
        ],
    });
    const note = h("p", {class: "note"}, "Limits that were reached come first. A client that reaches a limit is refused, with a reason where the protocol has one.");
    const part = h("section", {class: "section", "aria-label": "Limits"}, note, table.element);
    live.watch("limits", {}, data => {
        if (!part.isConnected) {
            ready();
            place.append(part);
        }
        const reached = data.rows.filter(row => row.reached).length;
        setSubtitle(reached ? `${reached} of ${data.rows.length} reached so far` : `none of ${data.rows.length} reached`);
        table.update(data.rows);
    });
}

// Closed connections, grouped by reason: counts, remedies, and the last clients of each.

import {empty, foreign, h, mark, setText} from "../dom.js";
import * as format from "../format.js";
import {Table} from "../table.js";
import {address, foreignName} from "./parts.js";

export function closes({live, place, ready, setSubtitle}) {
    const none = empty("No closed connections", "The reasons and their remedies will be shown here.");
    const part = h("section", {class: "section", "aria-label": "Close reasons"}, none), shown = new Map();
    live.watch("closes", {}, data => {
        if (!part.isConnected) {
            ready();
            place.append(part);
        }
        setSubtitle(`${format.plural(data.total, "connection")} closed since the start`);
        none.hidden = Boolean(data.reasons.length);
        for (const row of data.reasons) {
            if (!shown.has(row.reason)) shown.set(row.reason, new Reason(row));
            shown.get(row.reason).update(row);
        }
        const elements = data.reasons.map(row => shown.get(row.reason).element);
        const isSorted = elements.every((element, index) => element === part.children[index + 1]); // the first one is `none`
        if (!isSorted) part.append(...elements);
    });
}

class Reason {
    constructor({reason, what, remedy, setting, is_trouble: isTrouble}) {
        this.count = h("span", {class: "count"});
        this.last = h("span", {class: "soft small last"});
        this.table = clientTable(reason);
        this.element = h("details", {class: "reason"},
            h("summary", {}, mark(isTrouble ? "warn" : "off", reason), h("span", {class: "soft what"}, what), this.last, this.count),
            h("div", {class: "inside"}, h("p", {}, remedy), setting && h("p", {class: "soft"}, "Setting: ", h("code", {}, setting))),
            this.table.element);
    }

    update({count, clients}) {
        setText(this.count, `${format.count(count)} ×`);
        setText(this.last, clients.length ? `last ${format.time(Date.parse(clients[0].at) / 1000)}` : "");
        this.table.update(clients);
    }
}

function clientTable(reason) {
    return new Table({
        caption: `Last clients: ${reason}`, key: row => [row.uid, row.user, row.address, row.detail, row.worker].join("\n"),
        none: ["Not kept", "The last 1,000 closed connections are kept."],
        columns: [
            {label: "Peer", named: true, signature: row => [row.uid, row.user, row.detail], cell: row => [foreignName(row.uid), row.user && h("span", {class: "second"}, "user ", foreign(row.user)), row.detail && h("span", {class: "second"}, foreign(row.detail))]},
            {label: "Times", number: true, text: row => format.count(row.times)},
            {label: "Last", text: row => format.time(Date.parse(row.at) / 1000)},
            {label: "Address", wide: true, signature: row => row.address, cell: address},
            {label: "Connected for", number: true, wide: true, text: row => row.connected_s === null ? "not accepted" : format.duration(row.connected_s)},
        ],
    });
}

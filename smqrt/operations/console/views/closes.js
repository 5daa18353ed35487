// Why connections ended: how often for each reason with what to do about it, and the last of them.

import {foreign, h, mark, section} from "../dom.js";
import * as format from "../format.js";
import {Table} from "../table.js";
import {address, foreignName} from "./parts.js";

export function closes({live, place, ready, say: tell}) {
    const reasons = reasonTable(), last = lastTable();
    const parts = [section("Reasons"), section("Last connections that ended")];
    parts[0].append(reasons.element);
    parts[1].append(last.element);
    live.watch("closes", {}, data => {
        if (!parts[0].isConnected) {
            ready();
            place.append(...parts);
        }
        tell(`${format.plural(data.total, "connection")} ended since the start`);
        reasons.update(data.reasons);
        last.update(data.rows);
    });
}

function reasonTable() {
    return new Table({
        caption: "Reasons for which connections ended", key: row => row.reason,
        none: ["No connection has ended", "When one does, this says why and what to do about it."],
        columns: [
            {label: "Reason", cell: row => [mark(row.is_trouble ? "warn" : "off", row.reason), h("span", {class: "second"}, row.what),
                h("span", {class: "second narrow"}, row.remedy, row.setting && [" Setting: ", h("code", {}, row.setting)])]},
            {label: "Times", number: true, text: row => format.count(row.count)},
            {label: "What to do", wide: true, cell: row => row.remedy},
            {label: "Setting", wide: true, cell: row => row.setting ? h("code", {}, row.setting) : h("span", {class: "soft"}, "none")},
        ],
    });
}

function lastTable() {
    return new Table({
        caption: "Connections that ended, the last first", key: row => `${row.worker} ${row.number}`,
        none: ["None yet", "The last hundred will be here."],
        columns: [
            {label: "When", text: row => format.time(Date.parse(row.at) / 1000)},
            {label: "Peer", cell: row => [foreignName(row.uid), row.user && h("span", {class: "second"}, "user ", foreign(row.user))]},
            {label: "Address", wide: true, cell: address},
            {label: "Was connected", number: true, wide: true, text: row => row.connected_s === null ? "never let in" : format.duration(row.connected_s)},
            {label: "Reason", cell: row => [h("span", {}, row.reason), row.detail && h("span", {class: "second"}, foreign(row.detail))]},
        ],
    });
}

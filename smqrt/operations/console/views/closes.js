// Closed connections: the reasons with their remedies, and the last connections.

import {foreign, h, mark, section} from "../dom.js";
import * as format from "../format.js";
import {Table} from "../table.js";
import {address, foreignName} from "./parts.js";

export function closes({live, place, ready, setSubtitle}) {
    const reasons = reasonTable(), last = lastTable();
    const parts = [section("Reasons"), section("Last closed connections")];
    parts[0].append(reasons.element);
    parts[1].append(last.element);
    live.watch("closes", {}, data => {
        if (!parts[0].isConnected) {
            ready();
            place.append(...parts);
        }
        setSubtitle(`${format.plural(data.total, "connection")} closed since the start`);
        reasons.update(data.reasons);
        last.update(data.rows);
    });
}

function reasonTable() {
    return new Table({
        caption: "Close reasons", key: row => row.reason,
        none: ["No closed connections", "The reasons and their remedies will be shown here."],
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
        caption: "Closed connections, the newest first", key: row => `${row.worker} ${row.number}`,
        none: ["No closed connections", "The last hundred will be shown here."],
        columns: [
            {label: "When", text: row => format.time(Date.parse(row.at) / 1000)},
            {label: "Peer", cell: row => [foreignName(row.uid), row.user && h("span", {class: "second"}, "user ", foreign(row.user))]},
            {label: "Address", wide: true, cell: address},
            {label: "Connected for", number: true, wide: true, text: row => row.connected_s === null ? "not accepted" : format.duration(row.connected_s)},
            {label: "Reason", cell: row => [h("span", {}, row.reason), row.detail && h("span", {class: "second"}, foreign(row.detail))]},
        ],
    });
}

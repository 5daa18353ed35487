// Clusters: hubs, links to other nodes, and their addresses.

import {foreign, h, mark, section} from "../dom.js";
import * as format from "../format.js";
import {Table} from "../table.js";

export function clusters({live, place, ready, setSubtitle}) {
    const tables = [hubTable(), linkTable(), addressTable()];
    const parts = ["Hubs in clusters", "Links", "Addresses of nodes"].map(title => section(title));
    parts.forEach((part, index) => part.append(tables[index].element));
    live.watch("clusters", {}, data => {
        if (!parts[0].isConnected) {
            ready();
            place.append(...parts);
        }
        setSubtitle(`${format.plural(data.links.length, "link")}, ${format.plural(data.hubs.length, "hub")} in clusters`);
        [data.hubs, data.links, data.addresses].forEach((rows, index) => tables[index].update(rows));
    });
}

function hubTable() {
    return new Table({
        caption: "Hubs in clusters", key: row => `${row.own} ${row.cluster}`,
        none: ["No hub is in a cluster", "hub.create{cluster=\"chat\"} joins hubs of several processes: see “Clusters” in the manual."],
        columns: [
            {label: "Cluster", signature: row => [row.cluster, row.app, row.own], cell: row => [h("span", {class: "name"}, foreign(row.cluster)), h("span", {class: "second"}, `node ${row.own}, hub ${row.hub}`)]},
            {label: "State", signature: row => [row.nodes.length, row.joining.length], cell: row => row.joining.length ? mark("off", "joining") : row.nodes.length ? mark("good", "joined") : mark("off", "alone")},
            {label: "Other nodes", number: true, text: row => format.count(row.nodes.length)},
            {label: "Clients here", number: true, wide: true, text: row => format.count(row.peers)},
            {label: "Clients elsewhere", number: true, wide: true, text: row => format.count(row.phantoms)},
            {label: "Topics subscribed elsewhere", number: true, wide: true, text: row => format.count(row.interest)},
            {label: "Lost", number: true, text: row => format.count(row.lost.link_lost + row.lost.link_slow)},
        ],
    });
}

function linkTable() {
    return new Table({
        caption: "Links to other nodes", key: row => `${row.own} ${row.node}`,
        none: ["No links", "No other node is connected."],
        columns: [
            {label: "Node", signature: row => [row.node, row.via, row.own], cell: row => [h("span", {class: "name"}, `${row.node}`), h("span", {class: "second mono"}, foreign(row.via))]},
            {label: "Up", number: true, text: row => format.duration(row.since_s)},
            {label: "Round trip", number: true, text: row => row.round_trip_ms === null ? "–" : `${format.milliseconds(row.round_trip_ms)} ms`},
            {label: "Queued", number: true, text: row => format.bytes(row.queued_bytes)},
            {label: "Sent", number: true, wide: true, text: row => format.bytes(row.sent_bytes)},
            {label: "Received", number: true, wide: true, text: row => format.bytes(row.received_bytes)},
        ],
    });
}

function addressTable() {
    return new Table({
        caption: "Addresses of other nodes", key: row => `${row.own} ${row.address}`,
        none: ["No addresses", "Workers of one server need no addresses."],
        columns: [
            {label: "Address", signature: row => [row.address, row.why], cell: row => [h("span", {class: "name"}, foreign(row.address)), row.why && h("span", {class: "second"}, foreign(row.why))]},
            {label: "State", signature: row => row.state, cell: row => mark(row.state === "not linked" ? "bad" : "good", row.state)},
        ],
    });
}

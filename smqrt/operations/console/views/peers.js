// Peers: search, order and pages. A row opens the page of a client.

import {foreign, h, setText} from "../dom.js";
import * as format from "../format.js";
import {Table} from "../table.js";
import {address, countOfHub, foreignName, HubChoice, search} from "./parts.js";

const PAGE = 50;

export function peers({live, place, ready, parameters, setSubtitle}) {
    const options = {hub: parameters.get("hub") ?? "", find: "", sort: "since", page: 0};
    const change = changes => {
        Object.assign(options, {page: 0}, changes);
        table.sorted(options.sort);
        watch();
    };
    const hub = new HubChoice(value => change({hub: value}));
    const table = peerTable(sort => change({sort}), options.sort);
    const position = h("span", {role: "status"});
    const [before, after] = [["Previous", -1], ["Next", 1]].map(([text, step]) =>
        h("button", {type: "button", click: () => change({page: options.page + step})}, text));
    const tools = h("div", {class: "tools"}, search("Search", "uid, user, address or etid", value => change({find: value})), hub.element);
    const part = h("section", {class: "section", "aria-label": "Peers"}, tools, table.element, h("div", {class: "pager"}, position, before, after));

    function update(data) {
        if (!part.isConnected) {
            ready();
            place.append(part);
        }
        if (data.hub !== undefined) options.hub = String(data.hub);
        hub.update(data.hubs, data.hub);
        table.update(data.rows);
        const first = options.page * PAGE, last = first + data.rows.length;
        setText(position, data.rows.length ? `${format.count(first + 1)}–${format.count(last)} of ${format.count(data.matching)}` : "");
        before.disabled = !options.page;
        after.disabled = last >= (data.reachable ?? 0);
        setSubtitle(countOfHub(data, "peer"));
        setText(table.none.firstChild, options.find ? "No peer matches" : "No peers");
        setText(table.none.lastChild, options.find ? "Search for a part of a uid, a user name, an address or an etid." : "Connected clients are shown here. “Quick start” in the manual shows how to connect one.");
    }
    const watch = () => live.watch("peers", {...options}, update);
    watch();
}

function peerTable(onsort, sorted) {
    return new Table({
        caption: "Peers", key: row => row.id, onsort, sorted,
        none: ["No peers", ""],
        columns: [
            {label: "Peer", named: true, signature: row => [row.uid, row.user], cell: row => [
                h("a", {class: "name opener", href: `#/peer?id=${row.id}`}, foreignName(row.uid)),
                row.user && h("span", {class: "second"}, "user ", foreign(row.user)),
            ]},
            {label: "Address", wide: true, signature: row => row.address, cell: row => [address(row), h("span", {class: "second"}, row.transport)]},
            {label: "Connected", sort: "since", number: true, text: row => format.duration(row.connected_s)},
            {label: "Subscriptions", sort: "subscriptions", number: true, wider: true, text: row => format.count(row.subscriptions)},
            {label: "Received/s", number: true, wide: true, text: row => format.bytes(row.in_bytes_per_s)},
            {label: "Sent/s", number: true, wide: true, text: row => format.bytes(row.out_bytes_per_s)},
            {label: "Queue", sort: "queue", number: true, text: row => format.bytes(row.queued_bytes)},
            {label: "Dropped", sort: "dropped", number: true, text: row => format.count(row.dropped), alert: row => row.dropped > 0},
        ],
    });
}

// Peers: search, order and pages; the details of a client; disconnect.

import {post, toast} from "../api.js";
import {confirm, dialog} from "../dialog.js";
import {empty, foreign, h, section, setText} from "../dom.js";
import * as format from "../format.js";
import {Table} from "../table.js";
import {address, foreignName, HubChoice, search} from "./parts.js";

const PAGE = 50;

export function peers({live, place, ready, parameters, setSubtitle}) {
    const options = {hub: parameters.get("hub") ?? "", find: "", sort: "since", page: 0};
    const change = changes => {
        Object.assign(options, {page: 0}, changes);
        table.sorted(options.sort);
        watch();
    };
    const hub = new HubChoice(value => change({hub: value}));
    const table = peerTable(sort => change({sort}), peer => details(live, peer, () => part.isConnected && watch()), options.sort);
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
        setSubtitle(format.plural(data.total, "peer"));
        setText(table.none.firstChild, options.find ? "No peer matches" : "No peers");
        setText(table.none.lastChild, options.find ? "Search for a part of a uid, a user name, an address or an etid." : "Connected clients are shown here. “Quick start” in the manual shows how to connect one.");
    }
    const watch = () => live.watch("peers", {...options}, update);
    watch();
}

function peerTable(onsort, onopen, sorted) {
    return new Table({
        caption: "Peers", key: row => row.id, onsort, sorted,
        none: ["No peers", ""],
        columns: [
            {label: "Peer", signature: row => [row.uid, row.user], cell: row => [
                h("button", {type: "button", class: "plain name", "aria-haspopup": "dialog", click: () => onopen(row)}, foreignName(row.uid)),
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

function sessionTime(expiry_s) {
    return expiry_s ? `session kept for ${format.duration(expiry_s)} without a connection` : "session ends with the connection";
}

const FACTS = [
    ["Address", peer => peer.address && address(peer)],
    ["Transport", peer => peer.transport],
    ["User", peer => peer.user && foreign(peer.user)],
    ["ETID", peer => String(peer.etid)],
    ["Description", peer => peer.info && foreign(peer.info)],
    ["MQTT", peer => peer.mqtt && `version ${peer.mqtt.version}, ${sessionTime(peer.mqtt.expiry_s)}`],
    ["Messages", peer => peer.mqtt && `${format.count(peer.mqtt.in_flight)} in flight, ${format.count(peer.mqtt.waiting)} waiting, ${format.count(peer.mqtt.lost)} lost`],
    ["Connected", peer => `${format.duration(peer.connected_s)}, since ${format.moment(Date.parse(peer.since) / 1000)}`],
    ["Traffic", peer => `${format.bytes(peer.in_bytes_per_s)}/s received, ${format.bytes(peer.out_bytes_per_s)}/s sent`],
    ["Send queue", peer => format.bytes(peer.queued_bytes)],
    ["Dropped", peer => peer.dropped ? `${format.plural(peer.dropped, "message")}: slow consumer` : "nothing"],
];

function details(live, row, back) {
    const facts = h("dl", {class: "facts"}), topics = h("ul", {class: "chips"});
    const button = h("button", {type: "button", class: "danger", click: () => confirmDisconnect()}, "Disconnect …");
    const inside = h("div", {}, facts);
    const list = h("div", {}, h("h3", {}, "Subscriptions"), topics);
    const open = dialog(row.uid ? foreign(row.uid) : foreignName(""), [inside, list, h("div", {class: "actions"}, button)], back);
    const show = peer => {
        const signature = JSON.stringify(peer);
        if (facts.signature === signature) return;
        facts.signature = signature;
        facts.replaceChildren(...FACTS.map(([name, value]) => [name, value(peer)]).filter(([, value]) => value)
            .flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
        const names = peer.topics ?? [];
        topics.replaceChildren(...names.map(name => h("li", {}, foreign(name, {title: name}))));
        if (peer.subscriptions > names.length) topics.append(h("li", {class: "soft"}, `and ${format.count(peer.subscriptions - names.length)} more`));
        list.hidden = !peer.subscriptions;
    };
    show(row);
    live.watch("peer", {id: row.id}, (peer, error) => {
        if (peer) return show(peer);
        inside.replaceChildren(empty("The client has disconnected", error ?? ""));
        list.hidden = button.hidden = true;
    });
    function confirmDisconnect() {
        confirm(h("span", {}, "Disconnect ", foreignName(row.uid), "?"), "Its connection is closed. Most clients reconnect: to block a client, change its login or its rights.", "Disconnect", async () => {
            const error = await post(`/api/v1/peers/${row.id}/disconnect`);
            if (!error) {
                open.close();
                toast("Disconnected.");
            }
            return error;
        });
    }
}

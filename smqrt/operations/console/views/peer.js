// One peer: its figures, subscriptions, last messages and closed connections; disconnect.

import {post, toast} from "../api.js";
import {Samples, Spark} from "../chart.js";
import {confirm} from "../dialog.js";
import {empty, foreign, h, mark, section, setText} from "../dom.js";
import * as format from "../format.js";
import {Table} from "../table.js";
import {facts} from "./list.js";
import {entry} from "./messages.js";
import {address, foreignName} from "./parts.js";

const sessionTime = seconds => seconds ? `session kept for ${format.duration(seconds)} without a connection` : "session ends with the connection";

const FACTS = [
    ["Hub", peer => peer.hub_name],
    ["Address", peer => peer.address && address(peer)],
    ["Transport", peer => peer.transport],
    ["User", peer => peer.user && foreign(peer.user)],
    ["ETID", peer => String(peer.etid)],
    ["Description", peer => peer.info && foreign(peer.info)],
    ["MQTT", peer => peer.mqtt && `version ${peer.mqtt.version}, ${sessionTime(peer.mqtt.expiry_s)}`],
    ["Messages", peer => peer.mqtt && `${format.count(peer.mqtt.in_flight)} in flight, ${format.count(peer.mqtt.waiting)} waiting, ${format.count(peer.mqtt.lost)} lost`],
    ["Connected", peer => `${format.duration(peer.connected_s)}, since ${format.moment(Date.parse(peer.since) / 1000)}`],
];

const FIGURES = [
    {label: "Received", name: "in_bytes_per_s", text: value => `${format.bytes(value)}/s`},
    {label: "Sent", name: "out_bytes_per_s", text: value => `${format.bytes(value)}/s`},
    {label: "Send queue", name: "queued_bytes", text: format.bytes},
    {label: "Dropped messages", name: "dropped", text: format.count},
];

export function peer({live, place, ready, parameters, setSubtitle}) {
    const id = parameters.get("id") ?? "", samples = new Samples();
    const figures = FIGURES.map(figure => ({...figure, spark: new Spark(), value: h("span", {class: "value"}, "–")}));
    const state = h("span"), about = h("div", {class: "inside"}), again = h("p", {class: "note", role: "status", hidden: true});
    const button = h("button", {type: "button", class: "danger", click: () => ask()}, "Disconnect …");
    const topics = h("ul", {class: "chips inside", "aria-label": "Subscriptions"});
    const messages = h("ol", {class: "entries"});
    const log = h("div", {class: "messages", role: "log", "aria-label": "Last messages", "aria-live": "off", tabindex: "0"}, messages);
    const silent = empty("No messages yet", "Messages that the peer publishes are shown here while this page is open.");
    const missed = h("p", {class: "note", hidden: true}), closes = closeTable();
    const parts = [
        section("Connection", {}, state, button),
        h("dl", {class: "figures"}, figures.map(({label, value, spark}) => h("div", {class: "figure"}, h("dt", {}, label), h("dd", {}, value, spark.element)))),
        section("Subscriptions"), section("Last messages"), section("Closed connections of this uid"),
    ];
    let row = null;
    parts[0].append(about, again);
    parts[2].append(topics);
    parts[3].append(log, silent, missed);
    parts[4].append(closes.element);

    live.watch("peer", {id}, (data, error) => {
        if (!parts[0].isConnected && data) {
            ready();
            place.append(...parts);
        }
        if (data) return update(data);
        ready();
        place.append(h("section", {class: "section"}, empty("The peer is not connected", error), h("p", {class: "note"}, h("a", {href: "#/peers"}, "All peers"))));
    });

    function update(data) {
        row = data;
        setSubtitle(data.uid || "(empty)");
        change(state, [data.is_connected], () => data.is_connected ? mark("good", "connected") : mark("off", "disconnected"));
        button.hidden = !data.is_connected;
        change(about, FACTS.map(([, value]) => String(value(data)?.textContent ?? value(data))), () => facts(FACTS.map(([name, value]) => [name, value(data)])));
        showAgain(data);
        if (data.is_connected) samples.add(data);
        for (const {name, text, spark, value} of figures) {
            setText(value, text(data.is_connected ? data[name] : null));
            spark.draw(samples.of(name));
        }
        change(topics, [data.topics, data.subscriptions], () => [
            ...data.topics.map(name => h("li", {}, foreign(name, {title: name}))),
            data.subscriptions > data.topics.length && h("li", {class: "soft"}, `and ${format.count(data.subscriptions - data.topics.length)} more`),
        ]);
        parts[2].hidden = !data.subscriptions;
        change(messages, data.messages.at(-1)?.number ?? 0, () => [...data.messages].reverse().map(message => entry(message, "")));
        silent.hidden = Boolean(data.messages.length);
        missed.hidden = !data.missed;
        setText(missed, `${format.plural(data.missed, "further message")} not shown.`);
        closes.update(data.closes);
    }

    function showAgain({is_connected: isConnected, successor}) {
        again.hidden = isConnected;
        change(again, [successor], () => successor ? ["The peer is connected again: ", h("a", {href: `#/peer?id=${successor}`}, "show the new connection")] : "The peer has disconnected. This page shows the last figures.");
    }

    function ask() {
        confirm(h("span", {}, "Disconnect ", foreignName(row.uid), "?"), "Its connection is closed. Most clients reconnect: to block a client, change its login or its rights.", "Disconnect", async () => {
            const error = await post(`/api/v1/peers/${row.id}/disconnect`);
            if (!error) toast("Disconnected.");
            return error;
        });
    }
}

// Replaces the children of an element if the data that they show has changed.
function change(element, data, children) {
    const signature = JSON.stringify(data);
    if (element.signature === signature) return;
    element.signature = signature;
    element.replaceChildren(...[children()].flat().filter(Boolean));
}

function closeTable() {
    return new Table({
        caption: "Closed connections of this uid, the newest first", key: row => `${row.worker} ${row.number}`,
        none: ["No closed connections", "Earlier connections of a peer with the same uid are shown here."],
        columns: [
            {label: "When", text: row => format.moment(Date.parse(row.at) / 1000)},
            {label: "Address", wide: true, cell: address},
            {label: "Connected for", number: true, text: row => row.connected_s === null ? "not accepted" : format.duration(row.connected_s)},
            {label: "Reason", cell: row => [h("span", {}, row.reason), row.detail && h("span", {class: "second"}, foreign(row.detail))]},
        ],
    });
}

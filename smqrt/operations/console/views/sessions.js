// Sessions of MQTT clients, with and without a connection: search, details, disconnect and delete.

import {post, toast} from "../api.js";
import {confirm, dialog} from "../dialog.js";
import {foreign, h, setText} from "../dom.js";
import * as format from "../format.js";
import {Table} from "../table.js";
import {foreignName, HubChoice, search} from "./parts.js";

const STATES = [["all", "all"], ["connected", "connected"], ["offline", "without a connection"]];
const NEVER_S = 0xffffffff;

const expiry = seconds => seconds === NEVER_S ? "never" : seconds ? format.duration(seconds) : "with the connection";
const state = row => row.connected ? "connected" : row.ends_in_s === null ? "offline" : `ends in ${format.duration(row.ends_in_s)}`;

export function sessions({live, place, ready, parameters, setSubtitle}) {
    const options = {hub: parameters.get("hub") ?? "", find: parameters.get("find") ?? "", state: "all", serial: 0};
    const change = changes => {
        Object.assign(options, changes);
        live.watch("sessions", {...options}, update);
    };
    const again = () => change({serial: options.serial + 1}); // the server keeps a long list for some seconds
    const hub = new HubChoice(value => change({hub: value}));
    const choice = h("select", {change: () => change({state: choice.value})}, STATES.map(([value, text]) => h("option", {value}, text)));
    const table = new Table({
        caption: "Sessions", key: row => row.key,
        none: ["No sessions", ""],
        columns: [
            {label: "Client", signature: row => row, cell: row => [
                h("button", {type: "button", class: "plain name", "aria-haspopup": "dialog", click: () => details(row, again)}, foreignName(row.name)),
                row.user && h("span", {class: "second"}, "user ", foreign(row.user)),
            ]},
            {label: "State", text: state},
            {label: "MQTT", number: true, wide: true, text: row => row.version},
            {label: "Filters", number: true, wider: true, text: row => format.count(row.subscriptions)},
            {label: "In flight", number: true, wide: true, text: row => format.count(row.in_flight)},
            {label: "Queue", number: true, text: row => format.count(row.waiting)},
            {label: "Lost", number: true, text: row => format.count(row.lost), alert: row => row.lost > 0},
            {label: "Expiry", number: true, wide: true, text: row => expiry(row.expiry_s)},
        ],
    });
    const more = h("p", {class: "pager"}, h("span"));
    const tools = h("div", {class: "tools"}, search("Search", "client identifier or user", value => change({find: value}), options.find), h("label", {}, "State", choice), hub.element);
    const part = h("section", {class: "section", "aria-label": "Sessions"}, tools, table.element, more);
    function update(data) {
        if (!part.isConnected) {
            ready();
            place.append(part);
        }
        if (data.hub !== undefined) options.hub = String(data.hub);
        hub.update(data.hubs, data.hub);
        table.update(data.rows);
        setSubtitle(format.plural(data.matching, "session"));
        setText(more.firstChild, data.matching > data.rows.length ? `The first ${data.rows.length} of ${format.count(data.matching)}; search to see others.` : "");
        more.hidden = !more.textContent;
        const isNarrowed = options.find || options.state !== "all";
        setText(table.none.firstChild, !data.hubs.length ? "No hub accepts MQTT clients" : isNarrowed ? "No session matches" : "No sessions yet");
        setText(table.none.lastChild, !data.hubs.length ? "Create a hub with the option mqtt." : isNarrowed ? "Search for a part of a client identifier or of a user." : "An MQTT client has a session while it is connected, and afterwards for its expiry.");
    }
    change({});
}

const FACTS = [
    ["State", state],
    ["User", row => row.user && foreign(row.user)],
    ["MQTT", row => `version ${row.version}`],
    ["Expiry", row => expiry(row.expiry_s)],
    ["Filters", row => format.count(row.subscriptions)],
    ["Messages", row => `${format.count(row.in_flight)} in flight, ${format.count(row.waiting)} waiting (${format.bytes(row.waiting_bytes)}), ${format.count(row.lost)} lost`],
];

function details(row, again) {
    const facts = h("dl", {class: "facts"}, FACTS.map(([name, value]) => [name, value(row)]).filter(([, value]) => value)
        .flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
    const actions = [
        row.connected && act("Disconnect", "disconnect", "Its connection is closed, and its session is kept. Most clients reconnect: to block a client, change its login or its rights."),
        act("Delete session", "delete", "Its subscriptions and the messages that wait for it are lost. A connected client is disconnected first."),
    ];
    const open = dialog(foreignName(row.name), [h("div", {}, facts), h("div", {class: "actions"}, actions)]);
    function act(word, action, text) {
        return h("button", {type: "button", class: "danger", click: () => confirm(h("span", {}, `${word}: `, foreignName(row.name), "?"), text, word, async () => {
            const error = await post(`/api/v1/hubs/${row.hub}/mqtt-sessions/${action}`, {client: row.client_id});
            if (!error) {
                open.close();
                toast(action === "delete" ? "The session is deleted." : "Disconnected.");
                again();
            }
            return error;
        })}, `${word} …`);
    }
}

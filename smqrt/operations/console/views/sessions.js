// Sessions of MQTT clients, with and without a connection: search, details, disconnect and delete.

import {post, toast} from "../api.js";
import {confirm, dialog} from "../dialog.js";
import {foreign, h} from "../dom.js";
import * as format from "../format.js";
import {facts, list, NO_MQTT} from "./list.js";
import {countOfHub, foreignName} from "./parts.js";

const STATES = [["all", "all"], ["connected", "connected"], ["offline", "without a connection"]];
const NEVER_S = 0xffffffff;

const expiry = seconds => seconds === NEVER_S ? "never" : seconds ? format.duration(seconds) : "with the connection";
const state = row => row.connected ? "connected" : row.ends_in_s === null ? "offline" : `ends in ${format.duration(row.ends_in_s)}`;

export function sessions(context) {
    const choice = h("select", {change: () => page.change({state: choice.value})}, STATES.map(([value, text]) => h("option", {value}, text)));
    const page = list(context, {
        name: "sessions", label: "Sessions", key: row => row.key, more: {state: "all", serial: 0},
        find: ["Search", "client identifier or user", "search"],
        tools: [h("label", {}, "State", choice)],
        columns: () => [
            {label: "Client", named: true, signature: row => row, cell: row => [
                h("button", {type: "button", class: "plain name opener", "aria-haspopup": "dialog", click: () => details(row, page.again)}, foreignName(row.name)),
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
        update: data => context.setSubtitle(countOfHub({...data, total: data.matching}, "session")),
        none: (data, options) => !data.hubs.length ? NO_MQTT
            : options.find || options.state !== "all" ? ["No session matches", "Search for a part of a client identifier or of a user."]
            : ["No sessions yet", "An MQTT client has a session while it is connected, and afterwards for its expiry."],
    });
    page.change({});
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
    const actions = [
        row.connected && act("Disconnect", "disconnect", "Its connection is closed, and its session is kept. Most clients reconnect: to block a client, change its login or its rights."),
        act("Delete session", "delete", "Its subscriptions and the messages that wait for it are lost. A connected client is disconnected first."),
    ];
    const open = dialog(foreignName(row.name), [h("div", {}, facts(FACTS.map(([name, value]) => [name, value(row)]))), h("div", {class: "actions"}, actions)]);
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

// Retained messages of a hub: a topic filter, details, and deletion by filter.

import {post, toast} from "../api.js";
import {confirm, dialog} from "../dialog.js";
import {foreign, h} from "../dom.js";
import * as format from "../format.js";
import {facts, list, NO_MQTT} from "./list.js";
import {countOfHub, foreignName} from "./parts.js";

const expires = row => row.expires_in_s === null ? "never" : `in ${format.duration(row.expires_in_s)}`;

export function retained(context) {
    let hubs = [], matching = 0;
    const button = h("button", {type: "button", class: "danger", click: () => {
        const filter = page.options.find;
        ask(h("span", {}, `Delete ${format.plural(matching, "retained message")} of `, foreignName(filter), "?"), filter, hubs, page.again);
    }}, "Delete all …");
    const page = list(context, {
        name: "retained", label: "Retained messages", key: row => row.key, more: {serial: 0},
        find: ["Topic filter", "house/+/temp or house/#", "enter a filter"],
        actions: [button],
        columns: () => [
            {label: "Topic", named: true, signature: row => row, cell: row => h("button", {type: "button", class: "plain name opener", "aria-haspopup": "dialog", click: () => details(row, page.again)}, foreignName(row.name))},
            {label: "Payload", signature: row => row.payload, cell: row => row.payload ? h("span", {class: "mono"}, foreignName(row.payload)) : h("span", {class: "soft"}, "(empty)")},
            {label: "Size", number: true, wide: true, text: row => format.bytes(row.bytes)},
            {label: "QoS", number: true, wide: true, text: row => String(row.qos)},
            {label: "Expires", number: true, wide: true, text: expires},
        ],
        change: () => button.disabled = true, // until the messages of this filter are shown
        update(data, options) {
            [hubs, matching] = [data.ids, data.matching];
            button.disabled = !options.find || !matching;
            button.title = options.find ? "" : "Enter a topic filter first; # matches all topics.";
            context.setSubtitle(countOfHub({...data, total: matching}, "message"));
        },
        none: (data, options) => !data.hubs.length ? NO_MQTT
            : options.find ? ["No retained message matches", "In a filter, + stands for one level of a topic and # for the rest."]
            : ["No retained messages yet", "A message with the retain flag is kept here for later subscribers."],
    });
    page.change({});
}

function ask(title, filter, hubs, done) {
    confirm(title, "Later subscribers do not get the messages. Present subscribers are not notified.", "Delete", async () => {
        for (const number of hubs) {
            const error = await post(`/api/v1/hubs/${number}/mqtt-retained/delete`, {filter});
            if (error) return error;
        }
        toast("Deleted.");
        done();
        return "";
    });
}

function details(row, again) {
    const properties = Object.entries(row.properties).map(([name, value]) => [foreign(name), foreign(value)]);
    const about = facts([["Size", format.bytes(row.bytes)], ["QoS", String(row.qos)], ["Expires", expires(row)], ...properties]);
    const button = h("button", {type: "button", class: "danger", click: () =>
        ask(h("span", {}, "Delete the retained message of ", foreignName(row.name), "?"), row.topic, [row.hub], () => {
            open.close();
            again();
        })}, "Delete …");
    const payload = h("pre", {class: "payload"}, foreign(row.payload), row.cut && "…");
    const open = dialog(foreignName(row.name), [h("div", {}, about), row.payload && h("h3", {}, "Payload"), row.payload && payload, h("div", {class: "actions"}, button)]);
}

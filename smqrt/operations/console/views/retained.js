// Retained messages of a hub: a topic filter, details, and deletion by filter.

import {post, toast} from "../api.js";
import {confirm, dialog} from "../dialog.js";
import {foreign, h, setText} from "../dom.js";
import * as format from "../format.js";
import {Table} from "../table.js";
import {foreignName, HubChoice, search} from "./parts.js";

const expires = row => row.expires_in_s === null ? "never" : `in ${format.duration(row.expires_in_s)}`;

export function retained({live, place, ready, parameters, setSubtitle}) {
    const options = {hub: parameters.get("hub") ?? "", find: (parameters.get("find") ?? "").slice(0, 100), serial: 0};
    let hubs = [], matching = 0;
    const change = changes => {
        Object.assign(options, changes);
        button.disabled = true; // until the messages of this filter are shown
        live.watch("retained", {...options}, update);
    };
    const again = () => change({serial: options.serial + 1}); // the server keeps a long list for some seconds
    const hub = new HubChoice(value => change({hub: value}));
    const button = h("button", {type: "button", class: "danger", click: () => {
        const filter = options.find;
        ask(h("span", {}, `Delete ${format.plural(matching, "retained message")} of `, foreignName(filter), "?"), filter, hubs, again);
    }}, "Delete all …");
    const table = new Table({
        caption: "Retained messages", key: row => row.key,
        none: ["No retained messages", ""],
        columns: [
            {label: "Topic", signature: row => row, cell: row => h("button", {type: "button", class: "plain name", "aria-haspopup": "dialog", click: () => details(row, again)}, foreignName(row.name))},
            {label: "Payload", signature: row => row.payload, cell: row => row.payload ? h("span", {class: "mono"}, foreignName(row.payload)) : h("span", {class: "soft"}, "(empty)")},
            {label: "Size", number: true, wide: true, text: row => format.bytes(row.bytes)},
            {label: "QoS", number: true, wide: true, text: row => String(row.qos)},
            {label: "Expires", number: true, wide: true, text: expires},
        ],
    });
    const more = h("p", {class: "pager"}, h("span"));
    const tools = h("div", {class: "tools"}, search("Topic filter", "house/+/temp or house/#", value => change({find: value}), options.find), hub.element, button);
    const part = h("section", {class: "section", "aria-label": "Retained messages"}, tools, table.element, more);
    function update(data) {
        if (!part.isConnected) {
            ready();
            place.append(part);
        }
        [hubs, matching] = [data.ids, data.matching];
        if (data.hub !== undefined) options.hub = String(data.hub);
        hub.update(data.hubs, data.hub);
        table.update(data.rows);
        button.disabled = !options.find || !matching;
        button.title = options.find ? "" : "Enter a topic filter first; # matches all topics.";
        setSubtitle(format.plural(matching, "message"));
        setText(more.firstChild, matching > data.rows.length ? `The first ${data.rows.length} of ${format.count(matching)}; enter a filter to see others.` : "");
        more.hidden = !more.textContent;
        setText(table.none.firstChild, !data.hubs.length ? "No hub accepts MQTT clients" : options.find ? "No retained message matches" : "No retained messages yet");
        setText(table.none.lastChild, !data.hubs.length ? "Create a hub with the option mqtt." : options.find ? "In a filter, + stands for one level of a topic and # for the rest." : "A message with the retain flag is kept here for later subscribers.");
    }
    change({});
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
    const facts = [["Size", format.bytes(row.bytes)], ["QoS", String(row.qos)], ["Expires", expires(row)],
        ...Object.entries(row.properties).map(([name, value]) => [foreign(name), foreign(value)])];
    const list = h("dl", {class: "facts"}, facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
    const button = h("button", {type: "button", class: "danger", click: () =>
        ask(h("span", {}, "Delete the retained message of ", foreignName(row.name), "?"), row.topic, [row.hub], () => {
            open.close();
            again();
        })}, "Delete …");
    const payload = h("pre", {class: "payload"}, foreign(row.payload), row.cut && "…");
    const open = dialog(foreignName(row.name), [h("div", {}, list), row.payload && h("h3", {}, "Payload"), row.payload && payload, h("div", {class: "actions"}, button)]);
}

// Topics of a hub with their rates; those with the most subscribers or messages first.

import {Samples, Spark} from "../chart.js";
import {h, setText} from "../dom.js";
import * as format from "../format.js";
import {list} from "./list.js";
import {countOfHub, foreignName} from "./parts.js";

export function topics(context) {
    const samples = new Samples();
    let read = null;
    const address = (row, hub) => `#/messages?hub=${hub}&${row.exact ? `topic=${encodeURIComponent(row.name)}` : `tid=${row.id}`}`;
    const page = list(context, {
        name: "topics", label: "Topics", key: row => row.id, sort: "subscribers",
        find: ["Search", "part of a name", "search"],
        columns: options => [
            {label: "Topic", named: true, signature: row => [row.name, options.hub], cell: row => h("a", {class: "name opener", href: address(row, options.hub)}, foreignName(row.name))},
            {label: "Messages/s", number: true, draw: (td, row) => drawRate(td, row.per_s, samples.of(row.id))},
            {label: "Messages", sort: "messages", number: true, wide: true, text: row => format.count(row.messages)},
            {label: "Subscribers", sort: "subscribers", number: true, text: row => format.count(row.subscribers)},
            {label: "Observers", number: true, wider: true, text: row => format.count(row.observers)},
            {label: "Number", number: true, wider: true, text: row => String(row.id)},
        ],
        before(data) {
            if (data.read_s === read) return; // the same figures
            read = data.read_s;
            samples.add(Object.fromEntries(data.rows.map(row => [row.id, row.per_s])));
        },
        update: data => context.setSubtitle(countOfHub(data, "topic")),
        none: (data, options) => options.find ? ["No topic matches", "Search for a part of a name."]
            : ["No topics yet", "A topic is created by the first subscription or publish."],
    });
    page.change({});
}

function drawRate(td, rate, values) {
    if (!td.spark) {
        td.spark = new Spark();
        td.number = h("span");
        td.append(h("div", {class: "trend", title: "The last minute"}, td.spark.element, td.number));
    }
    setText(td.number, format.rate(rate));
    td.spark.draw(values);
}

// Topics of a hub, those with the most subscribers first.

import {h} from "../dom.js";
import * as format from "../format.js";
import {list} from "./list.js";
import {foreignName} from "./parts.js";

export function topics(context) {
    const page = list(context, {
        name: "topics", label: "Topics", key: row => row.id,
        find: ["Search", "part of a name", "search"],
        columns: options => [
            {label: "Topic", signature: row => [row.name, options.hub], cell: row => h("a", {class: "name", href: `#/messages?hub=${options.hub}&${row.exact ? `topic=${encodeURIComponent(row.name)}` : `tid=${row.id}`}`}, foreignName(row.name))},
            {label: "Number", number: true, wide: true, text: row => String(row.id)},
            {label: "Subscribers", number: true, text: row => format.count(row.subscribers)},
            {label: "Observers", number: true, wide: true, text: row => format.count(row.observers)},
        ],
        update: data => context.setSubtitle(format.plural(data.total, "topic")),
        none: (data, options) => options.find ? ["No topic matches", "Search for a part of a name."]
            : ["No topics yet", "A topic is created by the first subscription or publish."],
    });
    page.change({});
}

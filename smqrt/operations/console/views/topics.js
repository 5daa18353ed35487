// Topics of a hub, those with the most subscribers first.

import {h, setText} from "../dom.js";
import * as format from "../format.js";
import {Table} from "../table.js";
import {foreignName, HubChoice, search} from "./parts.js";

export function topics({live, place, ready, parameters, setSubtitle}) {
    const options = {hub: parameters.get("hub") ?? "", find: parameters.get("find") ?? ""};
    const change = changes => {
        Object.assign(options, changes);
        watch();
    };
    const hub = new HubChoice(value => change({hub: value}));
    const table = new Table({
        caption: "Topics", key: row => row.id,
        none: ["No topics", ""],
        columns: [
            {label: "Topic", signature: row => [row.name, options.hub], cell: row => h("a", {class: "name", href: `#/messages?hub=${options.hub}&${row.exact ? `topic=${encodeURIComponent(row.name)}` : `tid=${row.id}`}`}, foreignName(row.name))},
            {label: "Number", number: true, wide: true, text: row => String(row.id)},
            {label: "Subscribers", number: true, text: row => format.count(row.subscribers)},
            {label: "Observers", number: true, wide: true, text: row => format.count(row.observers)},
        ],
    });
    const more = h("p", {class: "pager"}, h("span"));
    const tools = h("div", {class: "tools"}, search("Search", "part of a name", value => change({find: value}), options.find), hub.element);
    const part = h("section", {class: "section", "aria-label": "Topics"}, tools, table.element, more);
    function update(data) {
        if (!part.isConnected) {
            ready();
            place.append(part);
        }
        if (data.hub !== undefined) options.hub = String(data.hub);
        hub.update(data.hubs, data.hub);
        table.update(data.rows);
        setSubtitle(format.plural(data.total, "topic"));
        setText(more.firstChild, data.matching > data.rows.length ? `The first ${data.rows.length} of ${format.count(data.matching)}; search to see others.` : "");
        more.hidden = !more.textContent;
        setText(table.none.firstChild, options.find ? "No topic matches" : "No topics yet");
        setText(table.none.lastChild, options.find ? "Search for a part of a name." : "A topic is created by the first subscription or publish.");
    }
    const watch = () => live.watch("topics", {...options}, update);
    watch();
}

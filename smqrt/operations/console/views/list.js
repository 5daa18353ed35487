// A page with a list of a hub: choice of the hub, search, table, and a line about the rows that are left out.

import {h, setText} from "../dom.js";
import * as format from "../format.js";
import {Table} from "../table.js";
import {HubChoice, search} from "./parts.js";

/* Shows a list in the context of a view (see main.js), and returns {options, change(changes), again()}. `again` reads the list again.
 *   name       the name of the data; the server gets the hub, the search and the options with it
 *   label      the name of the list
 *   find       label and placeholder of the search field, and the advice for a long list
 *   more       further options of the request, with their first values
 *   tools      elements beside the search; actions: elements behind them
 *   columns, key   of the table, see table.js
 *   sort       the first order of the list, if its columns can be sorted
 *   change     called when another list is requested
 *   before     called with new data before the table shows it
 *   update     called with new data and the options
 *   none       returns title and text for a list without rows, from the data and the options
 */
export function list({live, place, ready, parameters}, {name, label, find, more = {}, tools = [], actions = [], columns, key, sort, change: onchange, before, update, none}) {
    const options = {hub: parameters.get("hub") ?? "", find: (parameters.get("find") ?? "").slice(0, 100), ...(sort && {sort}), ...more};
    const hub = new HubChoice(value => change({hub: value}));
    const table = new Table({caption: label, key, columns: columns(options), none: [`No ${label.toLowerCase()}`, ""], sorted: sort, onsort: sort && (word => {
        table.sorted(word);
        change({sort: word});
    })});
    const left = h("p", {class: "pager"}, h("span"));
    const [title, placeholder, advice] = find;
    const bar = h("div", {class: "tools"}, search(title, placeholder, value => change({find: value}), options.find), tools, hub.element, actions);
    const part = h("section", {class: "section", "aria-label": label}, bar, table.element, left);

    function change(changes) {
        Object.assign(options, changes);
        onchange?.();
        live.watch(name, {...options}, show);
    }
    function show(data) {
        if (!part.isConnected) {
            ready();
            place.append(part);
        }
        if (data.hub !== undefined) options.hub = String(data.hub);
        hub.update(data.hubs, data.hub);
        before?.(data);
        table.update(data.rows);
        update(data, options);
        setText(left.firstChild, data.matching > data.rows.length ? `The first ${data.rows.length} of ${format.count(data.matching)}; ${advice} to see others.` : "");
        left.hidden = !left.textContent;
        const [first, second] = none(data, options);
        setText(table.none.firstChild, first);
        setText(table.none.lastChild, second);
    }
    const again = () => change({serial: (options.serial ?? 0) + 1}); // the server keeps a long list for some seconds
    return {options, change, again};
}

export const NO_MQTT = ["No hub accepts MQTT clients", "Create a hub with the option mqtt."];

// Names with their values, without those that are empty.
export const facts = pairs => h("dl", {class: "facts"}, pairs.filter(([, value]) => value).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));

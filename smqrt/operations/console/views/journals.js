// Journals, the queries that read them, and the processes of pipelines.

import {foreign, h, mark, section} from "../dom.js";
import * as format from "../format.js";
import {Table} from "../table.js";

export function journals({live, place, ready, setSubtitle}) {
    const tables = [journalTable(), readerTable(), pipelineTable()];
    const parts = ["Journals", "Readers", "Pipelines"].map(title => section(title));
    parts.forEach((part, index) => part.append(tables[index].element));
    live.watch("journals", {}, data => {
        if (!parts[0].isConnected) {
            ready();
            place.append(...parts);
        }
        setSubtitle(`${format.plural(data.journals.length, "journal")}, ${format.plural(data.pipelines.length, "process", "processes")} of pipelines`);
        [data.journals, data.readers, data.pipelines].forEach((rows, index) => tables[index].update(rows));
    });
}

const lag = row => row.disk_age_s ? `${format.duration(row.disk_age_s)} behind` : "on disk";

function journalTable() {
    return new Table({
        caption: "Journals", key: row => `${row.worker} ${row.path}`,
        none: ["No journals", "hub.create{journal=true} records the messages of a hub: see “The journal” in the manual."],
        columns: [
            {label: "Journal", signature: row => [row.name, row.path], cell: row => [h("span", {class: "name"}, foreign(row.name)), h("span", {class: "second mono"}, foreign(row.path))]},
            {label: "State", signature: row => row.alarm, cell: row => row.alarm ? mark("bad", "waiting for the disk") : mark("good", "writing")},
            {label: "Messages", number: true, text: row => format.count(row.rows)},
            {label: "Written", number: true, text: row => format.bytes(row.bytes)},
            {label: "Not on disk", number: true, wide: true, text: row => format.bytes(row.unsynced_bytes)},
            {label: "Lag", number: true, wide: true, text: lag},
            {label: "Syncs", number: true, wide: true, text: row => format.count(row.syncs)},
            {label: "Sync time", number: true, wider: true, text: row => `${format.milliseconds(row.sync_ms)} ms`},
        ],
    });
}

const STATES = {running: "good", waiting: "bad", stopped: "off", ended: "off"};
const WORDS = {waiting: "failed, restarting"};

const failing = row => (row.queries ?? []).filter(query => ["failed", "stuck", "disk full"].includes(query.state));

function pipelineTable() {
    return new Table({
        caption: "Pipelines", key: row => row.path,
        none: ["No pipelines", "smqrt serve --pipelines runs the pipelines of all applications: see “Pipelines” in the manual."],
        columns: [
            {label: "Application", signature: row => row.path, cell: row => h("span", {class: "mono"}, foreign(row.path))},
            {label: "Process", signature: row => row.state, cell: row => mark(STATES[row.state] ?? "off", WORDS[row.state] ?? row.state)},
            {label: "Queries", signature: row => failing(row).map(query => [query.name, query.state]), cell: row => failing(row).length ? h("span", {}, ...failing(row).map(query => mark("bad", `${query.name}: ${query.state}`))) : row.queries?.length ? mark("good", format.plural(row.queries.length, "query", "queries")) : ""},
        ],
    });
}

function readerTable() {
    return new Table({
        caption: "Queries of pipelines that read the journals", key: row => `${row.journal} ${row.query}`,
        none: ["No readers", "A pipeline is shown here after its first read."],
        columns: [
            {label: "Query", signature: row => [row.query, row.journal, row.error], cell: row => [h("span", {class: "name"}, foreign(row.query)), h("span", {class: "second"}, "of ", foreign(row.journal)), row.error && h("span", {class: "fault"}, foreign(row.error))]},
            {label: "Messages behind", number: true, text: row => format.count(row.behind)},
            {label: "Last read", number: true, text: row => row.seen_ago_s === undefined ? "–" : `${format.duration(row.seen_ago_s)} ago`},
        ],
    });
}

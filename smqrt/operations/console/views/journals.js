// Recordings, and computations on them: journals, the queries that read them, the processes of pipelines.

import {foreign, h, mark, section} from "../dom.js";
import * as format from "../format.js";
import {Table} from "../table.js";

export function journals({live, place, ready, say: tell}) {
    const tables = [journalTable(), readerTable(), pipelineTable()];
    const parts = ["Journals", "Who reads them", "Pipelines"].map(title => section(title));
    parts.forEach((part, index) => part.append(tables[index].element));
    live.watch("journals", {}, data => {
        if (!parts[0].isConnected) {
            ready();
            place.append(...parts);
        }
        tell(`${format.plural(data.journals.length, "journal")}, ${format.plural(data.pipelines.length, "process", "processes")} of pipelines`);
        [data.journals, data.readers, data.pipelines].forEach((rows, index) => tables[index].update(rows));
    });
}

const lag = row => row.disk_age_s ? `${format.duration(row.disk_age_s)} behind` : "on disk";

function journalTable() {
    return new Table({
        caption: "Journals", key: row => `${row.worker} ${row.path}`,
        none: ["Nothing is recorded", "hub.create{journal=true} records what flows through a hub; the page “The journal” of the manual says how."],
        columns: [
            {label: "Journal", signature: row => [row.name, row.path], cell: row => [h("span", {class: "name"}, foreign(row.name)), h("span", {class: "second mono"}, foreign(row.path))]},
            {label: "State", signature: row => row.alarm, cell: row => row.alarm ? mark("bad", "waits for the disk") : mark("good", "writing")},
            {label: "Messages", number: true, text: row => format.count(row.rows)},
            {label: "Written", number: true, text: row => format.bytes(row.bytes)},
            {label: "Not on disk", number: true, wide: true, text: row => format.bytes(row.unsynced_bytes)},
            {label: "Lag", number: true, wide: true, text: lag},
            {label: "Syncs", number: true, wide: true, text: row => format.count(row.syncs)},
            {label: "A sync takes", number: true, wider: true, text: row => `${format.milliseconds(row.sync_ms)} ms`},
        ],
    });
}

const STATES = {running: "good", waiting: "bad", stopped: "off", ended: "off"};
const WORDS = {waiting: "failed, starts again"};

const troubled = row => (row.queries ?? []).filter(query => ["failed", "stuck", "disk full"].includes(query.state));

function pipelineTable() {
    return new Table({
        caption: "Pipelines", key: row => row.path,
        none: ["No pipelines run here", "smqrt serve --pipelines runs those of every application; “Pipelines” in the manual has the first one in ten minutes."],
        columns: [
            {label: "Application", signature: row => row.path, cell: row => h("span", {class: "mono"}, foreign(row.path))},
            {label: "State of its process", signature: row => row.state, cell: row => mark(STATES[row.state] ?? "off", WORDS[row.state] ?? row.state)},
            {label: "Queries", signature: row => troubled(row).map(query => [query.name, query.state]), cell: row => troubled(row).length ? h("span", {}, ...troubled(row).map(query => mark("bad", `${query.name}: ${query.state}`))) : row.queries?.length ? mark("good", format.plural(row.queries.length, "query", "queries")) : ""},
        ],
    });
}

function readerTable() {
    return new Table({
        caption: "Queries of pipelines that read the journals", key: row => `${row.journal} ${row.query}`,
        none: ["Nobody reads the journals", "A pipeline is here once it has read something."],
        columns: [
            {label: "Query", signature: row => [row.query, row.journal, row.error], cell: row => [h("span", {class: "name"}, foreign(row.query)), h("span", {class: "second"}, "of ", foreign(row.journal)), row.error && h("span", {class: "fault"}, foreign(row.error))]},
            {label: "Messages behind", number: true, text: row => format.count(row.behind)},
            {label: "Last heard of", number: true, text: row => row.seen_ago_s === undefined ? "–" : `${format.duration(row.seen_ago_s)} ago`},
        ],
    });
}

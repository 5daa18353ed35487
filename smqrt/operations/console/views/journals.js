// Journals, their readers, and the queries of pipelines with their processes.

import {foreign, h, mark, section} from "../dom.js";
import * as format from "../format.js";
import {Table} from "../table.js";
import {breakable, foreignName} from "./parts.js";

export function journals({live, place, ready, setSubtitle}) {
    const tables = [queryTable(), journalTable(), readerTable(), pipelineTable()];
    const parts = ["Queries", "Journals", "Readers", "Processes of pipelines"].map(title => section(title));
    parts.forEach((part, index) => part.append(tables[index].element));
    live.watch("journals", {}, data => {
        if (!parts[0].isConnected) {
            ready();
            place.append(...parts);
        }
        setSubtitle(`${format.plural(data.journals.length, "journal")}, ${format.plural(data.queries.length, "query", "queries")} of pipelines`);
        [data.queries, data.journals, data.readers, data.pipelines].forEach((rows, index) => {
            tables[index].update(rows);
            parts[index].hidden = !rows.length && (index === 0 || index === 2); // the others tell how to get some
        });
    });
}

const lag = row => row.disk_age_s ? `${format.duration(row.disk_age_s)} behind` : "on disk";

function journalTable() {
    return new Table({
        caption: "Journals", key: row => `${row.worker} ${row.path}`,
        none: ["No journals", "hub.create{journal=true} records the messages of a hub: see “The journal” in the manual."],
        columns: [
            {label: "Journal", signature: row => [row.name, row.path], cell: row => [h("span", {class: "name"}, foreign(row.name)), row.worker !== undefined && h("span", {class: "second"}, `worker ${row.worker}`), h("span", {class: "second mono"}, foreign(breakable(row.path)))]},
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

const QUERY_STATES = {running: "good", waiting: "good", starting: "warn", failed: "bad", stuck: "bad", "disk full": "bad", dead: "bad"};
const QUERY_WORDS = {waiting: "waiting for rows"};
const LATE_S = 60;

function queryTable() {
    return new Table({
        caption: "Queries of pipelines", key: row => `${row.path} ${row.name}`,
        none: ["No queries", "A query of a pipeline is shown here after it has started: see “Pipelines” in the manual."],
        columns: [
            {label: "Query", named: true, signature: row => [row.name, row.kind, row.path, row.error], cell: row => [
                h("span", {class: "name"}, foreignName(row.name)), h("span", {class: "second"}, row.kind && `${row.kind} of `, foreign(breakable(row.path))),
                row.error && h("span", {class: "second failure"}, foreign(row.error))]},
            {label: "State", signature: row => [row.state, row.error], cell: row => mark(row.state in QUERY_STATES && row.error && QUERY_STATES[row.state] === "good" ? "warn" : QUERY_STATES[row.state] ?? "off", QUERY_WORDS[row.state] ?? row.state)},
            {label: "Lag", number: true, text: row => row.lag_s === null ? "–" : row.lag_s < 1 ? "< 1 s" : format.duration(row.lag_s), alert: row => row.lag_s > LATE_S},
            {label: "Unprocessed", number: true, wide: true, text: row => format.count(row.lag_rows)},
            {label: "Rows/s", number: true, wide: true, text: row => format.rate(row.rows_per_s)},
            {label: "Batch time", number: true, wide: true, text: row => row.batch_ms === null ? "–" : `${format.milliseconds(row.batch_ms)} ms`},
            {label: "Updated", number: true, wide: true, text: row => row.updated_ago_s === null ? "–" : `${format.duration(row.updated_ago_s)} ago`},
        ],
    });
}

function pipelineTable() {
    return new Table({
        caption: "Pipelines", key: row => row.path,
        none: ["No pipelines", "smqrt serve --pipelines runs the pipelines of all applications: see “Pipelines” in the manual."],
        columns: [
            {label: "Application", signature: row => row.path, cell: row => h("span", {class: "mono"}, foreign(breakable(row.path)))},
            {label: "Process", signature: row => row.state, cell: row => mark(STATES[row.state] ?? "off", WORDS[row.state] ?? row.state)},
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

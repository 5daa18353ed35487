// Overview: alerts, figures now and over the last hour, listeners and hubs.

import {Chart, Spark} from "../chart.js";
import {h, mark, section, setText} from "../dom.js";
import * as format from "../format.js";
import {Table} from "../table.js";
import {address, foreignName} from "./parts.js";

const LONG_LOOP_MS = 50, SHOWN_POINTS = 120;
const WORDS = {bad: "Urgent", warn: "Warning"};

const FIGURES = [
    {label: "Peers", name: "peers", text: format.count},
    {label: "Published", name: "in_per_s", text: format.rate, unit: "/s"},
    {label: "Copies out", name: "out_per_s", text: format.rate, unit: "/s"},
    {label: "Dropped", name: "drops_per_s", text: format.rate, unit: "/s", isBad: value => value > 0},
    {label: "Loop latency", name: "loop_ms", text: format.milliseconds, unit: "ms", isBad: value => value > LONG_LOOP_MS},
    {label: "CPU", name: "cpu_percent", text: format.percent, unit: "%"},
    {label: "Memory", name: "memory_bytes", text: format.mebibytes, unit: "MiB"},
];

const CHARTS = [
    ["Messages per second", [{label: "published", name: "in_per_s"}, {label: "copies", name: "out_per_s"}], format.rate],
    ["Peers", [{label: "connected", name: "peers"}], format.count, {minimum: 4}],
    ["Loop latency", [{label: "longest turn, ms", name: "loop_ms"}], format.milliseconds],
    ["CPU", [{label: "of one core, %", name: "cpu_percent"}], format.percent],
];

export function overview({live, history, place, ready, setSubtitle}) {
    const alerts = h("ul", {class: "alerts"});
    const figures = FIGURES.map(figure => new Figure(figure));
    const charts = CHARTS.map(parts => new Chart(...parts));
    const listeners = listenerTable(), hubs = hubTable();
    const parts = [
        section("Needs attention", {"aria-label": "Needs attention"}),
        h("dl", {class: "figures"}, figures.map(figure => figure.element)),
        h("div", {class: "charts"}, charts.map(chart => chart.element)),
        section("Listeners", {}),
        section("Hubs", {}),
    ];
    parts[0].append(alerts);
    parts[3].append(listeners.element);
    parts[4].append(hubs.element);
    const draw = () => {
        if (!history.times.length) return; // not loaded yet
        charts.forEach(chart => chart.draw(history));
        figures.forEach(figure => figure.draw(history));
    };
    const onPulse = ({now}) => figures.forEach(figure => figure.update(now));
    live.watch("overview", {}, data => {
        if (!parts[0].isConnected) {
            ready();
            place.append(...parts);
            draw();
        }
        const {server} = data;
        const processes = server.workers ? format.plural(server.workers, "worker") : `process ${server.pid}`;
        setSubtitle(`${server.version} · up ${format.duration(server.uptime_s)} · ${server.host} · ${processes}${server.state === "serving" ? "" : ` · ${server.state}`}`);
        showAlerts(alerts, data.alerts);
        listeners.update(data.listeners);
        hubs.update(data.hubs);
    });
    live.listeners.add(onPulse);
    history.listeners.add(draw);
    return () => {
        live.listeners.delete(onPulse);
        history.listeners.delete(draw);
        charts.forEach(chart => chart.close());
    };
}

class Figure {
    constructor({label, name, text, unit, isBad}) {
        this.name = name;
        this.text = text;
        this.isBad = isBad ?? (() => false);
        this.spark = new Spark();
        this.number = h("span", {}, "–");
        this.value = h("span", {class: "value"}, this.number, unit && h("span", {class: "unit"}, unit));
        this.element = h("div", {class: "figure"}, h("dt", {}, label), h("dd", {}, this.value, this.spark.element));
    }

    update(now) {
        const value = now[this.name];
        setText(this.number, this.text(value));
        this.value.dataset.kind = this.isBad(value) ? "bad" : "";
    }

    draw(history) {
        this.spark.draw((history.series[this.name] ?? []).slice(-SHOWN_POINTS));
    }
}

function showAlerts(list, alerts) {
    const signature = JSON.stringify(alerts);
    if (list.signature === signature) return;
    list.signature = signature;
    list.replaceChildren(...alerts.map(({level, what, remedy, view}) => h("li", {},
        mark(level, WORDS[level]), h("span", {}, what), view === "overview" ? h("span") : h("a", {href: `#/${view}`}, `Show ${view}`), h("span", {class: "remedy"}, remedy))));
    if (!alerts.length) list.append(h("li", {class: "calm"}, mark("good", "Nothing")));
}

function certificate({tls, certificate_expires_s: expires, certificate_days: days}) {
    if (!tls) return "no TLS";
    if (days === null || days === undefined) return "unknown";
    const text = days < 0 ? `expired ${format.moment(expires)}` : `${format.plural(days, "day")} left`;
    return mark(days < 7 ? "bad" : days < 30 ? "warn" : "good", text);
}

function listenerTable() {
    return new Table({
        caption: "Listeners", key: row => row.name,
        none: ["No listeners", "The server accepts no connections: it is starting or stopping."],
        columns: [
            {label: "Name", text: row => row.name},
            {label: "Address", cell: address},
            {label: "Open", number: true, text: row => format.count(row.open)},
            {label: "Accepted", number: true, wide: true, text: row => format.count(row.accepted)},
            {label: "Refused", number: true, wide: true, text: row => format.count(row.refused), alert: row => row.refused > 0},
            {label: "Certificate", cell: certificate},
        ],
    });
}

function hubTable() {
    return new Table({
        caption: "Hubs", key: row => row.id,
        none: ["No hubs", "An application creates one with hub.create(): see “Quick start” in the manual."],
        columns: [
            {label: "Hub", named: true, signature: row => [row.id, row.name], cell: row => h("a", {class: "opener", href: `#/peers?hub=${row.id}`}, foreignName(row.name))},
            {label: "Peers", number: true, text: row => format.count(row.peers)},
            {label: "Topics", number: true, text: row => format.count(row.topics)},
            {label: "Published/s", number: true, wide: true, text: row => format.rate(row.in_per_s)},
            {label: "Copies/s", number: true, wide: true, text: row => format.rate(row.out_per_s)},
            {label: "Queued", number: true, wider: true, text: row => format.bytes(row.queued_bytes)},
            {label: "Dropped", number: true, text: row => format.count(row.dropped), alert: row => row.dropped_lately > 0},
        ],
    });
}

// Charts of the last hour, and small line charts beside figures.

import {h, setText} from "./dom.js";
import * as format from "./format.js";

const HEIGHT = 150, SPAN_S = 3600, MIN_SPAN_S = 600, SVG = "http://www.w3.org/2000/svg";
const colour = name => () => getComputedStyle(document.documentElement).getPropertyValue(name);
const font = "11px system-ui, sans-serif";

// series: [{label, name}], at most two. The second is also dashed, so that colours are not needed.
export class Chart {
    constructor(title, series, show, {minimum = 1} = {}) {
        this.series = series;
        this.show = show;
        this.title = title;
        this.values = series.map((one, index) => h("b", {}, "–"));
        const keys = series.map((one, index) => h("span", {"data-line": index + 1}, one.label, " ", this.values[index]));
        this.place = h("div", {class: "chart", role: "img", "aria-label": title});
        this.element = h("section", {class: "section"},
            h("div", {class: "section-head"}, h("h2", {}, title), h("p", {class: "keys"}, keys)), this.place);
        const axis = {stroke: colour("--soft"), grid: {stroke: colour("--line"), width: 1}, ticks: {show: false}, font};
        this.plot = new uPlot({
            width: 300, height: HEIGHT, padding: [8, 8, 0, 0],
            legend: {show: false}, cursor: {y: false, points: {size: 6}, drag: {x: false, y: false}},
            scales: {x: {range: () => this.range()}, y: {range: (_, low, high) => [0, Math.max(high ?? 0, minimum) * 1.08]}},
            axes: [
                {...axis, size: 24, space: 60, values: (_, marks) => marks.map(mark => format.minute(mark))},
                {...axis, size: 52, space: 32, values: (_, marks) => marks.map(mark => show(mark))},
            ],
            series: [{}, ...series.map((one, index) => ({
                stroke: colour(index ? "--two" : "--one"), width: 1.5, dash: index ? [5, 3] : undefined, points: {show: false},
                fill: index ? undefined : () => `color-mix(in srgb, ${colour("--one")()}, transparent 90%)`,
            }))],
            hooks: {setCursor: [plot => this.showValues(plot.cursor.idx)]},
        }, [[], ...series.map(() => [])], this.place);
        this.resizing = new ResizeObserver(() => this.plot.setSize({width: Math.max(this.place.clientWidth - 8, 120), height: HEIGHT}));
        this.resizing.observe(this.place);
        this.scheme = matchMedia("(prefers-color-scheme: dark)");
        this.redraw = () => this.plot.redraw(false, true);
        this.scheme.addEventListener("change", this.redraw);
    }

    range() {
        const times = this.data?.[0] ?? [], end = times.at(-1) ?? Date.now() / 1000;
        return [Math.max(end - SPAN_S, Math.min(times[0] ?? end, end - MIN_SPAN_S)), end];
    }

    draw(history) {
        this.data = [history.times, ...this.series.map(one => history.series[one.name])];
        this.plot.setData(this.data);
        if (this.plot.cursor.idx === null || this.plot.cursor.idx === undefined) this.showValues(null);
        const last = this.series.map((one, index) => `${one.label} ${this.show(this.data[index + 1].at(-1))}, highest ${this.show(highest(this.data[index + 1]))}`);
        this.place.setAttribute("aria-label", `${this.title}, last hour: ${last.join("; ")}`);
    }

    showValues(index) {
        const at = index === null || index === undefined ? -1 : index;
        this.values.forEach((value, number) => setText(value, this.show(this.data?.[number + 1].at(at))));
    }

    close() {
        this.resizing.disconnect();
        this.scheme.removeEventListener("change", this.redraw);
        this.plot.destroy();
    }
}

const highest = values => values.reduce((max, value) => Math.max(max, value ?? 0), 0);

export class Spark {
    constructor() {
        this.path = document.createElementNS(SVG, "path");
        this.element = document.createElementNS(SVG, "svg");
        for (const [name, value] of [["class", "spark"], ["viewBox", "0 0 100 20"], ["preserveAspectRatio", "none"], ["aria-hidden", "true"]]) {
            this.element.setAttribute(name, value);
        }
        this.element.append(this.path);
    }

    draw(values) {
        const known = values.filter(value => value !== null), top = Math.max(...known, 1e-9), step = 100 / Math.max(values.length - 1, 1);
        let pen = "M";
        const parts = values.map((value, index) => {
            if (value === null) {
                pen = "M";
                return "";
            }
            const part = `${pen}${(index * step).toFixed(1)} ${(19 - 18 * value / top).toFixed(1)}`;
            pen = "L";
            return part;
        });
        this.path.setAttribute("d", parts.join(""));
    }
}

// The last values of figures by key, taken while the page is open.
export class Samples {
    constructor(length = 60) {
        this.length = length;
        this.values = new Map();
    }

    add(values) { // {key: value}; figures that are missing are forgotten
        this.values = new Map(Object.entries(values).map(([key, value]) => [key, [...this.of(key), value ?? null].slice(-this.length)]));
    }

    of(key) {
        return this.values.get(String(key)) ?? [];
    }
}

// The data of the charts: loaded once, then extended by the pulse.
export class History {
    constructor() {
        this.times = [];
        this.series = {};
        this.listeners = new Set();
        this.loading = null;
    }

    async load() {
        const answer = await fetch("history.json", {cache: "no-store"});
        if (!answer.ok) return;
        const {times, series, step_s: step, length} = await answer.json();
        [this.times, this.series, this.step, this.length] = [times, series, step, length];
        this.changed();
    }

    add(point) { // {time, name: value, ...}
        const last = this.times.at(-1);
        if (this.length === undefined || !point || point.time <= last) return;
        if (last && point.time - last > 3 * this.step) return void this.load().catch(() => {}); // points are missing: the page was in the background
        this.times = [...this.times, point.time].slice(-this.length);
        for (const name of Object.keys(this.series)) this.series[name] = [...this.series[name], point[name] ?? null].slice(-this.length);
        this.changed();
    }

    changed() {
        for (const listener of this.listeners) listener(this);
    }
}

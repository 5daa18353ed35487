"use strict";

const MAX_SPAN_S = 600, MIN_SPAN_S = 120, MINUTE_S = 60;
const hour = new Intl.DateTimeFormat([], {hour: "2-digit", minute: "2-digit", hourCycle: "h23"});
const colour = name => () => getComputedStyle(document.documentElement).getPropertyValue(name);
const brief = value => value == null ? "–" : value.toFixed(1) + "°";
const degrees = value => value == null ? "–" : value.toFixed(1) + " °C";

// The minutes as steps. The last row is repeated at the end of its minute, since its step would otherwise have no width.
function steps(minutes) {
    const starts = [...minutes.keys()].sort((a, b) => a - b), rows = starts.map(start => minutes.get(start));
    if (starts.length) {
        starts.push(starts.at(-1) + MINUTE_S);
        rows.push(rows.at(-1));
    }
    return [starts, rows.map(row => row.high), rows.map(row => row.low), rows.map(row => row.avg)];
}

class Chart { // of one sensor: readings as a line, the average of each minute as a step, minimum to maximum as a band
    constructor(place) {
        this.place = place;
        this.readings = [];
        this.minutes = new Map(); // start in seconds -> {avg, low, high, readings}
        const stepped = uPlot.paths.stepped({align: 1}), hidden = {paths: stepped, stroke: "transparent", points: {show: false}, spanGaps: true};
        const axis = {stroke: colour("--soft"), grid: {stroke: colour("--line"), width: 1}, ticks: {show: false}, font: "12px system-ui, sans-serif"};
        this.plot = new uPlot({
            ...this.size(),
            padding: [8, 18, 0, 0],
            legend: {show: false},
            cursor: {show: false},
            scales: {x: {range: () => this.range()}, y: {range: (_, low, high) => this.rounded(low, high)}},
            axes: [
                {...axis, size: 28, space: 45, incrs: [1, 2, 5].map(minutes => minutes * MINUTE_S), values: (_, marks) => marks.map(mark => hour.format(mark * 1000))},
                {...axis, size: 44, space: 32, values: (_, marks) => marks.map(mark => mark + "°")},
            ],
            series: [
                {},
                {...hidden},
                {...hidden},
                {paths: stepped, stroke: colour("--accent"), width: 2, points: {show: false}, spanGaps: true},
                {stroke: colour("--reading"), width: 1.5, points: {show: false}},
            ],
            bands: [{series: [1, 2], fill: colour("--band")}],
        }, [[], [], [], [], []], place);
        new ResizeObserver(() => this.plot.setSize(this.size())).observe(place);
        matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.plot.redraw(false, true));
    }

    size() {
        return {width: Math.max(this.place.clientWidth, 120), height: 170};
    }

    range() {
        const end = this.readings.at(-1)?.[0] ?? Date.now() / 1000;
        const first = Math.min(this.readings[0]?.[0] ?? end, ...this.minutes.keys());
        return [Math.max(end - MAX_SPAN_S, Math.min(first, end - MIN_SPAN_S)), end];
    }

    rounded(low, high) { // at least five degrees, since noise would otherwise fill the chart
        const middle = ((low ?? 0) + (high ?? 0)) / 2, half = Math.max(2.5, ((high ?? 0) - (low ?? 0)) / 2 * 1.1);
        return [Math.floor(middle - half), Math.ceil(middle + half)];
    }

    addReading(time, temp) {
        const before = this.readings.at(-1);
        if (before && time - before[0] > 5) this.readings.push([time - 1, null]); // a gap in the line after a silence
        this.readings.push([time, temp]);
        while (this.readings[0][0] < time - MAX_SPAN_S) this.readings.shift();
    }

    addMinute(stats) {
        this.minutes.set(Date.parse(stats.minute) / 1000, stats);
        for (const start of this.minutes.keys()) if (start < Date.now() / 1000 - MAX_SPAN_S - MINUTE_S) this.minutes.delete(start);
    }

    draw() {
        const lines = [this.readings.map(reading => reading[0]), this.readings.map(reading => reading[1])];
        this.plot.setData(uPlot.join([steps(this.minutes), lines], [[1, 1, 1, 1], [1, 2]]));
    }
}

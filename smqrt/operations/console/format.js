// Formats of numbers and times.

const whole = new Intl.NumberFormat("en", {maximumFractionDigits: 0});
const STEPS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const NONE = "–";

const missing = value => value === null || value === undefined || Number.isNaN(value);

const digits = value => value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);

const trimmed = text => text.includes(".") ? text.replace(/\.?0+$/, "") : text;

export function count(value) {
    if (missing(value)) return NONE;
    if (value < 100000) return whole.format(value);
    const [size, unit] = STEPS.find(([size]) => value >= size);
    return `${digits(value / size)} ${unit}`;
}

export function rate(value) {
    if (missing(value)) return NONE;
    if (value === 0) return "0";
    if (value < 10) return trimmed(value.toFixed(1)) === "0" ? "<0.1" : trimmed(value.toFixed(1));
    if (value < 10000) return whole.format(value);
    const [size, unit] = STEPS.find(([size]) => value >= size);
    return `${digits(value / size)} ${unit}`;
}

export function bytes(value) {
    if (missing(value)) return NONE;
    let unit = 0;
    while (value >= 1024 && unit < UNITS.length - 1) [value, unit] = [value / 1024, unit + 1];
    return `${unit ? trimmed(digits(value)) : whole.format(value)} ${UNITS[unit]}`;
}

export function mebibytes(value) {
    return missing(value) ? NONE : whole.format(value / 1024 ** 2);
}

export function milliseconds(value) {
    if (missing(value)) return NONE;
    return value < 1 ? trimmed(value.toFixed(2)) : trimmed(digits(value));
}

export function duration(seconds) {
    if (missing(seconds)) return NONE;
    const s = Math.max(0, Math.floor(seconds)), parts = [[Math.floor(s / 86400), "d"], [Math.floor(s / 3600) % 24, "h"],
        [Math.floor(s / 60) % 60, "min"], [s % 60, "s"]];
    const first = parts.findIndex(([amount]) => amount);
    if (first < 0) return "0 s";
    return parts.slice(first, first + 2).filter(([amount], index) => amount || !index).map(part => part.join(" ")).join(" ");
}

export const percent = value => missing(value) ? NONE : trimmed(value.toFixed(value < 10 ? 1 : 0));

const clock = new Intl.DateTimeFormat("en-GB", {hour: "2-digit", minute: "2-digit", second: "2-digit"});
const minutes = new Intl.DateTimeFormat("en-GB", {hour: "2-digit", minute: "2-digit"});
const full = new Intl.DateTimeFormat("sv-SE", {dateStyle: "short", timeStyle: "medium"});

export const time = seconds => missing(seconds) ? NONE : clock.format(seconds * 1000);
export const minute = seconds => minutes.format(seconds * 1000);
export const moment = seconds => missing(seconds) ? NONE : full.format(seconds * 1000);

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

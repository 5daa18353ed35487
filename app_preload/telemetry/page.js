"use strict";

const HINT_MS = 8000, SHOWN_ALERTS = 12;
const RULES = {when: "too hot", absent: "silent"};
const byId = id => document.getElementById(id);
const clock = new Intl.DateTimeFormat([], {hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23"});
const sensors = new Map(); // name -> Sensor

function element(name, kind = "", text = "") {
    return Object.assign(document.createElement(name), {className: kind, textContent: text});
}

function showState(text, kind) {
    byId("state").textContent = text;
    byId("state").dataset.kind = kind;
}

class Sensor {
    constructor(name) {
        this.name = name;
        this.raised = new Set();
        this.card = element("article", "sensor card");
        this.card.setAttribute("aria-label", name);
        this.now = element("output", "now", "–");
        this.badge = element("strong", "badge");
        this.minute = element("p", "minute soft", "no statistics yet");
        const head = element("div", "head"), picture = element("div", "picture");
        head.append(element("h2", "", name), this.badge, this.now);
        picture.setAttribute("role", "img");
        picture.setAttribute("aria-label", `Temperatures of ${name} in the last ten minutes`);
        this.card.append(head, picture, this.minute);
        byId("sensors").append(this.card);
        this.chart = new Chart(picture);
        smq.subscribe("telemetry/" + name, {datatype: "json", onmsg: reading => this.onReading(reading)});
        smq.subscribe("stats/" + name, {datatype: "json", onmsg: stats => this.onMinute(stats)});
        smq.subscribe("alerts/" + name, {datatype: "json", onmsg: alert => this.onAlert(alert)});
    }

    showHistory(all) { // called after every connect: messages may have been missed
        this.chart.readings = [];
        this.raised.clear();
        for (const [time, temp] of all.readings) this.chart.addReading(time, temp);
        for (const stats of all.minutes) this.chart.addMinute(stats);
        for (const alert of all.alerts) this.onAlert(alert);
        if (all.minutes.length) this.showMinute(all.minutes.at(-1));
        if (all.readings.length) this.now.textContent = degrees(all.readings.at(-1)[1]);
        this.chart.draw();
    }

    onReading(reading) {
        this.now.textContent = degrees(reading.temp);
        this.chart.addReading(Date.now() / 1000, reading.temp);
        this.chart.draw();
    }

    onMinute(stats) {
        this.chart.addMinute(stats);
        this.showMinute(stats);
        this.chart.draw();
    }

    showMinute(stats) {
        clearTimeout(hintTimer);
        byId("hint").hidden = true;
        this.minute.replaceChildren(`${hour.format(Date.parse(stats.minute))} `, element("b", "", `⌀ ${brief(stats.avg)}`), ` ${brief(stats.low)} to ${brief(stats.high)}, ${stats.readings} readings`);
    }

    onAlert(alert) {
        this.raised[alert.state === "raised" ? "add" : "delete"](RULES[alert.rule]);
        this.badge.textContent = [...this.raised].join(", ");
        this.card.classList.toggle("raised", this.raised.size > 0);
        showAlert(this.name, alert);
    }
}

function showAlert(name, alert) {
    const item = element("li", alert.state), what = RULES[alert.rule], time = new Date(alert.ts);
    const ended = alert.state === "cleared" ? `no longer ${what}` : what;
    item.append(element("time", "soft", clock.format(time)), element("b", "", name), element("span", "", ended));
    item.dataset.time = time.getTime();
    item.dataset.key = [name, alert.rule, alert.state, alert.ts].join();
    const items = [...byId("alerts").children];
    if (items.some(other => other.dataset.key === item.dataset.key)) return;
    byId("alerts").insertBefore(item, items.find(other => other.dataset.time <= item.dataset.time) ?? null);
    while (byId("alerts").childElementCount > SHOWN_ALERTS) byId("alerts").lastElementChild.remove();
    byId("nothing").hidden = true;
}

const hintTimer = setTimeout(() => byId("hint").hidden = false, HINT_MS);
const smq = SMQ.Client(SMQ.wsURL("smq"));
smq.onconnect = smq.onreconnect = () => {
    showState("connected", "up");
    smq.publish("", "telemetry-ask");
};
smq.onclose = (message, canReconnect) => {
    showState(canReconnect ? "reconnecting …" : message, "down");
    return canReconnect && 1000;
};
smq.subscribe("self", {datatype: "json", onmsg: all => {
    if (!sensors.has(all.device)) sensors.set(all.device, new Sensor(all.device));
    sensors.get(all.device).showHistory(all);
    byId("unrecorded").hidden = all.recorded;
}});

"""Telemetry: sensors publish readings, pipelines compute statistics and alerts, a page draws them.

The topics, all JSON:
    telemetry/NAME   a sensor's reading: {device, temp}
    stats/NAME       statistics of a minute: {device, minute, avg, low, high, readings}; published at each change
    alerts/NAME      an alert: {device, rule: "when" or "absent", state: "raised" or "cleared", ts, ...}
    outages/NAME     an outage: {device, state: "silent" or "back", since, seconds}; the page doesn't show them
    telemetry-ask    a request of the page; the replies, one for each sensor, hold the latest messages, and whether
                     there is a journal

The sensors are simulated here. The journal records what is published, and the pipelines read the journal.
"""

import math
import random
import time
from collections import deque
from datetime import datetime

import gevent

from smqrt import hub
from smqrt.app import dir, worker
from smqrt.errors import JournalError

PERIOD_S = 1
SHOWN_READINGS, SHOWN_MINUTES, SHOWN_ALERTS = 600, 60, 20

try:
    smq = hub.create(journal={"retain": "1d"})
except JournalError:  # another server runs this application and has the journal open; the page shows it
    smq = hub.create()


def checked(message, time, numbers=(), texts=()):
    """Return the fields that the page needs, since any client can publish. Raises when one is missing or invalid."""
    datetime.fromisoformat(message[time])
    numbers = {name: float(message[name]) for name in numbers}
    return numbers | {name: str(message[name])[:40] for name in (time, *texts)}


class Sensor:
    """A simulated thermometer: a wave around a mean, with noise and optional pauses.

    pause_every_s: the sensor is silent for the last 20 s of each period of this length; 0 for no pauses.
    """

    def __init__(self, name, mean, swing, wave_s, pause_every_s=0):
        self.name, self.mean, self.swing, self.wave_s, self.pause_every_s = name, mean, swing, wave_s, pause_every_s
        self.drift = 0.0
        self.readings = deque(maxlen=SHOWN_READINGS)
        self.minutes = {}
        self.alerts = deque(maxlen=SHOWN_ALERTS)
        smq.subscribe(f"telemetry/{name}", onmsg=self.on_reading, json=True)
        smq.subscribe(f"stats/{name}", onmsg=self.on_minute, json=True)
        smq.subscribe(f"alerts/{name}", onmsg=self.on_alert, json=True)

    def measure(self, now_s):
        if self.pause_every_s and now_s % self.pause_every_s > self.pause_every_s - 20:
            return
        self.drift = 0.9 * self.drift + random.gauss(0, self.swing / 30)
        temp = self.mean + self.swing * math.sin(2 * math.pi * now_s / self.wave_s) + self.drift
        smq.publish({"device": self.name, "temp": round(temp, 1)}, f"telemetry/{self.name}")

    def on_reading(self, reading, ptid, tid, subtid):
        self.readings.append([round(time.time()), float(reading["temp"])])

    def on_minute(self, stats, ptid, tid, subtid):
        stats = checked(stats, "minute", ("avg", "low", "high", "readings"), ("device",))
        self.minutes[stats["minute"]] = stats
        for old in sorted(self.minutes)[:-SHOWN_MINUTES]:
            del self.minutes[old]

    def on_alert(self, alert, ptid, tid, subtid):
        self.alerts.append(checked(alert, "ts", texts=("device", "rule", "state")))

    def history(self):
        minutes = [self.minutes[minute] for minute in sorted(self.minutes)]
        history = {"device": self.name, "recorded": smq.journal is not None, "minutes": minutes}
        return history | {"readings": list(self.readings), "alerts": list(self.alerts)}


def simulate():
    sensors = [
        Sensor("boiler", mean=70, swing=14, wave_s=200),
        Sensor("server room", mean=27, swing=3, wave_s=320),
        Sensor("cellar", mean=12, swing=1.5, wave_s=500),
        Sensor("roof", mean=21, swing=6, wave_s=410, pause_every_s=180),
    ]

    def on_ask(data, ptid, tid, subtid):
        for sensor in sensors:
            smq.publish(sensor.history(), ptid)

    smq.subscribe("telemetry-ask", onmsg=on_ask)
    while True:
        for sensor in sensors:
            sensor.measure(time.time())
        gevent.sleep(PERIOD_S)


simulation = gevent.spawn(simulate) if worker.is_first else None  # with several workers, only the first simulates


def connect(request, relpath):
    """Browsers and devices connect at /telemetry/smq; all other paths are files of this folder."""
    if relpath != "smq" or not hub.isSMQ(request):
        return False
    smq.connect(request)
    return True


dir.setfunc(connect)


def onunload():
    if simulation:
        simulation.kill()

"""Telemetry: sensors publish, a pipeline computes statistics and alerts of them, a page draws it all.

The topics, all JSON:
    telemetry/NAME   a sensor's reading: {device, temp}
    stats/NAME       of each minute, by the pipeline: {device, minute, avg, low, high, readings}; again when it changes
    alerts/NAME      by the pipeline: {device, rule: "when" or "absent", state: "raised" or "cleared", ts, ...}
    outages/NAME     by the pipeline: {device, state: "silent" or "back", since, seconds}; the page doesn't show them
    telemetry-ask    who opens the page asks; the answers, one for each sensor, hold what has been so far, and whether
                     it is recorded

The sensors are simulated here. What is published is kept in the journal, from which `pipelines/telemetry.py` reads.
"""

import math
import random
import time
from collections import deque
from datetime import datetime

import gevent

from smqrt import hub
from smqrt.app import worker
from smqrt.errors import JournalError

PERIOD_S = 1
SHOWN_READINGS, SHOWN_MINUTES, SHOWN_ALERTS = 600, 60, 20

try:
    smq = hub.create(journal={"retain": "1d"})
except JournalError:  # another server runs this application too, and keeps the journal; the page tells
    smq = hub.create()


def known(told, time, numbers=(), texts=()):
    """What the page needs of a message: strangers may publish too, and it is kept. Raises when it is not there."""
    datetime.fromisoformat(told[time])
    numbers = {name: float(told[name]) for name in numbers}
    return numbers | {name: str(told[name])[:40] for name in (time, *texts)}


class Sensor:
    """A simulated thermometer: waves around a mean, some noise, and perhaps a rest now and then.

    rest: of how many seconds it is silent in the last twenty; 0 for never.
    """

    def __init__(self, name, mean, swing, wave_s, rest=0):
        self.name, self.mean, self.swing, self.wave_s, self.rest = name, mean, swing, wave_s, rest
        self.drift = 0.0
        self.readings = deque(maxlen=SHOWN_READINGS)
        self.minutes = {}
        self.alerts = deque(maxlen=SHOWN_ALERTS)
        smq.subscribe(f"telemetry/{name}", onmsg=self.on_reading, json=True)
        smq.subscribe(f"stats/{name}", onmsg=self.on_minute, json=True)
        smq.subscribe(f"alerts/{name}", onmsg=self.on_alert, json=True)

    def measure(self, now_s):
        if self.rest and now_s % self.rest > self.rest - 20:
            return
        self.drift = 0.9 * self.drift + random.gauss(0, self.swing / 30)
        temp = self.mean + self.swing * math.sin(2 * math.pi * now_s / self.wave_s) + self.drift
        smq.publish({"device": self.name, "temp": round(temp, 1)}, f"telemetry/{self.name}")

    def on_reading(self, reading, ptid, tid, subtid):
        self.readings.append([round(time.time()), float(reading["temp"])])

    def on_minute(self, stats, ptid, tid, subtid):
        stats = known(stats, "minute", ("avg", "low", "high", "readings"), ("device",))
        self.minutes[stats["minute"]] = stats
        for old in sorted(self.minutes)[:-SHOWN_MINUTES]:
            del self.minutes[old]

    def on_alert(self, alert, ptid, tid, subtid):
        self.alerts.append(known(alert, "ts", texts=("device", "rule", "state")))

    def so_far(self):
        minutes = [self.minutes[minute] for minute in sorted(self.minutes)]
        told = {"device": self.name, "recorded": smq.journal is not None, "minutes": minutes}
        return told | {"readings": list(self.readings), "alerts": list(self.alerts)}


def simulate():
    sensors = [
        Sensor("boiler", mean=70, swing=14, wave_s=200),
        Sensor("server room", mean=27, swing=3, wave_s=320),
        Sensor("cellar", mean=12, swing=1.5, wave_s=500),
        Sensor("roof", mean=21, swing=6, wave_s=410, rest=180),
    ]

    def on_ask(data, ptid, tid, subtid):
        for sensor in sensors:
            smq.publish(sensor.so_far(), ptid)

    smq.subscribe("telemetry-ask", onmsg=on_ask)
    while True:
        for sensor in sensors:
            sensor.measure(time.time())
        gevent.sleep(PERIOD_S)


simulating = gevent.spawn(simulate) if worker.is_first else None  # one of several workers has the sensors


def connect(request, relpath):
    """Browsers and devices come to /telemetry/smq; everything else is for the files of this folder."""
    if relpath != "smq" or not hub.isSMQ(request):
        return False
    smq.connect(request)
    return True


dir.setfunc(connect)


def onunload():
    if simulating:
        simulating.kill()

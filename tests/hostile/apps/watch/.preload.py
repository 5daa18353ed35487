"""A meter of the event loop, and a broker for the healthy client: /watch/held tells how long one turn held the loop.

A timer of one millisecond fires once per turn of a busy loop. The CPU time of the thread between two of its calls is
therefore what the longest turn took, whoever else uses the machine. The wall time also counts waits, as for a disk, but
not those for a core.
"""

import json
import os
import time

from gevent import get_hub

from smqrt import hub

TICK_S = 0.001

smq = hub.create()


class Meter:
    """The longest turns since `restart`."""

    def __init__(self):
        self._timer = get_hub().loop.timer(TICK_S, TICK_S)
        self._timer.ref = False
        self._schedule = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self.restart()
        self._timer.start(self._tick)

    def restart(self):
        self.cpu_s = self.wall_s = 0.0
        self._cpu, self._wall = time.thread_time(), self._undisturbed_s()

    def _undisturbed_s(self):
        queued_ns = int(os.pread(self._schedule, 99, 0).split()[1])  # how long it could have run, and had no core
        return time.perf_counter() - queued_ns / 1e9

    def stop(self):
        self._timer.close()
        os.close(self._schedule)

    def _tick(self):
        cpu, wall = time.thread_time(), self._undisturbed_s()
        self.cpu_s = max(self.cpu_s, cpu - self._cpu)
        self.wall_s = max(self.wall_s, wall - self._wall)
        self._cpu, self._wall = cpu, wall


meter = Meter()


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def held():
    figures = {"cpu_ms": meter.cpu_s * 1000, "wall_ms": meter.wall_s * 1000, "resident_bytes": resident_bytes()}
    meter.restart()
    return json.dumps(figures).encode()


def onunload():
    meter.stop()


def answer(request, relpath):
    if relpath == "smq":
        smq.connect(request)
    elif relpath == "held":
        request.response.write(held())
    else:
        return False
    return True


dir.setfunc(answer)

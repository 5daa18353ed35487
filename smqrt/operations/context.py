"""Parts of a server that the admin listener shows, and its health."""

from __future__ import annotations

import os
import resource
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, Protocol

from gevent import get_hub

from smqrt.apps.lua.applications import Application
from smqrt.apps.lua.vm import Vm
from smqrt.http.server import HttpServer
from smqrt.operations.logs import LogTail
from smqrt.server.listeners import Listeners

# ---- CPU, memory and open files, from /proc


class Usage(NamedTuple):
    """Resource usage of the process.

    Attributes:
        pid: the process ID.
        cpu_s: CPU time of all threads so far.
        memory_bytes: resident memory.
        virtual_bytes: virtual memory.
        threads: number of threads.
        open_files: open file descriptors.
        open_files_limit: limit of open file descriptors.
        started_s: start time in Unix seconds.
    """

    pid: int
    cpu_s: float
    memory_bytes: int
    virtual_bytes: int
    threads: int
    open_files: int
    open_files_limit: int
    started_s: float


_STAT_FIELDS = (11, 12, 17, 19, 20, 21)
"""utime, stime, num_threads, starttime, vsize, rss: fields of /proc/self/stat after the name (man 5 proc_pid_stat)."""


def process_usage() -> Usage:
    """Return the current resource usage."""
    with open("/proc/self/stat", "rb") as file:
        # The name of the program is in parentheses, and may contain spaces and parentheses itself.
        fields = file.read().rpartition(b")")[2].split()
    user, system, threads, started, virtual, resident = (int(fields[at]) for at in _STAT_FIELDS)
    ticks = os.sysconf("SC_CLK_TCK")
    return Usage(
        os.getpid(),
        (user + system) / ticks,
        resident * resource.getpagesize(),
        virtual,
        threads,
        # Since Linux 6.2 the size of this folder is the number of files. Before, it is 0, and 10,000 files take 4 ms.
        os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd")),
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        _boot_time_s() + started / ticks,
    )


@lru_cache(1)
def _boot_time_s() -> float:
    with open("/proc/stat", "rb") as file:
        return float(next(line for line in file if line.startswith(b"btime ")).split()[1])


# ---- Event loop delay

TICK_S = 0.05
"""The interval of measurements, which cost 0.05 % of a core. All longer turns of the loop are measured."""
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_MINUTE_S = 60


class LoopLag:
    """Measures the delay of a timer of the event loop, in the thread that calls `start`.

    Attributes:
        last_s: delay of the last tick.
        buckets: number of ticks with a delay up to each of `BUCKETS_S`, and with a longer delay.
        total_s: sum of all delays.
        count: number of ticks.
    """

    def __init__(self) -> None:
        self.last_s = self.total_s = 0.0
        self.count = 0
        self.buckets = [0] * (len(BUCKETS_S) + 1)
        self._maxima: deque[tuple[int, float]] = deque(maxlen=_MINUTE_S)
        self._timer: Any = None
        self._due_s = 0.0

    @property
    def max_s(self) -> float:
        """The maximum delay of the last minute."""
        return self.max_of(_MINUTE_S)

    def max_of(self, seconds: int) -> float:
        """Return the maximum delay of the last `seconds`, at most 60, in seconds."""
        since = int(monotonic()) - seconds
        return max((late_s for second, late_s in self._maxima if second >= since), default=0.0)

    def start(self) -> None:
        """Start measuring."""
        self._timer = get_hub().loop.timer(TICK_S, TICK_S)
        self._timer.ref = False  # the timer does not keep the loop running
        self._due_s = monotonic() + TICK_S
        self._timer.start(self._tick)

    def stop(self) -> None:
        """Stop measuring. A second call does nothing."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.stop()
            timer.close()

    def _tick(self) -> None:
        now_s = monotonic()
        late_s = max(now_s - self._due_s, 0.0)
        self._due_s = now_s + TICK_S
        self.last_s = late_s
        self.total_s += late_s
        self.count += 1
        self.buckets[next((at for at, max_s in enumerate(BUCKETS_S) if late_s <= max_s), len(BUCKETS_S))] += 1
        second = int(now_s)
        if self._maxima and self._maxima[-1][0] == second:
            self._maxima[-1] = (second, max(self._maxima[-1][1], late_s))
        else:
            self._maxima.append((second, late_s))


PHASES = ("loading", "serving", "draining")
"""Phases of a server."""


class Loaded(Protocol):
    """The attributes of an application that `Health` uses."""

    @property
    def uri(self) -> str: ...
    @property
    def error(self) -> str | None: ...


class Health:
    """Readiness of the server, as `/readyz` reports it.

    Args:
        phase: returns one of `PHASES`.
        applications: returns the applications of the server.
        strict: whether a failed application makes the server unready.

    Attributes:
        strict: see above.
        drained: whether an operator has drained the server.
    """

    def __init__(
        self, phase: Callable[[], str], applications: Callable[[], Iterable[Loaded]] = tuple, strict: bool = False
    ) -> None:
        self.strict = strict
        self.drained = False
        self._phase, self._applications = phase, applications

    @property
    def phase(self) -> str:
        """One of `PHASES`."""
        return self._phase()

    def obstacles(self) -> list[str]:
        """Return the reasons why the server is not ready, one sentence each; empty when it is ready."""
        if self.phase == "loading":
            return ["The applications are being loaded."]
        if self.phase == "draining":
            return ["The server is shutting down and closes its connections."]
        if self.drained:
            return ["The server is drained and accepts no SMQ clients until `smqrt cluster drain --undo`."]
        if not self.strict:
            return []
        failed = [one for one in self._applications() if one.error is not None]
        return [f"The application {one.uri} failed; its error is at /api/v1/apps." for one in failed]


@dataclass
class Parts:
    """The parts of a server that operators see. The server owns them.

    Attributes:
        health: readiness of the server.
        listeners: the listeners by name.
        http: the HTTP server of the listeners.
        applications: the applications in the order of loading, including failed and stopped ones.
        vm: the Lua runtime.
        pipelines: returns the folder and the state of each process of pipelines.
        restart: restarts an application; may block.
        drain: True closes the SMQ clients over the drain period and rejects new ones; False accepts clients again.
        acme: returns the state of the certificate that this process orders by ACME; None when it orders none.
        lag: the delay of the event loop.
        log: the last records of the log.
        began_s: start time by `time.monotonic`, which does not change with the clock of the machine.
    """

    health: Health
    listeners: Listeners
    http: HttpServer
    applications: Sequence[Application]
    vm: Vm
    pipelines: Callable[[], Sequence[tuple[Path, str]]]
    restart: Callable[[Application], None]
    drain: Callable[[bool], None]
    acme: Callable[[], Mapping[str, object] | None] = lambda: None
    lag: LoopLag = field(default_factory=LoopLag)
    log: LogTail = field(default_factory=LogTail)
    began_s: float = field(default_factory=monotonic)

    def start(self) -> None:
        """Start measuring the loop and keeping log records."""
        self.lag.start()
        self.log.start()

    def stop(self) -> None:
        """Stop measuring the loop and keeping log records. A second call does nothing."""
        self.lag.stop()
        self.log.stop()

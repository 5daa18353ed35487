"""Health of a server: whether it lives, and whether it should be sent clients."""

from __future__ import annotations

import os
import resource
from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from time import monotonic
from typing import Any, NamedTuple, Protocol

from gevent import get_hub

# ---- CPU, memory and files of this process, read from /proc.


class Usage(NamedTuple):
    """What the process takes.

    Attributes:
        pid: its number.
        cpu_s: seconds of CPU so far, of all its threads.
        memory_bytes: memory that it has (resident set); virtual_bytes: addresses that it has.
        threads: how many threads it has.
        open_files: file descriptors in use; open_files_limit: those it may have.
        started_s: when it began, in Unix seconds.
    """

    pid: int
    cpu_s: float
    memory_bytes: int
    virtual_bytes: int
    threads: int
    open_files: int
    open_files_limit: int
    started_s: float


def usage() -> Usage:
    """Returns what the process takes now."""
    with open("/proc/self/stat", "rb") as file:
        # Behind the name of the program, which stands in brackets and may hold anything.
        fields = file.read().rpartition(b")")[2].split()
    user, system, threads, started, virtual, resident = (int(fields[at]) for at in (11, 12, 17, 19, 20, 21))
    ticks = os.sysconf("SC_CLK_TCK")
    return Usage(
        os.getpid(),
        (user + system) / ticks,
        resident * resource.getpagesize(),
        virtual,
        threads,
        _open_files(),
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        _booted_s() + started / ticks,
    )


def _open_files() -> int:
    # Since Linux 6.2 the size of the folder; before that it is 0, and they are counted: 4 ms for 10,000.
    return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))


@lru_cache(1)
def _booted_s() -> float:
    with open("/proc/stat", "rb") as file:
        return float(next(line for line in file if line.startswith(b"btime ")).split()[1])


# ---- Delay of the event loop: a timer that looks how much later than asked for it was called.

TICK_S = 0.05
"""Twenty wake-ups a second cost 0.05 % of a core; a turn longer than this can't be missed."""
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_MINUTE_S = 60


class LoopLag:
    """Measures the loop of the thread that calls `start`.

    Attributes:
        last_s: how late the last tick was.
        buckets: how many ticks were at most as late as each of `BUCKETS_S`, and how many later than all.
        total_s, count: of all ticks.
    """

    def __init__(self) -> None:
        self.last_s = self.total_s = 0.0
        self.count = 0
        self.buckets = [0] * (len(BUCKETS_S) + 1)
        self._worst: deque[tuple[int, float]] = deque(maxlen=_MINUTE_S)
        self._timer: Any = None
        self._due_s = 0.0

    @property
    def worst_s(self) -> float:
        """The latest tick of the last minute."""
        return self.worst_of(_MINUTE_S)

    def worst_of(self, seconds: int) -> float:
        """How late the latest tick of the last `seconds`, at most a minute, was; in seconds."""
        since = int(monotonic()) - seconds
        return max((late_s for second, late_s in self._worst if second >= since), default=0.0)

    def start(self) -> None:
        """Begin to measure."""
        self._timer = get_hub().loop.timer(TICK_S, TICK_S)
        self._timer.ref = False
        self._due_s = monotonic() + TICK_S
        self._timer.start(self._tick)

    def stop(self) -> None:
        """Measure no more; a second call does nothing."""
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
        self.buckets[next((at for at, most_s in enumerate(BUCKETS_S) if late_s <= most_s), len(BUCKETS_S))] += 1
        second = int(now_s)
        if self._worst and self._worst[-1][0] == second:
            self._worst[-1] = (second, max(self._worst[-1][1], late_s))
        else:
            self._worst.append((second, late_s))


PHASES = ("loading", "serving", "draining")
"""Where a server stands in its life."""


class Loaded(Protocol):
    """An application, as far as its health is concerned."""

    @property
    def uri(self) -> str: ...
    @property
    def error(self) -> str | None: ...


class Health:
    """What `/readyz` answers.

    Args:
        phase: gives one of `PHASES`.
        applications: gives those of the server.
        strict: an application that failed makes the server unready.

    Attributes:
        strict: see above.
        drained: an operator has sent its clients to other servers.
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
        """Returns why the server should get no clients now, a sentence each; none when it should."""
        if self.phase == "loading":
            return ["The applications are being loaded."]
        if self.phase == "draining":
            return ["The server is ending; connections are being closed."]
        if self.drained:
            return ["The server is drained and takes no SMQ clients, until `smqrt cluster drain --undo`."]
        if not self.strict:
            return []
        failed = [one for one in self._applications() if one.error is not None]
        return [f"The application {one.uri} failed; its error is at /api/v1/apps." for one in failed]

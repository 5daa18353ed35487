"""The time that Java spends collecting garbage, from the counters that HotSpot keeps in a file.

A Java that has no memory left answers nobody, but its counters can be read. The file is that of `jstat`: a head, then
entries, each with a name and where its value is (`perfMemory.hpp` of OpenJDK, version 2.0). A Java that keeps none
(-XX:-UsePerfData, or another than HotSpot) tells nothing.
"""

from __future__ import annotations

import os
import re
import struct
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

FOLDERS = "/tmp"
"""Where HotSpot has the files on Linux, whatever TMPDIR says: hsperfdata_USER/PID."""
WINDOW_S = 30.0
_HEAD = struct.Struct("<IBBBBiiqii")
_ENTRY = struct.Struct("<iiibbbbi")
_MAGIC = 0xC0C0FECA  # 0xcafec0c0, big-endian in any case
_LONG = ord("J")
_TIME = re.compile(r"sun\.gc\.collector\.\d+\.time")
_FREQUENCY = "sun.os.hrt.frequency"


class Garbage:
    """Watches a Java.

    Args:
        path: of its counters.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: deque[tuple[float, float]] = deque()

    def share(self, now_s: float | None = None) -> float | None:
        """Returns which share of the last `WINDOW_S` went into collecting garbage, from 0 to 1; to be called every
        second or so.

        Args:
            now_s: of a clock that is never set; that of this moment if not given.

        Returns:
            None when nothing tells, or it has not been watched for half of that time.
        """
        now_s = time.monotonic() if now_s is None else now_s
        try:
            self._seen.append((now_s, collecting_s(self._path)))
        except (OSError, ValueError, struct.error):
            return None
        while now_s - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()
        (first_s, before_s), (_, after_s) = self._seen[0], self._seen[-1]
        watched_s = now_s - first_s
        return min(1.0, (after_s - before_s) / watched_s) if watched_s >= WINDOW_S / 2 else None


def find() -> Garbage | None:
    """Returns what watches the Java of this process, its child or, under spark-submit, its parent; None without one."""
    for process in (*_children(), os.getppid()):
        for path in Path(FOLDERS).glob(f"hsperfdata_*/{process}"):
            return Garbage(path)
    return None


def _children() -> list[int]:
    found: list[int] = []
    for thread in Path("/proc/self/task").iterdir():
        try:
            found += map(int, (thread / "children").read_text().split())
        except OSError:  # it has ended
            continue
    return found


def collecting_s(path: Path) -> float:
    """Returns for how many seconds a Java has collected garbage since it began.

    Raises:
        OSError: it has ended, or keeps no counters.
        ValueError: the file is none of these.
    """
    counters = dict(_counters(path.read_bytes()))
    ticks = sum(value for name, value in counters.items() if _TIME.fullmatch(name))
    if not counters.get(_FREQUENCY):
        raise ValueError(f"{path} has no counters of HotSpot")
    return ticks / counters[_FREQUENCY]


def _counters(data: bytes) -> Iterator[tuple[str, int]]:
    magic, is_little, _, _, _, _, _, _, at, count = _HEAD.unpack_from(data)
    if magic != _MAGIC or is_little != 1:
        raise ValueError("another format")
    for _ in range(count):
        size, name_at, _, kind, _, _, _, value_at = _ENTRY.unpack_from(data, at)
        if size <= 0:
            raise ValueError("an entry without an end")
        if kind == _LONG:
            name = data[at + name_at : data.index(b"\0", at + name_at)].decode("ascii", "replace")
            yield name, struct.unpack_from("<q", data, at + value_at)[0]
        at += size

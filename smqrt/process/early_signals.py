"""Signals that arrive while the program loads, recorded for its later handlers.

The default action of each of these signals terminates the process. Loading takes some tenths of a second, so
signals can arrive before the program installs its handlers.
"""

from __future__ import annotations

import signal
from types import FrameType

HELD = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_arrived: dict[int, None] = {}


def block() -> None:
    """Block these signals between fork and exec. `hold` unblocks them in the new program."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)


def hold() -> None:
    """Record these signals from now on. Signals that the parent ignores, as `nohup` does with SIGHUP, stay ignored."""

    def record(number: int, _frame: FrameType | None) -> None:
        _arrived[number] = None

    for number in HELD:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, record)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)


def take() -> list[int]:
    """Return the recorded signals, each once, in order of arrival, and clear the record."""
    arrived = list(_arrived)
    _arrived.clear()
    return arrived

"""Signals that arrive while a server or its pipelines load: kept, and handled when the program is ready.

The default action of each of them ends the process. Loading takes some tenths of a second, so the handlers of the
program itself come too late.
"""

from __future__ import annotations

import signal
from types import FrameType

HELD = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_arrived: dict[int, None] = {}


def block() -> None:
    """Block these signals: in a new process, before its program. `hold` unblocks them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)


def hold() -> None:
    """Keep these signals from now on, those excepted that are ignored, as `nohup` does with SIGHUP."""
    for number in HELD:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _keep)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)


def _keep(number: int, frame: FrameType | None) -> None:
    _arrived[number] = None


def take() -> list[int]:
    """Return the signals that arrived, each once, in order; they are forgotten then."""
    arrived = list(_arrived)
    _arrived.clear()
    return arrived

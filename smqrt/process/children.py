"""Child processes: restart delays, exit states, and the signal on a parent's death."""

from __future__ import annotations

import ctypes
import signal
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None)  # loaded here: between fork and exec, loading a library can deadlock


@dataclass(frozen=True)
class Patience:
    """Delays for restarting and stopping a child process, in seconds.

    Attributes:
        first_s, longest_s: the delay before a failed process starts again; it doubles each time.
        steady_s: after this run time, the delay is `first_s` again.
        stop_s: from SIGTERM to SIGKILL.
    """

    first_s: float = 1.0
    longest_s: float = 60.0
    steady_s: float = 60.0
    stop_s: float = 10.0


def failure(code: int) -> str | None:
    """Return how a process failed, from its return code; None when it succeeded."""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code else None


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent dies. Call it between fork and exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def outlive_parent() -> None:
    """Undo `end_with_parent`, once the process learns of its parent's end in another way."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0)

"""Child processes: how long to wait for them, how they ended, and that they don't outlive this one."""

from __future__ import annotations

import ctypes
import signal
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # loaded here: between fork and exec it is too late


@dataclass(frozen=True)
class Patience:
    """How long to wait, in seconds.

    Attributes:
        first_s, longest_s: before a failed process starts again; doubled each time.
        steady_s: after running for so long, it begins with `first_s` again.
        stop_s: from SIGTERM to SIGKILL.
    """

    first_s: float = 1.0
    longest_s: float = 60.0
    steady_s: float = 60.0
    stop_s: float = 10.0


def failure(code: int) -> str | None:
    """Returns how a process failed, by what `wait` gives; None when it did not."""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code else None


def end_with_parent() -> None:
    """In the new process, before its program: a server that is killed leaves nobody behind."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def outlive_parent() -> None:
    """In that process, once it hears of its parent's end in another way: a signal would be the second one to end it."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0)

"""Commands that run on a terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import termios
import time
from collections.abc import Callable
from contextlib import suppress


def on_a_terminal(command: list[str], enough: Callable[[str], bool]) -> str:
    """Runs a command until it has printed enough, or has ended; returns what it printed."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 200))
    child = subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs, env=os.environ | {"TERM": "xterm"})
    os.close(theirs)
    printed, deadline = "", time.monotonic() + 30
    with suppress(OSError):  # it has ended
        while not enough(printed) and time.monotonic() < deadline:
            printed += os.read(ours, 1 << 16).decode()
    child.send_signal(signal.SIGINT)
    child.wait(30)
    os.close(ours)
    assert enough(printed), printed
    return printed

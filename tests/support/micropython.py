"""MicroPython as a process: where it is, and programs with the client for devices."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import gevent
from gevent.fileobject import FileObjectThread

from smqrt.clients.micropython import smq
from tests.support.waiting import wait_until

REPOSITORY = Path(__file__).parents[2]
CLIENT = Path(smq.__file__).parent


def find_micropython() -> str:
    """Returns the path of `micropython`. Raises AssertionError: there is none, which is no reason to skip a test."""
    found = shutil.which("micropython") or shutil.which(REPOSITORY / ".venv/micropython/bin/micropython")
    assert found, "micropython is missing; scripts/test installs it"
    return found


class Device:
    """A program that runs in MicroPython, with `smq.py` on its path.

    Args:
        program: its text. `show(value)` writes a line, as JSON; `ask()` reads one line of its input.
        heap: of MicroPython, such as "64K"; None for that of the port.

    Attributes:
        shown: the values that it has written and no test has taken.
    """

    def __init__(self, program: str, heap: str | None = None) -> None:
        head = f"import sys, json\nsys.path.insert(0, {str(CLIENT)!r})\n"
        head += "def show(value): print(json.dumps(value))\ndef ask(): return sys.stdin.readline().strip()\n"
        options = ["-X", f"heapsize={heap}"] if heap else []
        self._process = subprocess.Popen(
            [find_micropython(), *options, "-c", head + program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.shown: list[Any] = []
        self.other: list[str] = []
        self._reading = gevent.spawn(self._read)

    def _read(self) -> None:
        for line in FileObjectThread(self._process.stdout, "rb"):
            try:
                self.shown.append(json.loads(line))
            except ValueError:  # a traceback
                self.other.append(line.decode())

    def next(self) -> Any:
        """Returns the next value that the program writes."""
        wait_until(lambda: self.shown or self._reading.dead, "a line of the program")
        assert self.shown, "".join(self.other)
        return self.shown.pop(0)

    def tell(self, line: str) -> None:
        """Writes a line to the program's input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def wait(self) -> int:
        """Waits for the end of the program and returns its exit code."""
        wait_until(lambda: self._process.poll() is not None, "the end of the program")
        self._reading.join(10)
        return self._process.returncode

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reading.join(10)

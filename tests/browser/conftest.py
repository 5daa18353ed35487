"""Fixtures of the demonstration applications: their devices, run as one runs them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import REPOSITORY
from tests.support.factory import Factory
from tests.support.waiting import wait_until

WAIT_S = 30


class Device:
    """A script of an application, running as a process of its own; it comes over a raw socket."""

    def __init__(self, script: str, *arguments: str) -> None:
        command = [sys.executable, "-u", str(REPOSITORY / "app_preload" / script), *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        self.lines.extend(line.rstrip("\n") for line in iter(self.process.stdout.readline, ""))

    def wait_for(self, line: str) -> None:
        """Fails when the device does not print `line`."""
        wait_until(lambda: line in self.lines, (line, self.lines), WAIT_S)

    def stop(self) -> None:
        """Cut the power."""
        self.process.kill()
        self.process.wait()
        self._reader.join(WAIT_S)


@pytest.fixture
def device() -> Iterator[Callable[..., Device]]:
    """A factory: `device("chat/device.py", url)`."""
    with Factory(Device, Device.stop) as start:
        yield start

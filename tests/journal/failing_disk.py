"""A real hub whose journal lies on a disk that is slow, full or broken whenever a test says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smqrt.client import SmqClient
from smqrt.journal.files import HubAddress
from smqrt.journal.reader import Journal
from tests.conftest import Served
from tests.support.waiting import wait_until

SOURCE = Path(__file__).with_suffix(".c")
APPLICATION = """
import json

from smqrt import hub

smq = hub.create(journal={settings!r})


def answer(request, relpath):
    if relpath == "smq":
        smq.connect(request)
    elif relpath == "stats":
        request.response.write(json.dumps(smq.journal.stats()).encode())
    else:
        return False
    return True


dir.setfunc(answer)
"""
QUEUE_BYTES = 64 << 20


class FailingDisk:
    """What calls of a served process do, and the hub that is served.

    Args:
        folder: for everything.
        library: the compiled shim.
        settings: of the journal.

    Attributes:
        served: the process; journal: the folder of its journal.
    """

    def __init__(self, folder: Path, library: Path, settings: dict[str, Any]) -> None:
        self._control, self._app = folder / "control", folder / "app"
        self.journal = folder / "journal"
        self._app.mkdir()
        (self._app / ".preload.py").write_text(APPLICATION.format(settings=settings | {"path": str(self.journal)}))
        self._library = library
        self.start()

    @property
    def _environment(self) -> dict[str, str]:
        disk = {"LD_PRELOAD": str(self._library), "FAILING_DISK": str(self.journal)}
        return disk | {"FAILING_DISK_CONTROL": str(self._control)}

    def start(self) -> None:
        """Starts the hub."""
        self.served = Served(self._app, env=self._environment)
        self.port = self.served.port

    def compact(self) -> tuple[int, str]:
        """Compacts what is sealed on the same disk; returns the exit code and what was said."""
        command = [sys.executable, "-m", "smqrt", "journal", "compact", str(self.journal)]
        environment = os.environ | self._environment
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)
        return ran.returncode, ran.stdout + ran.stderr

    def does(self, *calls: str, error: int = 0, delay_ms: int = 0, count: int = -1, part: str = "") -> None:
        """From now on calls ("write", "sync", "change": see the shim) wait, then fail unless `error` is 0; only the
        first `count` of them, and only on files with `part` in their path.
        """
        ready = self._control.with_suffix(".new")
        ready.write_text("".join(f"{call} {error} {delay_ms} {count} {part}\n" for call in calls))
        ready.rename(self._control)

    def is_well(self) -> None:
        """From now on all is as always."""
        self._control.unlink()

    def stats(self) -> dict[str, int]:
        """The counters of the journal."""
        with urllib.request.urlopen(f"{self.served.url}/stats", timeout=5) as answer:
            found: dict[str, int] = json.load(answer)
        return found

    def until(self, condition: Callable[[dict[str, int]], Any], timeout_s: float = 20) -> dict[str, int]:
        """Waits until the counters fulfil a condition; returns them."""
        return wait_until(lambda: condition(found := self.stats()) and found, self.served.lines, timeout_s)

    def numbers(self) -> list[int]:
        """The numbers with which the recorded payloads begin."""
        journal = Journal(self.journal)
        return [int(row.payload[:8]) for row in journal.rows(journal.begin(), journal.end())]

    def address(self) -> HubAddress:
        """Where pipelines commit to."""
        return HubAddress.of(self.journal)

    def client(self) -> SmqClient:
        """Returns a client of the hub."""
        return SmqClient(f"{self.served.url}/smq", queue_bytes=QUEUE_BYTES)


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that comes between a process and its disk."""
    library = tmp_path_factory.mktemp("shim") / "failing_disk.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    return library


@pytest.fixture
def failing(tmp_path: Path, shim: Path) -> Iterator[Callable[..., FailingDisk]]:
    """A factory of hubs on a disk that can be made to fail: `failing(sync="10ms")`."""
    made: list[FailingDisk] = []

    def make(**settings: Any) -> FailingDisk:
        made.append(FailingDisk(tmp_path, shim, settings))
        return made[-1]

    yield make
    for disk in made:
        disk.served.process.kill()
        disk.served.wait()

"""A hub under a clock that is set by an hour, a day and ten years: nothing expires, nothing stops, nobody waits."""

from __future__ import annotations

import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from smqrt.client import SmqClient
from smqrt.journal import commit, remote
from smqrt.journal.files import HubAddress
from smqrt.journal.reader import Journal
from tests.conftest import Served
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers
SOURCE = Path(__file__).parent.parent / "pipeline" / "jumping_clock.c"
DAY_S = 86400
APPLICATION = """
from smqrt import hub
from smqrt.journal import durability, record, writer

record.PERMANENT_JUMP_US, durability.RETENTION_S, writer.CLOCK_CHECK_S = 200_000, 0.1, 0.1
smq = hub.create(journal={"segment_bytes": "64KiB", "sync": "20ms", "min_free_bytes": 0})
dir.setfunc(lambda request, relpath: smq.connect(request) if relpath == "smq" else False)
"""


class Machine:
    """A machine whose clock can be set, and the hub on it."""

    def __init__(self, folder: Path) -> None:
        library, self._clock, self.app = folder / "clock.so", folder / "clock", folder / "app"
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
        self._clock.write_bytes(bytes(8))
        self.app.mkdir()
        (self.app / ".preload.py").write_text(APPLICATION)
        self.served = Served(self.app, env={"LD_PRELOAD": str(library), "JUMPING_CLOCK": str(self._clock)})
        self.client = SmqClient(f"{self.served.url}/smq")
        self.journal, self._at_s = self.app / ".journal", 0

    def jump(self, to_s: int) -> None:
        """Sets the clock to so many seconds ahead; returns when the hub believes it."""
        with self._clock.open("r+b") as file:
            file.write(struct.pack("<q", to_s))
        way, by_s = "forward" if to_s > self._at_s else "back", abs(to_s - self._at_s)
        told = f"clock was set {way} by {by_s} s"
        before, self._at_s = self.served.output.count(told), to_s
        wait_until(lambda: self.served.output.count(told) > before, told)

    def numbers(self) -> list[int]:
        journal = Journal(self.journal)
        return [int(row.payload[:8]) for row in journal.rows(journal.begin(), journal.end())]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.client.disconnect()
    machine.served.stop()


def asked(function: Callable[[], object]) -> tuple[float, object]:
    """Returns how long something takes, seconds, and what it returns."""
    began_s = time.monotonic()
    found = function()
    return time.monotonic() - began_s, found


def test_a_clock_that_is_set_again_and_again(machine: Machine) -> None:
    published = 0

    def publish() -> None:
        nonlocal published
        for _ in range(150):  # more than a segment
            assert machine.client.publish(b"%08d" % published + bytes(1000), "t")
            published += 1
        wait_until(lambda: Journal(machine.journal).end()["n1"] >= published, "what was published")

    hub = HubAddress.of(machine.journal)
    reader = remote.open_journal(hub.url, hub.token)
    publish()
    commit.report_progress(hub, "q", "q", {"n1": 20})
    for ahead_s in (3600, DAY_S, 10 * 365 * DAY_S):
        for to_s in (ahead_s, 0, -ahead_s, 0):
            waited = threading.Thread(target=machine.jump, args=(to_s,))
            waited.start()
            took_s, _ = asked(lambda: reader.wait(Journal(machine.journal).end(), 0.4))
            assert 0.3 < took_s < 5, "a long poll that the jump interrupted"
            waited.join()
            publish()
            assert machine.numbers() == list(range(published)), "nothing has expired"
    log = machine.served.output
    assert "Traceback" not in log
    assert "given up" not in log

"""The time of rows goes on over jumps of the machine's clock, and follows those that last."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from smqrt import hub
from smqrt.journal import writer
from smqrt.journal.reader import Journal
from smqrt.journal.record import Clock

SECOND = 1_000_000
HOUR = 3600 * SECOND
START = 1_795_176_000 * SECOND


class Machine:
    """A machine whose clock can be set."""

    def __init__(self) -> None:
        self.elapsed, self.ahead = 7 * SECOND, 0
        self.clock = Clock(lambda: START + self.elapsed + self.ahead, lambda: self.elapsed)
        self.jumps: list[int] = []

    def run(self, seconds: int) -> list[int]:
        """Lets time pass; returns by how much the time of rows was ahead of the true one at every second."""
        off = []
        for _ in range(seconds):
            self.elapsed += SECOND
            if jumped := self.clock.follow():
                self.jumps.append(jumped)
            off.append(self.clock.now_us() - START - self.elapsed)
        return off


def test_it_is_the_time() -> None:
    def is_right(follows: bool) -> bool:
        before_us = time.time_ns() // 1000
        clock = Clock()
        if follows:
            clock.follow()
        return before_us - 1000 <= clock.now_us() <= time.time_ns() // 1000

    for follows in (False, True):
        # Machines in the cloud have their clock set now and then; twice in a row within a millisecond it is not.
        assert any(is_right(follows) for _ in range(3))


def test_small_corrections_are_followed_and_never_go_back() -> None:
    machine = Machine()
    machine.run(3)
    machine.ahead = 2 * SECOND
    assert machine.run(2) == [2 * SECOND] * 2
    latest = machine.clock.now_us()
    machine.ahead = 0
    assert machine.run(4) == [SECOND, 0, 0, 0], "it stands still until it is right"
    assert machine.clock.now_us() > latest
    assert machine.jumps == []


def test_a_glitch_of_an_hour_is_not_seen() -> None:
    for ahead in (HOUR, -HOUR):
        machine = Machine()
        machine.ahead = ahead
        assert machine.run(55) == [0] * 55
        machine.ahead = 0
        assert machine.run(200) == [0] * 200
        assert machine.jumps == []


def test_a_lasting_clock_jump_and_its_return_are_followed() -> None:
    machine = Machine()
    machine.ahead = HOUR
    assert machine.run(61)[-2:] == [0, HOUR]
    machine.run(600)
    machine.ahead = 0
    back = machine.run(120)
    assert back[:59] == [HOUR] * 59
    assert back[61:] == [0] * 59, "no row later is in the future"
    assert machine.jumps == [HOUR, -HOUR]


def test_a_jumping_clock_is_ignored() -> None:
    machine = Machine()
    for at in range(10):
        machine.ahead = (at % 3 - 1) * HOUR
        assert machine.run(40) == [0] * 40


@pytest.mark.parametrize(("more", "quiet_s"), [(5 * SECOND - 1, 19), (5 * SECOND, 60)])
def test_a_jump_that_changes_by_five_seconds_is_another_one(more: int, quiet_s: int) -> None:
    """It has to last for a minute itself."""
    machine = Machine()
    machine.ahead = HOUR
    machine.run(41)
    machine.ahead += more
    machine.run(quiet_s)
    assert machine.jumps == []
    machine.run(1)
    assert machine.jumps == [HOUR + more]


def test_what_a_jump_has_made_older() -> None:
    machine, day_s = Machine(), 86400.0
    machine.ahead = -HOUR
    machine.run(62)
    assert machine.clock.jumped_us(day_s) == 0
    machine.ahead = 10 * HOUR
    machine.run(100)
    assert machine.clock.jumped_us(day_s) == 11 * HOUR
    machine.ahead = 0
    machine.run(62)
    assert machine.clock.jumped_us(day_s) == HOUR, "rows of the first jump look an hour older than they are"
    assert machine.clock.jumped_us(80) == 0
    assert machine.jumps == [-HOUR, 11 * HOUR, -10 * HOUR]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The machine on which hubs of this process think they run."""
    machine = Machine()
    monkeypatch.setattr(writer, "Clock", lambda: machine.clock)
    return machine


def record(smq: Any, machine: Machine, seconds: int) -> None:
    """Publishes a message each second."""
    for _ in range(seconds):
        machine.elapsed += SECOND
        smq.journal._follow_clock()
        smq.publish(b"%d" % machine.elapsed, "t")
        smq.journal.flush()


def payloads(journal: Journal, start: dict[str, int], end: dict[str, int]) -> list[int]:
    return [int(row.payload) // SECOND for row in journal.rows(start, end)]


def test_a_hub_whose_clock_jumps_for_a_while(
    machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    smq = hub.create(journal=str(tmp_path))
    record(smq, machine, 10)
    machine.ahead = HOUR
    record(smq, machine, 50)
    machine.ahead = -HOUR
    record(smq, machine, 50)
    machine.ahead = 0
    record(smq, machine, 10)
    smq.journal.close()
    journal = Journal(tmp_path)
    times = [row.ts_us for row in journal.rows({}, journal.end())]
    assert times == [START + (8 + at) * SECOND for at in range(120)]
    assert caplog.text == ""


def test_a_hub_whose_clock_was_temporarily_ahead(
    machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    smq = hub.create(journal=str(tmp_path))
    record(smq, machine, 10)
    machine.ahead = HOUR
    record(smq, machine, 70)
    machine.ahead = 0
    record(smq, machine, 100)
    smq.journal.close()
    journal = Journal(tmp_path)
    ahead = [row.seq for row in journal.rows({}, journal.end()) if row.ts_us >= START + HOUR]
    assert ahead == list(range(70, 140)), "from when it was believed until the way back was"
    assert "clock was set forward by 3600 s; messages from 70 on have the new time" in caplog.text
    assert "clock was set back by 3600 s; messages from 140 on have the new time" in caplog.text
    at_us = START + (8 + 150) * SECOND
    begin = journal.offsets_at(at_us)
    assert set(range(158, 188)) <= set(payloads(journal, begin, journal.end())), "nothing that late is before it"
    assert payloads(journal, {}, journal.offsets_until(at_us))[-1] == 157, "nothing that early is behind it"
    assert journal.offsets_until(START + 20 * SECOND) == {"n1": 12} == journal.offsets_at(START + 20 * SECOND)

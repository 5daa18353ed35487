"""Meters on their own: which messages pass at once, which wait or are dropped, and when the rest goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from smqrt.broker import client_limits as module
from smqrt.broker.client_limits import Meter, MeteredRoute
from smqrt.broker.outbox import Drop
from smqrt.broker.sessions import Session
from smqrt.broker.topics import PublishLimits
from smqrt.errors import CloseReason
from smqrt.wire import smq
from tests.broker.memory_clients import Crowd, Ear, settle

SIZE = 100  # of a frame


class Sink:
    """A route that keeps the runs."""

    def __init__(self) -> None:
        self.runs: list[bytes] = []
        self.waits = False
        self.sole_raw = "its only subscriber"

    def deliver(self, run: bytes) -> bool:
        self.runs.append(run)
        return self.waits

    def deliver_view(self, view: memoryview) -> bool:
        return self.deliver(bytes(view))

    @property
    def count(self) -> int:
        return sum(smq.count_frames(run) for run in self.runs)


class CountingEar(Ear):
    """Counts how often its client was to be read again."""

    resumed = 0

    def resume(self) -> None:
        self.resumed += 1


class Kept(Session):
    """A client whose kept messages go to a function."""

    __slots__ = ("to",)

    def route_held(self, run: bytes) -> bool:
        return self.to(run)


class Metered:
    """A client with a meter, and a clock that a test sets."""

    def __init__(self, **limits: Any) -> None:
        crowd = Crowd()
        self.broker = crowd.broker
        self.now_s = 100.0
        self.broker.clock = lambda: self.now_s
        self.later: list[tuple[float, Callable[[], object]]] = []
        self.broker.call_later = lambda delay_s, function: self.later.append((delay_s, function))
        self.sink, self.ear = Sink(), CountingEar()
        self.session = Kept(self.broker, self.ear, 5)
        self.session.control(smq.connect(b"device"))
        self.session.to = self.sink.deliver
        settle()
        self.ear.got.clear()
        self.meter = Meter(self.session, PublishLimits(**limits))

    @property
    def resumed(self) -> int:
        return self.ear.resumed

    def send(self, messages: int, size: int = SIZE) -> bool | None:
        return self.meter.deliver(self.sink, frames(messages, size))

    def tick(self) -> float:
        """Let the time come for which the meter waits; gives how long that was."""
        (delay_s, function), *self.later = self.later
        self.now_s += delay_s
        function()
        return delay_s

    @property
    def dropped(self) -> int:
        return self.broker.stats.drops[Drop.OVER_RATE]


def frames(messages: int, size: int = SIZE) -> bytes:
    return smq.publish_frame(7, 8, 0, b"x" * (size - smq.PUBLISH_HEADER_BYTES)) * messages


@pytest.mark.parametrize(
    ("limits", "has_rate", "is_any"),
    [
        ({}, False, False),
        ({"per_s": 1.0}, True, True),
        ({"bytes_per_s": 1.0}, True, True),
        ({"message_bytes": smq.MAX_PAYLOAD_BYTES}, False, False),
        ({"message_bytes": smq.MAX_PAYLOAD_BYTES - 1}, False, True),
    ],
)
def test_limits_know_whether_they_limit_anything(limits: dict[str, Any], has_rate: bool, is_any: bool) -> None:
    found = PublishLimits(**limits)
    assert (found.has_rate, found.is_any) == (has_rate, is_any)


# ---- rates


def test_a_burst_passes_then_the_rate_counts() -> None:
    metered = Metered(per_s=10.0, burst_s=2.0)
    assert metered.send(20) is False
    assert metered.send(1) is True
    assert metered.sink.count == 20
    assert metered.tick() == pytest.approx(0.1)
    assert metered.sink.count == 21
    assert metered.resumed == 1
    assert not metered.meter.waits
    metered.now_s += 0.55
    assert metered.send(5) is False


def test_at_least_one_message_may_come_at_once() -> None:
    metered = Metered(per_s=0.5, burst_s=1.0)
    assert metered.send(1) is False
    assert metered.send(1) is True


def test_bytes_have_a_rate_of_their_own() -> None:
    metered = Metered(bytes_per_s=1000.0)
    assert metered.send(10) is False
    assert metered.send(1) is True
    assert module.PUBLISH_BYTES.count == 1
    assert metered.tick() == pytest.approx(0.1)
    assert metered.sink.count == 11


def test_what_both_rates_allow_passes() -> None:
    metered = Metered(per_s=4.0, bytes_per_s=1000.0)
    assert metered.send(4) is False
    metered.now_s += 1
    assert metered.send(2, size=400) is False
    assert metered.send(1, size=300) is True
    assert metered.sink.count == 6
    metered.tick()
    assert metered.sink.count == 7


def test_a_refused_run_costs_no_tokens() -> None:
    metered = Metered(per_s=10.0, bytes_per_s=500.0)
    assert metered.meter.admits(frames(6)) is False
    assert metered.meter.admits(frames(5)) is True
    assert metered.meter.admits(frames(1)) is False
    metered.now_s += 0.2
    assert metered.meter.admits(frames(1)) is True
    assert metered.meter.admits(frames(1)) is False


def test_a_client_that_waits_has_nothing_admitted() -> None:
    metered = Metered(per_s=10.0)
    metered.send(11)
    metered.now_s += 10
    assert metered.meter.admits(frames(1)) is False


def test_a_run_goes_on_in_portions() -> None:
    metered = Metered(per_s=10.0)
    assert metered.send(25) is True
    assert metered.meter.waits
    assert metered.sink.count == 0
    assert metered.tick() == module.MIN_WAIT_S
    assert metered.sink.count == 10
    assert metered.resumed == 0
    assert [metered.tick() for _ in range(3)] == pytest.approx([0.1 - module.MIN_WAIT_S + 0.01] + [0.1] * 2, abs=0.02)
    while metered.later:
        metered.tick()
    assert metered.sink.count == 25
    assert metered.resumed == 1
    assert metered.meter.take_held() == b""


def test_runs_wait_behind_those_before() -> None:
    metered = Metered(per_s=10.0)
    metered.send(12)
    assert metered.send(1, size=50) is True
    assert len(metered.later) == 1, "one timer"
    assert module.PUBLISH_RATE.count == 1, "and one line"
    while metered.later:
        metered.tick()
    assert b"".join(metered.sink.runs) == frames(12) + frames(1, 50)
    assert metered.resumed == 1


def test_no_wait_is_longer_than_a_second() -> None:
    metered = Metered(per_s=0.1)
    metered.send(1)
    metered.send(1)
    assert metered.later[0][0] == module.MAX_WAIT_S


def test_a_message_larger_than_the_burst_passes_in_time() -> None:
    metered = Metered(bytes_per_s=100.0)
    assert metered.send(1, size=300) is True
    metered.tick()
    assert metered.sink.count == 1
    assert metered.send(1, size=50) is True, "the bucket owes 200 bytes"
    waited_s = 0.0
    while metered.later:
        waited_s += metered.tick()
    assert waited_s == pytest.approx(2.5, abs=0.05)


def test_the_client_is_not_read_while_a_hook_waits() -> None:
    metered = Metered(per_s=10.0)
    metered.send(11)
    metered.sink.waits = True
    while metered.later:
        metered.tick()
    assert metered.sink.count == 11
    assert metered.resumed == 0
    assert not metered.meter.waits


def test_a_route_that_fails_ends_the_client() -> None:
    metered = Metered(per_s=10.0)
    metered.send(11)

    def fail(run: bytes) -> bool:
        raise ValueError("broken route")

    metered.session.to = fail
    with pytest.raises(ValueError, match="broken route"):
        metered.tick()
    assert metered.session.closed
    assert metered.broker.stats.ends[CloseReason.HOOK_FAILED] == 1
    assert not metered.meter.waits
    assert metered.meter.take_held() == b""
    assert metered.resumed == 0


def test_control_packets_pass_and_are_charged() -> None:
    metered = Metered(per_s=10.0, bytes_per_s=1000.0)
    for _ in range(10):
        metered.meter.charge(95)
    assert metered.send(1) is True
    metered.meter.charge(95)
    assert metered.tick() == pytest.approx(0.1, abs=0.001), "the wait was for one message"
    assert metered.sink.count == 0
    metered = Metered(per_s=10.0, bytes_per_s=1000.0)
    metered.meter.charge(950)
    assert metered.send(1) is True
    metered = Metered(per_s=10.0, bytes_per_s=1000.0)
    metered.meter.charge(900)
    assert metered.send(1) is False


def test_tokens_come_before_a_control_packet_is_charged() -> None:
    metered = Metered(per_s=10.0)
    metered.send(10)
    metered.now_s += 5
    metered.meter.charge(10)
    assert metered.send(9) is False
    assert metered.send(1) is True


def test_a_long_message_waits_for_all_its_bytes() -> None:
    metered = Metered(bytes_per_s=1000.0)
    metered.send(1, size=1000)
    assert metered.send(1, size=600) is True
    assert metered.tick() == pytest.approx(0.6)
    assert metered.sink.count == 2


# ---- policies


def test_dropping_lets_pass_what_may() -> None:
    metered = Metered(per_s=3.0, policy="drop")
    assert metered.send(5) is False
    assert metered.sink.count == 3
    assert metered.dropped == 2
    assert module.PUBLISH_RATE.count == 2
    assert metered.send(2) is None
    assert (metered.sink.count, metered.dropped, metered.later) == (3, 4, [])


def test_dropping_counts_bytes_too() -> None:
    metered = Metered(bytes_per_s=350.0, policy="drop")
    metered.send(5)
    assert (metered.sink.count, metered.dropped) == (3, 2)
    metered.now_s += 0.1
    metered.send(5)
    assert (metered.sink.count, metered.dropped) == (3, 7)
    metered.now_s += 0.02
    metered.send(1)
    assert metered.sink.count == 3, "50 were left, and 42 came"
    metered.now_s += 0.03
    metered.send(1)
    assert metered.sink.count == 4


def test_disconnecting_ends_the_client_with_a_text() -> None:
    metered = Metered(per_s=3.0, policy="disconnect")
    assert metered.send(4) is False
    assert metered.session.closed
    assert metered.ear.got == [smq.disconnect(CloseReason.PUBLISH_RATE.value.encode())]
    assert metered.broker.stats.ends[CloseReason.PUBLISH_RATE] == 1
    assert module.PUBLISH_RATE.count == 1
    assert metered.sink.runs == []


# ---- sizes


@pytest.mark.parametrize("many", [1, 3])
@pytest.mark.parametrize("as_view", [False, True])
def test_a_message_that_is_too_long_ends_the_client(many: int, as_view: bool) -> None:
    longest = smq.PUBLISH_HEADER_BYTES + 85
    for size, closed in ((longest, False), (longest + 1, True)):
        metered = Metered(message_bytes=85)
        run = frames(many, size)
        if as_view:
            answer = metered.meter.deliver_view(metered.sink, memoryview(run))
        else:
            answer = metered.meter.deliver(metered.sink, run)
        assert answer is False
        assert metered.session.closed is closed
        assert metered.sink.runs == ([] if closed else [run])
        assert metered.broker.stats.ends[CloseReason.MESSAGE_TOO_LARGE] == closed
    assert metered.ear.got == [smq.disconnect(CloseReason.MESSAGE_TOO_LARGE.value.encode())]
    assert Metered(message_bytes=85).meter.admits(frames(many, longest)) is True
    assert Metered(message_bytes=85).meter.admits(frames(many, longest + 1)) is False


def test_a_view_is_kept_as_bytes() -> None:
    metered = Metered(per_s=2.0)
    memory = bytearray(frames(3))
    assert metered.meter.deliver_view(metered.sink, memoryview(memory)) is True
    memory[:] = bytes(len(memory))
    while metered.later:
        metered.tick()
    assert b"".join(metered.sink.runs) == frames(3)


def test_a_count_that_is_known_is_not_taken_again() -> None:
    metered = Metered(per_s=10.0)
    measured: list[int] = []
    metered.broker.measure = lambda run: bool(measured.append(len(run))) or smq.measure_frames(run)
    metered.meter.batch_messages = 3
    assert metered.send(3) is False
    assert measured == []
    assert metered.send(7) is False
    assert measured == [700], "it was known for one run only"
    metered = Metered(per_s=10.0, message_bytes=85)
    metered.broker.measure = lambda run: bool(measured.append(len(run))) or smq.measure_frames(run)
    metered.meter.batch_messages = 3
    metered.send(3)
    assert measured == [700, 300], "lengths are to be looked at"


# ---- changes, and the end


def test_changed_limits_count_from_now_on() -> None:
    metered = Metered(per_s=1.0)
    metered.send(1)
    metered.meter.apply_limits(PublishLimits(per_s=5.0, burst_s=2.0, message_bytes=200, policy="drop"))
    assert metered.send(12) is False
    assert (metered.sink.count, metered.dropped) == (11, 2)
    assert metered.send(1, size=300) is False
    assert metered.session.closed
    metered = Metered(per_s=1.0)
    metered.meter.apply_limits(PublishLimits(bytes_per_s=1000.0))
    assert metered.send(10) is False
    assert metered.send(1) is True
    metered.meter.apply_limits(PublishLimits())
    metered.tick()
    assert metered.sink.count == 11


def test_what_waits_can_be_taken_away() -> None:
    metered = Metered(per_s=2.0)
    metered.send(3)
    metered.send(1, size=50)
    assert metered.meter.take_held() == frames(3) + frames(1, 50)
    assert metered.meter.take_held() == b""
    assert not metered.meter.waits
    metered.tick()
    assert metered.sink.count == 0


def test_what_waits_at_the_end_is_counted() -> None:
    metered = Metered(per_s=2.0)
    metered.send(3)
    metered.send(2)
    metered.meter.end()
    assert metered.dropped == 5
    metered.meter.end()
    assert metered.dropped == 5


def test_a_metered_route_asks_the_meter() -> None:
    metered = Metered(per_s=2.0)
    route = MeteredRoute(metered.meter, metered.sink)
    assert route.sole_raw == "its only subscriber"  # type: ignore[comparison-overlap]
    assert route.deliver(frames(1)) is False
    assert route.deliver_view(memoryview(frames(1))) is False
    assert route.deliver(frames(1)) is True
    assert route.deliver_view(memoryview(frames(1))) is True
    assert metered.sink.count == 2


def test_the_log_shows_the_beginning_of_a_uid() -> None:
    session = Crowd().client(b"\xff" + b"a" * 100)
    assert module.describe_client(session) == "the client '\\xff" + "a" * 63 + "'"

"""When a client connects again."""

from __future__ import annotations

import pytest

from smqrt.clients.backoff import Backoff
from smqrt.clients.mqtt.connect import MqttCloseReason, MqttOptions, disconnected
from smqrt.clients.mqtt.reconnection import PAUSE_S, Reconnection
from smqrt.wire.mqtt.fields import Reason

LOST = MqttCloseReason("sock", "socketreadfailed")
TAKEN_OVER = disconnected(Reason.SESSION_TAKEN_OVER, {})


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def made(clock: Clock, **options: object) -> Reconnection:
    return Reconnection(MqttOptions(clientidentifier="me", **options), lambda: None, clock)  # type: ignore


def test_full_jitter() -> None:
    assert [Backoff(1, 60, rnd=lambda: 0.999, jitter=1.0).next_s() for _ in range(3)] == [pytest.approx(0.001)] * 3
    backoff = Backoff(1, 60, rnd=lambda: 0.0, jitter=1.0)
    assert [backoff.next_s() for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_delays_grow_from_one_second_to_sixty(clock: Clock) -> None:
    policies = [made(clock) for _ in range(400)]
    for ceiling_s in (1, 2, 4, 8, 16, 32, 60, 60):
        delays = [policy.delay_after(LOST) or 0.0 for policy in policies]
        assert ceiling_s * 0.9 < max(delays) <= ceiling_s
        assert min(delays) < ceiling_s * 0.1


def test_a_connection_that_lasted_resets_the_delay(clock: Clock) -> None:
    policy = made(clock)
    for _ in range(10):
        policy.accepted()
        policy.delay_after(LOST)  # ended at once
    assert policy._backoff.ceiling_s == 60
    policy.accepted()
    clock.now_s += 61
    policy.delay_after(LOST)
    assert policy._backoff.ceiling_s == 2


def test_decisions_of_the_application(clock: Clock) -> None:
    policy = made(clock, reconnectdelay=8.0, reconnectmax=8.0)
    default_s = policy.delay_after(LOST)
    assert default_s is not None
    assert [policy.decided(value, default_s) for value in (None, False, True, 3, NotImplemented, "x")] == [
        None,
        None,
        default_s,
        3,
        default_s,
        default_s,
    ]
    assert policy.delay_after(disconnected(Reason.BANNED, {})) is None
    assert policy.decided(NotImplemented, None) is None
    assert policy.decided(5, None) == 5


def test_two_take_overs_pause(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    policy = made(clock)
    for _ in range(3):
        default_s = policy.delay_after(TAKEN_OVER)
        assert default_s is not None
        assert default_s <= 60
        clock.now_s += 11  # not within 10 s
    assert caplog.messages == []
    for _ in range(2):
        clock.now_s += 100
        policy.delay_after(TAKEN_OVER)
        clock.now_s += 9
        assert policy.delay_after(TAKEN_OVER) == PAUSE_S
        assert policy.decided(0.01, PAUSE_S) == PAUSE_S
        assert policy.decided(False, PAUSE_S) is None
    assert len(caplog.messages) == 1
    assert "MQTT client me:" in caplog.messages[0]

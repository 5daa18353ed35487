"""The hook `onmqttgap`: sessions report lost messages."""

from __future__ import annotations

from typing import Any

import pytest

from smqrt.broker.deferred import Deferred
from smqrt.broker.mqtt import gaps
from smqrt.broker.state import Hooks
from smqrt.settings.limits import MqttSettings
from tests.broker.memory_clients import settle
from tests.broker.mqtt.hub import MqttHub


def hub_with(hook: Any) -> MqttHub:
    return MqttHub(Hooks(onmqttgap=hook), MqttSettings(queued_messages=5))


def fill(hub: MqttHub, name: str, count: int) -> None:
    """Publish to the session `name`, which is asleep."""
    if name not in hub.devices.sessions:
        device, _ = hub.client(name, name, qos=1)
        hub.devices.left(device)
    hub.publish(name.encode(), *[b"x"] * count, qos=1)


def test_each_session_reports_once_a_second_with_a_count() -> None:
    calls: list[tuple[Any, ...]] = []
    hub = hub_with(lambda *given: calls.append(given))
    fill(hub, "one", 8)
    fill(hub, "other", 6)
    fill(hub, "none", 5)
    assert not calls
    hub.tick(1)
    assert calls == [("one", 3, None, None), ("other", 1, None, None)]
    fill(hub, "one", 2)
    fill(hub, "one", 2)
    hub.tick(1)
    assert calls[2:] == [("one", 4, None, None)]
    hub.tick(1)
    assert len(calls) == 3


def test_a_connected_client_is_an_argument() -> None:
    calls: list[tuple[Any, ...]] = []
    hub = hub_with(lambda *given: calls.append(given))
    _, receiver = hub.client("slow", "t", qos=1)
    receiver.has_room = False
    hub.publish(b"t", *[b"x"] * 7, qos=1)
    hub.tick(1)
    assert calls == [("slow", 2, receiver, None)]


def test_nodes_report_the_messages_that_were_kept_for_them() -> None:
    calls: list[tuple[Any, ...]] = []
    hub = hub_with(lambda *given: calls.append(given))
    for _ in range(2):
        hub.devices.gaps.lost(3, 5)
    hub.devices.gaps.lost(0)
    hub.tick(1)
    assert calls == [(None, 10, None, 3), (None, 1, None, 0)]


def test_a_hook_that_blocks_is_called_for_one_session_at_a_time() -> None:
    answers: list[Deferred[None]] = []
    calls: list[str] = []

    def hook(client_id: str, count: int, client: object, node: object) -> Deferred[None]:
        calls.append(f"{client_id} {count}")
        answers.append(Deferred())
        return answers[-1]

    hub = hub_with(hook)
    for name in ("a", "b"):
        fill(hub, name, 6)
    hub.tick(1)
    fill(hub, "a", 9)
    hub.tick(1)
    assert calls == ["a 1"]
    for _ in range(2):
        answers[-1].resolve(None)
        settle()
    assert calls == ["a 1", "b 1"]
    hub.tick(1)
    assert calls == ["a 1", "b 1", "a 9"]


def test_reports_that_wait_are_limited(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(gaps, "MAX_WAITING", 2)
    calls: list[Any] = []
    hub = hub_with(lambda *given: calls.append(given))
    for name in ("a", "b", "c"):
        fill(hub, name, 6)
    hub.tick(1)
    assert [one[0] for one in calls] == ["a", "b"]
    assert "onmqttgap is too slow" in caplog.text


def test_without_the_hook_nothing_is_kept() -> None:
    hub = hub_with(None)
    hub.later.clear()
    fill(hub, "one", 9)
    assert not hub.later
    assert hub.devices.gaps._counts == {}

"""Clients with one client id that replace each other."""

from __future__ import annotations

from typing import Any

import pytest

from smqrt.broker.deferred import Deferred
from smqrt.broker.mqtt import take_overs
from smqrt.broker.mqtt.take_overs import MAX_TAKE_OVERS, MAX_WAITING, TAKE_OVERS
from smqrt.broker.state import Hooks
from tests.broker.mqtt.memory_devices import DeviceHub, MemoryDevice
from tests.conformance.mqtt_script import data_of


def connecting(hub: DeviceHub, script: str = "C a") -> tuple[MemoryDevice, bool]:
    """A new client, and whether it waits for CONNACK."""
    device = hub.device()
    device._splitter.feed(data_of(script, 5))
    packet = device._splitter.next()
    assert packet is not None
    return device, device.session.packet(*packet)


def fighting(hub: DeviceHub, script: str = "C a") -> MemoryDevice:
    """The last one of clients that have replaced each other as often as they may."""
    for _ in range(MAX_TAKE_OVERS + 1):
        device, waits = connecting(hub, script)
        assert not waits
    return device


def test_clients_wait_after_some_replacements(caplog: pytest.LogCaptureFixture) -> None:
    hub = DeviceHub()
    addresses: dict[Any, str] = {}
    hub.devices.take_overs.address_of = lambda client: addresses[client]
    holder, before = fighting(hub), TAKE_OVERS.count
    addresses[holder.session] = "192.0.2.1"
    hub.at(1)
    device = hub.device()
    addresses[device.session] = "192.0.2.2"
    device._splitter.feed(data_of("C a", 5))
    assert device.session.packet(*device._splitter.next())  # type: ignore[misc]
    assert device.take() == b""
    assert not holder.session.closed
    (line,) = caplog.messages
    assert all(part in line for part in ("'a'", "192.0.2.1", "192.0.2.2", "an id of its own"))
    hub.at(9.9)
    assert (device.take(), device.ear.resumes) == (b"", 0)
    hub.at(10)
    assert device.take()[:4][2:] == b"\0\0"
    assert device.ear.resumes == 1
    assert holder.session.closed
    assert TAKE_OVERS.count == before + 1
    other, waits = connecting(hub)
    assert not waits, "one replacement in the last 10 s"
    assert len(caplog.messages) == 1


def test_several_wait_and_continue_in_order(caplog: pytest.LogCaptureFixture) -> None:
    hub = DeviceHub()
    fighting(hub)
    waiting = []
    for _ in range(MAX_WAITING + 1):
        device, waits = connecting(hub)
        assert waits
        waiting.append(device)
    assert waiting[0].take()[2:4] == b"\0\x89", "too many wait"
    assert waiting[0].session.closed
    assert len(caplog.messages) == 1
    hub.at(10)
    done = [one for one in waiting[1:] if one.take()[:1] == b"\x20"]
    assert done == waiting[1 : 1 + MAX_TAKE_OVERS], "the others wait again"
    hub.at(20)
    assert [one for one in waiting if one.take()[:1] == b"\x20"] == waiting[1 + MAX_TAKE_OVERS :]


def test_a_client_that_has_gone_while_it_waited() -> None:
    hub = DeviceHub()
    holder = fighting(hub)
    device, _ = connecting(hub)
    device.lost()
    hub.at(10)
    assert not holder.session.closed
    holder.lost()
    assert not hub.left()


def test_a_client_that_waits_too_long() -> None:
    hub = DeviceHub()
    fighting(hub)
    device, _ = connecting(hub)
    device.session.connect_timed_out()
    assert device.take() == data_of("20: 00 88 P", 5)


def test_without_a_connected_client_nobody_waits() -> None:
    hub = DeviceHub()
    fighting(hub, "K a").lost()
    for _ in range(20):
        device, waits = connecting(hub, "K a")
        assert not waits
        device.lost()


def test_other_ids_do_not_wait() -> None:
    hub = DeviceHub()
    fighting(hub)
    assert [connecting(hub, f"C b{number}")[1] for number in range(10)] == [False] * 10


def test_a_wait_behind_hooks() -> None:
    """`authenticate` and the hook for the will answer later; the client is read again once."""
    answers: list[Deferred[Any]] = []

    def later(*arguments: Any) -> Deferred[Any]:
        answers.append(Deferred())
        return answers[-1]

    hub = DeviceHub()
    fighting(hub)
    hub.broker.hooks = Hooks(authenticate=later, permittop=later)
    device, waits = connecting(hub, "10: M V 06 00 00 P 'a' P 'w' 'x'")
    assert waits
    answers.pop().resolve((0, b""))
    answers.pop().resolve(True)
    assert (device.take(), device.ear.resumes) == (b"", 0)
    hub.at(10)
    assert device.take()[2:4] == b"\0\0"
    assert device.ear.resumes == 1


def test_remembered_ids_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(take_overs, "MAX_IDS", 3)
    hub = DeviceHub()
    for number in range(9):
        fighting(hub, f"C c{number}")
    assert list(hub.devices.take_overs._by_id) == ["c6", "c7", "c8"]

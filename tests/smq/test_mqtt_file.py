"""MQTT sessions and retained messages in the `persist` file of a hub."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smqrt.broker.mqtt.filters import Options
from smqrt.broker.mqtt.messages import Message
from smqrt.broker.mqtt.records import record_of
from smqrt.errors import ArgumentError
from smqrt.smq import mqtt_file
from tests.server.restart.hot import HotServed, application
from tests.server.restart.test_mqtt_clients import MqttPeer
from tests.support.device import Site
from tests.support.waiting import wait_until

MakeSite = Callable[..., Site]


def filled(site: Site) -> Any:
    devices = site.state.devices
    device, _ = devices.open("sleeper", False)
    device.expiry_s = 3600
    for _ in devices.subscribe(device, "house/#", Options(2, identifier=7)):
        pass
    devices.left(device)
    for payload in (b"\0\xff", b"second"):
        device.enqueue(Message(b"house/t", payload, 1, properties=b"\x03\0\1x", expires_s=devices.broker.clock() + 100))
    device.in_flight = {9: None}
    device.expect_release(3)
    devices.retained.set(Message(b"kept", b"\0value", 1, True))
    devices.retained.set(Message(b"short", b"x", 0, True, expires_s=devices.broker.clock() + 0.01))
    devices.retained.set(Message(b"gone", b"x", 0, True))
    devices.retained.set(Message(b"gone", b"", 0, True))
    return devices


def shown(devices: Any) -> Any:
    """What is kept, with times to a second."""
    record = record_of(devices)
    for session in record["sessions"]:
        session["ends_s"] = round(session["ends_s"])
        session["waiting"] = [[*one[:5], round(one[5]), *one[6:]] for one in session["waiting"]]
    return record["sessions"], [one for one in record["retained"] if one[0] == b"kept"]


def test_they_are_there_after_a_stop(make_site: MakeSite, tmp_path: Path) -> None:
    path = str(tmp_path / "hub.sqlite")
    first = make_site(mqtt=True, persist=path)
    before = shown(filled(first))
    first.smq.close()
    second = make_site(mqtt=True, persist=path)
    assert shown(second.state.devices) == before
    assert set(second.state.devices.retained.by_name) <= {b"kept", b"short"}
    assert second.state.devices.filters.match(b"house/x") is not None
    second.state.devices.end(second.state.devices.sessions["sleeper"])
    second.smq.close()
    third = make_site(mqtt=True, persist=path)
    assert not third.state.devices.sessions
    assert b"kept" in third.state.devices.retained.by_name


def test_retained_messages_are_written_soon(
    make_site: MakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mqtt_file, "SESSIONS_S", 0.05)
    path = tmp_path / "hub.sqlite"
    filled(make_site(mqtt=True, persist=str(path)))

    def saved() -> bool:
        with sqlite3.connect(path) as connection:
            names = connection.execute("SELECT name FROM mqtt_retained").fetchall()
            ids = connection.execute("SELECT id FROM mqtt_sessions").fetchall()
        return (b"kept",) in names and ids == [("sleeper",)]

    wait_until(saved, "the file has them")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("UPDATE mqtt_retained SET payload = x'00' WHERE name = x'6b657074'", "retained message of b'kept'"),
        ("UPDATE mqtt_sessions SET record = '{}'", "session of 'sleeper'"),
    ],
)
def test_a_damaged_file_is_refused(make_site: MakeSite, tmp_path: Path, change: str, what: str) -> None:
    path = tmp_path / "hub.sqlite"
    site = make_site(mqtt=True, persist=str(path))
    filled(site)
    site.smq.close()
    with sqlite3.connect(path) as connection:
        connection.execute(change)
    with pytest.raises(ArgumentError, match=what):
        make_site(mqtt=True, persist=str(path))


@pytest.mark.servers
def test_retained_messages_survive_a_kill(tmp_path: Path) -> None:
    preload = f'smq = require "smq.hub".create {{mqtt = true, persist = "{tmp_path}/hub.sqlite"}}'
    folder = application(tmp_path / "app", preload)
    served = HotServed(folder)
    try:
        publisher = MqttPeer(served.port, b"publisher", clean=True)
        publisher.publish(b"house/lamp", b"on", 1, 0x33)

        def saved() -> bool:
            with sqlite3.connect(tmp_path / "hub.sqlite") as connection:
                return bool(connection.execute("SELECT * FROM mqtt_retained").fetchall())

        wait_until(saved, "it is saved")
        os.kill(served.pid, signal.SIGKILL)
    finally:
        served.end()
    again = HotServed(folder)
    try:
        late = MqttPeer(again.port, b"late", clean=True)
        late.subscribe(b"#", 1)
        assert late.packet()[1].endswith(b"on")
    finally:
        again.end()

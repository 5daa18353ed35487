"""MQTT sessions and retained messages in the `persist` file of a hub."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gevent import socket

from smqrt.broker.mqtt import publishing
from smqrt.broker.mqtt.filters import Options
from smqrt.broker.mqtt.messages import Message
from smqrt.broker.mqtt.records import record_of
from smqrt.errors import ArgumentError
from smqrt.loop import threads
from smqrt.server.mqtt import take_mqtt
from smqrt.settings.limits import MqttSettings
from smqrt.smq import gevent_broker, mqtt_file, mqtt_tables
from tests.broker.mqtt.memory_devices import MemoryDevice
from tests.server.restart.hot import HotServed, application
from tests.server.restart.test_mqtt_clients import MqttPeer
from tests.support.device import Site, bounded
from tests.support.garbage import no_collections
from tests.support.mqtt_reference import packet
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
    device.rows.send(9, None)
    device.last_number = 9
    device.expect_releases((3,), is_saved=True)
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


def test_changes_are_written_soon(make_site: MakeSite, tmp_path: Path) -> None:
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
        ("UPDATE mqtt_messages SET payload = x'00'", "message .* of b'house/t'"),
        ("UPDATE mqtt_queue SET packet = packet + 1 WHERE state = 0", "row .* of the MQTT sessions"),
        ("DELETE FROM mqtt_messages", "message .* is missing"),
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


def test_a_file_with_many_damaged_sessions_is_refused_at_the_first(make_site: MakeSite, tmp_path: Path) -> None:
    path = tmp_path / "hub.sqlite"
    filled(make_site(mqtt=True, persist=str(path))).broker.close()
    with sqlite3.connect(path) as connection:
        rows = [(f"d{at}", "{" * 100, 1) for at in range(50_000)]
        connection.executemany("INSERT INTO mqtt_sessions VALUES (?, ?, ?)", rows)
    with no_collections():
        began_s = time.thread_time()
        with pytest.raises(ArgumentError, match=r"session of 'd0' was changed; restore it from a backup or remove it"):
            make_site(mqtt=True, persist=str(path))
        assert time.thread_time() - began_s < 0.05


def client(site: Site, name: bytes) -> MemoryDevice:
    """A connected client without a socket."""
    device = MemoryDevice(SimpleNamespace(broker=site.state, devices=site.state.devices))  # type: ignore[arg-type]
    device.feed(packet(0x10, b"\0\4MQTT\4\2\0\0" + len(name).to_bytes(2) + name))
    assert device.ear.got == [packet(0x20, b"\0\0")]
    device.ear.got.clear()
    return device


def test_publishers_wait_while_the_disk_fails(
    make_site: MakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mqtt_file, "RETRY_S", 0.01)
    path = str(tmp_path / "hub.sqlite")
    site = make_site(mqtt=True, persist=path)
    filled(site)
    works, attempts = mqtt_tables.write, []

    def fail(*arguments: object) -> None:
        attempts.append(1)
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(mqtt_tables, "write", fail)
    publisher = client(site, b"publisher")
    publisher.feed(packet(0x32, b"\0\7house/t\0\1x"))
    wait_until(lambda: len(attempts) > 3, "it is tried again")
    assert publisher.ear.got == []
    monkeypatch.setattr(mqtt_tables, "write", works)
    wait_until(lambda: publisher.ear.got == [packet(0x40, b"\0\1")], "the acknowledgement")
    lines = [one.getMessage() for one in caplog.records if "disk I/O error" in one.getMessage()]
    assert lines == [f"persist: {path}: disk I/O error; MQTT clients wait until the disk accepts writes again"]
    site.smq.close()
    again = make_site(mqtt=True, persist=path).state.devices
    assert again.sessions["sleeper"].waiting[-1].payload == b"x"


def test_a_client_is_not_read_while_too_many_acknowledgements_wait(
    make_site: MakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mqtt_file, "RETRY_S", 0.01)
    monkeypatch.setattr(publishing, "MAX_HELD", 4)
    site = make_site(mqtt=True, persist=str(tmp_path / "hub.sqlite"))
    site.server.take_mqtt = take_mqtt
    works, failed = mqtt_tables.write, []

    def fail(*arguments: object) -> None:
        failed.append(1)
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(mqtt_tables, "write", fail)
    with socket.create_connection(site.address(), 20) as sock:
        sock.sendall(packet(0x10, b"\0\4MQTT\4\2\0\0\0\1p"))
        assert sock.recv(4) == packet(0x20, b"\0\0")
        for number in range(1, 21):
            sock.sendall(packet(0x33, b"\0\1t" + number.to_bytes(2) + b"%d" % number))
        retained = site.state.devices.retained.by_name
        wait_until(lambda: b"t" in retained and retained[b"t"].payload == b"4", "four messages are read")
        before = len(failed)
        wait_until(lambda: len(failed) > before + 5, "the disk still fails")
        assert retained[b"t"].payload == b"4"
        monkeypatch.setattr(mqtt_tables, "write", works)
        answers = b""
        while len(answers) < 80:
            answers += sock.recv(80)
        assert answers == b"".join(packet(0x40, number.to_bytes(2)) for number in range(1, 21))
        assert retained[b"t"].payload == b"20"


@pytest.mark.parametrize("version", [4, 5])
def test_connack_waits_for_a_disk_that_fails(
    make_site: MakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: int
) -> None:
    monkeypatch.setattr(mqtt_file, "RETRY_S", 0.01)
    site = make_site(mqtt=True, persist=str(tmp_path / "hub.sqlite"), readtmo=300)
    site.server.take_mqtt = take_mqtt
    works = mqtt_tables.write

    def fail(*arguments: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    def connect(name: bytes) -> socket.socket:
        sock = socket.create_connection(site.address(), 20)
        properties = b"\5\x11\0\0\0\x64" if version == 5 else b""
        sock.sendall(packet(0x10, b"\0\4MQTT" + bytes((version, 0, 0, 0)) + properties + b"\0\1" + name))
        sock.sendall(packet(0xC0, b""))
        return sock

    monkeypatch.setattr(mqtt_tables, "write", fail)
    with connect(b"a") as sock:
        answer = b"".join(iter(lambda: sock.recv(100), b""))  # after the time limit of the handshake
        reason = b"the session was not saved in time: the disk of the server is slow or fails"
        assert answer == (b"\x20\2\0\3" if version == 4 else packet(0x20, b"\0\x88\x4d\x1f\0\x4a" + reason))
    assert f"closed: b'mqtt:a' 127.0.0.1 mqtt: refused ({reason.decode()})" in caplog.text
    site.state._admission.readtmo_ms = 20_000
    with connect(b"b") as sock:
        wait_until(lambda: "b" in site.state.devices.sessions, "CONNECT has arrived")
        monkeypatch.setattr(mqtt_tables, "write", works)
        first = sock.recv(1)
        assert first == b"\x20"
        rest = b""
        while not rest.endswith(packet(0xD0, b"")):
            rest += sock.recv(100)
        with sqlite3.connect(tmp_path / "hub.sqlite") as connection:
            assert {row[0] for row in connection.execute("SELECT id FROM mqtt_sessions")} == {"a", "b"}


def test_changes_are_saved_while_messages_are_delivered_without_pause(
    make_site: MakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = replace(gevent_broker._all_hubs.topic_rules, sync_s=0.01)
    monkeypatch.setattr(gevent_broker._all_hubs, "topic_rules", rules)
    path = tmp_path / "hub.sqlite"
    devices = filled(make_site(mqtt=True, persist=str(path)))
    wait_until(lambda: not devices.ledger.dirty, "all is saved")
    devices._is_delivering = True  # as under a load that never ends
    devices.sessions["sleeper"].enqueue(Message(b"house/t", b"third", 1))

    under_way = []

    def saved() -> bool:
        steps = devices._deliver_all()
        under_way.append(steps)  # its end would end the delivery
        while devices._unsent:
            next(steps)
        with sqlite3.connect(path) as connection:
            return bool(connection.execute("SELECT * FROM mqtt_messages WHERE payload = ?", (b"third",)).fetchall())

    wait_until(saved, "the file has it")
    assert devices.is_delivering
    devices._is_delivering = False


def test_a_hub_whose_disk_fails_closes(
    make_site: MakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mqtt_file, "RETRY_S", 0.01)
    site = make_site(mqtt=True, persist=str(tmp_path / "hub.sqlite"))

    def fail(*arguments: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(mqtt_tables, "write", fail)
    filled(site)
    publisher = client(site, b"publisher")
    publisher.feed(packet(0x32, b"\0\7house/t\0\1x"))
    wait_until(lambda: "disk I/O error" in caplog.text, "a commit fails")
    began_s = time.monotonic()
    site.smq.close()
    assert time.monotonic() - began_s < mqtt_file.CLOSE_S
    assert "closed with unsaved MQTT sessions or messages" in caplog.text


def test_a_hub_whose_disk_hangs_closes(
    make_site: MakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mqtt_file, "CLOSE_S", 0.1)
    hangs, began = threads.new_lock(), []
    hangs.acquire()

    def hang(*arguments: object) -> None:
        began.append(1)
        hangs.acquire()

    site = make_site(mqtt=True, persist=str(tmp_path / "hub.sqlite"))
    monkeypatch.setattr(mqtt_tables, "write", hang)
    try:
        filled(site)
        client(site, b"publisher").feed(packet(0x32, b"\0\7house/t\0\1x"))
        wait_until(lambda: began, "the commit")
        with bounded():
            site.smq.close()
        assert "closed with unsaved MQTT sessions or messages" in caplog.text
    finally:
        hangs.release()


@pytest.mark.parametrize(("sync", "is_relaxed"), [("publish", True), ("always", False), ("interval", False)])
def test_the_setting_sync(
    make_site: MakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: str, is_relaxed: bool
) -> None:
    monkeypatch.setattr(gevent_broker, "current_mqtt", lambda: MqttSettings(sync=sync))
    site = make_site(mqtt=True, persist=str(tmp_path / "hub.sqlite"))
    statements: list[str] = []
    site.state.store.connection.set_trace_callback(statements.append)
    filled(site)
    publisher = client(site, b"publisher")
    publisher.feed(packet(0x32, b"\0\7house/t\0\1x"))
    assert publisher.ear.got == ([packet(0x40, b"\0\1")] if sync == "interval" else [])
    wait_until(lambda: publisher.ear.got, "the acknowledgement")
    wait_until(lambda: any("mqtt_queue" in one for one in statements), "the commit")
    relaxed = "PRAGMA synchronous=NORMAL"
    assert (relaxed in statements) is is_relaxed
    wait_until(lambda: statements.count(relaxed) == statements.count("PRAGMA synchronous=FULL"), "names are synced")


def test_a_file_is_opened_again_by_the_same_hub(make_site: MakeSite, tmp_path: Path) -> None:
    """A hot restart that fails: the old process opens the file again."""
    path = str(tmp_path / "hub.sqlite")
    site = make_site(mqtt=True, persist=path)
    before = shown(filled(site))
    for _ in range(2):
        site.state.store.close()
        assert site.state.devices.ledger is None
        site.state.open_files()
    site.smq.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM mqtt_queue").fetchone() == (4,)
        assert connection.execute("SELECT count(*) FROM mqtt_messages").fetchone() == (2,)
    assert shown(make_site(mqtt=True, persist=path).state.devices) == before


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

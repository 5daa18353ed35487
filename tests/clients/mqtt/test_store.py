"""The store of an MQTT client, against a real mosquitto: kills at each write, full disks, restarts."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
import gevent.subprocess
import pytest

from smqrt.clients.mqtt import store as store_module
from smqrt.errors import ArgumentError, ClosedError, QueueFullError, StoreError
from smqrt.mqtt import MqttClient
from tests.clients.mqtt.mosquitto import Mosquitto
from tests.clients.mqtt.scripted import PUBCOMP, PUBLISH, PUBREC, PUBREL, ScriptedBroker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers

Connect = Callable[..., MqttClient]
Scripted = Callable[..., ScriptedBroker]
KEPT: dict[str, Any] = {"properties": {"sessionexpiryinterval": 3600}}
PER_ROUND = 4


class Clients:
    """The process of `store_client`."""

    def __init__(self) -> None:
        self.process: Any = gevent.subprocess.Popen(
            [sys.executable, "-m", "tests.clients.mqtt.store_client"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.said: list[tuple[str, str]] = []
        self._reader = gevent.spawn(self._read)

    def _read(self) -> None:
        for line in self.process.stdout:
            word, _, rest = line.decode().strip().partition(" ")
            self.said.append((word, rest))

    def start(self, port: int, path: Path, first: int, at: int = 0, count: int = PER_ROUND, limit: int = 0) -> Child:
        """Starts a client; the one before has ended."""
        self.said = []
        line = f"{port} {path} {first} {count} {at} {limit}\n"
        self.process.stdin.write(line.encode())
        self.process.stdin.flush()
        return Child(self.said)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(20)
        self._reader.join(20)


class Child:
    """A client of `store_client`, and what it has said so far."""

    def __init__(self, said: list[tuple[str, str]]) -> None:
        self.said = said

    def all(self, word: str) -> list[str]:
        return [rest for said, rest in self.said if said == word]

    def kill(self, number: int) -> None:
        wait_until(lambda: self.all("pid"))
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(self.all("pid")[0]), number)

    def finish(self) -> None:
        """Waits for the end; a child that was not killed delivers everything first."""
        self.kill(signal.SIGUSR1)
        wait_until(lambda: self.all("exit"), self.said)


@pytest.fixture
def clients() -> Iterator[Clients]:
    made = Clients()
    yield made
    made.close()


def handed_in(children: list[Child], qos: int) -> list[str]:
    return [number for child in children for number in child.all("handed") if 1 + int(number) % 2 == qos]


def test_a_killed_client_loses_nothing_and_doubles_no_qos_2(
    mosquitto: Mosquitto, connect: Connect, clients: Clients, tmp_path: Path
) -> None:
    got: list[str] = []
    observer = connect(mosquitto.address, None, lambda topic, payload, *_: got.append(payload.decode()))
    observer.subscribe("out", qos=2)
    assert observer.flush(20)
    children: list[Child] = []
    rnd = random.Random(7)
    ends = [*range(1, 27), *[1000] * 6, 0]
    for number, at in enumerate(ends):
        observer.publish("in", f"in {number}", 2, wait=20)
        child = clients.start(mosquitto.port, tmp_path / "store", number * PER_ROUND, at)
        children.append(child)
        if at == 1000:
            wait_until(lambda child=child: child.all("handed"))
            gevent.sleep(rnd.random() * 0.01)
            child.kill(signal.SIGKILL)
        elif at == 0:
            observer.publish("in", "last", 2, wait=20)
            wait_until(lambda: "last" in child.all("got"), child.said)  # noqa: B023
        child.finish()
    assert sum(child.all("exit") == ["-9"] for child in children) > 15
    wait_until(lambda: set(handed_in(children, 1) + handed_in(children, 2)) <= set(got), "what was handed in")
    times = Counter(got)
    assert {number: times[number] for number in times if 1 + int(number) % 2 == 2 and times[number] != 1} == {}
    received = Counter(line for child in children for line in child.all("got"))
    assert {line for line, count in received.items() if count > 1} == set(), "messages of QoS 2 come once"
    assert len(received) > 2


def test_a_full_disk_is_an_error_of_publish(
    mosquitto: Mosquitto, connect: Connect, clients: Clients, tmp_path: Path
) -> None:
    got: list[str] = []
    child = clients.start(1, tmp_path / "store", 0, count=1000, limit=200_000)
    wait_until(lambda: child.all("full"), child.said)
    child.kill(signal.SIGKILL)
    child.finish()
    assert "can't be written" in child.all("full")[0]
    assert len(child.all("handed")) > 5
    observer = connect(mosquitto.address, None, lambda topic, payload, *_: got.append(payload.decode().strip()))
    observer.subscribe("out", qos=2)
    assert observer.flush(20)
    client = connect(mosquitto.address, store=str(tmp_path / "store"), **KEPT)
    assert client.flush(20)
    wait_until(lambda: len(got) >= len(child.all("handed")))
    assert sorted(got, key=int) == child.all("handed"), "the message of the error is not sent"


def test_messages_outlive_the_client(mosquitto: Mosquitto, connect: Connect, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    got: list[Any] = []
    observer = connect(mosquitto.address, None, lambda *message: got.append((message[1], message[2], message[3] & 6)))
    observer.subscribe("t", qos=2)
    assert observer.flush(20)
    first = connect("127.0.0.1:1", lambda *_: 60, wait=False, store=path, **KEPT)
    for qos in (2, 0, 1):
        first.publish("t", f"{qos}", qos, properties={"contenttype": "x"})
    first.disconnect()
    assert first.wait_closed(20)
    with pytest.raises(ClosedError):
        first.publish("t", "late", 1)
    second = connect(mosquitto.address, store=path, **KEPT)
    assert second.backlog == 2 or second.flush(20)
    assert second.flush(20)
    wait_until(lambda: len(got) == 2)
    assert sorted(got, key=repr) == [(b"1", {"contenttype": "x"}, 2), (b"2", {"contenttype": "x"}, 4)]
    assert second._endpoint._identifier == first._endpoint._identifier, "the store keeps the identifier"
    second.close()
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT count(*) FROM outgoing").fetchone() == (0,)


def test_pubrec_is_on_disk_before_pubrel_is_sent(scripted: Scripted, connect: Connect, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    broker = scripted(on_packet=lambda wire, first, body: first & 0xF0 == PUBREL)  # no PUBCOMP
    first = connect(broker.address, timeout=0.2, store=path, **KEPT)
    first.publish("t", "x", 2)
    wait_until(lambda: broker.of_kind(PUBREL))
    first.disconnect()
    assert first.wait_closed(20)
    broker.on_packet = lambda *_: False
    second = connect(broker.address, store=path, **KEPT)
    assert second.flush(20)
    assert len(broker.of_kind(PUBLISH)) == 1
    assert len(broker.of_kind(PUBREL)) == 2


def test_a_received_identifier_is_on_disk_before_pubrec_is_sent(
    scripted: Scripted, connect: Connect, tmp_path: Path
) -> None:
    path = str(tmp_path / "store")
    got: list[bytes] = []
    broker = scripted(push=[("t", 2, b"x")], on_packet=lambda wire, first, body: first & 0xF0 == PUBREC)
    for _ in range(2):  # the broker does not get PUBREC, and sends the message again
        client = connect(broker.address, None, lambda *message: got.append(message[1]), timeout=0.2, store=path, **KEPT)
        client.subscribe("t", qos=2)
        count = len(broker.of_kind(PUBREC))
        wait_until(lambda: len(broker.of_kind(PUBREC)) > count)  # noqa: B023
        client.disconnect()
        assert client.wait_closed(20)
    broker.on_packet = lambda *_: False
    connect(broker.address, None, lambda *message: got.append(message[1]), store=path, **KEPT)
    wait_until(lambda: broker.of_kind(PUBCOMP))
    assert got == [b"x"]


def test_packets_wait_for_the_disk(
    scripted: Scripted, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room on the disk PUBREL is not sent, and the connection ends; with room the exchange goes on."""
    broker = scripted()
    ended: list[str] = []
    write = store_module.write_changes
    is_full = False

    def write_changes(database: sqlite3.Connection, changes: Any) -> None:
        if is_full:
            raise sqlite3.OperationalError("database or disk is full")
        write(database, changes)

    monkeypatch.setattr(store_module, "write_changes", write_changes)
    client = connect(
        broker.address, lambda kind, code, _: ended.append(code) or 0.01, store=str(tmp_path / "store"), **KEPT
    )

    def refuse(wire: Any, first: int, body: bytes) -> bool:
        nonlocal is_full
        is_full = is_full or first & 0xF0 == PUBLISH
        return False

    broker.on_packet = refuse
    delivery = client.publish("t", "x", 2)
    wait_until(lambda: "storefailed" in ended, ended)
    assert broker.of_kind(PUBREL) == []
    for qos in (1, 2):
        with pytest.raises(StoreError, match="disk is full"):
            client.publish("t", "y", qos)
    client.publish("t", "0", 0)
    broker.on_packet = lambda *_: False
    is_full = False
    assert delivery.wait(20)
    assert client.publish("t", "z", 2, wait=20)
    assert [payload for qos, payload in broker.received if qos] == [b"x", b"z"]


def test_one_transaction_for_messages_of_several_greenlets(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    write = store_module.write_changes

    def counted(database: sqlite3.Connection, changes: Any) -> None:
        sizes.append(len(changes))
        write(database, changes)

    monkeypatch.setattr(store_module, "write_changes", counted)
    client = connect("127.0.0.1:1", lambda *_: 60, wait=False, store=str(tmp_path / "store"), **KEPT)
    publishers = [gevent.spawn(client.publish, "t", b"x", 1) for _ in range(100)]
    gevent.joinall(publishers, 20)
    assert client.status()[0] == 100
    assert sum(sizes) == 100
    assert len(sizes) <= 3


def test_dropped_and_discarded_messages_leave_the_store(connect: Connect, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    first = connect("127.0.0.1:1", lambda *_: 60, wait=False, queuesize=2, queuefull="drop", store=path, **KEPT)
    items = [first.publish("t", f"{number}", 1) for number in range(4)]
    assert [item.error for item in items] == ["dropped", "dropped", None, None]
    first.disconnect()
    first.close(0) if not first.closing else first.wait_closed(20)
    second = connect("127.0.0.1:1", lambda *_: 60, wait=False, store=path, **KEPT)
    assert second.backlog == 2
    second.publish("t", "x", 1)
    assert second.discard() == 1
    second.disconnect()
    assert second.wait_closed(20)
    with sqlite3.connect(path) as database:
        assert [row for (row,) in database.execute("SELECT payload FROM outgoing")] == [b"2", b"3"]


def test_the_store_has_a_limit(connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_INFLIGHT", 2)
    client = connect("127.0.0.1:1", lambda *_: 60, wait=False, store=str(tmp_path / "store"), **KEPT)
    client.publish("t", "x", 1)
    client.publish("t", "x", 2)
    with pytest.raises(QueueFullError, match="2 messages of QoS 1 and 2 are in the store"):
        client.publish("t", "x", 1)
    client.publish("t", "x", 0)


def test_one_client_at_a_time_and_its_identifier(connect: Connect, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    first = connect("127.0.0.1:1", lambda *_: 60, wait=False, store=path, clientidentifier="anna", **KEPT)
    with pytest.raises(StoreError, match="Another client uses it"):
        MqttClient("127.0.0.1:1", store=path, **KEPT)
    first.disconnect()
    assert first.wait_closed(20)
    with pytest.raises(ArgumentError, match="clientidentifier must be 'anna'"):
        MqttClient("127.0.0.1:1", store=path, clientidentifier="bert", **KEPT)
    connect("127.0.0.1:1", lambda *_: 60, wait=False, store=path, **KEPT)  # the failed ones have closed it


def test_wrong_files_and_options(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database " * 100)
    for path in ("text", "folder/store"):
        with pytest.raises(StoreError, match="can't be opened"):
            MqttClient("127.0.0.1:1", store=str(tmp_path / path), **KEPT)
    with sqlite3.connect(tmp_path / "newer") as database:
        database.execute("PRAGMA user_version = 9")
    with pytest.raises(StoreError, match="format 9"):
        MqttClient("127.0.0.1:1", store=str(tmp_path / "newer"), **KEPT)
    with pytest.raises(ArgumentError, match="sessionexpiryinterval"):
        MqttClient("127.0.0.1:1", store=str(tmp_path / "store"))
    with pytest.raises(ArgumentError, match="cleanstart"):
        MqttClient("127.0.0.1:1", store=str(tmp_path / "store"), cleanstart=True, **KEPT)

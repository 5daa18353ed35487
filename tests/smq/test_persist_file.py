"""The `persist` file on a slow, full or shared disk: waiting requests, answers, and other clients."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gevent
import pytest

from smqrt import hub
from smqrt.errors import ArgumentError
from smqrt.smq import persist_file
from smqrt.wire import smq
from smqrt.wire.smq import Type
from tests.support.clock import undisturbed_s
from tests.support.device import RAW, WS, Ack, Site, bounded, publish
from tests.support.waiting import wait_until

SYNC_S = 0.004
"""What one sync of an ordinary disk takes."""


class Disk:
    """The disk under a store: every commit waits, and fails while there is a fault."""

    def __init__(self, site: Site, sync_s: float = SYNC_S) -> None:
        self.store: Any = site.state.store
        self.sync_s, self.fault, self.commits = sync_s, None, 0
        self._commit, self.store._commit = self.store._commit, self._slow

    def _slow(self, group: Any) -> None:
        time.sleep(self.sync_s)  # in the store's thread
        self.commits += 1
        if self.fault:
            raise self.fault
        self._commit(group)


@pytest.fixture
def persisted(tmp_path: Path, make_site: Callable[..., Site]) -> Callable[..., Site]:
    return lambda **options: make_site(persist=tmp_path / "names.db", **options)


def saved(tmp_path: Path) -> set[bytes]:
    with sqlite3.connect(tmp_path / "names.db") as connection:
        return {name for (name,) in connection.execute("SELECT name FROM names")}


@pytest.mark.parametrize("kind", [RAW, WS])
def test_three_thousand_names_share_commits(persisted: Callable[..., Site], tmp_path: Path, kind: str) -> None:
    site = persisted()
    disk = Disk(site)
    device, other = site.device(b"uid-a1", kind), site.device(b"other-1")
    names = [b"name-%d" % number for number in range(3000)]
    began = time.monotonic()
    sender = gevent.spawn(device.send, *[smq.with_name(Type.CREATE, name) for name in names])
    slowest = 0.0
    while not sender.ready():
        asked = time.monotonic()
        other.expect_nothing()
        slowest = max(slowest, time.monotonic() - asked)
    assert [device.ack().name for _ in names] == names
    assert time.monotonic() - began < 5
    assert slowest < 0.3
    assert disk.commits < 100
    assert saved(tmp_path) == set(names)


def test_answers_keep_their_order_while_a_name_is_saved(persisted: Callable[..., Site]) -> None:
    site = persisted()
    known = site.device(b"other-1").create(b"known")
    Disk(site, 0.1)
    device = site.device(b"uid-a1")
    requests = [
        smq.with_name(Type.CREATE, b"new"),
        smq.PING,
        smq.with_id(Type.OBSERVE, 4711),
        smq.with_id(Type.OBSERVE, known),
        smq.with_name(Type.SUBSCRIBE, b"known"),
        smq.with_name(Type.CREATESUB, b"sub"),
        smq.with_name(Type.SUBSCRIBE, b"new"),
        smq.with_name(Type.SUBSCRIBE, b"new"),
        smq.PING,
    ]
    device.send(*requests)
    new = device.ack().number
    device.expect(smq.PONG, smq.change(4711, 0), smq.change(known, 0), smq.change(known, 1))
    device.expect(smq.ack(Type.SUBACK, known, b"known"))
    assert device.ack().name == b"sub"
    assert [device.ack(), device.ack()] == [Ack(Type.SUBACK, False, new, b"new")] * 2
    device.expect(smq.PONG)
    assert site.state.topic_table.by_name[b"new"].subscribers == 1


def test_suback_comes_before_the_first_message_of_its_topic(persisted: Callable[..., Site]) -> None:
    site = persisted()
    Disk(site, 0.1)
    device = site.device(b"uid-a1")
    device.send(smq.with_name(Type.SUBSCRIBE, b"new"))
    wait_until(lambda: b"new" in site.state.topic_table.by_name, "the name")
    site.smq.publish("too early", "new")
    tid = device.ack().number
    site.smq.publish("heard", "new")
    device.expect(publish(tid, 1, b"heard"))


def test_two_requests_for_one_new_name_both_wait(persisted: Callable[..., Site], tmp_path: Path) -> None:
    site = persisted()
    Disk(site, 0.1)
    first, second = site.device(b"first-1"), site.device(b"second")
    first.send(smq.with_name(Type.CREATE, b"new"))
    second.send(smq.with_name(Type.CREATE, b"new"))
    assert second.ack() == first.ack()
    assert saved(tmp_path) == {b"new"}


def test_a_full_disk_denies_names_until_it_recovers(
    persisted: Callable[..., Site], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persist_file, "RETRY_S", 0.05)
    site = persisted()
    known = site.device(b"other-1").create(b"known")
    disk = Disk(site)
    disk.fault = sqlite3.OperationalError("database or disk is full")
    device = site.device(b"uid-a1")
    for name in (b"one", b"two"):
        assert device.ask(Type.SUBSCRIBE, name) == Ack(Type.SUBACK, True, 0, name)
    assert device.create(b"known") == known
    number = site.smq.create("server's own")
    wait_until(lambda: disk.commits > 4, "more attempts")
    complaints = [record.getMessage() for record in caplog.records if "persist" in record.getMessage()]
    assert len(complaints) == 1
    assert "database or disk is full" in complaints[0]
    disk.fault = None
    device.subscribe(b"one")
    wait_until(lambda: saved(tmp_path) == {b"known", b"one", b"two", b"server's own"}, "all names on the disk")
    assert site.smq.topic2tid("server's own") == number
    assert "names are saved again" in caplog.text


def test_a_slow_disk_denies_and_keeps_the_name(
    persisted: Callable[..., Site], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persist_file, "SLOW_S", 0.1)
    site = persisted()
    disk = Disk(site, 0.4)
    device = site.device(b"uid-a1")
    began_s = undisturbed_s()
    assert device.ask(Type.CREATE, b"new").denied
    assert undisturbed_s() - began_s < 0.35
    wait_until(lambda: saved(tmp_path) == {b"new"}, "the commit")
    disk.sync_s = 0
    assert device.create(b"new") == site.smq.topic2tid("new")


def test_a_client_with_a_thousand_waiting_requests_is_paused(persisted: Callable[..., Site]) -> None:
    site = persisted()
    Disk(site, 0.3)
    device = site.device(b"uid-a1")
    device.send(smq.with_name(Type.CREATE, b"new"), *[smq.PING] * 5000)
    session = site.state.sessions[device.etid]
    wait_until(lambda: session.outbox.paused and session.waits_for_disk, "the pause")
    assert len(session.unsaved_answers) == 1000
    device.ack()
    with bounded():
        device.expect(*[smq.PONG] * 5000)


def test_the_name_of_a_disconnected_client_is_saved(persisted: Callable[..., Site], tmp_path: Path) -> None:
    site = persisted()
    Disk(site, 0.1)
    device = site.device(b"uid-a1")
    device.send(smq.with_name(Type.SUBSCRIBE, b"new"), smq.disconnect())
    device.expect_end()
    wait_until(lambda: saved(tmp_path) == {b"new"}, "the commit")
    assert site.state.topic_table.by_name[b"new"].subscribers == 0


def test_close_waits_for_unsaved_names(persisted: Callable[..., Site], tmp_path: Path) -> None:
    site = persisted()
    Disk(site, 0.1)
    for number in range(50):
        site.smq.create(f"name-{number}")
    site.smq.close()
    assert len(saved(tmp_path)) == 50
    site.smq.close()


def test_close_waits_for_a_bounded_time(
    persisted: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(persist_file, "CLOSE_S", 0.1)
    site = persisted()
    disk = Disk(site)
    disk.fault = sqlite3.OperationalError("disk I/O error")
    site.smq.create("lost")
    began = time.monotonic()
    site.smq.close()
    assert time.monotonic() - began < 2
    assert "closed with 1 unsaved names" in caplog.text


def test_names_are_saved_at_exit(tmp_path: Path) -> None:
    code = "from smqrt import hub\nsmq = hub.create(persist='names.db')\nsmq.create('one'); smq.createsub('two')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=20, check=True)
    assert saved(tmp_path) == {b"one", b"two"}


def test_a_second_hub_for_a_file_is_refused(persisted: Callable[..., Site], tmp_path: Path) -> None:
    site = persisted()
    with pytest.raises(ArgumentError, match="names.db is used by another hub, of process [0-9]+; give each hub a file"):
        hub.create(persist=tmp_path / "names.db")
    site.smq.create("still works")
    site.smq.close()
    assert saved(tmp_path) == {b"still works"}
    hub.create(persist=tmp_path / "names.db").close()


def test_a_file_of_another_process_is_refused(tmp_path: Path) -> None:
    code = "import sys; from smqrt import hub; smq = hub.create(persist='names.db')"
    code += "; print('ready', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdin=pipe, stdout=pipe) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        with pytest.raises(ArgumentError, match=f"of process {process.pid};"):
            hub.create(persist=tmp_path / "names.db")
        process.communicate()
    hub.create(persist=tmp_path / "names.db").close()


def test_an_unreferenced_hub_releases_its_file(tmp_path: Path) -> None:
    hub.create(persist=tmp_path / "names.db").create("one")
    wait_until(lambda: not persist_file.unfinished, "the commit")
    with hub.create(persist=tmp_path / "names.db") as smq:
        assert smq.topic2tid("one")

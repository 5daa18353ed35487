"""The journal of a hub has what it publishes: real clients, a real hub, real files."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gevent
import pytest

from smqrt import hub
from smqrt.errors import ArgumentError, JournalError
from smqrt.journal import arrow, committed, durability, segment, writer
from smqrt.journal.columns import MAX_ROWS
from smqrt.journal.record import Flag, Row
from smqrt.loop import scheduling
from smqrt.wire.smq import Type
from tests.support.device import RAW, WS, Site, bounded, publish
from tests.support.waiting import wait_until

Make = Callable[..., Site]


@pytest.fixture(autouse=True)
def closed() -> Any:
    yield
    writer.close_all()


@pytest.fixture
def record(make_site: Make, tmp_path: Path) -> Callable[..., Site]:
    """A factory of sites whose hub keeps a journal in `tmp_path`."""

    def make(options: dict[str, Any] | None = None, **others: Any) -> Site:
        return make_site(journal={"path": str(tmp_path / "journal"), **(options or {})}, **others)

    return make


def rows(site: Site) -> list[Row]:
    site.smq.journal.flush()
    return written(site)


def written(site: Site) -> list[Row]:
    """What is in the files now."""
    found: list[Row] = []
    for path in segment.paths(site.smq.journal.path / "wal" / "n1"):
        data = path.read_bytes()
        for entry in segment.read_index(path):
            found += arrow.decode(data[entry.offset : entry.end])
    return found


def test_a_message_and_what_is_known_of_it(record: Make) -> None:
    site = record()
    began_us = time.time_ns() // 1000
    receiver, sender = site.device(b"receiver"), site.device(b"sensor-1")
    tid = receiver.subscribe(b"site/1")
    stid = site.smq.createsub("temp")
    sender.publish(tid, b"21.5", stid)
    receiver.expect(publish(tid, sender.etid, b"21.5", stid))
    [row] = rows(site)
    assert began_us <= row.ts_us <= time.time_ns() // 1000
    assert row == Row(0, row.ts_us, "site/1", tid, "temp", stid, sender.etid, "sensor-1", 0, b"21.5", None)


@pytest.mark.parametrize("kind", [RAW, WS])
def test_order_and_numbers_are_dense(record: Make, kind: str) -> None:
    site = record()
    receiver, sender = site.device(b"receiver"), site.device(b"sender-1", kind)
    tid = receiver.subscribe(b"numbers")
    for number in range(500):
        sender.publish(tid, b"%d" % number)
    wait_until(lambda: len(rows(site)) == 500, "500 rows")
    assert [row.payload for row in rows(site)] == [b"%d" % number for number in range(500)]
    assert [row.seq for row in rows(site)] == list(range(500))


def test_flags(record: Make) -> None:
    site = record()
    one, two = site.device(b"device-1"), site.device(b"device-2")
    tid = one.subscribe(b"topic")
    lonely = site.smq.create("lonely")
    one.publish(lonely, b"nobody")
    one.publish(two.etid, b"direct")
    one.send(publish(tid, one.etid, b"frag", kind=Type.PUBFRAG)[:1] + publish(0, one.etid, b"frag-")[1:])
    one.send(publish(tid, one.etid, b"ment", kind=Type.PUBFRAG))
    site.smq.publish("server", "topic")
    wait_until(lambda: len(rows(site)) == 4, "four rows")
    kept = {row.payload: row for row in rows(site)}
    assert kept[b"nobody"].flags == Flag.UNROUTED
    assert kept[b"direct"].flags == Flag.DIRECT
    assert kept[b"direct"].topic is None
    assert kept[b"direct"].tid == two.etid
    assert kept[b"frag-ment"].flags == Flag.ASSEMBLED
    assert kept[b"server"].flags == Flag.SERVER
    assert site.smq.drops()["unrouted"] == 1


def test_a_client_that_left_keeps_its_name(record: Make) -> None:
    site = record({"flush_ms": 2000})
    receiver, sender = site.device(b"receiver"), site.device(b"short-lived")
    tid = receiver.subscribe(b"topic")
    sender.publish(tid, b"bye")
    receiver.expect(publish(tid, sender.etid, b"bye"))
    sender.disconnect()
    wait_until(lambda: len(list(site.smq.peers())) == 2, "the end of the client")
    assert [row.uid for row in rows(site)] == ["short-lived"]


def test_only_what_is_asked_for(record: Make) -> None:
    site = record({"topics": ["site/#"], "exclude": ["site/noise"], "direct": False})
    receiver, sender = site.device(b"receiver"), site.device(b"sender-1")
    tids = {topic: receiver.subscribe(topic) for topic in (b"site/1", b"site/noise", b"other")}
    for payload, tid in {**tids, b"direct": receiver.etid}.items():
        sender.publish(tid, payload)
        receiver.expect(publish(tid, sender.etid, payload))
    assert [row.payload for row in rows(site)] == [b"site/1"]
    assert site.smq.journal.stats()["skipped"] == 3


def test_many_topics_at_once_use_the_fast_path(record: Make) -> None:
    site = record()
    receivers = [site.device(b"receiver%d" % number) for number in range(4)]
    sender = site.device(b"sender-1")
    tids = [receiver.subscribe(b"topic/%d" % number) for number, receiver in enumerate(receivers)]
    packets = [publish(tids[number % 4], sender.etid, b"%d" % number) for number in range(4000)]
    for at in range(0, 4000, 100):
        sender.send(*packets[at : at + 100])
    wait_until(lambda: site.smq.journal.stats()["rows"] == 4000 or not site.smq.journal.flush() and False, "all rows")
    assert [row.payload for row in rows(site)] == [b"%d" % number for number in range(4000)]


@pytest.mark.parametrize("sync", ["publish", "always"])
def test_messages_are_written_before_delivery(record: Make, sync: str) -> None:
    site = record({"sync": sync, "flush_ms": 5000})
    receiver, sender = site.device(b"receiver"), site.device(b"sender-1")
    tid = receiver.subscribe(b"topic")
    sender.publish(tid, b"x")
    receiver.expect(publish(tid, sender.etid, b"x"))
    assert [row.payload for row in written(site)] == [b"x"], "without asking for a flush"


def test_onpublish_comes_first(record: Make) -> None:
    site = record(onpublish=lambda data, *rest: data != b"no")
    receiver, sender = site.device(b"receiver"), site.device(b"sender-1")
    tid = receiver.subscribe(b"topic")
    sender.publish(tid, b"no")
    sender.publish(tid, b"yes")
    receiver.expect(publish(tid, sender.etid, b"yes"))
    assert [row.payload for row in rows(site)] == [b"yes"]


def test_a_restart_goes_on_behind_the_last_number(record: Make) -> None:
    for number in range(3):
        site = record()
        site.smq.publish(b"%d" % number, "topic")
        site.smq.journal.close()
    assert [(row.seq, row.payload) for row in written(site)] == [(0, b"0"), (1, b"1"), (2, b"2")]


def test_segments_are_sealed(record: Make) -> None:
    site = record({"segment_bytes": 65536})
    for number in range(40):
        site.smq.publish(b"%02d" % number * 2000, "topic")
        site.smq.journal.flush()
    *sealed, _ = sorted(site.smq.journal.path.glob("wal/*/*.arrows"))
    assert sealed
    wait_until(lambda: all(map(segment.known_summary, sealed)), "a summary of each")
    assert [int(row.payload[:2]) for row in rows(site)] == list(range(40))


def test_a_quiet_hub_seals_its_segment_in_time(record: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    site = record()
    site.smq.publish("1", "topic")
    site.smq.journal.flush()
    site.smq.journal._seal_if_old()
    assert len(list(site.smq.journal.path.glob("wal/*/*.arrows"))) == 1, "not yet"
    monkeypatch.setattr(writer, "SEAL_S", 0.0)
    site.smq.journal._seal_if_old()
    site.smq.journal._seal_if_old()
    assert len(list(site.smq.journal.path.glob("wal/*/*.arrows"))) == 2, "an empty one is not sealed"
    site.smq.publish("2", "topic")
    assert [row.payload for row in rows(site)] == [b"1", b"2"]


def test_a_large_commit_lets_others_have_their_turn(record: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "TURN_S", 0.0)  # however fast the machine is
    site = record()
    turns: list[float] = []

    def beat() -> None:
        while True:
            turns.append(time.perf_counter())
            gevent.sleep(1e-6)

    heart = gevent.spawn(beat)
    stored = site.smq.journal.commit("q", 0, [(b"results", None, b"%06d" % number) for number in range(500)])
    heart.kill()
    assert stored
    assert len(turns) > 500, "looking at the rows and publishing them take many turns"
    assert len(rows(site)) == 500


def test_the_same_commit_twice_at_once_is_stored_once(record: Make) -> None:
    site = record()
    many = [(b"results", None, b"%06d" % number) for number in range(20_000)]
    twice = [gevent.spawn(site.smq.journal.commit, "q", 0, many) for _ in range(2)]
    gevent.joinall(twice)
    assert sorted(one.value for one in twice) == [False, True]
    assert len(rows(site)) == 20_000


def test_what_is_too_much_goes_oldest_first(record: Make) -> None:
    site = record({"segment_bytes": 65536, "max_bytes": 200_000})
    journal = site.smq.journal
    for number in range(40):
        site.smq.publish(b"%02d" % number * 10_000, "topic")
        journal.flush()
        assert journal._durability.join(), "a segment is sealed when the one before it is finished"
    assert len(rows(site)) == 40
    journal._durability.start_retention()
    assert journal._durability.join()
    kept = [int(row.payload[:2]) for row in written(site)]
    assert kept == list(range(kept[0], 40)), "what is left has no holes"
    assert 1 < len(kept) < 12


def test_a_temporarily_wrong_clock_removes_nothing(record: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    site = record({"segment_bytes": 65536, "retain": "1d", "reader_timeout_s": "1d"})
    journal = site.smq.journal
    for number in range(20):
        site.smq.publish(b"%02d" % number * 10_000, "topic")
        journal.flush()
        assert journal._durability.join()
    wrong_ns = time.time_ns() + 30 * 86400 * 10**9
    with monkeypatch.context() as set_wrong:
        set_wrong.setattr(time, "time_ns", lambda: wrong_ns)
        journal._durability.start_retention()
        assert journal._durability.join()
    assert len(rows(site)) == 20


def test_a_commit_is_saved_with_the_segment_it_fills(record: Make) -> None:
    site = record({"segment_bytes": 65536})
    journal = site.smq.journal
    assert journal.commit("q", 3, [(b"t", None, bytes(60_000))] * 2)
    assert journal._durability.join()
    assert committed.load_snapshot(journal.path / "wal" / "n1") == {"q": 3}


def test_a_commit_is_stored_and_published_once(record: Make) -> None:
    site = record()
    device = site.device(b"device-1")
    tid = device.subscribe(b"results")
    journal = site.smq.journal
    assert journal.commit("q", 0, [(b"results", None, b"one"), (b"results", b"sub", b"two")])
    assert not journal.commit("q", 0, [(b"results", None, b"one"), (b"results", b"sub", b"two")])
    device.expect(publish(tid, 1, b"one"))
    device.expect(publish(tid, 1, b"two", site.smq.createsub("sub")))
    device.expect_nothing()
    one, two = rows(site)
    assert one.flags == two.flags == Flag.PIPELINE | Flag.SERVER
    assert (one.txn, two.txn, two.subtopic) == ("q:0", "q:0", "sub")
    assert journal.stats()["duplicates"] == 1


def test_a_commit_is_known_after_a_restart(record: Make) -> None:
    site = record()
    site.smq.journal.commit("q", 7, [(b"results", None, b"one")])
    site.smq.journal.close()
    site = record()
    assert not site.smq.journal.commit("q", 7, [(b"results", None, b"one")])
    assert not site.smq.journal.commit("q", 6, [(b"results", None, b"older")])
    assert site.smq.journal.commit("q", 8, [(b"results", None, b"two")])
    assert [row.payload for row in rows(site)] == [b"one", b"two"]


def test_a_commit_that_is_too_long_is_refused_whole(record: Make) -> None:
    site = record()
    with pytest.raises(ArgumentError, match="^results: 70000 bytes; "):
        site.smq.journal.commit("q", 0, [(b"results", None, b"fits"), (b"results", None, bytes(70000))])
    assert not rows(site)
    assert site.smq.journal.commit("q", 0, [(b"results", None, b"fits")])


def test_a_disk_that_takes_nothing_makes_publishers_wait(record: Make) -> None:
    """The refusal is real: the kernel lets the files grow no further, as a full disk does."""
    site = record({"flush_ms": 1})
    journal = site.smq.journal
    receiver, sender = site.device(b"receiver"), site.device(b"sender-1")
    tid = receiver.subscribe(b"topic")
    with limited_file_size(200_000):
        for number in range(400):
            sender.publish(tid, b"%03d" % number + bytes(1000))
            gevent.sleep(0)
        wait_until(lambda: journal.stats()["stalls"] == 1, "a stall")
        with pytest.raises(JournalError, match="make room"):
            journal.commit("q", 0, [(b"results", None, b"one")])
    wait_until(lambda: len(rows(site)) == 400, "all rows")
    assert [int(row.payload[:3]) for row in rows(site)] == list(range(400)), "nothing is lost, doubled or out of order"
    for number in range(400):
        receiver.expect(publish(tid, sender.etid, b"%03d" % number + bytes(1000)))


@pytest.mark.parametrize(("count", "size_bytes"), [(1000, 30_000), (12_000, 2_000)], ids=["large runs", "short runs"])
def test_publishers_wait_so_that_memory_does_not_grow(record: Make, count: int, size_bytes: int) -> None:
    site = record({"flush_ms": 1})
    journal, payloads = site.smq.journal, [b"%05d" % number + bytes(size_bytes) for number in range(count)]
    sender = site.device(b"sender-1")
    tids = [site.smq.create("one"), site.smq.create("two")]  # in turn: a run is one message
    with limited_file_size(200_000):
        sending = gevent.spawn(lambda: [sender.publish(tids[at & 1], data) for at, data in enumerate(payloads)])
        wait_until(lambda: journal.stats()["stalls"] == 1, "a stall")
        gevent.sleep(0.3)  # all of it would be sent by then
        assert not sending.ready(), "so many megabytes do not fit into the buffers of two sockets"
        assert sum(map(len, journal._recorder._frame_batches)) < 3 << 20
    wait_until(lambda: journal.stats()["rows"] == count, "all rows", 20)
    assert [row.payload for row in rows(site)] == payloads


def test_a_stall_in_the_middle_of_a_flush(record: Make) -> None:
    site = record({"flush_ms": 60_000})
    count = 3 * MAX_ROWS
    for number in range(count):
        site.smq.publish(b"%06d" % number, "topic")
    with limited_file_size(900_000):
        wait_until(lambda: site.smq.journal.stats()["stalls"] or site.smq.journal.flush(), "a stall")
        assert 0 < len(written(site)) < count
    wait_until(lambda: len(rows(site)) == count, "all rows")
    assert [int(row.payload) for row in rows(site)] == list(range(count))
    assert [row.seq for row in written(site)] == list(range(count))


def test_shutdown_with_a_full_disk_counts_lost_rows(record: Make, caplog: pytest.LogCaptureFixture) -> None:
    site = record({"flush_ms": 1})
    journal = site.smq.journal
    with limited_file_size(100_000):
        for number in range(200):
            site.smq.publish(b"%03d" % number + bytes(1000), "topic")
            if number % 10 == 0:
                journal.flush()
        kept = len(written(site))
        routed = site.smq.drops()["unrouted"]
        journal.close()
    assert 0 < kept < 200
    [told] = [record.getMessage() for record in caplog.records if "was closed with" in record.getMessage()]
    lost = int(told.split(" was closed with ")[1].split()[0])
    _, queued = site.smq.queuesize()
    drops = site.smq.drops()
    refused, later = drops["queue_full"], drops["unrouted"] - routed
    assert kept + lost + queued + refused + later == 200, "the hub goes on with what waited, without a journal"


def test_publishers_that_wait_go_on_when_the_journal_ends(record: Make) -> None:
    site = record({"flush_ms": 1})
    receiver, sender = site.device(b"receiver"), site.device(b"sender-1")
    tid = receiver.subscribe(b"topic")
    with limited_file_size(100_000):
        for number in range(200):
            sender.publish(tid, b"%03d" % number + bytes(1000))
        wait_until(lambda: site.smq.journal.stats()["stalls"] == 1, "a stall")
        site.smq.journal.close()
    for number in range(200):
        receiver.expect(publish(tid, sender.etid, b"%03d" % number + bytes(1000)))


def test_a_folder_is_released_after_a_slow_open(
    record: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go = threading.Event()

    def slow(fd: int) -> None:
        assert go.wait(20)

    monkeypatch.setattr(durability, "CLOSE_S", 0.1)
    site = record({"sync": "1h"})
    site.smq.publish("x", "t")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", slow)
        site.smq.journal.close()
        assert "was closed with 1 messages that the disk has not confirmed" in caplog.text
        with pytest.raises(JournalError, match="is written by"):
            hub.create(journal=str(tmp_path / "journal"))
        go.set()
        wait_until(lambda: not site.smq.journal._durability._disk.jobs, "the disk has it")
    assert [row.payload for row in rows(record())] == [b"x"]


class limited_file_size:
    """Files of this process grow no further than so many bytes: what a full disk is to a writer."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes

    def __enter__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
        self._handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        self._dont_write_bytecode, sys.dont_write_bytecode = (
            sys.dont_write_bytecode,
            True,
        )  # it would be cut off, and kept
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._most, self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)
        sys.dont_write_bytecode = self._dont_write_bytecode
        signal.signal(signal.SIGXFSZ, self._handler)


def test_one_hub_per_folder_and_name(record: Make, tmp_path: Path) -> None:
    record({"name": "one"})
    with pytest.raises(JournalError, match="is written by"):
        record({"name": "two"})
    with pytest.raises(ArgumentError, match="^journal.name: 'one' is the name of another hub's journal"):
        hub.create(journal={"path": str(tmp_path / "other"), "name": "one"})


def test_a_hub_without_a_journal_has_none(site: Site) -> None:
    assert site.smq.journal is None
    assert site.smq._broker.recorder is None


def test_a_closed_journal_does_not_close_the_hub(record: Make) -> None:
    site = record()
    receiver, sender = site.device(b"receiver"), site.device(b"sender-1")
    tid = receiver.subscribe(b"topic")
    sender.publish(tid, b"1")
    receiver.expect(publish(tid, sender.etid, b"1"))
    site.smq.journal.close()
    sender.publish(tid, b"2")
    receiver.expect(publish(tid, sender.etid, b"2"))
    assert [row.payload for row in written(site)] == [b"1"]


# ---- what happens in threads


def test_an_unusable_folder_is_released(tmp_path: Path) -> None:
    snapshot = tmp_path / "wal" / "n1" / committed.COMMITS_FILE
    snapshot.parent.mkdir(parents=True)
    snapshot.write_text("no")
    with pytest.raises(JournalError, match=r"txn\.json is damaged"):
        hub.create(journal=str(tmp_path))
    snapshot.unlink()
    assert hub.create(journal=str(tmp_path)).journal.stats()["rows"] == 0


def test_a_disk_that_loses_data_is_reported(
    record: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked, go = threading.Event(), threading.Event()

    def slow(fd: int) -> None:
        blocked.set()
        assert go.wait(20)

    monkeypatch.setattr(durability, "SLOW_S", 0.05)
    monkeypatch.setattr(durability, "CHECK_S", 0.01)
    site = record({"sync": "10ms"})
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", slow)
        site.smq.publish("x", "t")
        wait_until(blocked.is_set, "the disk is busy")
        wait_until(lambda: "the disk is broken or busy" in caplog.text, "a line")
        gevent.sleep(0.1)  # ten looks
        assert caplog.text.count("the disk is broken or busy") == 1
        go.set()
        wait_until(lambda: "disk syncs recovered" in caplog.text, "all is well")
    assert len(rows(site)) == 1


def test_publishers_wait_when_a_slow_disk_is_behind(
    record: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go = threading.Event()

    def slow(fd: int) -> None:
        assert go.wait(20)

    monkeypatch.setattr(durability, "SLOW_S", 0.05)
    monkeypatch.setattr(durability, "CHECK_S", 0.01)
    monkeypatch.setattr(durability, "MAX_UNSYNCED_BYTES", 100_000)
    site = record({"sync": "10ms", "flush_ms": 1})
    journal, sender = site.smq.journal, site.device(b"sender-1")
    tid = site.smq.create("topic")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", slow)
        for number in range(200):
            sender.publish(tid, b"%03d" % number + bytes(1000))
            gevent.sleep(0)
        wait_until(lambda: journal.stats()["unsynced_bytes"] > 100_000 and journal.stats()["alarm"], "a backlog")
        wait_until(lambda: "publishers wait until the disk recovers" in caplog.text, "a line")
        count = 200
        while not journal.stats()["stalls"]:  # the alarm comes and goes when it is the test that was held up
            sender.publish(tid, b"%03d" % count)
            count += 1
            gevent.sleep(0.01)
        with pytest.raises(JournalError, match="0 MiB are not synced"):
            journal.commit("q", 0, [(b"results", None, b"one")])
        go.set()
        wait_until(lambda: journal.stats()["rows"] == count, "all rows", 20)
    assert [int(row.payload[:3]) for row in rows(site)] == list(range(count))
    wait_until(lambda: not journal.stats()["alarm"], "all is well")


def test_what_fails_in_a_thread_is_one_line(
    record: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(durability, "RETENTION_S", 0.01)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", broken)
        site = record({"sync": "10ms"})
        site.smq.publish("x", "t")
        wait_until(lambda: "sync failed: [Errno 5] Input/output error" in caplog.text, "a line")
    readers = site.smq.journal.path / "readers"
    readers.mkdir()
    (readers / "q.json").write_text("no")
    wait_until(lambda: "removal of expired files failed" in caplog.text, "a line")
    (readers / "q.json").unlink()
    assert "Traceback" not in caplog.text + capfd.readouterr().err


def test_a_commit_waits_until_the_disk_has_it(record: Make) -> None:
    site = record({"sync": "always"})
    device = site.device(b"device-1")
    tid = device.subscribe(b"results")
    journal = site.smq.journal
    with bounded(20):
        assert journal.commit("q", 0, [(b"results", None, b"one")])
        assert journal.stats()["unsynced_bytes"] == 0
        assert not journal.commit("q", 0, [(b"results", None, b"one")])
    device.expect(publish(tid, 1, b"one"))


def test_a_commit_that_the_disk_refuses_can_be_repeated(record: Make) -> None:
    site = record({"flush_ms": 60_000})
    device = site.device(b"device-1")
    tid = device.subscribe(b"results")
    journal = site.smq.journal
    many = [(b"results", None, bytes(60_000))] * 3
    with limited_file_size(100_000):
        with pytest.raises(JournalError, match=r"can't be written \(File too large\); make room on the disk"):
            journal.commit("q", 0, many)
        assert journal.committed("q") == -1
    device.expect_nothing()
    assert journal.commit("q", 0, many)
    assert journal.committed("q") == 0
    for _ in many:
        device.expect(publish(tid, 1, bytes(60_000)))
    assert len(rows(site)) == 3


def test_waiting_times_are_those_of_the_manual() -> None:
    """help: journal"""
    assert (writer.COMMITS_LOCK_S, writer.BEHIND_S, writer.SEAL_S) == (5.0, 30.0, 600.0)
    assert max(writer.BEHIND_POLL_S, writer.COMMITS_LOCK_POLL_S) <= 0.01, "a commit goes on soon after"

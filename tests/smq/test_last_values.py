"""Last values: what a new subscriber gets first, from whom, how long it is kept, and what a damaged file does."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smqrt import hub
from smqrt.auth.identity import Identity, Method
from smqrt.broker import last_values
from smqrt.broker.last_values import LastValueLimits, newest_frames
from smqrt.broker.topics import Topic
from smqrt.errors import ArgumentError
from smqrt.smq.gevent_broker import TopicRules, set_topic_rules
from smqrt.wire import smq
from smqrt.wire.smq import Type
from tests.support.device import KINDS, Device, Site, expect_clean, publish
from tests.support.waiting import wait_until


def messages(packets: list[bytes]) -> list[tuple[int, bytes]]:
    """(sub-topic, payload) of the messages among packets."""
    return [(int.from_bytes(one[9:13], "big"), one[13:]) for one in packets if one[0] == Type.PUBLISH]


def greeting(device: Device, topic: bytes) -> list[tuple[int, bytes]]:
    """What a device gets when it subscribes."""
    device.subscribe(topic)
    return messages(device.sync())


@pytest.fixture(autouse=True)
def _no_rules() -> Iterator[None]:
    yield
    set_topic_rules(TopicRules())


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_subscriber_gets_the_newest_first(make_site: Callable[..., Site], kind: str) -> None:
    site = make_site(lastvalue="site1/#")
    publisher, early = site.device(b"publisher", kind), site.device(b"early-1", kind)
    tid, other = publisher.create(b"site1/a"), publisher.create(b"site2/a")
    sub = publisher.createsub(b"sub")
    assert greeting(early, b"site1/a") == []
    publisher.send(*(publish(tid, publisher.etid, b"%d" % n) for n in range(30)))
    publisher.publish(tid, b"s1", sub).publish(tid, b"s2", sub).publish(other, b"x")
    publisher.send(publish(tid, publisher.etid, b"whole " * 2000, sub)).sync()
    assert len(messages(early.sync())) == 33, "all of them live, and nothing twice"
    late = site.device(b"late-1", kind)
    assert greeting(late, b"site1/a") == [(0, b"29"), (sub, b"whole " * 2000)]
    assert greeting(late, b"site1/a") == [], "who is there already is no new subscriber"
    assert greeting(late, b"site2/a") == []
    publisher.publish(tid, b"newer").sync()
    assert messages(late.sync()) == messages(early.sync()) == [(0, b"newer")]
    publisher.publish(tid, b"").sync()
    assert messages(late.sync()) == messages(early.sync()) == [(0, b"")]
    assert greeting(site.device(b"last-1", kind), b"site1/a") == [(sub, b"whole " * 2000)], "an empty message clears"
    expect_clean(site)


def test_fragments_count_when_they_are_whole(make_site: Callable[..., Site]) -> None:
    site = make_site(lastvalue=["#"])
    publisher = site.device(b"publisher")
    tid = publisher.create(b"news")
    publisher.send(publish(0, publisher.etid, b"one ", kind=Type.PUBFRAG))
    assert greeting(site.device(b"early-1"), b"news") == []
    publisher.send(publish(tid, publisher.etid, b"two", kind=Type.PUBFRAG)).sync()
    assert greeting(site.device(b"late-1"), b"news") == [(0, b"one two")]


def test_the_hub_itself_publishes_and_subscribes(make_site: Callable[..., Site]) -> None:
    site = make_site(lastvalue="a/+")
    site.smq.publish(b"from the server", "a/b", "sub")
    got: list[tuple[bytes, int]] = []
    site.smq.subscribe("a/b", lambda data, ptid, tid, stid: got.append((data, ptid)))
    wait_until(lambda: got, "the handler was called")
    site.device().sync()
    assert got == [(b"from the server", 1)]
    stid = site.smq.subtopic2tid("sub")
    assert greeting(site.device(b"other-1"), b"a/b") == [(stid, b"from the server")]


def test_what_onpublish_refuses_is_no_value(make_site: Callable[..., Site]) -> None:
    site = make_site(lastvalue="#", onpublish=lambda data, *more: data != b"bad")
    publisher = site.device(b"publisher")
    tid = publisher.create(b"news")
    publisher.send(*(publish(tid, publisher.etid, one) for one in (b"good", b"bad"))).sync()
    assert greeting(site.device(b"late-1"), b"news") == [(0, b"good")]


@pytest.mark.parametrize("sync", ["1s", "publish"])
def test_with_a_journal(make_site: Callable[..., Site], tmp_path: Path, sync: str) -> None:
    """Also when messages wait for the disk: whoever subscribes meanwhile gets the newest of all, once."""
    site = make_site(lastvalue="#", journal={"path": str(tmp_path / "journal"), "sync": sync})
    publisher, late = site.device(b"publisher"), [site.device(b"late-%d" % number) for number in range(5)]
    tid = publisher.create(b"news")
    for number, device in enumerate(late):
        publisher.publish(tid, b"%d" % number)
        device.send(bytes((Type.SUBSCRIBE,)) + b"news")
    publisher.publish(tid, b"end")
    everything = [b"%d" % number for number in range(5)] + [b"end"]
    for device in late:
        got: list[bytes] = []
        while got[-1:] != [b"end"]:
            packet = device.receive()
            got += [packet[13:]] if packet[0] == Type.PUBLISH else []
        assert got == everything[everything.index(got[0]) :]
    site.smq.journal.close()


def test_a_topic_without_values_costs_nothing(make_site: Callable[..., Site]) -> None:
    for options in ({}, {"lastvalue": "other"}):
        site = make_site(**options)
        publisher, subscriber = site.device(b"publisher"), site.device(b"subscriber")
        tid = subscriber.subscribe(b"news")
        publisher.publish(tid, b"x").sync()
        [route] = site.state.sessions[publisher.etid].routes.values()
        assert type(route) is Topic


def test_rules_of_the_server_reach_hubs_that_are_there(make_site: Callable[..., Site]) -> None:
    site = make_site()
    publisher, lazy = site.device(b"publisher"), site.device(b"subscriber")
    tid = lazy.subscribe(b"news")
    publisher.publish(tid, b"1").sync()
    set_topic_rules(TopicRules(("news",)))
    publisher.publish(tid, b"2").sync()
    assert greeting(site.device(b"late-1"), b"news") == [(0, b"2")]
    with pytest.raises(ArgumentError, match="'a#' is not a filter of topics, such as 'site1/#'"):
        set_topic_rules(TopicRules(("a#",)))
    set_topic_rules(TopicRules())
    assert greeting(site.device(b"late-2"), b"news") == []
    assert site.state.last_values is None
    assert site.state._values.count == site.state._values.size_bytes == 0


def test_limits(make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_values, "MAX_TOPIC_VALUES", 3)
    set_topic_rules(TopicRules(("#",), LastValueLimits(values=4, size_bytes=20_000)))
    site = make_site()
    publisher = site.device(b"publisher")
    first, second, third = (publisher.create(name) for name in (b"a", b"b", b"c"))
    before = {limit: limit.count for limit in (last_values.OF_TOPIC, last_values.VALUES, last_values.MEMORY)}
    publisher.send(*(publish(first, publisher.etid, b"%d" % stid, stid) for stid in range(1, 6)))
    publisher.send(publish(second, publisher.etid, b"1"), publish(third, publisher.etid, b"1"))
    publisher.send(publish(first, publisher.etid, b"x" * 30_000, 1)).sync()
    assert {limit: limit.count - count for limit, count in before.items()} == {
        last_values.OF_TOPIC: 2,
        last_values.VALUES: 1,
        last_values.MEMORY: 1,
    }
    assert greeting(site.device(b"late-1"), b"a") == [(2, b"2"), (3, b"3")], "an old value is not a value"


def test_a_publisher_without_the_right_is_ignored(make_site: Callable[..., Site]) -> None:
    """CVE-2018-12546 of another broker: what somebody published remained after the right to publish was taken."""
    site = make_site(lastvalue="#")
    publisher, other = site.device(b"publisher"), site.device(b"other-1")
    identity = Identity("eve", method=Method.PASSWORD)
    site.state.sessions[publisher.etid].identity = identity
    tid = publisher.create(b"news")
    publisher.publish(tid, b"from eve").sync()
    other.publish(tid, b"from another", 7).sync()
    assert greeting(site.device(b"late-1"), b"news") == [(0, b"from eve"), (7, b"from another")]
    site.state.last_values.permits = lambda source, name: (source, name) != (identity, b"news")
    assert greeting(site.device(b"late-2"), b"news") == [(7, b"from another")]


@given(st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=9)), min_size=1, max_size=40), st.booleans())
def test_the_newest_of_a_run(sent: list[tuple[int, bytes]], equal: bool) -> None:
    if equal:
        sent = [(sent[0][0], payload.ljust(9)) for _, payload in sent]
    run = b"".join(smq.publish_frame(5, 6, stid, payload) for stid, payload in sent)
    found = {int.from_bytes(frame[11:15], "big"): frame[15:] for frame in newest_frames(run)}
    assert found == dict(sent)


# ---- restarts


def kept(path: Path, **options: object) -> hub.Smq:
    return hub.create(persist=path, lastvalue="#", **options)  # type: ignore[arg-type]


def values_of(smq_hub: hub.Smq) -> dict[tuple[str, int], bytes]:
    values = smq_hub._broker.last_values
    assert values is not None
    return {
        ((one.topic.name or b"").decode(), int.from_bytes(stid, "big")): frame[15:]
        for one in values
        for stid, (frame, _) in one.newest.items()
    }


def test_values_survive_a_restart(make_site: Callable[..., Site], tmp_path: Path) -> None:
    path = tmp_path / "hub.db"
    site = make_site(persist=path, lastvalue="#")
    publisher = site.device(b"publisher")
    site.state.sessions[publisher.etid].identity = Identity("eve", ("g",), Method.PASSWORD, b"id\xff")
    tid, sub = publisher.create(b"news"), publisher.createsub(b"sub")
    publisher.publish(tid, b"old").publish(tid, b"new").publish(tid, b"\0\xff", sub).publish(tid, b"gone", 9).sync()
    wait_until(lambda: not site.state.last_values._changed, "the disk has them")
    publisher.publish(tid, b"", 9).sync()
    site.smq.close()
    again = make_site(persist=path, lastvalue="#")
    late = again.device(b"late-1")
    assert late.subscribe(b"news") == tid
    packets = late.sync()
    assert sorted(messages(packets)) == sorted([(0, b"new"), (sub, b"\0\xff")])
    assert {int.from_bytes(one[5:9], "big") for one in packets} == {1}, "the publisher of then is gone: the server"
    [source] = {source for one in again.state.last_values for _, source in one.newest.values()}
    assert (source.user, source.groups, source.method, source.client_id) == ("eve", ("g",), Method.PASSWORD, b"id\xff")
    again.smq.close()
    with hub.create(persist=path) as off:  # nobody asks for them any more
        assert off._broker.last_values is None
    with kept(path) as on:
        assert values_of(on) == {}


def test_the_file_moves_to_another_process_and_back(tmp_path: Path) -> None:
    """As at a hot restart: what comes while the file is another's is written when it is there again."""
    with kept(tmp_path / "hub.db") as smq_hub:
        for number, topic in enumerate(("a", "b")):
            smq_hub.publish(b"%d" % number, topic)
        smq_hub._broker.close_files()
        smq_hub.publish(b"2", "b")
        smq_hub.publish(b"3", "c")
        smq_hub._broker.open_files()
        assert values_of(smq_hub) == {("a", 0): b"0", ("b", 0): b"2", ("c", 0): b"3"}
    with kept(tmp_path / "hub.db") as smq_hub:
        assert values_of(smq_hub) == {("a", 0): b"0", ("b", 0): b"2", ("c", 0): b"3"}


def test_a_disk_that_fails_gets_them_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with kept(tmp_path / "hub.db") as smq_hub:
        values = smq_hub._broker.last_values
        assert values is not None
        store = values._store
        commit, store._commit = store._commit, _fail
        store._sync_s = 0.01
        smq_hub.publish(b"1", "news")
        wait_until(
            lambda: "last values are not saved until the disk accepts writes" in caplog.text, "the fault was told"
        )
        store._commit = commit
    with kept(tmp_path / "hub.db") as smq_hub:
        assert values_of(smq_hub) == {("news", 0): b"1"}


def _fail(*_: object) -> None:
    raise sqlite3.OperationalError("disk I/O error")


WRITER = """
import sys, gevent
from smqrt import hub
from smqrt.smq.gevent_broker import TopicRules, set_topic_rules
set_topic_rules(TopicRules(sync_s=0.02))
smq = hub.create(persist=sys.argv[1], lastvalue="#")
for n in range(10**9):
    smq.publish(b"%d" % n, "news")
    smq.publish(b"%d" % n, "more", "sub")
    if n % 20 == 0:
        print(n, flush=True)
        gevent.sleep(0.001)
"""


def test_kill_9_leaves_a_value_that_was_published(tmp_path: Path) -> None:
    last = -1
    for attempt in range(3):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path / "hub.db"], stdout=subprocess.PIPE)
        assert writer.stdout
        for _ in range(15 + 7 * attempt):
            last = int(writer.stdout.readline())
        time.sleep(0.005 * attempt)  # at another moment of the writing
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().split()
        writer.wait()
        with kept(tmp_path / "hub.db") as smq_hub:
            found = {name: int(value) for (name, _), value in values_of(smq_hub).items()}
        assert found.keys() == {"news", "more"}
        assert all(0 < value <= int(([last, *rest])[-1]) + 20 for value in found.values()), (found, last)


def test_a_damaged_file_is_refused_or_right(tmp_path: Path) -> None:
    path = tmp_path / "hub.db"
    with kept(path) as smq_hub:
        for number in range(40):
            smq_hub.publish(b"value %d " % number * 9, f"topic {number}", "sub")
        right = values_of(smq_hub)
    whole, drawn = path.read_bytes(), random.Random(13)
    refused: list[str] = []
    for attempt in range(60):
        data = bytearray(whole)
        if attempt % 6:
            data[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
        else:
            del data[drawn.randrange(len(data)) :]
        path.write_bytes(data)
        for beside in ("-wal", "-shm"):
            Path(f"{path}{beside}").unlink(missing_ok=True)
        try:
            with kept(path) as smq_hub:
                found = values_of(smq_hub)
                assert all(right.get(place) == value for place, value in found.items()), attempt
        except ArgumentError as error:
            refused.append(str(error))
    assert 10 < len(refused) < 60
    assert all(one.startswith(f"persist: {path}: ") for one in refused), refused


def test_a_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hub.db"
    kept(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 9")
    with pytest.raises(ArgumentError, match="it has format 9, written by a newer smqrt; this one reads up to 1"):
        kept(path)

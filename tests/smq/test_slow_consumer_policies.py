"""Slow-consumer policies over every transport: what is kept, in which order, and that every copy is counted."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product

import gevent
import pytest

from smqrt.broker import outbox
from smqrt.broker.outbox import Drop
from smqrt.smq import data_path
from smqrt.wire.connection_state import Life
from tests.smq.slow import BUDGET_BYTES, COUNT, drops, flood, numbered, numbers, stalled
from tests.support.device import KINDS, RAW, WS, Device, Site, bounded, expect_clean, publish
from tests.support.waiting import wait_until


def parts(packets: list[bytes]) -> list[tuple[int, int, int]]:
    """(topic, sub-topic, number) of the messages among packets."""
    return [
        (int.from_bytes(one[1:5], "big"), int.from_bytes(one[9:13], "big"), int.from_bytes(one[13:17], "big"))
        for one in packets
        if one[:1] == b"\x08"
    ]


def fill(site: Site, lazy: bytes, publisher: Device, tid: int) -> None:
    """Publish until the sockets of a client that does not read take nothing any more: the kernel moves bytes for a
    while.
    """
    connection = site.state.uids[lazy].outbox
    for _ in range(3):
        while connection.life is not Life.BLOCKED:
            publisher.send(*(publish(tid, publisher.etid, numbered(0)) for _ in range(20))).expect_nothing()
        gevent.sleep(0.03)


@pytest.mark.parametrize(("kind", "policy"), [*product(KINDS, ("oldest", "latest", "disconnect", "wait"))])
def test_the_ledger(make_site: Callable[..., Site], kind: str, policy: str) -> None:
    """published = delivered + counted, in order, and control packets come through."""
    site = make_site(budget=BUDGET_BYTES, slow=policy)
    lazy, publisher = stalled(site, b"lazy-1", kind), site.device(b"publisher", kind)
    tid = publisher.create(b"news")
    connection = site.state.uids[b"lazy-1"].outbox
    if policy == "disconnect":
        flood(publisher, tid)
        wait_until(lambda: b"lazy-1" not in site.state.uids, "the end of the slow client")
        got = numbers(lazy.until_end(torn=True))
        publisher.expect_nothing()
        stats = site.state.stats.drops
        assert len(got) + stats[Drop.CLOSED] + stats[Drop.UNROUTED] == COUNT
        assert got == list(range(len(got)))
        expect_clean(site)
        return
    count = COUNT * 20 if policy == "wait" else COUNT  # more than a fast machine reads in one turn
    sending = gevent.spawn(flood, publisher, tid, count)
    wait_until(lambda: connection.life is Life.BLOCKED, "the queue fills up")
    if policy == "wait":
        wait_until(lambda: site.state.uids[b"publisher"].outbox.paused, "the publisher is not read")
        assert connection.queued_bytes > BUDGET_BYTES / 2
    else:
        sending.join()
        publisher.expect_nothing()
        assert connection.queued_bytes <= BUDGET_BYTES + 800
    lazy.send(b"\x06a name")
    with bounded():
        packets = lazy.sync()
        while policy == "wait" and (not packets or numbers(packets[-1:]) != [count - 1]):
            packets.append(lazy.receive())
        sending.join()
    got, dropped = numbers(packets), connection.dropped
    assert [one[6:] for one in packets if one[0] == 7] == [b"a name"], "control packets are kept"
    assert got == sorted(set(got)), "in order, none twice"
    assert len(got) + dropped == count
    assert dropped == drops(site) == site.state.stats.drops[reason_of(policy)]
    publisher.expect_nothing()
    match policy:
        case "oldest":
            kept = got[-50:]
            assert kept == list(range(count - 50, count)), "the newest were kept"
        case "latest":
            assert got[-1] == count - 1
            # the system may take a few more while the client is slow: each time the newest of that moment
            assert sum(later - earlier > 1 for earlier, later in pairwise(got)) <= 3, "all sent before, then the newest"
        case "wait":
            assert dropped == 0
    assert connection.queued_bytes == outbox.QueuedMemory.total_bytes == 0
    expect_clean(site)


def reason_of(policy: str) -> Drop:
    return Drop.REPLACED if policy == "latest" else Drop.OVER_BUDGET


@pytest.mark.parametrize("kind", [RAW, WS])
def test_the_latest_of_each_topic_and_sub_topic(make_site: Callable[..., Site], kind: str) -> None:
    site = make_site(budget=BUDGET_BYTES, slow="latest")
    lazy, publisher = stalled(site, b"lazy-1", kind), site.device(b"publisher")
    news, other = publisher.create(b"news"), lazy.subscribe(b"other")
    stids = [0, publisher.createsub(b"s1"), publisher.createsub(b"s2")]
    connection = site.state.uids[b"lazy-1"].outbox
    fill(site, b"lazy-1", publisher, news)
    publisher.publish(lazy.etid, numbered(7)).expect_nothing()
    packets = []
    for number in range(1, 301):
        packets += [
            publish(tid, publisher.etid, numbered(number), stid)
            for tid, stid in ((news, stids[0]), (news, stids[1]), (other, stids[0]), (news, stids[2]))
            if stid != stids[2] or number < 5
        ]
    for at in range(0, len(packets), 30):
        publisher.send(*packets[at : at + 30])
    publisher.publish(lazy.etid, numbered(8)).expect_nothing()
    assert connection.queued_bytes < BUDGET_BYTES / 2
    got = parts(lazy.sync())
    last = [one for one in got if one[2]]
    assert sorted(last) == sorted(
        [
            (lazy.etid, 0, 7),
            (news, 0, 300),
            (news, stids[1], 300),
            (other, 0, 300),
            (news, stids[2], 4),
            (lazy.etid, 0, 8),
        ]
    ), "messages to one client are not replaced"
    assert last[0] == (lazy.etid, 0, 7)
    assert last[1] == (news, stids[2], 4)
    assert last[-1] == (lazy.etid, 0, 8)


def test_policies_of_topics(make_site: Callable[..., Site]) -> None:
    """One client, topics of all kinds: each goes its own way, and the order stays."""
    site = make_site(budget=BUDGET_BYTES, slow="newest")
    police(site, {"old/#": outbox.Slow.OLDEST, "state/+": outbox.Slow.LATEST})
    lazy, publisher = stalled(site, b"lazy-1", topic=b"log"), site.device(b"publisher")
    log = publisher.create(b"log")
    old, state = lazy.subscribe(b"old/a/b"), lazy.subscribe(b"state/a")
    connection = site.state.uids[b"lazy-1"].outbox
    fill(site, b"lazy-1", publisher, log)
    sent = [(tid, number) for number in range(1, 201) for tid in (log, old, state)]
    for at in range(0, len(sent), 7):
        publisher.send(*(publish(tid, publisher.etid, numbered(number)) for tid, number in sent[at : at + 7]))
    publisher.expect_nothing()
    dropped = connection.dropped
    got = [(tid, number) for tid, _, number in parts(lazy.sync()) if number]
    assert [one for one in sent if one in set(got)] == got, "in order"
    of = {tid: [number for one, number in got if one == tid] for tid in (log, old, state)}
    assert of[log] == list(range(1, len(of[log]) + 1))
    assert of[old] == list(range(201 - len(of[old]), 201))
    assert of[state] == [200]
    assert len(got) + dropped == len(sent)
    stats = site.state.stats.drops
    assert stats[Drop.REPLACED] == 199
    assert stats[Drop.OVER_BUDGET] == dropped - 199
    assert min(map(len, of.values())) > 0


def police(site: Site, by_filter: dict[str, outbox.Slow]) -> None:
    site.state.set_slow(outbox.Slow.NEWEST, by_filter)


def test_a_lost_subscriber_blocks_publishers_for_bounded_time(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_path.limits, "backpressure_s", 0.3)
    site = make_site(budget=BUDGET_BYTES, slow="wait")
    lazy, publisher, reader = stalled(site, b"lazy-1"), site.device(b"publisher"), site.device(b"reader")
    tid = reader.subscribe(b"news")
    reading = gevent.spawn(lambda: [reader.receive() for _ in range(COUNT)])
    with bounded():
        flood(publisher, tid)
        publisher.expect_nothing()
        got = numbers(reading.get())
    assert got == list(range(COUNT)), "who reads gets everything"
    assert site.state.uids[b"lazy-1"].outbox.dropped > 0
    wait_until(lambda: not data_path._backpressure_since_s, "no publisher waits")
    lazy.close()
    expect_clean(site)


def test_policies_change_under_way(make_site: Callable[..., Site]) -> None:
    site = make_site(budget=BUDGET_BYTES)
    devices = [stalled(site, b"lazy-%d" % number, kind) for number, kind in enumerate(KINDS)]
    publisher = site.device(b"publisher")
    tid = publisher.create(b"news")
    flood(publisher, tid)
    publisher.expect_nothing()
    police(site, {"news": outbox.Slow.LATEST})
    flood(publisher, tid, first=COUNT)
    publisher.expect_nothing()
    connections = [site.state.uids[b"lazy-%d" % number].outbox for number in range(4)]
    assert all(connection.queued_bytes < BUDGET_BYTES / 2 for connection in connections)
    police(site, {})
    flood(publisher, tid, first=2 * COUNT)
    publisher.expect_nothing()
    for device, connection in zip(devices, connections, strict=True):
        got = numbers(device.sync())
        assert len(got) + connection.dropped == 3 * COUNT
        assert 2 * COUNT - 1 in got, "the latest was kept"
        assert got == sorted(got)
    expect_clean(site)

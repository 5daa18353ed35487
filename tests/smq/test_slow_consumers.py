"""Subscribers that do not read: other clients are not affected, lost copies are counted (help: slow-consumers)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import gevent
import pytest

from smqrt.broker import outbox
from smqrt.broker.outbox import Drop
from smqrt.smq import data_path
from smqrt.wire import smq
from smqrt.wire.connection_state import Life
from tests.smq.slow import drops, stalled
from tests.support.device import (
    KINDS,
    RAW,
    TLS,
    WS,
    WSS,
    Site,
    expect_clean,
    leftovers,
    publish,
)
from tests.support.waiting import let_others_run, wait_until


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stalled clients are disconnected after 0.3 s."""
    monkeypatch.setattr(data_path.limits, "stalled_s", 0.3)


@pytest.fixture
def global_cap(monkeypatch: pytest.MonkeyPatch) -> int:
    """All queues together may hold 64 KB."""
    cap = 64 << 10
    monkeypatch.setattr(outbox.QueuedMemory, "limit_bytes", cap)
    return cap


def numbered(number: int, size: int = 1000) -> bytes:
    return number.to_bytes(4, "big") + bytes((number % 251,)) * (size - 4)


def numbered_slowly(number: int, size: int) -> bytes:
    """The same, byte by byte: the kernel moves what a client does not read for a while, which a fast flood outruns."""
    return number.to_bytes(4, "big") + bytes(number % 251 for _ in range(size - 4))


def numbers(packets: list[bytes]) -> list[int]:
    """The numbers of the messages among packets; each must be whole."""
    found = []
    for packet in packets:
        if packet[:1] == b"\x08":
            number = int.from_bytes(packet[13:17], "big")
            assert packet[13:] == numbered(number, len(packet) - 13), "a damaged message"
            found.append(number)
    return found


# ---- nobody else is delayed


@pytest.mark.parametrize("kind", KINDS)
def test_weak_spot_a_blocked_subscriber_never_delays_others(site: Site, kind: str) -> None:
    lazy = stalled(site, b"lazy-1", kind)
    publisher, reader = site.device(b"publisher"), site.device(b"reader")
    tid = reader.subscribe(b"news")
    slowest = 0.0
    for number in range(300):
        began = time.monotonic()
        publisher.publish(tid, numbered(number, 8000))
        reader.expect(publish(tid, publisher.etid, numbered(number, 8000)))
        slowest = max(slowest, time.monotonic() - began)
    assert site.state.uids[b"lazy-1"].outbox.life is Life.BLOCKED
    assert slowest < 0.5, slowest
    publisher.expect_nothing()
    lazy.close()


# ---- the ledger


@pytest.mark.parametrize(("kind", "size"), [*product((RAW, WS), (40, 1000, 6000, 60000)), (TLS, 1000), (WSS, 60000)])
def test_ledger_of_a_stalled_subscriber(make_site: Callable[..., Site], kind: str, size: int) -> None:
    """published = delivered + counted drops; what arrives is whole and in order; the newest go first."""
    site = make_site(budget=200_000)
    lazy, publisher = stalled(site, b"lazy-1", kind), site.device(b"publisher")
    tid = publisher.create(b"news")
    count = 3_000_000 // size
    for first in range(0, count, 20):
        packets = [
            publish(tid, publisher.etid, numbered_slowly(number, size))
            for number in range(first, min(first + 20, count))
        ]
        publisher.send(*packets)
    publisher.expect_nothing()
    connection = site.state.uids[b"lazy-1"].outbox
    assert connection.life is Life.BLOCKED
    assert connection.queued_bytes <= 200_000 + 100
    dropped = connection.dropped
    assert dropped == drops(site) == site.state.stats.drops[Drop.OVER_BUDGET] > 0
    got = numbers(lazy.sync())
    assert len(got) + dropped == count
    assert got == list(range(len(got))), "newest first: what was kept is the beginning"
    assert connection.life is Life.OPEN
    assert connection.queued_bytes == outbox.QueuedMemory.total_bytes == 0
    publisher.publish(tid, numbered(count, size)).expect_nothing()
    assert numbers(lazy.sync()) == [count], "it goes on where it can"
    assert drops(site) == dropped


@pytest.mark.parametrize("kind", [RAW, WS])
def test_ledger_of_a_subscriber_that_reads_slowly(make_site: Callable[..., Site], kind: str) -> None:
    site = make_site(budget=50_000)
    lazy, publisher = stalled(site, b"lazy-1", kind), site.device(b"publisher")
    tid, got = publisher.create(b"news"), []
    for number in range(2000):
        publisher.publish(tid, numbered(number, 700))
        if number % 7 == 0:
            lazy.sock.settimeout(0)
            try:
                lazy.more()
            except BlockingIOError:
                gevent.sleep(0)
            except OSError:
                pass
            lazy.sock.settimeout(4)
    publisher.expect_nothing()
    got = numbers(lazy.sync())
    assert got == sorted(set(got))
    assert len(got) + site.state.uids[b"lazy-1"].outbox.dropped == 2000


@pytest.mark.parametrize("kind", [RAW, WS])
@pytest.mark.parametrize("ending", ["client closes", "client resets", "shutdown", "stalled"])
def test_ledger_when_a_stalled_subscriber_goes(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, kind: str, ending: str
) -> None:
    """The broker's books: what was published and is not in the client's socket is counted as dropped."""
    if ending == "stalled":
        monkeypatch.setattr(data_path.limits, "stalled_s", 0.2)
    site = make_site(budget=50_000)
    lazy, publisher = stalled(site, b"lazy-1", kind), site.device(b"publisher")
    tid = publisher.create(b"news")
    for number in range(200):
        publisher.publish(tid, numbered(number, 2000))
    publisher.expect_nothing()
    assert site.state.uids[b"lazy-1"].outbox.life is Life.BLOCKED
    sent = _count_sent_messages(site.state.uids[b"lazy-1"].outbox)
    match ending:
        case "client closes":
            lazy.close()
        case "client resets":
            lazy.reset()
        case "shutdown":
            site.smq.shutdown("bye", lazy.etid)
    wait_until(lambda: b"lazy-1" not in site.state.uids, "the end of the subscriber")
    if ending in ("shutdown", "stalled"):
        sent = len(numbers(lazy.until_end(torn=True)))
    stats = site.state.stats.drops
    assert stats[Drop.OVER_BUDGET] + stats[Drop.CLOSED] + sent == 200
    expect_clean(site)


def _count_sent_messages(connection: Any) -> int:
    """How many of 200 messages have left the queue wholly."""
    waiting = connection.messages(connection.queue[1 if connection.torn else 0 :])
    return 200 - connection.dropped - waiting - (1 if connection.torn == 2 else 0)


def test_control_packets_are_never_dropped(make_site: Callable[..., Site]) -> None:
    """Acknowledgements pass a full queue, in order with what was kept."""
    site = make_site(budget=10_000)
    lazy, publisher = stalled(site, b"lazy-1"), site.device(b"publisher")
    tid = publisher.create(b"news")
    publisher.send(*(publish(tid, publisher.etid, numbered(number)) for number in range(300))).expect_nothing()
    assert site.state.uids[b"lazy-1"].outbox.life is Life.BLOCKED
    names = [b"topic-%d" % number for number in range(50)]
    lazy.send(*(b"\x06" + name for name in names))
    publisher.expect_nothing()
    acknowledged = [packet[6:] for packet in lazy.sync() if packet[0] == smq.Type.CREATEACK]
    assert acknowledged == names


# ---- the clock


@pytest.mark.parametrize("kind", KINDS)
def test_a_stalled_client_is_disconnected_with_a_named_reason(
    make_site: Callable[..., Site], soon: None, kind: str
) -> None:
    reasons, logged = [], []
    site = make_site(
        onclose=lambda etid, sock, peer, err, reason: reasons.append((peer.uid, err, reason)),
        log=lambda sock, text: logged.append(text),
    )
    stalled(site, b"lazy-1", kind)
    publisher = site.device(b"publisher")
    tid = publisher.create(b"news")
    publisher.send(*(publish(tid, publisher.etid, numbered(number, 8000)) for number in range(60))).expect_nothing()
    assert site.state.uids[b"lazy-1"].outbox.life is Life.BLOCKED
    began = time.monotonic()
    wait_until(lambda: reasons, "the disconnection")
    assert reasons == [("lazy-1", "socketwritefailed", "slow consumer")]
    assert time.monotonic() - began < 2
    publisher.expect_nothing()


def test_clients_that_read_again_stay(make_site: Callable[..., Site], soon: None) -> None:
    site = make_site(budget=10_000)
    lazy, publisher = stalled(site, b"lazy-1"), site.device(b"publisher")
    tid = publisher.create(b"news")
    publisher.send(*(publish(tid, publisher.etid, numbered(number, 8000)) for number in range(60))).expect_nothing()
    gevent.sleep(0.1)  # not yet so long that it were dropped
    lazy.sync()
    assert not leftovers(site.state).get("blocked")
    gevent.sleep(0.5)  # it would be dropped in that time
    lazy.expect_nothing()


@pytest.mark.parametrize("kind", [RAW, WSS])
def test_slow_reading_is_not_stalled(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(data_path.limits, "stalled_s", 0.9)
    site = make_site(budget=800_000)
    lazy, publisher = stalled(site, b"lazy-1", kind), site.device(b"publisher")
    tid = publisher.create(b"news")
    publisher.send(*(publish(tid, publisher.etid, numbered(number, 2000)) for number in range(400))).expect_nothing()
    assert site.state.uids[b"lazy-1"].outbox.life is Life.BLOCKED
    got = 0
    for _ in range(12):
        got += len(lazy.sock.recv(40_000))
        gevent.sleep(0.1)
    assert b"lazy-1" in site.state.uids
    assert got < 500_000


def test_it_is_logged_at_most_once_a_second(make_site: Callable[..., Site]) -> None:
    logged: list[str] = []
    site = make_site(budget=10_000, log=lambda sock, text: logged.append(text))
    stalled(site, b"lazy-1")
    publisher = site.device(b"publisher")
    tid = publisher.create(b"news")
    for number in range(100):
        publisher.publish(tid, numbered(number, 8000)).expect_nothing()
    assert len([text for text in logged if "slow consumer" in text]) == 1
    assert drops(site) > 50


# ---- memory


def test_a_thousand_stalled_subscribers_share_memory(make_site: Callable[..., Site]) -> None:
    """Light version: 200 stalled ones hold the same bytes objects."""
    site = make_site()
    lazy = [stalled(site, b"lazy-%03d" % number) for number in range(200)]
    publisher = site.device(b"publisher")
    tid = publisher.create(b"news")
    for number in range(150):
        publisher.publish(tid, numbered(number, 3000)).expect_nothing()
    queues = [site.state.uids[b"lazy-%03d" % number].outbox.queue for number in range(200)]
    assert all(len(queue) > 20 for queue in queues)
    distinct = {id(run): len(run) for queue in queues for run in queue[2:]}
    assert sum(distinct.values()) < 150 * 3100
    assert outbox.QueuedMemory.total_bytes > 100 * 60_000
    for device in lazy:
        device.close()
    expect_clean(site)


def test_the_global_cap(make_site: Callable[..., Site], global_cap: int) -> None:
    site = make_site()
    for number in range(10):
        stalled(site, b"lazy-%03d" % number)
    publisher = site.device(b"publisher")
    tid = publisher.create(b"news")
    for number in range(100):
        publisher.publish(tid, numbered(number, 3000)).expect_nothing()
        assert outbox.QueuedMemory.total_bytes <= global_cap + 10 * 3100, (
            "each may hold the rest of one message that began"
        )
    assert site.state.stats.drops[Drop.OVER_GLOBAL_BUDGET] > 0
    expect_clean(site)


@pytest.mark.parametrize("kind", [RAW, WS])
def test_unread_responses_do_not_fill_the_memory(make_site: Callable[..., Site], kind: str) -> None:
    """A client that asks and asks and never reads is disconnected; others are served meanwhile."""
    site = make_site(budget=10_000)
    other = site.device(b"other-1")
    flood = stalled(site, b"flood-1", kind)
    packets = flood.framed(b"\x06" + b"n" * 200) * 500
    with contextlib.suppress(OSError):
        for _ in range(20):
            flood.send_bytes(packets)
    wait_until(lambda: b"flood-1" not in site.state.uids, "the end of the flood")
    other.expect_nothing()
    expect_clean(site)


def test_empty_fragments_do_not_fill_the_memory(site: Site) -> None:
    device = site.device(b"uid-a1")
    device.send_bytes(smq.frame(publish(0, device.etid, b"", kind=smq.Type.PUBFRAG)) * 20_000).expect_nothing()
    assert not site.state.uids[b"uid-a1"].fragments
    device.send(publish(device.etid, device.etid, b"end", kind=smq.Type.PUBFRAG))
    device.expect(publish(device.etid, device.etid, b"end"))


def test_last_words_behind_a_long_queue(make_site: Callable[..., Site]) -> None:
    """Disconnect arrives behind all that was published in the same turn, however many runs that was."""
    site = make_site()
    device = site.device(b"uid-a1")
    for number in range(1000):
        site.smq.publish(b"%d" % number, device.etid, ptid=number)
    site.smq.shutdown("bye", device.etid)
    packets = device.until_end()
    assert [packet[13:] for packet in packets[:-1]] == [b"%d" % number for number in range(1000)]
    assert packets[-1] == smq.disconnect(b"bye")
    assert drops(site) == 0


def test_last_words_to_a_client_with_small_frames(make_site: Callable[..., Site]) -> None:
    site = make_site(authenticate=lambda credentials, info: (3, "x" * 2000))
    device = site.open().start().send(b"\x02\x02\x01\x01\x06uid-a1\x00")
    device.expect_end(smq.connack(3, 0, b"x" * 2000))


@pytest.mark.parametrize("kind", [TLS, WSS])
def test_large_messages_over_tls_arrive_whole(site: Site, kind: str) -> None:
    """The TLS layer holds ciphertext back; what waits leaves when the socket takes it."""
    lazy, publisher = stalled(site, b"lazy-1", kind), site.device(b"publisher")
    tid = publisher.create(b"news")
    publisher.send(*(publish(tid, publisher.etid, numbered(number, 50_000)) for number in range(12))).expect_nothing()
    let_others_run()
    assert numbers(lazy.sync()) == list(range(12))
    assert drops(site) == 0

"""The data path: order, runs, many topics, the largest messages, over every transport (help: data-path)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import gevent
import pytest

from smqrt.broker.outbox import Drop
from smqrt.wire import smq
from tests.support.clock import undisturbed_s
from tests.support.device import KINDS, RAW, WS, Device, Site, masked, publish
from tests.support.waiting import wait_until

MAX = smq.MAX_PAYLOAD_BYTES


def messages(packets: list[bytes]) -> list[tuple[int, bytes]]:
    return [(int.from_bytes(packet[1:5], "big"), packet[13:]) for packet in packets if packet[0] == smq.Type.PUBLISH]


def rotating(tids: list[int], count: int, first: int = 0) -> list[tuple[int, bytes]]:
    return [(tids[number % len(tids)], b"%06d" % (first + number)) for number in range(count)]


def send_all(publisher: Device, to_send: list[tuple[int, bytes]]) -> None:
    publisher.send(*(publish(tid, publisher.etid, data) for tid, data in to_send)).expect_nothing()


# ---- order


@pytest.mark.parametrize(("kind", "to"), [*product((RAW, WS), (RAW, WS)), ("tls", "wss"), ("wss", "tls")])
@pytest.mark.parametrize("topics", [1, 2, 16, 100])
def test_order_across_topics(site: Site, kind: str, to: str, topics: int) -> None:
    """Never regrouped by topic, however the broker sorts a burst: one subscriber has them all, others some."""
    subscriber, other, publisher = (
        site.device(b"subscriber", to),
        site.device(b"other-1"),
        site.device(b"publisher", kind),
    )
    tids = [subscriber.subscribe(b"topic %d" % number) for number in range(topics)]
    for number in range(0, topics, 3):
        other.subscribe(b"topic %d" % number)
    own = [publisher.create(b"own %d" % number) for number in range(3)]
    for number in range(3):
        other.subscribe(b"own %d" % number)
    to_send = rotating([*tids, *own, subscriber.etid], 3000)
    for first in range(0, 3000, 1000):
        send_all(publisher, to_send[first : first + 1000])
    wanted = [(tid, data) for tid, data in to_send if tid in (*tids, subscriber.etid)]
    assert messages(subscriber.sync()) == wanted
    shared = {*tids[::3], *own}
    assert messages(other.sync()) == [(tid, data) for tid, data in to_send if tid in shared]


def test_subscribers_that_come_and_go_between_bursts(site: Site) -> None:
    """What the data path remembers of destinations follows every change of subscribers."""
    publisher, first, second = site.device(b"publisher"), site.device(b"first-1"), site.device(b"second", WS)
    tids = [first.subscribe(b"topic %d" % number) for number in range(20)]

    def burst(expected_first: list[int], expected_second: list[int]) -> None:
        to_send = rotating(tids, 400)
        send_all(publisher, to_send)
        for device, expected in ((first, expected_first), (second, expected_second)):
            got = messages(device.sync())
            assert got == [(tid, data) for tid, data in to_send if tid in expected]

    burst(tids, [])
    burst(tids, [])
    second.subscribe(b"topic 3")
    burst(tids, [tids[3]])
    first.send(smq.with_id(smq.Type.UNSUBSCRIBE, tids[3])).expect_nothing()
    burst(tids[:3] + tids[4:], [tids[3]])
    second.send(smq.with_id(smq.Type.UNSUBSCRIBE, tids[3])).expect_nothing()
    before = site.state.stats.drops[Drop.UNROUTED]
    burst(tids[:3] + tids[4:], [])
    assert site.state.stats.drops[Drop.UNROUTED] == before + 20
    first.subscribe(b"topic 3")
    burst(tids, [])
    second.disconnect()
    second = site.device(b"second", RAW)
    for number in range(20):
        second.subscribe(b"topic %d" % number)
    burst(tids, tids)
    first.send(*(smq.with_id(smq.Type.UNSUBSCRIBE, tid) for tid in tids)).expect_nothing()
    burst([], tids)
    burst([], tids)


def test_a_forged_sender_in_a_burst_over_many_topics(site: Site) -> None:
    publisher, reader = site.device(b"publisher"), site.device(b"reader")
    tids = [reader.subscribe(b"topic %d" % number) for number in range(20)]
    for _ in range(3):
        send_all(publisher, rotating(tids, 400))
        assert messages(reader.sync()) == rotating(tids, 400)
    good = [publish(tid, publisher.etid, data) for tid, data in rotating(tids, 300)]
    publisher.send(*good, publish(tids[0], reader.etid, b"forged"), *good)
    publisher.expect_end(smq.disconnect(b"corrupt frame"))
    assert messages(reader.sync()) == rotating(tids, 300)


def test_control_packets_within_a_burst(site: Site) -> None:
    device = site.device(b"uid-a1")
    tids = [device.subscribe(b"topic %d" % number) for number in range(20)]
    for _ in range(3):
        burst = [publish(tid, device.etid, data) for tid, data in rotating(tids, 300)]
        burst.insert(150, b"\x06created")
        device.send(*burst)
        got = device.sync()
        assert got[150][:2] == b"\x07\x00"
        del got[150]
        assert messages(got) == rotating(tids, 300)


def test_two_publishers_interleave_but_keep_their_order(site: Site) -> None:
    reader = site.device(b"reader")
    tid = reader.subscribe(b"news")
    publishers = [site.device(b"publisher%d" % number, kind) for number, kind in enumerate(KINDS)]
    for _ in range(20):
        for device in publishers:
            device.send(*(publish(tid, device.etid, b"%d" % number) for number in range(50)))
    for device in publishers:
        device.expect_nothing()
    got = reader.sync()
    for device in publishers:
        own = [packet[13:] for packet in got if packet[5:9] == device.etid.to_bytes(4, "big")]
        assert own == [b"%d" % number for number in range(50)] * 20


# ---- sizes


@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_size_from_every_to_every_transport(site: Site, kind: str, to: str) -> None:
    """Around each limit of a framing, a buffer or a shortcut; several of a kind in a burst."""
    publisher, reader = site.device(b"publisher", kind), site.device(b"reader", to)
    tid = reader.subscribe(b"news")
    sizes = (0, 1, 108, 112, 113, 114, 186, 187, 4080, 4082, 4096, 16384, 32752, 32768, MAX - 1, MAX)
    for size in sizes:
        packets = [publish(tid, publisher.etid, bytes((number,)) * size) for number in range(3)]
        publisher.send(*packets)
        reader.expect(*packets)
    reader.expect_nothing()


@pytest.mark.parametrize("to", KINDS)
def test_the_largest_message_in_fragments_to_every_transport(site: Site, to: str) -> None:
    publisher, reader = site.device(b"publisher"), site.device(b"reader", to)
    tid = reader.subscribe(b"news")
    payload = bytes(number % 251 for number in range(MAX))
    pieces = [payload[at : at + 1000] for at in range(0, MAX, 1000)]
    for number, piece in enumerate(pieces):
        last = number == len(pieces) - 1
        publisher.send(publish(tid if last else 0, publisher.etid, piece, kind=smq.Type.PUBFRAG))
    reader.expect(publish(tid, publisher.etid, payload))


def test_a_message_that_comes_slowly(site: Site) -> None:
    publisher, reader = site.device(b"publisher"), site.device(b"reader")
    tid = reader.subscribe(b"news")
    frame = publisher.framed(publish(tid, publisher.etid, b"z" * 60000))
    for at in range(0, len(frame), 7000):
        publisher.send_bytes(frame[at : at + 7000])
        reader.expect_nothing()
    reader.expect(publish(tid, publisher.etid, b"z" * 60000))


def test_ten_megabytes_in_bulk_are_not_lost(make_site: Callable[..., Site]) -> None:
    site = make_site(budget=64 << 20)
    publisher, readers = (
        site.device(b"publisher"),
        [site.device(b"reader%d" % number, kind) for number, kind in enumerate(KINDS)],
    )
    tids = [reader.subscribe(b"news") for reader in readers]
    packets = [publish(tids[0], publisher.etid, b"%08d" % number * 100) for number in range(3000)]
    sender = gevent.spawn(publisher.send, *packets)
    for reader in readers:
        reader.expect(*packets)
    sender.join()
    assert sum(site.state.stats.drops.values()) == 0


# ---- fairness and latency


def test_a_flood_of_special_frames_delays_no_others(site: Site) -> None:
    """Text messages and pings take the slow path: its cost must not grow with what is received at once."""
    flood, other = site.device(b"flood-1", WS), site.device(b"other-1")
    frames = (masked(smq.PONG, 1) + masked(smq.PONG)) * 40_000
    sender = gevent.spawn(flood.send_bytes, frames)
    slowest = 0.0
    while not sender.ready():
        began_s = undisturbed_s()
        other.expect_nothing()
        slowest = max(slowest, undisturbed_s() - began_s)
    flood.expect_nothing()
    assert slowest < 0.5, slowest


def test_what_the_server_answers_leaves_at_once(site: Site) -> None:
    """A handler that publishes: its message goes out in the same turn of the loop, not with the next event."""
    site.smq.subscribe("ask", onmsg=lambda data, ptid, tid, stid: site.smq.publish(data, ptid))
    device = site.device(b"uid-a1")
    tid = device.create(b"ask")
    began_s = undisturbed_s()
    for number in range(20):
        device.publish(tid, b"%d" % number)
        device.expect(publish(device.etid, 1, b"%d" % number))
    assert undisturbed_s() - began_s < 0.2


def test_messages_that_cause_messages_end_up_somewhere(site: Site) -> None:
    """The server's handler answers itself for ever; clients are still served."""
    count = 0

    def again(data: bytes, *_: Any) -> None:
        nonlocal count
        count += 1
        if count < 5000:
            site.smq.publish(data, "self")

    site.smq.subscribe("self", onmsg=again)
    site.smq.publish("x", "self")
    device = site.device(b"uid-a1")
    device.expect_nothing()
    wait_until(lambda: count == 5000, "5000 rounds")


def test_weak_spot_the_etid_is_reachable_before_connack(make_site: Callable[..., Site]) -> None:
    """Whoever learns of the client from onconnect, or from its Connack, reaches it; nothing comes before Connack."""
    site = make_site(onconnect=lambda etid, info, peer: site.smq.publish("welcome", etid))
    device = site.device(b"uid-a1")
    device.expect(publish(device.etid, 1, b"welcome"))
    other = site.device(b"other-1")
    other.receive()
    other.publish(device.etid, b"hello")
    device.expect(publish(device.etid, other.etid, b"hello"))

"""Single messages are forwarded in LuaJIT; nobody may notice, whatever else clients send."""

from __future__ import annotations

import random
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from time import monotonic
from types import SimpleNamespace
from typing import Any

import gevent
import pytest
from gevent import monkey

from smqrt.broker.outbox import Drop
from smqrt.broker.routes import Trace
from smqrt.errors import CloseReason
from smqrt.loop.threads import Awaited, in_thread
from smqrt.operations.snapshots import traffic
from smqrt.smq import data_path, forwarder
from smqrt.smq.connection import RawConnection
from smqrt.wire import smq, websocket
from smqrt.wire.smq import Type
from tests.support.device import RAW, TLS, WS, WSS, Device, Site, masked, publish
from tests.support.waiting import wait_until

MANY = 3 * forwarder.JOIN_AFTER


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """It is set up before the sites, so this check comes after their end."""
    yield
    if (left := forwarder._forwarder) is not None:
        assert not left._joined
        assert not forwarder.subscribers
        wait_until(lambda: len(left.free_counts) == forwarder.ROUTES, "no counter is in use")


def is_forwarded(site: Site, device: Device) -> bool:
    forwarded: bool = site.state.sessions[device.etid].outbox.is_forwarded
    return forwarded


def payloads(packets: list[bytes]) -> list[bytes]:
    return [packet[13:] for packet in packets if packet[0] == Type.PUBLISH]


def exchange(publisher: Device, subscriber: Device, tid: int, count: int = MANY) -> None:
    """Send messages one by one, each received before the next."""
    for number in range(count):
        publisher.publish(tid, b"%d" % number)
        assert subscriber.receive()[13:] == b"%d" % number


def joined(site: Site, kind: str = RAW, to: str = RAW) -> tuple[Device, Device, int]:
    """A publisher that has joined the forwarder, its subscriber, and the topic."""
    subscriber, publisher = site.device(b"subscriber", to), site.device(b"publisher", kind)
    tid = subscriber.subscribe(b"topic")
    exchange(publisher, subscriber, tid)
    return publisher, subscriber, tid


# ---- joining and leaving


@pytest.mark.parametrize(("kind", "to"), [(RAW, RAW), (RAW, WS), (WS, RAW), (WS, WS)])
def test_single_messages_are_forwarded_and_counted(site: Site, kind: str, to: str) -> None:
    publisher, subscriber, tid = joined(site, kind, to)
    assert is_forwarded(site, publisher)
    counted = traffic(site.state)
    size = MANY * (15 + 2) - 10  # numbers below 10 have one digit
    assert (counted.messages, counted.copies) == (MANY, MANY)
    assert counted.bytes == counted.copied_bytes == size
    exchange(publisher, subscriber, tid, 5)
    assert traffic(site.state).messages == MANY + 5
    assert is_forwarded(site, publisher)


@pytest.mark.parametrize(("kind", "to"), [(RAW, RAW), (RAW, WS), (WS, WS)])
def test_messages_to_an_etid_are_forwarded_both_ways(site: Site, kind: str, to: str) -> None:
    one, other = site.device(b"one-123", kind), site.device(b"other-1", to)
    for number in range(MANY):
        one.publish(other.etid, b"ping %d" % number)
        assert other.receive() == publish(other.etid, one.etid, b"ping %d" % number)
        other.publish(one.etid, b"pong %d" % number)
        assert one.receive() == publish(one.etid, other.etid, b"pong %d" % number)
    assert is_forwarded(site, one)
    assert is_forwarded(site, other)


def test_several_topics_of_a_publisher_are_forwarded(site: Site) -> None:
    subscriber, other, publisher = site.device(b"subscriber"), site.device(b"other-1", WS), site.device(b"publisher")
    tids = [subscriber.subscribe(b"topic %d" % number) for number in range(5)] + [other.subscribe(b"other")]
    for number in range(MANY):
        tid = tids[number % 6]
        publisher.publish(tid, b"%d" % number)
        receiver = other if tid == tids[5] else subscriber
        assert receiver.receive() == publish(tid, publisher.etid, b"%d" % number)
    assert is_forwarded(site, publisher)


@pytest.mark.parametrize(("kind", "to"), [(TLS, RAW), (RAW, TLS), (WSS, RAW), (RAW, WSS)])
def test_clients_over_tls_do_not_join(site: Site, kind: str, to: str) -> None:
    publisher, _, _ = joined(site, kind, to)
    assert not is_forwarded(site, publisher)


def test_messages_to_several_subscribers_are_not_forwarded(site: Site) -> None:
    first, second, publisher = site.device(b"first-1"), site.device(b"second"), site.device(b"publisher")
    tid = first.subscribe(b"topic")
    second.subscribe(b"topic")
    for number in range(MANY):
        publisher.publish(tid, b"%d" % number)
        assert first.receive()[13:] == second.receive()[13:] == b"%d" % number
    assert not is_forwarded(site, publisher)


def test_a_client_joins_again(site: Site) -> None:
    publisher, subscriber, tid = joined(site)
    publisher.expect_nothing()  # a Ping
    assert not is_forwarded(site, publisher)
    exchange(publisher, subscriber, tid)
    assert is_forwarded(site, publisher)


@pytest.mark.parametrize("reason", ["pure", "no epoll", "no LuaJIT"])
def test_without_the_forwarder(site: Site, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    monkeypatch.setattr(forwarder, "_forwarder", None)
    monkeypatch.setattr(forwarder, "_is_available", reason != "pure")
    if reason == "no epoll":
        monkeypatch.setattr(forwarder, "get_hub", lambda: SimpleNamespace(loop=SimpleNamespace(backend="select")))
    else:
        monkeypatch.setitem(sys.modules, "lupa.luajit21", None)
    publisher, _, _ = joined(site)
    assert not is_forwarded(site, publisher)


# ---- what else a client may send


OTHERS: dict[str, Callable[[Device, int], list[bytes]]] = {
    "a control packet": lambda own, tid: [own.framed(smq.PING)],
    "a message and a control packet": lambda own, tid: [
        own.framed(publish(tid, own.etid, b"x")) + own.framed(smq.PING)
    ],
    "a control packet and a message": lambda own, tid: [
        own.framed(smq.PING) + own.framed(publish(tid, own.etid, b"x"))
    ],
    "many messages": lambda own, tid: [b"".join(own.framed(publish(tid, own.etid, b"%d" % n)) for n in range(2000))],
    "two messages": lambda own, tid: [2 * own.framed(publish(tid, own.etid, b"twice"))],
    "a large message": lambda own, tid: [own.framed(publish(tid, own.etid, bytes(smq.MAX_PAYLOAD_BYTES)))],
    "a message in pieces": lambda own, tid: [bytes((one,)) for one in own.framed(publish(tid, own.etid, b"x" * 20))],
    "one and a half": lambda own, tid: [
        own.framed(publish(tid, own.etid, b"one")) + own.framed(publish(tid, own.etid, b"half"))[:9],
        own.framed(publish(tid, own.etid, b"half"))[9:],
    ],
    "fragments": lambda own, tid: [
        own.framed(publish(tid, own.etid, b"begin", kind=Type.PUBFRAG)),
        own.framed(publish(tid, own.etid, b"end", kind=Type.PUBFRAG)) + own.framed(publish(tid, own.etid, b"whole")),
    ],
    "an unknown topic": lambda own, tid: [own.framed(publish(12345, own.etid, b"x"))],
    "a sub-topic": lambda own, tid: [own.framed(publish(tid, own.etid, b"x", stid=77))],
    "an empty message": lambda own, tid: [own.framed(publish(tid, own.etid, b""))],
    "another publisher": lambda own, tid: [own.framed(publish(tid, own.etid + 1, b"x"))],
    "a length of 0": lambda own, tid: [own.framed(b"")],
    "a short Publish": lambda own, tid: [own.framed(publish(tid, own.etid, b"")[:6])],
    "a short Publish before a message": lambda own, tid: [
        own.framed(publish(tid, own.etid, b"")[:9]) + own.framed(publish(tid, own.etid, b"x"))
    ],
    "an unknown type": lambda own, tid: [own.framed(b"\x63")],
    "Disconnect": lambda own, tid: [own.framed(smq.disconnect())],
    "the end": lambda own, tid: [],
}


WS_OTHERS: dict[str, Callable[[Device, int], list[bytes]]] = {
    "a ping": lambda own, tid: [masked(b"are you there", websocket.PING)],
    "a ping between messages": lambda own, tid: [
        own.framed(publish(tid, own.etid, b"one"))
        + masked(b"?", websocket.PING)
        + own.framed(publish(tid, own.etid, b"2"))
    ],
    "a pong": lambda own, tid: [masked(b"", websocket.PONG)],
    "text": lambda own, tid: [masked(publish(tid, own.etid, b"x"), websocket.TEXT)],
    "no mask": lambda own, tid: [websocket.encode(websocket.BINARY, publish(tid, own.etid, b"x"))],
    "a message in two frames": lambda own, tid: [
        masked(publish(tid, own.etid, b"begin"), fin=False) + masked(b"end", websocket.CONTINUATION)
    ],
    "the beginning of a message in two frames": lambda own, tid: [
        masked(publish(tid, own.etid, b"begin"), fin=False),
        masked(b"end", websocket.CONTINUATION),
    ],
    "a close frame": lambda own, tid: [masked(b"\x03\xe8", websocket.CLOSE)],
    "a length in two bytes": lambda own, tid: [
        b"\x82\xfe\0\x0e" + masked(publish(tid, own.etid, b"x"))[2:]  # RFC 6455 allows one byte only
    ],
    "a length in eight bytes": lambda own, tid: [
        b"\x82\xff" + bytes(7) + b"\x0e" + masked(publish(tid, own.etid, b"x"))[2:]
    ],
    "other masks": lambda own, tid: [
        masked(publish(tid, own.etid, bytes(range(size))), key=struct.pack(">I", size * 7777777))
        for size in range(1, 140)
    ],
    "no mask bits": lambda own, tid: [masked(publish(tid, own.etid, b"plain"), key=bytes(4))],
}
"""What only clients on WebSockets send."""
CASES = [(kind, other) for kind in (RAW, WS) for other in OTHERS] + [(WS, other) for other in WS_OTHERS]


def outcome(
    site: Site, kind: str, to: str, other: str
) -> tuple[list[bytes], list[bytes], dict[Any, int], dict[Any, int]]:
    """What both sides receive when the publisher sends something else between single messages, and what is counted."""
    publisher, subscriber, tid = joined(site, kind, to)
    before = site.state.stats.drops.copy(), site.state.stats.ends.copy()
    answers: list[bytes] = []
    for part in (OTHERS | WS_OTHERS)[other](publisher, tid):
        publisher.send_bytes(part)
        gevent.sleep(0.001)
    if other == "the end":
        publisher.close()
        wait_until(lambda: publisher.etid not in site.state.sessions, "the publisher is gone")
    else:
        try:
            publisher.publish(tid, b"last")
            answers = publisher.sync()
        except (AssertionError, OSError):  # the server has disconnected it
            wait_until(lambda: publisher.etid not in site.state.sessions, "the publisher is gone")
    received = subscriber.sync() + subscriber.sync()  # messages may come after the first Pong
    known = {publisher.etid.to_bytes(4, "big"): b"from", tid.to_bytes(4, "big"): b"to"}
    for number, name in known.items():
        received = [packet.replace(number, name) for packet in received]
    drops = {reason: count - before[0][reason] for reason, count in site.state.stats.drops.items()}
    ends = {reason: count - before[1][reason] for reason, count in site.state.stats.ends.items()}
    counted = traffic(site.state)
    drops["messages"] = counted.messages
    drops["copied bytes"] = counted.copied_bytes
    site.close_devices()
    return answers, received, drops, ends


@pytest.mark.parametrize(("kind", "other"), CASES)
@pytest.mark.parametrize("to", [RAW, WS])
def test_what_else_a_client_sends(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, kind: str, other: str, to: str
) -> None:
    """The outcome is that of a client that is never forwarded."""
    forwarded = outcome(make_site(), kind, to, other)
    monkeypatch.setattr(forwarder, "JOIN_AFTER", 1 << 30)
    assert forwarded == outcome(make_site(), kind, to, other)


def run_at_random(site: Site) -> list[dict[int, list[bytes]]]:
    """Let clients publish to each other and to topics, and change subscriptions; return what each got of each."""
    rng = random.Random(1)
    devices = [site.device(b"device %d" % number, WS if number < 2 else RAW) for number in range(4)]
    tids = [devices[0].create(b"topic %d" % number) for number in range(3)]
    received: list[list[bytes]] = [[] for _ in devices]
    subscribed: set[tuple[int, int]] = set()

    def receive_all() -> None:
        for _ in range(2):  # messages may come after the first Pong
            for device, got in zip(devices, received, strict=True):
                got += payloads(device.sync())

    for number in range(3000):
        who, target = rng.randrange(4), rng.randrange(3)
        if rng.random() < 0.02:
            receive_all()
            packet = smq.with_id(Type.UNSUBSCRIBE, tids[target]) if (who, target) in subscribed else b""
            devices[who].send(packet or bytes((Type.SUBSCRIBE,)) + b"topic %d" % target)
            subscribed ^= {(who, target)}
            receive_all()
        to = tids[target] if rng.random() < 0.7 else devices[(who + 1) % 4].etid
        for burst in range(1 if rng.random() < 0.9 else 3):
            devices[who].publish(to, b"%d:%d/%d" % (who, number, burst))
    receive_all()
    return [{who: [one for one in got if one.startswith(b"%d:" % who)] for who in range(4)} for got in received]


def test_everything_at_random(make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each client gets what it gets without the forwarder; the order is that of each publisher."""
    monkeypatch.setattr(forwarder, "JOIN_AFTER", 2)
    forwarded = run_at_random(make_site())
    assert sum(len(messages) for got in forwarded for messages in got.values()) > 2000
    monkeypatch.setattr(forwarder, "JOIN_AFTER", 1 << 30)
    assert forwarded == run_at_random(make_site())


# ---- changes meanwhile


def test_a_second_subscriber(site: Site) -> None:
    publisher, subscriber, tid = joined(site)
    second = site.device(b"second")
    second.subscribe(b"topic")
    publisher.publish(tid, b"to both")
    assert subscriber.receive()[13:] == second.receive()[13:] == b"to both"
    assert traffic(site.state).copies == MANY + 2


def test_no_subscriber_any_more(site: Site) -> None:
    publisher, subscriber, tid = joined(site)
    subscriber.send(smq.with_id(Type.UNSUBSCRIBE, tid)).expect_nothing()
    publisher.publish(tid, b"lost").expect_nothing()
    subscriber.expect_nothing()
    assert site.state.stats.drops[Drop.UNROUTED] == 1


@pytest.mark.parametrize("how", [Device.close, Device.reset, Device.disconnect])
def test_a_new_client_with_the_descriptor_of_the_subscriber(site: Site, how: Callable[[Device], None]) -> None:
    publisher, subscriber, tid = joined(site)
    descriptor = site.state.sessions[subscriber.etid].outbox.fd
    how(subscriber)
    wait_until(lambda: subscriber.etid not in site.state.sessions, "the subscriber is gone")
    newer = [site.device(b"newer %d" % number) for number in range(5)]
    assert descriptor in [site.state.sessions[device.etid].outbox.fd for device in newer]
    publisher.publish(tid, b"lost").publish(subscriber.etid, b"lost").expect_nothing()
    for device in newer:
        device.expect_nothing()
    lost = site.state.stats.drops
    assert lost[Drop.UNROUTED] + lost[Drop.CLOSED] == 2


def test_the_end_of_a_publisher(site: Site) -> None:
    publisher, subscriber, tid = joined(site)
    publisher.publish(tid, b"last")
    publisher.close()
    assert subscriber.receive()[13:] == b"last"
    wait_until(lambda: publisher.etid not in site.state.sessions, "the publisher is gone")
    assert site.state.stats.ends[CloseReason.PEER_CLOSED] == 1


def test_a_publisher_that_resets_its_connection(site: Site) -> None:
    publisher, _, _ = joined(site)
    publisher.reset()
    wait_until(lambda: publisher.etid not in site.state.sessions, "the publisher is gone")
    assert site.state.stats.ends[CloseReason.READ_FAILED] == 1


def test_a_subscriber_that_resets_its_connection(site: Site) -> None:
    """The publisher's next message and the reset are in one turn: either may be first."""
    publisher, subscriber, tid = joined(site)
    publisher.publish(tid, b"x")
    subscriber.reset()
    wait_until(lambda: subscriber.etid not in site.state.sessions, "the subscriber is gone")
    publisher.expect_nothing()
    ends = site.state.stats.ends
    assert ends[CloseReason.READ_FAILED] + ends[CloseReason.WRITE_FAILED] == 1


def test_a_trace_that_begins_later(site: Site) -> None:
    publisher, subscriber, tid = joined(site)
    trace = Trace(site.state, None, b"topic", lambda: None)
    trace.start()
    publisher.publish(tid, b"seen")
    assert subscriber.receive()[13:] == b"seen"
    assert [event["payload"] for event in trace.take() if event["event"] == "publish"] == ["seen"]
    trace.stop()
    exchange(publisher, subscriber, tid)
    assert is_forwarded(site, publisher)
    assert not trace.take()


def test_an_onpublish_that_rejects(make_site: Callable[..., Site]) -> None:
    site = make_site(onpublish=lambda data, *_: data != b"7")
    subscriber, publisher = site.device(b"subscriber"), site.device(b"publisher")
    tid = subscriber.subscribe(b"topic")
    for number in range(MANY):
        publisher.publish(tid, b"%d" % number).expect_nothing()
    assert payloads(subscriber.sync()) == [b"%d" % number for number in range(MANY) if number != 7]


def test_messages_of_the_server_stay_in_order_with_answers(site: Site) -> None:
    """What Python has queued for the subscriber is sent first."""
    publisher, subscriber, tid = joined(site)
    for number in range(200):
        site.smq.publish(b"server %d" % number, "topic")
        publisher.publish(tid, b"client %d" % number)
        if number % 7 == 0:
            gevent.sleep(0)
    wait_until(lambda: traffic(site.state).messages == MANY + 400, "all messages are routed")
    got = payloads(subscriber.sync())
    for who in (b"server", b"client"):
        assert [one for one in got if one.startswith(who)] == [b"%s %d" % (who, number) for number in range(200)]


# ---- slow subscribers


@pytest.mark.parametrize("to", [RAW, WS])
def test_a_subscriber_that_does_not_read(site: Site, to: str) -> None:
    """What its socket does not accept goes to its queue, and beyond its budget it is dropped and counted."""
    publisher, subscriber, tid = joined(site, to=to)
    outbox = site.state.sessions[subscriber.etid].outbox
    outbox.budget_bytes = 50_000
    outbox.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
    subscriber.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
    sent = forwarded_until_blocked = 0
    while not outbox.dropped:
        publisher.publish(tid, struct.pack(">I", sent) + bytes(1000 + sent % 1000))
        sent += 1
        while traffic(site.state).messages < MANY + sent:
            gevent.sleep(0)
        forwarded_until_blocked += is_forwarded(site, publisher)
    assert forwarded_until_blocked > 10
    publisher.expect_nothing()
    numbers = [struct.unpack_from(">I", one)[0] for one in payloads(subscriber.sync())]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) + outbox.dropped == sent
    exchange(publisher, subscriber, tid, 2 * MANY)
    assert is_forwarded(site, publisher)


def test_many_publishers_of_two_subscribers(site: Site) -> None:
    subscribers = [site.device(b"one-123", WS), site.device(b"other-1")]
    tids = [subscriber.subscribe(b"topic %d" % number) for number, subscriber in enumerate(subscribers)]
    publishers = [site.device(b"publisher %d" % number) for number in range(20)]
    for number in range(MANY):
        for who, publisher in enumerate(publishers):
            publisher.publish(tids[who % 2], b"%d" % who + bytes(number))
        for which, subscriber in enumerate(subscribers):
            got = [subscriber.receive()[13:] for _ in range(10)]
            assert sorted(got) == sorted(b"%d" % who + bytes(number) for who in range(which, 20, 2))
    assert all(is_forwarded(site, publisher) for publisher in publishers)


# ---- the rest of the server


def test_timers_and_other_clients_while_messages_are_frequent(site: Site) -> None:
    publisher, subscriber, tid = joined(site)
    late_s: list[float] = []
    ends_s = monotonic() + 1

    def echo() -> None:
        while monotonic() < ends_s:
            publisher.publish(tid, b"x")
            subscriber.receive()

    def timer() -> None:
        while monotonic() < ends_s:
            begun_s = monotonic()
            gevent.sleep(0.005)
            late_s.append(monotonic() - begun_s - 0.005)

    gevent.joinall([gevent.spawn(echo), gevent.spawn(timer)], raise_error=True)
    assert is_forwarded(site, publisher)
    assert sorted(late_s)[len(late_s) // 2] < 0.02


def test_a_client_that_also_publishes_resets_its_connection(site: Site) -> None:
    """Others get what was received in the same turn, here half a message, and clients still join."""
    for _ in range(3):
        one, other, third, fourth = (site.device(b"client-%d" % number) for number in range(4))
        for sender, receiver in ((one, other), (other, one), (third, fourth)):
            exchange(sender, receiver, receiver.etid)
        frame = smq.frame(publish(fourth.etid, third.etid, b"important"))
        one.publish(other.etid, b"x")
        other.reset()
        third.send_bytes(frame[:9])
        gevent.sleep(0.02)
        third.send_bytes(frame[9:])
        assert fourth.receive()[13:] == b"important"
        exchange(third, fourth, fourth.etid)
        assert is_forwarded(site, third)


@pytest.mark.parametrize("first", ["reset", "message"])
def test_a_message_to_a_client_that_resets_before_a_control_packet(site: Site, first: str) -> None:
    for number in range(10):
        publisher, subscriber = site.device(b"publisher %d" % number), site.device(b"subscriber %d" % number)
        exchange(publisher, subscriber, subscriber.etid)
        assert is_forwarded(site, publisher)
        both = smq.frame(publish(subscriber.etid, publisher.etid, b"x")) + smq.frame(smq.PING)
        steps = [subscriber.reset, lambda publisher=publisher, both=both: publisher.send_bytes(both)]
        for step in steps if first == "reset" else reversed(steps):
            step()
        assert publisher.receive() == smq.PONG


def test_an_error_does_not_end_forwarding(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, subscriber, tid = joined(site)

    def fail(connection: Any, data: bytes) -> None:
        raise ValueError("a fault of this test")

    with monkeypatch.context() as context:
        context.setattr(RawConnection, "handed_over", fail)
        publisher.send(smq.PING)
        gevent.sleep(0.01)
    exchange(publisher, subscriber, tid, 5)


def test_after_a_permanent_error_python_reads_the_clients(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, subscriber, tid = joined(site)
    turns: list[int] = []

    def fail(forwards: bool, stay_ns: int) -> None:
        turns.append(stay_ns)
        raise ValueError("a fault of this test")

    monkeypatch.setattr(forwarder._forwarder, "_run", fail)
    exchange(publisher, subscriber, tid, 5)
    assert not is_forwarded(site, publisher)
    assert len(turns) == 1


def test_bulk_is_read_by_python(site: Site) -> None:
    """It would leave no time for others; whole messages fill a receive exactly."""
    publisher, subscriber, tid = joined(site)
    frame = smq.frame(publish(tid, publisher.etid, bytes(1024 - 15)))
    publisher.send_bytes(frame * 64)
    for _ in range(64):
        assert len(subscriber.receive()) == 1022
    assert not is_forwarded(site, publisher)


def test_a_turn_without_room_for_all(site: Site) -> None:
    """Those that had no turn come first in the next one."""
    subscriber = site.device(b"subscriber")
    tid = subscriber.subscribe(b"topic")
    publishers = [site.device(b"publisher %d" % number) for number in range(40)]
    for publisher in publishers:
        exchange(publisher, subscriber, tid)
    assert all(is_forwarded(site, publisher) for publisher in publishers)
    for who, publisher in enumerate(publishers):
        publisher.publish(tid, b"%04d" % who + bytes(15_000))
    got = [subscriber.receive()[13:17] for _ in publishers]
    assert sorted(got) == [b"%04d" % who for who in range(40)]
    assert all(is_forwarded(site, publisher) for publisher in publishers)


def test_a_paused_websocket_does_not_join(site: Site) -> None:
    publisher, subscriber, _ = joined(site, WS)
    publisher.expect_nothing()
    connection = site.state.sessions[publisher.etid].outbox
    connection.joins_in = 1
    connection.pause()
    connection.carry = masked(publish(subscriber.etid, publisher.etid, b"x"))
    connection.resume()
    assert subscriber.receive()[13:] == b"x"
    gevent.sleep(0.01)
    assert connection.is_forwarded is not connection.watcher.active
    connection.leave_forwarder()
    data_path.frozen_connections.add(connection)
    connection.join_forwarder()
    data_path.frozen_connections.discard(connection)
    assert not connection.is_forwarded


def test_counters_end_with_their_last_publisher(site: Site) -> None:
    publisher, _, _ = joined(site)
    forwarding = forwarder._forwarder
    assert forwarding is not None
    assert len(forwarding.free_counts) == forwarder.ROUTES - 1
    publisher.expect_nothing()
    assert len(forwarding.free_counts) == forwarder.ROUTES
    assert traffic(site.state).messages == MANY


def test_it_does_not_keep_the_process_alive(site: Site) -> None:
    joined(site)
    assert forwarder._forwarder is not None
    assert not any(watcher.ref for watcher in forwarder._forwarder._watchers)


def test_results_of_threads_end_a_stay(site: Site) -> None:
    """While one is awaited, the loop takes turns, because a thread can't wake a stay."""
    joined(site)
    forwarding = forwarder._forwarder
    assert forwarding is not None
    waiting = gevent.spawn(in_thread, monkey.get_original("time", "sleep"), 0.05)
    gevent.sleep(0)
    assert Awaited.results == 1
    assert forwarding._has_other_work
    waiting.get()
    assert Awaited.results == 0

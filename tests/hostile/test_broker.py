"""SMQ clients that do their worst."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from smqrt.wire import smq, websocket
from smqrt.wire.smq import Type
from tests.hostile.conftest import Besieged
from tests.hostile.strangers import Stranger
from tests.support.device import RAW, WS, Device, masked, publish


@contextmanager
def crowd(besieged: Besieged, count: int) -> Iterator[list[Device]]:
    """Many clients, of which nobody takes care."""
    found = [Stranger(besieged, b"crowd-%d" % number) for number in range(count)]
    yield found
    for device in found:
        device.close()


def names(kind: int, count: int, prefix: bytes) -> bytes:
    return b"".join(smq.frame(smq.with_name(kind, b"%b%d" % (prefix, number))) for number in range(count))


FLOODS = {
    "pings": (RAW, lambda device: smq.frame(smq.PING) * 100_000),
    "empty fragments": (RAW, lambda device: smq.frame(publish(0, device.etid, b"", kind=Type.PUBFRAG)) * 60_000),
    "messages to ever other numbers": (
        RAW,
        lambda device: b"".join(smq.frame(publish(number, device.etid, b"")) for number in range(9, 60_000)),
    ),
    "names": (RAW, lambda device: names(Type.CREATE, 9_000, b"flood/") * 3),
    "WebSocket pings": (WS, lambda device: masked(b"", websocket.PING) * 60_000),
    "WebSocket texts": (WS, lambda device: masked(b"\x06n", websocket.TEXT) * 20_000),
    "empty WebSocket continuations": (
        WS,
        lambda device: (masked(b"\x06", fin=False) + masked(b"", websocket.CONTINUATION, fin=False) * 4000) * 1,
    ),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood(besieged: Besieged, name: str) -> None:
    kind, flood = FLOODS[name]
    device = Stranger(besieged, b"flood-1", kind)
    data = flood(device)
    with besieged.attack(f"SMQ: {name}") as attack:
        device.flood(data, attack)


def test_twenty_thousand_changes_with_five_hundred_observers(besieged: Besieged) -> None:
    with crowd(besieged, 500) as watchers:
        fickle = Stranger(besieged, b"fickle")
        tid = fickle.subscribe(b"observed")
        for watcher in watchers:
            watcher.send(smq.with_id(Type.OBSERVE, tid)).expect(smq.change(tid, 1))
        both = smq.frame(smq.with_id(Type.UNSUBSCRIBE, tid)) + smq.frame(smq.with_name(Type.SUBSCRIBE, b"observed"))
        with besieged.attack("SMQ: 20,000 subscribe and unsubscribe, 500 observers") as attack:
            fickle.flood(both * 20_000, attack)


def test_five_hundred_that_leave_five_hundred_common_topics_together(besieged: Besieged) -> None:
    subscriptions = names(Type.SUBSCRIBE, 500, b"common/")
    case = "SMQ: 500 clients subscribe to 500 common topics, and leave together"
    with crowd(besieged, 500) as leaving, besieged.attack(case, grows_bytes=128 << 20) as attack:
        for device in leaving:
            device.send_bytes(subscriptions)
            attack.sent(len(subscriptions))
        for device in leaving:
            _swallow_acks(device, subscriptions)
        for device in leaving:
            device.sock.shutdown(socket.SHUT_RDWR)
        _wait_until_gone(besieged, b"common/499")


@pytest.mark.parametrize("kind", [RAW, WS])
def test_a_thousand_that_break_off_in_the_same_moment(besieged: Besieged, kind: str) -> None:
    subscriptions = [smq.with_name(Type.SUBSCRIBE, b"broken/%d" % number) for number in range(20)]
    leaving = [Stranger(besieged, b"breaks-%d" % number, kind) for number in range(1000)]
    for device in leaving:
        device.send(*subscriptions)
        _wait_for_acks(device, len(subscriptions))
    with besieged.attack(f"SMQ ({kind}): 1,000 clients with 20 subscriptions break off in the same moment") as attack:
        with besieged.stopped(attack):
            for device in leaving:
                device.reset()
        _wait_until_gone(besieged, b"broken/19")


def _swallow_acks(device: Device, requests: bytes) -> None:
    device.sock.settimeout(60)
    left = len(requests) + requests.count(b"common/") * 5 - len(device.stream.data)
    while left > 0:
        left -= len(device.sock.recv(1 << 18))


def _wait_for_acks(device: Device, count: int) -> None:
    for _ in range(count):
        device.ack()


def _wait_until_gone(besieged: Besieged, topic: bytes) -> None:
    device = Stranger(besieged, b"looks-1")
    tid = device.create(topic)
    while True:
        device.send(smq.with_id(Type.OBSERVE, tid))
        if int.from_bytes(device.receive()[5:9], "big") == 0:
            break
    device.close()


def test_a_chunk_over_many_topics_to_five_hundred_subscribers(besieged: Besieged) -> None:
    with crowd(besieged, 500) as subscribers:
        publisher = Stranger(besieged, b"sender-1")
        tids = [publisher.create(b"fan/%d" % number) for number in range(16)]
        for device in subscribers:
            device.send_bytes(names(Type.SUBSCRIBE, 16, b"fan/"))
        for device in subscribers:
            _wait_for_acks(device, 16)
        data = b"".join(smq.frame(publish(tids[number % 16], publisher.etid, b"")) for number in range(8_000))
        with besieged.attack("SMQ: 128 KB of small messages over 16 topics to 500", grows_bytes=200 << 20) as attack:
            publisher.flood(data, attack)

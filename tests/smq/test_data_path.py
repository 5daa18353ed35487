"""A receive with much work is spread over turns: other clients are served, and the order stays."""

from __future__ import annotations

import gc
import resource
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import gevent
import pytest

from smqrt.loop.scheduling import Share
from smqrt.smq import data_path
from smqrt.wire import smq, websocket
from smqrt.wire.smq import Type
from tests.support.device import RAW, TLS, WS, Device, Site, bounded, connect_packet, expect_clean, masked, publish
from tests.support.waiting import wait_until

TURN_S = 0.1
"""CPU that no turn may take: 50 ms, and as much for the clients, which are in this process too."""


class Turns:
    """Measures the longest turn of the loop, in CPU seconds, while it is entered.

    What the whole run of the tests has left in memory is kept from the collector: walking over it is not the broker's.
    """

    def __enter__(self) -> Turns:
        gc.collect()
        gc.freeze()
        self.longest_s = 0.0
        self._greenlet = gevent.spawn(self._beat)
        gevent.sleep(0)
        return self

    def _beat(self) -> None:
        while True:
            began = time.thread_time()
            gevent.sleep(0.0005)
            self.longest_s = max(self.longest_s, time.thread_time() - began)

    def __exit__(self, *error: object) -> None:
        self._greenlet.kill()


@pytest.fixture(autouse=True, scope="module")
def many_sockets() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _names(count: int) -> bytes:
    return b"".join(smq.frame(smq.with_name(Type.CREATE, b"n%d" % number)) for number in range(count))


BURSTS: dict[str, tuple[str, Callable[[Device], bytes]]] = {
    "pings": (RAW, lambda device: smq.frame(smq.PING) * 80_000),
    "pings over TLS": (TLS, lambda device: smq.frame(smq.PING) * 80_000),
    "new names": (RAW, lambda device: _names(9_000)),
    "subscriptions": (
        RAW,
        lambda device: _names(9_000).replace(bytes((Type.CREATE,)) + b"n", bytes((Type.SUBSCRIBE,)) + b"n"),
    ),
    "empty fragments": (RAW, lambda device: smq.frame(publish(0, device.etid, b"", kind=Type.PUBFRAG)) * 17_000),
    "messages to nobody, to and fro": (
        RAW,
        lambda device: (
            smq.frame(publish(7, device.etid, b"")) * 1
            + b"".join(smq.frame(publish(number, device.etid, b"")) for number in range(10, 17_000))
        ),
    ),
    "pings of WebSocket": (WS, lambda device: masked(b"", websocket.PING) * 43_000),
    "texts": (WS, lambda device: masked(b"\x06n", websocket.TEXT) * 32_000),
    "pings between messages": (WS, lambda device: (masked(b"", websocket.PING) + masked(b"\x0c")) * 20_000),
    "fragments": (WS, lambda device: (masked(b"\x06", fin=False) + masked(b"n", websocket.CONTINUATION)) * 18_000),
}


@pytest.mark.parametrize("name", BURSTS)
def test_one_receive_of_small_things_holds_no_turn(site: Site, name: str) -> None:
    kind, burst = BURSTS[name]
    device, other = site.device(b"flood-1", kind), site.device(b"other-1")
    data = burst(device)
    reader = gevent.spawn(_swallow, device)
    connection = site.state.sessions[device.etid].outbox
    connection.receive_bytes = 262144  # as after a while of reading
    with bounded(), Turns() as turns:
        sent = 0
        while sent < len(data):
            device.send_bytes(data[sent : sent + 100_000])
            sent += 100_000
        other.expect_nothing()
        device.send(smq.disconnect())
        reader.join()
    assert turns.longest_s < TURN_S


def _swallow(device: Device) -> None:
    while device.more():
        device.stream.data = b""


def test_a_burst_to_a_thousand_subscribers_keeps_the_order(site: Site) -> None:
    """How long it holds a turn can't be told here, where the thousand are greenlets: tests/hostile does."""
    publisher = site.device(b"sender-1")
    topics = [publisher.create(b"topic-%d" % number) for number in range(16)]
    crowd = [site.device(b"crowd-%d" % number) for number in range(1000)]
    for device in crowd:
        device.send(*[smq.with_name(Type.SUBSCRIBE, b"topic-%d" % number) for number in range(16)])
    for device in crowd:
        for _ in topics:
            device.ack()
    messages = [publish(topics[number % 16], publisher.etid, struct.pack(">I", number)) for number in range(1_000)]
    data = b"".join(map(smq.frame, messages))
    with bounded(60):
        sender = gevent.spawn(publisher.send_bytes, data)
        got = [gevent.spawn(_receive, device, len(messages)) for device in crowd[:3]]
        rest = [gevent.spawn(_drain, device, len(data)) for device in crowd[3:]]
        try:
            gevent.joinall([sender, *got, *rest], raise_error=True)
        finally:
            gevent.killall([sender, *got, *rest])
    assert all(one.value == messages for one in got)
    assert not any(site.smq.drops().values())


def _receive(device: Device, count: int) -> list[bytes]:
    return [device.receive() for _ in range(count)]


def _drain(device: Device, size: int) -> None:
    left = size - len(device.stream.data)
    while left > 0:
        left -= len(device.sock.recv(1 << 18))


@pytest.mark.parametrize("kind", [RAW, WS, TLS])
def test_requests_of_a_burst_are_answered_in_order(site: Site, kind: str) -> None:
    device = site.device(b"burst-1", kind)
    names = [b"name-%d" % number for number in range(9_000)]
    sender = gevent.spawn(device.send, *[smq.with_name(Type.CREATE, name) for name in names])
    with bounded(30):
        assert [device.ack().name for _ in names] == names
    sender.join()


def test_a_client_closed_within_its_burst_leaves_nothing(site: Site) -> None:
    device = site.device(b"burst-1")
    device.send_bytes(smq.frame(smq.PING) * 20_000 + _names(2_000))
    device.reset()
    other = site.device(b"other-1")
    with bounded():
        while len(site.state.sessions) > 1:
            other.expect_nothing()
            gevent.sleep(0.001)


# ---- what is not a protocol


@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize("kind", [RAW, TLS])
def test_a_frame_shorter_than_its_header_closes_the_connection(site: Site, kind: str, length: int) -> None:
    device = site.device(b"device", kind)
    device.send_bytes(struct.pack(">H", length))
    device.expect_end()


@pytest.mark.parametrize("length", [0, 1, 2])
def test_also_behind_many_others(site: Site, length: int) -> None:
    device = site.device()
    device.send_bytes(smq.frame(smq.PING) * 200 + struct.pack(">H", length))
    device.expect_end(*[smq.PONG] * 200)


def _codes(device: Device) -> list[Any]:
    return [packet for packet in device.until_end() if packet.startswith(b"ws:8:")]


@pytest.mark.parametrize("cut", [0, 3])
def test_text_that_is_not_utf8_closes_with_1007(site: Site, cut: int) -> None:
    device = site.device(b"device", WS)
    packet = b"\x06caf\xe9"
    parts = [masked(packet, websocket.TEXT)]
    if cut:
        parts = [masked(packet[:cut], websocket.TEXT, fin=False), masked(packet[cut:], websocket.CONTINUATION)]
    device.send_bytes(b"".join(parts))
    assert _codes(device) == [b"ws:8:\x03\xef"]


def test_a_text_message_split_within_a_character_is_whole(site: Site) -> None:
    device = site.device(b"device", WS)
    packet = b"\x06" + "café".encode()
    device.send_bytes(masked(packet[:5], websocket.TEXT, fin=False) + masked(packet[5:], websocket.CONTINUATION))
    assert device.ack().name == packet[1:]


@pytest.mark.parametrize("payload", [b"", b"x"])
def test_a_message_of_endless_fragments_closes_with_1008(site: Site, payload: bytes) -> None:
    device = site.device(b"device", WS)
    device.send_bytes(masked(b"\x06", fin=False) + masked(payload, websocket.CONTINUATION, fin=False) * 4096)
    assert _codes(device) == [b"ws:8:\x03\xf0"]


def test_many_clients_that_end_when_the_turn_is_over(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end in the next turn, and are not received from again and again."""
    devices = [site.device(b"uid-%04d" % number) for number in range(20)]
    monkeypatch.setattr(data_path, "defer_at_s", lambda: 0.0)
    for device in devices:
        device.close()
    with bounded():
        wait_until(lambda: not site.state.sessions)
    expect_clean(site)


def test_control_packets_when_the_turn_is_over(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are handled in a later turn, in their order; a client that closes meanwhile leaves nothing."""
    devices = [site.open().start() for _ in range(10)]
    spent = [True] * 30
    monkeypatch.setattr(Share, "spent", lambda share: bool(spent) and spent.pop())
    for number, device in enumerate(devices):
        device.send(connect_packet(b"uid-%04d" % number))
    devices.pop().close()
    for device in devices:
        device.accepted()
    number = devices[0].subscribe(b"topic")
    assert [device.subscribe(b"topic") for device in devices] == [number] * 9
    assert not spent
    for device in devices:
        device.close()
    with bounded():
        wait_until(lambda: not site.state.sessions)
    expect_clean(site)

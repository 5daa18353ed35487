"""Clients over TLS stay with the old process of a hot restart until it closes them, and hear what others publish."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import gevent
import pytest

from smqrt.wire import smq as wire
from smqrt.wire.smq import Type, node_of
from tests.conftest import Served
from tests.server.restart.hot import HotServed, application
from tests.support.device import RAW, TLS, WSS, Device, publish
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers

Serve = Callable[..., HotServed]
EVERY_S = 0.004
WINDOW = ("--tls-port", "0", "--drain-window-s", "2")


def seen(served: Served, pattern: str) -> None:
    """Waits for a line of the server, while the greenlets of the test run on."""
    wait_until(lambda: re.search(pattern, served.output, re.MULTILINE), served.lines, 60)


class Receiver:
    """Takes what a client gets until its connection ends.

    Attributes:
        got: the numbers, by the name of the publisher and the destination.
        ended: whether the connection has ended.
    """

    def __init__(self, device: Device) -> None:
        self.device, self.ended = device, False
        self.got: dict[tuple[bytes, int], list[int]] = {}
        self.greenlet = gevent.spawn(self._run)

    def _run(self) -> None:
        while True:
            while (packet := self.device.stream.take()) is not None:
                if packet[0] == Type.PUBLISH:
                    tid, _, _, payload = wire.unpack_publish(wire.frame(packet))
                    name, number = payload.split()
                    self.got.setdefault((name, tid), []).append(int(number))
            if not self.device.more():
                self.ended = True
                return

    def last(self, name: bytes, tid: int) -> int:
        """The last number of a publisher; checks that it has all before, once, in order."""
        got = self.got.get((name, tid), [])
        assert got == list(range(len(got))), f"{name!r} to {tid}: {gaps(got)}"
        return len(got) - 1


def gaps(got: list[int]) -> list[tuple[int, int]]:
    """Neighbours that are none."""
    return [(one, other) for one, other in zip([-1, *got], got, strict=False) if other != one + 1]


class Publisher:
    """Publishes numbers to some destinations until it is stopped or closed.

    Attributes:
        sent: how many so far.
    """

    def __init__(self, device: Device, name: bytes, destinations: list[int]) -> None:
        self.sent, self._goes_on = 0, True
        self.device, self.name, self._destinations = device, name, destinations
        self._greenlet = gevent.spawn(self._run)

    def _run(self) -> None:
        while self._goes_on:
            payload = b"%s %d" % (self.name, self.sent)
            try:
                self.device.send(*(publish(tid, self.device.etid, payload) for tid in self._destinations))
            except OSError:
                return
            self.sent += 1
            gevent.sleep(EVERY_S)

    def stop(self) -> None:
        self._goes_on = False
        self._greenlet.join()


def test_tls_clients_receive_messages_until_they_are_closed(serve_hot: Serve, tmp_path: Path) -> None:
    served = serve_hot(application(tmp_path / "app"), *WINDOW)
    devices = [served.device(b"to-" + kind.encode(), kind) for kind in (RAW, TLS, WSS)]
    topic = [one.subscribe(b"news") for one in devices][0]
    raw, *secure = receivers = [Receiver(one) for one in devices]
    etids = [one.etid for one in devices]
    publishers = [
        Publisher(served.device(b"from-" + kind.encode(), kind), kind.encode(), [topic, *etids]) for kind in (RAW, TLS)
    ]
    plain, over_tls = publishers
    wait_until(lambda: all(one.last(b"tls", topic) > 20 and one.last(b"raw", topic) > 20 for one in receivers))
    served_before = served.pid
    os.kill(served_before, signal.SIGUSR2)
    seen(served, r"restart: process \d+ serves")
    sent = plain.sent
    served.next_process()
    wait_until(lambda: all(one.ended for one in secure), "clients over TLS are closed")
    sent_at_close = plain.sent
    wait_until(lambda: raw.last(b"raw", topic) > sent_at_close, "the plain client hears on")
    over_tls.stop()
    plain.stop()
    for one, etid in zip(secure, etids[1:], strict=True):
        assert one.last(b"raw", topic) > sent
        assert one.last(b"raw", etid) > sent
        assert one.last(b"tls", topic) > 20
        assert one.last(b"tls", etid) > 20
    for tid in (topic, etids[0]):
        raw.last(b"raw", tid)
        assert raw.last(b"tls", tid) >= max(one.last(b"tls", topic) for one in secure)


def at_each_worker(served: Served, kind: str, name: str) -> list[Device]:
    """A client at each of two workers."""
    port, found = served.tls_port if kind in (TLS, WSS) else served.port, dict[int, Device]()
    for number in range(40):
        device = (
            Device(("127.0.0.1", port), kind).start(target="/smq.lsp").connect(b"%s-%04d" % (name.encode(), number))
        )
        if found.setdefault(node_of(device.etid), device) is not device:
            device.disconnect()
        if len(found) == 2:
            break
    assert len(found) == 2
    return list(found.values())


def test_workers(serve: Callable[..., Served], tmp_path: Path) -> None:
    """As above; and what is published at the other worker reaches them, too."""
    served = serve(application(tmp_path / "app"), *WINDOW, "--workers", "2", "--hosts", "*")
    devices = at_each_worker(served, TLS, "to")
    topic = [one.subscribe(b"news") for one in devices][0]
    receivers = [Receiver(one) for one in devices]
    etids = [one.etid for one in devices]
    publishers = [
        Publisher(one, b"p%d" % number, [topic, *etids])
        for number, one in enumerate(at_each_worker(served, RAW, "from"))
    ]
    ways = [(one.name, tid) for one in publishers for tid in (topic, etids[0])]
    wait_until(lambda: all(len(receivers[0].got.get(way, [])) > 20 for way in ways), receivers[0].got)
    served.process.send_signal(signal.SIGUSR2)
    sent = []
    for worker in ("w0", "w1"):
        seen(served, f"^{worker}: process .* serves$")
        sent.append(publishers[0].sent)
    wait_until(lambda: all(one.ended for one in receivers), "clients over TLS are closed", 60)
    for one in publishers:
        one.stop()
    for receiver, etid in zip(receivers, etids, strict=True):
        for publisher in publishers:
            got, own = (receiver.got[publisher.name, tid] for tid in (topic, etid))
            assert got == sorted(set(got))
            assert own == sorted(set(own))
            assert min(got[-1], own[-1]) > sent[0]
            assert abs(got[-1] - own[-1]) < 10, "until the close, one to one as well"
            assert (gaps(got), gaps(own)) == ([], [])


def heard_in_the_end(publisher: Device, number: int, device: Device, text: bytes) -> int:
    """Publishes until a client hears it, since the other process has to learn that it subscribes; gives the number that
    it hears it by.
    """
    found: list[int] = []

    def hears() -> bool:
        publisher.publish(number, text)
        packets = [one for one in device.sync() if one[0] == Type.PUBLISH and one.endswith(text)]
        found.extend(wire.unpack_publish(wire.frame(one))[0] for one in packets)
        return bool(found)

    wait_until(hears, text)
    return found[0]


def test_what_changes_meanwhile(serve_hot: Serve, tmp_path: Path) -> None:
    """Subscriptions, also to topics that either process has made since, and what observers are told."""
    served = serve_hot(application(tmp_path / "app"), *WINDOW[:-1], "4")
    raw, tls, other = served.device(b"raw-01"), served.device(b"tls-01", TLS), served.device(b"wss-01", WSS)
    news = raw.subscribe(b"news")
    assert {tls.subscribe(b"news"), other.subscribe(b"news")} == {news}
    raw.send(*(wire.with_id(Type.OBSERVE, number) for number in (tls.etid, news)))
    raw.expect(wire.change(news, 3))
    os.kill(served.pid, signal.SIGUSR2)
    seen(served, r"restart: process \d+ serves")
    raw.expect_nothing()
    tls.send(wire.with_id(Type.UNSUBSCRIBE, news))
    raw.expect(wire.change(news, 2))
    made_there, made_here = raw.create(b"made there"), tls.subscribe(b"made here")
    subscribed = tls.subscribe(b"made there")
    assert heard_in_the_end(raw, made_there, tls, b"one") == subscribed
    assert heard_in_the_end(raw, made := raw.create(b"made here"), tls, b"two") == made_here
    assert {raw.subscribe(b"made here"), raw.subscribe(b"made there")} == {made, made_there}
    assert heard_in_the_end(tls, made_here, raw, b"four") == made
    assert heard_in_the_end(tls, subscribed, raw, b"five") == made_there
    assert heard_in_the_end(raw, tls.etid, tls, b"three") == tls.etid
    served.next_process()
    changes = {wire.change(tls.etid, 0), wire.change(news, 1)}
    told: list[bytes] = []

    def is_told() -> bool:
        told.extend(one for one in raw.sync() if one[0] != Type.PUBLISH)
        return len(told) >= len(changes)

    wait_until(is_told, told)
    raw.expect_nothing()
    assert (len(told), set(told)) == (2, changes)


def test_the_new_process_does_not_wait_for_the_old(serve_hot: Serve, tmp_path: Path) -> None:
    """The old process is stopped while it keeps a client: what is published for that one has a bound."""
    served = serve_hot(application(tmp_path / "app"), *WINDOW[:-1], "4")
    raw, tls = served.device(b"raw-01"), served.device(b"tls-01", TLS)
    news = raw.subscribe(b"news")
    assert tls.subscribe(b"news") == news
    before = served.pid
    os.kill(before, signal.SIGUSR2)
    seen(served, r"restart: process \d+ serves")
    os.kill(before, signal.SIGSTOP)
    try:
        for number in range(400):
            raw.publish(news, b"%d " % number + bytes(60_000))
            assert raw.receive()[13:].startswith(b"%d " % number)
        seen(served, "restart: the old process reads too slowly")
    finally:
        os.kill(before, signal.SIGCONT)
    served.next_process()
    raw.publish(news, b"last")
    assert raw.receive().endswith(b"last")

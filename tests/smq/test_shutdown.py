"""Graceful shutdown of clients under traffic: no accepted message is lost without being counted."""

from __future__ import annotations

import random
from collections import Counter
from time import monotonic
from typing import Any

import gevent
import pytest

from smqrt import hub
from smqrt.smq import shutdown
from smqrt.smq.shutdown import close_clients, reject_new_clients, wait_handled
from tests.support.device import KINDS, RAW, RAW_HEADERS, TLS, WS, Device, Site, bounded, request
from tests.support.pki import Authority
from tests.support.waiting import wait_until

SEEDS = 20
PUBLISHERS, SUBSCRIBERS = 4, 4


class Traffic:
    """Publishers that send numbers to one topic for as long as they can, and subscribers that note what comes.

    Attributes:
        accepted: the newest number that the hub has routed, by publisher.
        owed: by subscriber, what had been accepted when it was closed.
    """

    def __init__(self, authority: Authority, random_: random.Random) -> None:
        self.accepted: Counter[int] = Counter()
        self.owed: dict[int, int] = {}
        self.site = Site(hub.create(onpublish=self._published, onclose=self._closed), authority)
        self._random = random_
        kinds = [random_.choice(KINDS) for _ in range(SUBSCRIBERS)]
        self.subscribers = [self.site.device(b"subscriber%d" % at, kind) for at, kind in enumerate(kinds)]
        self.tid = [device.subscribe(b"numbers") for device in self.subscribers][0]
        self.publishers = [self.site.device(b"publisher%d" % at, random_.choice(KINDS)) for at in range(PUBLISHERS)]
        self.confirmed: Counter[int] = Counter()
        self._sent: Counter[int] = Counter()

    def _published(self, data: Any, ptid: int, tid: int, subtid: int, peer: Any) -> bool:
        number = int(bytes(data))
        assert number == self.accepted[ptid] + 1, "in order, without a gap"
        self.accepted[ptid] = number
        return True

    def _closed(self, etid: int, peer: Any, *_: object) -> None:
        self.owed[etid] = self.accepted.total()

    def publish_for_ever(self, device: Device) -> None:
        """Send in bursts, and now and then ask whether all was taken."""
        try:
            while True:
                for _ in range(self._random.randrange(1, 40)):
                    self._sent[device.etid] += 1
                    device.publish(self.tid, b"%d" % self._sent[device.etid])
                if self._random.random() < 0.3:
                    device.sync()
                    self.confirmed[device.etid] = self._sent[device.etid]
                gevent.sleep(self._random.random() * 0.003)
        except (OSError, AssertionError):
            pass  # the end

    def run(self, over_s: float) -> list[list[bytes]]:
        """Traffic, then the end in its middle; gives what each subscriber got."""
        readers = [gevent.spawn(device.until_end) for device in self.subscribers]
        writers = [gevent.spawn(self.publish_for_ever, device) for device in self.publishers]
        wait_until(lambda: len(self.confirmed) == PUBLISHERS, "traffic")
        before = self.confirmed.total()
        brokers = [self.site.state]
        reject_new_clients(brokers)
        wait_handled(brokers, 0.1)
        assert close_clients(brokers, over_s, 2.0) == PUBLISHERS + SUBSCRIBERS
        gevent.joinall(readers + writers)
        assert before <= self.accepted.total() <= self._sent.total()
        return [[one for one in reader.get() if not one.startswith(b"ws:")] for reader in readers]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_message_that_was_accepted_is_delivered(authority: Authority, seed: int) -> None:
    random_ = random.Random(seed)
    traffic = Traffic(authority, random_)
    with bounded():
        received = traffic.run(random_.choice([0.0, 0.02, 0.1]))
        traffic.site.close()
    for at, packets in enumerate(received):
        newest: Counter[bytes] = Counter()
        for packet in packets:
            assert packet[0] == 8, "no Disconnect, which would tell the client not to come back"
            assert int(packet[13:]) == newest[packet[5:9]] + 1, f"seed {seed}: a gap, or out of order"
            newest[packet[5:9]] += 1
        assert newest.total() == traffic.owed[traffic.subscribers[at].etid], (
            f"seed {seed}: subscriber {at} has not got all it was owed"
        )
    drops = traffic.site.smq.drops()
    # Those for one that has gone a moment before are "closed", and later ones, to nobody, "unrouted".
    assert sum(drops.values()) == drops["unrouted"] + drops["closed"], drops


def test_slow_clients_get_time_and_lost_messages_are_counted(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    smq = hub.create(budget=1 << 24)
    site = Site(smq, authority)
    lazy, busy = site.device(b"lazybones"), site.device(b"busy one")
    tid = lazy.subscribe(b"t")
    sent = 300
    for _ in range(sent):
        busy.publish(tid, bytes(60_000))
    busy.sync()
    with bounded():
        begin = monotonic()
        reader = gevent.spawn_later(0.2, lambda: len(lazy.until_end()))
        close_clients([site.state], 0.0, 5.0)
        assert reader.get() == sent, "it read late, and got all"
        assert monotonic() - begin < 4
    site.close()
    assert smq.drops()["closed"] == 0
    site = Site(smq := hub.create(budget=1 << 24), authority)
    lazy, busy = site.device(b"lazybones"), site.device(b"busy one")
    tid = lazy.subscribe(b"t")
    for _ in range(sent):
        busy.publish(tid, bytes(60_000))
    busy.sync()
    with bounded():
        close_clients([site.state], 0.0, 0.1)
        got = sum(len(packet) == 60_013 for packet in lazy.until_end(torn=True))
    site.close()
    assert got + smq.drops()["closed"] == sent
    assert f"{smq.drops()['closed']} messages waited for clients that did not read them within 0.1 s" in caplog.text
    assert got < sent


def test_closes_are_spread_with_publishers_first(authority: Authority) -> None:
    ended: list[tuple[str, float]] = []
    site = Site(hub.create(onclose=lambda etid, sock, peer, *_: ended.append((str(peer.uid), monotonic()))), authority)
    subscribers = [site.device(b"subscriber%d" % at, (RAW, WS, TLS)[at % 3]) for at in range(10)]
    tid = [device.subscribe(b"t") for device in subscribers][0]
    for publisher in [site.device(b"publisher%d" % at) for at in range(10)]:
        publisher.publish(tid, b"in the kernel")
    with bounded():
        begin = monotonic()
        close_clients([site.state], 0.4, 1.0)
        took_s = monotonic() - begin
        raw, ws = subscribers[0].until_end(), subscribers[1].until_end()
        assert [packet[13:] for packet in raw] == [b"in the kernel"] * 10, "what had arrived is routed first"
        assert len(ws) == 11
        assert ws[-1] == b"ws:8:\x03\xe9", "1001: going away"
    site.close()
    words = [uid for uid, _ in ended]
    assert all("publisher" in uid for uid in words[:10]), words
    assert all("subscriber" in uid for uid in words[10:]), words
    assert 0.3 < took_s < 2
    halfway = ended[9][1] - begin
    assert 0.1 < halfway < took_s - 0.1, "one after the other"


def test_new_clients_get_503(authority: Authority) -> None:
    site = Site(hub.create(), authority)
    kept, half = site.device(b"kept one"), site.open().start()
    waiting = site.open()
    reject_new_clients([site.state])
    with bounded():
        assert half.until_end() == [], "no Connect yet: it is closed"
        waiting.send_bytes(request(RAW_HEADERS))
        answer = b""
        while data := waiting.sock.recv(4096):
            answer += data
            if b"no new clients" in answer:
                break
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: 1\r\n" in answer
    kept.expect_nothing()
    site.close()


def test_the_window_depends_on_the_number_of_clients() -> None:
    assert shutdown.window_s(99) == 0
    assert shutdown.window_s(1000) == pytest.approx(0.5)
    assert shutdown.window_s(10_000) == 5.0 == shutdown.window_s(1_000_000)

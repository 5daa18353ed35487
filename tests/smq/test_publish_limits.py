"""Limits of what a client publishes and of how many come, the same over every transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from smqrt.auth.identity import Identity
from smqrt.broker import client_limits
from smqrt.broker.outbox import Drop
from smqrt.broker.topics import USER_CONNECTIONS
from smqrt.server.mqtt import take_mqtt
from smqrt.settings import limits as limit_settings
from smqrt.settings.limits import Bucket, LimitSettings, apply_limits
from smqrt.transport import admission
from smqrt.wire import smq
from smqrt.wire.smq import Type
from tests.conformance.mqtt_script import data_of, packets_of
from tests.conformance.test_mqtt_hub import Client
from tests.support.device import KINDS, RAW, TLS, WS, WSS, Site, bounded, expect_clean, publish
from tests.support.waiting import wait_until

Set = Callable[..., None]


@pytest.fixture
def limits() -> Iterator[Set]:
    """Brings limits into force, as a file that was read again does."""

    def set_limits(**values: Any) -> None:
        apply_limits(replace(limit_settings.current_limits(), **values), {})

    yield set_limits
    apply_limits(LimitSettings(), {})


def payloads(packets: list[bytes]) -> list[bytes]:
    return [packet[13:] for packet in packets if packet[0] == Type.PUBLISH]


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_has_so_many_bytes(site: Site, limits: Set, kind: str) -> None:
    """Also for clients that were there before, in runs of many, and for names."""
    device, other = site.device(b"uid-a1", kind), site.device(b"uid-b1", kind)
    limits(message_bytes=100)
    tid = other.subscribe(b"news")
    fitting = [publish(tid, device.etid, bytes((number,)) * 100) for number in range(30)]
    device.send(*fitting)
    other.expect(*fitting)
    device.send(*fitting[:3], publish(tid, device.etid, bytes(101)))
    assert smq.disconnect(b"message too large") in device.until_end()
    assert not other.sync() or kind, "what comes before it in one run may be lost with it"
    other.send(bytes((Type.CREATE,)) + b"n" * 120)
    assert smq.disconnect(b"message too large") in other.until_end()
    assert client_limits.MESSAGE_BYTES.count == 2
    expect_clean(site)


def test_fragments_have_so_many_bytes(site: Site, limits: Set) -> None:
    device = site.device(b"uid-a1")
    limits(message_bytes=100)
    device.send(*(publish(0, device.etid, bytes(40), kind=Type.PUBFRAG) for _ in range(3))).expect_end()


@pytest.mark.parametrize("kind", KINDS)
def test_too_much_waits(site: Site, limits: Set, kind: str) -> None:
    """Nothing is lost, it comes in order and as fast as it may, and others are not slowed down."""
    limits(publish_rate=100, publish_burst_s=0.2)
    device, other = site.device(b"uid-a1", kind), site.device(b"uid-b1", kind)
    tid, own = other.subscribe(b"news"), other.create(b"mine")
    began_s = time.monotonic()
    device.send(*(publish(tid, device.etid, b"%d" % number) for number in range(50)))
    with bounded():
        got = payloads([other.receive() for _ in range(20)])
        other.publish(own, b"x").expect_nothing() if not got else None
        got += payloads([other.receive() for _ in range(30)])
        device.expect_nothing()
    took_s = time.monotonic() - began_s
    assert got == [b"%d" % number for number in range(50)]
    assert 0.25 < took_s < 3, took_s
    assert client_limits.PUBLISH_RATE.count
    expect_clean(site)


@pytest.mark.parametrize("kind", KINDS)
def test_too_much_is_dropped_and_counted(site: Site, limits: Set, kind: str) -> None:
    limits(publish_rate=1, publish_burst_s=20, publish_policy="drop")
    device, other = site.device(b"uid-a1", kind), site.device(b"uid-b1", kind)
    tid = other.subscribe(b"news")
    device.send(*(publish(tid, device.etid, b"%d" % number) for number in range(50))).expect_nothing()
    got = payloads(other.sync())
    assert got == [b"%d" % number for number in range(len(got))]
    assert 18 <= len(got) <= 21
    assert site.state.stats.drops[Drop.OVER_RATE] == client_limits.PUBLISH_RATE.count == 50 - len(got)


@pytest.mark.parametrize("kind", KINDS)
def test_too_much_disconnects(site: Site, limits: Set, kind: str) -> None:
    limits(publish_bytes_per_s=1000, publish_policy="disconnect")
    device = site.device(b"uid-a1", kind)
    tid = device.create(b"news")
    device.publish(tid, bytes(500)).expect_nothing()
    device.send(*(publish(tid, device.etid, bytes(500)) for _ in range(3)))
    assert smq.disconnect(b"publish rate") in device.until_end()
    assert client_limits.PUBLISH_BYTES.count == 1


def test_bytes_wait_and_a_message_above_the_burst_passes(site: Site, limits: Set) -> None:
    limits(publish_bytes_per_s=100_000, publish_burst_s=0.1)
    device = site.device(b"uid-a1")
    sizes = [30_000, 10, 20_000, 5]
    began_s = time.monotonic()
    device.send(*(publish(device.etid, device.etid, bytes(size)) for size in sizes))
    assert [len(device.receive()) - 13 for _ in sizes] == sizes
    assert 0.2 < time.monotonic() - began_s < 3


@pytest.mark.parametrize("policy", ["wait", "drop"])
def test_many_topics_in_one_go(site: Site, limits: Set, policy: str) -> None:
    """What is sorted by subscriber in one go is charged too."""
    limits(publish_rate=1000, publish_burst_s=0.3, publish_policy=policy)
    device = site.device(b"uid-a1")
    others = [site.device(b"other-%02d" % number) for number in range(20)]
    tids = [other.subscribe(b"news %d" % number) for number, other in enumerate(others)]
    for first in range(0, 600, 100):
        packets = [publish(tids[at % 20], device.etid, b"%d" % at) for at in range(first, first + 100)]
        device.send(*packets)
    with bounded():
        device.expect_nothing()
    got = [payloads(other.sync()) for other in others]
    for at, one in enumerate(got):
        assert one == [b"%d" % number for number in range(600) if number % 20 == at and b"%d" % number in one]
    assert sum(map(len, got)) + site.state.stats.drops[Drop.OVER_RATE] == 600
    assert (policy == "wait") == (sum(map(len, got)) == 600)


def test_limits_change_for_connected_clients(site: Site, limits: Set) -> None:
    device = site.device(b"uid-a1")
    tid = device.subscribe(b"news")
    packets = [publish(tid, device.etid, b"%d" % number) for number in range(20)]
    device.send(*packets).expect(*packets)
    limits(publish_rate=1)
    device.send(*packets).expect(*packets[:1])
    limits(publish_rate=1000)
    with bounded():
        device.expect(*packets[1:])
    limits(publish_rate=None)
    device.send(*packets).expect(*packets)
    assert not site.state.publish_limits
    assert site.state.uids[b"uid-a1"].routes == {} or device.sync() == []


def test_waiting_messages_of_a_closed_client_are_counted(site: Site, limits: Set) -> None:
    limits(publish_rate=1)
    device = site.device(b"uid-a1")
    device.send(*(publish(device.etid, device.etid, b"x") for _ in range(20)))
    device.receive()
    site.smq.shutdown("bye", device.etid)
    wait_until(lambda: site.state.stats.drops[Drop.OVER_RATE] == 19, site.state.stats.drops)
    expect_clean(site)


def test_fragments_are_charged_once(site: Site, limits: Set) -> None:
    limits(publish_bytes_per_s=1000, publish_burst_s=1, publish_policy="drop")
    device = site.device(b"uid-a1")
    device.publish(device.etid, b"x").receive()
    for _ in range(2):
        fragments = [publish(tid, device.etid, bytes(200), kind=Type.PUBFRAG) for tid in (0, device.etid)]
        device.send(*fragments).expect(publish(device.etid, device.etid, bytes(400)))


def test_a_flood_of_names_pays_too(site: Site, limits: Set) -> None:
    limits(publish_rate=10, publish_burst_s=1)
    device = site.device(b"uid-a1")
    device.publish(device.etid, b"x").receive()
    for number in range(15):
        device.create(b"name %d" % number)
    began_s = time.monotonic()
    device.publish(device.etid, b"y").receive()
    assert time.monotonic() - began_s > 0.4


# ---- how many come


@pytest.mark.parametrize("kind", KINDS)
def test_a_user_has_so_many_connections(site: Site, limits: Set, kind: str) -> None:
    def authenticate(credentials: bytes, session: Any) -> tuple[int, bytes]:
        session.identity = Identity(user=credentials.decode())
        return 0, b""

    limits(connections_per_user=2)
    site.state.hooks.authenticate = authenticate
    first, _ = (site.device(b"uid-a%d" % number, kind, credentials=b"ann") for number in range(2))
    site.device(b"uid-b1", kind, credentials=b"bob")
    third = site.open(kind).start()
    third.send(smq.connect(b"uid-a3", b"ann", b""))
    third.expect_end(smq.connack(2, 0, b"too many connections of this user"))
    site.device(b"uid-a1", kind, credentials=b"ann")  # takes the place of its own
    assert USER_CONNECTIONS.count == site.smq.refused()["connections_per_user"] == 1
    first.close()
    site.close_devices()
    wait_until(lambda: not site.state.users, "nobody is counted any more")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["connect_rate", "connect_rate_per_address"])
def test_so_many_come_in_a_second(
    site: Site, limits: Set, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    site.address(kind in (TLS, WSS))
    limits(**{name: 0.5})
    site.device(b"uid-00", kind).close()
    assert not admission.open_connections._rates, "connections of this machine are not counted"
    monkeypatch.setattr(admission, "_is_local", lambda host: False)
    for number in range(5):
        site.device(b"uid-%02d" % number, kind)
    with pytest.raises((OSError, AssertionError)):
        site.open(kind).start()
    limit = admission.CONNECT_RATE if name == "connect_rate" else admission.CONNECT_RATE_PER_ADDRESS
    assert limit.count == 1


@pytest.mark.parametrize("kind", [RAW, WS])
def test_so_many_mqtt_clients_come_in_a_second(
    make_site: Callable[..., Site], limits: Set, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    site = make_site(mqtt=True)
    site.server.take_mqtt = take_mqtt
    site.address()
    limits(connect_rate_per_address=0.5)
    monkeypatch.setattr(admission, "_is_local", lambda host: False)

    def connect(name: str) -> None:
        client = Client(site, kind, "mqtt")
        client.send(data_of(f"C {name}", 5))
        got = client.receive()
        assert got is not None
        assert [got] == packets_of("A", 5)

    for number in range(5):
        connect(f"c{number}")
    with pytest.raises((OSError, AssertionError)):
        connect("late")
    assert admission.CONNECT_RATE_PER_ADDRESS.count == 1


def test_ten_thousand_clients_may_come_back_at_once() -> None:
    settings = LimitSettings()
    assert settings.connect_rate is not None
    assert settings.connect_rate_per_address is not None
    assert settings.connect_rate * admission.RATE_OVER_S >= 10_000
    assert settings.connect_rate_per_address * admission.RATE_OVER_S >= admission.MAX_PER_ADDRESS


def test_a_bucket() -> None:
    bucket = Bucket(10, 20, now_s=0)
    bucket.tokens -= 25
    assert bucket.wait_s(1) == pytest.approx(0.6)
    assert bucket.wait_s(1000) == pytest.approx(2.5), "not more than it holds"
    assert bucket.fill(1) == 5
    assert bucket.fill(100) == 20

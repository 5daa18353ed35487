"""A client that is cut at any byte of a session leaves nothing behind."""

from __future__ import annotations

import pytest

from smqrt.wire import smq
from smqrt.wire.smq import Type
from tests.support.device import (
    RAW,
    RAW_HEADERS,
    WS,
    WS_HEADERS,
    Device,
    Site,
    connect_packet,
    expect_clean,
    leftovers,
    masked,
    publish,
    request,
)
from tests.support.waiting import wait_until

AT_ONCE = 25


def session(site: Site, device: Device) -> bytes:
    """Everything that a scripted client sends: handshake, Connect, subscriptions, messages, fragments."""
    site.smq.create("news", 100)
    packets = [
        connect_packet(b"uid-%06d" % id(device), b"secret", b"info"),
        b"\x04news",
        b"\x04new topic",
        smq.with_id(Type.OBSERVE, 100),
        smq.with_id(Type.OBSERVE, watched(site)),
        publish(100, 0x77777777, b"to be forged"),
    ]
    if device.kind == RAW:
        packets[-1:-1] = [publish(0, 1, b"half of it", kind=Type.PUBFRAG), publish(0, 1, b"more", kind=Type.PUBFRAG)]
    headers = WS_HEADERS if device.on_websocket else RAW_HEADERS
    script = request(headers) + b"".join(map(device.framed, packets[:-1]))
    if device.on_websocket:
        script += masked(b"\x04fragm", fin=False) + masked(b"ping", opcode=9) + masked(b"ented", opcode=0)
    return script + device.framed(packets[-1])


def watched(site: Site) -> int:
    return int(site.state.uids[b"watched"].etid)


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("kind", [RAW, WS])
def test_cut_at_every_byte(site: Site, kind: str, how: str) -> None:
    other = site.device(b"watched")
    before = leftovers(site.state)
    size = len(session(site, site.open(kind)))
    assert size > 200
    for first in range(0, size, AT_ONCE):
        devices = []
        for at in range(first, min(first + AT_ONCE, size)):
            device = site.open(kind)
            device.send_bytes(session(site, device)[:at])
            devices.append(device)
        other.expect_nothing()
        for device in devices:
            device.close() if how == "close" else device.reset()
        wait_until(lambda: leftovers(site.state) == before, f"the ends of the clients cut at {first} and behind")
    other.expect_nothing()
    other.close()
    expect_clean(site)


@pytest.mark.parametrize("kind", [RAW, WS])
def test_the_whole_session_reaches_its_end(site: Site, kind: str) -> None:
    """The script above is a good one up to its last packet."""
    other = site.device(b"watched")
    device = site.open(kind)
    device.send_bytes(session(site, device)).read_head().hello().accepted()
    kinds = [packet[0] for packet in device.until_end() if not packet.startswith(b"ws:")]
    named = [Type.SUBACK] * (2 if kind == RAW else 3)
    assert sorted(kinds) == sorted([*named, Type.CHANGE, Type.DISCONNECT])
    other.expect_nothing()


def test_weak_spot_observations_of_closed_clients_are_removed(site: Site) -> None:
    first, second = site.device(b"first-1"), site.device(b"second")
    tids = [second.create(b"topic %d" % number) for number in range(20)]
    first.send(*(smq.with_id(Type.OBSERVE, tid) for tid in [*tids, second.etid]))
    assert len(first.sync()) == 20
    session = site.state.uids[b"first-1"]
    first.disconnect()
    wait_until(lambda: b"first-1" not in site.state.uids, "the end of the observer")
    assert not any(session in topic.observers for topic in site.state.topic_table.by_key.values())
    second.subscribe(b"topic 3")
    second.close()
    expect_clean(site)

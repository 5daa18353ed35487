"""Subscribers that do not read, and numbered messages for them."""

from __future__ import annotations

from gevent import socket

from tests.support.device import RAW, WS, Device, Site, publish

SMALL_BUFFER_BYTES = 32768


def stalled(site: Site, uid: bytes, kind: str = RAW, topic: bytes = b"news") -> Device:
    """A subscriber with small buffers, in whose sockets little more than a few messages fit."""
    device = site.open(kind)
    device.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
    device.start().connect(uid)
    connection = site.state.uids[uid].outbox
    plain = connection.sock if kind in (RAW, WS) else connection.sock._sock
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER_BYTES)
    device.subscribe(topic)
    return device


def drops(site: Site) -> int:
    return sum(site.state.stats.drops.values())


BUDGET_BYTES = 60_000


COUNT = 600


def numbered(number: int, size: int = 700) -> bytes:
    return number.to_bytes(4, "big") + bytes((number % 251,)) * (size - 4)


def numbers(packets: list[bytes]) -> list[int]:
    """The numbers of the messages among packets; each must be whole."""
    found = []
    for packet in packets:
        if packet[:1] == b"\x08":
            found.append(int.from_bytes(packet[13:17], "big"))
            assert packet[13:] == numbered(found[-1], len(packet) - 13), "a damaged message"
    return found


def flood(publisher: Device, tid: int, count: int = COUNT, first: int = 0, size: int = 700) -> None:
    """Publish numbered messages, some with a write of their own and some in bulk."""
    at = first
    while at < first + count:
        many = 1 if at % 3 else min(25, first + count - at)
        publisher.send(*(publish(tid, publisher.etid, numbered(number, size)) for number in range(at, at + many)))
        at += many

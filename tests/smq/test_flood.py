"""One client that sends as fast as it can holds the loop up for a bounded time only."""

from __future__ import annotations

import time
from typing import Any

import gevent
import pytest

from smqrt.wire import smq
from tests.support.device import RAW, TLS, WS, Device, Site, publish

FLOODS: dict[str, Any] = {
    "pings": lambda device: smq.PING,
    "pongs": lambda device: smq.PONG,
    "tiny messages to nobody": lambda device: publish(4711, device.etid, b""),
    "tiny messages to itself": lambda device: publish(device.etid, device.etid, b""),
    "creates": lambda device: b"\x06n",
    "observes": lambda device: smq.with_id(smq.Type.OBSERVE, 4711),
}


@pytest.mark.parametrize("kind", [RAW, WS, TLS])
@pytest.mark.parametrize("name", FLOODS)
def test_others_are_served_meanwhile(site: Site, kind: str, name: str) -> None:
    flood, other = site.device(b"flood-1", kind), site.device(b"other-1")
    stream = flood.framed(FLOODS[name](flood)) * 150_000
    sender = gevent.spawn(_send, flood, stream)
    reader = gevent.spawn(_swallow, flood)
    slowest = 0.0
    while not sender.ready():
        began = time.monotonic()
        other.expect_nothing()
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < 0.5, slowest
    sender.kill()
    reader.kill()


def _send(device: Device, data: bytes) -> None:
    for at in range(0, len(data), 1 << 17):
        device.send_bytes(data[at : at + (1 << 17)])


def _swallow(device: Device) -> None:
    while device.more():
        device.stream.data = b""

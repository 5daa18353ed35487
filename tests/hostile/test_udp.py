"""Datagrams: a UDP server in Lua, and strangers who send what they like."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from urllib.request import urlopen

import pytest

from tests.hostile.conftest import APPS, Attack, Besieged

FLOOD_S = 0.3
LARGEST_BYTES = 65_507


@pytest.fixture
def server(besiege: Callable[..., Besieged]) -> Besieged:
    return besiege(APPS / "udp")


def asks(server: Besieged, page: str) -> list[int]:
    return [int(word) for word in urlopen(f"http://127.0.0.1:{server.port}/udp/{page}.lsp").read().split()]


def flood(port: int, payload: bytes, sources: int, attack: Attack) -> None:
    """Sends from ever other ports, and throws the answers away by never reading them."""
    senders = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(sources)]
    until_s = time.monotonic() + FLOOD_S
    while time.monotonic() < until_s:
        for sender in senders:
            with suppress(OSError):
                sender.sendto(payload, ("127.0.0.1", port))
                attack.sent(len(payload))
    for sender in senders:
        sender.close()


@pytest.mark.parametrize("sources", [1, 500])
@pytest.mark.parametrize("size_bytes", [0, 1, LARGEST_BYTES])
def test_a_flood(server: Besieged, size_bytes: int, sources: int) -> None:
    (port,) = asks(server, "port")
    with server.attack(f"UDP: datagrams of {size_bytes} bytes from {sources} ports, echoed") as attack:
        flood(port, bytes(size_bytes), sources, attack)
    received, got_bytes = asks(server, "received")
    assert received > 10  # on a busy machine, most of 500 sources send little in a second
    assert got_bytes == received * size_bytes
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:  # it still answers
        client.settimeout(20)
        client.sendto(b"are you there?", ("127.0.0.1", port))
        assert client.recv(100) == b"are you there?"

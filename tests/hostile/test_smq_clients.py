"""Brokers do their worst to a client that a Lua application has made: it is in the same process as everything else."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from smqrt.wire import smq, websocket
from smqrt.wire.smq import Type
from tests.hostile.conftest import Attack, Besieged
from tests.support.scripted_broker import Conversation, ScriptedBroker

ATTACK_S, LEAST_BYTES = 0.4, 200
EMPTY = bytes((0, 0))
"""A fragment that neither ends a message nor adds to it."""


def accepted(conversation: Conversation) -> None:
    conversation.accept()


def greeted(conversation: Conversation) -> None:
    conversation.bootstrap()


def asked(conversation: Conversation) -> None:
    conversation.read_head()
    conversation.raw(b"HTTP/1.1 200 OK\r\n")


def one_by_one(number: int) -> bytes:
    return smq.frame(smq.ack(Type.CREATEACK, 1 + number, b"name %d" % number))


def many_names(turn: int) -> bytes:
    return b"".join(one_by_one(turn * 2000 + number) for number in range(2000))


def always(data: bytes) -> Callable[[int], bytes]:
    return lambda turn: data


def drip(turn: int) -> bytes:
    time.sleep(0.001)
    return b"\xff"


TINY = smq.publish_frame(1, 2, 0, b"")
CASES: dict[str, tuple[str, Callable[[Conversation], None], Callable[[int], bytes]]] = {
    "pings, and nothing is read": ("http", accepted, always(smq.frame(smq.PING) * 5000)),
    "pongs that nobody asked for": ("http", accepted, always(smq.frame(smq.PONG) * 5000)),
    "changes that nobody observes": ("http", accepted, always(smq.frame(b"\x10" + bytes(8)) * 5000)),
    "names that nobody asked for": ("http", accepted, many_names),
    "empty messages": ("http", accepted, always(TINY * 4000)),
    "the largest messages": ("http", accepted, always(smq.publish_frame(1, 2, 0, bytes(0xFFF0)))),
    "frames of length 0": ("http", accepted, always(bytes(60_000))),
    "byte after byte": ("http", accepted, drip),
    "an endless head": ("http", asked, always(b"X-More: 1\r\n" * 1000)),
    "a head, byte after byte": ("http", asked, drip),
    "packets before Init": ("http", greeted, always(smq.frame(smq.PING) * 5000)),
    "WebSocket pings, and nothing is read": ("ws", accepted, always(websocket.header(websocket.PING, 0) * 10_000)),
    "WebSocket fragments without end": ("ws", accepted, always(EMPTY * 10_000)),
    "WebSocket messages, empty ones": ("ws", accepted, always(websocket.encode(websocket.BINARY, TINY[2:]) * 4000)),
    "a WebSocket frame of 2**62 bytes": ("ws", accepted, always(b"\x82\x7f" + (1 << 62).to_bytes(8, "big"))),
}


@pytest.mark.parametrize("name", CASES)
def test_the_worst_that_a_broker_does(besieged: Besieged, name: str) -> None:
    scheme, begin, data = CASES[name]
    with besieged.attack(f"client: {name}") as attack:

        def script(conversation: Conversation) -> None:
            begin(conversation)
            until_s, turn = time.monotonic() + ATTACK_S, 0
            if name == "WebSocket fragments without end":
                conversation.raw(bytes((websocket.BINARY, 0)))
            conversation.sock.settimeout(0.2)
            while time.monotonic() < until_s or attack.sent_bytes <= LEAST_BYTES:  # a busy machine drips slowly
                out = data(turn)
                conversation.raw(out)
                attack.sent(len(out))
                turn += 1

        with ScriptedBroker(script) as broker:
            url = f"{scheme}://127.0.0.1:{broker.port}/"
            assert b"made" in besieged.post(f"/lua/client.lsp?url={url}", b"", "text/plain", Attack(name))
            broker.wait_results(1, ATTACK_S + 20)
    assert attack.sent_bytes > LEAST_BYTES

"""SMQ connections by transport: their frames, their classes, and clients that are silent."""

from __future__ import annotations

import itertools
import socket
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gevent
import pytest

from smqrt.errors import CloseReason
from smqrt.smq import connection_kinds
from smqrt.smq.connection import RawConnection
from smqrt.smq.connection_kinds import OverTls, WsConnection, connection_class, silent_s
from smqrt.wire import smq, websocket
from tests.smq.test_publish_limits import Set, limits
from tests.support.device import KINDS, WS, WSS, Site, bounded, masked
from tests.support.waiting import wait_until

__all__ = ["limits"]

SIZES = [0, 100, 112, 113, 1000, 65_000]


# ---- frames of WebSockets in a send queue


@pytest.mark.parametrize("size", SIZES)
def test_the_queue_finds_its_way_in_frames(size: int) -> None:
    packet = smq.publish_frame(7, 8, 9, bytes(size))[2:]
    batch = websocket.encode(websocket.BINARY, smq.PONG) + websocket.encode(websocket.BINARY, packet)
    at = WsConnection.frame_bytes(batch, 0)
    assert at + WsConnection.frame_bytes(batch, at) == len(batch)
    assert not WsConnection.is_message(batch, 0)
    assert WsConnection.is_message(batch, at)
    frame = batch[at:]
    assert WsConnection.topic_key(frame) == bytes((0, 0, 0, 7))
    assert WsConnection.latest_key(frame) == bytes((0, 0, 0, 7, 0, 0, 0, 9))


@pytest.mark.parametrize("opcode", [websocket.TEXT, websocket.PING, websocket.CONTINUATION])
def test_only_binary_frames_are_messages(opcode: int) -> None:
    assert not WsConnection.is_message(websocket.encode(opcode, smq.publish_frame(7, 8, 9, b"")[2:]), 0)


# ---- classes


def test_each_transport_has_a_class_with_and_without_policies() -> None:
    found = {}
    for secure, on_websocket, policed in itertools.product((False, True), repeat=3):
        kind = found[secure, on_websocket, policed] = connection_class(secure, on_websocket, policed)
        assert issubclass(kind, OverTls) is secure
        assert issubclass(kind, WsConnection) is on_websocket
        assert issubclass(kind, RawConnection)
    assert len(set(found.values())) == 8
    for (secure, on_websocket, policed), kind in found.items():
        if policed:
            assert issubclass(kind, found[secure, on_websocket, False])


# ---- control frames


@pytest.mark.parametrize("kind", [WS, WSS])
def test_a_close_frame_is_answered_with_its_code(make_site: Callable[..., Site], kind: str) -> None:
    reasons: list[str] = []
    site = make_site(onclose=lambda etid, sock, peer, err, reason: reasons.append(reason))
    device = site.device(b"device", kind)
    device.send_bytes(masked(b"", websocket.PING))
    assert device.receive() == b"ws:10:"
    device.send_bytes(masked(websocket.close_payload(4000), websocket.CLOSE))
    assert device.until_end() == [b"ws:8:" + (4000).to_bytes(2, "big")]
    assert reasons == [CloseReason.WEBSOCKET_CLOSED.value]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (masked(b""), CloseReason.SHORT_PACKET),
        (masked(b"", fin=False) + masked(b"", websocket.CONTINUATION), CloseReason.SHORT_PACKET),
        (masked(b"x" * 126, websocket.PING), CloseReason.WEBSOCKET_PROTOCOL),
        (masked(b"\xff", websocket.TEXT), CloseReason.INVALID_TEXT),
        (masked(b"", websocket.CONTINUATION), CloseReason.WEBSOCKET_PROTOCOL),
    ],
)
def test_wrong_frames_end_the_client(make_site: Callable[..., Site], data: bytes, reason: CloseReason) -> None:
    reasons: list[str] = []
    site = make_site(onclose=lambda etid, sock, peer, err, reason: reasons.append(reason))
    device = site.device(b"device", WS)
    device.send_bytes(data)
    device.until_end()
    wait_until(lambda: reasons)
    assert reasons == [reason.value]


# ---- silence


def test_silence_is_measured_by_the_kernel_of_tcp() -> None:
    def silence(sock: Any) -> float:
        connection: Any = SimpleNamespace(transport=sock)
        return silent_s(connection)

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        there, _ = server.accept()
        client.send(b"x")
        with there:
            assert 0 <= silence(there) < 5
        assert silence(there) == 0.0, "it is closed"
    one, other = socket.socketpair()
    with one, other:
        assert silence(one) == 0.0, "it is not of TCP"
    for info, seconds in ((bytes(52) + (1234).to_bytes(4, sys.byteorder) + bytes(48), 1.234), (b"short", 0.0)):
        assert silence(SimpleNamespace(getsockopt=lambda *_, info=info: info)) == seconds


def test_silent_clients_are_pinged(make_site: Callable[..., Site], limits: Set) -> None:
    reasons: list[str] = []
    site = make_site(onclose=lambda etid, sock, peer, err, reason: reasons.append(reason))
    kinds = [kind for kind in KINDS for _ in range(3)]
    devices = [site.device(b"uid-%02d" % number, kind) for number, kind in enumerate(kinds)]
    dead, alive, busy = devices[::3], devices[1::3], devices[2::3]
    limits(idle_s=1, idle_answer_s=0.5)
    began_s = time.monotonic()
    with bounded():
        while time.monotonic() - began_s < 1.2:
            for device in busy:
                device.expect_nothing()
            gevent.sleep(0.1)
        for device in alive:
            assert device.receive() == (b"ws:9:" if device.on_websocket else smq.PING)
            device.send_bytes(masked(b"", websocket.PONG)) if device.on_websocket else device.send(smq.PONG)
        for device in dead:
            device.until_end()
    assert reasons == ["idle"] * 4
    assert connection_kinds.IDLE.count == 4
    for device in (*alive, *busy):
        device.sync()
    assert 1.4 < time.monotonic() - began_s < 4

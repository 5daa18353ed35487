"""Requests that are made to fill the memory: bodies that are never finished, sessions that nobody uses."""

from __future__ import annotations

import socket
from collections.abc import Callable

from tests.hostile.conftest import APPS, Besieged

BODY_BYTES = 4 << 20


def post(besieged: Besieged, path: str, content_type: str, size: int) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{besieged.port}\r\nContent-Type: {content_type}\r\n"
    return f"{head}Content-Length: {size}\r\n\r\n".encode()


def test_bodies_that_are_never_finished(besiege: Callable[..., Besieged]) -> None:
    besieged = besiege(APPS / "lua", "--bodies-mib", "32")
    urlencoded = post(besieged, "/lua/form.lsp", "application/x-www-form-urlencoded", BODY_BYTES)
    form = post(besieged, "/lua/upload.lsp", "multipart/form-data; boundary=XX", BODY_BYTES)
    form += b'--XX\r\nContent-Disposition: form-data; name="a"\r\n\r\n'
    with besieged.attack("60 bodies that are never finished") as attack:
        held, refused = [], 0
        for begin in [urlencoded] * 30 + [form] * 30:
            sock = besieged.open()
            held.append(sock)
            attack.sent(send(sock, begin + b"a" * (BODY_BYTES - 1000 if begin == urlencoded else 1 << 20)))
        for sock in held:
            sock.settimeout(0.2)
            refused += b" 503 " in answer_of(sock)
            sock.close()
    assert refused > 20


def send(sock: socket.socket, data: bytes) -> int:
    try:
        sock.sendall(data)
    except OSError:
        return 0  # it was refused meanwhile
    return len(data)


def answer_of(sock: socket.socket) -> bytes:
    try:
        return sock.recv(65536)
    except OSError:
        return b""


def test_unused_sessions(besieged: Besieged) -> None:
    request = b"GET /lua/session.lsp HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % besieged.port
    last = request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with besieged.attack("3,000 sessions", grows_bytes=16 << 20) as attack:
        assert besieged.exchange(request * 2999 + last, attack).count(b"Set-Cookie") == 3000

"""Servers that applications ask do their worst: `httpm` in a page, against sockets that send what they like."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.hostile.conftest import Attack, Besieged

Script = Callable[[socket.socket, Attack], None]
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@contextmanager
def upstream(script: Script, attack: Attack) -> Iterator[str]:
    """A server that reads a request and then follows the script, until the client goes away; gives its address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                try:
                    client.recv(65536)
                    script(client, attack)
                except OSError:
                    pass  # the client has had enough

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(20)


def for_ever(data: bytes, first: bytes = b"") -> Script:
    """Sends `first`, and then `data` as often as the client takes it."""

    def script(client: socket.socket, attack: Attack) -> None:
        client.sendall(first)
        while True:
            client.sendall(data)
            attack.sent(len(data))

    return script


def once(data: bytes) -> Script:
    """Sends `data` and closes."""

    def script(client: socket.socket, attack: Attack) -> None:
        client.sendall(data)
        attack.sent(len(data))

    return script


def chunks(size: int) -> bytes:
    return b"%x\r\n%b\r\n" % (size, b"x" * size)


CASES = {
    "endless 100 Continue": (for_ever(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000), "json", b"invalidresponse"),
    "an endless head": (for_ever(b"X-More: 1\r\n" * 1000, OK), "json", b"invalidresponse"),
    "an endless body": (for_ever(chunks(60_000), CHUNKED), "json", b"toomuchdata"),
    "a huge body": (for_ever(b"x" * 60_000, OK + b"Content-Length: 9999999999\r\n\r\n"), "json", b"toomuchdata"),
    "endless trailers": (for_ever(b"X-More: 1\r\n" * 1000, CHUNKED + b"0\r\n"), "json", b"invalidresponse"),
    "an endless chunk extension": (for_ever(b"x" * 10_000, CHUNKED + b"1;"), "json", b"invalidresponse"),
    "chunks of one byte": (once(CHUNKED + chunks(1) * 1_000_000 + b"0\r\n\r\n"), "json", b"nil"),
    "a firehose": (once(CHUNKED + chunks(60_000) * 4_000 + b"0\r\n\r\n"), "read", b"240000000"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_worst_that_a_server_does(besieged: Besieged, name: str) -> None:
    script, how, expected = CASES[name]
    grows_bytes = 256 << 20 if name == "an endless body" else 64 << 20  # 64 MiB are read whole, and copied
    with besieged.attack(f"upstream: {name}", grows_bytes=grows_bytes) as attack, upstream(script, attack) as url:
        assert expected in besieged.post(f"/lua/fetch.lsp?how={how}&url={url}", b"", "text/plain", Attack(name))

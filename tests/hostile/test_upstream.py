"""Servers that applications ask do their worst: `httpm` in a page, against sockets that send what they like."""

from __future__ import annotations

import base64
import hashlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.hostile.conftest import Attack, Besieged

Script = Callable[[socket.socket, Attack], None]
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@contextmanager
def upstream(script: Script, attack: Attack) -> Iterator[str]:
    """A server that reads a request and then follows the script, until the client goes away; gives its address. A
    WebSocket is agreed to."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                try:
                    agree(client)
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


def agree(client: socket.socket) -> None:
    """Reads a request and agrees to speak WebSocket if that was asked for."""
    client.settimeout(0.5)
    with suppress(TimeoutError):  # of a raw socket nothing comes
        head = client.recv(65536)
        if key := re.search(rb"Sec-WebSocket-Key: (\S+)", head, re.IGNORECASE):
            accept = base64.b64encode(hashlib.sha1(key[1] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
            fields = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: " + accept
            client.sendall(b"HTTP/1.1 101 Yes\r\n" + fields + b"\r\n\r\n")
    client.settimeout(None)


def for_ever(data: bytes, first: bytes = b"") -> Script:
    """Sends `first`, and then `data` as often as the client takes it."""

    def script(client: socket.socket, attack: Attack) -> None:
        client.sendall(first)
        while True:
            client.sendall(data)
            attack.sent(len(data))

    return script


def times(count: int, data: bytes) -> Script:
    """Sends a head, so many times `data`, which is whole chunks, and the last chunk; and closes."""

    def script(client: socket.socket, attack: Attack) -> None:
        client.sendall(CHUNKED)
        for _ in range(count):
            client.sendall(data)
            attack.sent(len(data))
        client.sendall(b"0\r\n\r\n")

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
    "chunks of one byte": (times(300, chunks(1) * 1000), "json", b"nil"),
    "a firehose": (times(2500, chunks(60_000)), "read", b"150000000"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_worst_that_a_server_does(besieged: Besieged, name: str) -> None:
    script, how, expected = CASES[name]
    grows_bytes = 256 << 20 if name == "an endless body" else 64 << 20  # 64 MiB are read whole, and copied
    with besieged.attack(f"upstream: {name}", grows_bytes=grows_bytes) as attack, upstream(script, attack) as url:
        assert expected in besieged.post(f"/lua/fetch.lsp?how={how}&url={url}", b"", "text/plain", Attack(name))


def numbered(text: bytes, count: int) -> list[bytes]:
    return [text.replace(b"#", b"%d" % number) for number in range(count)]


DOCUMENTS: dict[str, tuple[Callable[[], list[bytes]], bytes, bytes]] = {
    "as many members as it takes": (lambda: numbered(b'"#":1', 65_500), b"{}", b"table"),
    "500,000 members": (lambda: numbered(b'"#":1', 500_000), b"{}", b"mem"),
    "as many numbers as it takes": (lambda: [b"1"] * 260_000, b"[]", b"table"),
    "3,000,000 numbers": (lambda: [b"1"] * 3_000_000, b"[]", b"mem"),
    "as many strings as it takes": (lambda: numbered(b'"x#"', 260_000), b"[]", b"table"),
    "30 MB of strings": (lambda: numbered(b'"%b#"' % (b"x" * 110), 260_000), b"[]", b"table"),
    "as many lists as it takes": (lambda: [b"[]"] * 260_000, b"[]", b"table"),
    "2,000,000 lists in lists": (lambda: [b"[" + b"[]," * 20_000 + b"1]"] * 100, b"[]", b"mem"),
    "as many objects as it takes": (lambda: numbered(b'{"number":#,"name":"n#"}', 87_000), b"[]", b"table"),
    "30 MB of objects": (lambda: numbered(b'{"number":#,"name":"n#"}', 1_000_000), b"[]", b"mem"),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_json_document_of(besieged: Besieged, name: str) -> None:
    parts, brackets, expected = DOCUMENTS[name]
    body = brackets[:1] + b",".join(parts()) + brackets[1:]
    script, case = once(OK + b"Content-Length: %d\r\n\r\n" % len(body) + body), f"upstream: JSON, {name}"
    with besieged.attack(case, grows_bytes=512 << 20) as attack, upstream(script, attack) as url:
        assert expected in besieged.post(f"/lua/fetch.lsp?how=json&url={url}", b"", "text/plain", Attack(name))


def frames(*heads: bytes) -> bytes:
    """Frames as servers send them, many times."""
    return b"".join(heads) * 5000


SOCKETS = {
    "pings": ("websocket", frames(b"\x89\0"), b"", b""),
    "pongs": ("websocket", frames(b"\x8a\0"), b"", b""),
    "empty messages": ("websocket", frames(b"\x82\0"), b"", b""),
    "empty fragments": ("websocket", frames(b"\0\0"), b"\1\0", b"socketreadfailed"),
    "endless fragments": ("websocket", frames(b"\0\x7d" + b"x" * 125), b"\2\0", b"socketreadfailed"),
    "a firehose of bytes": ("read", b"x" * 65536, b"", b"1000"),
}


@pytest.mark.parametrize("name", SOCKETS)
def test_floods_of_sockets(besieged: Besieged, name: str) -> None:
    how, data, first, expected = SOCKETS[name]
    most_bytes = 200_000 if how == "websocket" and not expected else 1 << 40

    def script(client: socket.socket, attack: Attack) -> None:
        client.sendall(first)
        while attack.sent_bytes < most_bytes:
            client.sendall(data)
            attack.sent(len(data))

    # what was sent after the end is read for two seconds, for the sake of the close frame
    with besieged.attack(f"socket of Lua: {name}") as attack, upstream(script, attack) as url:
        port = url.rpartition(":")[2].strip("/")
        address = f"/lua/socket.lsp?how={how}&port={port}&url={url.replace('http', 'ws')}"
        assert expected in besieged.post(address, b"", "text/plain", Attack(name))


def test_a_fast_reader_does_not_let_writers_block_others(besieged: Besieged) -> None:
    def script(client: socket.socket, attack: Attack) -> None:
        while data := client.recv(1 << 20):
            attack.sent(len(data))

    with besieged.attack("socket of Lua: a fast reader") as attack, upstream(script, attack) as url:
        address = f"/lua/socket.lsp?how=write&port={url.rpartition(':')[2].strip('/')}"
        assert b"1000" in besieged.post(address, b"", "text/plain", Attack("x"))


@pytest.mark.parametrize("how", ["accept", "udp"])
def test_floods_of_what_lua_listens_to(besieged: Besieged, how: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers: list[bytes] = []
    address = f"/lua/flood.lsp?how={how}&port={port}&ms=1200"
    with besieged.attack(f"socket of Lua: flood, {how}") as attack:
        page = threading.Thread(target=lambda: answers.append(besieged.post(address, b"", "text/plain", Attack("x"))))
        page.start()
        flood(how, port, attack)
        page.join(20)
    assert int(re.search(rb"\r\n\r\n.*?(\d+)", answers[0], re.DOTALL)[1]) > 100  # type: ignore[index]


def flood(how: str, port: int, attack: Attack) -> None:
    until_s = time.monotonic() + 0.8
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        while time.monotonic() < until_s:
            with suppress(OSError):
                if how == "udp":
                    sender.sendto(b"x" * 100, ("127.0.0.1", port))
                    attack.sent(100)
                else:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    attack.sent(1)

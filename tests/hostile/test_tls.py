"""TLS as a weapon: records that cost the server more than the client, and are none of the application's."""

from __future__ import annotations

import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from smqrt.wire import smq
from tests.conftest import REPOSITORY
from tests.hostile.conftest import APPS, Besieged
from tests.hostile.strangers import client_context, crowd_sends, get, last
from tests.support.device import RAW_HEADERS, request

RECORD_BYTES = 27  # a KeyUpdate on the wire
SMQ_HELLO = request(RAW_HEADERS, target="/watch/smq").replace(b"Host: test", b"Host: localhost")
KEY_CHANGERS = 6
SMQ_CONNECTS = [SMQ_HELLO + smq.frame(smq.connect(b"changes-%d" % number, b"", b"")) for number in range(KEY_CHANGERS)]
FIRST_WORDS = {"HTTP": [b""] * KEY_CHANGERS, "SMQ": SMQ_CONNECTS}


@pytest.fixture
def besieged_tls(besiege: Callable[..., Besieged]) -> Besieged:
    return besiege(APPS / "lua", "--tls-port", "0")


def open_plain(besieged: Besieged) -> socket.socket:
    return socket.create_connection(("127.0.0.1", besieged.served.tls_port), 20)


def client_hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        client_context().wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


def test_a_pipeline(besieged_tls: Besieged) -> None:
    one = get(besieged_tls, b"/lua/form.lsp?%b" % (b"a=%41&" * 50))
    sockets: list[socket.socket] = [client_context().wrap_socket(open_plain(besieged_tls)) for _ in range(20)]
    with besieged_tls.attack("TLS: 20 pipelines of 300 requests") as attack:
        assert crowd_sends(sockets, one * 300 + last(one), attack)


def test_many_handshakes(besieged_tls: Besieged) -> None:
    sockets = [open_plain(besieged_tls) for _ in range(500)]
    with besieged_tls.attack("TLS: 500 hellos at once, and nothing more") as attack:
        assert crowd_sends(sockets, client_hello(), attack)


@pytest.mark.parametrize("asks", [0, 1], ids=["of its own", "and asks for the server's"])
@pytest.mark.parametrize("protocol", FIRST_WORDS)
def test_changes_of_keys(besieged_tls: Besieged, protocol: str, asks: int) -> None:
    port, count = besieged_tls.served.tls_port, 10_000
    command = [sys.executable, str(Path(__file__).parent / "key_updates.py"), *map(str, (port, count, asks))]
    case = f"TLS, {protocol}: {KEY_CHANGERS} clients change {'both keys' if asks else 'their keys'} 10,000 times"
    with besieged_tls.attack(case, grows_bytes=8 << 20) as attack:
        clients = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in FIRST_WORDS[protocol]
        ]
        for client, words in zip(clients, FIRST_WORDS[protocol], strict=True):
            client.stdin.write(words)  # type: ignore[union-attr]
            client.stdin.close()  # type: ignore[union-attr]
        for client in clients:
            sent = int(client.stdout.read())  # type: ignore[union-attr]
            client.wait()
            assert sent  # a client that says nothing of HTTP for 5 s is closed
            attack.sent(sent * RECORD_BYTES)
    assert besieged_tls.served.stop(signal.SIGTERM) == 0


def test_handshakes_that_wait_for_a_listener_of_lua(besiege: Callable[..., Besieged]) -> None:
    besieged = besiege(REPOSITORY / "tests/apps/examples/mqttbroker")
    port = int(besieged.served.wait_for(r"mqtt tls: (\d+)")[1])
    with besieged.attack("TLS in Lua: 2,000 connections wait to be accepted", grows_bytes=256 << 20) as attack:
        with besieged.stopped(attack):  # they gather in the kernel
            sockets = [socket.create_connection(("127.0.0.1", port), 20) for _ in range(2000)]
        assert crowd_sends(sockets, client_hello(), attack)

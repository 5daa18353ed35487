"""Many connections that want something at the same moment: each alone takes little, together they must not take the
loop."""

from __future__ import annotations

import selectors
import socket
import ssl
import urllib.request
from collections.abc import Callable

import pytest

from tests.apps.lua.mqtt_packets import connect, subscribe
from tests.hostile.conftest import APPS, Attack, Besieged
from tests.hostile.test_http_heads import HEADS
from tests.support.device import RAW_HEADERS, request

CLIENTS = 400
SILENT_S = 15.0  # longer than the server waits for a head
NO_PACKET = b"\x00\x00"  # of MQTT: the broker closes
RESET = b"\1\0\0\0\0\0\0\0"  # SO_LINGER of 0 s: closing resets


def crowd_sends(sockets: list[socket.socket], data: bytes, attack: Attack) -> int:
    """Sends `data` on all of them at once, and throws away what comes until the server has closed them.

    Returns:
        how many bytes came.
    """
    left = {sock: memoryview(data) for sock in sockets}
    came = 0
    with selectors.DefaultSelector() as selector:
        for sock in sockets:
            sock.setblocking(False)
            selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while selector.get_map() and (ready := selector.select(SILENT_S)):
            for key, events in ready:
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                try:
                    if events & selectors.EVENT_WRITE:
                        left[sock] = left[sock][sock.send(left[sock][:16384]) :]
                        if not left[sock]:
                            selector.modify(sock, selectors.EVENT_READ)
                    answer = sock.recv(1 << 18)
                    came += len(answer)
                    if not answer:
                        selector.unregister(sock)
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    pass
                except OSError:
                    selector.unregister(sock)
        assert not selector.get_map(), "the server left connections open"
    attack.sent(len(data) * len(sockets) - sum(map(len, left.values())))
    return came


def get(besieged: Besieged, target: bytes, field: bytes = b"") -> bytes:
    lines = [b"GET " + target + b" HTTP/1.1", b"Host: 127.0.0.1:%d" % besieged.port, *filter(None, [field])]
    return b"\r\n".join([*lines, b"", b""])


def last(request: bytes) -> bytes:
    return request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")


def attack_by_crowd(besieged: Besieged, case: str, data: bytes, clients: int = CLIENTS) -> None:
    sockets = [besieged.open() for _ in range(clients)]
    with besieged.attack(f"{clients} at once: {case}") as attack:
        assert crowd_sends(sockets, data, attack)
    for sock in sockets:
        sock.close()


@pytest.mark.parametrize(
    "name",
    ["a path of escapes", "a path of 2,000 folders of an application", "a query of parameters", "a content type"],
)
def test_many_clients_with_heads(besieged: Besieged, name: str) -> None:
    attack_by_crowd(besieged, f"a head with {name}", last(get(besieged, *HEADS[name])))


@pytest.mark.parametrize("target", [b"/nothing", b"/lua/form.lsp", b"/help/"])
def test_many_clients_with_pipelining(besieged: Besieged, target: bytes) -> None:
    one = get(besieged, target)
    attack_by_crowd(besieged, f"200 requests for {target.decode()}", one * 200 + last(one), 100)


def test_many_clients_connect_and_leave(besieged: Besieged) -> None:
    with besieged.attack("5,000 connections that come and go") as attack:
        for _ in range(10):
            sockets = [besieged.open() for _ in range(500)]
            for sock in sockets:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                sock.close()
            attack.sent(0)


def test_heads_that_are_late_together(besieged: Besieged) -> None:
    attack_by_crowd(besieged, "a head without end", b"GET / HTTP/1.1\r\n", 2000)


def test_smq_handshakes_that_are_late_together(besieged: Besieged) -> None:
    head = request(RAW_HEADERS, target="/watch/smq").replace(b"Host: test", b"Host: localhost")
    attack_by_crowd(besieged, "an SMQ handshake without end", head, 2000)


def test_cosockets_that_are_ready_together(besiege: Callable[..., Besieged]) -> None:
    besieged = besiege(APPS / "mqtt")
    with urllib.request.urlopen(f"http://127.0.0.1:{besieged.port}/mqtt/port.lsp") as answer:
        port = int(answer.read())
    requests = subscribe(5, *(f"t/{number}" for number in range(50)))
    with besieged.attack("500 at once: CONNECT and 50 filters to the MQTT broker in Lua") as attack:
        sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(500)]
        for number, sock in enumerate(sockets):
            sock.sendall(connect(5, f"crowd-{number}"))
        assert crowd_sends(sockets, requests + NO_PACKET, attack)

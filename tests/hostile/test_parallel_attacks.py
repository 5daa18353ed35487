"""Many connections that want something at the same moment: each alone takes little, together they must not take the
loop."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Callable

import pytest

from tests.apps.lua.mqtt_packets import connect, subscribe
from tests.hostile.conftest import APPS, Besieged
from tests.hostile.strangers import HEADS, RESET, attack_by_crowd, crowd_sends, get, last
from tests.support.device import RAW_HEADERS, request

NO_PACKET = b"\x00\x00"  # of MQTT: the broker closes


@pytest.mark.parametrize(
    "name",
    ["a path of escapes", "a path of 2,000 folders of an application", "a query of parameters", "a content type"],
)
def test_many_clients_with_heads(besieged: Besieged, name: str) -> None:
    attack_by_crowd(besieged, f"a head with {name}", last(get(besieged, *HEADS[name])))


@pytest.mark.parametrize("target", [b"/nothing", b"/lua/form.lsp", b"/help/"])
def test_many_clients_with_pipelining(besieged: Besieged, target: bytes) -> None:
    one = get(besieged, target)
    attack_by_crowd(besieged, f"60 requests for {target.decode()}", one * 60 + last(one), 100)


def test_many_clients_connect_and_leave(besieged: Besieged) -> None:
    with besieged.attack("2,500 connections that come and go") as attack:
        for _ in range(5):
            sockets = [besieged.open() for _ in range(500)]
            for sock in sockets:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                sock.close()
            attack.sent(0)


def test_heads_that_are_late_together(besieged: Besieged) -> None:
    attack_by_crowd(besieged, "a head without end", b"GET / HTTP/1.1\r\n", 1000)


def test_smq_handshakes_that_are_late_together(besieged: Besieged) -> None:
    head = request(RAW_HEADERS, target="/watch/smq").replace(b"Host: test", b"Host: localhost")
    attack_by_crowd(besieged, "an SMQ handshake without end", head, 1000)


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

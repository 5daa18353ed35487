"""Cosockets: many strangers who each want a little at the same moment."""

from __future__ import annotations

import socket
from collections.abc import Callable
from urllib.request import urlopen

from tests.hostile.conftest import APPS, Besieged

CROWD = 800


def test_many_simultaneous_requests(besiege: Callable[..., Besieged]) -> None:
    server = besiege(APPS / "lines")
    port = int(urlopen(f"http://127.0.0.1:{server.port}/lines/port.lsp").read())
    crowd = [socket.create_connection(("127.0.0.1", port), 20) for _ in range(CROWD)]
    with server.attack(f"cosockets: {CROWD} clients ask at once") as attack:
        for _ in range(3):
            with server.stopped(attack):
                for one in crowd:
                    one.sendall(b"?")
            attack.sent(CROWD)
            for one in crowd:
                assert one.recv(100) == b"450015000\n"
    for one in crowd:
        one.close()

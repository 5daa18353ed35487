"""A real mosquitto as a process, and certificates for it."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import free_port
from tests.support.pki import Authority

START_S = 30
COMMON = "allow_anonymous true\nmax_queued_messages 0\npersistence false\nlog_dest none\nuser root\n"


class Mosquitto:
    """A broker on a free port of 127.0.0.1.

    Args:
        folder: for its configuration.
        settings: lines of the configuration behind those of its listener; `common` come first.
        port: to start one again where another was.
    """

    def __init__(self, folder: Path, settings: str = "", common: str = COMMON, port: int = 0) -> None:
        self.port = port or free_port()
        config = folder / f"mosquitto-{self.port}.conf"
        config.write_text(f"{common}listener {self.port} 127.0.0.1\n{settings}")
        self.process = subprocess.Popen(["mosquitto", "-c", config], stderr=subprocess.DEVNULL)
        self.wait_until_it_listens(self.port)

    def wait_until_it_listens(self, port: int) -> None:
        """Waits for a listener of its settings."""
        deadline = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, "mosquitto ended: is its configuration right?"
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, "mosquitto does not listen"
                time.sleep(0.02)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(5)


def tls_listener(authority: Authority, name: str = "server", host: str = "127.0.0.1", **arguments: object) -> str:
    """The lines of a mosquitto configuration that make a listener speak TLS."""
    cert, key = authority.pair(name, host, **arguments)
    return f"cafile {authority.path}\ncertfile {cert}\nkeyfile {key}\n"


def start_with_websockets(start: Callable[..., Mosquitto], more: str = "") -> tuple[int, Mosquitto]:
    """A broker that also accepts WebSockets, and the port of these; `more` are lines of their listener."""
    port = free_port()
    broker = start(f"listener {port}\nprotocol websockets\n{more}")
    broker.wait_until_it_listens(port)
    return port, broker


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[Mosquitto]:
    """A broker behind TLS, whose authority lies in ca.pem."""
    broker = Mosquitto(tmp_path, tls_listener(Authority(tmp_path), "server", "localhost"))
    yield broker
    broker.stop()

"""A real nats-server as a process."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.conftest import free_port

START_S = 30


class NatsServer:
    """A server on a free port of 127.0.0.1.

    Args:
        folder: for its configuration and its log.
        settings: lines of the configuration behind that of its port.
        port: to start one again where another was.

    Attributes:
        url: its address.
    """

    def __init__(self, folder: Path, settings: str = "", port: int = 0) -> None:
        self.port = port or free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._config = folder / f"nats-{self.port}.conf"
        self.log = folder / f"nats-{self.port}.log"
        self._errors = folder / f"nats-{self.port}.err"
        self._config.write_text(f'listen: "127.0.0.1:{self.port}"\nlog_file: "{self.log}"\n{settings}')
        self.start()

    def start(self) -> None:
        """Starts it, also again after `kill`."""
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(["nats-server", "-c", self._config], stderr=errors)
        deadline = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, f"nats-server ended: {self._errors.read_text()}"
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, "nats-server does not listen"
                time.sleep(0.02)

    def kill(self) -> None:
        """Ends it as a crash does."""
        self.send(signal.SIGKILL)
        self.process.wait(10)

    def pause(self) -> None:
        """Lets it stand still, until `send(SIGCONT)`."""
        self.send(signal.SIGSTOP)
        threads = Path(f"/proc/{self.process.pid}/task")
        while any(") T" not in (thread / "stat").read_text() for thread in threads.iterdir()):
            time.sleep(0.001)

    def send(self, number: int) -> None:
        """Sends a signal: SIGUSR2 is lame duck mode."""
        self.process.send_signal(number)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(10)


def cluster(folder: Path, size: int, settings: str = "") -> list[NatsServer]:
    """Servers that are a cluster, once they all know of each other."""
    routes = [free_port() for _ in range(size)]
    urls = ", ".join(f"nats://127.0.0.1:{port}" for port in routes)
    made = []
    for number, port in enumerate(routes):
        own = f'server_name: s{number}\ncluster {{ name: c, listen: "127.0.0.1:{port}", routes: [{urls}] }}\n{settings}'
        made.append(NatsServer(folder, own))
    deadline = time.monotonic() + START_S
    while any(len(_info(one)["connect_urls"]) < size for one in made):
        assert time.monotonic() < deadline, "the servers do not find each other"
        time.sleep(0.05)
    return made


def _info(server: NatsServer) -> dict[str, Any]:
    with socket.create_connection(("127.0.0.1", server.port), 5) as sock:
        line = sock.makefile("rb").readline()
    found: dict[str, Any] = json.loads(line.removeprefix(b"INFO "))
    return {"connect_urls": []} | found

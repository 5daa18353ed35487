"""Servers that are nodes of a cluster, and their clients on raw sockets, for scripts/bench/cluster."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smqrt.wire import smq

APP = Path(__file__).parent / "cluster_app"
BOOTSTRAP = b"GET /smq.lsp HTTP/1.1\r\nHost: 127.0.0.1\r\nSimpleMQ: 1\r\n\r\n"
WAIT_S = 60
PIECE = 1 << 16


class Server:
    """A running `smqrt serve` of the application of this comparison.

    Attributes:
        pids: of the process, or of the workers.
        port: for clients; tls_port: for those over TLS, 0 without; admin_port: for the API.
    """

    name, protocol = "smqrt", "smq"

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "smqrt", "serve", str(APP), "--port", "0", "--admin-port", "0", *options]
        environment = {**os.environ, "SMQRT_CLUSTER__PASSWORD": "of this run"}
        self._folder = tempfile.TemporaryDirectory(prefix="smqrt-bench-")
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=self._folder.name, env=environment
        )
        said = self._said(["on http", "admin at http", *(["on https"] if "--tls-port" in options else [])])
        workers = re.search(r"workers: processes ([\d, ]+)", said)
        self.pids = [int(pid) for pid in workers[1].split(",")] if workers else [self.process.pid]
        self.port, self.tls_port, self.admin_port = (
            int(found[1]) if (found := re.search(rf"{what}://[^/]*:(\d+)", said)) else 0
            for what in ("on http", "on https", "admin at http")
        )

    def _said(self, wanted: list[str]) -> str:
        """Its lines until those are there."""
        said = ""
        assert self.process.stdout
        for line in self.process.stdout:
            said += line
            if all(f"{what}://" in said for what in wanted):
                return said
        raise SystemExit("smqrt serve did not start; try: scripts/serve scripts/bench/cluster_app")

    def cpu_s(self) -> list[float]:
        """What each process has used of the processor, all threads."""
        return [sum(map(_thread_cpu_s, Path(f"/proc/{pid}/task").iterdir())) for pid in self.pids]

    def memory_bytes(self) -> int:
        pages = Path(f"/proc/{self.pids[0]}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def row(self) -> dict[str, Any]:
        """What the API says of the process as a node."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/api/v1/clusters", timeout=WAIT_S) as answer:
            (row,) = json.load(answer)
        found: dict[str, Any] = row
        return found

    def hub(self) -> dict[str, Any]:
        """What the API says of the hub in the cluster."""
        hub: dict[str, Any] = self.row()["hubs"][0]
        return hub

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._folder.cleanup()

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()
        self._folder.cleanup()


def _thread_cpu_s(task: Path) -> float:
    return int((task / "schedstat").read_text().split()[0]) / 1e9


class Client:
    """A client on a raw socket."""

    def __init__(self, port: int, uid: bytes) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), WAIT_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.sendall(BOOTSTRAP)
        self._received = b""
        self.packet()
        self.send(smq.connect(uid))
        self.etid: int = struct.unpack_from(">I", self.packet(), 2)[0]

    def send(self, *packets: bytes) -> None:
        self.sock.sendall(b"".join(map(smq.frame, packets)))

    def packet(self) -> bytes:
        """The next packet, without its length."""
        while len(self._received) < 2 or len(self._received) < (length := int.from_bytes(self._received[:2], "big")):
            self._received += self.sock.recv(PIECE)
        packet, self._received = self._received[2:length], self._received[length:]
        return packet

    def subscribe(self, *topics: bytes) -> int:
        """Wait until all are; returns the number of the last one."""
        self.send(*(smq.with_name(smq.Type.SUBSCRIBE, topic) for topic in topics))
        return [struct.unpack_from(">I", self.packet(), 2)[0] for _ in topics][-1]

    def create(self, topic: bytes) -> int:
        """Returns the topic's number."""
        self.send(smq.with_name(smq.Type.CREATE, topic))
        number: int = struct.unpack_from(">I", self.packet(), 2)[0]
        return number

    def close(self) -> None:
        self.sock.close()


@dataclass(frozen=True)
class Figure:
    """One line of what was found.

    Attributes:
        bar: what it may be at most, or with `at_least` must be; None for figures beside.
    """

    what: str
    value: float
    unit: str
    bar: float | None = None
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        return self.bar is None or (self.value >= self.bar if self.at_least else self.value <= self.bar)

    def __str__(self) -> str:
        bar = "" if self.bar is None else f"   {'at least' if self.at_least else 'at most'} {self.bar:g}"
        return f"{self.what:64} {self.value:10.3f} {self.unit:8}{bar}{'' if self.is_met else '   NOT MET'}"


def ended(ending: ExitStack, *options: str) -> Server:
    server = Server(*options)
    ending.callback(server.stop)
    return server


def wait_for(condition: Callable[[], bool], else_said: str, wait_s: float = 60) -> None:
    deadline_s = time.monotonic() + wait_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise SystemExit(else_said)
        time.sleep(0.01)


@dataclass(frozen=True)
class Joined:
    """A node that has joined another one.

    Attributes:
        seconds: from the moment when it listens until it knows everything.
        memory_bytes: that it has then; cpu_s: that it took.
    """

    seconds: float
    memory_bytes: int
    cpu_s: float


def joined(port: int, topics: int = 0, clients: int = 0) -> Joined:
    """Let a node join the one whose links come in at a port, until it knows so many topics and clients there."""
    server = Server("--cluster-nodes", f"127.0.0.1:{port}")
    try:
        start_s = time.monotonic()

        def knows() -> bool:
            hub = server.hub()
            return bool(hub["nodes"]) and hub["interest"] >= topics and hub["phantoms"] >= clients

        wait_for(knows, "the node did not join")
        return Joined(time.monotonic() - start_s, server.memory_bytes(), sum(server.cpu_s()))
    finally:
        server.stop()

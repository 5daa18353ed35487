"""Costs of operators for a server: the CPU of each worker while a page of the console is open, and of scrapes.

operators_cost.py [--clients 1000] [--workers 2] [--seconds 20] [--rounds 2] [--views overview,peers] [--tree FOLDER …]

Prints, for each tree and view, the share of a core that each worker needs beside what it needs when nobody looks. The
trees, this one and older ones to compare with, take turns. "scrape" is a scrape of /metrics every 5 s.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from smqrt.wire import smq, websocket

PRELOAD = "from smqrt import hub\n\nsmq = hub.create()\ndir.setfunc(lambda request, path: smq.connect(request))\n"
HELLO = b"GET /smq HTTP/1.1\r\nHost: 127.0.0.1\r\nSimpleMQ: 1\r\n\r\n"
SCRAPE_S = 5.0
SETTLE_S = 3.0


class Tree:
    """A server of one tree, with its clients."""

    def __init__(self, tree: Path, workers: int, clients: int, folder: Path) -> None:
        self.name = tree.name
        (folder / ".preload.py").write_text(PRELOAD)
        command = [sys.executable, "-m", "smqrt", "serve", str(folder), "--port", "0", "--admin-port", "0"]
        self._process = subprocess.Popen(
            [*command, "--workers", str(workers)], cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        patterns = r"^admin at http://127.0.0.1:(\d+)/", r"^listening on http://127.0.0.1:(\d+)"
        self.admin_port, self.port = self._said(*patterns)
        threading.Thread(target=self._process.communicate, daemon=True).start()
        self._clients = [self._client(b"device%06d" % number) for number in range(clients)]

    def _said(self, *patterns: str) -> list[int]:
        assert self._process.stdout
        text = ""
        for line in self._process.stdout:
            text += line
            found = [re.search(pattern, text, re.M) for pattern in patterns]
            if all(found):
                return [int(one[1]) for one in found if one]
        raise SystemExit(f"the server did not start:\n{text}")

    def _client(self, uid: bytes) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), 10)
        sock.sendall(HELLO)
        sock.recv(1000)
        sock.sendall(smq.frame(smq.connect(uid)))
        sock.recv(1000)
        sock.sendall(smq.frame(smq.with_name(smq.Type.SUBSCRIBE, b"topic%d" % (hash(uid) % 100))))
        sock.recv(1000)
        return sock

    def pids(self) -> list[int]:
        """The processes of the workers."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/api/v1/server", timeout=20) as answer:
            server = json.load(answer)
        return [one["pid"] for one in server.get("workers", [server])]

    def shares(self, seconds: float) -> list[float]:
        """The share of a core that each worker needs."""
        pids = self.pids()
        before = [_cpu_s(pid) for pid in pids]
        time.sleep(seconds)
        return [(_cpu_s(pid) - was) / seconds for pid, was in zip(pids, before, strict=True)]

    def close(self) -> None:
        """End it."""
        for one in self._clients:
            one.close()
        self._process.terminate()
        self._process.wait(20)


def _cpu_s(pid: int) -> float:
    return sum(int(one.read_text().split()[0]) for one in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


@contextmanager
def page(tree: Tree, view: str) -> Iterator[None]:
    """A page of the console looks at a view, as it does in the browser."""
    sock = socket.create_connection(("127.0.0.1", tree.admin_port))
    fields = "".join(f"{name}: {value}\r\n" for name, value in websocket.request_headers(websocket.new_key()))
    host = f"127.0.0.1:{tree.admin_port}"
    sock.sendall(f"GET /console/smq HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\n{fields}\r\n".encode())
    assert b" 101 " in sock.recv(4096)
    question = json.dumps({"view": view, "options": {}, "serial": 1}).encode()

    def send(packet: bytes) -> bytes:
        sock.sendall(websocket.encode_masked(websocket.BINARY, packet))
        time.sleep(0.2)
        return sock.recv(1 << 16)

    accepted = send(smq.connect(b"console page"))
    assert b"\x03\x00" in accepted, accepted
    etid = accepted[accepted.index(b"\x03\x00") + 2 :][:4]
    send(smq.with_name(smq.Type.SUBSCRIBE, b"pulse"))
    send(bytes((smq.Type.PUBLISH,)) + struct.pack(">I", 1) + etid + bytes(4) + question)
    received = [0]

    def read() -> None:
        while data := sock.recv(1 << 16):
            received[0] += len(data)

    threading.Thread(target=read, daemon=True).start()
    yield
    sock.shutdown(socket.SHUT_RDWR)
    assert received[0] > 3_000, f"the page was fed: {received}"


@contextmanager
def scrapes(tree: Tree, view: str) -> Iterator[None]:
    """Somebody scrapes /metrics."""
    ended = threading.Event()

    def scrape() -> None:
        while not ended.wait(SCRAPE_S):
            urllib.request.urlopen(f"http://127.0.0.1:{tree.admin_port}/metrics", timeout=20).read()

    threading.Thread(target=scrape, daemon=True).start()
    yield
    ended.set()


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--views", default="overview,peers,topics,log,applications,scrape")
    parser.add_argument("--tree", type=Path, nargs="*", default=[Path(__file__).parents[2]])
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as folder:
        trees = [Tree(tree.resolve(), args.workers, args.clients, Path(folder)) for tree in args.tree]
        try:
            for view in args.views.split(","):
                looking: Callable[[Tree, str], object] = scrapes if view == "scrape" else page
                _compare(trees, view, looking, args.seconds, args.rounds)
        finally:
            for tree in trees:
                tree.close()


def _compare(trees: list[Tree], view: str, looking: Callable[..., object], seconds: float, rounds: int) -> None:
    found: dict[str, list[list[float]]] = {tree.name: [] for tree in trees}
    for _ in range(rounds):
        for tree in trees:
            idle = tree.shares(seconds)
            with looking(tree, view):  # type: ignore[attr-defined]
                time.sleep(SETTLE_S)
                busy = tree.shares(seconds)
            found[tree.name].append([one - was for one, was in zip(busy, idle, strict=True)])
    for name, rows in found.items():
        shares = [f"w{number} {median(column):6.2%}" for number, column in enumerate(zip(*rows, strict=True))]
        print(f"{view:12} {name:16} {'  '.join(shares)} of a core", flush=True)


if __name__ == "__main__":
    main()

"""Python calls, system calls and allocations of the server for a message, a turn, a connect and a page.

A server with nothing enabled is asked for the same thing many times, one after the other, so that the counts are nearly
the same on every machine. `scripts/bench/compare` measures time; this shows which step was added.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from brokers import APP, wait_until_open
from rich.console import Console
from rich.table import Table

SERVER = Path(__file__).parent / "counted_server.py"
TIMES = {"message": 200, "fan-out": 200, "turn": 50, "connect": 100, "page": 100}
"""How often each path is taken while it is counted."""
PAIRS = 50
"""Messages in a turn: each of another publisher, to another subscriber."""
WARM = 3
"""Counts of the first runs are thrown away: caches fill, and buffers grow."""
SYSTEM_CALL = re.compile(r"^\s*[\d.]+\s+[\d.]+\s+\d+\s+(\d+)\s+(?:\d+\s+)?(\w+)$", re.MULTILINE)
KINDS = ("python", "builtin", "system")
PART_OF_PATH = 0.5
"""What is called less often per time is not part of the path: timers of the server, the start and end of the count, and
messages for which the forwarder did not wait. The slower the machine, the more of that happens meanwhile."""
ALLOCATION_ROUNDS = 5
"""Allocations have no names: the lowest count of so many is the cost."""
Costs = dict[str, float]


class Client:
    """An SMQ client on a raw socket that waits for each answer."""

    def __init__(self, port: int, path: str, uid: bytes) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), 10)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.sendall(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nSimpleMQ: 1\r\nSendSmqHttpResponse: true\r\n\r\n".encode()
        )
        self._data = b""
        while b"\r\n\r\n" not in self._data:
            self._receive()
        self._data = self._data.partition(b"\r\n\r\n")[2]
        self.packet()
        self.send(b"\x02\x01" + bytes([len(uid)]) + uid + b"\0")
        self.etid = struct.unpack_from("!I", self.packet(), 2)[0]

    def send(self, packet: bytes) -> None:
        self.sock.sendall((len(packet) + 2).to_bytes(2, "big") + packet)

    def packet(self) -> bytes:
        """The next packet, without its length."""
        while len(self._data) < 2 or len(self._data) < int.from_bytes(self._data[:2], "big"):
            self._receive()
        size = int.from_bytes(self._data[:2], "big")
        packet, self._data = self._data[2:size], self._data[size:]
        return packet

    def subscribe(self, topic: bytes) -> int:
        """Subscribes, and returns the topic's number."""
        self.send(b"\x04" + topic)
        return int(struct.unpack_from("!I", self.packet(), 2)[0])

    def _receive(self) -> None:
        data = self.sock.recv(65536)
        assert data, "the server closed the connection"
        self._data += data


class CountedServer:
    """A server with nothing enabled, whose costs can be counted."""

    def __init__(self, app: Path = APP) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="smqrt-bench-")
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER), "serve", str(app), "--port", "0"],
            cwd=self._folder.name,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self._line(r"listening on http://.*:(\d+)")[1])
        wait_until_open("smqrt", self.process, self.port)

    def _line(self, pattern: str) -> re.Match[str]:
        assert self.process.stdout
        for line in self.process.stdout:
            if match := re.search(pattern, line):
                return match
        raise SystemExit("the server ended")

    def _say(self, word: str) -> Any:
        assert self.process.stdin
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return json.loads(self._line(r'^[{"].*$')[0])

    def count(self, what: str, work: Callable[[], None]) -> dict[str, int]:
        """Counts "calls" or "allocations" during `work`."""
        self._say(what)
        work()
        found: dict[str, int] = self._say("end")
        return found

    def system_calls(self, work: Callable[[], None]) -> dict[str, int]:
        """Counts system calls by name during `work`."""
        with tempfile.NamedTemporaryFile("r") as report:
            tracer = subprocess.Popen(
                ["strace", "-f", "-c", "-o", report.name, "-p", str(self.process.pid)],
                stderr=subprocess.PIPE,
                text=True,
            )
            assert tracer.stderr
            for line in tracer.stderr:
                if "attached" in line:
                    break
            work()
            tracer.send_signal(signal.SIGINT)
            tracer.communicate(timeout=30)
            return {name: int(calls) for calls, name in SYSTEM_CALL.findall(report.read()) if name != "total"}

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self._folder.cleanup()


def paths(server: CountedServer) -> dict[str, Callable[[], None]]:
    """What is counted: functions that take each path once."""
    pairs = [
        (Client(server.port, "/smq.lsp", b"publisher-%d" % at), Client(server.port, "/smq.lsp", b"subscriber-%d" % at))
        for at in range(PAIRS)
    ]
    topics = [subscriber.subscribe(b"topic/%d" % at) for at, (_, subscriber) in enumerate(pairs)]
    heads = [
        struct.pack("!BIII", 8, topic, publisher.etid, 0) for topic, (publisher, _) in zip(topics, pairs, strict=True)
    ]
    pages: list[socket.socket] = []

    def message() -> None:
        publisher, subscriber = pairs[0]
        publisher.send(heads[0] + bytes(16))
        subscriber.packet()

    both = pairs[0][1].subscribe(b"both")
    pairs[1][1].subscribe(b"both")

    def fan_out() -> None:  # unlike the message of `message`, it is routed in Python
        publisher = pairs[0][0]
        publisher.send(struct.pack("!BIII", 8, both, publisher.etid, 0) + bytes(16))
        for _, subscriber in pairs[:2]:
            subscriber.packet()

    def turn() -> None:
        os.kill(server.process.pid, signal.SIGSTOP)
        for (publisher, _), head in zip(pairs, heads, strict=True):
            publisher.send(head + bytes(16))
        os.kill(server.process.pid, signal.SIGCONT)
        for _, subscriber in pairs:
            subscriber.packet()

    def connect() -> None:
        client = Client(server.port, "/smq.lsp", b"one more")
        client.sock.close()
        time.sleep(0.002)  # the server has closed it too

    def page() -> None:
        if not pages:  # opened when it is used: the server closes idle ones
            pages.append(socket.create_connection(("127.0.0.1", server.port), 10))
        pages[0].sendall(b"GET /table.lsp HTTP/1.1\r\nHost: localhost\r\n\r\n")
        data = b""
        while b"</table>" not in data:
            part = pages[0].recv(65536)
            assert part, "the server closed the connection"
            data += part

    return {"message": message, "fan-out": fan_out, "turn": turn, "connect": connect, "page": page}


def measure() -> dict[str, Costs]:
    """Returns what each path costs on average: the counts of `CountedServer`, for one time."""
    server = CountedServer()
    try:
        found: dict[str, Costs] = {}
        for name, path in paths(server).items():
            times = TIMES[name]

            def work(path: Callable[[], None] = path, times: int = times) -> None:
                for _ in range(times):
                    path()

            for _ in range(WARM):
                work()
            by_name = server.count("calls", work)
            by_name |= {f"system {call}": count for call, count in server.system_calls(work).items()}
            costs = {name: round(count / times, 2) for name, count in by_name.items()}
            found[name] = {
                kind: round(
                    sum(cost for name, cost in costs.items() if name.startswith(kind) and cost >= PART_OF_PATH), 2
                )
                for kind in KINDS
            }
            allocations = min(server.count("allocations", work)["allocations"] for _ in range(ALLOCATION_ROUNDS))
            found[name]["allocations"] = round(allocations / times, 2)
            found[name] |= costs
        return found
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench/path_costs", description=__doc__)
    parser.add_argument("--list", nargs="+", choices=TIMES, help="also list the calls of these paths by name")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    found = measure()
    table = Table("", "Python calls", "built-in calls", "system calls", "allocations")
    for name, costs in found.items():
        table.add_row(name, *(f"{costs[what]:.1f}" for what in (*KINDS, "allocations")))
    Console().print(table)
    for name in options.list or ():
        for what, cost in sorted(found[name].items(), key=lambda item: -item[1]):
            if " " in what and cost >= PART_OF_PATH:
                print(f"{name}: {cost:7.2f} {what}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

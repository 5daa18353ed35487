"""Hot restarts under load: clients publish all the time, and every message is looked for.

    .venv/bin/python scripts/bench/hot_restart.py --clients 500 --per-s 5000 --restarts 20

Half of the clients publish, each to one other, half of them on WebSockets; messages are numbered. Exit code 1 when one
is lost, comes twice or out of order, or when a connection ends. Silence is the longest time that a message took around
each restart.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import gevent

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from tests.support.device import RAW, WS, Device, publish  # noqa: E402

PRELOAD = 'smq = require "smq.hub".create{name = "load", %s}'
BODY = struct.Struct(">Id")
START_S = 120.0


class Server:
    """`smqrt serve` as a process that is followed over its restarts."""

    def __init__(self, folder: Path, options: str) -> None:
        (folder / ".preload").write_text(PRELOAD % options)
        (folder / "smq.lsp").write_text("<?lsp app.smq:connect(request) ?>")
        command = [sys.executable, "-m", "smqrt", "serve", "--port", "0", "--hosts", "*", str(folder)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(command, cwd=folder, **pipes)
        self.pid = self.process.pid
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def find(self, pattern: str, since: int = 0) -> re.Match[str]:
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            for line in self.lines[since:]:
                if match := re.search(pattern, line):
                    return match
            gevent.sleep(0.01)
        raise SystemExit(f"no {pattern!r}:\n" + "\n".join(self.lines))

    def restart(self) -> float:
        """Returns the milliseconds that the server says its hub stood still."""
        since = len(self.lines)
        os.kill(self.pid, signal.SIGUSR2)
        found = self.find(r"restart: (?:process (\d+) serves.*at most (\d+) ms|failed)", since)
        if found[1] is None:
            raise SystemExit("\n".join(self.lines[since:]))
        self.pid = int(found[1])
        return float(found[2])


class Pair:
    """A client that publishes, and the one that receives."""

    def __init__(self, address: tuple[str, int], number: int) -> None:
        kinds = (RAW, WS) if number % 2 else (WS, RAW)
        self.sender, self.receiver = (
            Device(address, kind).start(target="/smq.lsp").connect(b"%s-%06d" % (word, number))
            for kind, word in zip(kinds, (b"sender", b"receiver"), strict=True)
        )
        self.topic = self.receiver.subscribe(b"topic-%d" % number)
        self.sent = self.received = 0
        self.fault = ""
        self.worst_s = 0.0
        self.delays_s: list[float] = []

    def send(self) -> None:
        body = BODY.pack(self.sent, time.monotonic())
        self.sent += 1
        self.sender.send(publish(self.topic, self.sender.etid, body))

    def receive(self) -> None:
        try:
            while True:
                packet = self.receiver.receive()
                number, sent_s = BODY.unpack(packet[13:])
                if number != self.received:
                    self.fault = f"message {number} came, {self.received} was next"
                    return
                self.received += 1
                delay_s = time.monotonic() - sent_s
                self.delays_s.append(delay_s)
                self.worst_s = max(self.worst_s, delay_s)
        except (AssertionError, OSError) as error:
            self.fault = f"the connection ended after {self.received} messages: {error}"


def drive(pairs: list[Pair], per_s: float, stop: list[bool]) -> None:
    """Lets all publish, evenly spread, as often as told."""
    turn_s, began_s, sent = 0.005, time.monotonic(), 0
    while not stop:
        due = int((time.monotonic() - began_s) * per_s)
        for at in range(sent, due):
            pairs[at % len(pairs)].send()
        sent = max(sent, due)
        gevent.sleep(turn_s)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--per-s", type=float, default=5000)
    parser.add_argument("--idle", type=int, default=0, help="so many more clients that say nothing")
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--between-s", type=float, default=1.0)
    parser.add_argument("--options", default="", help="more options of the hub, as Lua")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), asked.options)
        port = int(server.find(r"listening on http://.*:(\d+)")[1])
        pairs = [Pair(("127.0.0.1", port), number) for number in range(asked.clients // 2)]
        names = [b"idle-%06d" % number for number in range(asked.idle)]
        idle = [Device(("127.0.0.1", port), RAW).start(target="/smq.lsp").connect(name) for name in names]
        receiving = [gevent.spawn(pair.receive) for pair in pairs]
        stop: list[bool] = []
        driver = gevent.spawn(drive, pairs, asked.per_s, stop)
        gevent.sleep(asked.between_s)
        calm = [one for pair in pairs for one in pair.delays_s]
        paused_ms, silences_ms = [], []
        for _ in range(asked.restarts):
            for pair in pairs:
                pair.worst_s = 0.0
            paused_ms.append(server.restart())
            gevent.sleep(asked.between_s)
            silences_ms += [pair.worst_s * 1000 for pair in pairs]
        stop.append(True)
        driver.join()
        gevent.joinall(receiving, timeout=2)
        for one in idle:
            one.sync()  # it is still there
        os.kill(server.pid, signal.SIGTERM)
        sent, received = sum(one.sent for one in pairs), sum(one.received for one in pairs)
        faults = [one.fault for one in pairs if one.fault and "ended" not in one.fault]
        clients = asked.clients + asked.idle
        print(f"{asked.restarts} restarts, {clients} clients, {sent} messages sent, {received} received")
        print(f"calm: median {percentile(calm, 0.5) * 1000:.1f} ms, p99 {percentile(calm, 0.99) * 1000:.1f} ms")
        shown = [f"{percentile(silences_ms, share):.0f} ms" for share in (0.5, 0.99, 1.0)]
        print(f"longest silence of each receiver around a restart: median {shown[0]}, p99 {shown[1]}, most {shown[2]}")
        print(f"a hub stood still: median {percentile(paused_ms, 0.5):.0f} ms, most {max(paused_ms):.0f} ms")
        server.process.wait(20)
    if faults or sent != received:
        sys.exit(f"{sent - received} messages lost; " + "; ".join(faults[:5]))


if __name__ == "__main__":
    main()

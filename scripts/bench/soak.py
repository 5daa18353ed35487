"""Thousands of idle clients beside a steady stream of messages: nothing is lost without being counted, memory stays
flat, and a ping takes no longer than twice what it takes alone."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

import brokers
from load import Generator
from shapes import Shape

APP = Path(__file__).parent / "soak_app"
CLIENTS = Path(__file__).parent / "soak_clients.py"
PING_BAR = 2.0
GROWTH_BAR_BYTES = 4 << 20
"""Of the second half of the run: what a thousand clients' worth of buffers are."""
LEAVE_S = 20
PING = Shape("ping", "ping", "--mode ping --pairs 1 --path /smq.lsp?hub=ping")
Report = dict[str, Any]


@dataclass
class Soak:
    """What a run found."""

    quiet_us: list[float] = field(default_factory=list)
    loaded_us: list[float] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)
    slices: list[Report] = field(default_factory=list)
    counts: Report = field(default_factory=dict)
    closes: dict[str, int] = field(default_factory=dict)
    """Ends of connections by their reason; those of the generators say good-bye or just go."""
    idle: dict[str, tuple[int, int]] = field(default_factory=dict)
    """How many idle clients are left, and how many there were."""

    def faults(self) -> list[str]:
        """What a bar was not met by, in sentences."""
        found = []
        for name in ("lost", "gaps", "dup_or_disorder", "corrupt", "dead", "overrun"):
            if count := sum(one.get(name, 0) for one in self.slices):
                found.append(f"{name}: {count} messages")
        if any(self.counts["drops"].values()):
            found.append(f"the server dropped messages though everybody read: {self.counts['drops']}")
        for name, (left, were) in self.idle.items():
            if left != were:
                found.append(f"{name}: {left} of {were} idle clients are left")
        if self.growth_bytes > GROWTH_BAR_BYTES:
            found.append(f"memory grew by {self.growth_bytes >> 10} KiB in the second half")
        return found

    @property
    def growth_bytes(self) -> int:
        """From the first quarter of the second half to the last: single samples tell little."""
        second = self.memory_bytes[len(self.memory_bytes) // 2 :]
        part = max(len(second) // 4, 1)
        return int(median(second[-part:]) - median(second[:part]))

    @property
    def ping_ratio(self) -> float:
        """p99 with load to p99 without."""
        return median(self.loaded_us) / median(self.quiet_us)


def main(words: Sequence[str] | None = None) -> int:
    """Run, print, and return the exit code: 1 when a bar was not met."""
    options = parse(words)
    brokers.raise_file_limit()
    found = run(options)
    print(json.dumps(summary(found), indent=1))
    faults = found.faults()
    if not options.no_ping_bar and found.ping_ratio > PING_BAR:
        faults.append(f"a ping takes {found.ping_ratio:.2f} times as long as alone; the bar is {PING_BAR}")
    for fault in faults:
        print(f"not met: {fault}")
    return bool(faults)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/bench/soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2, help="how long the stream lasts (default 2)")
    parser.add_argument("--slice-s", type=int, default=10, help="how long until the next look at memory (default 10 s)")
    parser.add_argument("--idle", type=int, default=10_000, help="idle clients without TLS (default 10000)")
    parser.add_argument("--idle-tls", type=int, default=2_000, help="idle clients over TLS (default 2000)")
    parser.add_argument("--rate", type=int, default=20_000, help="messages a second (default 20000)")
    parser.add_argument("--ping-s", type=float, default=1.5, help="how long pings are measured (default 1.5 s)")
    parser.add_argument("--python", action="store_true", help="use the generator in Python")
    parser.add_argument("--no-ping-bar", action="store_true", help="print the ratio of pings only: others use the CPU")
    return parser.parse_args(words)


def run(options: argparse.Namespace) -> Soak:
    """Start the server and its clients, and look at them until the time is over."""
    generator, found = Generator(options.python), Soak()
    server = brokers.start("smqrt", APP, tls=True)
    try:
        for _ in range(3):
            found.quiet_us.append(generator.run(PING, server, options.ping_s)["p99_us"])
        with idle(options, generator, server, found):
            _stream(options, generator, server, found)
            found.counts = json.load(urlopen(f"http://127.0.0.1:{server.port}/counts.lsp"))
            found.closes = _closes(server)
    finally:
        server.stop()
    return found


@contextmanager
def idle(options: argparse.Namespace, generator: Generator, server: brokers.Broker, found: Soak) -> Iterator[None]:
    """Have the idle clients connected."""
    hold_s = options.minutes * 120 + 300  # longer than the stream; they are killed behind it
    shape = f"--mode idle --conns {options.idle} --subscribe --hold {hold_s} --path /smq.lsp?hub=idle"
    plain = generator.start(Shape("idle", "idle", shape), server, hold_s)
    command = [sys.executable, str(CLIENTS), "idle", str(server.tls_port), str(options.idle_tls)]
    tls = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert tls.stdout
        print(f"over TLS: {tls.stdout.readline().strip()}")
        yield
        said, _ = tls.communicate("", 60)
        found.idle["over TLS"] = json.loads(said)["alive"], options.idle_tls
        found.idle["plain"] = _left(server.port, options.idle), options.idle
    finally:
        tls.kill()
        plain.kill()


def _left(port: int, were: int) -> int:
    """How many connections there are when those of others, which have just ended, are gone."""
    ends_s = time.monotonic() + LEAVE_S
    while (found := _established(port)) > were and time.monotonic() < ends_s:
        time.sleep(0.1)
    return found


def _established(port: int) -> int:
    """How many connections of clients the kernel has at a port."""
    mark = f":{port:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(1 for words in lines if words[1].endswith(mark) and words[3] == "01")


def _closes(server: brokers.Broker) -> dict[str, int]:
    """What the admin listener counts; the server has said where that is."""
    assert server.process.stdout
    (url,) = re.findall(r"admin at (\S+)", server.process.stdout.readline())
    closes: Counter[str] = Counter()
    for line in urlopen(f"{url}metrics").read().decode().splitlines():
        if found := re.match(r'smqrt_hub_closes_total\{.*reason="(\w+)".*\} (\S+)', line):
            closes[found[1]] += int(float(found[2]))
    return {reason: count for reason, count in closes.items() if count}


def _stream(options: argparse.Namespace, generator: Generator, server: brokers.Broker, found: Soak) -> None:
    shape = Shape("stream", "stream", f"--rate {options.rate} --batch 1 --window 0 --pubs 10 --topics 10 --subs 10")
    ends_s = time.monotonic() + options.minutes * 60
    while time.monotonic() < ends_s:
        stream = generator.start(shape, server, options.slice_s)
        time.sleep(1.5)
        found.loaded_us.append(generator.run(PING, server, options.ping_s)["p99_us"])
        said, _ = stream.communicate()
        found.slices.append(json.loads(said))
        found.memory_bytes.append(server.memory_bytes())
        print(
            f"{found.slices[-1]['delivered']} messages, p99 of a ping {found.loaded_us[-1]:.0f} us, "
            f"{found.memory_bytes[-1] >> 10} KiB",
            flush=True,
        )


def summary(found: Soak) -> Report:
    """The figures."""
    return {
        "messages": sum(one["delivered"] for one in found.slices),
        "lost": sum(one["lost"] for one in found.slices),
        "cpu_us_per_message": round(median(one["cpu_us_per_dlv"] for one in found.slices), 2),
        "ping_p99_us": {"quiet": median(found.quiet_us), "loaded": median(found.loaded_us)},
        "ping_ratio": round(found.ping_ratio, 2),
        "memory_kib": [found.memory_bytes[0] >> 10, found.memory_bytes[-1] >> 10],
        "growth_kib": found.growth_bytes >> 10,
        "drops": found.counts["drops"],
        "closes": found.closes,
        "idle": found.idle,
    }


if __name__ == "__main__":
    sys.exit(main())

"""The shapes of smqload in Python, for machines without it: the same options, the same JSON, less load.

Every message carries its publisher and its number, and is checked: lost, doubled or out of order. A ping goes to the
peer's ETID and is answered to the publisher's ETID where the broker has such, else over two topics.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from pyload_protocols import PROTOCOLS, Link, Protocol, Smq

HEAD_BYTES = 16
STALL_S = 1.5


def main() -> None:
    options = parse()
    print(json.dumps(asyncio.run(Load(options).run())))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("pubs", 1), ("topics", 1), ("subs", 1), ("conns", 1000), ("batch", 64), ("size", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("window", 1000), ("rotate", 1), ("port", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, value in (("rate", 0.0), ("warmup", 0.5), ("time", 2.0), ("hold", 0.0), ("max-time", 60.0)):
        parser.add_argument(f"--{name}", type=float, default=value)
    parser.add_argument("--path", default="/smq.lsp")
    parser.add_argument("--pairs", type=int, choices=[1], default=1)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--proto", choices=sorted(PROTOCOLS), default="smq")
    parser.add_argument("--mode", choices=["flow", "ping", "idle"], default="flow")
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--vary", action="store_true")
    parser.add_argument("--subscribe", action="store_true")
    return parser.parse_args()


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds all threads of a process have used."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def memory_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Load:
    """One measurement."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.protocol: Protocol = PROTOCOLS[options.proto]()
        if isinstance(self.protocol, Smq):
            self.protocol.path = options.path
        self.delivered = self.expected = self.disorder = 0
        self.latencies_ns: list[int] = []
        self.next_number: dict[tuple[int, int], int] = defaultdict(int)  # (subscriber, publisher) → number to come
        self.sent: dict[tuple[int, str], int] = defaultdict(int)  # (publisher, topic) → messages
        self.acked: dict[int, int] = defaultdict(int)  # publisher → deliveries
        self.due: dict[int, int] = defaultdict(int)  # publisher → deliveries that should come
        self.news = asyncio.Event()
        self.stopping = False
        self.filler = bytes(97 + i % 23 for i in range(options.size))

    async def run(self) -> dict[str, Any]:
        return await {"flow": self.flow, "ping": self.ping, "idle": self.idle}[self.options.mode]()

    async def connect(self, topic: str | None = None) -> Link:
        link = await Link.open(self.options.port)
        await self.protocol.open(link)
        if topic is not None:
            await self.protocol.subscribe(link, topic)
        return link

    def payload(self, publisher: int, number: int, when_ns: int) -> bytes:
        size = random.randint(HEAD_BYTES, self.options.size) if self.options.vary else self.options.size
        head = publisher.to_bytes(4, "big") + number.to_bytes(4, "big") + when_ns.to_bytes(8, "big")
        return head + self.filler[HEAD_BYTES:size]

    def check(self, subscriber: int, payload: bytes) -> None:
        publisher, number = int.from_bytes(payload[:4], "big"), int.from_bytes(payload[4:8], "big")
        if number != self.next_number[subscriber, publisher]:
            self.disorder += 1
        self.next_number[subscriber, publisher] = number + 1
        self.delivered += 1
        self.acked[publisher] += 1
        if self.delivered % 16 == 0:
            self.latencies_ns.append(time.monotonic_ns() - int.from_bytes(payload[8:16], "big"))

    async def receive(self, link: Link, subscriber: int) -> None:
        while data := await link.read():
            for message in self.protocol.payloads(link, data):
                self.check(subscriber, message)
            self.news.set()

    async def measured(self, work: list[Any]) -> dict[str, Any]:
        """Runs the load, and reports what the broker used between warm-up and end."""
        options = self.options
        tasks = [asyncio.create_task(one) for one in work]
        await asyncio.sleep(options.warmup)
        cpu0, delivered0, t0 = cpu_s(options.pid), self.delivered, time.monotonic()
        self.latencies_ns.clear()
        await asyncio.sleep(options.time)
        cpu, delivered, secs = cpu_s(options.pid) - cpu0, self.delivered - delivered0, time.monotonic() - t0
        latencies = sorted(self.latencies_ns) or [0]
        self.stopping = True
        await asyncio.wait(tasks, timeout=0.1)
        for task in tasks:
            task.cancel()
        await self.settle()
        return {
            "mode": options.mode, "delivered": delivered, "secs": secs, "dlv_per_s": delivered / secs,
            "cpu_us_per_dlv": cpu * 1e6 / max(delivered, 1), "broker_cpu_pct": 100 * cpu / secs,
            "p50_us": latencies[len(latencies) // 2] / 1e3, "p99_us": latencies[len(latencies) * 99 // 100] / 1e3,
            "lost": max(0, self.expected - self.delivered), "dup_or_disorder": self.disorder,
        }  # fmt: skip

    async def settle(self) -> None:
        """Waits for what is under way, until nothing has come for a while."""
        last = -1
        while self.delivered < self.expected and self.delivered != last:
            last = self.delivered
            await asyncio.sleep(STALL_S)

    async def flow(self) -> dict[str, Any]:
        options = self.options
        subscribers = [await self.connect(f"t/{i % options.topics}") for i in range(options.subs)]
        publishers = [await self.connect() for _ in range(options.pubs)]
        readers = [asyncio.create_task(self.receive(link, i)) for i, link in enumerate(subscribers)]
        senders = []
        for index, link in enumerate(publishers):
            topics = [f"t/{(index + i) % options.topics}" for i in range(options.rotate)]
            for topic in topics:
                await self.protocol.resolve(link, topic)
            send = self.send_at_rate if options.rate else self.send_in_window
            senders.append(send(index, link, itertools.cycle(topics)))
        report = await self.measured(senders)
        for reader in readers:
            reader.cancel()
        return report

    def message(self, index: int, link: Link, topic: str, when_ns: int) -> bytes:
        number = self.sent[index, topic]
        self.sent[index, topic] = number + 1
        self.expected += self.fan_out
        self.due[index] += self.fan_out
        return self.protocol.publish(link, topic, self.payload(index, number, when_ns))

    @property
    def fan_out(self) -> int:
        return self.options.subs // self.options.topics

    async def send_in_window(self, index: int, link: Link, topics: Any) -> None:
        batch, window = self.options.batch, self.options.window
        while not self.stopping:
            room = window - (self.due[index] - self.acked[index]) // self.fan_out
            if room < min(batch, window):
                self.news.clear()
                await self.news.wait()
                continue
            now = time.monotonic_ns()
            await link.write(b"".join(self.message(index, link, next(topics), now) for _ in range(min(batch, room))))
            await asyncio.sleep(0)

    async def send_at_rate(self, index: int, link: Link, topics: Any) -> None:
        """The open loop: a message carries the time it was due, so a stalled broker cannot hide."""
        step_ns = int(1e9 * self.options.pubs / self.options.rate)
        due_ns = time.monotonic_ns()
        while not self.stopping:
            while due_ns <= time.monotonic_ns():
                await link.write(self.message(index, link, next(topics), due_ns))
                due_ns += step_ns
            await asyncio.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)

    async def ping(self) -> dict[str, Any]:
        asker, answerer = await self.connect("rep/0"), await self.connect("req/0")
        await self.protocol.resolve(asker, "req/0", answerer)
        await self.protocol.resolve(answerer, "rep/0", asker)
        return await self.measured([self.ask(asker), self.answer(answerer)])

    async def ask(self, link: Link) -> None:
        while not self.stopping:
            payload = self.payload(0, self.expected, time.monotonic_ns())
            self.expected += 1
            await link.write(self.protocol.publish(link, "req/0", payload))
            while self.delivered < self.expected:
                for message in self.protocol.payloads(link, await link.read()):
                    self.check(0, message)

    async def answer(self, link: Link) -> None:
        while data := await link.read():
            for message in self.protocol.payloads(link, data):
                await link.write(self.protocol.publish(link, "rep/0", message))

    async def idle(self) -> dict[str, Any]:
        options = self.options
        memory0, cpu0, t0 = memory_bytes(options.pid), cpu_s(options.pid), time.monotonic()
        links: list[Link] = []
        for first in range(0, options.conns, options.concurrency):
            numbers = range(first, min(first + options.concurrency, options.conns))
            links += await asyncio.gather(*(self.connect(f"idle/{i}" if options.subscribe else None) for i in numbers))
        secs, cpu = time.monotonic() - t0, cpu_s(options.pid) - cpu0
        await asyncio.sleep(options.hold)
        grown = memory_bytes(options.pid) - memory0
        return {
            "mode": "idle", "ready": len(links), "conn_per_s": len(links) / secs,
            "cpu_us_per_conn": cpu * 1e6 / len(links), "bytes_per_conn": grown / len(links),
        }  # fmt: skip


if __name__ == "__main__":
    main()

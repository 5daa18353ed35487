"""Load on an MQTT broker: one publisher and some subscribers, which count what is lost and doubled. Prints JSON.

    mqtt_hub_load.py PORT PID [--qos 1] [--version 5] [--inflight 20] [--subs 1] [--filter load/t] [--share]
                     [--retained N] [--websocket] [--size 16] [--seconds 2]

`cpu_us` is the CPU time of the process PID for each delivered message. With `--retained`, the publisher sets so many
retained messages, and the subscriber gets all of them; with `--share`, the subscribers share each message.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any

from smqrt.wire.mqtt.fields import varint
from smqrt.wire.mqtt.packets import PacketSplitter

TOPIC = b"load/t"
WINDOW = 2000  # QoS 0: messages on their way at most
BATCH = 50
DRAIN_S = 3.0
UPGRADE = (
    b"GET /mqtt HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: mqtt\r\n\r\n"
)


def packet(first: int, body: bytes) -> bytes:
    return bytes((first,)) + varint(len(body)) + body


def string(text: bytes) -> bytes:
    return struct.pack(">H", len(text)) + text


class Client:
    """A client that sends and receives packets without waiting, once it is connected."""

    def __init__(self, options: Any, name: bytes) -> None:
        self.options, self.out, self.splitter = options, bytearray(), PacketSplitter()
        self.frames: bytearray | None = None
        self.sock = socket.create_connection(("127.0.0.1", options.port), 5)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if options.websocket:
            self.sock.sendall(UPGRADE)
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += self.sock.recv(1)
            self.frames = bytearray()
        level = b"\0\6MQIsdp" if options.version == 3 else b"\0\4MQTT"
        self.send(packet(0x10, level + bytes((options.version, 2, 0, 0)) + self.properties + string(name)))
        first, body = self.answer()
        if first != 0x20 or body[1]:
            raise SystemExit(f"refused: {first:#x} {body.hex()}")

    @property
    def properties(self) -> bytes:
        return b"\0" if self.options.version == 5 else b""

    def send(self, data: bytes) -> None:
        if self.frames is not None:  # one frame, masked with zeros
            size = len(data)
            length = bytes((0x80 | size,)) if size < 126 else b"\xfe" + struct.pack(">H", size)
            data = b"\x82" + (length if size < 65536 else b"\xff" + struct.pack(">Q", size)) + bytes(4) + data
        self.out += data
        self.flush()

    def flush(self) -> None:
        if self.out:
            try:
                del self.out[: self.sock.send(self.out)]
            except BlockingIOError:
                pass

    def receive(self) -> Iterator[tuple[int, bytes]]:
        try:
            data = self.sock.recv(262_144)
        except BlockingIOError:
            return
        if not data:
            raise SystemExit("the broker ended a connection")
        self.splitter.feed(data if self.frames is None else self._unframed(data))
        while (found := self.splitter.next()) is not None:
            yield found

    def _unframed(self, data: bytes) -> bytes:
        assert self.frames is not None
        self.frames += data
        at, found = 0, b""
        while len(self.frames) - at >= 2:
            short = self.frames[at + 1]
            start = at + {126: 4, 127: 10}.get(short, 2)
            size = short if short < 126 else int.from_bytes(self.frames[at + 2 : start], "big")
            if len(self.frames) < start + size:
                break
            found, at = found + self.frames[start : start + size], start + size
        del self.frames[:at]
        return found

    def answer(self) -> tuple[int, bytes]:
        """The next packet."""
        while True:
            for found in self.receive():
                return found


class Subscriber(Client):
    """Counts the numbered messages."""

    def __init__(self, options: Any, name: bytes) -> None:
        super().__init__(options, name)
        self.numbers: set[int] = set()
        self.doubled = 0

    def subscribe(self, topic_filter: bytes) -> None:
        self.send(packet(0x82, b"\0\1" + self.properties + string(topic_filter) + bytes((self.options.qos,))))
        first, body = self.answer()
        assert (first, body[-1]) == (0x90, self.options.qos), body

    def take(self) -> None:
        """Receive, and acknowledge."""
        answers = b""
        for first, body in self.receive():
            if first >> 4 == 6:
                answers += packet(0x70, body[:2])
                continue
            assert first >> 4 == 3, first
            qos, at = first >> 1 & 3, 2 + (body[0] << 8 | body[1])
            if qos:
                answers += packet(0x40 if qos == 1 else 0x50, body[at : at + 2])
                at += 2
            at += self.options.version == 5 and 1 + body[at]
            (number,) = struct.unpack_from(">Q", body, at)
            self.doubled += number in self.numbers
            self.numbers.add(number)
        if answers:
            self.send(answers)


class Publisher(Client):
    """Publishes numbered messages, as many as may be in flight."""

    def __init__(self, options: Any) -> None:
        super().__init__(options, b"publisher")
        self.free = list(range(1, options.inflight + 1))
        self.sent = 0
        self._filler = bytes(max(options.size - 8, 0))

    def publish(self, count: int, topic: bytes = TOPIC, flags: int = 0) -> None:
        qos, batch = self.options.qos, b""
        for _ in range(count):
            number = struct.pack(">H", self.free.pop()) if qos else b""
            payload = struct.pack(">Q", self.sent) + self._filler
            name = topic + b"%d" % self.sent if flags else topic
            batch += packet(0x30 | qos << 1 | flags, string(name) + number + self.properties + payload)
            self.sent += 1
        self.send(batch)

    def take(self) -> None:
        answers = b""
        for first, body in self.receive():
            if first >> 4 == 5:
                answers += packet(0x62, body[:2])
            else:
                assert first >> 4 in (4, 7), first
                self.free.append(body[0] << 8 | body[1])
        if answers:
            self.send(answers)


def cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(options: Any) -> dict[str, object]:
    """Load the broker, and return what was measured."""
    if options.retained:
        return run_retained(options)
    subscribers = [Subscriber(options, b"subscriber-%d" % at) for at in range(options.subs)]
    for one in subscribers:
        one.subscribe(b"$share/g/" * options.share + options.filter.encode())
    publisher = Publisher(options)
    began_s, used_s = time.monotonic(), cpu_s(options.pid)
    end_s = began_s + options.seconds
    while True:
        arrived = sum(len(one.numbers) for one in subscribers) // (1 if options.share else options.subs)
        if time.monotonic() < end_s:
            room = len(publisher.free) if options.qos else WINDOW - (publisher.sent - arrived)
            if room > 0 and not publisher.out:
                publisher.publish(min(room, BATCH))
        elif arrived >= publisher.sent or time.monotonic() > end_s + DRAIN_S:
            break
        exchange([publisher, *subscribers])
    seconds, used_s = time.monotonic() - began_s, cpu_s(options.pid) - used_s
    delivered = sum(len(one.numbers) for one in subscribers)
    wanted = publisher.sent * (1 if options.share else options.subs)
    return {
        "delivered": delivered,
        "per_s": round(delivered / seconds),
        "cpu_us": round(used_s * 1e6 / max(delivered, 1), 2),
        "lost": wanted - delivered,
        "doubled": sum(one.doubled for one in subscribers),
    }


def run_retained(options: Any) -> dict[str, object]:
    """Set retained messages, and let a new subscriber get them."""
    publisher = Publisher(options)
    while publisher.sent < options.retained or (options.qos and len(publisher.free) < options.inflight):
        room = len(publisher.free) if options.qos else BATCH
        if not publisher.out and (count := min(room, BATCH, options.retained - publisher.sent)) > 0:
            publisher.publish(count, b"load/r/", 1)
        exchange([publisher])
    publisher.send(packet(0xC0, b""))
    while publisher.answer()[0] != 0xD0:
        pass
    subscriber = Subscriber(options, b"subscriber")
    began_s, used_s = time.monotonic(), cpu_s(options.pid)
    subscriber.subscribe(b"load/r/#")
    while len(subscriber.numbers) < options.retained and time.monotonic() < began_s + options.seconds + DRAIN_S:
        exchange([subscriber])
    used_s, delivered = cpu_s(options.pid) - used_s, len(subscriber.numbers)
    cpu_us = round(used_s * 1e6 / max(delivered, 1), 2)
    return {
        "delivered": delivered,
        "cpu_us": cpu_us,
        "lost": options.retained - delivered,
        "doubled": subscriber.doubled,
    }


def exchange(clients: list[Any]) -> None:
    """Wait for data, and let the clients receive and send."""
    by_sock = {one.sock: one for one in clients}
    for one in clients:
        one.sock.setblocking(False)
    ready, writable, _ = select.select(list(by_sock), [one.sock for one in clients if one.out], [], 0.05)
    for sock in writable:
        by_sock[sock].flush()
    for sock in ready:
        by_sock[sock].take()


def parse(words: list[str]) -> Any:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("port", type=int)
    parser.add_argument("pid", type=int, help="process of the broker")
    parser.add_argument("--qos", type=int, default=1, choices=(0, 1, 2))
    parser.add_argument("--version", type=int, default=5, choices=(3, 4, 5), help="protocol level")
    parser.add_argument("--inflight", type=int, default=20, help="messages with QoS 1 and 2 without an answer")
    parser.add_argument("--subs", type=int, default=1, help="number of subscribers")
    parser.add_argument("--filter", default=TOPIC.decode(), help="topic filter of the subscribers")
    parser.add_argument("--share", action="store_true", help="one shared subscription")
    parser.add_argument("--retained", type=int, default=0, help="retained messages to set, and to send to a subscriber")
    parser.add_argument("--websocket", action="store_true", help="connect at /mqtt")
    parser.add_argument("--size", type=int, default=16, help="bytes of a payload")
    parser.add_argument("--seconds", type=float, default=2.0)
    return parser.parse_args(words)


if __name__ == "__main__":
    print(json.dumps(run(parse(sys.argv[1:]))))

"""SIGKILL of the old or the new process at each step of a hot restart: real processes, with a relay at their socket."""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import gevent
import pytest
from gevent import socket as gsocket

from smqrt.wire import smq as wire
from smqrt.wire.smq import Type
from smqrt.workers.worker_rpc import ChannelError, FdChannel
from tests.server.restart.hot import HotServed, application, has_ended
from tests.support.device import WS, Device, publish
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers

Serve = Callable[..., HotServed]


class Relay:
    """Passes messages and descriptors on between a new process and the old one, and kills one of them at a step.

    Args:
        path: where the new process looks for the old one.
        old_path: where the old one listens.
        kind: the message before which it kills; it never arrives.
        victim: gives the process to kill.
    """

    def __init__(self, path: Path, old_path: Path, kind: str, victim: Callable[[], int]) -> None:
        self._kind, self._victim, self._old_path = kind, victim, old_path
        self.has_killed = False
        self._listening = gsocket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen(1)
        self._serving = gevent.spawn(self._serve)

    def _serve(self) -> None:
        sock, _ = self._listening.accept()
        to_old = gsocket.socket(socket.AF_UNIX)
        to_old.connect(str(self._old_path))
        new, old = FdChannel(sock), FdChannel(to_old)
        ways = [gevent.spawn(self._pass_on, new, old), gevent.spawn(self._pass_on, old, new)]
        gevent.joinall(ways, count=1)  # one is gone: the other is to see that
        gevent.killall(ways)
        new.close()
        old.close()

    def _pass_on(self, source: FdChannel, sink: FdChannel) -> None:
        try:
            while True:
                message, fds = source.receive(None)
                if message["do"] == self._kind and not self.has_killed:
                    os.kill(self._victim(), signal.SIGKILL)
                    self.has_killed = True
                    for fd in fds:
                        os.close(fd)
                    return
                sink.send(message, fds)
                for fd in fds:
                    os.close(fd)
        except ChannelError:
            return

    def close(self) -> None:
        self._serving.kill()
        self._listening.close()


class Ledger:
    """A client that publishes numbered messages, and those that are to get each once and in order."""

    def __init__(self, served: HotServed) -> None:
        self.publisher = served.device(b"publisher")
        self.readers = [served.device(b"reader-raw"), served.device(b"reader-ws", WS)]
        self.topic = [one.subscribe(b"news") for one in self.readers][0]
        self.readers[1].send(wire.with_id(Type.OBSERVE, self.topic))  # who observes is not sent ahead
        self.sent = 0

    def publish(self, count: int) -> None:
        try:
            for _ in range(count):
                body = struct.pack(">I", self.sent)
                self.publisher.send_bytes(self.publisher.framed(publish(self.topic, self.publisher.etid, body)))
                self.sent += 1
        except OSError:
            self.sent += 1  # it may have gone out, or not: the publisher has seen the end

    def check(self) -> bool:
        """Whether all are still connected; then nothing is missing. Nobody ever gets one twice or out of order."""
        publisher_stays = stays(self.publisher)
        for one in self.readers:
            got, is_there = received(one, self.sent if publisher_stays else None)
            assert got == list(range(len(got))), got
            assert not (is_there and publisher_stays) or len(got) == self.sent, (len(got), self.sent)
            publisher_stays &= is_there
        return publisher_stays


def stays(device: Device) -> bool:
    try:
        device.sync()
    except (AssertionError, OSError):
        return False
    return True


def received(device: Device, count: int | None) -> tuple[list[int], bool]:
    """The numbers that came, until there are so many or the end; and whether the connection is there."""
    got: list[int] = []
    try:
        while count is None or len(got) < count:
            packet = device.receive()
            if packet[0] == Type.PUBLISH:
                got.append(struct.unpack(">I", wire.unpack_publish(wire.frame(packet))[3])[0])
    except (AssertionError, OSError):
        return got, False
    return got, True


@pytest.mark.parametrize(
    ("who", "kind", "clients_stay"),
    [
        ("new", "hello", True),
        ("new", "ready", True),
        ("new", "ahead", True),
        ("new", "clients", True),
        ("new", "have", True),
        ("new", "go", False),  # the word was given: they are the new one's, and come back
        ("old", "ahead", False),
        ("old", "hub", False),
        ("old", "clients", False),
        ("old", "go", True),
        ("old", "done", True),
    ],
)
def test_a_process_is_killed_at_a_step(
    serve_hot: Serve, tmp_path: Path, who: str, kind: str, clients_stay: bool
) -> None:
    app = application(tmp_path / "app")
    old = serve_hot(app, "--restart-socket", tmp_path / "old.sock")
    ledger = Ledger(old)
    ledger.publish(20)
    new: list[HotServed] = []
    victim = (lambda: old.pid) if who == "old" else (lambda: new[0].pid)
    relay = Relay(tmp_path / "relay.sock", tmp_path / "old.sock", kind, victim)
    new.append(serve_hot(app, "--restart-socket", tmp_path / "relay.sock", "--take-over"))
    while not relay.has_killed:
        ledger.publish(1)
        gevent.sleep(0.01)
    wait_until(lambda: has_ended(victim()), "the end of a process")
    ledger.publish(20)
    survivor = old if who == "new" else new[0]
    survivor.wait_for("this process continues|refused: process")
    assert ledger.check() is clients_stay
    again = Device(("127.0.0.1", old.port), "raw").start(target="/smq.lsp").connect(b"comes-back")
    assert again.subscribe(b"news") == ledger.topic
    relay.close()

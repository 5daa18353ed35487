"""Three real servers at cables, with clients and a ledger, under the faults of a network and of processes.

Each message between two nodes that are well must arrive once and in order. What a fault may cost is what was published
between its begin and the moment from which both sides say that they are joined again.

By hand: python -m tests.cluster.faults --rounds 20 --clients 1000 kill
"""

from __future__ import annotations

import json
import signal
import struct
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import click
import gevent
from gevent import socket

from smqrt.wire import smq
from smqrt.wire.smq import Type
from tests.cluster.cut import Cable
from tests.conftest import Served, free_port

NODES = 3
TOPICS = 100
TICK_S = 0.01
PER_TICK = 2
SILENCE_S = 2.0  # on a busy machine a healthy node gets no processor for a second
WAIT_S = 30
SLOW_S = 0.05
BEAT_S, STILL_S, RECOVERS_S = 0.05, 0.3, 3.0
"""This process, which has the cables, stood still for more than so long: a fault of all links, over after a while."""
MARGIN_S = 0.25
"""Published so long before a fault, a message is where it belongs; and so long after it at the latest, interest is."""
BOOTSTRAP = b"GET /smq.lsp HTTP/1.1\r\nHost: 127.0.0.1\r\nSimpleMQ: 1\r\n\r\n"
_MESSAGE = struct.Struct(">III")
Pair = frozenset[int]


class Node:
    """A server with fixed ports.

    Attributes:
        number: from 0; lives: how many processes it had.
    """

    def __init__(self, number: int, app: Path) -> None:
        self.number, self.lives, self._app = number, 0, app
        self.port, self.admin_port, self.link_port = free_port(), free_port(), free_port()
        self.addresses: list[str] = []

    def start(self) -> None:
        """Start it, and wait until it serves."""
        words = [self._app, "--port", self.port, "--admin-port", self.admin_port]
        links = ["--cluster-listen", f"127.0.0.1:{self.link_port}", "--cluster-silence-s", SILENCE_S]
        more = ["--cluster-ping-s", 0.2, "--cluster-nodes", ",".join(self.addresses), "--cluster-password", "secret"]
        self.served = Served(*map(str, [*words, *links, *more]))
        self.process = self.served.process
        self.lives += 1
        until(lambda: self.nodes() >= 0, f"node {self.number} did not start")

    def hub(self) -> dict[str, Any]:
        """What the API says of its hub; empty while it does not answer. Asked in a thread: the cables carry on."""
        found: dict[str, Any] = gevent.get_hub().threadpool.apply(self._asked)
        return found

    def _asked(self) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/api/v1/clusters", timeout=1) as answer:
                found: list[dict[str, Any]] = [hub for row in json.load(answer) for hub in row["hubs"]]
        except OSError:
            return {}
        return found[0] if found else {}

    def nodes(self) -> int:
        """How many others it is joined with; -1 while it does not answer."""
        hub = self.hub()
        return len(hub["nodes"]) - len(hub["joining"]) if hub else -1

    def lost(self) -> int:
        """How many messages to other nodes it counted as lost."""
        return sum(self.hub().get("lost", {}).values())

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()


def until(condition: Callable[[], Any], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        gevent.sleep(0.02)


class Wire:
    """A client's connection."""

    def __init__(self, node: Node, uid: bytes) -> None:
        self.sock = socket.create_connection(("127.0.0.1", node.port))
        self.sock.sendall(BOOTSTRAP)
        self._received = b""
        self.packet()
        self.send(smq.connect(uid))
        self.etid: int = struct.unpack_from(">I", self.packet(), 2)[0]

    def send(self, packet: bytes) -> None:
        self.sock.sendall(smq.frame(packet))

    def packet(self) -> bytes:
        """The next packet; raises OSError at the end."""
        while len(self._received) < 2 or len(self._received) < (length := int.from_bytes(self._received[:2], "big")):
            data = self.sock.recv(1 << 16)
            if not data:
                raise OSError("the server closed the connection")
            self._received += data
        packet, self._received = self._received[2:length], self._received[length:]
        return packet


def connected(node: Node, uid: bytes) -> Wire:
    """A connection as soon as the node takes one."""
    while True:
        try:
            return Wire(node, uid)
        except OSError:
            gevent.sleep(0.05)


class Life:
    """One connection of a subscriber: what it got of each publisher's life, in order."""

    def __init__(self, node: Node, topic: int) -> None:
        self.node, self.topic = node, topic
        self.begin_s, self.end_s = time.monotonic(), float("inf")
        self.got: dict[tuple[int, int], list[int]] = defaultdict(list)


class Publisher:
    """Publishes numbered messages at one node, to all topics in turn.

    Attributes:
        sent: by its life and the topic: when each message was handed to the system, and its number.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.sent: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)
        self.is_on = True
        self.greenlet = gevent.spawn(self._run)

    def _run(self) -> None:
        number = 0
        while self.is_on:
            try:
                wire, life = connected(self.node, b"publisher-%d" % self.node.number), self.node.lives
                tids = [self._tid(wire, topic) for topic in range(TOPICS)]
                while self.is_on:
                    for _ in range(PER_TICK):
                        topic = number % TOPICS
                        data = _MESSAGE.pack(self.node.number, life, number)
                        wire.sock.sendall(smq.publish_frame(tids[topic], wire.etid, 0, data))
                        self.sent[life, topic].append((time.monotonic(), number))
                        number += 1
                    gevent.sleep(TICK_S)
            except OSError:
                gevent.sleep(0.05)

    def _tid(self, wire: Wire, topic: int) -> int:
        wire.send(smq.with_name(Type.CREATE, b"topic-%d" % topic))
        number: int = struct.unpack_from(">I", wire.packet(), 2)[0]
        return number


class Fleet:
    """The nodes, their cables, clients and the ledger.

    Attributes:
        faults: for each pair of nodes: when a fault between them began, and when both were well again.
        still: how often this process stood still, and with it all cables.
    """

    def __init__(self, clients: int, pause_s: float = 2 * SILENCE_S) -> None:
        self._pause_s = pause_s
        self._folder = tempfile.TemporaryDirectory(prefix="smqrt-faults-")
        app = Path(self._folder.name)
        (app / ".preload").write_text("smq = require'smq.hub'.create{cluster = 'faults'}")
        (app / "smq.lsp").write_text("<?lsp app.smq:connect(request) ?>")
        self.nodes = [Node(number, app) for number in range(NODES)]
        self.cables: dict[Pair, Cable] = {}
        for one, other in combinations(self.nodes, 2):
            cable = self.cables[frozenset((one.number, other.number))] = Cable(other.link_port)
            one.addresses.append(f"127.0.0.1:{cable.port}")
        self.faults: dict[Pair, list[tuple[float, float]]] = defaultdict(list)
        self.lives: list[Life] = []
        self._clients = [gevent.spawn(self._subscribe, number) for number in range(clients)]
        self.publishers: list[Publisher] = []
        self.still = 0
        self._heart = gevent.spawn(self._beat)

    def _beat(self) -> None:
        while True:
            begin_s = time.monotonic()
            gevent.sleep(BEAT_S)
            end_s = time.monotonic()
            if end_s - begin_s > BEAT_S + STILL_S:
                self.still += 1
                for pair in self.cables:
                    self.faults[pair].append((begin_s - MARGIN_S, end_s + RECOVERS_S))

    def start(self) -> None:
        for starting in [gevent.spawn(node.start) for node in self.nodes]:
            starting.get()
        self.wait_until_well()
        until(lambda: len(self.lives) == len(self._clients), "the clients did not connect")
        gevent.sleep(MARGIN_S)
        self.publishers = [Publisher(node) for node in self.nodes]
        until(lambda: all(one.sent for one in self.publishers), "the publishers did not begin")

    def wait_until_well(self) -> None:
        """Wait until all nodes are joined with all others, in both their eyes."""
        until(lambda: all(node.nodes() == NODES - 1 for node in self.nodes), "the nodes are not joined")

    def _subscribe(self, number: int) -> None:
        node, topic = self.nodes[number % NODES], number % TOPICS
        while True:
            wire = connected(node, b"subscriber-%d" % number)
            try:
                wire.send(smq.with_name(Type.SUBSCRIBE, b"topic-%d" % topic))
                while wire.packet()[0] != Type.SUBACK:
                    pass
                self._listen(wire, Life(node, topic))
            except OSError:
                pass

    def _listen(self, wire: Wire, life: Life) -> None:
        self.lives.append(life)
        try:
            while True:
                packet = wire.packet()
                if packet[0] == Type.PUBLISH:
                    publisher, of_life, number = _MESSAGE.unpack(packet[13:])
                    life.got[publisher, of_life].append(number)
        finally:
            life.end_s = time.monotonic()

    # ---- faults

    @contextmanager
    def fault(self, *pairs: Pair) -> Iterator[None]:
        """What happens in the block may cost messages between these nodes, until all are well again."""
        begin_s = time.monotonic() - MARGIN_S
        yield
        self.wait_until_well()
        for pair in pairs:
            self.faults[pair].append((begin_s, time.monotonic() + MARGIN_S))

    def pairs_of(self, node: Node) -> list[Pair]:
        return [pair for pair in self.cables if node.number in pair]

    def kill(self, node: Node) -> None:
        """kill -9, and start it again."""
        with self.fault(*self.pairs_of(node), frozenset((node.number,))):
            node.kill()
            gevent.sleep(0.2)
            node.start()

    def stop(self, node: Node) -> None:
        """Stands still for longer than others wait."""
        with self.fault(*self.pairs_of(node), frozenset((node.number,))):
            node.process.send_signal(signal.SIGSTOP)
            gevent.sleep(self._pause_s)
            node.process.send_signal(signal.SIGCONT)
            gevent.sleep(0.2)

    def cut(self, node: Node) -> None:
        """Alone for a while: {1|2}."""
        pairs = self.pairs_of(node)
        with self.fault(*pairs):
            for pair in pairs:
                self.cables[pair].cut()
            gevent.sleep(0.5)
            for pair in pairs:
                self.cables[pair].mend()

    def part(self, node: Node) -> None:
        """Everybody alone for a while: {1|1|1}."""
        with self.fault(*self.cables):
            for cable in self.cables.values():
                cable.cut()
            gevent.sleep(0.5)
            for cable in self.cables.values():
                cable.mend()

    def hold(self, node: Node) -> None:
        """A link that is open and carries nothing."""
        self._silence(node, Cable.hold)

    def one_way(self, node: Node) -> None:
        """A link that carries what the one node says, and not what the other one says."""
        self._silence(node, Cable.one_way)

    def _silence(self, node: Node, how: Callable[[Cable], None]) -> None:
        pair = self.pairs_of(node)[0]
        with self.fault(pair):
            how(self.cables[pair])
            gevent.sleep(2 * SILENCE_S)
            self.cables[pair].mend()

    def slow(self, node: Node) -> None:
        """A link that takes its time, which costs no message."""
        cable = self.cables[self.pairs_of(node)[0]]
        cable.delay_s = SLOW_S
        gevent.sleep(2 * SILENCE_S)
        cable.delay_s = 0.0

    def flap(self, node: Node) -> None:
        """A link that breaks again and again."""
        pair = self.pairs_of(node)[0]
        with self.fault(pair):
            for _ in range(5):
                self.cables[pair].cut()
                gevent.sleep(0.1)
                self.cables[pair].mend()
                gevent.sleep(0.3)

    # ---- the ledger

    def finish(self) -> None:
        """Publish no more, and wait for what is on its way."""
        for publisher in self.publishers:
            publisher.is_on = False
            publisher.greenlet.join()
        before = -1
        while before != (before := sum(len(got) for life in self.lives for got in life.got.values())):
            gevent.sleep(0.5)

    def judge(self) -> dict[str, int]:
        """Compare what was published with what arrived; gives counts of it."""
        published = sum(len(sent) for publisher in self.publishers for sent in publisher.sent.values())
        counts = {"published": published, "delivered": 0, "due": 0, "lives": len(self.lives)}
        for life in self.lives:
            for got in life.got.values():
                assert got == sorted(set(got)), f"twice, or out of order: {got}"
                counts["delivered"] += len(got)
            for publisher in self.publishers:
                counts["due"] += self._look(life, publisher)
        counts["stood still"] = self.still
        counts["counted as lost"] = sum(node.lost() for node in self.nodes)
        return counts

    def _look(self, life: Life, publisher: Publisher) -> int:
        """Whether a subscriber got all that was due to it of a publisher; gives how many that were."""
        due = 0
        for of_life in range(1, publisher.node.lives + 1):
            got = set(life.got[publisher.node.number, of_life])
            for at_s, number in publisher.sent[of_life, life.topic]:
                if self._is_due(life, publisher.node, at_s):
                    due += 1
                    assert number in got, (
                        f"message {number} of node {publisher.node.number}, published {at_s - life.begin_s:.2f} s after"
                        f" a subscriber of node {life.node.number} came, did not arrive"
                    )
        return due

    def _is_due(self, life: Life, node: Node, at_s: float) -> bool:
        if not life.begin_s + MARGIN_S < at_s < life.end_s - MARGIN_S:
            return False
        excused = self.faults[frozenset((life.node.number, node.number))]
        return not any(begin_s <= at_s <= end_s for begin_s, end_s in excused)

    def close(self) -> None:
        for greenlet in (self._heart, *self._clients, *[one.greenlet for one in self.publishers]):
            greenlet.kill()
        for node in self.nodes:
            node.kill()
        for cable in self.cables.values():
            cable.close()
        self._folder.cleanup()


FAULTS = ("kill", "stop", "cut", "part", "hold", "one_way", "slow", "flap")


def run(
    faults: list[str],
    rounds: int,
    clients: int,
    pause_s: float = 2 * SILENCE_S,
    seed: int = 1,
    say: Callable[[str], object] = print,
) -> None:
    """Do each of the faults so often, then judge; raises AssertionError."""
    chance, fleet = Random(seed), Fleet(clients, pause_s)
    try:
        fleet.start()
        for number in range(rounds):
            for fault in faults:
                node = chance.choice(fleet.nodes)
                start_s = time.monotonic()
                getattr(fleet, fault)(node)
                say(f"round {number + 1}: {fault} at node {node.number}, well after {time.monotonic() - start_s:.2f} s")
                gevent.sleep(2 * MARGIN_S)
        fleet.finish()
        say(json.dumps(fleet.judge()))
    except AssertionError:
        for node in fleet.nodes:
            say(f"node {node.number} printed:\n{node.served.output}")
        raise
    finally:
        fleet.close()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", default=1, show_default=True)
@click.option("--clients", default=150, show_default=True)
@click.option("--pause-s", default=2 * SILENCE_S, show_default=True, help="How long `stop` stops a process.")
@click.argument("faults", nargs=-1, type=click.Choice(FAULTS))
def main(rounds: int, clients: int, pause_s: float, faults: tuple[str, ...]) -> None:
    """Three servers with clients and a ledger under FAULTS, all of them when none is named."""
    run(list(faults or FAULTS), rounds, clients, pause_s)


if __name__ == "__main__":
    main()

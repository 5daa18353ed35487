"""The ledger of a cluster: what each subscriber of each node was to get, it got, or the node of the publisher has
counted it as lost, whatever became of links and nodes.

A message crosses a link once for all subscribers of a topic at the other node, and counts once when it does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import gevent

from smqrt.broker.broker import Broker
from smqrt.broker.outbox import Drop
from smqrt.cluster.remote_node import count_messages
from tests.cluster.engines import Client, Engine, MemoryEngine, Place

ROUNDS = 5
NAMES = ("a", "b", "c")
KILLED = 77
"""The number of the node that is killed: its next life is known by it."""


class Ledger:
    """Three nodes with subscribers and a publisher each, and what was published.

    Attributes:
        places: the nodes by name, in their present lives.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._subscribers: dict[tuple[str, bytes], list[list[Client]]] = defaultdict(list)
        """By node and topic, of each subscriber the clients that it was."""
        self._sent: dict[tuple[str, bytes], list[bytes]] = defaultdict(list)
        """By node of the publisher and topic."""
        self._number = 0
        self._publishers: dict[str, Client] = {}
        self.places: dict[str, Place] = {}
        for name in NAMES:
            self.start(name, number=KILLED if name == "c" else 0)
        self.join()

    # ---- nodes

    def start(self, name: str, number: int) -> None:
        """Start a node, whose clients have subscribed before it joins others."""
        self.places[name] = self._engine.place(name, number=number, prepare=lambda hub: self._connect(name, hub))

    def _connect(self, name: str, hub: Broker) -> None:
        for topic, count in ((b"of %s" % name.encode(), 2), (b"of all", 3)):
            lives = self._subscribers[name, topic]
            lives += [[] for _ in range(count - len(lives))]
            for number, of in enumerate(lives):
                of.append(Client(hub, b"%s %s %d" % (name.encode(), topic, number)))
                of[-1].subscribe(topic)
        self._publishers[name] = Client(hub, b"publisher of " + name.encode())

    def join(self) -> None:
        """Wait until all know what all want, while messages go on."""
        self._engine.joined(*self.places.values())
        for name, place in self.places.items():
            for topic in (b"of all", *[b"of %s" % one.encode() for one in self.places if one != name]):
                wanted = len(self.places) - 1 if topic == b"of all" else 1
                self._engine.until(lambda at=place, of=topic, by=wanted: at.wanted_by(of) == by, "interest")

    # ---- messages

    def publish(self, rounds: int = ROUNDS) -> None:
        """Each node publishes to all topics, and the nodes have a little time for it."""
        for _ in range(rounds):
            for name, publisher in self._publishers.items():
                for topic in (b"of all", *[b"of %s" % one.encode() for one in NAMES]):
                    self._number += 1
                    data = b"%s %d" % (name.encode(), self._number)
                    self._sent[name, topic].append(data)
                    publisher.publish(topic, data)
            self._breathe()

    def _breathe(self) -> None:
        if isinstance(self._engine, MemoryEngine):
            self._engine.settle()
        else:
            gevent.sleep(0.01)

    def rest(self) -> None:
        """Wait until all has arrived that was sent, and its senders know that."""
        self._breathe()
        for place in self.places.values():
            self._engine.wait_acknowledged(place)

    def kill(self, name: str) -> None:
        """A node is gone, with its publisher."""
        del self._publishers[name]
        self._engine.kill(self.places.pop(name))

    def unconfirmed(self) -> dict[str, int]:
        """What is on its way from each node, or may be."""
        return {
            name: sum(map(_unconfirmed, self._engine.node_of(place).links.values()))
            for name, place in self.places.items()
        }

    # ---- the verdict

    def missed(self, name: str) -> int:
        """How many copies that a node has published have not come to the nodes that wanted them; asserts that none came
        twice or out of order, and that all subscribers of one node got the same.
        """
        missed = 0
        for (node, topic), lives in self._subscribers.items():
            sent = self._sent[name, topic]
            got = [[data for client in clients for data in client.data if data in set(sent)] for clients in lives]
            assert all(one == got[0] for one in got), f"subscribers of {topic!r} at {node} differ"
            at = {data: number for number, data in enumerate(sent)}
            order = [at[data] for data in got[0]]
            assert order == sorted(set(order)), f"twice, or out of order, from {name} at {node}: {order}"
            assert node != name or len(order) == len(sent), "within a node nothing is lost"
            missed += len(sent) - len(order)
        return missed

    def counted(self, name: str) -> int:
        """What a node has counted as lost; asserts that it has counted nothing else."""
        drops = self.places[name].hub.stats.drops
        assert {reason for reason, count in drops.items() if count} <= {Drop.LINK_LOST}, drops
        return drops[Drop.LINK_LOST]

    def must_add_up(self, name: str, most_arrived: int = 0) -> None:
        """What a node's messages missed was counted there, and what arrived without being confirmed, too."""
        missed = self.missed(name)
        self._engine.until(
            lambda: self.counted(name) >= missed, f"{name}: {missed} missed, {self.counted(name)} counted"
        )
        counted = self.counted(name)
        assert counted <= missed + most_arrived, f"{name}: {missed} missed, {counted} counted"


def _unconfirmed(link: object) -> int:
    return sum(count_messages(run) for _, _, runs in link.unacked for run in runs)  # type: ignore[attr-defined]


def _broken(ledger: Ledger, engine: Engine, begin: Callable[[Place, Place], None], one: str, other: str) -> None:
    """Messages go on while a link is broken, and while it heals."""
    ledger.rest()
    begin(ledger.places[one], ledger.places[other])
    ledger.publish()
    there = [ledger.places[one], ledger.places[other]]
    numbers = {there[0]: there[1].member.number, there[1]: there[0].member.number}
    for place, number in numbers.items():
        if begin == engine.silence:
            engine.wait_silence()
        engine.until(lambda at=place, of=number: of not in [node.number for node in at.member.remotes], "it notices")
    ledger.publish()
    engine.heal(*there)
    ledger.publish()
    ledger.join()
    ledger.publish()
    ledger.rest()


def test_every_copy_arrives_or_is_counted(engine: Engine) -> None:
    ledger = Ledger(engine)
    ledger.publish()
    ledger.rest()
    for name in NAMES:
        assert ledger.missed(name) == ledger.counted(name) == 0
    _broken(ledger, engine, engine.cut, "a", "b")
    for name in NAMES:
        ledger.must_add_up(name)
    assert ledger.missed("a") >= 2 * ROUNDS
    _broken(ledger, engine, engine.silence, "a", "c")
    for name in NAMES:
        ledger.must_add_up(name)
    assert ledger.missed("c") >= 2 * ROUNDS

    ledger.kill("c")
    ledger.publish()
    engine.until(lambda: all(len(one.member.remotes) == 1 for one in ledger.places.values()), "they notice")
    ledger.publish()
    before = ledger.missed("a")
    ledger.start("c", number=KILLED)
    ledger.publish()
    ledger.join()
    ledger.publish()
    ledger.rest()
    assert ledger.missed("a") >= before > 0
    for name in ("a", "b"):
        ledger.must_add_up(name)


def test_a_broken_link_counts_unconfirmed_messages(engine: Engine) -> None:
    ledger = Ledger(engine)
    most = dict.fromkeys(NAMES, 0)
    for one, other in (("a", "b"), ("b", "c"), ("a", "c")):
        ledger.publish(20)
        for name, count in ledger.unconfirmed().items():
            most[name] += count
        engine.cut(ledger.places[one], ledger.places[other])
        ledger.publish()
        engine.heal(ledger.places[one], ledger.places[other])
        ledger.publish()
        ledger.join()
    ledger.publish()
    ledger.rest()
    for name in NAMES:
        ledger.must_add_up(name, most[name])

"""A cluster under a seeded schedule: clients come, go, subscribe and publish while links delay, break, fall silent and
heal, and nodes are killed and start again. A ledger says what each client must have got.

    world = World(seed)
    for action in schedule(seed):
        world.do(action)
    world.judge()

What arrives next is chance, too, of the same seed: a schedule does the same each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import permutations
from random import Random
from typing import Any

from smqrt.broker.broker import Broker
from smqrt.broker.outbox import Drop
from smqrt.broker.state import Hooks
from smqrt.cluster.link import Link
from smqrt.cluster.node import Node
from smqrt.errors import CloseReason
from smqrt.wire.smq import unpack_publish
from tests.cluster.engines import KEY, Client
from tests.cluster.memory_links import MemoryNetwork

Action = tuple[Any, ...]
TOPICS = [b"a", b"b", b"c", b"d"]
UIDS = [b"client-%d" % number for number in range(7)]
MAX_ACTIONS = 60
SETTLE_ROUNDS = 30


class Fault(AssertionError):
    """A rule of clusters was broken."""


class Subscriber(Client):
    """A client with its ledger.

    Attributes:
        due: the messages that it must get, in order.
        wants: the topics it subscribes to.
    """

    def __init__(self, machine: Machine, uid: bytes) -> None:
        super().__init__(machine.hub, uid)
        self.machine, self.uid = machine, uid
        self.due: list[int] = []
        self.wants: set[bytes] = set()
        self.observes: set[int] = set()
        self.observed_clients: list[Subscriber] = []

    @property
    def gone(self) -> bool:
        return self.session.closed or not self.machine.alive

    @property
    def got(self) -> list[int]:
        return [int(data) for data in self.data]


class Machine:
    """A node in one of its lives.

    Attributes:
        forwarded: how many messages it has handed to links; arrived: how many of them came.
        harmed: whether a link of it was lost, so that messages may be.
    """

    def __init__(self, world: World, number: int, counts_all: bool) -> None:
        network = world.network
        skew_s = world.chance.choice((0, world.chance.uniform(-5, 5)))  # clocks of machines differ
        network.now_s += 0.001
        self.node = Node(
            KEY,
            random=partial(few_numbers, world.chance),
            clock_s=lambda: network.now_s,
            clock_ns=lambda: int((network.now_s + skew_s) * 1e9),
            number=number,
        )
        network.nodes.append(self.node)
        self.number, self.alive, self.counts_all = number, True, counts_all
        self.hub = Broker(
            Hooks(), random_u32=partial(world.chance.getrandbits, 32), encode=bytes, clock=lambda: network.now_s
        )
        self.clients: list[Subscriber] = []
        self.forwarded = self.arrived = 0
        self.harmed = False
        for topic in world.chance.sample(range(4), world.chance.choice((0, 0, 1, 2))):
            self.hub.create(TOPICS[topic], 100 + 10 * topic + world.chance.randrange(3))
        self.join()

    def join(self) -> None:
        self.member = self.node.join(self.hub, "hub")
        if self.counts_all:
            self.member.counts.count_all()

    @property
    def joined(self) -> bool:
        return bool(self.node.members)

    @property
    def counted(self) -> int:
        drops = self.hub.stats.drops
        return drops[Drop.LINK_LOST] + drops[Drop.LINK_SLOW]


class World:
    """Machines, clients, links, and what must be true of them."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.network = MemoryNetwork(self.chance)
        counts_all = self.chance.random() < 0.5
        fixed = self.chance.random() < 0.5
        self.machines = [
            Machine(self, number if fixed else 0, counts_all) for number in range(1, self.chance.randint(2, 4) + 1)
        ]
        self.dead: list[Machine] = []
        self.gone: list[Subscriber] = []
        self.messages: list[tuple[Subscriber, bytes | Subscriber]] = []
        self.apart: set[frozenset[Machine]] = set()
        self.dialed: set[frozenset[Machine]] = set()
        self._do: dict[str, Callable[..., None]] = {
            name.removeprefix("on_"): getattr(self, name) for name in dir(self) if name.startswith("on_")
        }

    def do(self, action: Action) -> None:
        name, *numbers = action
        self.network.now_s += 0.0002
        self._do[name](*numbers)
        if self.chance.random() < 0.7:
            self.network.flush()

    # ---- clients

    @property
    def clients(self) -> list[Subscriber]:
        return [client for machine in self.machines for client in machine.clients if not client.gone]

    def on_connect(self, machine: int, uid: int) -> None:
        of = pick(self.machines, machine)
        of.clients.append(Subscriber(of, pick(UIDS, uid)))

    def on_leave(self, client: int) -> None:
        if self.clients:
            pick(self.clients, client).session.disconnect(CloseReason.PEER_CLOSED)

    def on_subscribe(self, client: int, topic: int) -> None:
        if self.clients:
            one = pick(self.clients, client)
            one.subscribe(pick(TOPICS, topic))
            one.wants.add(pick(TOPICS, topic))

    def on_unsubscribe(self, client: int, topic: int) -> None:
        if self.clients:
            one = pick(self.clients, client)
            one.unsubscribe(pick(TOPICS, topic))
            one.wants.discard(pick(TOPICS, topic))

    def on_observe(self, client: int, topic: int) -> None:
        if self.clients:
            one = pick(self.clients, client)
            one.observes.add(one.number(pick(TOPICS, topic)))
            one.observe(one.number(pick(TOPICS, topic)))

    def on_watch(self, client: int, other: int) -> None:
        """Observes an ETID."""
        if self.clients:
            one, other_one = pick(self.clients, client), pick(self.clients, other)
            etid = self.etid(one, other_one)
            if etid is not None and one is not other_one:
                one.observe(etid)
                one.observed_clients.append(other_one)

    def etid(self, client: Subscriber, other: Subscriber) -> int | None:
        """What a client's node calls another client; None when it does not know it."""
        if client.machine is other.machine:
            return other.etid
        found = client.machine.member.phantoms.values() if client.machine.joined else ()
        stamp = other.machine.member.clients.stamps.get(other.etid)
        there = other.machine.node.number  # clocks differ: two clients of a uid seem to have come at the same time
        of_it = (one for one in found if one.uid == other.uid and one.node.number == there and not one.node.gone)
        return next((one.etid for one in of_it if one.stamp == stamp), None)

    def on_publish(self, client: int, topic: int, times: int) -> None:
        if self.clients:
            for _ in range(1 + times % 3):
                self.publish(pick(self.clients, client), pick(TOPICS, topic))

    def publish(self, publisher: Subscriber, topic: bytes) -> None:
        machine, number = publisher.machine, len(self.messages)
        self.messages.append((publisher, topic))
        publisher.number(topic)
        for one in machine.clients:
            if topic in one.wants and not one.gone:
                one.due.append(number)
        if machine.joined:
            nodes = machine.member.interest.nodes(machine.member.state.numbers.topic(topic))
            machine.forwarded += sum(bool(nodes & node.bit) for node in machine.member.remotes)
        publisher.publish(topic, b"%d" % number)

    def on_direct(self, client: int, other: int) -> None:
        if self.clients:
            self.direct(pick(self.clients, client), pick(self.clients, other))

    def direct(self, publisher: Subscriber, to: Subscriber) -> None:
        etid = self.etid(publisher, to)
        if etid is None:
            return
        number = len(self.messages)
        self.messages.append((publisher, to))
        if publisher.machine is to.machine:
            to.due.append(number)
        else:
            publisher.machine.forwarded += 1
        publisher.publish(etid, b"%d" % number)

    def arrives(self, link: Link, deliver: Callable[[bytes], bool | None], run: bytes) -> bool | None:
        """Note a message that a link brings."""
        tid, _, _, data = unpack_publish(run)
        number = int(data)
        publisher, to = self.messages[number]
        machine = next((one for one in self.machines if one.node is link.node), None)
        if machine is not None and link.remote is not None:
            publisher.machine.arrived += 1
            etid = machine.member.state.local.get(tid, tid)
            for one in machine.clients:
                if not one.gone and (to in one.wants if isinstance(to, bytes) else one.etid == etid):
                    one.due.append(number)
        return deliver(run)

    # ---- names of their own

    def on_number(self, machine: int, topic: int, number: int) -> None:
        """Creates a topic with a number that the application has chosen."""
        table = pick(self.machines, machine).hub
        if pick(TOPICS, topic) not in table.topic_table.by_name:
            table.create(pick(TOPICS, topic), 100 + number % 3 * 10 + topic)

    # ---- the network

    def on_deliver(self, steps: int) -> None:
        for _ in range(steps):
            if not self.network.step():
                return

    def on_time(self, tenths: int) -> None:
        self.network.now_s += tenths / 10
        for node in self.network.nodes:
            node.check_links()

    def on_dial(self, one: int, other: int) -> None:
        self.dial(pick(self.machines, one), pick(self.machines, other))

    def dial(self, one: Machine, other: Machine) -> None:
        pair = frozenset((one, other))
        if one is not other and pair not in self.apart:
            if pair in self.dialed:
                one.harmed = other.harmed = True  # one of two links between them ends
            self.dialed.add(pair)
            for link in self.network.connect(one.node, other.node):
                link.deliver = partial(self.arrives, link, link.deliver)  # type: ignore[method-assign]

    def on_cut(self, one: int, other: int) -> None:
        for link in self.links(one, other):
            self.network.break_link(link)

    def on_slow(self, one: int, other: int) -> None:
        for link in self.links(one, other):
            link.lose("slow", Drop.LINK_SLOW)

    def on_swallow(self, one: int, other: int) -> None:
        for link in self.links(one, other):
            self.network.swallow(link)

    def links(self, one: int, other: int) -> list[Link]:
        first, second = pick(self.machines, one), pick(self.machines, other)
        link = first.node.links.get(second.node.id)
        if link is None:
            return []
        first.harmed = second.harmed = True
        return [link]

    def on_part(self, one: int, other: int) -> None:
        self.apart.add(frozenset((pick(self.machines, one), pick(self.machines, other))))
        self.on_cut(one, other)

    def on_heal(self) -> None:
        self.apart.clear()

    # ---- nodes

    def on_kill(self, machine: int) -> None:
        """kill -9; another one takes the place, with the same number where it is fixed."""
        dead = pick(self.machines, machine)
        dead.alive = False
        quietly = self.chance.random() < 0.3
        for link in list(dead.node.all_links):
            if quietly:
                self.network.swallow(link)
            else:
                self.network.break_link(link)
        for one in self.machines:
            one.harmed = True
        self.network.nodes.remove(dead.node)
        self.dead.append(dead)
        self.machines[self.machines.index(dead)] = Machine(self, dead.number, dead.counts_all)

    def on_quit(self, machine: int) -> None:
        """Leaves the cluster; the clients stay."""
        one = pick(self.machines, machine)
        if one.joined:
            self.harm_all()
            one.node.leave(one.member)

    def on_join(self, machine: int) -> None:
        one = pick(self.machines, machine)
        if not one.joined:
            one.join()

    def harm_all(self) -> None:
        for machine in self.machines:
            machine.harmed = True

    # ---- the verdict

    def judge(self) -> None:
        """Heal everything, and look whether all is as promised."""
        self.become_whole()
        self.look_at_tables()
        self.look_at_observers()
        self.look_at_ledger()
        self.last_round()
        self.look_at_ledger()
        self.look_at_losses()
        self.empty()

    def become_whole(self) -> None:
        self.apart.clear()
        for machine in self.machines:
            if not machine.joined:
                machine.join()
        for _ in range(SETTLE_ROUNDS):
            self.network.settle()
            self.network.pass_time(6.0)
            missing = list(self.unlinked())
            if not missing:
                self.network.settle()
                return
            for one, other in missing:
                self.dial(one, other)
        raise Fault(f"the nodes did not find each other: {[(a.node.number, b.node.number) for a, b in missing]}")

    def unlinked(self) -> Iterator[tuple[Machine, Machine]]:
        for one, other in permutations(self.machines, 2):
            if other.node.id not in one.node.links:
                yield one, other

    def look_at_tables(self) -> None:
        numbers = [one.node.number for one in self.machines]
        must(len(set(numbers)) == len(numbers), f"numbers of nodes: {numbers}")
        uids = [client.uid for client in self.clients]
        must(len(set(uids)) == len(uids), f"a uid at two nodes: {sorted(uids)}")
        for one in self.machines:
            others = [other for other in self.machines if other is not one]
            count = len(one.member.remotes)
            must(count == len(others), f"node {one.node.number} knows {count} others")
            must(
                one.member.state.bits.bit_count() == len(others),
                f"node {one.node.number} has bits {one.member.state.bits:b}",
            )
            known = sorted(phantom.uid for phantom in one.member.phantoms.values())
            there = sorted(client.uid for other in others for client in other.clients if not client.gone)
            must(known == there, f"clients of others: {known}, in truth {there}")
            self.look_at_interest(one, others)

    def look_at_interest(self, one: Machine, others: list[Machine]) -> None:
        for topic in TOPICS:
            wanted = one.member.interest.nodes(one.member.state.numbers.topic(topic)).bit_count()
            truth = sum(any(topic in client.wants and not client.gone for client in other.clients) for other in others)
            must(wanted == truth, f"{topic!r} is wanted by {wanted} at node {one.node.number}, in truth {truth}")

    def look_at_observers(self) -> None:
        for client in self.clients:
            changes = dict(client.changes)
            for topic in TOPICS:
                number = client.number(topic)
                if number in client.observes and number in changes:
                    counted = (one for one in self.clients if one.machine.counts_all or one.machine is client.machine)
                    truth = sum(topic in one.wants for one in counted)
                    must(changes[number] == truth, f"{client.uid!r} was told {changes[number]} of {topic!r}: {truth}")
            told_gone = [number for number, count in client.changes if not count]
            for other in client.observed_clients:
                if other.gone:
                    must(bool(told_gone), f"{client.uid!r} was not told that {other.uid!r} went")

    def look_at_ledger(self) -> None:
        for client in (one for machine in (*self.machines, *self.dead) for one in machine.clients):
            due = client.due[: len(client.got)] if client.gone else client.due
            must(client.got == due, f"{client.uid!r} at node {client.machine.node.number} got {client.got}, due {due}")
            self.look_at_order(client)

    def look_at_order(self, client: Subscriber) -> None:
        last: dict[Subscriber, int] = {}
        for number in client.got:
            publisher = self.messages[number][0]
            must(last.get(publisher, -1) < number, f"{client.uid!r} got {number} after {last.get(publisher)}")
            last[publisher] = number

    def last_round(self) -> None:
        """Now that everything is well, everything arrives."""
        before = {client: len(client.got) for client in self.clients}
        for publisher in self.clients:
            for topic in TOPICS:
                self.publish(publisher, topic)
            for other in self.clients:
                must(self.etid(publisher, other) is not None, f"{publisher.uid!r} does not know {other.uid!r}")
                self.direct(publisher, other)
        self.network.settle()
        count = len(self.clients)
        for client, had in before.items():
            must(len(client.got) - had == count * (len(client.wants) + 1), f"{client.uid!r} missed some of the last")

    def look_at_losses(self) -> None:
        for one in self.machines:
            lost = one.forwarded - one.arrived
            must(0 <= lost <= one.counted, f"node {one.node.number} counted {one.counted} of {lost} lost messages")
            must(one.harmed or not one.counted, f"node {one.node.number} counted {one.counted} though no link broke")

    def empty(self) -> None:
        """All clients go: nothing stays behind."""
        for client in self.clients:
            client.session.disconnect(CloseReason.PEER_CLOSED)
        self.network.settle()
        for one in self.machines:
            left = {
                "phantoms": one.member.phantoms,
                "interest": one.member.interest,
                "foreign": one.member.foreign,
                "stamps": one.member.clients.stamps,
                "holders": one.member.clients.holders,
                "recounted": one.member.counts.recounted,
            }
            must(not any(map(len, left.values())), f"left at node {one.node.number}: {left}")


def few_numbers(chance: Random, count: int) -> bytes:
    """Random bytes; of numbers of nodes so few that two draw the same."""
    return bytes((0, chance.randrange(1, 9))) if count == 2 else chance.randbytes(count)


def pick(of: Sequence[Any], number: int) -> Any:
    return of[number % len(of)]


def must(true: bool, what: str) -> None:
    if not true:
        raise Fault(what)


WEIGHTS = {
    "connect": (8, 2), "leave": (3, 1), "subscribe": (9, 2), "unsubscribe": (3, 2), "observe": (2, 2), "watch": (2, 2),
    "publish": (12, 3), "direct": (6, 2), "number": (1, 3), "deliver": (14, 1), "time": (2, 1), "dial": (8, 2),
    "cut": (2, 2), "slow": (1, 2), "swallow": (1, 2), "part": (1, 2), "heal": (1, 0), "kill": (1, 1), "quit": (0.5, 1),
    "join": (1, 1),
}  # fmt: skip
"""How often each action comes, and how many numbers it takes."""


def schedule(seed: int) -> list[Action]:
    """The actions of a seed: who meets whom is chance, and half of the schedules begin with a whole cluster."""
    chance = Random(seed ^ 0x5EED)
    names, weights = list(WEIGHTS), [weight for weight, _ in WEIGHTS.values()]
    begin: list[Action] = [("dial", one, other) for one in range(4) for other in range(one)]
    begin = [*begin, ("deliver", 200)] if chance.random() < 0.7 else []
    count = chance.randint(10, MAX_ACTIONS)
    chosen = chance.choices(names, weights, k=count)
    return begin + [(name, *(chance.randrange(64) for _ in range(WEIGHTS[name][1]))) for name in chosen]


def run(seed: int, actions: Iterable[Action] | None = None) -> World:
    """Work off a schedule; raises Fault, or whatever the code under test raises."""
    world = World(seed)
    for action in schedule(seed) if actions is None else actions:
        world.do(action)
    world.judge()
    return world


def fails(seed: int, actions: Iterable[Action], run: Callable[..., object] = run) -> str:
    """How a schedule fails; empty when it does not."""
    try:
        run(seed, actions)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def smallest(seed: int, actions: list[Action], run: Callable[..., object] = run) -> list[Action]:
    """The actions of a schedule that fails, without those that it fails without, too."""
    at = 0
    while at < len(actions):
        fewer = actions[:at] + actions[at + 1 :]
        if fails(seed, fewer, run):
            actions = fewer
        else:
            at += 1
    return actions

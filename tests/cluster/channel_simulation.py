"""Channels of applications under a seeded schedule: they are opened, used and closed, and their functions wait, while
links delay, break, fall silent and heal, and nodes are killed. As `simulation`, which is about hubs.

    world = World(seed)
    for action in schedule(seed):
        world.do(action)
    world.judge()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import permutations
from random import Random

from smqrt.broker.deferred import Deferred
from smqrt.cluster import link_channels
from smqrt.cluster.node import Node
from smqrt.wire.smq import frames
from tests.cluster.engines import KEY
from tests.cluster.memory_links import MemoryNetwork
from tests.cluster.simulation import SETTLE_ROUNDS, Action, few_numbers, must, pick

NAMES = [b"a", b"b"]
SIZES = (4, 300, 60_000)
MAX_ACTIONS = 80


class Side:
    """A channel of one machine, from its opening to its end.

    Attributes:
        told: what its functions were told: `(node, up)`, or `(node, number of the message)`.
        arrived: the numbers of the messages that came.
        waits: what its functions answer while they are made to wait.
    """

    def __init__(self, machine: Machine, name: bytes) -> None:
        self.machine, self.name = machine, name
        self.told: list[tuple[int, bool | int]] = []
        self.arrived: list[int] = []
        self.waits: Deferred[None] | None = None
        self.channel = machine.node.open(name, self.on_status, self.on_data)

    def on_status(self, node: int, up: bool, why: str) -> Deferred[None] | None:
        must(not self.channel.closed, "a closed channel was told something")
        must(up != bool(why), f"{why!r} of a node that is {'up' if up else 'down'}")
        self.told.append((node, up))
        return self.waits

    def on_data(self, data: bytes, node: int) -> Deferred[None] | None:
        must(not self.channel.closed, "a closed channel was told something")
        self.arrived.append(int.from_bytes(data[:4], "big"))
        self.told.append((node, self.arrived[-1] + 2))  # no bool
        return self.waits

    def go_on(self) -> None:
        waits, self.waits = self.waits, None
        if waits is not None:
            waits.resolve()

    @property
    def waiting(self) -> int:
        """How many messages have come and wait for its function."""
        return sum(len(list(frames(event.batch[event.at :]))) for event in self.channel._events)


class Machine:
    """A node in one of its lives."""

    def __init__(self, world: World) -> None:
        network = world.network
        network.now_s += 0.001
        self.node = Node(
            KEY,
            random=partial(few_numbers, world.chance),
            clock_s=lambda: network.now_s,
            clock_ns=lambda: int(network.now_s * 1e9),
        )
        network.nodes.append(self.node)
        self.open: dict[bytes, Side] = {}


class World:
    """Machines with channels, and what must be true of them."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.network = MemoryNetwork(self.chance)
        self.machines = [Machine(self) for _ in range(self.chance.randint(2, 4))]
        self.sides: list[Side] = []
        self.senders: list[Side] = []
        """By the number of a message."""
        self.nodes = [machine.node for machine in self.machines]
        """Also those that have died."""
        self._do: dict[str, Callable[..., None]] = {
            name.removeprefix("on_"): getattr(self, name) for name in dir(self) if name.startswith("on_")
        }

    def do(self, action: Action) -> None:
        name, *numbers = action
        self.network.now_s += 0.0002
        self._do[name](*numbers)
        if self.chance.random() < 0.7:
            self.network.flush()

    # ---- channels

    @property
    def open_sides(self) -> list[Side]:
        return [side for machine in self.machines for side in machine.open.values()]

    def on_open(self, machine: int, name: int) -> None:
        of, called = pick(self.machines, machine), pick(NAMES, name)
        if called not in of.open:
            side = of.open[called] = Side(of, called)
            self.sides.append(side)

    def on_close(self, side: int) -> None:
        if self.open_sides:
            one = pick(self.open_sides, side)
            del one.machine.open[one.name]
            one.channel.close()

    def on_send(self, side: int, times: int, size: int) -> None:
        if self.open_sides:
            one = pick(self.open_sides, side)
            for _ in range(1 + times % 5):
                self.send(one, pick(SIZES, size))

    def send(self, side: Side, size: int) -> None:
        number = len(self.senders)
        self.senders.append(side)
        nodes = list(side.channel.nodes())
        to = self.chance.choice([None, *nodes])
        sent = side.channel.send(number.to_bytes(4, "big") + bytes(size - 4), to)
        must(sum(sent) == (len(nodes) if to is None else 1), f"{sent} of a message to {to} among {nodes}")

    def on_wait(self, side: int) -> None:
        """The functions of a side answer later from now on."""
        if self.open_sides:
            one = pick(self.open_sides, side)
            one.waits = one.waits or Deferred()

    def on_answer(self, side: int) -> None:
        if self.open_sides:
            pick(self.open_sides, side).go_on()

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
        first, second = pick(self.machines, one), pick(self.machines, other)
        if first is not second:
            self.network.connect(first.node, second.node)

    def on_cut(self, one: int, other: int) -> None:
        self.harm(one, other, self.network.break_link)

    def on_swallow(self, one: int, other: int) -> None:
        self.harm(one, other, self.network.swallow)

    def harm(self, one: int, other: int, how: Callable[..., None]) -> None:
        first, second = pick(self.machines, one), pick(self.machines, other)
        broken = first.node.links.get(second.node.id)
        if broken is not None:
            how(broken)

    def on_kill(self, machine: int) -> None:
        dead = pick(self.machines, machine)
        for broken in list(dead.node.all_links):
            self.network.break_link(broken)
        self.network.nodes.remove(dead.node)
        self.machines[self.machines.index(dead)] = again = Machine(self)
        self.nodes.append(again.node)

    # ---- the verdict

    def judge(self) -> None:
        """Heal everything, open everything, and look whether all is as promised."""
        self.become_whole()
        self.look_at_sides()
        self.look_at_losses()
        self.last_round()
        self.look_at_sides()
        self.look_at_rooms()

    def become_whole(self) -> None:
        for machine in range(len(self.machines)):
            for name in range(len(NAMES)):
                self.on_open(machine, name)
        for _ in range(SETTLE_ROUNDS):
            for side in self.open_sides:
                side.go_on()
            self.network.settle()
            self.network.pass_time(6.0)
            missing = list(self.unlinked())
            if not missing:
                self.network.settle()
                return
            for one, other in missing:
                self.network.connect(one.node, other.node)
        must(False, "the nodes did not find each other")

    def unlinked(self) -> Iterator[tuple[Machine, Machine]]:
        for one, other in permutations(self.machines, 2):
            if other.node.id not in one.node.links:
                yield one, other

    def look_at_sides(self) -> None:
        for side in self.sides:
            self.look_at_statuses(side)
            must(len(set(side.arrived)) == len(side.arrived), f"a message came twice: {side.arrived}")
            for sender in self.sides:
                of_one = [number for number in side.arrived if self.senders[number] is sender]
                must(of_one == sorted(of_one), f"messages of a sender came as {of_one}")
                must(not of_one or sender.name == side.name, f"a message of {sender.name!r} came to {side.name!r}")
        for side in self.open_sides:
            others = sorted(one.node.number for one in self.machines if one is not side.machine)
            must(sorted(side.channel.nodes()) == others, f"{side.name!r} knows {side.channel.nodes()}, not {others}")

    def look_at_statuses(self, side: Side) -> None:
        up: set[int] = set()
        for node, what in side.told:
            if what is True:
                must(node not in up, f"node {node} was told to be up twice: {side.told}")
                up.add(node)
            else:
                must(node in up, f"{what} of node {node}, which is not up: {side.told}")
                if what is False:
                    up.discard(node)
        if side in self.open_sides:
            must(up == set(side.channel.nodes()), f"{up} were told to be up, of {side.channel.nodes()}")

    def look_at_losses(self) -> None:
        sent = sum(side.channel.sent for side in self.sides)
        arrived = sum(len(side.arrived) for side in self.sides)
        lost = sum(side.channel.lost + side.channel.dropped + side.waiting for side in self.sides)
        must(arrived == sum(side.channel.received for side in self.sides), "received is what arrived")
        must(0 <= sent - arrived <= lost, f"{sent} sent, {arrived} arrived, {lost} counted as lost or dropped")
        is_harmed = any(side.channel.closed for side in self.sides) or any(node.links_lost for node in self.nodes)
        must(is_harmed or not lost, f"{lost} counted as lost, though no link broke")

    def last_round(self) -> None:
        before = {side: len(side.arrived) for side in self.open_sides}
        for side in self.open_sides:
            number = len(self.senders)
            self.senders.append(side)
            sent = side.channel.send(number.to_bytes(4, "big"))
            must(sent == (len(self.machines) - 1, 0), f"{sent} of the last message of {side.name!r}")
        self.network.settle()
        for side, had in before.items():
            must(len(side.arrived) - had == len(self.machines) - 1, f"{side.name!r} missed some of the last")

    def look_at_rooms(self) -> None:
        """Nothing is held any more, at channels and links."""
        for machine in self.machines:
            for one in machine.node.links.values():
                must(not one.unhandled_bytes, f"{one.unhandled_bytes} bytes of a link are held")
                must(one.channels.is_settled, "channels are half open")
                must(len(one.channels) == one.channels.joined == len(NAMES), f"{len(one.channels)} channels")
            for side in machine.open.values():
                for peer in side.channel._peers.values():
                    held = peer._unhandled_bytes, peer._waiting_bytes, peer._handled_bytes
                    must(held == (0, 0, 0), f"bytes held of a peer: {held}")


WEIGHTS = {
    "open": (7, 2), "close": (3, 1), "send": (14, 3), "wait": (2, 1), "answer": (3, 1), "deliver": (14, 1),
    "time": (2, 1), "dial": (6, 2), "cut": (2, 2), "swallow": (1, 2), "kill": (1, 1),
}  # fmt: skip
"""How often each action comes, and how many numbers it takes."""


def schedule(seed: int) -> list[Action]:
    """The actions of a seed; half of the schedules begin with links and channels everywhere."""
    chance = Random(seed ^ 0xC4A7)
    names, weights = list(WEIGHTS), [weight for weight, _ in WEIGHTS.values()]
    begin: list[Action] = []
    if chance.random() < 0.6:
        begin = [("dial", one, other) for one in range(4) for other in range(one)]
        begin += [("open", machine, name) for machine in range(4) for name in range(2)]
        begin.append(("deliver", 300))
    chosen = chance.choices(names, weights, k=chance.randint(10, MAX_ACTIONS))
    return begin + [(name, *(chance.randrange(64) for _ in range(WEIGHTS[name][1]))) for name in chosen]


def run(seed: int, actions: Iterable[Action] | None = None) -> World:
    """Work off a schedule; raises Fault, or whatever the code under test raises."""
    numbers = link_channels.MAX_CHANNEL
    link_channels.MAX_CHANNEL = len(NAMES) + seed % 3  # so few that numbers come again at once
    try:
        world = World(seed)
        for action in schedule(seed) if actions is None else actions:
            world.do(action)
        world.judge()
        return world
    finally:
        link_channels.MAX_CHANNEL = numbers

"""The engines of clusters behind one interface, so that one suite of tests runs on each.

A node has a hub and clients without sockets (`tests.broker.memory_clients`); between nodes are the real links.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import gevent

from smqrt.broker.broker import Broker
from smqrt.broker.sessions import Session
from smqrt.broker.state import Hooks
from smqrt.cluster.clustered_broker import ClusteredBroker
from smqrt.cluster.engines.mesh import Mesh
from smqrt.cluster.engines.nats_connections import NatsBackplane
from smqrt.cluster.node import QUEUE_BYTES
from smqrt.cluster.node import Node as ClusterNode
from smqrt.smq.gevent_broker import GeventBroker, HubOptions
from smqrt.wire import smq
from smqrt.wire.smq import Type
from tests.broker.memory_clients import Ear
from tests.cluster.cut import Cable
from tests.cluster.memory_links import MemoryNetwork
from tests.cluster.nats.server import NatsServer
from tests.support.waiting import PATIENCE_S, wait_until

KEY = b"k" * 32
MARK_S = 0.5
"""So long a mark is waited for before another one is sent."""
_uids = itertools.count(100_000)


class Client:
    """A client of a node.

    Attributes:
        session: its session; etid: its ETID; uid: its uid.
    """

    def __init__(self, broker: Broker, uid: bytes | None = None, info: bytes = b"") -> None:
        self.ear = Ear()
        self.uid = uid or b"client-%d" % next(_uids)
        self.session = Session(broker, self.ear, 5)
        self.session.control(smq.connect(self.uid, b"", info))

    @property
    def etid(self) -> int:
        return self.session.etid

    def subscribe(self, name: bytes) -> None:
        self.session.control(smq.with_name(Type.SUBSCRIBE, name))

    def unsubscribe(self, name: bytes) -> None:
        self.session.control(smq.with_id(Type.UNSUBSCRIBE, self.number(name)))

    def number(self, name: bytes) -> int:
        """The number of a topic at the client's node."""
        return self.session.broker.topic_table.named(name).id

    def publish(self, to: bytes | int, data: bytes, stid: int = 0) -> None:
        number = self.number(to) if isinstance(to, bytes) else to
        self.session.publish(smq.publish_frame(number, self.etid, stid, data))

    def observe(self, number: int) -> None:
        self.session.control(smq.with_id(Type.OBSERVE, number))

    @property
    def messages(self) -> list[tuple[int, int, int, bytes]]:
        """`(tid, ptid, stid, data)` of what it got."""
        return [smq.unpack_publish(smq.frame(one)) for one in self.ear.got if one[0] == Type.PUBLISH]

    @property
    def data(self) -> list[bytes]:
        return [data for _, _, _, data in self.messages]

    @property
    def changes(self) -> list[tuple[int, int]]:
        """`(tid, subscribers)` of each Change."""
        found = [one for one in self.ear.got if one[0] == Type.CHANGE]
        return [(int.from_bytes(one[1:5], "big"), int.from_bytes(one[5:9], "big")) for one in found]

    @property
    def count(self) -> int | None:
        """What it was told last of subscribers."""
        return self.changes[-1][1] if self.changes else None

    @property
    def goodbye(self) -> bytes | None:
        """The text of Disconnect, when it got one."""
        return next((one[1:] for one in self.ear.got if one[0] == Type.DISCONNECT), None)


class Place:
    """A node of the test: a process, as far as the engine knows.

    Attributes:
        hub: its hub; member: that hub's part in the cluster.
    """

    def __init__(self, engine: Engine, name: str, hub: Broker, member: ClusteredBroker) -> None:
        self._engine, self.name, self.hub, self.member = engine, name, hub, member

    def client(self, uid: bytes | None = None, info: bytes = b"") -> Client:
        return Client(self.hub, uid, info)

    def interest(self) -> set[bytes]:
        """The names of its own topics that another node wants."""
        interest, table = self.member.interest, self.hub.topic_table
        assert table.numbers
        return {name for name in table.by_name if interest.nodes(table.numbers.topic(name))}

    def wanted_by(self, name: bytes) -> int:
        """How many other nodes want a topic."""
        numbers = self.hub.topic_table.numbers
        assert numbers
        return self.member.interest.nodes(numbers.topic(name)).bit_count()

    def phantoms(self) -> set[bytes]:
        """The uids of the clients of other nodes."""
        return {one.uid for one in self.member.phantoms.values()}

    def received(self, topic: bytes) -> list[bytes]:
        """What its server gets from now on of a topic."""
        got: list[bytes] = []
        self.hub.subscribe(topic, lambda data, ptid, tid, stid: got.append(data))
        return got


class Engine:
    """One kind of links; see `ENGINES`."""

    name: str

    def place(self, name: str, *, key: bytes = KEY, number: int = 0, hub: str = "hub", **options: Any) -> Place:
        """A node that is connected to all others."""
        raise NotImplementedError

    def node_of(self, place: Place) -> ClusterNode:
        """The node of a place."""
        raise NotImplementedError

    def until(self, condition: Callable[[], Any], what: object = "") -> None:
        """Let the nodes work until a condition holds."""
        raise NotImplementedError

    def settle(self) -> None:
        """Let everything that is on its way arrive."""
        raise NotImplementedError

    def wait_acknowledged(self, place: Place) -> None:
        """Wait until others have acknowledged all messages that a node has sent."""
        self.until(lambda: not any(link.unacked for link in self.node_of(place).links.values()), "acknowledgements")

    def is_settled(self, place: Place) -> bool:
        """Whether a node has no links but those that are up."""
        node = self.node_of(place)
        return node.all_links == set(node.links.values())

    def cut(self, one: Place, other: Place) -> None:
        """Break the link between two nodes; it is not made again before `heal`."""
        raise NotImplementedError

    def heal(self, one: Place, other: Place) -> None:
        """Let two nodes find each other again."""
        raise NotImplementedError

    def kill(self, place: Place) -> None:
        """End a node without a word."""
        raise NotImplementedError

    def stop(self, place: Place) -> None:
        """End a node in order."""
        self.node_of(place).close()

    def silence(self, one: Place, other: Place) -> None:
        """Nothing passes between two nodes any more, and neither is told."""
        raise NotImplementedError

    def wait_silence(self) -> None:
        """Wait until silence has been noticed."""

    def meet(self, one: Place, other: Place) -> None:
        """Let both nodes connect to each other, at the same moment where they don't do so by themselves."""
        raise NotImplementedError

    def meet_itself(self, place: Place) -> None:
        """Let a node find its own address."""
        raise NotImplementedError

    def close(self) -> None:
        """End all nodes."""

    def joined(self, *places: Place) -> None:
        """Wait until each of these has said all that it has to all others."""
        for place in places:
            self.until(lambda place=place: is_joined(place, len(places) - 1), f"{place.name} joins")


def pair(engine: Engine, **options: Any) -> tuple[Place, Place]:
    """Two nodes that know each other."""
    one, other = engine.place("one", **options), engine.place("other", **options)
    engine.joined(one, other)
    return one, other


def is_joined(place: Place, others: int) -> bool:
    return len(place.member.remotes) == others and all(one.synced for one in place.member.remotes)


class MemoryEngine(Engine):
    """Links in memory."""

    name = "memory"

    def __init__(self, path: Path) -> None:
        self.network = MemoryNetwork(Random(1))
        self._places: dict[Place, ClusterNode] = {}
        self._apart: set[frozenset[Place]] = set()
        self._random = Random(2)

    def place(self, name: str, *, key: bytes = KEY, number: int = 0, hub: str = "hub", **options: Any) -> Place:
        options.pop("silence_s", None)  # time passes when it is told to
        node = self.network.node(key, number, queue_bytes=options.pop("queue_bytes", QUEUE_BYTES))
        node.versions = options.pop("versions", node.versions)
        node.abilities = options.pop("abilities", node.abilities)
        prepare = options.pop("prepare", None)
        broker = Broker(
            options.pop("hooks", None) or Hooks(),
            random_u32=lambda: self._random.getrandbits(32),
            encode=bytes,
            clock=lambda: self.network.now_s,
            **options,
        )
        if prepare:
            prepare(broker)
        member = node.join(broker, hub)
        place = Place(self, name, broker, member)
        for other in self._places.values():
            self.network.connect(node, other)
        self._places[place] = node
        return place

    def node_of(self, place: Place) -> ClusterNode:
        return self._places[place]

    def until(self, condition: Callable[[], Any], what: object = "") -> None:
        self.network.settle(lambda: bool(condition()))
        self._reconnect()
        self.network.settle(lambda: bool(condition()))
        assert condition(), what

    def settle(self) -> None:
        self.network.settle()

    def _reconnect(self) -> None:
        """What dialers do: a link that was lost is made again."""
        for one, other in itertools.combinations(self._places.items(), 2):
            apart = frozenset((one[0], other[0])) in self._apart
            if not apart and not one[1].closed and not other[1].closed and other[1].id not in one[1].links:
                self.network.connect(one[1], other[1])

    def _links(self, one: Place, other: Place) -> list[Any]:
        found = self._places[one].links.get(self._places[other].id)
        return [found] if found else []

    def cut(self, one: Place, other: Place) -> None:
        self._apart.add(frozenset((one, other)))
        for link in self._links(one, other):
            self.network.break_link(link)
        self.network.settle()

    def heal(self, one: Place, other: Place) -> None:
        self._apart.discard(frozenset((one, other)))
        self._reconnect()

    def kill(self, place: Place) -> None:
        node = self._places.pop(place)
        for link in list(node.all_links):
            self.network.break_link(link)
        self.network.nodes.remove(node)

    def silence(self, one: Place, other: Place) -> None:
        self._apart.add(frozenset((one, other)))
        for link in self._links(one, other):
            self.network.swallow(link)

    def wait_silence(self) -> None:
        self.network.pass_time(8.0)

    def wait_acknowledged(self, place: Place) -> None:
        self.network.pass_time(2.0)
        super().wait_acknowledged(place)

    def meet(self, one: Place, other: Place) -> None:
        self.network.connect(self._places[one], self._places[other])
        self.network.connect(self._places[other], self._places[one])
        self.network.settle()

    def meet_itself(self, place: Place) -> None:
        self.network.connect(self._places[place], self._places[place])
        self.network.settle()


class MeshEngine(Engine):
    """Links over real sockets, each through a cable that can be cut."""

    silence_s = 0.8

    def __init__(self, path: Path) -> None:
        self._path = path
        self._meshes: dict[Place, Mesh] = {}
        self._ports: dict[Place, int] = {}
        self._cables: dict[frozenset[Place], Cable] = {}

    def place(self, name: str, *, key: bytes = KEY, number: int = 0, hub: str = "hub", **options: Any) -> Place:
        silence_s, queue_bytes = options.pop("silence_s", self.silence_s), options.pop("queue_bytes", QUEUE_BYTES)
        mesh = Mesh(key, number, ping_s=0.1, silence_s=silence_s, queue_bytes=queue_bytes)
        mesh.node.versions = options.pop("versions", mesh.node.versions)
        mesh.node.abilities = options.pop("abilities", mesh.node.abilities)
        prepare, hooks = options.pop("prepare", None), options.pop("hooks", None)
        broker = GeventBroker(hooks or Hooks(), HubOptions(**options))
        if prepare:
            prepare(broker)
        member = mesh.join(broker, hub)
        place = Place(self, name, broker, member)
        self._connect(place, mesh)
        self._meshes[place] = mesh
        return place

    def _connect(self, place: Place, mesh: Mesh) -> None:
        self._ports[place] = mesh.listen("127.0.0.1", 0).address[1]
        for other in self._meshes:
            cable = self._cables[frozenset((place, other))] = Cable(self._ports[other])
            mesh.dial("127.0.0.1", cable.port)

    def node_of(self, place: Place) -> ClusterNode:
        return self._meshes[place].node

    def until(self, condition: Callable[[], Any], what: object = "") -> None:
        wait_until(condition, what)

    def settle(self) -> None:
        """A message to each node and back goes behind all that was sent before."""
        for place in self._meshes:
            for remote in list(place.member.remotes):
                mark = remote.number
                other = next(one for one in self._meshes if one.member.number == mark)
                self._echo(place, other)

    def _echo(self, place: Place, other: Place) -> None:
        got: list[bytes] = []
        name = b"settle-%d" % next(_uids)
        other.hub.subscribe(name, lambda data, ptid, tid, stid: got.append(data))
        wait_until(lambda: name in place.interest() or place.hub.create(name) is None)
        deadline_s = time.monotonic() + PATIENCE_S
        while not got and time.monotonic() < deadline_s:  # a link that another one replaces loses what it carries
            place.hub.publish(b"mark", name)
            with contextlib.suppress(AssertionError):
                wait_until(lambda: got, patience_s=MARK_S)
        assert got, "a mark to arrive"
        other.hub.unsubscribe(name)

    def wait_silence(self) -> None:
        gevent.sleep(1.5 * self.silence_s)

    def cut(self, one: Place, other: Place) -> None:
        self._cables[frozenset((one, other))].cut()

    def heal(self, one: Place, other: Place) -> None:
        self._cables[frozenset((one, other))].mend()

    def meet(self, one: Place, other: Place) -> None:
        dialers = [self._meshes[a].dial("127.0.0.1", self._ports[b]) for a, b in ((one, other), (other, one))]
        wait_until(lambda: all(dialer.up for dialer in dialers), "both have connected")

    def meet_itself(self, place: Place) -> None:
        self._meshes[place].dial("127.0.0.1", self._ports[place])

    def stop(self, place: Place) -> None:
        self._meshes[place].close()

    def kill(self, place: Place) -> None:
        for pair, cable in self._cables.items():
            if place in pair:
                cable.cut()
        self._meshes.pop(place).close()

    def silence(self, one: Place, other: Place) -> None:
        self._cables[frozenset((one, other))].hold()

    def close(self) -> None:
        for place, mesh in self._meshes.items():
            mesh.close()
            place.hub.close()
        for cable in self._cables.values():
            cable.close()


class TcpEngine(MeshEngine):
    """Links over TCP."""

    name = "tcp"


class UnixEngine(MeshEngine):
    """Links over Unix sockets, as workers have them. Each node has a folder of its own, where the cables to those that
    came before are what it finds.
    """

    name = "unix"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._folders: dict[Place, Path] = {}

    def _connect(self, place: Place, mesh: Mesh) -> None:
        folder = Path(tempfile.mkdtemp(prefix="smqrt-"))  # a short path: those of sockets have a limit
        self._folders[place] = folder
        for other in self._meshes:
            (socket,) = self._folders[other].glob(f"*{self.node_of(other).id.hex()[:8]}.sock")
            at = folder / f"cable-{other.name}.sock"
            self._cables[frozenset((place, other))] = Cable(socket, at)
        mesh.share_directory(folder)

    def meet(self, one: Place, other: Place) -> None:
        for here, there in ((one, other), (other, one)):
            self._lay(here, there)

    def meet_itself(self, place: Place) -> None:
        self._lay(place, place)

    def _lay(self, here: Place, there: Place) -> None:
        """Another way to a node, by a name of its own."""
        (socket,) = self._folders[there].glob(f"*{self.node_of(there).id.hex()[:8]}.sock")
        (self._folders[here] / f"to-{there.name}.sock").symlink_to(socket)

    def close(self) -> None:
        super().close()
        for folder in self._folders.values():
            shutil.rmtree(folder)


class NatsEngine(MeshEngine):
    """Links through NATS; a cable leads from each node to the server."""

    name = "nats"

    def __init__(self, path: Path, settings: str = "") -> None:
        super().__init__(path)
        self._server = NatsServer(path, settings)
        self._backplanes: dict[Place, NatsBackplane] = {}

    def _connect(self, place: Place, mesh: Mesh) -> None:
        cable = self._cables[frozenset((place,))] = Cable(self._server.port)
        self._backplanes[place] = mesh.link_through_nats(
            f"nats://127.0.0.1:{cable.port}", hello_s=0.2, longest_reconnect_s=0.3
        )

    def cut(self, one: Place, other: Place) -> None:
        self._cables[frozenset((other,))].cut()

    def heal(self, one: Place, other: Place) -> None:
        self._cables[frozenset((other,))].mend()

    def silence(self, one: Place, other: Place) -> None:
        self._cables[frozenset((other,))].hold()

    def meet(self, one: Place, other: Place) -> None:
        """Each says at the same moment that it is there, and again."""
        for place in (one, other, one, other):
            self._backplanes[place].send_hello()

    def meet_itself(self, place: Place) -> None:
        """Its own words come back to it."""
        backplane = self._backplanes[place]
        backplane._on_hello(b"", backplane.hello(), b"", b"")

    def close(self) -> None:
        super().close()
        self._server.stop()


ENGINES: dict[str, Callable[[Path], Engine]] = {
    "memory": MemoryEngine,
    "tcp": TcpEngine,
    "unix": UnixEngine,
    "nats": NatsEngine,
}


@contextmanager
def opened(name: str, path: Path) -> Iterator[Engine]:
    """An engine, closed in the end."""
    engine = ENGINES[name](path)
    try:
        yield engine
    finally:
        engine.close()

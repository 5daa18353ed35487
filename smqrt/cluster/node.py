"""A process in clusters: its number, its hubs, and its links to other nodes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from hashlib import blake2b

from smqrt.broker.broker import Broker
from smqrt.cluster.channel import AppChannel, OnData, OnStatus
from smqrt.cluster.clustered_broker import ClusteredBroker
from smqrt.cluster.link import ACK_BYTES, MAX_NAME_BYTES, Carried, Link, LinkState, Transport, UnauthenticatedLinks
from smqrt.errors import ArgumentError, ClosedError
from smqrt.settings.limit_register import Bucket, LineLimit
from smqrt.wire.link_packets import (
    ID_BYTES,
    OLDEST_VERSION,
    PRESSURE,
    SIBLINGS,
    STAMPS,
    SUCCESSION,
    VERSION,
    Hello,
    Refusal,
    Siblings,
)
from smqrt.wire.smq import MAX_NODE

# ---- The processes of one server, as links tell them to other nodes: who has found one of them knows all.

NOBODY = bytes(ID_BYTES)
"""Instead of the id of a process that is not linked at the moment."""


class OwnServer:
    """The server that a node is a process of.

    Args:
        node_id: of the node.
        epoch: when it started, ns since 1970.

    Attributes:
        id: 16 bytes that its processes share; a node that was not told has them alone.
        own: which of them the node is, from 0.
        ports: at which each takes links; 0 for none, or when that is not known yet.
    """

    def __init__(self, node_id: bytes, epoch: int) -> None:
        self._node_id = node_id
        self.id = blake2b(node_id + epoch.to_bytes(8, "big"), digest_size=ID_BYTES, person=b"smqrt process").digest()
        self.own = 0
        self.ports = [0]

    def take_place(self, secret: bytes, own: int, ports: Iterable[int]) -> None:
        """Be one of several: they share the secret, and each has its number among them."""
        self.id = blake2b(secret, digest_size=ID_BYTES, person=b"smqrt server").digest()
        self.own, self.ports = own, list(ports)

    @property
    def port(self) -> int:
        """At which this process takes links; 0 for none."""
        return self.ports[self.own]

    @port.setter
    def port(self, port: int) -> None:
        self.ports[self.own] = port

    def has(self, link: Link) -> bool:
        """Whether a link goes to another process of this server."""
        return link.siblings is not None and link.siblings.server == self.id

    def siblings(self, links: Iterable[Link]) -> Siblings:
        """What other nodes are told; `links` are those that are up."""
        places = [(NOBODY, port) for port in self.ports]
        places[self.own] = self._node_id, self.port
        for index, place in merged([one for one in links if self.has(one)]).items():
            if index < len(places) and index != self.own:
                places[index] = place[0], place[1] or places[index][1]
        return Siblings(self.id, self.own, tuple(places))


def merged(links: Iterable[Link]) -> dict[int, tuple[bytes, int]]:
    """Ids and ports of the processes of one server by their numbers, as some of them say it: each knows itself best,
    and of two with one number the later is there.
    """
    known = [(one, one.siblings) for one in sorted(links, key=_epoch) if one.siblings is not None]
    found: dict[int, tuple[bytes, int]] = {}
    for _, siblings in known:
        found.update((index, place) for index, place in enumerate(siblings.places) if place[0] != NOBODY)
    for _, siblings in known:
        found[siblings.own] = siblings.places[siblings.own]
        for index, place in enumerate(siblings.places):
            found.setdefault(index, place)
    return found


def _epoch(link: Link) -> int:
    return link.peer.epoch if link.peer is not None else 0


log = logging.getLogger("smqrt")

PING_S = 1.0
SILENCE_S = 5.0
QUEUE_BYTES = 16 << 20
"""What may wait for one node."""
IN_FLIGHT_BYTES = 4 * ACK_BYTES
"""What may be on the way to it besides, at least: an answer comes for each quarter of it."""
RENUMBERINGS_PER_S, RENUMBERINGS_AT_ONCE = 0.1, 20
"""How often others may ask for another number: all links begin anew with it."""
MAX_CHANNELS, OPENS_PER_S = 400, 4.0
"""Of the applications of a node, and how often they may open more. So they close channels less often than another node
bears (`link.CLOSES_PER_S`).
"""
MAX_LOST = 1024
"""Of so many nodes it is known that they were lost, to say so when they are back."""


class Node:
    """One node: it agrees with the others on its number, and keeps one link to each.

    Args:
        key: made of the password, see `smqrt.wire.link_packets.key_of`.
        random: gives random bytes.
        clock_s: monotonic seconds.
        clock_ns: the time, in ns since 1970.
        number: a fixed number of the node, 0 to draw one.
        versions: the oldest and the newest version of the link that it speaks.
        queue_bytes: what may wait for one other node; as much again, and `IN_FLIGHT_BYTES` at least, may be on its way.
        predecessors: ids and epochs of nodes whose clients will come here with their ETIDs: a link to one of them would
            say that it has them.

    Attributes:
        abilities: what it says it can do beyond what every node can.
        id: 16 bytes; of a fixed number, the same after each start.
        epoch: when it started, ns since 1970.
        server: of which it is a process.
        has_heard: whether other nodes have said something of their servers that nobody has looked at.
        members: its hubs, by the name of their cluster.
        channels: those that its applications have opened, by name.
        links: those that are up, by the id of the other node.
        all_links: also those whose handshake is under way.
        strangers: those of them that came from outside, and whose other side has not proved the password.
        queue_bytes, unacked_bytes: what may wait for a node; and what may wait for it or be on its way to it.
        links_lost: how many that were up have ended.
        refused: how many ended by each kind of refusal, of this side or the other.
        on_round_trip: called for each ping of a link: with the seconds until its answer; with None when that has not
            come in time, or the link has ended before.
        on_log: called with what happens to links, and whether somebody should look after that.
    """

    def __init__(
        self,
        key: bytes,
        *,
        random: Callable[[int], bytes],
        clock_s: Callable[[], float],
        clock_ns: Callable[[], int],
        number: int = 0,
        versions: tuple[int, int] = (OLDEST_VERSION, VERSION),
        queue_bytes: int = QUEUE_BYTES,
        predecessors: frozenset[tuple[bytes, int]] = frozenset(),
    ) -> None:
        if not 0 <= number <= MAX_NODE:
            raise ArgumentError(f"node: {number}; a node's number is 1 to {MAX_NODE}, 0 to draw one")
        self.key, self.random, self.clock_s, self._clock_ns = key, random, clock_s, clock_ns
        self.abilities: tuple[bytes, ...] = (PRESSURE, STAMPS, SIBLINGS, SUCCESSION)
        self.versions, self.epoch, self.predecessors = versions, clock_ns(), predecessors
        self.is_fixed = bool(number)
        self.number = number or self._draw(())
        fixed_id = blake2b(number.to_bytes(2, "big"), key=key, digest_size=ID_BYTES).digest()
        self.id = fixed_id if number else random(ID_BYTES)
        self.server, self.has_heard = OwnServer(self.id, self.epoch), False
        self.members: dict[str, ClusteredBroker] = {}
        self.channels: dict[bytes, AppChannel] = {}
        self.links: dict[bytes, Link] = {}
        self.all_links: set[Link] = set()
        self.strangers = UnauthenticatedLinks()
        self.queue_bytes, self.unacked_bytes = queue_bytes, queue_bytes + max(queue_bytes, IN_FLIGHT_BYTES)
        self._renumberings = Bucket(RENUMBERINGS_PER_S, RENUMBERINGS_AT_ONCE, clock_s())
        self.refused: Counter[int] = Counter()
        self.links_lost = 0
        self.closed = False
        self._complaints = LineLimit()
        self._lines: dict[tuple[str, int], LineLimit] = {}
        self._at: dict[bytes, str] = {}
        self._lost: dict[bytes, None] = {}
        self._replaced: Link | None = None
        self._opens = Bucket(OPENS_PER_S, MAX_CHANNELS, clock_s())
        self.on_round_trip: Callable[[Link, float | None], object] = lambda link, seconds: None
        self.on_log: Callable[[str, bool], object] = lambda text, is_urgent: None

    # ---- what links carry

    def carried(self) -> list[Carried]:
        """Hubs and channels of applications."""
        return [*self.members.values(), *self.channels.values()]

    def find(self, wire_name: bytes) -> Carried | None:
        """What has that name on links."""
        return next((one for one in self.carried() if one.wire_name == wire_name), None)

    def open(self, name: bytes, on_status: OnStatus, on_data: OnData) -> AppChannel:
        """Open a channel between the applications of nodes; see `AppChannel`.

        Raises:
            ArgumentError: the name is empty or too long, it is open already, or there are too many.
            ClosedError: the node has ended.
        """
        self.must_be_open()
        if not 1 <= len(name) <= MAX_NAME_BYTES:
            raise ArgumentError(f"name: {len(name)} bytes; the name of a channel has 1 to {MAX_NAME_BYTES}")
        shown = name.decode("utf-8", "replace")
        if name in self.channels:
            raise ArgumentError(f"name: the channel {shown!r} is open already; close it first, or take another name")
        if len(self.channels) >= MAX_CHANNELS:
            raise ArgumentError(f"name: {MAX_CHANNELS} channels are open already; close some before {shown!r}")
        if self._opens.fill(self.clock_s()) < 1:
            raise ArgumentError(f"name: channels are opened too often for {shown!r}; keep them open")
        self._opens.tokens -= 1
        channel = AppChannel(name, on_status, on_data, self._close_channel)
        self.channels[name] = channel
        for link in self.links.values():
            link.open(channel)
        return channel

    def _close_channel(self, channel: AppChannel, text: bytes) -> None:
        del self.channels[channel.name]
        for link in list(self.links.values()):
            link.close_channel(channel, text)

    def must_be_open(self) -> None:
        """Raise ClosedError when the node has ended."""
        if self.closed:
            raise ClosedError("the links to other nodes were shut down; make new ones")

    # ---- hubs

    def join(self, broker: Broker, name: str) -> ClusteredBroker:
        """Take a hub into the cluster `name`.

        Raises:
            ArgumentError: another hub of this node is in it, or it is no name.
            ClosedError: the node has ended.
        """
        self.must_be_open()
        _check_cluster(name)
        if name in self.members:
            raise ArgumentError(f"name: another hub of this node is in the cluster {name!r}; give each hub its own")
        names_key = blake2b(name.encode(), key=self.key, digest_size=32).digest()
        member = ClusteredBroker(broker, name, names_key, self.number, lambda: self._clock_ns() // 1_000_000)
        member.epoch = self.epoch
        member.leave = lambda: self.leave(member)
        member.suspend = lambda: self._suspend(member)
        member.resume = lambda: self._resume(member)
        self._resume(member)
        return member

    def _resume(self, member: ClusteredBroker) -> None:
        if self.members.get(member.name) is member:
            return
        self.members[member.name], member.events.is_off = member, False
        for link in self.links.values():
            link.open(member)

    def _suspend(self, member: ClusteredBroker, text: bytes = b"") -> None:
        del self.members[member.name]
        member.events.is_off = True
        for link in list(self.links.values()):
            link.close_channel(member, text)

    def leave(self, member: ClusteredBroker, text: bytes = b"") -> None:
        """Take a hub out of its cluster; it goes on alone."""
        if self.members.get(member.name) is member:
            self._suspend(member, text)
            member.detach()

    # ---- links

    def connected(self, transport: Transport, connects: bool, stranger: str | None = None) -> Link:
        """There is a connection to another node, which this one has made or has accepted.

        Args:
            stranger: the address of the remote side, see `UnauthenticatedLinks`; none for a node dialled here.
        """
        link = Link(self, transport, connects, self.clock_s())
        self.all_links.add(link)
        if stranger is not None:
            self.strangers.add(link, stranger)
        return link

    def ended(self, link: Link, code: int) -> None:
        """A link has ended."""
        self.all_links.discard(link)
        self.strangers.discard(link)
        self.refused[code] += bool(code)
        if link.peer is not None and self.links.get(link.peer.id) is link:
            del self.links[link.peer.id]
            self.links_lost += 1
            self._say_left(link, code)
            self._at.pop(link.peer.id, None)
            self.heard_of_siblings(link)
        if code not in (0, Refusal.DUPLICATE, Refusal.SELF, Refusal.CLOSING):
            self._complain(f"a link to another node: {link.why}")
        elif link.number:  # strangers don't get so far
            self.on_log(f"a link to another node has ended: {link.why}", False)

    def heard_of_siblings(self, link: Link) -> None:
        """Another node has said something of its server, or is lost: those of this one are told to all."""
        self.has_heard = True
        if self.server.has(link):
            for one in list(self.links.values()):
                one.say_siblings()

    def _say_left(self, link: Link, code: int) -> None:
        if self.closed or link is self._replaced:
            return
        if code == Refusal.CLOSING:
            self._say(logging.INFO, link, f"has left: {link.why}")
            return
        assert link.peer is not None
        self._lost[link.peer.id] = None
        if len(self._lost) > MAX_LOST:
            del self._lost[next(iter(self._lost))]
        self._say(logging.WARNING, link, f"is lost: {link.why}")

    def _say(self, level: int, link: Link, text: str) -> None:
        """Log what became of a node: for each node one line of a kind in a second."""
        key = text.partition(":")[0], link.number
        assert link.peer is not None
        if key not in self._lines and len(self._lines) >= MAX_LOST:
            self._lines.clear()
        if (others := self._lines.setdefault(key, LineLimit()).others()) is not None:
            log.log(level, "node %d at %s %s%s", link.number, self._at[link.peer.id], text, others)

    def _complain(self, text: str) -> None:
        """Strangers can cause it, too."""
        if (others := self._complaints.others()) is not None:
            log.warning("%s%s", text, others)
            self.on_log(text + others, True)

    def look(self, ping_s: float = PING_S, silence_s: float = SILENCE_S) -> None:
        """Ping, give up what is silent, and forget nodes that are lost for long."""
        now_s = self.clock_s()
        for link in list(self.all_links):
            link.look(now_s, ping_s, silence_s)
        for member in self.members.values():
            member.lost.look()
            member.moving.look()

    def close(self) -> None:
        """Leave all clusters, close all channels and end all links."""
        self.closed = True
        for channel in list(self.channels.values()):
            channel.close()
        for member in list(self.members.values()):
            self.leave(member)
        for link in list(self.all_links):
            link.refuse(Refusal.CLOSING, "that node is being stopped")

    # ---- numbers

    def numbers(self, but: Link) -> Iterable[int]:
        """The numbers of the nodes that this one has links to."""
        return [link.number for link in self.links.values() if link is not but]

    def compare_numbers(self, link: Link, known: Iterable[int]) -> None:
        """The number of the other side of a link has come: go on when it is nobody else's."""
        assert link.peer is not None
        before = self.links.get(link.peer.id)
        others = {one.number for one in self.links.values() if one is not before}
        if link.number in others.union(*(member.former_numbers for member in self.members.values())) - {self.number}:
            link.say_taken()
        elif link.number != self.number:
            self._settle(link, before)
        elif (self.epoch, self.id) > (link.peer.epoch, link.peer.id):
            self.number_taken(link, [link.number, *known])

    def number_taken(self, link: Link, taken: Iterable[int]) -> None:
        """This node's number is another one's: draw a new one, and begin all links anew with it."""
        if self.is_fixed:
            link.refuse(Refusal.NUMBER, f"another node has the number {self.number}, which is fixed here")
            return
        before = self.number
        refused = {*taken, *self.numbers(link), before}
        if len(refused) >= MAX_NODE or self._renumberings.fill(self.clock_s()) < 1:
            link.refuse(Refusal.NUMBER, "that node says again and again, or of all numbers, that they are taken")
            return
        self._renumberings.tokens -= 1
        self.number = self._draw(refused)
        text = f"another node has the number {before}: this one has {self.number} from now on"
        log.info(text)
        self.on_log(text, False)
        for other in [one for one in self.all_links if one.state is LinkState.UP]:
            other.say_number()
            other.lose("this node has another number now")
        for member in self.members.values():
            member.renumber(self.number)
        for other in [one for one in self.all_links if one.state is LinkState.NUMBERING]:
            other.say_number()
            if other.number and other.number != self.number:
                self.compare_numbers(other, ())

    def _draw(self, taken: Iterable[int]) -> int:
        refused = set(taken)
        while True:
            number = int.from_bytes(self.random(2), "big") & MAX_NODE
            if number and number not in refused:
                return number

    # ---- one link to each node

    def is_linked(self, peer: Hello) -> bool:
        """Whether there is a link to that process."""
        link = self.links.get(peer.id)
        return link is not None and link.peer is not None and link.peer.epoch == peer.epoch

    def _settle(self, link: Link, before: Link | None) -> None:
        """Keep one of two links to the same node: both sides choose the same."""
        assert link.peer is not None
        if before is not None and before is not link:
            assert before.peer is not None
            if not self._is_better(link, before):
                link.refuse(Refusal.DUPLICATE, "there is a link already")
                return
            self._replaced = before
            before.lose("another link to that node took its place")
            self._replaced = None
        self.links[link.peer.id] = link
        self._at[link.peer.id] = link.transport.via  # a transport that is closed does not know it any more
        link.complete_handshake()
        if before is None and link.peer.id in self.links:
            was_lost = self._lost.pop(link.peer.id, self) is None
            self._say(logging.INFO, link, "is linked again" if was_lost else "is linked")
        self.on_log(f"a link to node {link.number} at {link.transport.via} is up", False)

    def _is_better(self, link: Link, before: Link) -> bool:
        assert link.peer is not None
        assert before.peer is not None
        if link.peer.epoch != before.peer.epoch:
            return link.peer.epoch > before.peer.epoch
        if link.connects == before.connects:
            return True  # who connects again has lost the other one
        return link.connects == (self.id < link.peer.id)


def _check_cluster(name: str) -> None:
    """A name that is no text might be that of a channel on a link; see `wire.link.APP`."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise ArgumentError(f"name: {name!r} is no text; the name of a cluster is UTF-8") from None
    if not 1 <= size <= MAX_NAME_BYTES:
        raise ArgumentError(f"name: {size} bytes; the name of a cluster has 1 to {MAX_NAME_BYTES}")

"""A process as a node: its number, its hubs in clusters, and its links to other nodes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from hashlib import blake2b

from smqrt.broker.broker import Broker
from smqrt.cluster.channel import AppChannel, OnData, OnStatus
from smqrt.cluster.clustered_broker import ClusteredBroker
from smqrt.cluster.leaving_nodes import ABSENT_S
from smqrt.cluster.link import ACK_BYTES, Link, LinkState, UnauthenticatedLinks
from smqrt.cluster.link_channels import MAX_NAME_BYTES, Carried, Transport
from smqrt.cluster.mqtt_sessions import LOST_S
from smqrt.cluster.mqtt_streams import KEPT_BYTES
from smqrt.errors import ArgumentError, ClosedError
from smqrt.settings.limits import Bucket, LineLimit
from smqrt.wire.cluster_packets import (
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

# ---- Processes of a server. Each announces all of them, so that a node that finds one process can connect to all.

NO_NODE_ID = bytes(ID_BYTES)
"""The id of a process that is not linked now."""


class OwnServer:
    """The server that a node is a process of.

    Args:
        node_id: the node's id.
        epoch: when the node started, ns since 1970.

    Attributes:
        id: 16 bytes that its processes share; before `take_place`, the id of a server of one process.
        own: the number of this process among them, from 0.
        ports: the port at which each process accepts links; 0 for none, or while it is unknown.
    """

    def __init__(self, node_id: bytes, epoch: int) -> None:
        self._node_id = node_id
        self.id = blake2b(node_id + epoch.to_bytes(8, "big"), digest_size=ID_BYTES, person=b"smqrt process").digest()
        self.own = 0
        self.ports = [0]

    def take_place(self, secret: bytes, own: int, ports: Iterable[int]) -> None:
        """Make this process one of several, which share `secret`; see the attributes."""
        self.id = blake2b(secret, digest_size=ID_BYTES, person=b"smqrt server").digest()
        self.own, self.ports = own, list(ports)

    @property
    def port(self) -> int:
        """The port at which this process accepts links; 0 for none."""
        return self.ports[self.own]

    @port.setter
    def port(self, port: int) -> None:
        self.ports[self.own] = port

    def has(self, link: Link) -> bool:
        """Return whether a link leads to another process of this server."""
        return link.siblings is not None and link.siblings.server == self.id

    def siblings(self, links: Iterable[Link]) -> Siblings:
        """Return the processes of this server, for other nodes; `links` are those that are up."""
        places = [(NO_NODE_ID, port) for port in self.ports]
        places[self.own] = self._node_id, self.port
        for index, place in merged([one for one in links if self.has(one)]).items():
            if index < len(places) and index != self.own:
                places[index] = place[0], place[1] or places[index][1]
        return Siblings(self.id, self.own, tuple(places))


def merged(links: Iterable[Link]) -> dict[int, tuple[bytes, int]]:
    """Return the ids and ports of the processes of one server by their numbers, from the announcements of several.

    The announcement of a process about itself has precedence. Of two with one number, the one that started later has.
    """
    by_age = sorted(links, key=lambda one: one.peer.epoch if one.peer is not None else 0)
    known = [one.siblings for one in by_age if one.siblings is not None]
    found: dict[int, tuple[bytes, int]] = {}
    for siblings in known:
        found.update((index, place) for index, place in enumerate(siblings.places) if place[0] != NO_NODE_ID)
    for siblings in known:
        found[siblings.own] = siblings.places[siblings.own]
        for index, place in enumerate(siblings.places):
            found.setdefault(index, place)
    return found


log = logging.getLogger("smqrt")

PING_S = 1.0
SILENCE_S = 5.0
QUEUE_BYTES = 16 << 20
"""The size of the queue for one node."""
IN_FLIGHT_BYTES = 4 * ACK_BYTES
"""The minimum of bytes that may be in transit in addition: a node acknowledges each quarter of them."""
RENUMBERINGS_PER_S, RENUMBERINGS_AT_ONCE = 0.1, 20
"""New numbers that other nodes may cause this one to draw. Each ends all its links."""
MAX_CHANNELS, OPENS_PER_S = 400, 4.0
"""The maximum number of application channels, and how often a node may open one. That is less often than other nodes
allow channels to be closed (`link_channels.CLOSES_PER_S`).
"""
MAX_LOST = 1024
"""The maximum number of lost nodes that are remembered, so that the log can report their return."""


class Node:
    """A node: it has a number that no other linked node has, and one link to each other node.

    Args:
        key: derived from the password, see `smqrt.wire.cluster_packets.key_of`.
        random: returns random bytes.
        clock_s: monotonic seconds.
        clock_ns: the time, in ns since 1970.
        number: a fixed number for the node; 0 to draw one.
        versions: the oldest and the newest supported version of the link protocol.
        queue_bytes: the size of the queue for each other node. As many bytes again, at least `IN_FLIGHT_BYTES`, may be
            sent and not acknowledged.
        predecessors: ids and epochs of nodes whose clients will migrate here with their ETIDs. Links to them are
            refused, since they announce the same clients.

    Attributes:
        abilities: the optional features that it announces.
        id: 16 bytes; with a fixed number they are the same after each start.
        epoch: when it started, ns since 1970.
        server: the server that it is a process of.
        has_news_of_siblings: whether another node has announced its server since this was last reset.
        members: its hubs, by the name of their cluster.
        channels: its application channels, by name.
        links: the links that are up, by the id of the other node.
        all_links: all links, also those in a handshake.
        unauthenticated: accepted links whose other side has not proved the password.
        queue_bytes, unacked_bytes: the maximum of queued bytes for a node, and of queued or unacknowledged bytes.
        kept_s: how long messages are kept for a lost node.
        kept_bytes: the memory for messages with QoS 1 and 2 that other nodes have not acknowledged, for each hub.
        session_wait_s: see `SessionMoves.wait_s`.
        links_lost: the number of links that have ended after they were up.
        refused: the number of links that each kind of refusal has ended, on this side or the other.
        on_round_trip: called for each ping of a link with the seconds until its answer; None if that has not arrived
            in time or before the end of the link.
        on_log: called with a sentence about a link, and whether it is urgent.
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
        # A fixed number gives a fixed id, so that other nodes recognize the node after a restart.
        self.id = fixed_id if number else random(ID_BYTES)
        self.server, self.has_news_of_siblings = OwnServer(self.id, self.epoch), False
        self.members: dict[str, ClusteredBroker] = {}
        self.channels: dict[bytes, AppChannel] = {}
        self.links: dict[bytes, Link] = {}
        self.all_links: set[Link] = set()
        self.unauthenticated = UnauthenticatedLinks()
        self.queue_bytes, self.unacked_bytes = queue_bytes, queue_bytes + max(queue_bytes, IN_FLIGHT_BYTES)
        self.kept_s, self.kept_bytes, self.session_wait_s = ABSENT_S, KEPT_BYTES, LOST_S
        self._renumberings = Bucket(RENUMBERINGS_PER_S, RENUMBERINGS_AT_ONCE, clock_s())
        self.refused: Counter[int] = Counter()
        self.links_lost = 0
        self.closed = False
        self._complaints = LineLimit()
        self._lines: dict[tuple[str, int], LineLimit] = {}
        """Limits of log lines, by kind of line and node number."""
        self._via: dict[bytes, str] = {}
        """The addresses of linked nodes, by node id: a closed transport does not have its address any more."""
        self._lost: dict[bytes, None] = {}
        self._replaced: Link | None = None
        """The link that is being closed in favor of another one to the same node; it is not logged as lost."""
        self._opens = Bucket(OPENS_PER_S, MAX_CHANNELS, clock_s())
        self.on_round_trip: Callable[[Link, float | None], object] = lambda link, seconds: None
        self.on_log: Callable[[str, bool], object] = lambda text, is_urgent: None

    # ---- application channels

    def carried(self) -> list[Carried]:
        """Return the hubs and application channels."""
        return [*self.members.values(), *self.channels.values()]

    def find(self, wire_name: bytes) -> Carried | None:
        """Return the hub or application channel with this name on links."""
        return next((one for one in self.carried() if one.wire_name == wire_name), None)

    def open(self, name: bytes, on_status: OnStatus, on_data: OnData) -> AppChannel:
        """Open an application channel; see `AppChannel`.

        Raises:
            ArgumentError: the name is empty or too long, it is open already, or the limit is reached.
            ClosedError: the node is closed.
        """
        self.must_be_open()
        if not 1 <= len(name) <= MAX_NAME_BYTES:
            raise ArgumentError(f"name: {len(name)} bytes; the name of a channel has 1 to {MAX_NAME_BYTES}")
        shown = name.decode("utf-8", "replace")
        if name in self.channels:
            raise ArgumentError(f"name: the channel {shown!r} is open already; close it first, or take another name")
        if len(self.channels) >= MAX_CHANNELS:
            raise ArgumentError(f"name: {MAX_CHANNELS} channels are open already; close one before you open {shown!r}")
        if self._opens.fill(self.clock_s()) < 1:
            raise ArgumentError(f"name: channels are opened too often for {shown!r}; keep them open")
        self._opens.tokens -= 1
        channel = AppChannel(name, on_status, on_data, self._close_channel)
        self.channels[name] = channel
        for link in self.links.values():
            link.channels.open(channel)
        return channel

    def _close_channel(self, channel: AppChannel, text: bytes) -> None:
        del self.channels[channel.name]
        for link in list(self.links.values()):
            link.channels.close(channel, text)

    def must_be_open(self) -> None:
        """Raise ClosedError when the node is closed."""
        if self.closed:
            raise ClosedError("the links to other nodes were shut down; make new ones")

    # ---- hubs

    def join(self, broker: Broker, name: str) -> ClusteredBroker:
        """Add a hub to the cluster `name`.

        Raises:
            ArgumentError: another hub of this node is in it, or the name is invalid.
            ClosedError: the node is closed.
        """
        self.must_be_open()
        try:
            size = len(name.encode())
        except UnicodeEncodeError:
            raise ArgumentError(f"name: {name!r} is not text; the name of a cluster is UTF-8") from None
        if not 1 <= size <= MAX_NAME_BYTES:
            raise ArgumentError(f"name: {size} bytes; the name of a cluster has 1 to {MAX_NAME_BYTES}")
        if name in self.members:
            raise ArgumentError(f"name: another hub of this node is in the cluster {name!r}; use another name")
        names_key = blake2b(name.encode(), key=self.key, digest_size=32).digest()
        hub = ClusteredBroker(broker, name, names_key, self.number, lambda: self._clock_ns() // 1_000_000)
        hub.state.epoch = self.epoch
        hub.streams.random, hub.streams.limit_bytes = self.random, self.kept_bytes
        hub.lost.kept_s, hub.sessions.wait_s = self.kept_s, self.session_wait_s
        hub.leave = lambda: self.leave(hub)
        hub.suspend = lambda: self._suspend(hub)
        hub.resume = lambda: self._resume(hub)
        for identity in hub.streams.known():
            hub.lost.expect(identity, hub.streams.stream_to(identity))
        self._resume(hub)
        return hub

    def _resume(self, hub: ClusteredBroker) -> None:
        if self.members.get(hub.name) is hub:
            return
        self.members[hub.name], hub.events.is_off = hub, False
        for link in self.links.values():
            link.channels.open(hub)

    def _suspend(self, hub: ClusteredBroker, text: bytes = b"") -> None:
        del self.members[hub.name]
        hub.events.is_off = True
        for link in list(self.links.values()):
            link.channels.close(hub, text)

    def leave(self, member: ClusteredBroker, text: bytes = b"") -> None:
        """Take a hub out of its cluster; it continues alone."""
        if self.members.get(member.name) is member:
            self._suspend(member, text)
            member.detach()

    # ---- links

    def connected(self, transport: Transport, connects: bool, address: str | None = None) -> Link:
        """Make a link from a connection to another node.

        Args:
            transport: the connection.
            connects: whether this node has connected.
            address: the address of the other side, see `UnauthenticatedLinks`; None if this node has connected.
        """
        link = Link(self, transport, connects, self.clock_s())
        self.all_links.add(link)
        if address is not None:
            self.unauthenticated.add(link, address)
        return link

    def ended(self, link: Link, code: int) -> None:
        """Remove a link that has ended, and log it."""
        self.all_links.discard(link)
        self.unauthenticated.discard(link)
        self.refused[code] += bool(code)
        if link.peer is not None and self.links.get(link.peer.id) is link:
            del self.links[link.peer.id]
            self.links_lost += 1
            if not self.closed and link is not self._replaced:
                if code == Refusal.CLOSING:
                    self._log(logging.INFO, link, link.peer.id, f"has left: {link.why}")
                else:
                    self._lost[link.peer.id] = None
                    if len(self._lost) > MAX_LOST:
                        del self._lost[next(iter(self._lost))]
                    self._log(logging.WARNING, link, link.peer.id, f"is lost: {link.why}")
            self._via.pop(link.peer.id, None)
            self.siblings_changed(link)
        if code not in (0, Refusal.DUPLICATE, Refusal.SELF, Refusal.CLOSING):
            if (suffix := self._complaints.line_suffix()) is not None:  # limited, since any client can cause it
                text = f"a link to another node: {link.why}{suffix}"
                log.warning("%s", text)
                self.on_log(text, True)
        elif link.number:  # 0 for unauthenticated peers, which any client can cause
            self.on_log(f"a link to another node has ended: {link.why}", False)

    def siblings_changed(self, link: Link) -> None:
        """Record a changed or lost process; if it is of this server, announce the processes to all nodes."""
        self.has_news_of_siblings = True
        if self.server.has(link):
            for one in list(self.links.values()):
                one.handshake.send_siblings()

    def _log(self, level: int, link: Link, node_id: bytes, text: str) -> None:
        """Log a line about a node; at most one line of a kind per second and node."""
        key = text.partition(":")[0], link.number
        if key not in self._lines and len(self._lines) >= MAX_LOST:
            self._lines.clear()  # rare; at worst some lines are logged again
        if (suffix := self._lines.setdefault(key, LineLimit()).line_suffix()) is not None:
            log.log(level, "node %d at %s %s%s", link.number, self._via[node_id], text, suffix)

    def check_links(self, ping_s: float = PING_S, silence_s: float = SILENCE_S) -> None:
        """Ping other nodes, and apply the time limits of links, lost nodes and migrations."""
        now_s = self.clock_s()
        for link in list(self.all_links):
            link.pings.check(now_s, ping_s, silence_s)
        for hub in self.members.values():
            hub.lost.forget_expired()
            hub.migration.give_up_expired()

    def close(self) -> None:
        """Leave all clusters, close all channels and end all links."""
        self.closed = True
        for channel in list(self.channels.values()):
            channel.close()
        for hub in list(self.members.values()):
            self.leave(hub)
        for link in list(self.all_links):
            link.refuse(Refusal.CLOSING, "that node is shutting down")

    # ---- numbers

    def numbers(self, but: Link) -> Iterable[int]:
        """Return the numbers of the nodes that this one has links to, without `but`."""
        return [link.number for link in self.links.values() if link is not but]

    def compare_numbers(self, link: Link, known: Iterable[int]) -> None:
        """Complete the handshake if the number of the other side is free; `known` are the numbers linked there."""
        assert link.peer is not None
        before = self.links.get(link.peer.id)
        others = {one.number for one in self.links.values() if one is not before}
        if link.number in others.union(*(hub.former_numbers for hub in self.members.values())) - {self.number}:
            link.handshake.send_taken()
        elif link.number != self.number:
            self._settle(link, before)
        elif (self.epoch, self.id) > (link.peer.epoch, link.peer.id):  # the newer node picks another number
            self.number_taken(link, [link.number, *known])

    def number_taken(self, link: Link, taken: Iterable[int]) -> None:
        """Draw a new number, since another node has that of this one; all links end and are made again."""
        if self.is_fixed:
            link.refuse(Refusal.NUMBER, f"another node has the number {self.number}, which is fixed here")
            return
        before = self.number
        refused = {*taken, *self.numbers(link), before}
        if len(refused) >= MAX_NODE or self._renumberings.fill(self.clock_s()) < 1:
            link.refuse(Refusal.NUMBER, "that node reports numbers as taken too often, or all of them")
            return
        self._renumberings.tokens -= 1
        self.number = self._draw(refused)
        text = f"another node has the number {before}: this one has {self.number} from now on"
        log.info(text)
        self.on_log(text, False)
        for other in [one for one in self.all_links if one.state is LinkState.UP]:
            other.handshake.send_number()
            other.lose("this node has another number now")
        for hub in self.members.values():
            hub.renumber(self.number)
        # Other handshakes continue with the new number.
        for other in [one for one in self.all_links if one.state is LinkState.NUMBERING]:
            other.handshake.send_number()
            if other.number and other.number != self.number:
                self.compare_numbers(other, ())

    def _draw(self, taken: Iterable[int]) -> int:
        refused = set(taken)
        while True:
            number = int.from_bytes(self.random(2), "big") & MAX_NODE  # all bits of a node number are set in MAX_NODE
            if number and number not in refused:
                return number

    # ---- one link to each node

    def is_linked(self, peer: Hello) -> bool:
        """Return whether there is a link to that process."""
        link = self.links.get(peer.id)
        return link is not None and link.peer is not None and link.peer.epoch == peer.epoch

    def _settle(self, link: Link, before: Link | None) -> None:
        """Complete a handshake; of two links to one node, keep the one that the other side keeps, too."""
        assert link.peer is not None
        if before is not None and before is not link:
            assert before.peer is not None
            # A node that was started again, or that connects again, has lost its other link. If both nodes connect at
            # the same time, both keep the link that the node with the smaller id has made.
            if link.peer.epoch != before.peer.epoch:
                is_better = link.peer.epoch > before.peer.epoch
            else:
                is_better = link.connects == before.connects or link.connects == (self.id < link.peer.id)
            if not is_better:
                link.refuse(Refusal.DUPLICATE, "there is a link already")
                return
            self._replaced = before
            before.lose("another link to that node has replaced it")
            self._replaced = None
        node_id = link.peer.id
        self.links[node_id] = link
        self._via[node_id] = link.transport.via
        link.complete_handshake()
        if before is None and node_id in self.links:
            was_lost = self._lost.pop(node_id, self) is None
            self._log(logging.INFO, link, node_id, "is linked again" if was_lost else "is linked")
        self.on_log(f"a link to node {link.number} at {link.transport.via} is up", False)

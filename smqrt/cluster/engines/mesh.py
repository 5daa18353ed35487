"""Mesh of links to all other nodes, over TCP, TLS or Unix sockets."""

from __future__ import annotations

import _socket
import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from random import uniform
from ssl import CERT_REQUIRED, SSLContext
from typing import Any, NamedTuple

import gevent
from gevent import get_hub
from gevent.event import Event
from greenlet import getcurrent

from smqrt.broker.broker import Broker
from smqrt.cluster.clustered_broker import ClusteredBroker
from smqrt.cluster.engines.connections import connection_of
from smqrt.cluster.engines.nats_connections import NatsBackplane
from smqrt.cluster.link import MAX_UNAUTHENTICATED, Link
from smqrt.cluster.node import NO_NODE_ID, PING_S, QUEUE_BYTES, SILENCE_S, Node, merged
from smqrt.errors import StreamError
from smqrt.loop.threads import in_thread
from smqrt.smq import data_path
from smqrt.smq.hub_registry import hub_registry
from smqrt.transport.listener import Listener, open_listeners
from smqrt.transport.stream import Stream
from smqrt.transport.tls import Transport
from smqrt.transport.tls_contexts import ClientTls, ServerTls, Trust
from smqrt.wire import cluster_packets as wire
from smqrt.wire.cluster_packets import Refusal
from smqrt.wire.smq import MAX_NODE

# ---- Expected links: to the addresses of the list, and to all processes of the servers at these addresses, which each
# process of a server announces.

log = logging.getLogger("smqrt")

MISSING_S = 10.0
"""A missing link is logged after this time; most outages are shorter."""
SILENT_S = 5.0
"""A node that has not announced its server this long after the link came up has an older release."""
MAX_DIALERS = 2 * MAX_NODE


class Missing(NamedTuple):
    """A missing link.

    Attributes:
        to: an address, or the description of a process without one.
        why: the reason.
        since_s: when the link was first missing, by the node's clock.
    """

    to: str
    why: str
    since_s: float


class ExpectedLinks:
    """The links that a mesh should have, and the missing ones."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._missing: dict[str, Missing] = {}
        self._logged: set[str] = set()

    def missing(self) -> list[Missing]:
        """Return the missing links; the longest outage is first."""
        if self._mesh.has_begun:
            self._compare()
        return sorted(self._missing.values(), key=lambda one: one.since_s)

    def check(self) -> None:
        """Dial announced processes, and log links that are missing for too long."""
        node = self._mesh.node
        if node.has_news_of_siblings:
            node.has_news_of_siblings = False
            self._dial_siblings()
        if any(one.origin is not None for one in self._mesh.dialers):
            self._forget_siblings()
        self._compare()
        now_s = node.clock_s()
        for one in self._missing.values():
            if one.to not in self._logged and now_s - one.since_s >= MISSING_S:
                self._logged.add(one.to)
                log.warning("no link to %s for %.0f s: %s", one.to, now_s - one.since_s, one.why)
        for to in self._logged - self._missing.keys():
            log.info("the link to %s is no longer missing", to)
        self._logged &= self._missing.keys()

    def _compare(self) -> None:
        """Find the missing links; those that were missing before keep their times."""
        node = self._mesh.node
        found = {one.address: one.why for one in self._mesh.dialers if not one.up and not one.is_self}
        known = {node.id, *node.links, *(one.expects for one in self._mesh.dialers)}
        for link in sorted(node.links.values(), key=lambda one: one.number):
            for index, (node_id, _) in enumerate(link.siblings.places if link.siblings is not None else ()):
                if node_id != NO_NODE_ID and node_id not in known:
                    known.add(node_id)
                    found[f"process {index} of the server of node {link.number}"] = (
                        "neither of the two processes has made it"
                    )
        now_s = node.clock_s()
        self._missing = {
            to: Missing(to, why, self._missing[to].since_s if to in self._missing else now_s)
            for to, why in found.items()
        }

    # ---- other processes of the servers found

    def _dial_siblings(self) -> None:
        """Find the processes of each server that was found at an address of the list, and dial them."""
        node = self._mesh.node
        found: dict[Dialer, list[Link]] = {}
        by_id = {one.leads_to_id: one.origin or one for one in self._mesh.dialers if one.place is not None}
        for link in node.links.values():
            assert link.peer is not None
            origin = by_id.get(link.peer.id)
            if origin is not None and link.siblings is not None and not node.server.has(link):
                found.setdefault(origin, []).append(link)
        for origin, links in found.items():
            # After a restart, links of the former server may last a moment longer.
            newest = max(links, key=lambda one: one.peer.epoch if one.peer is not None else 0)
            assert newest.siblings is not None
            server = newest.siblings.server
            self._expect(origin, [one for one in links if one.siblings is not None and one.siblings.server == server])

    def _expect(self, origin: Dialer, links: list[Link]) -> None:
        """Dial the processes of the server that was found at an address; remove dialers of its former processes."""
        assert origin.place is not None
        host, _, tls, any_name = origin.place
        wanted = {port: node_id for node_id, port in merged(links).values() if port}
        for one in [one for one in self._mesh.dialers if one.origin is origin and one.place is not None]:
            if one.place is not None and one.place[1] not in wanted:
                one.forget()
        by_address = {one.place[:2]: one for one in self._mesh.dialers if one.place is not None}
        for port, node_id in wanted.items():
            dialer = by_address.get((host, port))
            is_found = (
                node_id == origin.leads_to_id
            )  # the process at the address itself; it may announce another port (port forwarding)
            if dialer is None and not is_found and len(self._mesh.dialers) < MAX_DIALERS:
                dialer = self._mesh.dial(host, port, tls, any_name, origin)
            if dialer is not None:
                dialer.expects = node_id if node_id != NO_NODE_ID else b""

    def _forget_siblings(self) -> None:
        """Stop dialling processes of an address that was removed, or where an older release runs now."""
        node = self._mesh.node
        silent = {
            id_
            for id_, link in node.links.items()
            if link.siblings is None and node.clock_s() - link.since_s > SILENT_S
        }
        for one in [one for one in self._mesh.dialers if one.origin is not None]:
            if one.origin not in self._mesh.dialers or one.origin.leads_to_id in silent:
                one.forget()


PORT = 1900
"""The usual port of links (spec: smq §6)."""
RETRY_S = 2.5
"""The maximum delay before an address is tried again. All nodes are linked within 5 s after an outage. That includes
connection attempts that the system itself repeats, 1 s and 3 s after they began.
"""
FIRST_RETRY_S = 0.1
CHECK_S = 0.5
CONNECT_S = 5.0
SELF_RETRY_S = 60.0
"""Time between two tries of an address of this node itself: another node may use it later, and any server may claim to
be this node.
"""
ACCEPT_PAUSE_S = 0.5
"""The pause after `accept` has failed because no file descriptors are left."""
LASTED_S = 0.3
"""A link of at least this duration is made again without a delay."""
SCAN_S = 1.0
TAKEN_PLACE_S = 0.2
"""The delay before the end of a link is reported. Nodes that connect to each other at the same time keep one of two
links, and do not report the end of the other."""


open_meshes: list[Mesh] = []
"""The meshes of this process, for the administration interface and metrics."""


@lru_cache(maxsize=32)
def _key_of(password: bytes) -> bytes:
    return wire.key_of(password)


def key_of(password: bytes) -> bytes:
    """See `smqrt.wire.cluster_packets.key_of`; it runs in a thread if the caller can block."""
    return _key_of(password) if getcurrent() is get_hub() else in_thread(_key_of, password)


@dataclass(frozen=True)
class LinkTls:
    """Mutual TLS of links: both sides need a certificate of an authority for nodes only; names are not checked.

    Attributes:
        client: for links that this node makes.
        server: for links that it accepts.
    """

    client: ClientTls
    server: SSLContext

    @classmethod
    def from_files(cls, ca: str, cert: str, key: str | None) -> LinkTls:
        """Read PEM files: the authority, this node's certificate, and its key if that is in another file.

        Raises:
            ArgumentError: a file cannot be read or is invalid.
        """
        client = ClientTls.from_files(ca, cert, key)
        server = ServerTls(client.store, client.identities).context()
        server.verify_mode = CERT_REQUIRED
        return cls(client, server)


class Mesh:
    """This process as a node of a mesh.

    Args:
        key: a secret that all nodes share, see `key_of`.
        number: the node's number; 0 to draw one.
        ping_s, silence_s: the interval of pings, and the time without data after which a node is lost.
        queue_bytes: the size of the queue for each node.

    Attributes:
        node: this node.
        dialers: one for each address.
        expected: the links that the mesh should have.
        on_accepted: called with an accepted link, before it is up.
    """

    def __init__(
        self,
        key: bytes,
        number: int = 0,
        *,
        ping_s: float = PING_S,
        silence_s: float = SILENCE_S,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        data_path.install()
        self.node = Node(
            key,
            random=os.urandom,
            clock_s=time.monotonic,
            clock_ns=time.time_ns,
            number=number,
            queue_bytes=queue_bytes,
            predecessors=hub_registry.predecessors,
        )
        self._ping_s, self._silence_s, self._queue_bytes = ping_s, silence_s, queue_bytes
        loop: Any = get_hub().loop
        self._timer = loop.timer(CHECK_S, CHECK_S)
        self._timer.ref = False  # the timer alone does not keep the event loop running
        self._timer.start(self._check)
        self._closers: list[Callable[[], object]] = []
        self._last_closers: list[Callable[[], object]] = []
        self.dialers: list[Dialer] = []
        self.expected = ExpectedLinks(self)
        self.on_accepted: Callable[[Link], object] = lambda link: None
        open_meshes.append(self)

    @property
    def has_begun(self) -> bool:
        """Whether this process may have links.

        In a hot restart of a node with a fixed number, links of the new process would replace those of the old one.
        """
        return hub_registry.has_left or not self.node.is_fixed

    def _when_begun(self, start: Callable[[], object]) -> None:
        if self.has_begun:
            start()
        else:
            hub_registry.when_left(lambda: None if self.node.closed else start())

    def _check(self) -> None:
        self.node.check_links(self._ping_s, self._silence_s)
        if self.has_begun:
            self.expected.check()

    def join(self, broker: Broker, name: str) -> ClusteredBroker:
        """Add a hub to the cluster `name`. Raises as `Node.join`."""
        return self.node.join(broker, name)

    # ---- connections

    def listen(self, host: str, port: int, context: SSLContext | None = None) -> Listener:
        """Accept links at an address.

        Raises:
            StartError: the address cannot be bound.
        """
        listener = Listener(host, port, self.accepted, context)
        listener.name, listener.max_handshakes = "the links of nodes", MAX_UNAUTHENTICATED
        self.node.server.port = self.node.server.port or listener.address[1]
        self._when_begun(lambda: listener.start() if listener in open_listeners else None)
        self._closers.append(listener.close)
        return listener

    def accepted(self, sock: Transport, address: tuple[str, int]) -> None:
        """Make a link from an accepted connection."""
        if self.node.closed:
            sock.close()
            return
        self.on_accepted(self.commence(sock, b"", connects=False, address=address[0]))

    def commence(self, sock: Transport, data: bytes, connects: bool, address: str = "an application") -> Link:
        """Make a link from a connection.

        Args:
            sock: a connected, non-blocking socket.
            data: data that was received already.
            connects: whether this node has connected.
            address: the address of the other side.
        """
        connection = connection_of(sock)
        connection.budget_bytes = self.node.unacked_bytes  # above the limits of `Link`, which are checked first
        link = self.node.connected(connection, connects, None if connects else address)
        connection.serve(link, data)
        return link

    def dial(
        self,
        host: str,
        port: int = PORT,
        tls: ClientTls | None = None,
        any_name: bool = False,
        origin: Dialer | None = None,
    ) -> Dialer:
        """Connect to another node; reconnect whenever the link is lost.

        Args:
            host, port: its address.
            tls: the TLS configuration; None for no TLS.
            any_name: its certificate may be for another name than `host`.
            origin: the dialer of the address at which the server was found; None for an address of the list.
        """
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        dialer = Dialer(self, shown, partial(_connect, host, port, tls, any_name))
        dialer.place, dialer.origin = (host, port, tls, any_name), origin
        self.dialers.append(dialer)
        self._when_begun(dialer.start)
        return dialer

    def link_through_nats(self, servers: str, site: str = "smqrt", **options: Any) -> NatsBackplane:
        """Link to all nodes of a site that use the same NATS cluster; see `NatsBackplane`."""
        # Links have lower limits; the NATS client must not refuse messages before these are reached.
        options.setdefault("queue_bytes", max(self.node.unacked_bytes, 8 << 20))
        backplane = NatsBackplane(self.node, servers, site, **options)
        self._when_begun(backplane.begin)
        self._last_closers.append(backplane.close)
        return backplane

    def share_directory(self, directory: Path) -> None:
        """Link to all processes of this machine that share a directory, which only this user may read.

        Raises:
            OSError: the directory cannot be used.
        """
        shared = SharedDirectory(self, directory)
        self._closers.append(shared.close)
        self._when_begun(shared.start)

    def close(self) -> None:
        """Leave all clusters, and end all links. A second call does nothing."""
        if self.node.closed:
            return
        open_meshes.remove(self)
        for closer in (*self._closers, *[one.close for one in self.dialers]):
            closer()
        self.node.close()
        for closer in self._last_closers:  # last, since NATS carries the final packets of the links
            closer()
        self._timer.stop()
        self._timer.close()


def _connect(host: str, port: int, tls: ClientTls | None, any_name: bool) -> tuple[Transport, bytes]:
    stream = Stream.connect(host, port, CONNECT_S)
    if tls is not None:
        stream.starttls(tls.context(), host, timeout_s=CONNECT_S)
        assert stream.tls is not None
        trust = tls.store.judge(stream.tls.peer_chain(), host)
        if trust is not Trust.TRUSTED and not (any_name and trust is Trust.CERT):
            stream.close()
            raise StreamError("sslnottrusted", f"the certificate of {host} is not trusted: {trust.value}")
    return stream.release()


class Dialer:
    """Keeps a link to one address.

    Args:
        mesh: the mesh of this process.
        address: the address as text, for the log and the status.
        connect: connects and returns the connection and received data; may raise StreamError or OSError.

    Attributes:
        up: whether there is a link to the node at this address.
        why: why the last link ended, or could not be made.
        is_self: whether the address leads to this node.
        place: host, port and TLS of the address, see `Mesh.dial`; None for another kind of address.
        origin: the dialer of the address at which the server was found; None for a configured address.
        expects: the id of the node at this address, as another process of its server announces it; empty if none does.
        on_status: called with whether there is a link, and why not.
    """

    def __init__(self, mesh: Mesh, address: str, connect: Callable[[], tuple[Transport, bytes]]) -> None:
        self.address, self.up, self.why = address, False, "not connected yet"
        self.is_self = False
        self.place: tuple[str, int, ClientTls | None, bool] | None = None
        self.origin: Dialer | None = None
        self.expects = b""
        self.on_status: Callable[[bool, str], object] = lambda up, why: None
        self._is_closed = False
        self._link: Link | None = None
        self._mesh, self._connect = mesh, connect
        self._ended = Event()
        self._greenlet: Any = None

    def start(self) -> None:
        """Begin to connect, unless the dialer is closed."""
        if not self._is_closed:
            self._greenlet = gevent.spawn(self._run)

    def _run(self) -> None:
        wait_s = FIRST_RETRY_S
        while not self._mesh.node.closed:
            if self.expects in self._mesh.node.links:  # a link that the other side has made
                self._report(True, "")
                self._wait_for_end(self.expects)
                wait_s = FIRST_RETRY_S
                continue
            link = self._try()
            if link is not None and self.is_self:
                gevent.sleep(SELF_RETRY_S)
                continue
            if link is not None and self._has_link(link):
                assert link.peer is not None
                self._report(True, "")
                self._wait_for_end(link.peer.id)
                wait_s = FIRST_RETRY_S
                continue
            # Random, so that two nodes do not dial each other at the same time again and again.
            gevent.sleep(uniform(0.5, 1.0) * wait_s)
            wait_s = min(2 * wait_s, RETRY_S)

    def _try(self) -> Link | None:
        try:
            sock, data = self._connect()
        except (StreamError, OSError) as error:
            self._report(False, str(error))
            return None
        self._ended.clear()
        link = self._link = self._mesh.commence(sock, data, connects=True)
        link.on_end = lambda link, why: self._ended.set()
        end_s = time.monotonic() + self._mesh._silence_s + 1  # a link ends earlier if its handshake is not complete
        # Polled, since a link that the other side makes meanwhile does not set the event.
        while not self._has_link(link) and not self._ended.is_set() and time.monotonic() < end_s:
            self._ended.wait(0.02)
        node = self._mesh.node
        self.is_self = link.peer is not None and (link.peer.id, link.peer.epoch) == (node.id, node.epoch)
        if self._ended.is_set() and not self._has_link(link) and not self.is_self:
            self._report(False, link.why)
        return link

    def _has_link(self, link: Link) -> bool:
        """Return whether there is a link to the node: this link, or one that the other side has made."""
        return link.peer is not None and link.peer.id in self._mesh.node.links

    def _wait_for_end(self, node_id: bytes) -> None:
        while (current := self._mesh.node.links.get(node_id)) is not None:
            if current is self._link:
                self._ended.wait()
                others = (one.peer for one in self._mesh.node.all_links if one is not current)
                is_being_replaced = any(peer is not None and peer.id == node_id for peer in others)
                if not is_being_replaced and self._mesh.node.clock_s() - current.since_s >= LASTED_S:
                    self.why = current.why
                    break  # without a delay: each moment without a link loses messages
            gevent.sleep(TAKEN_PLACE_S)
            self.why = current.why
        self._report(False, self.why)

    def leads_to(self, link: Link) -> bool:
        """Return whether a link, made by either side, leads to the node at this address."""
        return link.peer is not None and self.leads_to_id == link.peer.id

    @property
    def leads_to_id(self) -> bytes:
        """The id of the node that was last found at this address; empty for none."""
        mine = self._link.peer if self._link is not None else None
        return self.expects or (b"" if mine is None else mine.id)

    def _report(self, up: bool, why: str) -> None:
        if (up, why) == (self.up, self.why):
            return
        is_news = up != self.up
        self.up, self.why = up, why
        if is_news or not up:
            self.on_status(up, why)

    def close(self) -> None:
        """Stop connecting."""
        self._is_closed = True
        if self._greenlet is not None:
            self._greenlet.kill(block=False)
        self.up = False

    def forget(self) -> None:
        """Stop connecting, and remove the address from the mesh."""
        self.close()
        with contextlib.suppress(ValueError):
            self._mesh.dialers.remove(self)

    def disconnect(self) -> None:
        """Remove the address; end its link, and the links to other processes of the same server."""
        self.forget()
        for one in [one for one in self._mesh.dialers if one.origin is self]:
            one.disconnect()
        if self._link is not None:
            self._link.refuse(Refusal.CLOSING, "that node was taken out of the list of nodes")


class SharedDirectory:
    """Links to all processes of this machine that share a directory.

    Each process has a Unix socket there, and connects to all that exist when it starts.

    Args:
        mesh: the mesh of this process.
        directory: an existing directory that only this user may read.
    """

    def __init__(self, mesh: Mesh, directory: Path) -> None:
        self._mesh, self._directory = mesh, directory
        # With the node id, so that other processes find out whether they are linked already.
        self._path = directory / f"{os.getpid()}-{_shown(mesh.node.id)}.sock"
        self._dialers: dict[Path, Dialer] = {}
        self._socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        self._socket.setblocking(False)
        loop: Any = get_hub().loop
        self._watcher, self._pause = loop.io(self._socket.fileno(), 1), loop.timer(ACCEPT_PAUSE_S)
        self._greenlet: Any = None

    def start(self) -> None:
        """Begin to accept and make links. Raises OSError when the directory cannot be used."""
        self._socket.bind(str(self._path))
        self._socket.listen(128)
        self._watcher.start(self._accept)
        self._greenlet = gevent.spawn(self._scan)

    def _accept(self) -> None:
        try:
            fd, _ = self._socket._accept()  # type: ignore[attr-defined]
        except BlockingIOError:
            return
        except OSError:  # no file descriptors left: the socket stays readable, and would keep the loop busy
            self._watcher.stop()
            self._pause.close()
            self._pause = get_hub().loop.timer(ACCEPT_PAUSE_S)  # a new timer: one that has fired fires again at once
            self._pause.start(lambda: self._watcher.start(self._accept))
            return
        client = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, fd)
        client.setblocking(False)
        self._mesh.accepted(client, (str(self._path), 0))

    def _scan(self) -> None:
        """Dial new sockets, and forget removed ones."""
        while True:  # repeated, since processes may start at the same time, or be killed
            with contextlib.suppress(OSError):  # no file descriptors left, or the directory was deleted
                # Nodes that started later have connected already; a second link would replace the first.
                linked = {_shown(node_id) for node_id in self._mesh.node.links}
                others = sorted(one for one in self._directory.glob("*.sock") if one != self._path)
                for path in [one for one in others if one not in self._dialers]:
                    if path.stem.rpartition("-")[2] not in linked:
                        dialer = self._dialers[path] = Dialer(self._mesh, path.stem, partial(self._connect, path))
                        dialer.start()
                for path in [one for one in self._dialers if not one.exists()]:
                    self._dialers.pop(path).close()
            gevent.sleep(SCAN_S)

    def _connect(self, path: Path) -> tuple[Transport, bytes]:
        sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)  # its process was killed
            sock.close()
            raise
        except OSError:
            sock.close()
            raise
        return sock, b""

    def close(self) -> None:
        """Remove the socket, and stop connecting."""
        if self._greenlet is not None:
            self._greenlet.kill(block=False)
        for dialer in self._dialers.values():
            dialer.close()
        for watcher in (self._watcher, self._pause):
            watcher.stop()
            watcher.close()
        self._socket.close()
        self._path.unlink(missing_ok=True)


def _shown(node_id: bytes) -> str:
    """Return the part of the name of a socket that identifies the node."""
    return node_id.hex()[:8]

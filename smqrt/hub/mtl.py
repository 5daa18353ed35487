"""Links to other nodes: `from smqrt.hub import mtl; links = mtl.create("password")` (spec: smq §6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from smqrt.cluster.channel import AppChannel
from smqrt.cluster.engines import mtl
from smqrt.cluster.engines.process_cluster import cluster
from smqrt.errors import ArgumentError, QueueFullError
from smqrt.hub import peer
from smqrt.hub.callbacks import Guard, calling_line
from smqrt.loop import greenlets
from smqrt.process import current_process
from smqrt.settings.option_types import function, make, number, option, optional
from smqrt.smq.messages import Payload, payload
from smqrt.transport.stream import Stream

OnStatus = Callable[[str, bool, str], object]
"""`f(address, up, why)`."""
OnNode = Callable[[int, bool, str], object]
"""`f(node, up, why)`."""
OnData = Callable[[bytes, int], object]
"""`f(data, node)`."""
OnRoundTrip = Callable[[str, float | None], object]
"""`f(address, ms)`."""
_MIN_TIMEOUT_S, _TIMEOUTS_IN_TIMESPAN = 2.0, 4
_SECONDS = number(0, mtl.MAX_S, "seconds", above=True)


@dataclass(frozen=True, kw_only=True)
class PingOptions:
    """Option `ping` of `create`."""

    timespan: float = option(8.0, _SECONDS, "Interval of pings to each node.")
    timeout: float = option(_MIN_TIMEOUT_S, _SECONDS, "Time limit for an answer.")
    roundtripCB: OnRoundTrip | None = option(None, optional(function()), "Called after each ping.")

    def times(self) -> tuple[float, float]:
        """Return `ping_s` and `silence_s`."""
        timespan, timeout = self.timespan, self.timeout
        if not (timeout >= _MIN_TIMEOUT_S and _TIMEOUTS_IN_TIMESPAN * timeout <= timespan <= mtl.MAX_S - timeout):
            raise ArgumentError(
                f"ping: timespan {timespan:g}, timeout {timeout:g}; timeout is at least 2 s, timespan at least four "
                "times as long, both at most 3600 s"
            )
        return timespan, timespan + timeout


class Channel:
    """A channel between applications at several nodes; see `Mtl.open`."""

    def __init__(self, channel: AppChannel) -> None:
        self._channel = channel
        current_process.close_with_app(channel)

    @property
    def name(self) -> str | bytes:
        """The name, the same at all nodes; bytes when it is not UTF-8."""
        return peer.text_of(self._channel.name)

    def send(self, data: Payload, node: int | None = None) -> int:
        """Send a message to all other nodes that have the channel open, or to one.

        Args:
            data: any payload that `Smq.publish` accepts; it arrives as bytes.
            node: the number of a node.

        Returns:
            The number of nodes it is sent to; 0 when no other node has the channel open. Of several nodes, those
            whose queue is full are skipped and counted as `refused`.

        Raises:
            ArgumentError: data over 0xFFF0 bytes.
            ClosedError: the channel is closed.
            QueueFullError: the queues of all nodes that have the channel open are full.
        """
        sent = self._channel.send(payload(data), None if node is None else peer.as_number("node", node))
        if sent.full and not sent.nodes:
            raise QueueFullError(f"the channel {self.name!r} is full at all nodes. Send again later.")
        return sent.nodes

    def nodes(self) -> dict[int, str]:
        """Return the numbers of the nodes that have the channel open, with the addresses of their links."""
        return self._channel.nodes()

    def counts(self) -> dict[str, int]:
        """Return the counters of messages.

        `sent` counts each node. `refused`: the queue of a node was full. `lost`: the link or the channel closed before
        delivery. `dropped`: received after this side closed.
        """
        return self._channel.counts()

    def close(self, msg: str | bytes = b"") -> None:
        """Close this side. Messages sent before still arrive; no callback is called here afterwards.

        A second call does nothing.

        Args:
            msg: reason for the other nodes, at most 1000 bytes.

        Raises:
            ArgumentError: `msg` is too long.
        """
        self._channel.close(peer.as_text("msg", msg))

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Mtl:
    """Links to other nodes, shared by the hubs of this process; see `create`."""

    def __init__(self, links: mtl.Links) -> None:
        self.links = links
        current_process.close_with_app(links)

    def commence(self, sock: Stream, status: OnStatus | None = None) -> bool:
        """Turn a connection to another node into a link.

        Args:
            sock: the connection, which belongs to the link from now on.
            status: `f(address, up, why)`, called when the link opens and when it closes.

        Returns:
            False after `shutdown`.

        Raises:
            ArgumentError: the links are those of the server.
        """
        links = mtl.own(self.links)
        host, port = sock.peername()
        transport, data = sock.release()  # bytes already received also belong to the link
        return links.commence(transport, data, True, f"{host}:{port}", in_new_greenlet("status", status))

    def open(self, name: str | bytes, on_status: OnNode, on_data: OnData) -> Channel:
        """Open a channel to the channels of the same name at other nodes.

        Args:
            name: 1 to 1000 bytes. Names of channels and of clusters are independent.
            on_status: `f(node, up, why)`, called when node number `node` opens the channel, and when it closes it or
                its link is lost.
            on_data: `f(data, node)`, called with each message as bytes, in order for each node.

        Both may block; later calls wait. Exceptions are logged.

        Raises:
            ArgumentError: the channel is already open, the name is invalid, 400 channels are open, or more than 4 are
                opened in a second.
            ClosedError: the links were shut down.
        """
        guard = Guard(f"the channel {name!r} opened at {calling_line()}")
        status = partial(guard.call, "on_status", peer.as_function("on_status", on_status))
        data = partial(guard.call, "on_data", peer.as_function("on_data", on_data))
        return Channel(self.links.open(peer.as_text("name", name), status, data))

    def isopen(self, name: str | bytes) -> bool:
        """Return whether a channel `name` is open, or a hub is in a cluster `name`."""
        return self.links.isopen(peer.as_text("name", name))

    def hascon(self, host: str) -> bool:
        """Return whether there is a link to a node at an address."""
        return self.links.hascon(host)

    def shutdown(self) -> None:
        """Leave all clusters, close all channels and close all links.

        For the links of the server, only close the channels opened through this object. A second call does nothing.
        """
        self.links.shutdown()

    def close(self, name: str | bytes | None = None, msg: str | bytes = b"") -> bool:
        """Close the channel `name`, or leave the cluster `name`. Without a name, do the same as `shutdown`.

        Args:
            msg: reason for the other nodes, at most 1000 bytes.

        Returns:
            False when neither exists.

        Raises:
            ArgumentError: `msg` is too long.
        """
        if name is None:
            self.shutdown()
            return True
        return self.links.close_named(peer.as_text("name", name), peer.as_text("msg", msg))

    def __enter__(self) -> Mtl:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def create(
    password: str | bytes,
    *,
    onstatus: OnStatus | None = None,
    ping: Mapping[str, object] | None = None,
    keepalive: float | None = None,
    keepintv: float | None = None,
    on_round_trip: OnRoundTrip | None = None,
    log: Callable[[str, bool], object] | None = None,
    ping_s: float = 1.0,
    silence_s: float = 5.0,
    node: int = 0,
) -> Mtl:
    """Create links to other nodes with the same password.

    Args:
        password: shared by all nodes. Deriving the key takes 50 ms.
        onstatus: `f(address, up, why)`, called when a link opens or closes.
        ping: `timespan` and `timeout` in seconds. Each node is pinged every `timespan` (8) and is lost after `timespan`
            plus `timeout` without data. `timeout` is at least 2, `timespan` at least four times as long.
            `roundtripCB` is the same as `on_round_trip`.
        keepalive, keepintv: without `ping`: pinged every `keepintv` (2 s), lost after `keepalive` (20 s) without data.
        on_round_trip: `f(address, ms)`, called after each ping with the round-trip time; None when there was no answer
            within `silence_s - ping_s`, or the link closed before.
        log: `f(text, is_urgent)`, called with events of links. Urgent ones are also in the log of the server.
        ping_s: interval of pings without `ping` and `keepalive`, 0.05 to 3600 s.
        silence_s: a node is lost after this time without data; more than `ping_s`, at most 3600 s.
        node: fixed number of this node, 1 to 1023; 0 picks a random one.

    Raises:
        ArgumentError: the password is empty, or the number or a time is out of range.
    """
    if ping is not None:
        pings = make(PingOptions, ping)
        ping_s, silence_s = pings.times()
        on_round_trip = pings.roundtripCB or on_round_trip
    elif keepalive is not None or keepintv is not None:
        ping_s = _SECONDS.check("keepintv", 2.0 if keepintv is None else keepintv)
        silence_s = _SECONDS.check("keepalive", 20.0 if keepalive is None else keepalive)
        if not mtl.MIN_PING_S <= ping_s < silence_s:
            raise ArgumentError(
                f"keepalive: {silence_s:g}, keepintv {ping_s:g}; keepintv is at least 0.05 s, keepalive more than that "
                "and at most 3600 s"
            )
    options = mtl.MtlOptions(
        ping_s,
        silence_s,
        node,
        onstatus=in_new_greenlet("onstatus", onstatus),
        on_round_trip=in_new_greenlet("on_round_trip", on_round_trip),
        log=in_new_greenlet("log", log),
    )
    return Mtl(mtl.Mtl(peer.as_text("password", password), options))


def server() -> Mtl:
    """Return the links of this server, made by its settings or its workers, to open channels over them.

    Raises:
        ArgumentError: the cluster settings are invalid.
    """
    return Mtl(mtl.Links(cluster.opened()))


def in_new_greenlet(what: str, function: Callable[..., Any] | None) -> Callable[..., object]:
    """Return a function that runs `function` in a new greenlet, so that its caller does not wait. Errors are logged."""
    if function is None:
        return mtl.ignore_event
    call = partial(Guard(f"the links made at {calling_line()}").call, what, peer.as_function(what, function))
    return partial(greenlets.start, call)

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
from smqrt.hub import conversions
from smqrt.hub.callbacks import Guard, calling_line
from smqrt.loop import greenlet_pool
from smqrt.process import current_application
from smqrt.settings.options import function, make, number, option, optional
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
_LEAST_TIMEOUT_S, _TIMEOUTS_IN_TIMESPAN = 2.0, 4
_SECONDS = number(0, mtl.LONGEST_S, "seconds", above=True)


@dataclass(frozen=True, kw_only=True)
class PingOptions:
    """The option `ping` of `create`."""

    timespan: float = option(8.0, _SECONDS, "How often another node is asked whether it is there.")
    timeout: float = option(_LEAST_TIMEOUT_S, _SECONDS, "How long its answer may take.")
    roundtripCB: OnRoundTrip | None = option(None, optional(function()), "Told of each ping.")

    def times(self) -> tuple[float, float]:
        """Returns `ping_s` and `silence_s`."""
        timespan, timeout = self.timespan, self.timeout
        if not (timeout >= _LEAST_TIMEOUT_S and _TIMEOUTS_IN_TIMESPAN * timeout <= timespan <= mtl.LONGEST_S - timeout):
            raise ArgumentError(
                f"ping: timespan {timespan:g}, timeout {timeout:g}; timeout is 2 s at least, timespan four times as "
                "long, both 3600 s at most"
            )
        return timespan, timespan + timeout


def _keepalive_times(keepalive: float | None, keepintv: float | None) -> tuple[float, float]:
    """Returns `ping_s` and `silence_s` for the documented options."""
    ping_s = _SECONDS.check("keepintv", 2.0 if keepintv is None else keepintv)
    silence_s = _SECONDS.check("keepalive", 20.0 if keepalive is None else keepalive)
    if not mtl.LEAST_PING_S <= ping_s < silence_s:
        raise ArgumentError(
            f"keepalive: {silence_s:g}, keepintv {ping_s:g}; keepintv is 0.05 s at least, keepalive more than that and "
            "3600 s at most"
        )
    return ping_s, silence_s


class Channel:
    """A channel of an application's own between nodes; see `Mtl.open`."""

    def __init__(self, made: AppChannel) -> None:
        self._channel = made
        current_application.close_with_app(made)

    @property
    def name(self) -> str | bytes:
        """The same at all nodes; bytes when it is not UTF-8."""
        return conversions.text_of(self._channel.name)

    def send(self, data: Payload, node: int | None = None) -> int:
        """Send a message to all other nodes that have the channel open, or to one.

        Args:
            data: as `Smq.publish` takes it; it arrives as bytes.
            node: the number of a node.

        Returns:
            To how many nodes it is on its way: 0 when nobody is there. Of several nodes, those that don't keep up are
            left out, and counted as `refused`.

        Raises:
            ArgumentError: data over 0xFFF0 bytes.
            ClosedError: the channel is closed.
            QueueFullError: somebody is there, and nobody of them has handled enough of what was sent before.
        """
        sent = self._channel.send(payload(data), None if node is None else conversions.as_number("node", node))
        if sent.full and not sent.nodes:
            raise QueueFullError(f"the channel {self.name!r} is full: the other side has not handled what was sent yet")
        return sent.nodes

    def nodes(self) -> dict[int, str]:
        """The numbers of the nodes that have the channel open, and where the links to them go."""
        return self._channel.nodes()

    def counts(self) -> dict[str, int]:
        """How many messages were sent (counted for each node), received, refused because a node does not keep up, lost
        (sent, but a link broke or the other side closed), and dropped (came, and were handed to nobody).
        """
        return self._channel.counts()

    def close(self, msg: str | bytes = b"") -> None:
        """Close this side; what was sent still arrives, and no function is called here any more. A second call does
        nothing.

        Args:
            msg: why, for the other nodes; 1000 bytes at most.

        Raises:
            ArgumentError: `msg` is too long.
        """
        self._channel.close(conversions.as_text("msg", msg))

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Mtl:
    """Links that the hubs of this process share; see `create`."""

    def __init__(self, links: mtl.Links) -> None:
        self.links = links
        current_application.close_with_app(links)

    def commence(self, sock: Stream, status: OnStatus | None = None) -> bool:
        """Make a link of a connection to another node.

        Args:
            sock: the connection; it is the link's from now on.
            status: told when the link is up, and when it ends.

        Returns:
            False when that can't be: this was shut down.

        Raises:
            ArgumentError: these are the server's links.
        """
        links = mtl.own(self.links)
        host, port = sock.peername()
        transport, data = sock.release()
        told = later("status", status)
        return links.commence(transport, data, True, f"{host}:{port}", told)

    def open(self, name: str | bytes, on_status: OnNode, on_data: OnData) -> Channel:
        """Open a channel of the application's own: it leads to the channels of the same name at other nodes.

        Args:
            name: 1 to 1000 bytes. A hub of that name is another thing.
            on_status: `f(node, up, why)`, told when another node has the channel open, and when it has no more or the
                link to it is lost; `node` is its number.
            on_data: `f(data, node)`, gets each message as bytes; those of one node in the order they were sent in.

        Both may block: what comes later waits for them. What they raise is logged.

        Raises:
            ArgumentError: the channel is open already, or it is no name; 400 channels are open, or they are opened more
                than 4 times a second.
            ClosedError: the links were shut down.
        """
        guard = Guard(f"the channel {name!r} opened at {calling_line()}")
        status = partial(guard.call, "on_status", conversions.as_function("on_status", on_status))
        data = partial(guard.call, "on_data", conversions.as_function("on_data", on_data))
        return Channel(self.links.open(conversions.as_text("name", name), status, data))

    def isopen(self, name: str | bytes) -> bool:
        """Whether such a channel is open, or a hub is in the cluster `name`."""
        return self.links.isopen(conversions.as_text("name", name))

    def hascon(self, host: str) -> bool:
        """Whether there is a link to a node at that address."""
        return self.links.hascon(host)

    def shutdown(self) -> None:
        """Leave all clusters, close all channels and end all links; of the server's links, close the channels that were
        opened through this. A second call does nothing.
        """
        self.links.shutdown()

    def close(self, name: str | bytes | None = None, msg: str | bytes = b"") -> bool:
        """Close the channel `name`; where none is open, the hub leaves that cluster. Without a name, as `shutdown`.

        Args:
            msg: why, for the other nodes; 1000 bytes at most.

        Returns:
            False when there is neither.

        Raises:
            ArgumentError: `msg` is too long.
        """
        if name is None:
            self.shutdown()
            return True
        return self.links.close_named(conversions.as_text("name", name), conversions.as_text("msg", msg))

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
    """Links to other nodes with the same password.

    Args:
        password: takes 50 ms to make a key of.
        onstatus: told of every link.
        ping: `timespan` and `timeout` in seconds: another node is asked each `timespan` (8) whether it is there, and
            lost after both together without a word. `timeout` is 2 at least, `timespan` four times as long.
            `roundtripCB` is `on_round_trip`.
        keepalive, keepintv: without `ping`: asked each `keepintv` (2 s), lost after `keepalive` (20 s) without a word.
        on_round_trip: `f(address, ms)`, told of each ping: the milliseconds until its answer; None when that has not
            come within `silence_s - ping_s`, or the link has ended before.
        log: `f(text, is_urgent)`, told of what happens to links; what is urgent is in the server's log, too.
        ping_s: how often other nodes are asked whether they are there, 0.05 to 3600; without `ping` and `keepalive`.
        silence_s: after so long without a word one is lost; more than `ping_s`, 3600 at most.
        node: a fixed number of this node, 1 to 1023; 0 draws one.

    Raises:
        ArgumentError: the password is empty, the number is none, or a time is none.
    """
    if ping is not None:
        pings = make(PingOptions, ping)
        ping_s, silence_s = pings.times()
        on_round_trip = pings.roundtripCB or on_round_trip
    elif keepalive is not None or keepintv is not None:
        ping_s, silence_s = _keepalive_times(keepalive, keepintv)
    functions = {"onstatus": onstatus, "on_round_trip": on_round_trip, "log": log}
    told, timed, logged = (later(what, function) for what, function in functions.items())
    options = mtl.MtlOptions(ping_s, silence_s, node, told, timed, logged)
    return Mtl(mtl.Mtl(conversions.as_text("password", password), options))


def server() -> Mtl:
    """The links of this server, which its settings or its workers make: to open channels over them.

    Raises:
        ArgumentError: the settings can't be followed.
    """
    return Mtl(mtl.Links(cluster.opened()))


def later(what: str, function: Callable[..., Any] | None) -> Callable[..., object]:
    """Returns `function` in a greenlet of its own: who tells it something must not wait. Its errors are logged."""
    if function is None:
        return mtl.nobody
    call = partial(Guard(f"the links made at {calling_line()}").call, what, conversions.as_function(what, function))
    return partial(greenlet_pool.start, call)

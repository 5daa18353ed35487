"""A broker under gevent: behind sockets, with a clock, random numbers, a file of names, and a way in for threads."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakSet

from smqrt.broker.broker import Broker, Name, check_size
from smqrt.broker.state import Hooks
from smqrt.broker.topics import NameLimits, NameStore
from smqrt.net import datapath, handover, wsgi
from smqrt.net.handover import KEEPALIVE_SECONDS, Admission, KeepAlive, Origin
from smqrt.net.listener import KEEPALIVE_IDLE_S
from smqrt.net.namestore import SqliteNames
from smqrt.net.origins import Origins
from smqrt.options import NotThisError, Rule, option, optional, path, switch, whole


def _origins(value: object) -> Origins:
    if not isinstance(value, str | Iterable):
        raise NotThisError
    return Origins(value)


_ORIGINS = Rule("a text, or a list of texts", _origins)


@dataclass(slots=True)
class HubOptions:
    """The options of `create` that are neither callbacks nor the journal (specification: smq.md §2.2)."""

    keepidle_s: int = option(
        KEEPALIVE_IDLE_S, KEEPALIVE_SECONDS, "TCP keep-alive of clients: seconds of silence before", name="keepidle"
    )
    keepintv_s: int = option(
        0, KEEPALIVE_SECONDS, "and seconds between", name="keepintv", shown="a tenth of `keepidle`, at least 3"
    )
    readtmo_ms: int = option(
        4000, whole(1, unit="ms"), "Milliseconds in which a client must send Connect", name="readtmo"
    )
    queuesize: int = option(
        200,
        whole(1),
        "How many messages of the server may wait while `onpublish` blocks; further ones are dropped and counted",
    )
    budget_bytes: int | None = option(
        None,
        optional(whole(1, unit="bytes")),
        "What may wait for one client that does not read, in bytes, see [the data path](data-path.md)",
        name="budget",
        shown="1 MiB",
    )
    origins: Origins | None = option(
        None,
        optional(_ORIGINS),
        "Pages of other hosts that may connect, a list or a text with commas: `https://example.com`, "
        "`https://*.example.com`, `null`; `*` for all. The setting `origins` opens all hubs",
    )
    maxnames: int = option(250_000, whole(1), "Topics in all, and sub-topics in all; see [limits](limits.md#brokers)")
    clientnames: int = option(
        10_000, whole(1), "Names that one client may bring in; its subscriptions; what it observes"
    )
    rndtid: bool = option(False, switch(), "The server's own etid is random instead of 1")
    persist: str | None = option(
        None,
        optional(path()),
        "A file that keeps topic and sub-topic names with their numbers over restarts (SQLite, for one hub only). A "
        "client is told a number when the disk has it; names of one turn share a commit. While the disk is full or "
        "fails, or takes longer than 10 s, clients that ask for new names are denied them, and the log says so once; "
        "it is tried again by itself. What the server creates itself is saved soon after, at the latest by `close`",
        shown="none",
    )


_brokers: WeakSet[GeventBroker] = WeakSet()


def close_all() -> None:
    """Close every broker of this process, as the server does when it stops."""
    for broker in list(_brokers):
        broker.close()


class GeventBroker(Broker):
    """A broker whose clients come through HTTP requests.

    Args:
        hooks: the application's callbacks.
        options: the other options of `create`.

    Raises:
        ArgumentError: a time for TCP keep-alive that Linux refuses; the `persist` file can't be used.
    """

    def __init__(self, hooks: Hooks, options: HubOptions) -> None:
        datapath.install()
        keep_alive = KeepAlive(options.keepidle_s, options.keepintv_s)
        self._admission = Admission(options.readtmo_ms, options.budget_bytes, options.origins, keep_alive)
        store: NameStore | None = SqliteNames(options.persist) if options.persist else None
        super().__init__(
            hooks,
            random_u32=random_u32,
            clock=time.monotonic,
            encode=datapath.encode,
            store=store,
            random_server_etid=options.rndtid,
            queue_size=options.queuesize,
            limits=NameLimits(options.maxnames, options.clientnames),
        )
        self.limit_chunks = handover.limit_chunks
        _brokers.add(self)

    def connect(self, request: object, arg: object = None) -> bool:
        """Turn an HTTP request into an SMQ connection; blocks until the handshake ended (specification: smq.md §2.3).

        A request that is not SMQ gets 404, one of a page of another host 403, any when this broker is closed 503.
        Returns false when nothing was answered, because the WSGI server hands no connections over.
        """
        origin = Origin(request, arg)
        if isinstance(request, dict):
            if wsgi.HANDLER not in request:
                return wsgi.connect(self, self._admission, request, origin)
            request = wsgi.HandlerRequest(request)
        handover.connect(self, self._admission, request, origin)
        return True

    def setkeepalive(self, idle_s: int, interval_s: int = 0) -> None:
        """Set TCP keep-alive for new connections; the interval is a tenth of the idle time by default, at least 3 s."""
        self._admission.keep_alive.set(idle_s, interval_s)

    def publish_threadsafe(
        self, data: bytes, topic: Name, subtopic: Name | None = None, ptid: int | None = None
    ) -> bool:
        """As `publish`, from any thread; false when so much waits for the loop that this was not taken."""
        self._check_open()
        check_size(data)
        return datapath.inlet.put(len(data), self.publish, data, topic, subtopic, ptid)

    def close(self) -> None:
        """As `Broker.close`; first what threads have handed in is published."""
        if not self.closed:
            datapath.inlet.drain()
            super().close()


_DRAW = struct.Struct("1024I")
_random: list[int] = []
"""Drawn by the thousand: a system call for each would show in connects."""


def random_u32() -> int:
    """A random 32-bit number that nobody can guess."""
    if not _random:
        _random.extend(_DRAW.unpack(os.urandom(_DRAW.size)))
    return _random.pop()


os.register_at_fork(after_in_child=_random.clear)  # two processes must not draw the same numbers

"""A broker under gevent: behind sockets, with a clock, random numbers, a file of names, and a way in for threads."""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from smqrt.broker.broker import Broker, Name, check_size
from smqrt.broker.hooks import Hooks
from smqrt.broker.topics import NameLimits, NameStore
from smqrt.net import datapath, handover, wsgi
from smqrt.net.handover import Admission, KeepAlive, Origin
from smqrt.net.listener import KEEPALIVE_IDLE_S
from smqrt.net.namestore import SqliteNames
from smqrt.net.origins import Origins


@dataclass(slots=True)
class HubOptions:
    """The options of `create` that are no callbacks (specification: smq.md §2.2)."""

    keepidle_s: int = KEEPALIVE_IDLE_S
    keepintv_s: int = 0
    readtmo_ms: int = 4000
    queuesize: int = 200
    rndtid: bool = False
    persist: str | None = None
    budget_bytes: int | None = None
    maxnames: int = 250_000
    clientnames: int = 10_000
    origins: Origins | None = None


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

    def connect(self, request: Any, arg: object = None) -> bool:
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

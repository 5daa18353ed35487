"""The last minutes of a server's SMQ clients: nobody new comes in, and those who are there are closed one by one over a
while, so that they do not all come back at the same moment.

    refuse_newcomers ──▶ handled: what was published has reached the handlers ──▶ close_clients: one by one

Nobody gets a Disconnect, which would tell a device not to come back: raw connections are closed, WebSockets with 1001.
Whoever only publishes goes first, so that what it has sent still finds its subscribers. Before a client is closed, what
has arrived from it is routed. One that has not read everything, or whose input waits for a hook, is put off to the end.
"""

from __future__ import annotations

import fcntl
import logging
import random
import struct
import termios
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Any

import gevent

from smqrt.broker.outbox import Drop, backlog, dirty
from smqrt.broker.session import Session
from smqrt.errors import CloseReason
from smqrt.loop.greenlet_pool import in_hub
from smqrt.loop.scheduling import Turn
from smqrt.smq import data_path
from smqrt.smq.connection import RawConnection
from smqrt.smq.gevent_broker import GeventBroker
from smqrt.transport import graceful_close
from smqrt.wire.connection_state import Life

log = logging.getLogger("smqrt")

FEW_CLIENTS = 100
COME_BACK_PER_S = 2000
"""What a server takes of clients that come back, with something left for those who work."""
MAX_WINDOW_S = 5.0
"""`docker stop` waits for 10 s in all."""
_READS = 16
"""Receives from one client before it is closed: 4 MiB at most, then it is cut off like any other."""
_LOOK_S = 0.005


def window_s(clients: int) -> float:
    """Give the seconds over which so many clients are closed when nobody has said: none for a few, 5 at most."""
    return 0.0 if clients < FEW_CLIENTS else min(clients / COME_BACK_PER_S, MAX_WINDOW_S)


def refuse_newcomers(brokers: Iterable[GeventBroker]) -> None:
    """Let nobody in any more: a request gets 503, and who has not sent Connect yet is closed."""
    for broker in brokers:
        broker.draining = True
    for connection in data_path.unfinished_connections():
        connection.session.disconnect(CloseReason.SHUTDOWN)


def wait_handled(brokers: Sequence[GeventBroker], most_s: float) -> int:
    """Wait until what was published has reached subscribers inside the server and left for those outside.

    Returns:
        how many messages still wait after `most_s` seconds.
    """
    end_s = monotonic() + most_s
    while (left := sum(broker.server.waiting() for broker in brokers)) or dirty or backlog or data_path.deferred_reads:
        if monotonic() >= end_s:
            break
        gevent.sleep(_LOOK_S)
    return left


def close_clients(brokers: Sequence[GeventBroker], over_s: float | None, patience_s: float) -> int:
    """Close all clients, one by one; blocks the greenlet.

    Args:
        brokers: whose clients.
        over_s: the seconds over which they are spread; None for what suits their number, see `window_s`.
        patience_s: for those at the end who have not read everything.

    Returns:
        how many they were.
    """
    clients = _in_order(brokers)
    late = _spread(clients, window_s(len(clients)) if over_s is None else over_s)
    end_s = monotonic() + patience_s
    while monotonic() < end_s and (late := [one for one in late if not in_hub(_leave, one)]):
        gevent.sleep(_LOOK_S)
    before = _undelivered(brokers)
    for session in _in_order(brokers):  # the late ones, and who was let in meanwhile
        session.disconnect(CloseReason.SHUTDOWN)
    if lost := _undelivered(brokers) - before:
        log.warning(
            "%d messages waited for clients that did not read them within %g s; see the setting drain_s",
            lost,
            patience_s,
        )
    return len(clients)


def _undelivered(brokers: Iterable[GeventBroker]) -> int:
    return sum(broker.stats.drops[Drop.CLOSED] for broker in brokers)


def wait_sent(most_s: float) -> None:
    """Wait until the machines of those whose connections are closing have what was sent, at most so many seconds."""
    end_s = monotonic() + most_s
    while graceful_close.is_sending() and monotonic() < end_s:
        gevent.sleep(_LOOK_S)


def _in_order(brokers: Iterable[GeventBroker]) -> list[Any]:
    """Publishers first, else at random: neighbours in a table may be neighbours in a building."""
    sessions = [session for broker in brokers for session in broker.sessions.values()]
    random.shuffle(sessions)
    return sorted(sessions, key=lambda session: bool(session.topics))


def _spread(clients: Sequence[Any], over_s: float) -> list[Any]:
    """Close each at its time; gives those that were put off."""
    late, begin_s, turn = [], monotonic(), Turn()
    for number, session in enumerate(clients, 1):
        wait_s = begin_s + over_s * number / len(clients) - monotonic()
        if wait_s > _LOOK_S:
            gevent.sleep(wait_s)
        turn.yield_if_due()
        if not in_hub(_leave, session):
            late.append(session)
    return late


def _leave(session: Session) -> bool:
    """Close a client that has read everything, and from which everything was read; whether it is closed."""
    if session.closed:
        return True
    outbox = session.outbox
    if isinstance(outbox, RawConnection):
        _read_what_is_there(outbox)
        if not session.closed and (outbox.paused or outbox.life is Life.BLOCKED):
            return False
    session.disconnect(CloseReason.SHUTDOWN)
    return True


def _read_what_is_there(connection: RawConnection) -> None:
    for _ in range(_READS):
        if connection.life.over or connection.paused or not _has_input(connection):
            return
        connection.on_readable()


def _has_input(connection: RawConnection) -> bool:
    if getattr(connection.transport, "has_pending", False):
        return True  # TLS has decrypted it already
    return bool(struct.unpack("i", fcntl.ioctl(connection.watcher.fd, termios.FIONREAD, bytes(4)))[0])

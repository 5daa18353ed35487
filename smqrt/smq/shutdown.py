"""Graceful shutdown of SMQ clients: accept no new ones, then close clients over the drain period.

    reject_new_clients ──▶ wait_handled: messages have reached the handlers ──▶ close_clients: one by one

The drain period prevents all clients from reconnecting at the same moment. No Disconnect packet is sent, because some
devices do not reconnect after one: raw connections are closed, WebSockets with code 1001. Clients without subscriptions
are closed first, so that their messages still reach subscribers. Received data of a client is routed before it is
closed. A client that has not read everything, or waits for a hook, is closed last.
"""

from __future__ import annotations

import fcntl
import logging
import random
import termios
from collections.abc import Iterable, Sequence
from time import monotonic

import gevent

from smqrt.broker.broker import Broker
from smqrt.broker.outbox import Drop, backlog, dirty
from smqrt.broker.state import BrokerClient
from smqrt.errors import CloseReason
from smqrt.loop.greenlets import in_hub
from smqrt.loop.scheduling import Turn
from smqrt.smq import data_path
from smqrt.smq.connection import RawConnection
from smqrt.transport import tls
from smqrt.wire.connection_state import Life

log = logging.getLogger("smqrt")

FEW_CLIENTS = 100
"""With fewer clients, the default drain period is 0."""
RECONNECTS_PER_S = 2000
"""Reconnects that another server handles besides its normal work."""
MAX_WINDOW_S = 5.0
"""Half of the time that `docker stop` waits before it kills the process (10 s)."""
_MAX_READS = 16
"""Receives from one client before it is closed: at most 4 MiB."""
_POLL_S = 0.005


def window_s(clients: int) -> float:
    """Return the default drain period for a number of clients, in seconds: 0 for a few, at most 5."""
    return 0.0 if clients < FEW_CLIENTS else min(clients / RECONNECTS_PER_S, MAX_WINDOW_S)


def reject_new_clients(brokers: Iterable[Broker]) -> None:
    """Accept no new clients: requests get 503, and unfinished handshakes are closed."""
    for broker in brokers:
        broker.draining = True
    for connection in data_path.unfinished_connections():
        connection.session.disconnect(CloseReason.SHUTDOWN)


def wait_handled(brokers: Sequence[Broker], max_s: float) -> int:
    """Wait until published messages are handled by the server and sent to its clients.

    Args:
        brokers: the brokers of the messages.
        max_s: the maximum time, in seconds.

    Returns:
        The number of messages that still wait.
    """
    end_s = monotonic() + max_s
    while (left := sum(broker.server.waiting() for broker in brokers)) or dirty or backlog or data_path.deferred_reads:
        if monotonic() >= end_s:
            break
        gevent.sleep(_POLL_S)
    return left


def close_clients(brokers: Sequence[Broker], over_s: float | None, patience_s: float) -> int:
    """Close all clients, one by one; blocks the greenlet.

    Args:
        brokers: the brokers of the clients.
        over_s: the drain period in seconds; None for the default of `window_s`.
        patience_s: additional time for clients that have not read everything, in seconds.

    Returns:
        The number of clients.
    """
    clients = _in_order(brokers)
    if over_s is None:
        over_s = window_s(len(clients))
    late, begin_s, turn = [], monotonic(), Turn()
    for number, session in enumerate(clients, 1):
        wait_s = begin_s + over_s * number / len(clients) - monotonic()
        if wait_s > _POLL_S:  # with many clients, several are closed without a pause
            gevent.sleep(wait_s)
        turn.yield_if_due()
        if not in_hub(_close_if_idle, session):
            late.append(session)
    end_s = monotonic() + patience_s
    while monotonic() < end_s and (late := [one for one in late if not in_hub(_close_if_idle, one)]):
        gevent.sleep(_POLL_S)
    before = _undelivered(brokers)
    for session in _in_order(brokers):  # those of `late`, and clients accepted meanwhile
        session.disconnect(CloseReason.SHUTDOWN)
    if lost := _undelivered(brokers) - before:
        log.warning(
            "%d messages waited for clients that did not read them within %g s; see the setting drain_s",
            lost,
            patience_s,
        )
    return len(clients)


def _undelivered(brokers: Iterable[Broker]) -> int:
    return sum(broker.stats.drops[Drop.CLOSED] for broker in brokers)


def wait_sent(max_s: float) -> None:
    """Wait until closing connections have delivered their data to the clients' machines, at most `max_s` seconds."""
    end_s = monotonic() + max_s
    while tls.is_sending() and monotonic() < end_s:
        gevent.sleep(_POLL_S)


def _in_order(brokers: Iterable[Broker]) -> list[BrokerClient]:
    """Return all clients: those without subscriptions first, otherwise shuffled, so that sites reconnect evenly."""
    sessions = [session for broker in brokers for session in broker.sessions.values()]
    random.shuffle(sessions)
    return sorted(sessions, key=lambda session: bool(session.topic_ids))


def _close_if_idle(session: BrokerClient) -> bool:
    """Close a client, unless its send queue or its received data is unfinished; return whether it is closed."""
    if session.closed:
        return True
    outbox = session.outbox
    if isinstance(outbox, RawConnection):
        outbox.leave_forwarder()
        for _ in range(_MAX_READS):
            if outbox.life.over or outbox.paused:
                break
            # Data that TLS has decrypted is not counted by FIONREAD.
            unread_bytes = fcntl.ioctl(outbox.watcher.fd, termios.FIONREAD, bytes(4))
            if not getattr(outbox.transport, "has_pending", False) and unread_bytes == bytes(4):
                break
            outbox.on_readable()
        if not session.closed and (outbox.paused or outbox.life is Life.BLOCKED):
            return False
    session.disconnect(CloseReason.SHUTDOWN)
    return True

"""Clients that go on at another hub: of the process that takes this one's place, or of the application that starts
again in this one.

    at the old hub    stand_still ──▶ settle ──▶ take ──▶ let_go     (or go_on, as if nothing had been)
    at the new hub                               place ──▶ begin

While a client stands still the kernel holds what it sends. What was read of it already is delivered, or goes along:
half a frame, half a message, what waits in its queue. Connections over TLS can go along within a process only: their
keys can't be sent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import gevent
from gevent import get_hub

from smqrt.broker import permissions, snapshot
from smqrt.broker.outbox import Held, put_off
from smqrt.broker.session import Session, SessionState
from smqrt.broker.snapshot import Record
from smqrt.broker.state import BrokerPeer
from smqrt.errors import CloseReason
from smqrt.net import datapath
from smqrt.net.connection import RawConnection
from smqrt.net.connection_kinds import WsConnection
from smqrt.net.handover import Origin, chunk_bytes, limit_chunks
from smqrt.net.readiness import READ
from smqrt.net.slow_consumers import connection_class
from smqrt.net.succession import SucceedingBroker
from smqrt.net.tls import TlsTransport, Transport
from smqrt.wire.life import Life
from smqrt.wire.websocket import Assembler

log = logging.getLogger("smqrt")

SETTLE_S = 0.1
"""How long hooks and handlers may take with what they are at."""
_LOOK_S = 0.002
_AT_ONCE = 500


def connection_record(connection: RawConnection) -> Record:
    """What is under way on a connection, in both directions."""
    if connection.backlog is not None:
        connection.backlog.close_holes(connection)
    record: Record = {
        "carry": bytes(connection.carry),
        "receive": connection.receive_bytes,
        "queue": list(connection.queue),
        "torn": connection.torn,
        "dropped": connection.dropped,
        "budget": connection.budget_bytes,
        "chunk": chunk_bytes(connection),
        "ws": None,
    }
    if isinstance(connection, WsConnection):
        assembler = connection.assembler
        record["ws"] = [connection.decoded, assembler.state() if assembler else None]
    return record


def connection_of(record: Record, transport: Transport, policed: bool) -> RawConnection:
    """The connection of a record, which is not read yet; `policed`: of a hub with slow-consumer policies."""
    watcher = get_hub().loop.io(transport.fileno(), READ)
    made = connection_class(type(transport) is TlsTransport, record["ws"] is not None, policed)
    connection = made(transport, watcher)
    connection.handshake, connection.life = None, Life.OPEN
    connection.carry, connection.receive_bytes = record["carry"], record["receive"]
    connection.dropped, connection.budget_bytes = record["dropped"], record["budget"]
    connection.queue, connection.torn = record["queue"], record["torn"]
    if isinstance(connection, WsConnection):
        connection.decoded, assembler = record["ws"]
        connection.assembler = Assembler.of(*assembler) if assembler else None
    return connection


class MovingClient:
    """A client that stands still at its old hub.

    Attributes:
        session, connection: its own.
        record: what goes along, once it was taken.
    """

    __slots__ = ("_carry", "_was_blocked", "connection", "record", "session")

    def __init__(self, session: Session, connection: RawConnection) -> None:
        self.session, self.connection = session, connection
        self.record: Record = {}
        self._carry: tuple[bytes, bytes] = (b"", b"")
        self._was_blocked = False
        datapath.still.add(connection)
        connection.watcher.stop()

    @property
    def address(self) -> str:
        """Of the client, as its connections are counted by it."""
        return str(getattr(self.connection.transport, "peer_host", None) or "")

    @property
    def is_busy(self) -> bool:
        """Whether what was read of it is still worked off, or a hook thinks about it."""
        meter = self.session.meter
        return self.connection.paused and not (meter is not None and meter.waits)

    def take(self) -> Record:
        """Take down what goes along. From now on nothing is sent either."""
        connection, session = self.connection, self.session
        kept = session.meter.take_kept() if session.meter is not None else b""
        if isinstance(connection, WsConnection):
            connection.decoded = kept + connection.decoded
        else:
            connection.carry = kept + connection.carry
        record = connection_record(connection)
        self.record = {"client": snapshot.client_record(session), "connection": record}
        self._carry = connection.carry, getattr(connection, "decoded", b"")
        connection.carry = b""
        if isinstance(connection, WsConnection):
            connection.decoded = b""
            record["ws"][0] = (session.pending or b"") + record["ws"][0]
        else:
            record["carry"] = (session.pending or b"") + record["carry"]
        self._was_blocked = connection.life is Life.BLOCKED
        connection.hold_back()
        return self.record

    def go_on(self) -> None:
        """Stay here, as if nothing had been."""
        connection = self.connection
        datapath.still.discard(connection)
        if connection.life.over:
            return
        if self.record:
            connection.carry = self._carry[0]
            if isinstance(connection, WsConnection):
                connection.decoded = self._carry[1]
            connection.send_again()
        if self.session.pending is not None:
            connection.paused = True
            return  # until the hook has answered
        connection.paused = True
        connection.resume()

    def let_go(self) -> None:
        """The client is the other hub's: forget it here, and close this process's own descriptor of its socket."""
        transport = self.detach()
        transport.close()

    def detach(self) -> Any:
        """Take the transport away from the connection, which is over."""
        datapath.still.discard(self.connection)
        _close_quietly(self.connection)
        snapshot.leave(self.session)
        return self.connection.transport


def _close_quietly(connection: RawConnection) -> None:
    """End a connection whose transport is somebody else's from now on."""
    if connection.life is Life.BLOCKED:
        Held.total_bytes -= connection.queued_bytes
    connection.life = Life.CLOSED
    datapath.unblocked(connection)
    connection.watcher.stop()
    connection.watcher.close()
    if connection.writer is not None:
        connection.writer.stop()
        connection.writer.close()


def can_move(session: Session, with_tls: bool) -> bool:
    """Whether a client can go along."""
    connection = session.outbox
    if not isinstance(connection, RawConnection) or session.state is not SessionState.CONNECTED:
        return False
    return with_tls or type(connection.transport) is not TlsTransport


class StandingHub:
    """A hub whose clients stand still from now on.

    Args:
        broker: the hub.
        with_tls: whether connections over TLS go along.

    Attributes:
        clients: those that go along.
        others: those that can't: over TLS, or of another WSGI server.
    """

    def __init__(self, broker: SucceedingBroker, with_tls: bool = False) -> None:
        self.broker = broker
        self.clients: list[MovingClient] = []
        self.others: list[Session] = []
        self._with_tls = with_tls
        self._seen: set[Any] = set()
        self._unhandled: list[bytes] = []
        self._onpublish = broker.hooks.onpublish
        self._enroll()

    def _enroll(self) -> None:
        for session in [one for one in self.broker.sessions.values() if one not in self._seen]:
            self._seen.add(session)
            assert isinstance(session, Session)
            connection: Any = session.outbox
            if can_move(session, self._with_tls):
                self.clients.append(MovingClient(session, connection))
                continue
            self.others.append(session)
            if isinstance(connection, RawConnection):
                datapath.still.add(connection)
                connection.watcher.stop()

    def settle(self, within_s: float = SETTLE_S) -> None:
        """Wait until hooks, handlers and handshakes have done what they are at. A hook that takes longer is asked again
        at the other hub; a client whose handshake takes longer is closed, and comes back.
        """
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s and not self._is_quiet():
            gevent.sleep(_LOOK_S)
        for connection in self._handshakes():
            connection.session.disconnect(CloseReason.RESTARTED)

    def _is_quiet(self) -> bool:
        is_busy = any(one.is_busy for one in self.clients) or self._handshakes()
        return not (is_busy or self.broker.server.waiting())

    def _handshakes(self) -> list[Any]:
        return [one for one in datapath.unfinished_connections() if one.session.broker is self.broker]

    def take(self) -> Record:
        """Take down everything at this instant; what of it belongs to a client is in its own record. What the
        application publishes from now on waits.
        """
        self._enroll()
        for one in [one for one in self.clients if one.session.closed]:
            self.clients.remove(one)
            datapath.still.discard(one.connection)
        self.broker.server.hold_publishes()
        self._unhandled = self.broker.server.take_unhandled()
        for one in self.clients:
            one.take()
        return {
            "names": snapshot.names_of(self.broker),
            "counters": snapshot.counters_of(self.broker),
            "unhandled": self._unhandled,
        }

    def go_on(self) -> None:
        """Everybody stays here, as if nothing had been."""
        for one in self.clients:
            one.go_on()
        self._read_others()
        for run in self._unhandled:
            self.broker.server.put(run)
        self.broker.server.go_on_publishing()

    def _read_others(self) -> None:
        for session in self.others:
            connection: Any = session.outbox
            datapath.still.discard(connection)
            if isinstance(connection, RawConnection) and not connection.life.over and not connection.paused:
                connection.paused = True
                connection.resume()

    def let_go(self, forward: Callable[[bytes, int, int], None]) -> None:
        """The clients are the other hub's. Those that could not go along are read as before, until they are closed;
        what they publish goes to `forward(run, tid, ptid)`. Others get turns meanwhile: to close 10,000 descriptors
        takes a quarter of a second.
        """
        for at in range(0, len(self.clients), _AT_ONCE):
            for one in self.clients[at : at + _AT_ONCE]:
                one.let_go()
            gevent.sleep(0)
        self._forget()

        def onpublish(run: bytes, tid: int, ptid: int, peer: BrokerPeer) -> bytes:
            forward(run, tid, ptid)
            return b""

        self._onpublish, self.broker.hooks.onpublish = self.broker.hooks.onpublish, onpublish
        for session in self.others:
            session.forget_routes()
        self._read_others()

    def begin_anew(self) -> None:
        """The other hub is gone after all, with its clients: they come back here."""
        self.broker.hooks.onpublish = self._onpublish
        for session in self.broker.sessions.values():
            session.forget_routes()
        self.broker.server.go_on_publishing()

    def hand_over(self) -> list[tuple[Record, Any]]:
        """The same within a process: gives each client's record and transport."""
        handed = [(one.record, one.detach()) for one in self.clients]
        self._forget()
        return handed

    def _forget(self) -> None:
        onmoved = self.broker.hooks.onmoved
        if onmoved:
            for one in self.clients:
                onmoved(one.session)
        snapshot.forget_clients(self.broker, {one.session for one in self.clients})


class ArrivingHub:
    """The clients of a hub as they are placed at the one that goes on for it.

    Args:
        broker: the hub that goes on.
        record: what `StandingHub.take` took down.

    Attributes:
        clients: how many there are so far.
        refused: how many could not be placed, and were closed.
    """

    def __init__(self, broker: SucceedingBroker, record: Record) -> None:
        self.broker = broker
        self.refused = 0
        self._rights = broker.identities.rights if broker.identities is not None else None
        self._placed: list[tuple[RawConnection, Record]] = []
        self._unhandled: list[bytes] = record["unhandled"]
        for name in snapshot.adopt_names(broker, record["names"]):
            log.warning("the topic %r has got the number that clients know it by; the application saw another", name)
        snapshot.add_counters(broker, record["counters"])

    @property
    def clients(self) -> int:
        """How many are here."""
        return len(self._placed)

    def place(self, record: Record, transport: Any) -> None:
        """Let a client take its place. It is not read before `begin`, and nothing is sent to it."""
        connection = connection_of(record["connection"], transport, self.broker.slow is not None)
        connection.hold_back()
        try:
            connection.session = snapshot.join(self.broker, connection, record["client"], self._rights)
        except snapshot.EtidTaken:
            self.refused += 1
            connection.watcher.close()
            transport.close()
            return
        if size_bytes := record["connection"]["chunk"]:
            limit_chunks(connection.session, size_bytes)
        self._placed.append((connection, record["client"]))

    def _look_again(self) -> None:
        """Who needs a login here and had none there comes back with one; of the others the rules may be new."""
        sessions = [connection.session for connection, _ in self._placed]
        if self.broker.identities is not None:
            for session in [one for one in sessions if one.identity is None]:
                session.disconnect(CloseReason.RESTARTED)
            put_off(permissions.look_again(sessions, self.broker.identities.still))

    def discard(self) -> None:
        """The old hub keeps its clients: forget them, and close this process's descriptors without touching the
        connections.
        """
        for connection, _ in self._placed:
            _close_quietly(connection)
            connection.transport.close()
            snapshot.leave(connection.session)
        snapshot.forget_clients(self.broker, {connection.session for connection, _ in self._placed})
        self._placed.clear()

    def begin(self) -> None:
        """All are here: go on where they were, and tell the application of each."""
        onconnect = self.broker.hooks.onconnect
        for connection, record in self._placed:
            snapshot.observe(connection.session, record)
        for connection, _ in self._placed:
            if onconnect:
                connection.session.origin = Origin.restored()
                onconnect(connection.session)
        for run in self._unhandled:
            self.broker.server.put(run)
        self._look_again()
        for connection, _ in self._placed:
            if not connection.life.over:  # the application may have closed it
                connection.send_again()
                connection.paused = True
                connection.resume()

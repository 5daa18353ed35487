"""Clients that go on at another hub: of the process that takes this one's place, or of the application that starts
again in this one.

    at the old hub    stand_still ──▶ settle ──▶ take ──▶ let_go     (or go_on, as if nothing had been)
    at the new hub    (prepare)                  place ──▶ begin

Clients that are at rest can be prepared before anybody stands still (precopy.py).

While a client stands still the kernel holds what it sends. What was read of it already is delivered, or goes along:
half a frame, half a message, what waits in its queue. Connections over TLS can go along within a process only: their
keys can't be sent.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import gevent
from gevent import get_hub, monkey

from smqrt.broker import permissions, snapshot
from smqrt.broker.outbox import QueuedMemory, run_in_background
from smqrt.broker.session import Session, SessionState
from smqrt.broker.snapshot import Record, adopt_values, values_of
from smqrt.broker.state import BrokerPeer
from smqrt.errors import CloseReason
from smqrt.loop.readiness import READ
from smqrt.process import current_application
from smqrt.smq import data_path
from smqrt.smq.connection import RawConnection
from smqrt.smq.connection_kinds import WsConnection
from smqrt.smq.handshake import Origin, chunk_bytes, limit_chunks
from smqrt.smq.hub_registry import SucceedingBroker, succession
from smqrt.smq.slow_consumers import connection_class
from smqrt.transport.tls import TlsTransport, Transport
from smqrt.wire.connection_state import Life
from smqrt.wire.websocket import Assembler

# ---- Connections as plain values, and back: what is under way on them in both directions.


def address_of(connection: RawConnection) -> str:
    """The address of the client, as its connections are counted by it."""
    return str(getattr(connection.transport, "peer_host", None) or "")


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


# ---- Pre-copy: clients whose records are sent ahead of their hub's move, while they are served on.
#
# Most clients say nothing in the second that this takes, so that at the move itself a number for each is enough: its
# record is still true.


class SentAhead:
    """A client whose record was taken down and sent.

    What a client may change by what it sends is not looked at again: its next read takes a mark off its connection's
    watcher, which costs those nothing that are read later. What others may change is compared.

    Args:
        number: by which both processes know the record.
        session: of the client, which is `is_at_rest`.

    Attributes:
        connection: of the client.
        record: what was taken down.
    """

    __slots__ = ("_facts", "_session", "connection", "number", "record")

    def __init__(self, number: int, session: Session) -> None:
        connection = session.outbox
        assert isinstance(connection, RawConnection)
        self.number, self._session, self.connection = number, session, connection
        self.record = client_and_connection(session, connection)
        self._facts = self._look()
        connection.watcher.callback = self._first_read

    def _first_read(self) -> None:
        connection = self.connection
        connection.watcher.callback = connection.on_readable
        connection.on_readable()

    @property
    def is_unread(self) -> bool:
        """Whether nothing was read since; to be asked before the watcher is stopped."""
        return bool(self.connection.watcher.callback == self._first_read)

    @property
    def is_true(self) -> bool:
        """Whether the record of a client that was not read still tells all of it."""
        return _has_nothing_under_way(self._session, self.connection) and self._look() == self._facts

    def _look(self) -> tuple[object, ...]:
        session, connection = self._session, self.connection
        made, topics = (session.names_made, session.names_made_bytes), len(session.topics or ())
        return session.identity, made, topics, connection.sock, connection.dropped


def client_and_connection(session: Session, connection: RawConnection) -> Record:
    """The record of a client."""
    return {"client": snapshot.client_record(session), "connection": connection_record(connection)}


def is_at_rest(session: Session) -> bool:
    """Whether the record of a client can be sent ahead: it can move, is read, and nothing is under way.

    One that observes goes with the others: what it was told changes by what others do.
    """
    connection = session.outbox
    if not isinstance(connection, RawConnection) or type(connection.transport) is TlsTransport:
        return False
    return not connection.paused and connection.watcher.active and _has_nothing_under_way(session, connection)


def _has_nothing_under_way(session: Session, connection: RawConnection) -> bool:
    if session.state is not SessionState.CONNECTED or connection.life is not Life.OPEN:
        return False
    if connection.queue or connection.carry or connection.torn or connection.backlog is not None:
        return False
    if isinstance(connection, WsConnection) and (connection.decoded or connection.assembler is not None):
        return False
    return not (session.observed or session.pending is not None or session.fragments is not None)


log = logging.getLogger("smqrt")

SETTLE_S = 0.1
"""How long hooks and handlers may take with what they are at."""
_LOOK_S = 0.002
_AT_ONCE = 500
OTHERS_TURN_S = 0.001
"""For those who are served between two portions; sleep(0) would look at no socket."""
PAUSE_S = 1.0
"""How long the other nodes of a cluster may take to say that they keep what is for a hub; its clients are served on."""
LINK_S = 5.0
"""The maximum time that what clients publish waits for links to the other nodes. A node that is silent for so long
counts as lost in any case. Usually it takes 30 ms; on a busy machine more than a second was measured.
"""
_new_poll = monkey.get_original("select", "poll")  # gevent's own makes a watcher for each
NO_ONE: Mapping[Session, SentAhead] = {}


class MovingClient:
    """A client that stands still at its old hub.

    Attributes:
        session, connection: its own.
        ahead: its record that was sent ahead; None when there is none.
        is_unchanged: whether that one is still true, once it was taken.
        record: what goes along, once it was taken.
    """

    __slots__ = ("_carry", "_is_unread", "ahead", "connection", "is_unchanged", "record", "session")

    def __init__(self, session: Session, connection: RawConnection, ahead: SentAhead | None = None) -> None:
        self.session, self.connection, self.ahead = session, connection, ahead
        self.record: Record = {}
        self.is_unchanged = False
        self._carry: tuple[bytes, bytes] = (b"", b"")
        self._is_unread = ahead is not None and ahead.is_unread
        data_path.still.add(connection)
        connection.watcher.stop()

    @property
    def is_busy(self) -> bool:
        """Whether what was read of it is still worked off, or a hook thinks about it."""
        meter = self.session.meter
        return self.connection.paused and not (meter is not None and meter.waits)

    def take(self) -> Record:
        """Take down what goes along. From now on nothing is sent either."""
        connection, session = self.connection, self.session
        if self.ahead is not None and self._is_unread and self.ahead.is_true:
            self.is_unchanged, self.record = True, self.ahead.record
            connection.hold_back()
            return self.record
        kept = session.meter.take_kept() if session.meter is not None else b""
        if isinstance(connection, WsConnection):
            connection.decoded = kept + connection.decoded
        else:
            connection.carry = kept + connection.carry
        self.record = client_and_connection(session, connection)
        record = self.record["connection"]
        self._carry = connection.carry, getattr(connection, "decoded", b"")
        connection.carry = b""
        if isinstance(connection, WsConnection):
            connection.decoded = b""
            record["ws"][0] = (session.pending or b"") + record["ws"][0]
        else:
            record["carry"] = (session.pending or b"") + record["carry"]
        connection.hold_back()
        return self.record

    def go_on(self) -> None:
        """Stay here, as if nothing had been."""
        connection = self.connection
        data_path.still.discard(connection)
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
        data_path.still.discard(self.connection)
        _close_quietly(self.connection)
        snapshot.leave(self.session)
        return self.connection.transport


def _close_quietly(connection: RawConnection) -> None:
    """End a connection whose transport is somebody else's from now on."""
    if connection.life is Life.BLOCKED:
        QueuedMemory.total_bytes -= connection.queued_bytes
    connection.life = Life.CLOSED
    data_path.unblocked(connection)
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


def pause_others(broker: SucceedingBroker) -> Record:
    """Have the other nodes of a hub's cluster keep what they publish for it, before it stands still. Blocks until they
    have said so, `PAUSE_S` at most.

    Returns:
        For `ArrivingHub.begin`: `node`, the number that they know this one by, and `others`, theirs.
    """
    if broker.cluster is None:
        return {}
    broker.cluster.pause()
    until_s = time.monotonic() + PAUSE_S
    while not broker.cluster.is_paused and time.monotonic() < until_s:
        gevent.sleep(OTHERS_TURN_S)
    return {"node": broker.cluster.number, "others": list(broker.cluster.others)}


class FrozenHub:
    """A hub whose clients stand still from now on.

    Args:
        broker: the hub.
        with_tls: whether connections over TLS go along.
        ahead: the clients whose records were sent ahead.

    Attributes:
        clients: those that go along.
        others: those that can't: over TLS, or of another WSGI server.
    """

    def __init__(
        self, broker: SucceedingBroker, with_tls: bool = False, ahead: Mapping[Session, SentAhead] = NO_ONE
    ) -> None:
        self.broker = broker
        self._ahead = ahead
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
                self.clients.append(MovingClient(session, connection, self._ahead.get(session)))
                continue
            self.others.append(session)
            if isinstance(connection, RawConnection):
                data_path.still.add(connection)
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
        return [one for one in data_path.unfinished_connections() if one.session.broker is self.broker]

    def take(self) -> Record:
        """Take down everything at this instant; what of it belongs to a client is in its own record. What the
        application publishes from now on waits.
        """
        self._enroll()
        for one in [one for one in self.clients if one.session.closed]:
            self.clients.remove(one)
            data_path.still.discard(one.connection)
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
            data_path.still.discard(connection)
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
            gevent.sleep(OTHERS_TURN_S)
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


class RestoredHub:
    """The clients of a hub as they are placed at the one that goes on for it.

    Args:
        broker: the hub that goes on.

    Attributes:
        clients: how many there are so far.
        refused: how many could not be placed, and were closed.
    """

    def __init__(self, broker: SucceedingBroker) -> None:
        self.broker = broker
        self.refused = 0
        self._rights = broker.identities.rights if broker.identities is not None else None
        self._prepared: dict[int, tuple[RawConnection, Record]] = {}
        self._placed: list[tuple[RawConnection, Record]] = []
        self._unhandled: list[bytes] = []

    @property
    def clients(self) -> int:
        """How many are here."""
        return len(self._placed)

    # ---- ahead of the move

    def prepare(self, number: int, record: Record, transport: Any) -> None:
        """Make ready for a client whose record is sent ahead. It is nobody here before it is placed."""
        self._prepared[number] = self._connection(record, transport), record

    def forget_prepared(self) -> None:
        """Those that are left do not come; their descriptors here are closed."""
        for connection, _ in self._prepared.values():
            _close_quietly(connection)
            connection.transport.close()
        self._prepared.clear()

    # ---- the move

    def adopt(self, record: Record) -> None:
        """Take over what `StandingHub.take` took down of the hub itself."""
        self._unhandled = record["unhandled"]
        for name in snapshot.adopt_names(self.broker, record["names"]):
            log.warning("the topic %r has got the number that clients know it by; the application saw another", name)
        snapshot.add_counters(self.broker, record["counters"])

    def place(self, record: Record, transport: Any) -> None:
        """Let a client take its place. It is not read before `begin`, and nothing is sent to it."""
        self._join(self._connection(record, transport), record)

    def place_prepared(self, numbers: Iterable[int]) -> None:
        """Let clients take their places whose records that were sent ahead are still true."""
        for number in numbers:
            self._join(*self._prepared.pop(number))

    def place_changed(self, number: int, record: Record) -> None:
        """Let a client take its place whose record is another one by now."""
        connection, _ = self._prepared.pop(number)
        _close_quietly(connection)
        self.place(record, connection.transport)

    def _connection(self, record: Record, transport: Any) -> RawConnection:
        connection = connection_of(record["connection"], transport, self.broker.slow is not None)
        connection.hold_back()
        return connection

    def _join(self, connection: RawConnection, record: Record) -> None:
        try:
            connection.session = snapshot.join(self.broker, connection, record["client"], self._rights)
        except snapshot.EtidTaken:
            self.refused += 1
            connection.watcher.close()
            connection.transport.close()
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
            run_in_background(permissions.look_again(sessions, self.broker.identities.revalidate))

    def discard(self) -> None:
        """The old hub keeps its clients: forget them, and close this process's descriptors without touching the
        connections.
        """
        self.forget_prepared()
        for connection, _ in self._placed:
            _close_quietly(connection)
            connection.transport.close()
            snapshot.leave(connection.session)
        snapshot.forget_clients(self.broker, {connection.session for connection, _ in self._placed})
        self._placed.clear()

    def begin(self, place: Record) -> None:
        """All are here: go on where they were, and tell the application of each.

        Args:
            place: that of the old hub in its cluster, see `pause_others`. What the clients publish waits until this
                hub reaches the nodes that the old one reached, `LINK_S` at most.
        """
        self.forget_prepared()
        if self.refused:
            log.error("clients that could not go on, since others have their ETIDs or uids here: %d", self.refused)
        if self.broker.cluster is not None:
            self.broker.cluster.succeed(place.get("node", 0))
            self.broker.cluster.resync()
        onconnect = self.broker.hooks.onconnect
        for connection, record in self._placed:
            if record["observed"]:
                snapshot.observe(connection.session, record)
        if onconnect:
            for connection, _ in self._placed:
                connection.session.origin = Origin.restored()
                onconnect(connection.session)
        for run in self._unhandled:
            self.broker.server.put(run)
        self._look_again()
        connections = [one for one, _ in self._placed if not one.life.over]  # the application may have closed it
        for connection in connections:
            connection.send_again()
            connection.paused = True
        gevent.spawn(self._read_again, connections, place.get("others", ()))

    def _read_again(self, connections: list[RawConnection], others: Iterable[int]) -> None:
        """In portions: those who are read already get turns meanwhile."""
        cluster, until_s = self.broker.cluster, time.monotonic() + LINK_S
        while cluster is not None and not cluster.others.issuperset(others) and time.monotonic() < until_s:
            gevent.sleep(OTHERS_TURN_S)
        ordered = _waiting_first([one for one in connections if not one.life.over and one not in data_path.still])
        for at in range(0, len(ordered), _AT_ONCE):
            for connection in ordered[at : at + _AT_ONCE]:
                connection.resume()
            gevent.sleep(OTHERS_TURN_S)


def _waiting_first(connections: list[RawConnection]) -> list[RawConnection]:
    """Those first who have sent something meanwhile, or have half a message here."""
    poll = _new_poll()
    for one in connections:
        poll.register(one.transport, select.POLLIN)
    waiting = {fd for fd, _ in poll.poll(0)}
    return sorted(connections, key=lambda one: not (one.carry or one.transport.fileno() in waiting))


# ---- Hubs with `keep`: their clients stay connected while their application starts again in this process.
#
# the application ends ──▶ kept: not read, nothing sent ──▶ it has started again: they go on at its new hub
#                                  └──── KEEP_S ───▶ closed, and they come back when there is a hub again

KEEP_S = 10.0
"""For an application that does not start again, by a mistake in it for instance."""


class _Kept(NamedTuple):
    record: Record
    values: list[Record]
    clients: list[tuple[Record, Any]]
    place: Record
    timer: Any


_kept: dict[str, _Kept] = {}


def keep(broker: SucceedingBroker) -> None:
    """Keep the clients of a hub that is closed next; blocks until hooks have done what they are at, and the
    other nodes of its cluster keep what is for it.
    """
    place = pause_others(broker)
    standing = FrozenHub(broker, with_tls=True)
    standing.settle()
    record = standing.take()
    timer = get_hub().loop.timer(KEEP_S, ref=False)
    _kept[broker.key] = _Kept(record, list(values_of(broker)), standing.hand_over(), place, timer)
    succession.names[broker.key] = record["names"]
    timer.start(drop, broker.key)


def claim(broker: SucceedingBroker) -> None:
    """A hub was made: once its application is loaded, the clients that were kept for it go on there."""
    if broker.key not in _kept:
        return
    for portion in _kept[broker.key].values:
        adopt_values(broker, portion)
    app = current_application.current_app.get()
    if app is None:
        get_hub().loop.run_callback(_give, broker)
    else:
        app.when_loaded.append(lambda: _give(broker))


def _give(broker: SucceedingBroker) -> None:
    kept = None if broker.closed else _take(broker.key)
    if kept is None:
        return
    arriving = RestoredHub(broker)
    arriving.adopt(kept.record)
    for record, transport in kept.clients:
        arriving.place(record, transport)
    arriving.begin(kept.place)


def _take(key: str) -> _Kept | None:
    kept = _kept.pop(key, None)
    if kept is not None:
        del succession.names[key]
        kept.timer.stop()
        kept.timer.close()
    return kept


def drop(key: str) -> None:
    """Close the clients that are kept for a hub; nothing happens when there are none."""
    kept = _take(key)
    for _, transport in kept.clients if kept else ():
        transport.close()
    broker = succession.find(key)
    if broker is not None and broker.cluster is not None and broker.cluster.awaits_clients:
        broker.cluster.resync()


def drop_all() -> None:
    """Close all of them, as the server does when it stops."""
    for key in list(_kept):
        drop(key)

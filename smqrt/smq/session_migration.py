"""Migration of connected clients to another hub.

The other hub belongs to the new process of a hot restart, or to an application that restarts in this process.

    old hub    FrozenHub ──▶ settle ──▶ take ──▶ release     (or roll_back)
    new hub    (prepare)                place ──▶ begin

A frozen client is not read, and the kernel buffers its data. Data that was read before is delivered, or is part of the
client's record: a partial frame or message, and the send queue. Records of clients without unfinished data can be sent
before their hub is frozen (pre-copy). Connections over TLS can migrate only within a process: their keys can't be sent.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import gevent
from gevent import get_hub, monkey

from smqrt.broker import client_limits, sessions
from smqrt.broker.mqtt import records as mqtt_records
from smqrt.broker.mqtt.client import MqttClient
from smqrt.broker.mqtt.packed_records import packed_record, restore_packed
from smqrt.broker.outbox import EMPTY_QUEUE, QueuedMemory, run_in_background
from smqrt.broker.sessions import Record, Session, SessionState, adopt_values, values_of
from smqrt.broker.state import BrokerClient, BrokerPeer
from smqrt.errors import CloseReason
from smqrt.loop.scheduling import READ
from smqrt.process import current_process
from smqrt.smq import data_path, forwarder
from smqrt.smq.connection import RawConnection
from smqrt.smq.connection_kinds import WsConnection, connection_class
from smqrt.smq.handshake import Origin, chunk_bytes, limit_chunks
from smqrt.smq.hub_registry import RegisteredBroker, hub_registry
from smqrt.smq.mqtt_connection import MqttConnection, mqtt_connection_class
from smqrt.transport.tls import TlsTransport, Transport
from smqrt.wire.connection_state import Life
from smqrt.wire.websocket import Assembler

# ---- Connections as records of plain values, and back


def address_of(connection: RawConnection) -> str:
    """Return the address of the client; limits of connections count by it."""
    return str(getattr(connection.transport, "peer_host", None) or "")


def connection_record(connection: RawConnection) -> Record:
    """Return the unfinished data of a connection, in both directions."""
    if connection.backlog is not None:  # its positions are not part of the record, and empty entries would be sent
        connection.backlog.compact(connection)
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
    if isinstance(connection, MqttConnection):
        record["mqtt"], record["carry"] = connection.record(), b""
    return record


def connection_of(record: Record, transport: Transport, policed: bool) -> RawConnection:
    """Return the connection of a record. It is not read yet.

    Args:
        record: see `connection_record`.
        transport: the socket, or the `TlsTransport`.
        policed: whether the hub has slow-consumer policies.
    """
    watcher, is_secure = get_hub().loop.io(transport.fileno(), READ), type(transport) is TlsTransport
    connection: RawConnection
    if "mqtt" in record:
        found = record["mqtt"]
        connection = mqtt_connection_class(is_secure, found["ws"])(transport, watcher, found["limit"])
        connection.restore(found)
    else:
        connection = connection_class(is_secure, record["ws"] is not None, policed)(transport, watcher)
    connection.handshake, connection.life = None, Life.OPEN
    connection.carry, connection.receive_bytes = record["carry"], record["receive"]
    connection.dropped, connection.budget_bytes = record["dropped"], record["budget"]
    connection.queue, connection.torn = record["queue"] or EMPTY_QUEUE, record["torn"]
    if isinstance(connection, WsConnection):
        connection.decoded, assembler = record["ws"]
        connection.assembler = Assembler.of(*assembler) if assembler else None
    return connection


# ---- Pre-copy: records of clients are sent before their hub is frozen, while they are still served
#
# Most clients send no data in the second that this takes. Their records are then still valid, and the migration sends
# only their numbers.


class PrecopiedClient:
    """A client whose record was sent before the migration.

    State that the client changes is not compared: its next read removes a mark from the watcher of its connection, so
    that later reads cost no time. State that other clients or the application change is compared.

    Args:
        number: identifies the record in both processes.
        session: the session of the client, for which `is_at_rest` is true.

    Attributes:
        number: see above.
        connection: the connection of the client.
        record: the sent record.
    """

    __slots__ = ("_session", "_state", "connection", "number", "record")

    def __init__(self, number: int, session: Session) -> None:
        connection = session.outbox
        assert isinstance(connection, RawConnection)
        self.number, self._session, self.connection = number, session, connection
        self.record = client_and_connection(session, connection)
        self._state = self._current_state()
        connection.leave_forwarder()
        connection.watcher.callback = self._first_read

    def _first_read(self, connection: RawConnection) -> None:
        connection.watcher.callback = type(connection).on_readable
        connection.on_readable()

    @property
    def is_unread(self) -> bool:
        """Whether no data was read since the record was made; valid until the watcher is stopped."""
        return bool(self.connection.watcher.callback == self._first_read)

    @property
    def is_valid(self) -> bool:
        """Whether the record of a client that was not read is still valid."""
        return _has_no_unfinished_data(self._session, self.connection) and self._current_state() == self._state

    def _current_state(self) -> tuple[object, ...]:
        session, connection = self._session, self.connection
        made, topics = (session.names_made, session.names_made_bytes), len(session.topics)
        return session.identity, made, topics, connection.sock, connection.dropped


def client_and_connection(session: Session, connection: RawConnection) -> Record:
    """Return the record of a client."""
    record = {"client": sessions.client_record(session), "connection": connection_record(connection)}
    if isinstance(session, MqttClient):
        record["mqtt"] = mqtt_records.client_record(session)
    return record


def is_at_rest(session: Session) -> bool:
    """Return whether the record of a client can be sent early: it can migrate, is read, and has no unfinished data.

    Clients that observe topics are excluded: actions of other clients change their records. So are MQTT clients: the
    messages that they get change their sessions.
    """
    connection = session.outbox
    if (
        not isinstance(connection, RawConnection)
        or isinstance(connection, MqttConnection)
        or type(connection.transport) is TlsTransport
    ):
        return False
    return (
        not connection.paused
        and (connection.is_forwarded or connection.watcher.active)
        and _has_no_unfinished_data(session, connection)
    )


def _has_no_unfinished_data(session: Session, connection: RawConnection) -> bool:
    if session.state is not SessionState.CONNECTED or connection.life is not Life.OPEN:
        return False
    if connection.queue or connection.carry or connection.torn or connection.backlog is not None:
        return False
    if isinstance(connection, WsConnection) and (connection.decoded or connection.assembler is not None):
        return False
    return not (session.observed or session.pending is not None or session.fragments is not None)


log = logging.getLogger("smqrt")

SETTLE_S = 0.1
"""Maximum time that the migration waits for running hooks, handlers and handshakes."""
_POLL_S = 0.002
_PORTION = 500  # clients that are closed or resumed without a pause for other events
YIELD_S = 0.001
"""The pause between two portions, for other events; sleep(0) would not check sockets."""
PAUSE_S = 1.0
"""Maximum time until the other nodes of a cluster confirm that they hold messages back; clients are still served."""
LINK_S = 5.0
"""Maximum time that messages of clients wait for links to other nodes. A node that is silent for this time is lost.

Usually it takes 30 ms; on a busy machine more than a second was measured.
"""
_new_poll = monkey.get_original("select", "poll")  # gevent's poll creates a watcher for each socket
NO_PRECOPIED_CLIENTS: Mapping[Session, PrecopiedClient] = {}


class MovingClient:
    """A frozen client at its old hub.

    Attributes:
        session, connection: those of the client.
        ahead: the client's record that was sent early; None without one.
        is_unchanged: whether that record is still valid; set by `take`.
        record: the current record; set by `take`.
    """

    __slots__ = ("_carry", "_is_unread", "ahead", "connection", "is_unchanged", "record", "session")

    def __init__(self, session: Session, connection: RawConnection, ahead: PrecopiedClient | None = None) -> None:
        self.session, self.connection, self.ahead = session, connection, ahead
        self.record: Record = {}
        self.is_unchanged = False
        self._carry: tuple[bytes, bytes] = (b"", b"")
        self._is_unread = ahead is not None and ahead.is_unread
        data_path.frozen_connections.add(connection)
        connection.stop_reading()

    @property
    def is_busy(self) -> bool:
        """Whether data of the client is still being routed, or a hook is running for it."""
        if isinstance(self.connection, MqttConnection):
            return self.connection.is_busy
        meter = self.session.meter
        return self.connection.paused and not (meter is not None and meter.waits)

    def take(self) -> Record:
        """Make and return the record, and stop sending to the client."""
        connection, session = self.connection, self.session
        if self.ahead is not None and self._is_unread and self.ahead.is_valid:
            self.is_unchanged, self.record = True, self.ahead.record
            connection.hold_back()
            return self.record
        if isinstance(connection, MqttConnection):
            self.record = client_and_connection(session, connection)
            self._carry, connection.carry = (connection.carry, b""), b""
            connection.hold_back()
            return self.record
        # Messages that the meter held back come before unrouted data, and a pending packet before both. The new hub
        # handles all of them in this order, as data that it has received.
        held = session.meter.take_held() if session.meter is not None else b""
        if isinstance(connection, WsConnection):
            connection.decoded = held + connection.decoded
        else:
            connection.carry = held + connection.carry
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

    def roll_back(self) -> None:
        """Roll back: continue at this hub."""
        connection = self.connection
        data_path.frozen_connections.discard(connection)
        if connection.life.over:
            return
        if self.record:
            connection.carry = self._carry[0]
            if isinstance(connection, WsConnection):
                connection.decoded = self._carry[1]
            connection.send_again()
        connection.paused = True
        if self.session.pending is None:  # otherwise the hook resumes it
            connection.resume()

    def release(self) -> None:
        """Remove the client from this hub, and close this process's descriptor of its socket."""
        self.detach().close()

    def detach(self) -> Transport:
        """Remove the client from this hub, and return its transport."""
        data_path.frozen_connections.discard(self.connection)
        _close_quietly(self.connection)
        sessions.leave(self.session)
        return self.connection.transport


def _close_quietly(connection: RawConnection) -> None:
    """End a connection without closing its transport."""
    if connection.life is Life.BLOCKED:
        QueuedMemory.total_bytes -= connection.queued_bytes
    connection.life = Life.CLOSED
    data_path.unblocked(connection)
    connection.stop_reading()
    forwarder.withdraw(connection)
    connection.watcher.close()
    if connection.writer is not None:
        connection.writer.stop()
        connection.writer.close()


def can_migrate(session: Session, with_tls: bool, with_mqtt: bool = True) -> bool:
    """Return whether a client can migrate."""
    connection = session.outbox
    if not isinstance(connection, RawConnection) or session.state is not SessionState.CONNECTED:
        return False
    if isinstance(connection, MqttConnection) and not with_mqtt:
        return False
    return with_tls or type(connection.transport) is not TlsTransport


def pause_other_clients(broker: RegisteredBroker) -> Record:
    """Request that the other nodes of a hub's cluster hold back messages for it, before it is frozen.

    Blocks until they have confirmed it, at most `PAUSE_S`.

    Returns:
        The argument of `RestoredHub.begin`: `node`, the number of this node, and `others`, those of the other nodes.
    """
    if broker.cluster is None:
        return {}
    broker.cluster.pause()
    until_s = time.monotonic() + PAUSE_S
    while not broker.cluster.is_paused and time.monotonic() < until_s:
        gevent.sleep(YIELD_S)
    return {"node": broker.cluster.number, "others": list(broker.cluster.others)}


class FrozenHub:
    """A hub whose clients are frozen, which means that they are not read.

    Args:
        broker: the hub.
        with_tls: whether connections over TLS migrate.
        with_mqtt: whether MQTT clients migrate; older versions can't restore them.
        ahead: the clients whose records were sent early.
        is_packed: whether the record of the hub has a `packed_record`, for another process; older versions can't
            restore it.

    Attributes:
        broker: see above.
        clients: the clients that migrate.
        others: the clients that can't migrate: over TLS, or of another WSGI server.
    """

    def __init__(
        self,
        broker: RegisteredBroker,
        with_tls: bool = False,
        ahead: Mapping[Session, PrecopiedClient] = NO_PRECOPIED_CLIENTS,
        with_mqtt: bool = True,
        is_packed: bool = False,
    ) -> None:
        self.broker = broker
        self._mqtt_record = packed_record if is_packed else mqtt_records.record_of
        self._ahead = ahead
        self.clients: list[MovingClient] = []
        self.others: list[Session] = []
        self._with_tls, self._with_mqtt = with_tls, with_mqtt
        self._seen: set[BrokerClient] = set()
        self._unhandled: list[bytes] = []
        self._onpublish = broker.hooks.onpublish
        self._freeze_clients()

    def _freeze_clients(self) -> None:
        for session in [one for one in self.broker.sessions.values() if one not in self._seen]:
            self._seen.add(session)
            assert isinstance(session, Session)
            connection = session.outbox
            if isinstance(connection, RawConnection) and can_migrate(session, self._with_tls, self._with_mqtt):
                self.clients.append(MovingClient(session, connection, self._ahead.get(session)))
                continue
            self.others.append(session)
            if isinstance(connection, RawConnection):
                data_path.frozen_connections.add(connection)
                connection.stop_reading()

    def settle(self, within_s: float = SETTLE_S) -> None:
        """Wait until running hooks, handlers and handshakes have ended, at most `within_s`.

        A hook that has not ended is called again by the other hub. A client whose handshake has not ended is closed,
        and reconnects.
        """

        def handshakes() -> list[data_path.TimedClient]:
            return [one for one in data_path.unfinished_connections() if one.session.broker is self.broker]

        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s:
            if not (any(one.is_busy for one in self.clients) or handshakes() or self.broker.server.waiting()):
                break
            gevent.sleep(_POLL_S)
        for connection in handshakes():
            connection.session.disconnect(CloseReason.RESTARTED)

    def take(self) -> Record:
        """Make the records of all clients, and return the record of the hub.

        Messages that the application publishes later wait.

        This is one step of the loop, although 100,000 MQTT sessions and 250,000 retained messages take a second.
        Between two portions, a timer could publish a will or end a session whose record is made already: the other
        process would do that again. The clients of this hub are not read anyway, and no time limit is too short: the
        other process waits for the record without one, and `restore_time_s` of the old process grows with the sessions.
        """
        self._freeze_clients()  # also those that were accepted during `settle`
        for one in [one for one in self.clients if one.session.closed]:
            self.clients.remove(one)
            data_path.frozen_connections.discard(one.connection)
        self.broker.server.hold_publishes()
        if self.broker.devices is not None:
            self._finish_mqtt_clients()
        self._unhandled = self.broker.server.remove_unhandled()
        for one in self.clients:
            one.take()
        record: Record = {
            "names": sessions.names_of(self.broker),
            "counters": sessions.counters_of(self.broker),
            "unhandled": self._unhandled,
        }
        if self.broker.devices is not None:
            record["mqtt"] = self._mqtt_record(self.broker.devices)
        return record

    def _finish_mqtt_clients(self) -> None:
        """Deliver what MQTT clients have sent. Those that can't migrate are closed, and reconnect to their sessions."""
        for one in list(self.clients):
            connection = one.connection
            if not isinstance(connection, MqttConnection):
                continue
            if connection.is_busy:
                self.clients.remove(one)
                data_path.frozen_connections.discard(connection)
                one.session.disconnect(CloseReason.RESTARTED)
            else:
                connection.finish_packets()
        for session in [one for one in self.others if isinstance(one, MqttClient)]:
            session.disconnect(CloseReason.RESTARTED)
            self.others.remove(session)
        self.broker.devices.deliver_now()

    def roll_back(self) -> None:
        """Roll back: all clients continue at this hub."""
        for one in self.clients:
            one.roll_back()
        self._read_others()
        for batch in self._unhandled:
            self.broker.server.put(batch)
        self.broker.server.resume_publishing()

    def _read_others(self) -> None:
        for session in self.others:
            connection = session.outbox
            if isinstance(connection, RawConnection):
                data_path.frozen_connections.discard(connection)
                if not connection.life.over and not connection.paused:
                    connection.paused = True
                    connection.resume()

    def release(self, forward: Callable[[bytes, int, int], None]) -> None:
        """Remove the clients that have migrated; the others are read again until they are closed.

        Other events are handled in between: closing 10,000 descriptors takes a quarter of a second.

        Args:
            forward: called as `forward(batch, tid, ptid)` with the messages of the other clients.
        """
        if self.broker.devices is not None:
            self.broker.devices.wills.forget_all()
        for at in range(0, len(self.clients), _PORTION):
            for one in self.clients[at : at + _PORTION]:
                one.release()
            gevent.sleep(YIELD_S)
        self._forget()

        def onpublish(batch: bytes, tid: int, ptid: int, peer: BrokerPeer) -> bytes:
            forward(batch, tid, ptid)
            return b""

        self._onpublish, self.broker.hooks.onpublish = self.broker.hooks.onpublish, onpublish
        for session in self.others:
            session.forget_routes()
        self._read_others()

    def serve_again(self) -> None:
        """Continue at this hub after the other hub has failed; its clients reconnect here."""
        self.broker.hooks.onpublish = self._onpublish
        for session in self.broker.sessions.values():
            session.forget_routes()
        self.broker.server.resume_publishing()

    def hand_over(self) -> list[tuple[Record, Transport]]:
        """Remove the clients, and return their records and transports, for a migration within this process."""
        records = [(one.record, one.detach()) for one in self.clients]
        self._forget()
        return records

    def _forget(self) -> None:
        onmoved = self.broker.hooks.onmoved
        if onmoved:
            for one in self.clients:
                onmoved(one.session)
        sessions.forget_clients(self.broker, {one.session for one in self.clients})


class RestoredHub:
    """The new hub of migrating clients.

    Args:
        broker: the new hub.

    Attributes:
        broker: see above.
        refused: number of clients that could not be registered, and were closed.
    """

    def __init__(self, broker: RegisteredBroker) -> None:
        self.broker = broker
        self.refused = 0
        self._rights = broker.identities.rights if broker.identities is not None else None
        self._prepared: dict[int, tuple[RawConnection, Record]] = {}
        self._placed: list[tuple[RawConnection, Record]] = []
        self._unhandled: list[bytes] = []

    @property
    def clients(self) -> int:
        """Number of registered clients."""
        return len(self._placed)

    # ---- before the old hub is frozen

    def prepare(self, number: int, record: Record, transport: Transport) -> None:
        """Prepare the connection of a client whose record was sent early; `place_prepared` registers the client."""
        self._prepared[number] = self._connection(record, transport), record

    def forget_prepared(self) -> None:
        """Discard the remaining prepared connections, and close their descriptors in this process."""
        for connection, _ in self._prepared.values():
            _close_quietly(connection)
            connection.transport.close()
        self._prepared.clear()

    # ---- while the old hub is frozen

    def adopt(self, record: Record) -> None:
        """Restore the record of the hub, see `FrozenHub.take`."""
        self._unhandled = record["unhandled"]
        for name in sessions.adopt_names(self.broker, record["names"]):
            log.warning("the id of topic %r is now the one that its clients use; the application got another one", name)
        sessions.add_counters(self.broker, record["counters"])
        if self.broker.devices is not None and "mqtt" in record:
            restore = restore_packed if "messages" in record["mqtt"] else mqtt_records.restore
            restore(self.broker.devices, record["mqtt"])

    def place(self, record: Record, transport: Transport) -> None:
        """Register a client. It is not read before `begin`, and nothing is sent to it."""
        self._join(self._connection(record, transport), record)

    def place_prepared(self, numbers: Iterable[int]) -> None:
        """Register clients whose early records are still valid."""
        for number in numbers:
            self._join(*self._prepared.pop(number))

    def place_changed(self, number: int, record: Record) -> None:
        """Register a prepared client with a newer record."""
        connection, _ = self._prepared.pop(number)
        _close_quietly(connection)
        self.place(record, connection.transport)

    def _connection(self, record: Record, transport: Transport) -> RawConnection:
        connection = connection_of(record["connection"], transport, self.broker.slow is not None)
        connection.hold_back()
        return connection

    def _join(self, connection: RawConnection, record: Record) -> None:
        is_mqtt, client = isinstance(connection, MqttConnection), record["client"]
        try:
            if is_mqtt:
                connection.session = mqtt_records.join(self.broker, connection, client, record["mqtt"], self._rights)
            else:
                connection.session = sessions.join(self.broker, connection, client, self._rights)
        except sessions.CannotJoin:
            self.refused += 1
            connection.watcher.close()
            connection.transport.close()
            return
        if size_bytes := record["connection"]["chunk"]:
            limit_chunks(connection.session, size_bytes)
        self._placed.append((connection, client))

    def discard(self) -> None:
        """Roll back: remove the clients, and close their descriptors in this process only."""
        self.forget_prepared()
        for connection, _ in self._placed:
            _close_quietly(connection)
            connection.transport.close()
            sessions.leave(connection.session)
        sessions.forget_clients(self.broker, {connection.session for connection, _ in self._placed})
        self._placed.clear()

    def begin(self, place: Record) -> None:
        """Start serving the clients, and call `onconnect` for each.

        Args:
            place: node numbers in the cluster of the old hub, see `pause_other_clients`. The clients are not read until
                this hub is linked to these nodes, at most `LINK_S`.
        """
        self.forget_prepared()
        if self.refused:
            why = "other clients have their ETIDs or uids, or the hub does not accept MQTT clients any more"
            log.error("clients closed, because %s: %d", why, self.refused)
        if self.broker.devices is not None:
            self.broker.devices.search.finish_now()
        if self.broker.cluster is not None:
            self.broker.cluster.succeed(place.get("node", 0))
            self.broker.cluster.resync()
        onconnect = self.broker.hooks.onconnect
        for connection, record in self._placed:  # after all are registered: they may observe each other
            if record["observed"]:
                sessions.observe(connection.session, record)
        if onconnect:
            for connection, _ in self._placed:
                connection.session.origin = Origin.restored()
                onconnect(connection.session)
        for batch in self._unhandled:
            self.broker.server.put(batch)
        if self.broker.identities is not None:
            # Clients without a login must reconnect with one. For the others, users and rules may have changed.
            restored = [connection.session for connection, _ in self._placed]
            for session in [one for one in restored if one.identity is None]:
                session.disconnect(CloseReason.RESTARTED)
            run_in_background(client_limits.recheck_clients(restored, self.broker.identities.revalidate))
        connections = [one for one, _ in self._placed if not one.life.over]  # `onconnect` may have closed some
        for connection in connections:
            connection.send_again()
            connection.paused = True
            if isinstance(connection, MqttConnection):
                connection.begin_again()
        gevent.spawn(self._read_again, connections, place.get("others", ()))

    def _read_again(self, connections: list[RawConnection], others: Iterable[int]) -> None:
        """Resume the connections in portions, so that other events are handled in between."""
        cluster, until_s = self.broker.cluster, time.monotonic() + LINK_S
        while cluster is not None and not cluster.others.issuperset(others) and time.monotonic() < until_s:
            gevent.sleep(YIELD_S)
        resumed = [one for one in connections if not one.life.over and one not in data_path.frozen_connections]
        # First those with unread or unrouted data, because they have waited longest.
        poll = _new_poll()
        for connection in resumed:
            poll.register(connection.transport, select.POLLIN)
        readable = {fd for fd, _ in poll.poll(0)}
        ordered = sorted(resumed, key=lambda one: not (one.carry or one.transport.fileno() in readable))
        for at in range(0, len(ordered), _PORTION):
            for connection in ordered[at : at + _PORTION]:
                connection.resume()
            gevent.sleep(YIELD_S)


# ---- Hubs with the option `keep`: clients stay connected while the application restarts in this process
#
# the application ends ──▶ kept: not read, no data sent ──▶ it has restarted: they continue at its new hub
#                                  └──── KEEP_S ───▶ closed; they reconnect when there is a hub again

KEEP_S = 10.0
"""Maximum time for the restart of the application."""


class _KeptClients(NamedTuple):
    record: Record
    values: list[Record]
    clients: list[tuple[Record, Transport]]
    place: Record
    timer: Any


_kept: dict[str, _KeptClients] = {}


def keep(broker: RegisteredBroker) -> None:
    """Keep the clients of a hub that is about to be closed.

    Blocks until running hooks have ended, and the other nodes of its cluster hold back messages for it.
    """
    place = pause_other_clients(broker)
    frozen = FrozenHub(broker, with_tls=True)
    frozen.settle()
    record = frozen.take()
    timer = get_hub().loop.timer(KEEP_S, ref=False)
    _kept[broker.key] = _KeptClients(record, list(values_of(broker)), frozen.hand_over(), place, timer)
    hub_registry.names[broker.key] = record["names"]
    timer.start(drop, broker.key)


def claim(broker: RegisteredBroker) -> None:
    """Restore the clients that were kept for a new hub, once its application is loaded."""
    if broker.key not in _kept:
        return
    for portion in _kept[broker.key].values:
        adopt_values(broker, portion)
    app = current_process.current_app.get()
    if app is None:
        get_hub().loop.run_callback(_restore, broker)
    else:
        app.when_loaded.append(lambda: _restore(broker))


def _restore(broker: RegisteredBroker) -> None:
    kept = None if broker.closed else _pop(broker.key)
    if kept is None:
        return
    restored = RestoredHub(broker)
    restored.adopt(kept.record)
    for record, transport in kept.clients:
        restored.place(record, transport)
    restored.begin(kept.place)


def _pop(key: str) -> _KeptClients | None:
    kept = _kept.pop(key, None)
    if kept is not None:
        del hub_registry.names[key]
        kept.timer.stop()
        kept.timer.close()
    return kept


def drop(key: str) -> None:
    """Close the clients that are kept for a hub, if there are any."""
    kept = _pop(key)
    for _, transport in kept.clients if kept else ():
        transport.close()
    broker = hub_registry.find(key)
    if broker is not None and broker.cluster is not None and broker.cluster.awaits_clients:
        broker.cluster.resync()


def drop_kept_clients() -> None:
    """Close all kept clients, when the server stops."""
    for key in list(_kept):
        drop(key)

"""Pre-copy: clients whose records are sent ahead of their hub's move, while they are served on.

Most clients say nothing in the second that this takes, so that at the move itself a number for each is enough: its
record is still true.
"""

from __future__ import annotations

from smqrt.broker import snapshot
from smqrt.broker.session import Session, SessionState
from smqrt.broker.snapshot import Record
from smqrt.smq.connection import RawConnection
from smqrt.smq.connection_kinds import WsConnection
from smqrt.smq.connection_records import connection_record
from smqrt.transport.tls import TlsTransport
from smqrt.wire.connection_state import Life


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

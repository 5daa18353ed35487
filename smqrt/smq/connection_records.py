"""Connections as plain values, and back: what is under way on them in both directions."""

from __future__ import annotations

from gevent import get_hub

from smqrt.broker.snapshot import Record
from smqrt.loop.readiness import READ
from smqrt.smq.connection import RawConnection
from smqrt.smq.connection_kinds import WsConnection
from smqrt.smq.handshake import chunk_bytes
from smqrt.smq.slow_consumers import connection_class
from smqrt.transport.tls import TlsTransport, Transport
from smqrt.wire.connection_state import Life
from smqrt.wire.websocket import Assembler


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

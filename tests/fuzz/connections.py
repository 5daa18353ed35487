"""Fuzz targets of the data path: a client's bytes, cut into receives, through the real connection and broker."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

from gevent import get_hub

from smqrt.broker.broker import Broker
from smqrt.broker.outbox import Outbox, QueuedMemory, flush_dirty
from smqrt.broker.sessions import Session
from smqrt.broker.state import Hooks
from smqrt.broker.topics import HubLimits
from smqrt.errors import CloseReason
from smqrt.smq import data_path
from smqrt.smq.connection import RawConnection
from smqrt.smq.connection_kinds import WsConnection
from smqrt.wire import smq, websocket

MAX_NAMES, MAX_CLIENT_NAMES = 64, 16
MAX_PIECES = 64
CONNECT = smq.connect(b"uid-0001")


class Peer:
    """The socket of a client that sends these pieces, and reads all it gets."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self.is_silent = False

    def recv_into(self, view: memoryview, size: int = 0) -> int:
        for piece in self._pieces:
            view[: len(piece)] = piece
            return len(piece)
        self.is_silent = True
        raise BlockingIOError

    def send(self, data: Any) -> int:
        return len(data)

    def sendmsg(self, runs: list[bytes]) -> int:
        return self.send(b"".join(runs))

    def shutdown(self, how: int) -> None:
        raise OSError  # gone: no graceful close waits for it

    def close(self) -> None:
        pass


class Watcher:
    """Never calls by itself: the target reads."""

    fd, events, args = 0, 0, ()

    def start(self, callback: object, *args: object) -> None:
        pass

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Errors(logging.Handler):
    """What is logged as an error is one: nothing that a client sends may raise."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            raise AssertionError(record.getMessage()) from (record.exc_info[1] if record.exc_info else None)


_log, ERRORS = logging.getLogger("smqrt"), _Errors()


class Subscriber(Outbox):
    """Another client, that looks at what it gets."""

    def flush(self) -> None:
        for run in self.queue:
            assert b"".join(smq.frames(run)) == run, "a run that is not whole frames"
        self.queue.clear()


def _broker() -> Broker:
    """A new one each time, whose numbers are always the same: inputs can name them."""
    numbers = itertools.count(1000)
    limits = HubLimits(names=MAX_NAMES, client_names=MAX_CLIENT_NAMES)
    broker = Broker(
        Hooks(), random_u32=lambda: next(numbers), encode=data_path.encode, clock=lambda: 0.0, limits=limits
    )
    broker.topic_table.named(b"news", 100).add(Subscriber())
    broker.subscribe(b"news", lambda *_: None)
    return broker


def raw(data: bytes) -> None:
    """A client on a raw socket."""
    _client(RawConnection, data, smq.frame(CONNECT))


def ws(data: bytes) -> None:
    """A client on a WebSocket."""
    _client(WsConnection, data, websocket.encode_masked(websocket.BINARY, CONNECT))


def _client(kind: type[RawConnection], data: bytes, connect: bytes) -> None:
    _log.addHandler(ERRORS)
    try:
        _converse(kind, Peer(_receives(data, connect)))
    finally:
        _log.removeHandler(ERRORS)


def _converse(kind: type[RawConnection], peer: Peer) -> None:
    begin_turn()
    broker = _broker()
    connection = kind(peer, Watcher())  # type: ignore[arg-type]
    session = Session(broker, connection, 7)
    connection.session = session
    connection.start(session, b"")
    while not connection.life.over and not peer.is_silent:
        connection.on_readable()
        settle()
        while connection.paused and not connection.life.over:
            data_path.deferred_reads.clear()
            begin_turn()
            connection.resume_now()
            settle()
    session.disconnect(CloseReason.PEER_CLOSED)
    settle()
    _check_clean(broker)


def _receives(data: bytes, connect: bytes) -> Iterator[bytes]:
    """The first byte says whether the client has connected, and how what follows is cut into receives."""
    first = data[0] if data else 0
    if first & 0x80:
        yield connect
    yield from pieces(data)


def pieces(data: bytes) -> Iterator[bytes]:
    """What follows the first byte, cut as that says."""
    step = max((data[0] if data else 0) & 0x7F or len(data), len(data) // MAX_PIECES, 1)
    for at in range(1, len(data), step):
        yield data[at : at + step]


def begin_turn() -> None:
    """The loop does not run here: its clock tells what a turn may still take."""
    _install()
    get_hub().loop.update_now()


_install = cache(data_path.install)


def settle() -> None:
    while flush_dirty():
        pass


def _check_clean(broker: Broker) -> None:
    assert not broker.sessions, "a client is left behind"
    assert not broker.uids, "a uid is left behind"
    assert QueuedMemory.total_bytes == 0, f"{QueuedMemory.total_bytes} bytes are held by nobody"
    assert len(broker.topic_table.by_name) <= MAX_NAMES, "more names than there may be"
    assert sum(topic.name is None for topic in broker.topic_table.by_key.values()) == 1, "an ETID is left behind"

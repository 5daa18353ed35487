"""A hub inside somebody else's gevent application: a WSGI environ whose `wsgi.websocket` gevent-websocket made.

Here a greenlet reads and a greenlet writes, because the WebSocket object knows no callbacks; the broker sees an outbox
like any other.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import gevent
from gevent.event import Event

from smqrt.broker.hooks import Pending
from smqrt.broker.outbox import Outbox
from smqrt.broker.session import Session, State
from smqrt.broker.stats import Drop
from smqrt.errors import ArgumentError, CloseReason, ProtocolError
from smqrt.net import datapath
from smqrt.net.opening import init, open_session
from smqrt.wire import smq

if TYPE_CHECKING:
    from smqrt.net.broker import Broker

SEND_TIMEOUT_S = datapath.STALLED_AFTER_S


class WsgiConnection(Outbox):
    """A client behind gevent-websocket: takes raw frames, sends their packets as binary messages."""

    __slots__ = ("_more", "_outgoing", "_resumed", "closed", "handshake", "session", "socket")
    session: Session

    def __init__(self, socket: Any) -> None:
        super().__init__()
        self.socket = socket
        self.closed = False
        self.handshake: Pending | None = Pending()
        self._more = Event()
        self._resumed = Event()
        self._outgoing: deque[bytes] = deque()

    # ---- the broker's side

    def flush(self) -> None:
        """Hand the turn's runs to the writer greenlet, as far as the budget allows."""
        runs, self.queue = self.queue, []
        for run in runs:
            kept, dropped = self.fitting(run, self.budget_bytes - self.queued_bytes)
            if dropped:
                self.dropped += dropped
                self.overflowed(Drop.OVER_BUDGET, dropped)
            self._outgoing.append(kept)
            self.queued_bytes += len(kept)
        self._more.set()

    def reply(self, packet: bytes) -> None:
        """Queue a control packet."""
        if not self.closed:
            self.put(smq.frame(packet))

    def resume(self) -> None:
        """A hook answered."""
        self._resumed.set()

    def settled(self) -> None:
        """The handshake ended."""
        datapath.handshake_over(self)  # type: ignore[arg-type]

    def overflowed(self, reason: Drop, messages: int) -> None:
        """Messages for this client were dropped."""
        self.session.hub.overflowed(self.session, reason, messages)

    def finish(self, reason: CloseReason) -> None:
        """Let the writer send what is queued, then close."""
        self.settled()
        self.flush()
        self.closed = True
        self._resumed.set()

    # ---- the greenlets

    def run(self) -> None:
        """Serve the connection until it ends."""
        writer = gevent.spawn(self._write)
        try:
            self._read()
        finally:
            self.session.hub.disconnect(self.session, CloseReason.PEER_CLOSED)
            writer.join(SEND_TIMEOUT_S)
            writer.kill()

    def _read(self) -> None:
        while not self.closed:
            message = self.socket.receive()
            if message is None:
                return
            if self._packet(message.encode() if isinstance(message, str) else bytes(message)):
                self._resumed.wait()
                self._resumed.clear()

    def _packet(self, packet: bytes) -> bool:
        session = self.session
        try:
            if len(packet) > smq.MAX_PACKET_BYTES:
                raise ProtocolError(CloseReason.MESSAGE_TOO_LARGE)
            if packet[:1] != b"\x08":
                return session.control(packet)
            if len(packet) < smq.PUBLISH_HEADER_BYTES - 2:
                raise ProtocolError(CloseReason.SHORT_PACKET)
            return session.publish(smq.frame(packet))
        except ProtocolError as error:
            session.fail(error)
            return False

    def _write(self) -> None:
        try:
            while self._outgoing or not self.closed:
                self._more.wait()
                self._more.clear()
                self._send_outgoing()
            self.socket.close()
        except Exception:
            self.session.hub.disconnect(self.session, CloseReason.WRITE_FAILED)

    def _send_outgoing(self) -> None:
        while self._outgoing:
            run = self._outgoing.popleft()
            self.queued_bytes -= len(run)
            with gevent.Timeout(SEND_TIMEOUT_S):
                for frame in smq.frames(run):
                    self.socket.send(frame[2:], binary=True)


def connect(broker: Broker, environ: dict[str, Any], origin: Any) -> bool:
    """Serve the WebSocket of `environ`; returns when it ends.

    Raises:
        ArgumentError: the environ has no WebSocket.
    """
    socket = environ.get("wsgi.websocket")
    if socket is None:
        raise ArgumentError("environ: no wsgi.websocket in it; serve with geventwebsocket.handler.WebSocketHandler")
    connection = WsgiConnection(socket)
    session = open_session(broker, connection, origin)
    connection.reply(init(session, str(environ.get("REMOTE_ADDR", ""))))
    connection.run()
    return session.state is State.CLOSED

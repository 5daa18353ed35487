"""SMQ connections of WSGI applications on other servers.

The handler of `smqrt.wsgi` passes the connection itself on, which is then served as any other. The WebSocket objects of
gevent-websocket (`wsgi.websocket` in the environ) are supported, too. They have no callbacks, so each needs a greenlet
for reading and one for writing.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import gevent
from gevent.event import Event
from gevent.lock import BoundedSemaphore

from smqrt.broker.broker import Broker
from smqrt.broker.outbox import Drop, Outbox
from smqrt.broker.session import Session
from smqrt.errors import ArgumentError, CloseReason, ProtocolError
from smqrt.settings.limit_register import Limit
from smqrt.smq import data_path
from smqrt.smq.handshake import ANSWERED, Admission, Origin, init, open_session, too_many
from smqrt.transport.graceful_close import LINGER_S
from smqrt.transport.origins import Origins, same_origin
from smqrt.wire import smq
from smqrt.wire.connection_state import Life, moved

log = logging.getLogger("smqrt")

HANDLER = "smqrt.handler"
"""The environ's key of the handler that passes connections on (`smqrt.wsgi`)."""

REQUEST = "smqrt.request"
"""The environ's key of the server's own request, in applications that are mounted in a directory."""

ORIGINS = Limit("hub_origins", "origins of create", "pages of other hosts may not connect to this hub")

_GONE = frozenset(
    (CloseReason.PEER_CLOSED, CloseReason.WEBSOCKET_CLOSED, CloseReason.WRITE_FAILED, CloseReason.SLOW_CONSUMER)
)


class WsgiConnection(Outbox):
    """A client behind gevent-websocket: takes raw frames, sends their packets as binary messages."""

    __slots__ = ("_more", "_outgoing", "_resumed", "session", "sock")
    takes_fragments = False
    session: Session

    def __init__(self, sock: Any) -> None:
        super().__init__()
        self.sock = sock
        self.life = Life.OPENING
        self._more = Event()
        self._resumed = Event()
        self._outgoing: deque[bytes] = deque()
        sock.raw_write = _serialized(sock.raw_write)  # otherwise a pong may be written within a message

    @property
    def transport(self) -> Any:
        """The socket of the WebSocket; None when it is not known."""
        stream = getattr(self.sock, "stream", None)  # an attribute of gevent-websocket
        return stream.handler.socket if stream else None

    # ---- the broker's side

    def flush(self) -> None:
        """Pass the runs of this turn to the writing greenlet, as far as the budget allows."""
        runs, self.queue = self.queue, []
        for run in runs:
            kept, dropped = self.fitting(run, self.budget_bytes - self.queued_bytes)
            if dropped:
                self.dropped += dropped
                self.overflowed(Drop.OVER_BUDGET, dropped)
            self._outgoing.extend(frame[2:] for frame in smq.frames(kept))
            self.queued_bytes += len(kept)
        self._more.set()

    def reply(self, packet: bytes) -> None:
        """Queue a control packet."""
        if not self.life.over:
            self.put(smq.frame(packet))

    def resume(self) -> None:
        """Continue reading after a hook."""
        meter = self.session.meter
        if meter is None or not meter.waits or self.life.over:
            self._resumed.set()

    def settled(self) -> None:
        """Note the end of the handshake."""
        data_path.end_handshake(self)
        if self.life is Life.OPENING:
            self.life = moved(self.life, Life.OPEN)

    def overflowed(self, reason: Drop, messages: int) -> None:
        """Report that messages for this client were dropped."""
        self.session.broker.overflowed(self.session, reason, messages)

    def finish(self, reason: CloseReason) -> None:
        """Send the queue, then close; a broken connection is closed at once."""
        self.settled()
        self.flush()
        self.life = moved(self.life, Life.CLOSED if reason in _GONE else Life.DRAINING)
        if self.life is Life.CLOSED:
            self._count_undelivered()
        self._more.set()
        self._resumed.set()

    def _count_undelivered(self) -> None:
        lost = sum(packet[0] == smq.Type.PUBLISH for packet in self._outgoing)
        self.session.broker.stats.drop(Drop.CLOSED, lost)
        self._outgoing.clear()

    # ---- the greenlets

    def run(self) -> None:
        """Serve the connection until it ends."""
        reader, writer = gevent.spawn(self._read), gevent.spawn(self._write)
        try:
            gevent.wait([reader, writer], count=1)
            self.session.disconnect(CloseReason.PEER_CLOSED)
            if self.life is Life.DRAINING:
                writer.join(data_path.limits.stalled_s)
                reader.join(LINGER_S)
        finally:
            self.session.disconnect(CloseReason.PEER_CLOSED)
            gevent.killall([reader, writer])
            self._count_undelivered()
            if self.life is Life.DRAINING:
                self.life = moved(self.life, Life.CLOSED)

    def _read(self) -> None:
        while not self.life.over:
            try:
                message = _receive(self.sock)
            except ProtocolError as error:
                self.session.fail(error)
                return
            except Exception as error:
                log.debug("the WebSocket ended: %s", error)
                return
            if message is None:
                # At once: the writing greenlet would otherwise report a failed write of the closed connection.
                self.session.disconnect(CloseReason.WEBSOCKET_CLOSED)
                return
            self._resumed.clear()
            if self._route(message.encode() if isinstance(message, str) else bytes(message)):
                self._resumed.wait()

    def _route(self, packet: bytes) -> bool:
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
        except Exception:
            log.exception("error while routing; the connection is closed")
            session.disconnect(CloseReason.HOOK_FAILED)
        return False

    def _write(self) -> None:
        reason = CloseReason.WRITE_FAILED
        try:
            while self._outgoing or not self.life.over:
                self._more.wait()
                self._more.clear()
                while self._outgoing:
                    packet = self._outgoing[0]
                    with gevent.Timeout(data_path.limits.stalled_s):
                        self.sock.send(packet, binary=True)
                    if self._outgoing:  # otherwise it was counted as lost during `send`
                        self._outgoing.popleft()
                    self.queued_bytes -= len(packet) + 2
            self.sock.close()
        except gevent.Timeout:
            reason = CloseReason.SLOW_CONSUMER
        except Exception as error:
            log.debug("writing to the WebSocket failed: %s", error)
        self.session.disconnect(reason)


def _receive(sock: Any) -> Any:
    """Wait for the next message; None after a close frame.

    `receive` of gevent-websocket returns None for every kind of end. The method `read_message` that it calls raises an
    error, except for a close frame.

    Raises:
        ProtocolError: the client violated RFC 6455.
        OSError: the connection ended without a close frame.
    """
    errors = sys.modules.get("geventwebsocket.exceptions")
    if errors is None or not hasattr(sock, "read_message"):
        message = sock.receive()
        if message is None:
            raise ConnectionError("the WebSocket was closed")
        return message
    try:
        return sock.read_message()
    except UnicodeError as error:
        raise ProtocolError(CloseReason.INVALID_TEXT, str(error)) from None
    except errors.ProtocolError as error:
        raise ProtocolError(CloseReason.WEBSOCKET_PROTOCOL, str(error)) from None


def _serialized(write: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    lock = BoundedSemaphore()

    def locked(data: bytes) -> Any:
        with lock:
            return write(data)

    return locked


class HandlerRequest:
    """A request of `smqrt.wsgi`'s handler, as a `BootstrapRequest`.

    Attributes:
        method: of the request.
        response: this object, which can answer with an error.
        peer: the client's address.
    """

    def __init__(self, environ: dict[str, Any]) -> None:
        self._environ, self._handler = environ, environ[HANDLER]
        self.method = environ["REQUEST_METHOD"]
        self.peer = (str(environ.get("REMOTE_ADDR", "")), 0)
        self.response = self

    @property
    def is_answered(self) -> bool:
        """Whether the response has begun, or the connection was taken over."""
        return bool(self._handler.is_answered)

    def get(self, name: str) -> str | None:
        """Return the value of a header field; None without it."""
        value: str | None = self._environ.get("HTTP_" + name.upper().replace("-", "_"))
        return value

    def error(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        """Answer with an error."""
        self._handler.answer(f"{status} {HTTPStatus(status).phrase}", detail + "\n", headers or {})

    def refuse_foreign(self, more: Origins | None) -> bool:
        """Answer a request from a page of a foreign host with 403; return whether it is one."""
        if foreign := _foreign(self._environ, more):
            self.error(403, "This page may not connect here.")
        return foreign

    def upgrade_lines(self) -> bytes:
        """Return nothing: a WSGI application can't set header fields of the upgrade."""
        return b""

    def detach(self) -> HandlerRequest:
        """Take the connection over from the server: sets `transport`, `watcher` and `data`."""
        self.transport, self.watcher, self.data = self._handler.take()
        self.secure = False  # TLS, if there is any, is done by the server
        return self


def connect_environ(broker: Broker, admission: Admission, environ: dict[str, Any], origin: Origin) -> bool:
    """Serve the WebSocket that gevent-websocket put into `environ`, until it ends.

    A WebSocket from a page of a foreign host is closed at once.

    Returns:
        False without a WebSocket; then nothing was answered.

    Raises:
        ArgumentError: it is not a WSGI environ.
    """
    if "REQUEST_METHOD" not in environ:
        raise ArgumentError("environ: a WSGI environ is needed; it has no REQUEST_METHOD")
    sock = environ.get("wsgi.websocket")
    if sock is None:
        if "HTTP_SIMPLEMQ" in environ or "HTTP_SEC_WEBSOCKET_KEY" in environ:
            log.warning("an SMQ client was not served: this WSGI server needs the handler of smqrt.wsgi (help: wsgi)")
        return False
    if sock.closed:
        raise ArgumentError(ANSWERED)
    if broker.closed:
        sock.close(1001, b"closed")
        return True
    if _foreign(environ, admission.origins):
        sock.close(1008, b"foreign origin")
        return True
    address = str(environ.get("REMOTE_ADDR", ""))
    if too_many(broker, address):
        sock.close(1013, b"too many clients of this address are connecting")
        return True
    connection = WsgiConnection(sock)
    session = open_session(broker, admission, connection, origin, address)
    connection.reply(init(session, address))
    connection.run()
    return True


def _foreign(environ: dict[str, Any], more: Origins | None) -> bool:
    origin, host = environ.get("HTTP_ORIGIN"), environ.get("HTTP_HOST", "")
    if origin is None or same_origin(origin, host, environ.get("wsgi.url_scheme") == "https"):
        return False
    if more is not None and more.has(origin):
        return False
    ORIGINS.refused(f"a page of {origin!a} for {host!a}", f"to allow it, create the hub with origins=[{origin!a}]")
    return True

"""SMQ handshake and client authentication (spec: smq §1.1, §12.1).

A client connects over a raw socket (header `SimpleMQ`), with or without an HTTP reply, or over a WebSocket.
"""

from __future__ import annotations

import binascii
import logging
import socket
import sys
from base64 import b64decode
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

import gevent
from gevent.event import Event
from gevent.lock import BoundedSemaphore

from smqrt.auth.identity import TOKEN, Identity
from smqrt.auth.service import IdentityService, LoginFailure, LoginRejected, PresentedCredentials
from smqrt.broker.broker import Broker
from smqrt.broker.deferred import Deferred
from smqrt.broker.outbox import DEFAULT_BUDGET_BYTES, Drop, Outbox
from smqrt.broker.sessions import Session
from smqrt.broker.state import BrokerClient, Hooks, Verdict
from smqrt.broker.topics import HANDSHAKES
from smqrt.errors import ArgumentError, CloseReason, ProtocolError, SmqrtError
from smqrt.loop import greenlets
from smqrt.loop.scheduling import Watcher
from smqrt.settings.limits import Limit
from smqrt.settings.option_types import whole
from smqrt.smq import data_path
from smqrt.smq.connection import RawConnection
from smqrt.smq.connection_kinds import connection_class
from smqrt.transport.listener import KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S
from smqrt.transport.origins import Origins, same_origin
from smqrt.transport.tls import LINGER_S, Transport
from smqrt.transport.unix_sockets import is_local_client
from smqrt.wire import smq, websocket
from smqrt.wire.connection_state import Life, transition
from smqrt.wire.smq import ConnackCode

MIN_KEEPALIVE_INTERVAL_S = 3
KEEPALIVE_SECONDS = whole(1, 32767, "seconds")
"""The range that Linux accepts."""
ANSWERED = "request: it is already answered; call connect once per request, before any of its response is sent"
NOT_SMQ = "This address speaks SMQ."
_REPLY = b"HTTP/1.1 200 OK\r\nServer: smqrt\r\nSmqBroker: true\r\nCache-Control: no-store\r\n\r\n"
_UPGRADE_LINES = b"SmqBroker: true\r\n"


class ErrorResponse(Protocol):
    """The response to a request, as a handshake uses it."""

    def error(self, status: int, detail: str, headers: dict[str, str] | None = None, /) -> object:
        """Answer with an error."""


class DetachedConnection(Protocol):
    """A connection that was taken over from the HTTP server.

    Attributes:
        transport: its socket or `TlsTransport`.
        watcher: the loop's READ watcher for it, stopped.
        data: bytes received after the request.
        secure: whether the transport is a `TlsTransport`.
    """

    transport: Transport
    watcher: Watcher
    data: bytes
    secure: bool


class BootstrapRequest(Protocol):
    """An HTTP request, as a handshake uses it.

    Attributes:
        peer: the client's address.
    """

    method: str
    peer: tuple[str, int]

    @property
    def response(self) -> ErrorResponse: ...

    @property
    def is_answered(self) -> bool:
        """Whether the response has begun, or the connection was taken over."""

    def get(self, name: str, /) -> str | None:
        """Return the value of a header field; None without it."""

    def reject_denied_origin(self, more: Origins | None, /) -> bool:
        """Reject a request from a page of a denied origin with 403; return whether it is one."""

    def upgrade_lines(self) -> bytes:
        """Return the header lines that the application adds to a 101. Raises SmqrtError for invalid ones."""

    def detach(self) -> DetachedConnection:
        """Take the connection over from the server."""


StartSession = Callable[["Broker", "Admission", BootstrapRequest, str | None, "Origin | None"], None]
"""Serves the connection of a checked request: broker, admission, request, WebSocket key, origin."""


def is_smq(request: object) -> bool:
    """Return whether a request is SMQ: it has the header `SimpleMQ` or `Sec-WebSocket-Key` (spec: smq §2.1).

    Raises:
        ArgumentError: it is not a request.
    """
    if isinstance(request, dict):
        return "HTTP_SIMPLEMQ" in request or "HTTP_SEC_WEBSOCKET_KEY" in request
    head = _http_request(request)
    return head.get("SimpleMQ") is not None or head.get("Sec-WebSocket-Key") is not None


def page_user(request: Any) -> str | None:
    """Return the user of a page's login, of any kind; None without a login."""
    find = getattr(request, "user", None)
    login = find() if callable(find) else None
    return None if login is None else login.name


def _http_request(request: Any) -> BootstrapRequest:
    if not hasattr(request, "detach"):
        raise ArgumentError("request: not an HTTP request; pass the page's request, or a WSGI environ")
    found: BootstrapRequest = request
    return found


@dataclass(slots=True)
class Origin:
    """The request that opened a connection, for `authenticate` and `onconnect`.

    Attributes:
        request: the HTTP request; None when it is unknown.
        arg: the argument of the application's `connect`.
        address: the client's address.
        info: the object that the application's callbacks get; None before it is made.
    """

    request: Any
    arg: object
    address: str = ""
    info: Any = None

    @classmethod
    def restored(cls) -> Origin:
        """Return the origin of a client that was connected to another hub, whose request is unknown."""
        return cls(None, None)


class KeepAlive:
    """TCP keep-alive of a broker's connections.

    Args:
        idle_s: silence before the first probe.
        interval_s: time between probes; 0 for a tenth of `idle_s`, at least 3 s.

    Raises:
        ArgumentError: a time that Linux refuses.
    """

    def __init__(self, idle_s: int = KEEPALIVE_IDLE_S, interval_s: int = 0) -> None:
        self.set(idle_s, interval_s, ("keepidle", "keepintv"))

    def set(self, idle_s: int, interval_s: int, names: tuple[str, str] = ("time", "intv")) -> None:
        """Set the times for new connections; errors name the arguments `names`. Raises the errors of the class."""
        for name, seconds in zip(names, (idle_s, interval_s or 1), strict=True):
            KEEPALIVE_SECONDS.check(name, seconds)
        self.idle_s = int(idle_s)
        self.interval_s = max(int(interval_s or idle_s // 10), MIN_KEEPALIVE_INTERVAL_S)
        self._is_set_by_listener = (self.idle_s, self.interval_s) == (KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S)

    def apply(self, sock: Transport) -> None:
        """Apply the times to a client's socket, unless the listener has set the same, or it is a Unix socket."""
        if self._is_set_by_listener or getattr(sock, "family", None) == socket.AF_UNIX:
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, self.idle_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, self.interval_s)


@dataclass(slots=True)
class Admission:
    """Conditions for new clients of a broker.

    Attributes:
        readtmo_ms: time for Connect.
        budget_bytes: the maximum send queue of a client.
        origins: pages of foreign hosts that may connect.
        keep_alive: TCP keep-alive of the connections.
    """

    readtmo_ms: int = 4000
    budget_bytes: int = DEFAULT_BUDGET_BYTES
    origins: Origins | None = None
    keep_alive: KeepAlive = field(default_factory=KeepAlive)


def connect(
    broker: Broker, admission: Admission, request: object, origin: Origin | None, start: StartSession | None = None
) -> None:
    """Turn a request into a connection of `broker`, or answer it with an error; blocks until the handshake has ended.

    Args:
        broker: the hub.
        admission: the conditions for new clients.
        request: the request.
        origin: the same, for callbacks of the application.
        start: serves the connection instead of SMQ: the WebSocket has another sub-protocol.

    Raises:
        ArgumentError: `request` is not a request, or was answered before.
    """
    request = _http_request(request)
    if request.is_answered:
        raise ArgumentError(ANSWERED)
    raw = request.get("SimpleMQ") is not None
    key = None if raw else websocket_key(request)
    # Counts the connection for the address behind an HTTP proxy; it returns false when that has too many.
    count_for = getattr(getattr(request, "transport", None), "count_for", None)
    if not raw and key is None:
        request.response.error(404, NOT_SMQ)
    elif request.reject_denied_origin(admission.origins):
        pass  # `reject_denied_origin` has answered
    elif broker.closed:  # its clients may reconnect before the application has created a new hub
        request.response.error(503, "This hub has been closed.", {"Retry-After": "1"})
    elif broker.draining:
        request.response.error(503, "This server accepts no new clients.", {"Retry-After": "1"})
    elif too_many(broker, request.peer[0]) or (count_for is not None and not count_for(request.peer[0])):
        request.response.error(503, "Too many clients of your address are connecting.")
    else:
        (start or _start_session)(broker, admission, request, key, origin)


def websocket_key(request: BootstrapRequest) -> str | None:
    """Return the key of a WebSocket request; None for an invalid or another request (RFC 6455 §4.2.1)."""
    key: str | None = request.get("Sec-WebSocket-Key")
    if key is None:
        return None
    tokens = {token.strip().lower() for token in (request.get("Connection") or "").split(",")}
    is_valid = (
        request.method == "GET"
        and (request.get("Upgrade") or "").strip().lower() == "websocket"
        and "upgrade" in tokens
        and (request.get("Sec-WebSocket-Version") or "").strip() == "13"
        and websocket.valid_key(key)
    )
    return key if is_valid else None


def _start_session(
    broker: Broker, admission: Admission, request: BootstrapRequest, key: str | None, origin: Origin | None
) -> None:
    wants_reply = key is None and request.get("SendSmqHttpResponse") == "true"  # before `detach` ends the request
    try:
        lines = b"" if key is None else request.upgrade_lines() + _UPGRADE_LINES
    except SmqrtError as error:
        request.response.error(400, str(error))
        return
    detached = request.detach()  # from here on, errors can't be answered over HTTP
    admission.keep_alive.apply(detached.transport)
    connection = connection_class(detached.secure, key is not None, broker.slow is not None)(
        detached.transport, detached.watcher
    )
    session = open_session(broker, admission, connection, origin, request.peer[0])
    hello = init(session, request.peer[0])
    if key is not None:
        connection.greet(websocket.switching_protocols(key, lines), websocket.encode(websocket.BINARY, hello))
    else:
        connection.greet(_REPLY if wants_reply else b"", smq.frame(hello))
    connection.start(session, detached.data)
    handshake = connection.handshake
    if handshake is not None:
        handshake.get()


def too_many(broker: Broker, address: str) -> bool:
    """Return whether `address` has reached the limit of unfinished handshakes; count and log it.

    Addresses of this machine have no limit: behind a local proxy, all clients have such an address.
    """
    limit = data_path.limits.handshakes_per_address
    if limit is None or data_path.unfinished.get(address, 0) < limit or is_local_client(address):
        return False
    broker.refuse(None, HANDSHAKES, address)
    return True


def open_session(broker: Broker, admission: Admission, connection: Any, origin: Origin | None, address: str) -> Session:
    """Return the session of a new connection, and start the deadline of its handshake."""
    connection.budget_bytes = admission.budget_bytes
    if origin is not None:
        origin.address = address
    session = Session(broker, connection, broker.random_u32(), origin)
    connection.session = session
    data_path.start_handshake(connection, admission.readtmo_ms / 1000, address)
    return session


def init(session: Session, address: str) -> bytes:
    """Return the Init packet; the C client needs at least three bytes of address."""
    return smq.init(session.seed, address.ljust(3))


class _Chunked:
    """A socket that sends at most `size_bytes` at once."""

    size_bytes: int

    def __init__(self, sock: Any, size_bytes: int) -> None:
        self.unlimited = self._sock = sock
        self.size_bytes = size_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def send(self, data: Any) -> int:
        """Send the first chunk of `data`."""
        return int(self._sock.send(data[: self.size_bytes]))

    def sendmsg(self, batches: list[bytes]) -> int:
        """Send the first chunk of `batches`."""
        return self.send(batches[0])


def chunk_bytes(connection: RawConnection) -> int:
    """Return the largest frame that a client accepts at once; 0 without a limit."""
    return connection.sock.size_bytes if isinstance(connection.sock, _Chunked) else 0


def limit_chunks(session: BrokerClient, size_bytes: int) -> None:
    """Send at most the frame size that a version 2 client has announced (257 to 8192 bytes)."""
    connection = session.outbox
    if isinstance(connection, RawConnection):  # others are sent by gevent-websocket
        connection.sock = _Chunked(connection.sock, min(max(size_bytes, 257), 8192))


# ---- Authentication
#
# The application's `authenticate` is called only for clients that the service accepts. The first of these that is
# present is checked: credentials in the Connect packet (`name:password`, or a token), the header `Authorization` of the
# request (Basic, Bearer), the login of the browser, a client certificate.

log = logging.getLogger("smqrt")

MAX_HEADER_BYTES = 16 << 10
"""A longer `Authorization` header is ignored."""
_CODES = {
    LoginFailure.CERTIFICATE: ConnackCode.CERTIFICATE_REJECTED,
    LoginFailure.BUSY: ConnackCode.SERVER_UNAVAILABLE,
    LoginFailure.THROTTLED: ConnackCode.SERVER_UNAVAILABLE,
}


class HubAuthentication:
    """Calls the identity service, then the application.

    Args:
        service: the identity service of the server.
        hooks: the hooks of the hub. `authenticate` is replaced; the former one is called for clients that the service
            accepts.
    """

    def __init__(self, service: IdentityService, hooks: Hooks) -> None:
        self._service = service
        self._authenticate = hooks.authenticate
        self._keeps_origin = hooks.onconnect is not None
        hooks.authenticate, hooks.has_logins, hooks.identify = self.admit, True, self.identify

    def identify(self, user: str, client: BrokerClient) -> Identity | None:
        """See `Hooks.identify`."""
        identity = self._service.identity_of_user(user, client.origin.address, client.uid)
        if not self._keeps_origin:  # frees the request
            client.origin = None
        return identity

    def admit(self, credentials: bytes, client: BrokerClient) -> Verdict | Deferred[Verdict]:
        """See `Hooks.authenticate`."""
        return greenlets.call(self._admit, credentials, client)

    def _admit(self, credentials: bytes, client: BrokerClient) -> Verdict:
        """Return the verdict. Runs in a greenlet, so it may block."""
        try:
            identity = self._service.login(presented_by(client, credentials), lambda: not client.closed)
            client.identity = identity
            verdict: Verdict = ConnackCode.ACCEPTED, b""
            if self._authenticate is not None:
                answer: Any = self._authenticate(credentials, client)
                if isinstance(answer, Deferred):
                    answer = greenlets.wait(answer)
                verdict = answer if isinstance(answer, tuple) else (ConnackCode.ACCESS_DENIED, b"")
            fault = self._service.revalidate(identity)  # the application may have blocked for a long time
            if not verdict[0] and fault is not None:
                verdict, client.identity = (ConnackCode.BAD_CREDENTIALS, fault.encode()), None
            if not self._keeps_origin:  # frees the request
                client.origin = None
            return verdict
        except LoginRejected as rejected:
            return _CODES.get(rejected.reason, ConnackCode.BAD_CREDENTIALS), str(rejected).encode()
        except Exception:
            log.exception("error while a client logged in; it is rejected")
            return ConnackCode.SERVER_UNAVAILABLE, b""


def presented_by(client: BrokerClient, credentials: bytes) -> PresentedCredentials:
    """Return the credentials that a client presents."""
    origin = client.origin
    request = origin.request
    pair, token = None, None
    if credentials:
        if TOKEN.match(credentials):
            token = credentials
        else:
            pair = credentials
    else:
        header = request.get("HTTP_AUTHORIZATION" if isinstance(request, dict) else "Authorization") or ""
        scheme, _, value = header.partition(" ") if len(header) <= MAX_HEADER_BYTES else ("", "", "")
        if scheme.lower() == "basic":
            try:
                pair = b64decode(value.strip(), validate=True)
            except (binascii.Error, ValueError):
                pair = b""  # malformed: rejected as a wrong login
        elif scheme.lower() == "bearer":
            token = value.strip().encode("latin-1")
    name, password = None, None
    if pair is not None:
        name_bytes, _, password = pair.partition(b":")
        name = name_bytes.decode("utf-8", "replace")
    verified = getattr(getattr(client.outbox, "transport", None), "peer_certificate", None)
    certificate: bytes | None = verified() if verified else None
    # The login of the browser's session; its identity is None unless it was a login with the server's own users.
    logins = None if isinstance(request, dict) else getattr(request, "logins", None)
    login = logins.of(request) if logins is not None else None
    browser: Identity | None = login.identity if login is not None else None
    return PresentedCredentials(origin.address, client.uid, name, password, token, certificate, browser)


# ---- Connections of WSGI applications on other servers
#
# The handler of `smqrt.wsgi` passes the connection on, which is then served like any other. WebSocket objects of
# gevent-websocket (`wsgi.websocket` in the environ) are also supported. They have no callbacks, so each needs one
# greenlet for reading and one for writing.


HANDLER = "smqrt.handler"
"""Key in the environ of the handler that passes connections on (`smqrt.wsgi`)."""

REQUEST = "smqrt.request"
"""Key in the environ of the server's own request, in applications that are mounted in a directory."""

ORIGINS = Limit("hub_origins", "origins of create", "pages of other hosts may not connect to this hub")

_BROKEN = frozenset(
    (CloseReason.PEER_CLOSED, CloseReason.WEBSOCKET_CLOSED, CloseReason.WRITE_FAILED, CloseReason.SLOW_CONSUMER)
)


class WsgiConnection(Outbox):
    """A client of gevent-websocket: packets of the queued raw frames are sent as binary messages."""

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
        write, lock = sock.raw_write, BoundedSemaphore()

        def locked_write(data: bytes) -> Any:
            with lock:  # otherwise the reading greenlet may write a pong within a message
                return write(data)

        sock.raw_write = locked_write

    @property
    def transport(self) -> Any:
        """The socket of the WebSocket; None when it is unknown."""
        stream = getattr(self.sock, "stream", None)  # an attribute of gevent-websocket
        return stream.handler.socket if stream else None

    # ---- the broker's side

    def flush(self) -> None:
        """Pass the batches of this turn to the writing greenlet, and drop messages beyond the budget."""
        batches, self.queue = self.queue, []
        for batch in batches:
            kept, dropped = self.fitting(batch, self.budget_bytes - self.queued_bytes)
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
        """Record the end of the handshake."""
        data_path.end_handshake(self)
        if self.life is Life.OPENING:
            self.life = transition(self.life, Life.OPEN)

    def overflowed(self, reason: Drop, messages: int) -> None:
        """Report that messages for this client were dropped."""
        self.session.broker.overflowed(self.session, reason, messages)

    def finish(self, reason: CloseReason) -> None:
        """Send the queue, then close; a broken connection is closed at once."""
        self.settled()
        self.flush()
        self.life = transition(self.life, Life.CLOSED if reason in _BROKEN else Life.DRAINING)
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
        """Serve the connection until it is closed."""
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
                self.life = transition(self.life, Life.CLOSED)

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
                # Before the writing greenlet reports a failed write of the closed connection.
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
    """Return the next message; None after a close frame. Blocks.

    `receive` of gevent-websocket returns None for a close frame and for errors. Its method `read_message` raises the
    errors.

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


class HandlerRequest:
    """A request of `smqrt.wsgi`'s handler, as a `BootstrapRequest`.

    Attributes:
        method: the request method.
        response: this object, whose `error` sends an answer.
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

    def reject_denied_origin(self, more: Origins | None) -> bool:
        """Reject a request from a page of a denied origin with 403; return whether it is one."""
        if foreign := _foreign(self._environ, more):
            self.error(403, "This page may not connect here.")
        return foreign

    def upgrade_lines(self) -> bytes:
        """Return no lines: a WSGI application can't set header fields of the upgrade."""
        return b""

    def detach(self) -> HandlerRequest:
        """Take the connection over from the server: sets `transport`, `watcher` and `data`."""
        self.transport, self.watcher, self.data = self._handler.take()
        self.secure = False  # the WSGI server decrypts TLS
        return self


def connect_environ(broker: Broker, admission: Admission, environ: dict[str, Any], origin: Origin | None) -> bool:
    """Serve the WebSocket of gevent-websocket in `environ`, until it is closed.

    A WebSocket from a page of a foreign host is closed at once.

    Returns:
        False without a WebSocket; no answer was sent.

    Raises:
        ArgumentError: `environ` is not a WSGI environ.
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

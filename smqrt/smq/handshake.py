"""SMQ handshake: from an HTTP request to a connected client (spec: smq §1.1, §12.1).

There are three ways: a raw socket with the header `SimpleMQ`, the same with an HTTP reply, and a WebSocket.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from smqrt.broker.broker import Broker
from smqrt.broker.outbox import DEFAULT_BUDGET_BYTES
from smqrt.broker.session import Session
from smqrt.broker.state import BrokerClient
from smqrt.broker.topics import HANDSHAKES
from smqrt.errors import ArgumentError, SmqrtError
from smqrt.loop.greenlet_pool import wait
from smqrt.loop.readiness import Watcher
from smqrt.settings.options import whole
from smqrt.smq import data_path
from smqrt.smq.connection import RawConnection
from smqrt.smq.slow_consumers import connection_class
from smqrt.transport.listener import KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S
from smqrt.transport.origins import Origins, is_loopback
from smqrt.transport.tls import Transport
from smqrt.wire import smq, websocket

MIN_KEEPALIVE_INTERVAL_S = 3
KEEPALIVE_SECONDS = whole(1, 32767, "seconds")
"""Linux refuses more."""
ANSWERED = "request: it is answered already; connect takes each request once, before anything of its response is sent"
NOT_SMQ = "This address speaks SMQ."
_REPLY = b"HTTP/1.1 200 OK\r\nServer: smqrt\r\nSmqBroker: true\r\nCache-Control: no-store\r\n\r\n"
_UPGRADE_LINES = b"SmqBroker: true\r\n"


class ErrorResponse(Protocol):
    """The response to a request, as far as a handshake needs it."""

    def error(self, status: int, detail: str, headers: dict[str, str] | None = None, /) -> object:
        """Answer with an error."""
        ...


class DetachedConnection(Protocol):
    """A connection that was taken over from the HTTP server.

    Attributes:
        transport: its socket or `TlsTransport`.
        watcher: the loop's READ watcher for it, stopped.
        data: what was received behind the request.
        secure: whether the transport is a `TlsTransport`.
    """

    transport: Transport
    watcher: Watcher
    data: bytes
    secure: bool


class BootstrapRequest(Protocol):
    """An HTTP request, as far as a handshake needs it.

    Attributes:
        peer: the client's address.
    """

    method: str
    peer: tuple[str, int]

    @property
    def response(self) -> ErrorResponse: ...

    @property
    def is_answered(self) -> bool:
        """Whether its response has begun, or its connection was taken over."""
        ...

    def get(self, name: str, /) -> str | None:
        """Return the value of a header field; None without it."""
        ...

    def refuse_foreign(self, more: Origins | None, /) -> bool:
        """Answer a request from a page of a foreign host with 403; return whether it is one."""
        ...

    def upgrade_lines(self) -> bytes:
        """Return the header lines that the application adds to a 101. Raises SmqrtError for invalid ones."""
        ...

    def detach(self) -> DetachedConnection:
        """Take the connection over from the server."""
        ...


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


def _http_request(request: object) -> BootstrapRequest:
    if not hasattr(request, "detach"):
        raise ArgumentError("request: not an HTTP request; pass the page's request, or a WSGI environ")
    return cast(BootstrapRequest, request)


@dataclass(slots=True)
class Origin:
    """The request that opened a connection, for `authenticate` and `onconnect`.

    Attributes:
        request: the HTTP request; None when it is not known any more.
        arg: the argument of the application's `connect`.
        address: of the client.
        info: the object that the application gets, once it was made.
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
        """Set the times for new connections; `names` are those of the arguments in errors. Raises as the class."""
        for name, seconds in zip(names, (idle_s, interval_s or 1), strict=True):
            KEEPALIVE_SECONDS.check(name, seconds)
        self.idle_s = int(idle_s)
        self.interval_s = max(int(interval_s or idle_s // 10), MIN_KEEPALIVE_INTERVAL_S)

    def apply(self, sock: Transport) -> None:
        """Set it on a client's socket, unless the listener has set the same."""
        if (self.idle_s, self.interval_s) == (KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S):
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
        keep_alive: of the connections.
    """

    readtmo_ms: int = 4000
    budget_bytes: int = DEFAULT_BUDGET_BYTES
    origins: Origins | None = None
    keep_alive: KeepAlive = field(default_factory=KeepAlive)


def connect(broker: Broker, admission: Admission, request: object, origin: Origin) -> None:
    """Turn a request into a connection of `broker`, or answer it with an error; blocks until the handshake ended.

    Raises:
        ArgumentError: `request` is not a request, or was answered before.
    """
    request = _http_request(request)
    if request.is_answered:
        raise ArgumentError(ANSWERED)
    raw = request.get("SimpleMQ") is not None
    key = None if raw else websocket_key(request)
    if not raw and key is None:
        request.response.error(404, NOT_SMQ)
    elif request.refuse_foreign(admission.origins):
        pass  # and has answered
    elif broker.closed:  # its clients may reconnect before the application has made a new hub
        request.response.error(503, "This hub has been closed.", {"Retry-After": "1"})
    elif broker.draining:
        request.response.error(503, "This server accepts no new clients.", {"Retry-After": "1"})
    elif too_many(broker, request.peer[0]) or not _count_connection(request):
        request.response.error(503, "Too many clients of your address are connecting.")
    else:
        _start_session(broker, admission, request, key, origin)


def websocket_key(request: BootstrapRequest) -> str | None:
    """Return the key of a request that asks for a WebSocket; None when it does not, or is invalid (RFC 6455 §4.2.1)."""
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
    broker: Broker, admission: Admission, request: BootstrapRequest, key: str | None, origin: Origin
) -> None:
    wants_reply = key is None and request.get("SendSmqHttpResponse") == "true"
    try:
        lines = b"" if key is None else request.upgrade_lines() + _UPGRADE_LINES
    except SmqrtError as error:
        request.response.error(400, str(error))
        return
    detached = request.detach()
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
    if handshake:
        wait(handshake)


def too_many(broker: Broker, address: str) -> bool:
    """Return whether `address` has reached the limit of unfinished handshakes, which is counted and logged.

    Addresses of this machine have no limit: with a local proxy, they are those of all clients.
    """
    limit = data_path.limits.handshakes_per_address
    if limit is None or data_path.unfinished[address] < limit or is_loopback(address):
        return False
    broker.refuse(None, HANDSHAKES)
    return True


def _count_connection(request: BootstrapRequest) -> bool:
    """Count the connection for the address of the client behind an HTTP proxy; return False when that has too many."""
    comes_from = getattr(getattr(request, "transport", None), "comes_from", None)
    return comes_from is None or comes_from(request.peer[0])


def open_session(broker: Broker, admission: Admission, connection: Any, origin: Origin, address: str) -> Session:
    """Return the session of a new connection, and start the clock of its handshake."""
    connection.budget_bytes = admission.budget_bytes
    origin.address = address
    needed = broker.hooks.authenticate or broker.hooks.onconnect
    session = Session(broker, connection, broker.random_u32(), origin if needed else None)
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

    def sendmsg(self, runs: list[bytes]) -> int:
        """Send the first chunk of `runs`."""
        return self.send(runs[0])


def chunk_bytes(connection: RawConnection) -> int:
    """Return the largest frame that a client accepts at once; 0 without a limit."""
    return connection.sock.size_bytes if isinstance(connection.sock, _Chunked) else 0


def limit_chunks(session: BrokerClient, size_bytes: int) -> None:
    """Send at most the frame size that a version 2 client has announced (257 to 8192 bytes)."""
    connection = session.outbox
    if isinstance(connection, RawConnection):  # gevent-websocket does its own sending
        connection.sock = _Chunked(connection.sock, min(max(size_bytes, 257), 8192))

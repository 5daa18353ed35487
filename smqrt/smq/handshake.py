"""From an HTTP request to a connected SMQ client: the three bootstraps (spec: smq §1.1, §12.1)."""

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
from smqrt.settings.options import whole
from smqrt.smq import data_path
from smqrt.smq.connection import RawConnection
from smqrt.smq.slow_consumers import connection_class
from smqrt.transport.listener import KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S
from smqrt.transport.origins import Origins, is_loopback
from smqrt.transport.tls import TlsTransport
from smqrt.wire import smq, websocket

MAX_UNFINISHED: int | None = 256
"""Handshakes of one address that may be under way."""
MIN_KEEPALIVE_INTERVAL_S = 3
KEEPALIVE_SECONDS = whole(1, 32767, "seconds")
"""More is refused by Linux."""
ANSWERED = "request: it is answered already; connect takes each request once, before anything of its response is sent"
NOT_SMQ = "This address speaks SMQ."
_REPLY = b"HTTP/1.1 200 OK\r\nServer: smqrt\r\nSmqBroker: true\r\nCache-Control: no-store\r\n\r\n"
_UPGRADE_LINES = b"SmqBroker: true\r\n"


class ErrorResponse(Protocol):
    """The answer to a request, as far as a bootstrap gives one."""

    def error(self, status: int, detail: str, headers: dict[str, str] | None = None, /) -> object:
        """Answer with an error."""
        ...


class DetachedConnection(Protocol):
    """A connection that was taken away from the HTTP server.

    Attributes:
        transport: its socket or `TlsTransport`.
        watcher: the loop's READ watcher for it, stopped.
        data: what came behind the request.
        secure: whether the transport is a `TlsTransport`.
    """

    transport: Any
    watcher: Any
    data: bytes
    secure: bool


class BootstrapRequest(Protocol):
    """An HTTP request, as far as a bootstrap looks at it.

    Attributes:
        peer: the client's address.
    """

    method: str
    peer: tuple[str, int]

    @property
    def response(self) -> ErrorResponse: ...

    @property
    def is_answered(self) -> bool:
        """Whether its response has begun, or its connection was taken away."""
        ...

    def get(self, name: str, /) -> str | None:
        """The value of a header field, None when there is none."""
        ...

    def refuse_foreign(self, more: Origins | None, /) -> bool:
        """Answer with 403 when it comes from a page of another host; tells whether it does."""
        ...

    def upgrade_lines(self) -> bytes:
        """The header lines that the application adds to a 101. Raises SmqrtError when the client would refuse them."""
        ...

    def detach(self) -> DetachedConnection:
        """Take the connection away from the server."""
        ...


def is_smq(request: object) -> bool:
    """Whether a request is SMQ: it has the header `SimpleMQ` or `Sec-WebSocket-Key` (spec: smq §2.1).

    Raises:
        ArgumentError: it is no request.
    """
    if isinstance(request, dict):
        return "HTTP_SIMPLEMQ" in request or "HTTP_SEC_WEBSOCKET_KEY" in request
    head = _checked(request)
    return head.get("SimpleMQ") is not None or head.get("Sec-WebSocket-Key") is not None


def page_user(request: Any) -> str | None:
    """The user that has logged in at the page of a request, by whatever kind of login; None for nobody."""
    find = getattr(request, "user", None)
    login = find() if callable(find) else None
    return None if login is None else login.name


def _checked(request: object) -> BootstrapRequest:
    if not hasattr(request, "detach"):
        raise ArgumentError("request: not an HTTP request; pass the page's request, or a WSGI environ")
    return cast(BootstrapRequest, request)


@dataclass(slots=True)
class Origin:
    """What `authenticate` and `onconnect` may want to know of the request that opened a connection."""

    request: Any
    arg: object
    address: str = ""
    """The client's."""
    info: Any = None
    """What was made of it for the application."""

    @classmethod
    def restored(cls) -> Origin:
        """Of a client that was connected before: nobody knows its request any more."""
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
        """Other times, for new connections; `names` are those of the arguments in errors. Raises as the class."""
        for name, seconds in zip(names, (idle_s, interval_s or 1), strict=True):
            KEEPALIVE_SECONDS.check(name, seconds)
        self.idle_s = int(idle_s)
        self.interval_s = max(int(interval_s or idle_s // 10), MIN_KEEPALIVE_INTERVAL_S)

    def apply(self, sock: socket.socket | TlsTransport) -> None:
        """Set it on a client's socket, unless it is what the listener gave it."""
        if (self.idle_s, self.interval_s) == (KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S):
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, self.idle_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, self.interval_s)


@dataclass(slots=True)
class Admission:
    """Whom a broker lets in, and how.

    Attributes:
        readtmo_ms: time for Connect.
        budget_bytes: what may wait for a client that does not read.
        origins: pages of other hosts that may connect.
    """

    readtmo_ms: int = 4000
    budget_bytes: int = DEFAULT_BUDGET_BYTES
    origins: Origins | None = None
    keep_alive: KeepAlive = field(default_factory=KeepAlive)


def connect(broker: Broker, admission: Admission, request: object, origin: Origin) -> None:
    """Turn a request into a connection of `broker`; blocks until the handshake ended. One that may not be is answered
    with an error.

    Raises:
        ArgumentError: `request` is none, or was answered already.
    """
    request = _checked(request)
    if request.is_answered:
        raise ArgumentError(ANSWERED)
    raw = request.get("SimpleMQ") is not None
    key = None if raw else websocket_key(request)
    if not raw and key is None:
        request.response.error(404, NOT_SMQ)
    elif request.refuse_foreign(admission.origins):
        pass  # it has answered
    elif broker.closed:  # its clients come back before there is a new one
        request.response.error(503, "This hub has been closed.", {"Retry-After": "1"})
    elif broker.draining:
        request.response.error(503, "This server takes no new clients.", {"Retry-After": "1"})
    elif too_many(broker, request.peer[0]) or not _is_counted(request):
        request.response.error(503, "Too many clients of your address are connecting.")
    else:
        _begin(broker, admission, request, key, origin)


def websocket_key(request: BootstrapRequest) -> str | None:
    """The key of a request that asks for a WebSocket; None when it does not, or asks wrongly."""
    key: str | None = request.get("Sec-WebSocket-Key")
    return key if key is not None and _valid_upgrade(request, key) else None


def _valid_upgrade(request: BootstrapRequest, key: str) -> bool:
    tokens = {token.strip().lower() for token in (request.get("Connection") or "").split(",")}
    return (
        request.method == "GET"
        and (request.get("Upgrade") or "").strip().lower() == "websocket"
        and "upgrade" in tokens
        and (request.get("Sec-WebSocket-Version") or "").strip() == "13"
        and websocket.valid_key(key)
    )


def _begin(broker: Broker, admission: Admission, request: BootstrapRequest, key: str | None, origin: Origin) -> None:
    greets = key is None and request.get("SendSmqHttpResponse") == "true"
    try:
        lines = b"" if key is None else request.upgrade_lines() + _UPGRADE_LINES
    except SmqrtError as error:
        request.response.error(400, str(error))
        return
    taken = request.detach()
    admission.keep_alive.apply(taken.transport)
    connection = connection_class(taken.secure, key is not None, broker.slow is not None)(
        taken.transport, taken.watcher
    )
    session = open_session(broker, admission, connection, origin, request.peer[0])
    hello = init(session, request.peer[0])
    if key is not None:
        connection.greet(websocket.switching_protocols(key, lines), websocket.encode(websocket.BINARY, hello))
    else:
        connection.greet(_REPLY if greets else b"", smq.frame(hello))
    connection.start(session, taken.data)
    handshake = connection.handshake
    if handshake:
        wait(handshake)


def too_many(broker: Broker, address: str) -> bool:
    """Whether `address` has as many unfinished handshakes as it may; counted and logged then. Addresses of this machine
    may have any number: they are those of everybody behind a proxy on it.
    """
    if MAX_UNFINISHED is None or data_path.unfinished[address] < MAX_UNFINISHED or is_loopback(address):
        return False
    broker.refuse(None, HANDSHAKES)
    return True


def _is_counted(request: BootstrapRequest) -> bool:
    """Whether the connection counts for the address of the client, also behind a proxy that speaks HTTP; false when
    that has too many.
    """
    comes_from = getattr(getattr(request, "transport", None), "comes_from", None)
    return comes_from is None or comes_from(request.peer[0])


def open_session(broker: Broker, admission: Admission, connection: Any, origin: Origin, address: str) -> Session:
    """The session of a new connection, whose handshake clock runs from now."""
    connection.budget_bytes = admission.budget_bytes
    origin.address = address
    needed = broker.hooks.authenticate or broker.hooks.onconnect
    session = Session(broker, connection, broker.random_u32(), origin if needed else None)
    connection.session = session
    data_path.handshake_begins(connection, admission.readtmo_ms / 1000, address)
    return session


def init(session: Session, address: str) -> bytes:
    """The Init packet; the C client needs at least three bytes of address."""
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
    """What a client takes at once; 0 when it did not say."""
    return connection.sock.size_bytes if isinstance(connection.sock, _Chunked) else 0


def limit_chunks(session: BrokerClient, size_bytes: int) -> None:
    """Respect the largest frame that a version 2 client takes at once (257 to 8192 bytes)."""
    connection = session.outbox
    if isinstance(connection, RawConnection):  # gevent-websocket sends as it likes
        connection.sock = _Chunked(connection.sock, min(max(size_bytes, 257), 8192))

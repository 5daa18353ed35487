"""From an HTTP request to a connected SMQ client: the three bootstraps (specification: smq.md §1.1, §12.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smqrt.broker.session import Session
from smqrt.errors import ArgumentError
from smqrt.net import wsgi
from smqrt.net.connection import RawConnection
from smqrt.net.opening import Origin, init, open_session, too_many
from smqrt.net.tls_connection import TlsRawConnection, TlsWsConnection
from smqrt.net.workers import wait
from smqrt.net.ws_connection import WsConnection
from smqrt.wire import smq, websocket

if TYPE_CHECKING:
    from smqrt.net.broker import Broker

_REPLY = b"HTTP/1.1 200 OK\r\nServer: smqrt\r\nSmqBroker: true\r\nCache-Control: no-store\r\n\r\n"
_UPGRADE_LINES = b"SmqBroker: true\r\n"


def is_smq(request: Any) -> bool:
    """Whether a request is SMQ: it has the header `SimpleMQ` or `Sec-WebSocket-Key` (specification: smq.md §2.1)."""
    if isinstance(request, dict):
        return "HTTP_SIMPLEMQ" in request or "HTTP_SEC_WEBSOCKET_KEY" in request
    return request.get("SimpleMQ") is not None or request.get("Sec-WebSocket-Key") is not None


def connect(broker: Broker, request: Any, arg: Any) -> bool:
    """See `Broker.connect`."""
    origin = Origin(request, arg)
    if isinstance(request, dict):
        if wsgi.HANDLER not in request:
            return wsgi.connect(broker, request, origin)
        request = wsgi.HandlerRequest(request)
    if not hasattr(request, "detach"):
        raise ArgumentError("request: not an HTTP request; pass the page's request, or a WSGI environ")
    raw = request.get("SimpleMQ") is not None
    key = None if raw else websocket_key(request)
    if not raw and key is None:
        request.response.error(404, "This address speaks SMQ.")
        return True
    if request.refuse_foreign(broker.options.origins):
        return True
    if broker.hub.closed:  # its clients come back before there is a new one
        request.response.error(503, "This hub has been closed.", {"Retry-After": "1"})
        return True
    _begin(broker, request, key, origin)
    return True


def websocket_key(request: Any) -> str | None:
    """The key of a request that asks for a WebSocket; None when it does not, or asks wrongly."""
    key: str | None = request.get("Sec-WebSocket-Key")
    return key if key is not None and _valid_upgrade(request, key) else None


def _valid_upgrade(request: Any, key: str) -> bool:
    tokens = {token.strip().lower() for token in (request.get("Connection") or "").split(",")}
    return (
        request.method == "GET"
        and (request.get("Upgrade") or "").strip().lower() == "websocket"
        and "upgrade" in tokens
        and (request.get("Sec-WebSocket-Version") or "").strip() == "13"
        and websocket.valid_key(key)
    )


def _begin(broker: Broker, request: Any, key: str | None, origin: Origin) -> None:
    if too_many(broker, request.peer[0]):
        request.response.error(503, "Too many clients of your address are connecting.")
        return
    greets = key is None and request.get("SendSmqHttpResponse") == "true"
    taken = request.detach()
    broker.keep_alive(taken.transport)
    connection = _connection_class(taken.secure, key is not None)(taken.transport, taken.watcher)
    session = open_session(broker, connection, origin, request.peer[0])
    hello = init(session, request.peer[0])
    if key is not None:
        connection.greet(websocket.switching_protocols(key, _UPGRADE_LINES), websocket.encode(websocket.BINARY, hello))
    else:
        connection.greet(_REPLY if greets else b"", smq.frame(hello))
    connection.start(session, taken.data)
    handshake = connection.handshake
    if handshake:
        wait(handshake)


def _connection_class(secure: bool, on_websocket: bool) -> type[RawConnection]:
    if secure:
        return TlsWsConnection if on_websocket else TlsRawConnection
    return WsConnection if on_websocket else RawConnection


class _Chunked:
    """A socket that sends at most `size_bytes` at once."""

    def __init__(self, sock: Any, size_bytes: int) -> None:
        self.unlimited = self._sock = sock
        self._size_bytes = size_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def send(self, data: Any) -> int:
        """Send the first chunk of `data`."""
        return int(self._sock.send(data[: self._size_bytes]))

    def sendmsg(self, runs: list[bytes]) -> int:
        """Send the first chunk of `runs`."""
        return self.send(runs[0])


def limit_chunks(session: Session, size_bytes: int) -> None:
    """Respect the largest frame that a version 2 client takes at once (257 to 8192 bytes)."""
    connection = session.outbox
    if isinstance(connection, RawConnection):  # gevent-websocket sends as it likes
        connection.sock = _Chunked(connection.sock, min(max(size_bytes, 257), 8192))

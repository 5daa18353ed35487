"""HTTP server and its connections, with a pooled greenlet for each exchange.

    waiting for a head ──head complete──▶ busy (a greenlet runs the handler) ──response sent──▶ waiting …
         │                                   │ detach(): another owner             │ no keep-alive
         └──────── deadline, end of stream, malformed head ──▶ graceful close ◀────┘

The READ watcher of a connection drives it. While it is busy, nothing further is read: TCP slows down a client that
pipelines, and responses keep their order. The loop calls `_readable`, `_resume` and `expired`. Everything that a
handler calls runs in its pooled greenlet and may block.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any, Protocol

import gevent
from gevent import get_hub
from greenlet import getcurrent, greenlet

from smqrt.http.access import Access, Cors
from smqrt.http.body import BodyMemory, ChunkedDecoder, HttpLimits
from smqrt.http.forwarded import Proxies
from smqrt.http.head import check_beginning
from smqrt.http.headers import BadRequest, ClientGoneError, HttpError, date_line, error_page, reason
from smqrt.http.logins.registry import Logins
from smqrt.http.message import Request, report_failure
from smqrt.http.repeats import Repeats
from smqrt.loop import greenlets
from smqrt.loop.greenlets import in_hub
from smqrt.loop.scheduling import NEVER, Deadlines, Turn, Watcher, share
from smqrt.settings.limits import LineLimit
from smqrt.transport.tls import Address, TlsTransport, Transport, half_close
from smqrt.wire.connection_state import Life, transition

log = logging.getLogger("smqrt")

_READ, _WRITE = 1, 2
_OTHER_PROTOCOLS = {
    b"\x16": "the client sent TLS to a port without TLS; connect without it, or to a listener with tls = true",
    b"\x10": "no hub accepts MQTT clients; create one with the option mqtt, or start the server with --mqtt",
}
"""Why a first byte is not the one of a request."""
_other_protocols = LineLimit()
_HEAD_END = b"\r\n\r\n"
_CR = 13
_HTTP_STARTS = frozenset(b"\r\n\x16" + bytes(range(ord("A"), ord("Z") + 1)) + bytes(range(ord("a"), ord("z") + 1)))
"""First bytes of HTTP, and of TLS, which gets an answer of HTTP. Others are of MQTT, if a hub takes its clients."""
_CHECKED_BODY_BYTES = 16384  # bytes of a chunked body, received with its head, that are checked before the handler runs
_REQUESTS_AT_ONCE = 4  # pipelined requests handled in a row before other connections have a turn
_buffer = bytearray(65536)  # shared by all connections: received bytes are copied before the next receive
_view = memoryview(_buffer)
_TIMED_OUT = object()


class Dispatcher(Protocol):
    """The handler of all requests: `tree.Root`."""

    def dispatch(self, request: Request) -> None:
        """Respond to a request; runs in a pooled greenlet and may block."""

    @property
    def version(self) -> int:
        """Number that grows with each change of how requests are handled."""

    def cors(self, path: str) -> Cors | None:
        """Return the CORS rules of an application for a path; None for those of the server."""


class RequestObserver(Protocol):
    """An observer of requests; must not block."""

    def began(self, request: Request) -> None:
        """Called before the handler of `request`."""

    def ended(self, request: Request, is_detached: bool) -> None:
        """Called when the response is complete or the connection was detached."""


class HttpServer:
    """An HTTP server for accepted connections.

    Args:
        root: handles the requests.
        limits: limits of time, size and memory.
        access: checks of every request.
        logins: the logins of users.

    Attributes:
        observers: observers of every request; usually empty.
        on_rejected: called for malformed requests with address, status and reason.
        take_mqtt: takes over a connection that does not begin as HTTP does; returns whether a hub takes it.
        challenge_answer: returns the ACME challenge response for a path, None for other paths.
        proxies: trusted proxies; None without any.
        connections: the connections with their deadlines, without detached ones.
    """

    def __init__(
        self,
        root: Dispatcher,
        limits: HttpLimits | None = None,
        access: Access | None = None,
        logins: Logins | None = None,
    ) -> None:
        self.root = root
        self.logins = logins or Logins()
        self.access = access or Access()
        self.limits = limits or HttpLimits()
        self.bodies = BodyMemory(self.limits.bodies_bytes)
        self.draining = False
        self.proxies: Proxies | None = None
        self.observers: tuple[RequestObserver, ...] = ()
        self.on_rejected: Callable[[str, int, str], object] | None = None
        self.challenge_answer: Callable[[str], bytes | None] | None = None
        self.repeats = Repeats()
        self.take_mqtt: Callable[[HttpConnection], bool] | None = None
        self.share = share()
        shortest = min(
            self.limits.first_byte_s, self.limits.header_s, self.limits.body_idle_s, self.limits.keep_alive_s
        )
        self.connections: Deadlines[HttpConnection] = Deadlines(min(0.25, shortest / 4))

    def __len__(self) -> int:
        """Return the number of connections, without detached ones."""
        return len(self.connections)

    def accepted(self, transport: Transport, peer: Address, secure: bool = False, data: bytes = b"") -> None:
        """Serve a new connection. Fits the argument `on_accept` of `Listener`.

        Args:
            transport: a non-blocking socket, or a `TlsTransport` after its handshake (then `secure`).
            peer: address of the client as `accept` returned it.
            secure: whether the transport is TLS.
            data: bytes already received.
        """
        self.connections.watch(HttpConnection(self, transport, (peer[0], peer[1]), secure, data))

    def accepted_secure(self, transport: Transport, peer: Address) -> None:
        """Serve a new TLS connection."""
        self.accepted(transport, peer, secure=True)

    def drain(self, timeout_s: float = 5.0) -> bool:
        """Respond to requests that have arrived completely or in part. Close all other connections.

        Blocks the greenlet.

        Returns:
            whether all connections were closed in time.
        """
        self.draining = True
        end, turn = monotonic() + timeout_s, Turn()
        while True:
            for connection in [c for c in self.connections if not c.busy]:
                in_hub(connection.close_if_idle)
                turn.yield_if_due()
            if not self.connections or monotonic() > end:
                return not self.connections
            gevent.sleep(0.02)

    def release_idle(self) -> Iterator[tuple[Transport, tuple[str, int], bytes]]:
        """Detach the idle connections without TLS. This server closes the others after their response.

        Yields:
            transport, address of the client, and the received bytes of the next request.
        """
        self.draining = True
        for connection in [one for one in self.connections if not one.busy and not one.secure]:
            transport, watcher, data = connection.release()
            watcher.close()
            yield transport, connection.peer, data

    def close(self) -> None:
        """Close all connections at once."""
        self.draining = True
        for connection in list(self.connections):
            connection.close()
        self.connections.close()


class HttpConnection:
    """A client connection.

    Args:
        server: the server.
        transport: non-blocking socket or `TlsTransport`.
        peer: address and port of the client.
        secure: whether the transport is TLS.
        data: bytes already received.
    """

    __slots__ = (
        "_busy", "_checked", "_parked", "_waiting", "_watcher", "_writable", "data",
        "_skipped", "deadline_s", "is_https", "life", "peer", "secure", "server", "transport",
    )  # fmt: skip

    def __init__(
        self, server: HttpServer, transport: Transport, peer: tuple[str, int], secure: bool, data: bytes = b""
    ) -> None:
        self.server = server
        self.transport: Any = transport
        self.life = Life.OPENING
        self.peer = peer
        self.secure = secure
        self.is_https = secure or getattr(transport, "client_tls", False)
        self.data = data  # received and not yet processed
        self.deadline_s = monotonic() + server.limits.first_byte_s
        self._busy: Request | None = None
        self._skipped = False  # whether an empty line before the head was skipped
        self._checked = 0  # length of the checked beginning of an incomplete head
        self._parked = False  # whether the greenlet of the busy request has blocked
        self._waiting: greenlet | None = None  # the greenlet of the request, while it waits for the transport
        self._writable: Any = None
        self._watcher = get_hub().loop.io(transport.fileno(), _READ)
        self._watcher.start(self._readable)
        if data or (type(transport) is TlsTransport and transport.has_pending):
            get_hub().loop.run_callback(self._resume)

    @property
    def busy(self) -> bool:
        """Whether a request is being handled."""
        return self._busy is not None

    # In the loop: receiving heads

    def _readable(self) -> None:
        """Receive; the callback of the READ watcher, which is active only while `_is_idle`."""
        if self.server.share.spent():
            self._yield_turn()
        else:
            self._receive()

    @property
    def _is_idle(self) -> bool:
        return self._busy is None and not self.life.over

    def _receive(self) -> None:
        try:
            size = self.transport.recv_into(_buffer)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size:
            self.close()
            return
        data = _view[:size].tobytes()
        self.data = self.data + data if self.data else data
        self._handle_received()
        if self.secure and self.transport is not None and self.transport.has_pending:
            get_hub().loop.run_callback(self._resume)

    def _handle_received(self) -> None:
        """Handle the received requests one by one, until one blocks or other connections are due."""
        try:
            if self.life is Life.OPENING and self.data and self.data[0] not in _HTTP_STARTS:
                take_mqtt = self.server.take_mqtt
                if take_mqtt is not None and take_mqtt(self):
                    return
            for _ in range(_REQUESTS_AT_ONCE):
                head = self._cut_head() if self.data and self._busy is None else None
                if head is None:
                    return
                if head not in self.server.repeats.by_head or not self._send_again(head):
                    self._begin(Request(head, self), head)
                if self.data and self.server.share.spent():
                    break
        except BadRequest as error:
            self._reject(error)
        except Exception:
            log.exception("error while reading from %s", self.peer)
            self.close()
        else:
            self._yield_turn()

    def _yield_turn(self) -> None:
        if self._is_idle:
            self._watcher.stop()
            self.server.share.later(self._resume)

    def _cut_head(self) -> bytes | None:
        data = self.data
        if data[0] == _CR and data[:2] == b"\r\n" and not self._skipped:
            self._skipped, self.data, data = True, data[2:], data[2:]  # RFC 9112 §2.2: some clients send one empty line
        # The checked part has no empty line, but its last three bytes may begin one. `end` is 3 without any.
        end = data.find(_HEAD_END, self._checked - 3 if self._checked > 3 else 0) + 4
        limit = self.server.limits.head_bytes
        if end > limit or (end < 4 and len(data) > limit):
            raise BadRequest(f"the head is longer than {limit} bytes", status=431)
        if end < 4:
            if not self._checked:  # the first bytes of a head: its deadline replaces that of the connection
                self.deadline_s = monotonic() + self.server.limits.header_s
            check_beginning(data, self._checked)
            self._checked = len(data)
            return None
        self._checked, self._skipped = 0, False
        self.data = data[end:]
        return data[:end]

    def _send_again(self, head: bytes) -> bool:
        """Respond with the kept response for this request, unless anything has changed; return whether it was sent."""
        server = self.server
        if server.observers or server.proxies is not None or server.draining:
            return False
        file = server.repeats.find(head, server.access, server.root.version, self.is_https, server.share.turn)
        if file is None:
            return False
        data = b"".join((file.head, date_line(), b"\r\n", file.body))
        try:
            sent = self.transport.send(data)
        except BlockingIOError:
            return False
        except OSError:
            self.close()
            return True
        if self.life is Life.OPENING:
            self.life = transition(self.life, Life.OPEN)
        if sent == len(data) and not (self.secure and self.transport.wants_write):
            self.deadline_s = monotonic() + server.limits.keep_alive_s
        else:
            self._start(Request(head, self), self._send_end, data[sent:])
        return True

    def _begin(self, request: Request, head: bytes) -> None:
        if self.server.proxies is not None:
            self.server.proxies.apply(request)
        if request.content_length is None:  # reject a malformed body before a handler acts on the request
            ChunkedDecoder().feed(self.data[:_CHECKED_BODY_BYTES])
        if self.life is Life.OPENING:
            self.life = transition(self.life, Life.OPEN)
        self._start(request, self._respond)
        server = self.server
        if request.sent_file is not None and not server.observers and server.proxies is None:
            server.repeats.keep(head, request, server.access, server.root.version, self.is_https)
        request.sent_file = None  # a pooled greenlet refers to its last request

    def _start(self, request: Request, respond: Callable[..., None], *args: object) -> None:
        """Run an exchange in a pooled greenlet, as far as it does not block."""
        self._busy = request
        self.deadline_s = NEVER
        greenlets.start(self._exchange, request, respond, *args)
        if self._busy is request and self.transport is not None:
            self._parked = True
            if self._waiting is None:
                self._watcher.stop()

    def _resume(self) -> None:
        """Continue after a request that had blocked, or after a turn of other connections."""
        if not self._is_idle:
            return
        if self.server.share.spent():
            self._yield_turn()
            return
        self._watcher.start(self._readable)
        if not self.data or self._checked:
            self._receive()
            return
        self._handle_received()
        if self.secure and self.transport is not None and self.transport.has_pending:
            get_hub().loop.run_callback(self._resume)

    # In a pooled greenlet: one exchange

    def _exchange(self, request: Request, respond: Callable[..., None], *args: object) -> None:
        try:
            for observer in self.server.observers:
                observer.began(request)
            respond(request, *args)
        except ClientGoneError:
            self.close()
        except Exception:
            log.exception("error while answering %s %s", request.method, request.path)
            self.close()
        except BaseException:  # the greenlet is being killed
            self.close()
            raise
        finally:
            for observer in self.server.observers:
                try:
                    observer.ended(request, self._busy is not request)
                except Exception:
                    log.exception("observer failed for %s %s", request.method, request.path)
            request.forget()
        if self._busy is not request:
            return  # detached
        self._busy = None
        if self.transport is None:
            return
        if request.response.close:
            self._close_gracefully()
            return
        self.deadline_s = monotonic() + self.server.limits.keep_alive_s
        if self._parked:
            self._parked = False
            get_hub().loop.run_callback(self._resume)

    def _send_end(self, request: Request, end: bytes) -> None:
        """Send the end of a kept response to a client that reads slowly."""
        self._send_rest(memoryview(end))

    def _respond(self, request: Request) -> None:
        response = request.response
        try:
            request.cors = self.server.root.cors(request.path)
            find = self.server.challenge_answer
            if find is not None and (found := find(request.path)) is not None:
                # A certificate authority may request any host name, so this precedes Host checks, logins and redirects.
                response.headers.set("Content-Type", "application/octet-stream")
                response.headers.set("Cache-Control", "no-store")
                response.write(found)
            elif not self.server.access.check(request):
                self.server.root.dispatch(request)
            if request.content_length != 0 and self._busy is request and not request.skip_body():
                response.close = True
            if not response.ended:
                response.end()
        except HttpError as error:
            self._respond_error(request, error)
        except ClientGoneError:
            raise
        except Exception:
            if self._busy is not request or response.committed:
                log.exception("error in %s %s", request.method, request.path)
                self._respond_error(request, HttpError(500))
            else:
                response.ended = False
                report_failure(request, "Python", traceback.format_exc())
                response.end()

    def _respond_error(self, request: Request, error: HttpError) -> None:
        response = request.response
        if self._busy is not request:
            return  # detached: the new owner responds
        if response.committed or error.close:
            response.close = True
        if not response.committed:
            response.ended = False
            response.error(error.status, error.detail, error.headers)
        response.ended = True

    # In a pooled greenlet: called by handlers

    def can_keep_alive(self, is_over: bool) -> bool:
        """Return whether the connection can carry another request after the busy one.

        Args:
            is_over: whether the response is complete. Before that, the handler may still read the body.
        """
        request = self._busy
        if request is None or not request.keep_alive or self.server.draining:
            return False
        if request.content_length == 0:
            return True
        try:
            return request.skip_body() if is_over else request.body_has_arrived
        except BadRequest:
            return False

    def receive(self, within_s: float) -> bytes:
        """Wait for more of a body, for `within_s` seconds at most.

        Raises:
            BadRequest: the client closed the stream.
            HttpError: 408, no byte arrived in time.
        """
        while True:
            try:
                size = self._open_transport().recv_into(_buffer)
            except BlockingIOError:
                self._wait(self._watcher, within_s, HttpError(408, "the body arrived too slowly", close=True))
                continue
            except OSError as error:
                raise ClientGoneError(str(error)) from None
            if not size:
                raise BadRequest("the body ended early")
            return _view[:size].tobytes()

    def send(self, data: bytes) -> None:
        """Send all of `data`; blocks the greenlet while the client does not read.

        Raises:
            ClientGoneError: the client has closed the connection or did not read in time.
        """
        self.server.repeats.other_responses += 1
        transport = self.transport
        if transport is None:
            raise ClientGoneError("the connection was closed")
        try:
            sent = transport.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise ClientGoneError(str(error)) from None
        if sent != len(data) or (self.secure and self.transport.wants_write):
            self._send_rest(memoryview(data)[sent:])

    def _send_rest(self, rest: memoryview) -> None:
        timeout = ClientGoneError("the client does not read")
        if self._writable is None:
            self._writable = get_hub().loop.io(self.transport.fileno(), _WRITE)
        if self.life is Life.OPEN:
            self.life = transition(self.life, Life.BLOCKED)
        while rest or (self.secure and self.transport.wants_write):
            self._wait(self._writable, self.server.limits.send_idle_s, timeout)
            transport = self._open_transport()
            try:
                if rest:
                    rest = rest[transport.send(rest) :]
                else:
                    transport.flush()
            except BlockingIOError:
                continue
            except OSError as error:
                raise ClientGoneError(str(error)) from None
        if self.life is Life.BLOCKED:
            self.life = transition(self.life, Life.OPEN)

    def send_continue(self) -> None:
        """Send 100 Continue."""
        self.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _wait(self, watcher: Any, idle_s: float, timeout: BaseException) -> None:
        """Block this greenlet until the watcher fires. Raises `timeout` after `idle_s` seconds."""
        self._waiting = getcurrent()
        self._watcher.stop()
        self.deadline_s = monotonic() + idle_s
        watcher.start(self._waiting.switch)
        try:
            if get_hub().switch() is _TIMED_OUT:
                raise timeout
        finally:
            watcher.stop()
            self._waiting = None
            self.deadline_s = NEVER

    def _open_transport(self) -> Any:
        if self.transport is None:
            raise ClientGoneError("the connection was closed")
        return self.transport

    def release(self, state: Life = Life.CLOSED) -> tuple[Transport, Watcher, bytes]:
        """Detach the connection from HTTP and return transport, stopped READ watcher and unused bytes.

        Args:
            state: the state of the connection afterwards.
        """
        self.life = transition(self.life, state)
        transport, data = self.transport, self.data
        self._watcher.stop()
        self.transport, self._busy, self.data = None, None, b""
        if self._writable is not None:
            self._close_writable()
        self.server.connections.forget(self)
        return transport, self._watcher, data

    # Closing

    def expired(self) -> None:
        """End the wait of the greenlet, reject an incomplete head, or close an idle connection."""
        if self._waiting is not None:
            self._waiting.switch(_TIMED_OUT)
        elif self._busy is None and self._checked:
            self._reject(HttpError(408, "the head arrived too slowly", close=True))
        else:
            self.close()

    def _reject(self, error: HttpError) -> None:
        """Respond to a malformed request, then close."""
        page = error_page(error.status, error.detail)
        head = (
            f"HTTP/1.1 {error.status} {reason(error.status)}\r\nContent-Type: text/html; charset=utf-8\r\n"
            f"Content-Length: {len(page)}\r\nConnection: close\r\n\r\n"
        )
        log.debug("rejected %s: %s", self.peer, error)
        if (fault := _OTHER_PROTOCOLS.get(self.data[:1])) and not self.secure:
            _other_protocols.warn(f"refused: {self.peer[0]}: {fault}")
        if self.server.on_rejected is not None:
            self.server.on_rejected(self.peer[0], error.status, error.detail)
        self._checked, self.data = 0, b""
        try:
            self.transport.send(head.encode() + page)
        except OSError:
            self.close()
        else:
            self._close_gracefully()

    def close_if_idle(self) -> None:
        """Close, unless a request is being handled or has arrived completely or in part."""
        if self._is_idle and not self.data:
            self._receive()
        if self._is_idle and not self.data:
            self._close_gracefully()

    def _close_gracefully(self) -> None:
        transport, watcher, _ = self.release(Life.DRAINING)
        half_close(self, transport, watcher)

    def close(self) -> None:
        """Close at once. In a greenlet that waits for this connection, `ClientGoneError` is raised."""
        if self.life.over:
            return
        self.life = transition(self.life, Life.CLOSED)
        transport, self.transport = self.transport, None
        self.data = b""  # further requests of a pipeline
        self._watcher.stop()
        self._watcher.close()
        self._close_writable()
        self.server.connections.forget(self)
        transport.close()
        if self._waiting is not None:
            # By the loop, because `throw` would switch to the waiting greenlet in the middle of the caller.
            get_hub().loop.run_callback(self._waiting.throw, ClientGoneError("the connection was closed"))

    def _close_writable(self) -> None:
        if self._writable is not None:
            self._writable.stop()
            self._writable.close()
            self._writable = None

"""The HTTP server and its connections, each driven by its READ watcher, with a worker for each exchange.

    waiting for a head ──head complete──▶ busy (a worker runs the handler) ──response sent──▶ waiting …
         │                                   │ detach(): another owner           │ no keep-alive
         └──────── deadline, end of stream, malformed head ──▶ graceful close ◀──┘

While a request is busy nothing further is read, so a client that pipelines is held back by TCP, and answers keep
their order. Callbacks of the Hub greenlet: `_readable`, `_go_on`, `expired`. Everything a handler calls runs in its
worker and may block.
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
from smqrt.http.headers import BadRequest, ClientGoneError, HttpError, error_page, reason
from smqrt.http.logins.registry import Logins
from smqrt.http.message import Request
from smqrt.loop import greenlet_pool
from smqrt.loop.greenlet_pool import in_hub
from smqrt.loop.readiness import Watcher
from smqrt.loop.scheduling import NEVER, Deadlines, Turn, share
from smqrt.transport.graceful_close import half_close
from smqrt.transport.tls import Address, TlsTransport, Transport
from smqrt.wire.connection_state import Life, moved

log = logging.getLogger("smqrt")

_READ, _WRITE = 1, 2
_END = b"\r\n\r\n"
_CR = 13
_LOOKED_AT_BYTES = 16384  # of a body that came with its head
_REQUESTS_AT_ONCE = 4  # then the others who wait have a turn
_buffer = bytearray(65536)  # shared: what is received is copied out before anything else can receive
_view = memoryview(_buffer)
_LATE = object()


class Dispatcher(Protocol):
    """What answers requests: `tree.Root`."""

    def dispatch(self, request: Request) -> None:
        """Answer `request`; runs in a worker and may block."""

    def cors(self, path: str) -> Cors | None:
        """The rules for pages of other hosts that an application has for a path; None for those of the server."""


class RequestObserver(Protocol):
    """What is told of requests; must not block."""

    def began(self, request: Request) -> None:
        """Before `request` is answered."""

    def ended(self, request: Request, is_detached: bool) -> None:
        """The answer is complete, or the connection was taken away."""


class HttpServer:
    """Speaks HTTP on the connections it is given.

    Args:
        root: answers the requests.
        limits: what a client may take.
        access: what is asked of every request.
        logins: who is logged in.

    Attributes:
        observers: are told of every request; usually there are none.
        on_refused: is told of what was no request: address, status, why.
        challenge_answer: gives what a certificate authority expects at a path, None where it expects nothing.
        proxies: those in front of the server; None when nobody is believed.
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
        self.on_refused: Callable[[str, int, str], object] | None = None
        self.challenge_answer: Callable[[str], bytes | None] | None = None
        self.share = share()
        self._connections: set[HttpConnection] = set()
        shortest = min(
            self.limits.first_byte_s, self.limits.header_s, self.limits.body_idle_s, self.limits.keep_alive_s
        )
        self._deadlines = Deadlines(min(0.25, shortest / 4))

    def __len__(self) -> int:
        """How many connections there are, detached ones not counted."""
        return len(self._connections)

    def accepted(self, transport: Transport, peer: Address, secure: bool = False, data: bytes = b"") -> None:
        """Take a new connection; fits `Listener`'s `on_accept`.

        Args:
            transport: a non-blocking socket, or a `TlsTransport` after its handshake (then `secure`).
            peer: the client's address as `accept` gave it.
            secure: whether the transport is TLS.
            data: bytes that were received already.
        """
        connection = HttpConnection(self, transport, (peer[0], peer[1]), secure, data)
        self._connections.add(connection)
        self._deadlines.watch(connection)

    def accepted_secure(self, transport: Transport, peer: Address) -> None:
        """Take a new TLS connection."""
        self.accepted(transport, peer, secure=True)

    def forget(self, connection: HttpConnection) -> None:
        """Called by a connection that ended or was detached."""
        self._connections.discard(connection)
        self._deadlines.forget(connection)

    def drain(self, timeout_s: float = 5.0) -> bool:
        """Answer the requests that have arrived, wholly or in part, and close all other connections; blocks the
        greenlet.

        Returns:
            whether all were finished in time.
        """
        self.draining = True
        end, turn = monotonic() + timeout_s, Turn()
        while True:
            for connection in [c for c in self._connections if not c.busy]:
                in_hub(connection.leave)
                turn.yield_if_due()
            if not self._connections or monotonic() > end:
                return not self._connections
            gevent.sleep(0.02)

    def release_idle(self) -> Iterator[tuple[Transport, tuple[str, int], bytes]]:
        """Yield away the connections without TLS on which nothing is being answered: transport, client's address, and
        what has come of the next request. The others are answered here, and closed then.
        """
        self.draining = True
        for connection in [one for one in self._connections if not one.busy and not one.secure]:
            transport, watcher, data = connection.release()
            watcher.close()
            yield transport, connection.peer, data

    def close(self) -> None:
        """Close all connections at once."""
        self.draining = True
        for connection in list(self._connections):
            connection.close()
        self._deadlines.close()


class HttpConnection:
    """A client's connection.

    Args:
        server: gives the limits, the tree, the deadlines.
        transport: non-blocking socket or `TlsTransport`.
        peer: address and port of the client.
        secure: whether the transport is TLS.
        data: bytes that were received already.
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
        self.data = data  # received and not yet used
        self.deadline_s = monotonic() + server.limits.first_byte_s
        self._busy: Request | None = None
        self._skipped = False  # an empty line before the head
        self._checked = 0  # length of the beginning of a head that was found good
        self._parked = False  # the worker of the busy request has blocked
        self._waiting: greenlet | None = None  # the worker, while it waits for the transport
        self._writable: Any = None
        self._watcher = get_hub().loop.io(transport.fileno(), _READ)
        self._watcher.start(self._readable)
        if data or (type(transport) is TlsTransport and transport.has_pending):
            get_hub().loop.run_callback(self._go_on)

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self._busy is not None

    # Hub greenlet: receiving heads

    def _readable(self) -> None:
        """The watcher's callback: it runs only while `_listens`."""
        if self.server.share.spent():
            self._yield_turn()
        else:
            self._receive()

    @property
    def _listens(self) -> bool:
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
        self._work_off()
        if self.secure and self.transport is not None and self.transport.has_pending:
            get_hub().loop.run_callback(self._go_on)

    def _work_off(self) -> None:
        """Answer the requests that have arrived, one after the other, until one blocks or others should have a turn."""
        try:
            for _ in range(_REQUESTS_AT_ONCE):
                head = self._cut_head() if self.data and self._busy is None else None
                if head is None:
                    return
                self._begin(Request(head, self))
                if self.data and self.server.share.spent():
                    break
        except BadRequest as error:
            self._refuse(error)
        except Exception:
            log.exception("error while reading from %s", self.peer)
            self.close()
        else:
            self._yield_turn()

    def _yield_turn(self) -> None:
        if self._listens:
            self._watcher.stop()
            self.server.share.later(self._go_on)

    def _cut_head(self) -> bytes | None:
        data = self.data
        if data[0] == _CR and data[:2] == b"\r\n" and not self._skipped:
            self._skipped, self.data, data = True, data[2:], data[2:]  # RFC 9112 §2.2; one, as some clients send it
        end = data.find(_END, self._checked - 3 if self._checked > 3 else 0) + 4
        limit = self.server.limits.head_bytes
        if end > limit or (end < 4 and len(data) > limit):
            raise BadRequest(f"the head is longer than {limit} bytes", status=431)
        if end < 4:
            self._await_more(data)
            return None
        self._checked, self._skipped = 0, False
        self.data = data[end:]
        return data[:end]

    def _await_more(self, data: bytes) -> None:
        if not self._checked:
            self.deadline_s = monotonic() + self.server.limits.header_s
        check_beginning(data, self._checked)
        self._checked = len(data)

    def _begin(self, request: Request) -> None:
        if self.server.proxies is not None:
            self.server.proxies.apply(request)
        if request.content_length is None:  # nobody shall act on a request that is seen to be malformed
            ChunkedDecoder().feed(self.data[:_LOOKED_AT_BYTES])
        self._busy = request
        if self.life is Life.OPENING:
            self.life = moved(self.life, Life.OPEN)
        self.deadline_s = NEVER
        greenlet_pool.start(self._exchange, request)
        if self._busy is request and self.transport is not None:
            self._parked = True
            if self._waiting is None:
                self._watcher.stop()

    def _go_on(self) -> None:
        """Continue behind a request that had blocked, or behind a turn of others."""
        if not self._listens:
            return
        if self.server.share.spent():
            self._yield_turn()
            return
        self._watcher.start(self._readable)
        if not self.data or self._checked:
            self._receive()
            return
        self._work_off()
        if self.secure and self.transport is not None and self.transport.has_pending:
            get_hub().loop.run_callback(self._go_on)

    # Worker: one exchange

    def _exchange(self, request: Request) -> None:
        try:
            for observer in self.server.observers:
                observer.began(request)
            self._answer(request)
        except ClientGoneError:
            self.close()
        except Exception:
            log.exception("error while answering %s %s", request.method, request.path)
            self.close()
        except BaseException:  # the worker is being ended
            self.close()
            raise
        finally:
            if self.server.observers:
                self._observed(request)
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
            get_hub().loop.run_callback(self._go_on)

    def _observed(self, request: Request) -> None:
        for observer in self.server.observers:
            try:
                observer.ended(request, self._busy is not request)
            except Exception:
                log.exception("telling of %s %s failed", request.method, request.path)

    def _answer(self, request: Request) -> None:
        response = request.response
        try:
            request.cors = self.server.root.cors(request.path)
            find = self.server.challenge_answer
            if find is not None and (found := find(request.path)) is not None:
                self._answer_challenge(request, found)
            elif not self.server.access.check(request):
                self.server.root.dispatch(request)
            if request.content_length != 0 and self._busy is request and not request.skip_body():
                response.close = True
            response.end()
        except HttpError as error:
            self._answer_error(request, error)
        except ClientGoneError:
            raise
        except Exception:
            self._answer_failure(request)

    @staticmethod
    def _answer_challenge(request: Request, found: bytes) -> None:
        """Answer a certificate authority: before logins and redirects of applications, and under every name."""
        request.response.headers.set("Content-Type", "application/octet-stream")
        request.response.headers.set("Cache-Control", "no-store")
        request.response.write(found)

    def _answer_failure(self, request: Request) -> None:
        response = request.response
        if self._busy is not request or response.committed:
            log.exception("error in %s %s", request.method, request.path)
            self._answer_error(request, HttpError(500))
        else:
            response.ended = False
            request.report_failure("Python", traceback.format_exc())
            response.end()

    def _answer_error(self, request: Request, error: HttpError) -> None:
        response = request.response
        if self._busy is not request:
            return  # detached: not ours to answer
        if response.committed or error.close:
            response.close = True
        if not response.committed:
            response.ended = False
            response.error(error.status, error.detail, error.headers)
        response.ended = True

    # Worker: what a handler needs

    def can_keep_alive(self, is_over: bool) -> bool:
        """Return whether the connection can take another request behind the busy one.

        Args:
            is_over: the response is complete; before that, its handler may still want the body.
        """
        request = self._busy
        if request is None or not request.keep_alive or self.server.draining:
            return False
        if request.content_length == 0:
            return True
        try:
            return request.skip_body() if is_over else request.body_is_here
        except BadRequest:
            return False

    def receive(self, within_s: float) -> bytes:
        """Wait for more of a body, for `within_s` seconds at most.

        Raises:
            BadRequest: the client ended the stream.
            HttpError: 408, nothing came in time.
        """
        while True:
            try:
                size = self._live_transport().recv_into(_buffer)
            except BlockingIOError:
                self._wait(self._watcher, within_s, HttpError(408, "the body came too slowly", close=True))
                continue
            except OSError as error:
                raise ClientGoneError(str(error)) from None
            if not size:
                raise BadRequest("the body ended early")
            return _view[:size].tobytes()

    def send(self, data: bytes) -> None:
        """Send all of `data`; blocks the greenlet while the client does not read.

        Raises:
            ClientGoneError: the client is gone or did not read in time.
        """
        try:
            sent = self._live_transport().send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise ClientGoneError(str(error)) from None
        if sent != len(data) or (self.secure and self.transport.wants_write):
            self._send_rest(memoryview(data)[sent:])

    def _send_rest(self, rest: memoryview) -> None:
        late = ClientGoneError("the client does not read")
        if self._writable is None:
            self._writable = get_hub().loop.io(self.transport.fileno(), _WRITE)
        if self.life is Life.OPEN:
            self.life = moved(self.life, Life.BLOCKED)
        while rest or (self.secure and self.transport.wants_write):
            self._wait(self._writable, self.server.limits.send_idle_s, late)
            transport = self._live_transport()
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
            self.life = moved(self.life, Life.OPEN)

    def send_continue(self) -> None:
        """Tell the client to send the body."""
        self.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _wait(self, watcher: Any, idle_s: float, late: BaseException) -> None:
        """Block this worker until the watcher fires; raises `late` when it does not in `idle_s` seconds."""
        self._waiting = getcurrent()
        self._watcher.stop()
        self.deadline_s = monotonic() + idle_s
        watcher.start(self._waiting.switch)
        try:
            if get_hub().switch() is _LATE:
                raise late
        finally:
            watcher.stop()
            self._waiting = None
            self.deadline_s = NEVER

    def _live_transport(self) -> Any:
        if self.transport is None:
            raise ClientGoneError("the connection was closed")
        return self.transport

    def release(self) -> tuple[Transport, Watcher, bytes]:
        """Return transport, stopped READ watcher and unused bytes away; this object is dead then."""
        return self._give_away(Life.CLOSED)

    def _give_away(self, to: Life) -> tuple[Transport, Watcher, bytes]:
        self.life = moved(self.life, to)
        transport, data = self.transport, self.data
        self._watcher.stop()
        self.transport, self._busy, self.data = None, None, b""
        self._end_writable()
        self.server.forget(self)
        return transport, self._watcher, data

    # Endings

    def expired(self) -> None:
        """The deadline is over: end what was being waited for."""
        if self._waiting is not None:
            self._waiting.switch(_LATE)
        elif self._busy is None and self._checked:
            self._refuse(HttpError(408, "the head came too slowly", close=True))
        else:
            self.close()

    def _refuse(self, error: HttpError) -> None:
        """Answer something that never became a request, and end."""
        page = error_page(error.status, error.detail)
        head = (
            f"HTTP/1.1 {error.status} {reason(error.status)}\r\nContent-Type: text/html; charset=utf-8\r\n"
            f"Content-Length: {len(page)}\r\nConnection: close\r\n\r\n"
        )
        log.debug("refused %s: %s", self.peer, error)
        if self.server.on_refused is not None:
            self.server.on_refused(self.peer[0], error.status, error.detail)
        self._checked, self.data = 0, b""
        try:
            self.transport.send(head.encode() + page)
        except OSError:
            self.close()
        else:
            self._close_gracefully()

    def leave(self) -> None:
        """Close, unless a request is under way; also one that has arrived and was not looked at is."""
        if self._listens and not self.data:
            self._receive()
        if self._listens and not self.data:
            self._close_gracefully()

    def _close_gracefully(self) -> None:
        transport, watcher, _ = self._give_away(Life.DRAINING)
        half_close(self, transport, watcher)

    def close(self) -> None:
        """Close at once. A worker that waits for this connection gets a `ClientGoneError`."""
        if self.life.over:
            return
        self.life = moved(self.life, Life.CLOSED)
        transport, self.transport = self.transport, None
        self._watcher.stop()
        self._watcher.close()
        self._end_writable()
        self.server.forget(self)
        transport.close()
        if self._waiting is not None:
            get_hub().loop.run_callback(self._waiting.throw, ClientGoneError("the connection was closed"))

    def _end_writable(self) -> None:
        if self._writable is not None:
            self._writable.stop()
            self._writable.close()
            self._writable = None

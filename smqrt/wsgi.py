"""Hubs in WSGI applications, by a handler class for `gevent.pywsgi`.

    from gevent.pywsgi import WSGIServer
    from smqrt.wsgi import Handler

    WSGIServer(("", 8000), application, handler_class=Handler).serve_forever()

For gunicorn use `smqrt.gunicorn.Worker`. In the application, `smq.connect(environ)` takes over the connection of a
browser or device; the server then discards the response of the application.
"""

from __future__ import annotations

import _socket
import errno
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException
from random import uniform
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any

import gevent
from gevent import get_hub, socket
from gevent.pywsgi import WSGIHandler
from gevent.ssl import SSLSocket

from smqrt.loop.scheduling import Turn
from smqrt.smq.handshake import HANDLER

if TYPE_CHECKING:
    from gevent.pywsgi import OldMessage, WSGIServer

    _Base = WSGIHandler
else:
    _Base = object

_READ = 1  # event mask of libev
_COPY_BYTES = 65536

KEEP_ALIVE_S = 60.0
HEAD_S, MAX_HEAD_BYTES = 10.0, 65536
BODY_S, BODY_BYTES_PER_S = 20.0, 500  # each 500 received bytes extend the time by a second
DISCARD_S, MAX_DISCARDED_BYTES = 10.0, 1 << 20  # for the rest of a body that the application has not read
STALLED_S = 30.0  # time in which a client must receive some data

TakenConnection = tuple[Any, Any, bytes]
Environ = dict[str, Any]
"""The WSGI environ of a request; values of any type."""
ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]
"""The return value of `sys.exc_info`."""


class InputLimitError(OSError, ValueError):
    """A client has exceeded a size or time limit, or has disconnected.

    `gevent.pywsgi` expects a ValueError while it reads the head of a request, an OSError elsewhere.

    Args:
        text: the reason.
    """

    def __init__(self, text: str) -> None:
        super().__init__(errno.ECONNRESET, text)  # gevent does not log this error number


class LimitedInput(io.RawIOBase):
    """Client input with limits; yields to other greenlets even when data is always available.

    Args:
        sock: the connection.
        raw: the server's stream of the connection, closed with this one.
    """

    def __init__(self, sock: socket.socket, raw: io.RawIOBase) -> None:
        self._sock, self._raw, self.turn = sock, raw, Turn()
        self.allow(0, 0)

    def allow(self, size_bytes: int, wait_s: float, bytes_per_s: float = 0.0) -> None:
        """Set the limits of the following input.

        Args:
            size_bytes: maximum size; more data raises `InputLimitError`.
            wait_s: time to wait in total, with up to a tenth more; a longer wait raises `InputLimitError`.
            bytes_per_s: number of received bytes that extend the time by one second.
        """
        # Up to a tenth more: otherwise clients that connect together would all time out in one turn of the loop.
        self._left_bytes, self._wait_s = size_bytes, wait_s * uniform(1.0, 1.1)
        self._byte_s = 1 / bytes_per_s if bytes_per_s else 0.0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # BufferedReader passes this type
        """See `io.RawIOBase`."""
        if self._left_bytes <= 0:
            raise InputLimitError("more data than allowed")
        began_s = monotonic()
        self._sock.settimeout(max(self._wait_s, 0.001))  # 0 would make the socket non-blocking
        try:
            size = int(self._sock.recv_into(buffer))
        except OSError as error:
            self._left_bytes = 0
            raise InputLimitError(str(error)) from None
        finally:
            self._wait_s -= monotonic() - began_s
            self._sock.settimeout(STALLED_S)
            self.turn.yield_if_due()  # here, since many greenlets may continue in the same turn of the loop
        self._wait_s += size * self._byte_s
        self._left_bytes -= size
        return size

    def close(self) -> None:
        """Close the stream."""
        self._raw.close()
        super().close()


class HandoverMixin(_Base):
    """Mixin for a handler of `gevent.pywsgi` that lets a hub take over the connection of a request."""

    _discards_response = False  # whether the request was answered, or its connection taken over
    _relay: gevent.Greenlet[..., None] | None = None

    def __init__(self, sock: socket.socket, address: str, server: WSGIServer) -> None:
        super().__init__(sock, address, server)
        self._incoming = LimitedInput(sock, self.rfile.detach())
        self.rfile = io.BufferedReader(self._incoming)

    def read_requestline(self) -> str:
        """Return the first line of a request; empty when the client sends none."""
        self._incoming.turn.yield_if_due()  # pipelined requests are in the buffer, and read without waiting
        self._incoming.allow(MAX_HEAD_BYTES, KEEP_ALIVE_S)
        return super().read_requestline()

    def read_request(self, raw_requestline: str) -> OldMessage:
        """Read the rest of the head. Raises ValueError when it is invalid."""
        self._incoming.allow(MAX_HEAD_BYTES, HEAD_S)
        head = super().read_request(raw_requestline)
        self._incoming.allow(sys.maxsize, BODY_S, BODY_BYTES_PER_S)
        return head

    def MessageClass(self, fp: io.BufferedIOBase, *more: object) -> OldMessage:  # the name in gevent
        """Return the fields of a head."""
        try:
            return super().MessageClass(fp, *more)
        except HTTPException as error:
            raise ValueError(str(error)) from None  # one line in the log

    def run_application(self) -> None:
        """Process a request."""
        super().run_application()
        self._incoming.allow(MAX_DISCARDED_BYTES, DISCARD_S)

    def get_environ(self) -> Environ:
        """Return the environ of a request, which includes the handler."""
        environ = super().get_environ()
        self._discards_response = False
        environ[HANDLER] = self
        return environ

    @property
    def is_answered(self) -> bool:
        """Whether the response has begun, or the connection was taken over."""
        return bool(self._discards_response or self.headers_sent)

    def answer(self, status: str, text: str, headers: dict[str, str]) -> None:
        """Respond to the request in place of the application."""
        body = text.encode()
        fields = {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(body)), **headers}
        self.start_response(status, list(fields.items()))
        self.write(body)
        self._discards_response = True

    def take(self) -> TakenConnection:
        """Take the connection over from the server.

        Returns:
            The non-blocking socket, its READ watcher, and data that arrived after the request.
        """
        sock = self.socket
        self._incoming.allow(0, 0)
        try:
            data: bytes = self.rfile.peek()  # data that the server has read ahead
        except InputLimitError:
            data = b""
        self._discards_response = self.close_connection = self.headers_sent = True
        if isinstance(sock, SSLSocket):
            # The hub reads from file descriptors, so a socket pair carries the decrypted data.
            ours, theirs = socket.socketpair()
            sock.settimeout(None)
            self._relay = gevent.spawn(_relay, sock, ours)
            transport: Any = BehindTls(theirs.detach(), sock)
        else:
            transport = _socket.socket(fileno=os.dup(sock.fileno()))  # the server closes its own descriptor
            transport.setblocking(False)
        self.socket = None  # type: ignore[assignment]  # the server must not close the connection
        return transport, get_hub().loop.io(transport.fileno(), _READ), data

    def handle(self) -> None:
        """Serve a connection; the server closes it when this returns."""
        try:
            super().handle()
        except OSError:
            pass  # the client disconnected before the error response
        finally:
            self._incoming.close()  # releases the file descriptor
        if self._relay is not None:
            self._relay.join()

    def start_response(
        self, status: str, headers: list[tuple[str, str]], exc_info: ExceptionInfo | None = None
    ) -> Callable[[bytes], None]:
        """See WSGI."""
        return self.write if self._discards_response else super().start_response(status, headers, exc_info)

    def write(self, data: bytes) -> None:
        """Send a part of the response."""
        if not self._discards_response:
            super().write(data)

    def _sendall(self, data: bytes) -> None:
        if self.socket is not None:
            super()._sendall(data)  # type: ignore[misc]  # missing in the type stubs


class Handler(HandoverMixin, WSGIHandler):
    """The `handler_class` for `gevent.pywsgi.WSGIServer`."""


class BehindTls:
    """One end of a socket pair; the other end is relayed to a TLS connection, whose addresses this object has.

    Args:
        fd: the file descriptor of this end.
        tls: the TLS connection.
    """

    def __init__(self, fd: int, tls: SSLSocket) -> None:
        self._sock, self._tls = _socket.socket(fileno=fd), tls
        self._sock.setblocking(False)
        self.getpeername, self.getsockname, self.setsockopt = tls.getpeername, tls.getsockname, tls.setsockopt
        self.cipher = tls.cipher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def peer_certificate(self) -> bytes | None:
        """Return the client's certificate (DER); None when it sent none."""
        return self._tls.getpeercert(binary_form=True)


def _relay(one: Any, other: Any) -> None:
    """Copy data in both directions until both ends are closed."""
    gevent.joinall([gevent.spawn(_copy, one, other), gevent.spawn(_copy, other, one)])
    one.close()
    other.close()


def _copy(source: Any, sink: Any) -> None:
    turn = Turn()
    try:
        while data := source.recv(_COPY_BYTES):
            with gevent.Timeout(STALLED_S, TimeoutError):
                sink.sendall(data)
            turn.yield_if_due()
        sink.shutdown(socket.SHUT_WR)
    except (OSError, ValueError):  # ValueError: the server has closed the TLS connection
        for end in (source, sink):
            with suppress(OSError):  # already closed
                end.shutdown(socket.SHUT_RDWR)

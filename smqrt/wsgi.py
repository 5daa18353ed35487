"""Hubs in WSGI applications: the handler class for `gevent.pywsgi`, which gives them browsers and raw devices.

    from gevent.pywsgi import WSGIServer
    from smqrt.wsgi import Handler

    WSGIServer(("", 8000), application, handler_class=Handler).serve_forever()

`smqrt.gunicorn.Worker` is the same for gunicorn. In the application, `smq.connect(environ)` takes the connection; what
the application answers then is dropped.
"""

from __future__ import annotations

import _socket
import errno
import io
import os
import sys
from collections.abc import Callable
from http.client import HTTPException
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any

import gevent
from gevent import get_hub, socket
from gevent.pywsgi import WSGIHandler
from gevent.ssl import SSLSocket

from smqrt.loop.scheduling import Turn
from smqrt.smq.wsgi import HANDLER

if TYPE_CHECKING:
    from gevent.pywsgi import OldMessage, WSGIServer

    _Base = WSGIHandler
else:
    _Base = object

_READ = 1
_PUMP_BYTES = 65536

KEEP_ALIVE_S = 60.0
HEAD_S, MAX_HEAD_BYTES = 10.0, 65536
BODY_S, BODY_BYTES_PER_S = 20.0, 500
DISCARD_S, MAX_DISCARDED_BYTES = 10.0, 1 << 20  # of a body that the application has not read
TAKES_NOTHING_S = 30.0

TakenConnection = tuple[Any, Any, bytes]
Environ = dict[str, Any]
"""What WSGI tells of a request: values of any kind."""
ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]
"""What `sys.exc_info` gives."""


class NoMore(OSError, ValueError):
    """Nothing more comes of what a client sends, or is taken; a ValueError is what `gevent.pywsgi` expects in the head,
    an OSError elsewhere.

    Args:
        text: why.
    """

    def __init__(self, text: str) -> None:
        super().__init__(errno.ECONNRESET, text)  # one of those that are not logged


class LimitedInput(io.RawIOBase):
    """What a client sends: no more than was allowed, and in turn with the others, also when there is always something.

    Args:
        sock: the connection.
        raw: the stream of it that the server made, closed with this one.
    """

    def __init__(self, sock: socket.socket, raw: io.RawIOBase) -> None:
        self._sock, self._raw, self.turn = sock, raw, Turn()
        self.allow(0, 0)

    def allow(self, size_bytes: int, wait_s: float, bytes_per_s: float = 0.0) -> None:
        """Say what may come from now on.

        Args:
            size_bytes: more raises `NoMore`.
            wait_s: for how long may be waited for it in all; else `NoMore`.
            bytes_per_s: so many that come are worth a second more.
        """
        self._left_bytes, self._wait_s = size_bytes, wait_s
        self._byte_s = 1 / bytes_per_s if bytes_per_s else 0.0

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # what a BufferedReader gives
        """See `io.RawIOBase`."""
        if self._left_bytes <= 0:
            raise NoMore("more than the server reads")
        size = self._receive(buffer)
        self._wait_s += size * self._byte_s
        self._left_bytes -= size
        return size

    def _receive(self, buffer: memoryview) -> int:
        began_s = monotonic()
        self._sock.settimeout(max(self._wait_s, 0.001))
        try:
            return int(self._sock.recv_into(buffer))
        except OSError as error:
            self._left_bytes = 0
            raise NoMore(str(error)) from None
        finally:
            self._wait_s -= monotonic() - began_s
            self._sock.settimeout(TAKES_NOTHING_S)
            self.turn.yield_if_due()  # now, because many may have waited for the same moment

    def close(self) -> None:
        """Close the stream."""
        self._raw.close()
        super().close()


class HandoverMixin(_Base):
    """Mixed into a handler of `gevent.pywsgi`: applications may take the connection of a request."""

    _over = False  # the response was given, or the connection taken: what the application says is dropped
    _relay: gevent.Greenlet[..., None] | None = None

    def __init__(self, sock: socket.socket, address: str, server: WSGIServer) -> None:
        super().__init__(sock, address, server)
        self._incoming = LimitedInput(sock, self.rfile.detach())
        self.rfile = io.BufferedReader(self._incoming)

    def read_requestline(self) -> str:
        """The first line of a request; empty when the client says none."""
        self._incoming.turn.yield_if_due()  # a pipeline is in the buffer
        self._incoming.allow(MAX_HEAD_BYTES, KEEP_ALIVE_S)
        return super().read_requestline()

    def read_request(self, raw_requestline: str) -> OldMessage:
        """Read the rest of the head; raises ValueError when it is none."""
        self._incoming.allow(MAX_HEAD_BYTES, HEAD_S)
        taken = super().read_request(raw_requestline)
        self._incoming.allow(sys.maxsize, BODY_S, BODY_BYTES_PER_S)
        return taken

    def MessageClass(self, fp: io.BufferedIOBase, *more: object) -> OldMessage:  # the server's name
        """The fields of a head."""
        try:
            return super().MessageClass(fp, *more)
        except HTTPException as error:
            raise ValueError(str(error)) from None  # one line in the log

    def run_application(self) -> None:
        """Answer a request."""
        super().run_application()
        self._incoming.allow(MAX_DISCARDED_BYTES, DISCARD_S)

    def get_environ(self) -> Environ:
        """The environ of a request, with the handler in it."""
        environ = super().get_environ()
        self._over = False
        environ[HANDLER] = self
        return environ

    @property
    def is_answered(self) -> bool:
        """Whether the response has begun, or the connection was taken away."""
        return bool(self._over or self.headers_sent)

    def answer(self, status: str, text: str, headers: dict[str, str]) -> None:
        """Answer the request in the application's place."""
        body = text.encode()
        fields = {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(body)), **headers}
        self.start_response(status, list(fields.items()))
        self.write(body)
        self._over = True

    def take(self) -> TakenConnection:
        """Take the connection away from the server.

        Returns:
            the non-blocking socket, its READ watcher, and what arrived behind the request.
        """
        sock, data = self.socket, self._read_ahead()
        self._over = self.close_connection = self.headers_sent = True
        if isinstance(sock, SSLSocket):
            transport: Any = self._relayed(sock)
        else:
            transport = _socket.socket(fileno=os.dup(sock.fileno()))  # the server closes its own
            transport.setblocking(False)
        self.socket = None  # type: ignore[assignment]  # says that there is nothing to close
        return transport, get_hub().loop.io(transport.fileno(), _READ), data

    def _read_ahead(self) -> bytes:
        """What the server has read of the connection already."""
        self._incoming.allow(0, 0)
        try:
            data: bytes = self.rfile.peek()
        except NoMore:  # nothing
            data = b""
        return data

    def _relayed(self, sock: SSLSocket) -> BehindTls:
        ours, theirs = socket.socketpair()
        sock.settimeout(None)
        self._relay = gevent.spawn(_relay, sock, ours)
        return BehindTls(theirs.detach(), sock)

    def handle(self) -> None:
        """Serve a connection; the server closes it when this returns."""
        try:
            super().handle()
        except OSError:
            pass  # the client has gone before it was told what is wrong
        finally:
            self._incoming.close()  # else it keeps the descriptor
        if self._relay is not None:
            self._relay.join()

    def start_response(
        self, status: str, headers: list[tuple[str, str]], exc_info: ExceptionInfo | None = None
    ) -> Callable[[bytes], None]:
        """See WSGI."""
        return self.write if self._over else super().start_response(status, headers, exc_info)

    def write(self, data: bytes) -> None:
        """Send a part of the response."""
        if not self._over:
            super().write(data)

    def _sendall(self, data: bytes) -> None:
        if self.socket is not None:
            super()._sendall(data)  # type: ignore[misc]  # its stubs do not know it


class Handler(HandoverMixin, WSGIHandler):
    """The `handler_class` for `gevent.pywsgi.WSGIServer`."""


class BehindTls:
    """One end of a socket pair whose other end is relayed to a TLS connection, which tells the facts.

    Args:
        fd: the file descriptor of the end.
        tls: the connection.
    """

    def __init__(self, fd: int, tls: SSLSocket) -> None:
        self._sock, self._tls = _socket.socket(fileno=fd), tls
        self._sock.setblocking(False)
        self.getpeername, self.getsockname, self.setsockopt = tls.getpeername, tls.getsockname, tls.setsockopt
        self.cipher = tls.cipher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def peer_certificate(self) -> bytes | None:
        """The client's certificate in DER form; None when it sent none."""
        return self._tls.getpeercert(binary_form=True)


def _relay(one: Any, other: Any) -> None:
    """Carry bytes both ways until both ends are closed."""
    ways = [gevent.spawn(_pump, one, other), gevent.spawn(_pump, other, one)]
    gevent.joinall(ways)
    one.close()
    other.close()


def _pump(source: Any, sink: Any) -> None:
    turn = Turn()
    try:
        while data := source.recv(_PUMP_BYTES):
            with gevent.Timeout(TAKES_NOTHING_S, TimeoutError):
                sink.sendall(data)
            turn.yield_if_due()
        sink.shutdown(socket.SHUT_WR)
    except (OSError, ValueError):  # ValueError: the server has closed the TLS connection
        for end in (source, sink):
            _end(end)


def _end(sock: Any) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is gone

"""Hubs in WSGI applications: the handler class for `gevent.pywsgi`, which gives them browsers and raw devices.

    from gevent.pywsgi import WSGIServer
    from smqrt.wsgi import Handler

    WSGIServer(("", 8000), application, handler_class=Handler).serve_forever()

`smqrt.gunicorn.Worker` is the same for gunicorn. In the application, `smq.connect(environ)` takes the connection; what
the application answers then is dropped.
"""

from __future__ import annotations

import _socket
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import gevent
from gevent import get_hub, socket
from gevent.pywsgi import WSGIHandler
from gevent.ssl import SSLSocket

from smqrt.net.wsgi import HANDLER

if TYPE_CHECKING:
    _Base = WSGIHandler
else:
    _Base = object

_READ = 1
_PUMP_BYTES = 65536

Transport = tuple[Any, Any, bytes]


class HandsOver(_Base):
    """Mixed into a handler of `gevent.pywsgi`: applications may take the connection of a request."""

    _over = False  # the response was given, or the connection taken: what the application says is dropped
    _relay: gevent.Greenlet[..., None] | None = None

    def get_environ(self) -> dict[str, Any]:
        """The environ of a request, with the handler in it."""
        environ: dict[str, Any] = super().get_environ()
        self._over = False
        environ[HANDLER] = self
        return environ

    def answer(self, status: str, text: str, headers: dict[str, str]) -> None:
        """Answer the request in the application's place."""
        body = text.encode()
        fields = {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(body)), **headers}
        self.start_response(status, list(fields.items()))
        self.write(body)
        self._over = True

    def take(self) -> Transport:
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
        self.socket.settimeout(0)
        try:
            data: bytes = self.rfile.peek()
        except OSError:  # of TLS, which has nothing
            data = b""
        self.socket.settimeout(None)
        return data

    def _relayed(self, sock: SSLSocket) -> BehindTls:
        ours, theirs = socket.socketpair()
        self._relay = gevent.spawn(_relay, sock, ours)
        return BehindTls(theirs.detach(), sock)

    def handle(self) -> None:
        """Serve a connection; the server closes it when this returns."""
        super().handle()
        if self._relay is not None:
            self._relay.join()

    def start_response(self, status: str, headers: Any, exc_info: Any = None) -> Callable[[bytes], None]:
        """See WSGI."""
        return self.write if self._over else super().start_response(status, headers, exc_info)

    def write(self, data: bytes) -> None:
        """Send a part of the response."""
        if not self._over:
            super().write(data)

    def _sendall(self, data: bytes) -> None:
        if self.socket is not None:
            super()._sendall(data)  # type: ignore[misc]  # its stubs do not know it


class Handler(HandsOver, WSGIHandler):
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
    try:
        while data := source.recv(_PUMP_BYTES):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except (OSError, ValueError):  # ValueError: the server has closed the TLS connection
        for end in (source, sink):
            _end(end)


def _end(sock: Any) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is gone

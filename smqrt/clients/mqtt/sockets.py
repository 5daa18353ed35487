"""Sockets of an application as streams, and the trust in their certificates.

A program may pass a connection that it made: a socket of the standard library or of gevent, with or without TLS, or a
`Stream`. A plain socket is detached, so that neither `close()` nor the garbage collector of the program ends the
connection. A TLS socket holds the state of OpenSSL, so it is used as it is, without blocking.
"""

from __future__ import annotations

import _socket
import _ssl
import errno
import socket
import ssl
from collections.abc import Callable
from typing import Any

import gevent.socket
import gevent.ssl

from smqrt.errors import ArgumentError, StreamError
from smqrt.transport import certificates
from smqrt.transport.stream import Stream
from smqrt.transport.tls import Buffer, TlsTransport
from smqrt.transport.tls_contexts import CertStore, Trust

ADDRESS_KINDS = "a host name, or a connected socket.socket, ssl.SSLSocket, gevent socket or Stream"


def is_socket(value: object) -> bool:
    """Return whether it is a socket that `stream_of` takes; it may be closed."""
    return isinstance(value, Stream | _socket.socket | gevent.socket.socket)


def stream_of(sock: object) -> Stream:
    """Return a stream over a connected socket, which belongs to the stream from now on.

    Raises:
        ArgumentError: it is no socket.
        StreamError: "socketclosed" when it is closed or not connected, "invalidsocketcon" when it is no stream socket.
    """
    if isinstance(sock, Stream):
        sock.peername()  # raises when it is closed
        return sock
    if not isinstance(sock, _socket.socket | gevent.socket.socket):
        raise ArgumentError(f"a connection must be {ADDRESS_KINDS}, not {type(sock).__name__}")
    try:
        sock.getpeername()
        kind = sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
    except OSError as error:
        raise StreamError("socketclosed", f"the socket is not connected: {error.strerror}") from None
    if kind != socket.SOCK_STREAM:
        raise StreamError("invalidsocketcon", "MQTT needs a stream socket")
    if isinstance(sock, ssl.SSLSocket | gevent.ssl.SSLSocket):
        return Stream(SslSocketTransport(sock))  # type: ignore[arg-type]  # has what a stream calls
    transport = _socket.socket(fileno=sock.detach())
    transport.setblocking(False)
    return Stream(transport)


class SslSocketTransport:
    """The transport of a stream over a TLS socket of the application.

    Args:
        sock: connected, its handshake done.
    """

    def __init__(self, sock: Any) -> None:
        self.sock = sock
        sock.setblocking(False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sock, name)

    def recv_into(self, buffer: memoryview, size_bytes: int) -> int:
        """Receive; 0 at the end of the stream. Raises BlockingIOError when nothing is there."""
        return self._without_waiting(self.sock.recv_into, buffer, size_bytes)

    def send(self, data: Buffer) -> int:
        """Send what fits. Raises BlockingIOError when nothing does."""
        return self._without_waiting(self.sock.send, data)

    def _without_waiting(self, call: Callable[..., int], *arguments: object) -> int:
        try:
            return call(*arguments)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ValueError as error:  # the application has closed or unwrapped it
            raise OSError(errno.EBADF, str(error)) from None

    def peer_chain(self) -> list[bytes]:
        """Return the certificates that the other side presented in DER form, its own first."""
        chain = self.sock._sslobj.get_unverified_chain()  # public from Python 3.13 on
        return [certificate.public_bytes(_ssl.ENCODING_DER) for certificate in chain or ()]


def judge(stream: Stream, store: CertStore, host: str = "") -> Trust:
    """Return the trust in the other side of a stream; without TLS there is nothing to judge, and it is trusted.

    Args:
        store: the authorities to trust. They don't count when the application's TLS context has verified the chain
            already (`ssl.CERT_REQUIRED`).
        host: the name that the certificate must have; by default that which the TLS handshake asked for.
    """
    transport: Any = stream.transport
    if isinstance(transport, TlsTransport):
        facts: Any = transport.ssl_object
    elif isinstance(transport, SslSocketTransport):
        facts = transport.sock
    else:
        return Trust.TRUSTED
    chain, context = transport.peer_chain(), facts.context
    host = host or facts.server_hostname or ""
    if context.verify_mode != ssl.CERT_REQUIRED:
        return store.judge(chain, host)
    is_named = context.check_hostname or bool(host and chain and certificates.matches(chain[0], host))
    return Trust.TRUSTED if is_named else Trust.CERT

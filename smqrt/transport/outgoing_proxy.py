"""Outgoing connections through an HTTP (CONNECT) or SOCKS5 proxy.

The proxy resolves host names, so the client needs no DNS.
"""

from __future__ import annotations

import re
import socket
from typing import cast

import gevent

from smqrt.errors import StreamError
from smqrt.transport.proxy_address import HTTP_PORT, SOCKS_PORT, Proxy, proxy_failure
from smqrt.transport.stream import Stream

__all__ = ["HTTP_PORT", "SOCKS_PORT", "Proxy", "open_through"]

_MAX_HEAD_BYTES = 16384
_NO_HOST = re.compile(r"[\0-\x20\x7f/\\@]")  # a line break would start another header field
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")


def open_through(
    proxy: Proxy, host: str, port: int, timeout_s: float | None = None, source: str | None = None, ipv6: bool = False
) -> Stream:
    """Connect to `host` through `proxy`; blocks the greenlet.

    Args:
        proxy: the proxy.
        host, port: the destination.
        timeout_s: time limit of the whole call.
        source, ipv6: for the connection to the proxy, see `Stream.connect`.

    Raises:
        StreamError: the errors of `Stream.connect`, about the proxy; "proxyauth" (wrong credentials), "timeout",
            "prxnotcompatible" (another kind of server), and the proxy's reasons "prxgeneral", "prxrefused", ...
    """
    with gevent.Timeout(timeout_s, StreamError("timeout", f"no connection to {host}:{port} within {timeout_s} s")):
        stream = Stream.connect(proxy.host, proxy.port, None, source, ipv6)
        try:
            (_connect_by_socks if proxy.socks else _connect_by_http)(stream, proxy, host, port)
        except BaseException:
            stream.close()
            raise
        return stream


def _received(stream: Stream, size_bytes: int = 65536) -> bytes:
    data = stream.read(size_bytes)
    if not data:
        raise StreamError("socketclosed", "the proxy closed the connection")
    return data


# ---- SOCKS5, by python-socks


def _connect_by_socks(stream: Stream, proxy: Proxy, host: str, port: int) -> None:
    from python_socks import ProxyError, ProxyType  # here: slow to load, and rarely needed
    from python_socks.sync import Proxy as SocksProxy

    class Connected(SocksProxy):
        """A `forward` proxy that returns the existing connection: the library's connection would block the loop."""

        def connect(
            self, dest_host: str, dest_port: int, timeout: float | None = None, **kwargs: object
        ) -> socket.socket:
            return cast(socket.socket, _Socket(stream))

    try:
        SocksProxy(
            ProxyType.SOCKS5,
            proxy.host,
            proxy.port,
            proxy.user,
            proxy.password,
            rdns=True,
            forward=Connected(ProxyType.SOCKS5, "", 0),
        ).connect(host, port)
    except ProxyError as error:
        raise proxy_failure(error.error_code, str(error)) from None
    except (UnicodeError, ValueError) as error:
        raise StreamError("prxaddress", f"{host}: {error}") from None


class _Socket:
    """The part of a socket's interface that python-socks uses."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def sendall(self, data: bytes) -> None:
        self._stream.write(data)

    def recv(self, size_bytes: int) -> bytes:
        return _received(self._stream, size_bytes)

    def close(self) -> None:
        """Do nothing: `open_through` closes the stream."""


# ---- HTTP


def _connect_by_http(stream: Stream, proxy: Proxy, host: str, port: int) -> None:
    if _NO_HOST.search(host):
        raise StreamError("cannotresolve", f"{host!r} is not a name or address")
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    fields = f"Host: {authority}\r\n"
    if proxy.authorization is not None:
        fields += f"Proxy-Authorization: {proxy.authorization}\r\n"
    stream.write(f"CONNECT {authority} HTTP/1.1\r\n{fields}\r\n".encode())
    data = b""
    while b"\r\n\r\n" not in data:
        if len(data) > _MAX_HEAD_BYTES or not b"HTTP/".startswith(data[:5]):
            raise StreamError("prxnotcompatible", "the proxy does not speak HTTP")
        data += _received(stream)
    head, _, rest = data.partition(b"\r\n\r\n")
    match = _STATUS.match(head)
    if match is None:
        raise StreamError("prxnotcompatible", "the proxy does not speak HTTP")
    status = int(match[1])
    if not 200 <= status < 300:
        word = "proxyauth" if status == 407 else "prxrefused"
        raise StreamError(word, f"the proxy answered {head.splitlines()[0].decode('latin-1')}")
    stream.unread(rest)

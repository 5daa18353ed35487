"""Connections through a proxy: HTTP CONNECT and SOCKS5, both with name and password if need be.

The proxy looks up names, so a client behind one needs no DNS.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field
from typing import cast

import gevent
from python_socks import ProxyError, ProxyType
from python_socks.sync import Proxy as SocksProxy

from smqrt.errors import ArgumentError, StreamError
from smqrt.transport.stream import Stream
from smqrt.wire.url import basic_authorization

# ---- SOCKS5 over a connection that is there already, on python-socks.

_WORDS = {
    2: "prxnotallowed",
    3: "prxnetunreachable",
    4: "prxhostunreachable",
    5: "prxrefused",
    6: "prxttlexpired",
    7: "prxcommand",
    8: "prxaddress",
}


def connect(stream: Stream, proxy: Proxy, host: str, port: int) -> None:
    """Asks a proxy to connect to `host`; blocks the greenlet.

    Args:
        stream: connected to the proxy.

    Raises:
        StreamError: see `smqrt.transport.outgoing_proxy.open_through`.
    """
    through = SocksProxy(
        ProxyType.SOCKS5, proxy.host, proxy.port, proxy.user, proxy.password, rdns=True, forward=_Connected(stream)
    )
    try:
        through.connect(host, port)
    except ProxyError as error:
        raise _failure(error) from None
    except (UnicodeError, ValueError) as error:
        raise StreamError("prxaddress", f"{host}: {error}") from None


def _failure(error: ProxyError) -> StreamError:
    if error.error_code is not None:
        return StreamError(_WORDS.get(error.error_code, "prxgeneral"), str(error))
    word = "proxyauth" if "authentication" in str(error) else "prxnotcompatible"
    return StreamError(word, str(error))


class _Connected(SocksProxy):
    """The proxy to "go through first", which is our connection: python-socks would open one that blocks the loop."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(ProxyType.SOCKS5, "", 0)
        self._stream = stream

    def connect(self, dest_host: str, dest_port: int, timeout: float | None = None, **kwargs: object) -> socket.socket:
        return cast(socket.socket, _Socket(self._stream))


class _Socket:
    """What python-socks calls of a socket."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def sendall(self, data: bytes) -> None:
        self._stream.write(data)

    def recv(self, size_bytes: int) -> bytes:
        return received(self._stream, size_bytes)

    def close(self) -> None:
        """Left to `open_through`."""


_MAX_HEAD_BYTES = 16384
_MAX_CREDENTIAL_BYTES = 255  # RFC 1929
_NO_HOST = re.compile(r"[\0-\x20\x7f/\\@]")  # a line break would begin a header field of its own
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy.

    Attributes:
        socks: whether it speaks SOCKS5, otherwise HTTP.
        user, password: what it wants to know, None when it asks nobody.

    Raises:
        ArgumentError: a name or password that can't be sent.
    """

    host: str
    port: int
    socks: bool = False
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for what, text in (("user", self.user), ("password", self.password)):
            if self.socks and text is not None and not (text.isascii() and 0 < len(text) <= _MAX_CREDENTIAL_BYTES):
                raise ArgumentError(f"the {what} of a SOCKS proxy has 1 to {_MAX_CREDENTIAL_BYTES} ASCII characters")

    @property
    def authorization(self) -> str | None:
        """Value of the Proxy-Authorization field; None without a user."""
        if self.user is None:
            return None
        return basic_authorization(self.user, self.password)


def open_through(
    proxy: Proxy, host: str, port: int, timeout_s: float | None = None, source: str | None = None, ipv6: bool = False
) -> Stream:
    """Connect to `host` through `proxy`; blocks the greenlet.

    Args:
        timeout_s: for all of it.
        source, ipv6: of the connection to the proxy, see `Stream.connect`.

    Raises:
        StreamError: what `Stream.connect` raises, about the proxy; "proxyauth" (it wants other credentials), "timeout",
            "prxnotcompatible" (it is no such proxy), and its reasons "prxgeneral", "prxrefused", ...
    """
    with gevent.Timeout(timeout_s, StreamError("timeout", f"no connection to {host}:{port} within {timeout_s} s")):
        stream = Stream.connect(proxy.host, proxy.port, None, source, ipv6)
        try:
            (_through_socks if proxy.socks else _through_http)(stream, proxy, host, port)
        except BaseException:
            stream.close()
            raise
        return stream


def _through_socks(stream: Stream, proxy: Proxy, host: str, port: int) -> None:
    from smqrt.transport import (
        outgoing_proxy as socks,  # here: the library takes longer to load than most modules, and few need it
    )

    socks.connect(stream, proxy, host, port)


# ---- HTTP


def _through_http(stream: Stream, proxy: Proxy, host: str, port: int) -> None:
    if _NO_HOST.search(host):
        raise StreamError("cannotresolve", f"{host!r} is no name or address")
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    fields = f"Host: {authority}\r\n"
    if proxy.authorization is not None:
        fields += f"Proxy-Authorization: {proxy.authorization}\r\n"
    stream.write(f"CONNECT {authority} HTTP/1.1\r\n{fields}\r\n".encode())
    head, _, rest = _head(stream).partition(b"\r\n\r\n")
    _check_status(head)
    stream.unread(rest)


def _head(stream: Stream) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        if len(data) > _MAX_HEAD_BYTES or not b"HTTP/".startswith(data[:5]):
            raise StreamError("prxnotcompatible", "the proxy does not speak HTTP")
        data += received(stream)
    return data


def _check_status(head: bytes) -> None:
    match = _STATUS.match(head)
    if match is None:
        raise StreamError("prxnotcompatible", "the proxy does not speak HTTP")
    status = int(match[1])
    if not 200 <= status < 300:
        word = "proxyauth" if status == 407 else "prxrefused"
        raise StreamError(word, f"the proxy answered {head.splitlines()[0].decode('latin-1')}")


def received(stream: Stream, size_bytes: int = 65536) -> bytes:
    """Returns what a proxy says next.

    Raises:
        StreamError: "socketclosed", it says nothing more.
    """
    data = stream.read(size_bytes)
    if not data:
        raise StreamError("socketclosed", "the proxy closed the connection")
    return data

"""Outgoing connections through an HTTP (CONNECT) or SOCKS5 proxy.

The proxy resolves host names, so the client needs no DNS.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field
from typing import cast

import gevent

from smqrt.errors import ArgumentError, StreamError
from smqrt.transport.stream import Stream
from smqrt.wire.url import basic_authorization

HTTP_PORT, SOCKS_PORT = 8080, 1080
"""Default ports of proxies."""
_MAX_HEAD_BYTES = 16384
_MAX_CREDENTIAL_BYTES = 255  # RFC 1929
_NO_HOST = re.compile(r"[\0-\x20\x7f/\\@]")  # a line break would start another header field
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy.

    Attributes:
        host, port: its address.
        socks: whether it is a SOCKS5 proxy, otherwise HTTP.
        user, password: credentials; None for none.

    Raises:
        ArgumentError: the protocol cannot send the user or the password.
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
        return None if self.user is None else basic_authorization(self.user, self.password)


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

_WORDS = {
    2: "prxnotallowed",
    3: "prxnetunreachable",
    4: "prxhostunreachable",
    5: "prxrefused",
    6: "prxttlexpired",
    7: "prxcommand",
    8: "prxaddress",
}
"""Error words by reply code (RFC 1928 §6)."""


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
        if error.error_code is not None:
            word = _WORDS.get(error.error_code, "prxgeneral")
        else:
            word = "proxyauth" if "authentication" in str(error) else "prxnotcompatible"
        raise StreamError(word, str(error)) from None
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

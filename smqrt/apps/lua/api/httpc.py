"""Python half of the HTTP clients `httpc` and `http` (spec: bas-api §9).

`services.http_clients` contains the clients by the number that Lua uses; `ba.socket.http2sock` uses it too.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from urllib.parse import parse_qsl

from smqrt.apps.lua.api.sockets import describe
from smqrt.apps.lua.bridge import (
    LuaOptions,
    LuaResult,
    LuaValue,
    address,
    fail,
    from_latin1,
    from_utf8,
    latin1,
    methods,
    options_of,
    utf8,
    with_error_words,
)
from smqrt.apps.lua.vm import Services, Vm
from smqrt.http.client.client import (
    LARGE_BYTES,
    MAX_BODY_BYTES,
    HttpClient,
    HttpClientOptions,
    HttpConversation,
    parse_cookies,
)
from smqrt.http.client.exchange import ClientRequest, encode, url_of
from smqrt.http.headers import joined_fields, spelled_fields
from smqrt.transport.outgoing_proxy import HTTP_PORT, SOCKS_PORT, Proxy
from smqrt.transport.tls_contexts import ClientTls, Trust

Pairs = list[tuple[bytes, bytes]]


class HttpClientBinding:
    """HTTP clients by number.

    Args:
        services: the parts of the server.
        hold_collector: see `Vm`.
    """

    def __init__(self, services: Services, hold_collector: Callable[[], None]) -> None:
        self._hold_collector = hold_collector
        self._clients = services.http_clients
        self._tls = services.tls
        self._next = itertools.count(1).__next__

    def create(self, follow: bool, *options: LuaValue) -> int:
        """Create a client and return its number.

        Args:
            follow: whether it is an `HttpClient`, which follows redirects; else an `HttpConversation`.
            options: alternating names and values.
        """
        given = options_of(options)
        chosen = HttpClientOptions(
            persistent=given.get("persistent", True),
            proxy=proxy_of(given),
            tunnel=given.get("proxycon", False),
            host=_text(given.get("host")),
            source=_text(given.get("intf")),
            ipv6=given.get("ipv6", False),
            max_body_bytes=given.get("maxsize", MAX_BODY_BYTES),
        )
        if "shark" in given:
            tls = self._tls[given["shark"]]
            assert isinstance(tls, ClientTls)  # the Lua half has checked it
            chosen.tls = tls
        number = self._next()
        self._clients[number] = (HttpClient if follow else HttpConversation)(chosen)
        return number

    def drop(self, number: int) -> None:
        """Close a client whose Lua object was collected."""
        client = self._clients.pop(number, None)
        if client is not None:
            client.close()

    def request(
        self,
        number: int,
        method: bytes,
        target: bytes,
        query: bytes,
        headers: bytes,
        size_bytes: int | None,
        user: bytes | None,
        password: bytes | None,
        trusted: bool,
    ) -> bool:
        """Send the head of a request; `query` and `headers` are packed names and values, see `pairs_of`."""
        request = ClientRequest(
            from_latin1(method),
            url_of(from_utf8(target), pairs_of(query)),
            [(from_latin1(name), from_latin1(value)) for name, value in pairs_of(headers)],
            size_bytes,
            _text(user),
            _text(password),
            trusted,
        )
        self._clients[number].send_head(request)
        return True

    def write(self, number: int, data: bytes) -> bool:
        """Send a part of the body."""
        self._clients[number].write(data)
        return True

    def status(self, number: int) -> int:
        """Wait for the response, and return its status code."""
        return self._clients[number].status()

    def read(self, number: int) -> bytes | None:
        """Return the next part of the body; None at its end."""
        return self._clients[number].read()

    def read_bytes(self, number: int, size_bytes: int) -> bytes | None:
        """Return `size_bytes` of the body, or less at its end; None after the end."""
        return self._clients[number].read_whole(size_bytes) or None

    def read_all(self, number: int) -> tuple[bytes, bool]:
        """Return the rest of the body, and whether it is larger than `LARGE_BYTES`."""
        body = self._clients[number].read_whole()
        if len(body) > LARGE_BYTES:
            self._hold_collector()
        return body, len(body) > LARGE_BYTES

    def drain(self, number: int) -> bool:
        """Read and discard the rest of the response, so that the connection can be reused."""
        client = self._clients[number]
        client.status()  # waits for the head, if the application has not read it
        client.skip()
        return True

    def header(self, number: int, name: bytes) -> bytes | None:
        """Return a header field of the response; the name is case-insensitive."""
        value = self._clients[number].get(from_latin1(name))
        return None if value is None else latin1(value)

    def headers(self, number: int) -> tuple[bytes, ...]:
        """Return `name, value, ...` of all header fields."""
        return tuple(latin1(part) for pair in self._clients[number].headers for part in pair)

    def fields(self, number: int) -> tuple[bytes, ...]:
        """As `headers`, with each name once; several fields of one name are joined to a list."""
        headers = self._clients[number].headers
        return tuple(latin1(part) for pair in spelled_fields(headers, joined_fields(headers)) for part in pair)

    def cookies(self, number: int) -> tuple[bytes, ...]:
        """Return `name, value, ...` of the cookies that the response sets."""
        found = parse_cookies(self._clients[number].headers)
        return tuple(latin1(part) for cookie in found for part in (cookie.name, cookie.value))

    def url(self, number: int) -> bytes | None:
        """Return the URL of the last request, after redirects; None before the first request."""
        request = self._clients[number].request
        return str(request.url).encode() if request else None

    def set_timeout(self, number: int, timeout_ms: float) -> None:
        """Set the timeout of each wait."""
        self._clients[number].options.timeout_s = timeout_ms / 1000

    def trusted(self, number: int) -> LuaResult:
        """Return True if the server's certificate is trusted; else nil and an error word."""
        trust = self._clients[number].trust()
        if trust is Trust.TRUSTED:
            return True
        return fail("sslnotenabled" if trust is None else trust.value)

    def certificate(self, number: int) -> bytes | None:
        """Return the server's certificate as JSON; None without TLS."""
        tls = self._clients[number].stream.tls
        return describe(tls.peer_certificate()) if tls else None

    def cipher(self, number: int) -> tuple[bytes, bytes] | None:
        """Return the name of the cipher and the TLS version; None without TLS."""
        tls = self._clients[number].stream.tls
        cipher = tls.cipher() if tls else None
        return None if cipher is None else (cipher[0].encode(), cipher[1].encode())

    def peername(self, number: int) -> tuple[bytes, int, bool]:
        """Return the address and port of the server or proxy, and whether it is IPv6."""
        return address(*self._clients[number].stream.peername())

    def sockname(self, number: int) -> tuple[bytes, int, bool]:
        """As `peername`, for the local end of the connection."""
        return address(*self._clients[number].stream.sockname())

    def close(self, number: int) -> bool:
        """Close the connection; return whether one was open."""
        return self._clients[number].close()


def pairs_of(packed: bytes) -> Pairs:
    """Return names and values that Lua packed with the format "s4": each string after its length."""
    parts: list[bytes] = []
    at = 0
    while at < len(packed):
        (size,) = struct.unpack_from("=I", packed, at)
        parts.append(packed[at + 4 : at + 4 + size])
        at += 4 + size
    return list(zip(parts[::2], parts[1::2], strict=True))


def parsequery(text: bytes) -> tuple[bytes, ...]:
    """Return the decoded `name, value, ...` of a query string."""
    found = parse_qsl(from_utf8(text.lstrip(b"?")), keep_blank_values=True, errors="surrogateescape")
    return tuple(utf8(part) for pair in found for part in pair)


def form(packed: bytes) -> bytes:
    """Return names and values in the format application/x-www-form-urlencoded."""
    return encode(pairs_of(packed)).encode()


def proxy_of(given: LuaOptions) -> Proxy | None:
    """Return the proxy of the options proxy, proxyport, socks, proxyuser and proxypass; None without a proxy."""
    if "proxy" not in given:
        return None
    socks = given.get("socks", False)
    port = given.get("proxyport", SOCKS_PORT if socks else HTTP_PORT)
    return Proxy(from_utf8(given["proxy"]), port, socks, _text(given.get("proxyuser")), _text(given.get("proxypass")))


def _text(value: bytes | None) -> str | None:
    return None if value is None else from_utf8(value)


_PLAIN = "create drop header headers fields cookies url set_timeout close"
_FALLIBLE = "trusted certificate cipher peername sockname"
_BLOCKING = "request write status read read_bytes read_all drain"


def install(vm: Vm, services: Services) -> None:
    """Install `httpc`."""
    binding = HttpClientBinding(services, vm.hold_collector)
    functions = methods(binding, _PLAIN)
    functions |= methods(binding, _FALLIBLE, with_error_words)
    functions |= {"parsequery": parsequery, "form": form}
    vm.namespace("httpc", functions, methods(binding, _BLOCKING, with_error_words))

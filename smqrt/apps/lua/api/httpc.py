"""`require"httpc"`, `require"http"`: HTTP clients for Lua (spec: bas-api §9). The other half is lib/httpc.lua.

`services.http_clients` holds them by the number by which Lua knows them; `ba.socket.http2sock` looks there.
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
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm
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
from smqrt.transport.outgoing_proxy import Proxy
from smqrt.transport.tls_contexts import ClientTls, Trust

_PROXY_PORT, _SOCKS_PORT = 8080, 1080

Pairs = list[tuple[bytes, bytes]]


class HttpClientBinding:
    """The clients by their numbers.

    Args:
        hold_collector: see `Vm`.
    """

    def __init__(self, services: Services, hold_collector: Callable[[], None]) -> None:
        self._hold_collector = hold_collector
        self._clients = services.http_clients
        self._tls = services.tls
        self._next = itertools.count(1).__next__

    def create(self, follow: bool, *options: LuaValue) -> int:
        """Make a client. options: names and values in turn."""
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
            assert isinstance(tls, ClientTls)  # the Lua half has asked
            chosen.tls = tls
        number = self._next()
        self._clients[number] = (HttpClient if follow else HttpConversation)(chosen)
        return number

    def drop(self, number: int) -> None:
        """Lua's object is gone."""
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
        """Send the head of a request. query, headers: names and values as `pairs_of` reads them."""
        request = ClientRequest(
            from_latin1(method),
            url_of(from_utf8(target), pairs_of(query)),
            [(from_latin1(name), from_latin1(value)) for name, value in pairs_of(headers)],
            size_bytes,
            _text(user),
            _text(password),
            trusted,
        )
        self._clients[number].ask(request)
        return True

    def write(self, number: int, data: bytes) -> bool:
        """Send a piece of the body."""
        self._clients[number].write(data)
        return True

    def status(self, number: int) -> int:
        """Wait for the code of the response."""
        return self._clients[number].status()

    def read(self, number: int) -> bytes | None:
        """What of the body comes next, None at its end."""
        return self._clients[number].read()

    def read_bytes(self, number: int, size_bytes: int) -> bytes | None:
        """So many bytes of the body, or what is left of it; None at its end."""
        return self._clients[number].read_whole(size_bytes) or None

    def read_all(self, number: int) -> tuple[bytes, bool]:
        """All that is left of the body, and whether it is large."""
        body = self._clients[number].read_whole()
        if len(body) > LARGE_BYTES:
            self._hold_collector()
        return body, len(body) > LARGE_BYTES

    def drain(self, number: int) -> bool:
        """Read what is left, for the sake of the connection."""
        client = self._clients[number]
        client.status()
        client.skip()
        return True

    def header(self, number: int, name: bytes) -> bytes | None:
        """A field of the response, by its name in any letter case."""
        value = self._clients[number].get(from_latin1(name))
        return None if value is None else latin1(value)

    def headers(self, number: int) -> tuple[bytes, ...]:
        """Names and values of all fields."""
        return tuple(latin1(part) for pair in self._clients[number].headers for part in pair)

    def fields(self, number: int) -> tuple[bytes, ...]:
        """Names and values of all fields, each name once: several lines are one list."""
        headers = self._clients[number].headers
        return tuple(latin1(part) for pair in spelled_fields(headers, joined_fields(headers)) for part in pair)

    def cookies(self, number: int) -> tuple[bytes, ...]:
        """Names and values of the cookies that the response sets."""
        found = parse_cookies(self._clients[number].headers)
        return tuple(latin1(part) for cookie in found for part in (cookie.name, cookie.value))

    def url(self, number: int) -> bytes | None:
        """Where the last request went, behind redirects."""
        request = self._clients[number].request
        return str(request.url).encode() if request else None

    def set_timeout(self, number: int, timeout_ms: float) -> None:
        """How long each wait may take from now on."""
        self._clients[number].options.timeout_s = timeout_ms / 1000

    def trusted(self, number: int) -> LuaResult:
        """True, or nil and what is wrong with the server."""
        trust = self._clients[number].trust()
        if trust is Trust.TRUSTED:
            return True
        return fail("sslnotenabled" if trust is None else trust.value)

    def certificate(self, number: int) -> bytes | None:
        """The server's certificate as JSON text, None without TLS."""
        tls = self._clients[number].stream.tls
        return describe(tls.peer_certificate()) if tls else None

    def cipher(self, number: int) -> tuple[bytes, bytes] | None:
        """Name of the cipher and version of TLS, None without TLS."""
        tls = self._clients[number].stream.tls
        cipher = tls.cipher() if tls else None
        return None if cipher is None else (cipher[0].encode(), cipher[1].encode())

    def peername(self, number: int) -> tuple[bytes, int, bool]:
        """Address and port of the server (or of the proxy), and whether it is IPv6."""
        return address(*self._clients[number].stream.peername())

    def sockname(self, number: int) -> tuple[bytes, int, bool]:
        """The same of this end."""
        return address(*self._clients[number].stream.sockname())

    def close(self, number: int) -> bool:
        """Close the connection; whether there was one."""
        return self._clients[number].close()


def pairs_of(packed: bytes) -> Pairs:
    """Names and values that Lua packed as strings with their size in front ("s4")."""
    parts: list[bytes] = []
    at = 0
    while at < len(packed):
        (size,) = struct.unpack_from("=I", packed, at)
        parts.append(packed[at + 4 : at + 4 + size])
        at += 4 + size
    return list(zip(parts[::2], parts[1::2], strict=True))


def parsequery(text: bytes) -> tuple[bytes, ...]:
    """Names and values of a query, decoded."""
    found = parse_qsl(from_utf8(text.lstrip(b"?")), keep_blank_values=True, errors="surrogateescape")
    return tuple(utf8(part) for pair in found for part in pair)


def form(packed: bytes) -> bytes:
    """The text of a form (application/x-www-form-urlencoded)."""
    return encode(pairs_of(packed)).encode()


def proxy_of(given: LuaOptions) -> Proxy | None:
    """The proxy that the options proxy, proxyport, socks, proxyuser and proxypass name; None without one."""
    if "proxy" not in given:
        return None
    socks = given.get("socks", False)
    port = given.get("proxyport", _SOCKS_PORT if socks else _PROXY_PORT)
    return Proxy(from_utf8(given["proxy"]), port, socks, _text(given.get("proxyuser")), _text(given.get("proxypass")))


def _text(value: bytes | None) -> str | None:
    return None if value is None else from_utf8(value)


_PLAIN = "create drop header headers fields cookies url set_timeout close"
_FALLIBLE = "trusted certificate cipher peername sockname"
_BLOCKING = "request write status read read_bytes read_all drain"


def install(vm: Vm, services: Services) -> None:
    """Give Lua `httpc`."""
    binding = HttpClientBinding(services, vm.hold_collector)
    functions = methods(binding, _PLAIN)
    functions |= methods(binding, _FALLIBLE, with_error_words)
    functions |= {"parsequery": parsequery, "form": form}
    vm.namespace("httpc", functions, methods(binding, _BLOCKING, with_error_words))

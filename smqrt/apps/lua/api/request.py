"""The Python half of `request` (spec: bas-api §2.1). Every function takes the exchange's handle first."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from smqrt.apps.lua.api.exchange import Exchanges
from smqrt.apps.lua.api.sockets import describe
from smqrt.apps.lua.bridge import LuaResult, address, from_latin1, latin1, methods, utf8
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm
from smqrt.errors import ArgumentError
from smqrt.http.forms import FORM_TYPE, Event, Field, File, MultipartError, boundary_of, read_form
from smqrt.http.headers import HttpError, http_date, parse_date
from smqrt.http.message import Request
from smqrt.transport.tls import TlsTransport

_METHODS = "GET HEAD POST PUT PATCH DELETE OPTIONS TRACE CONNECT PROPFIND PROPPATCH MKCOL COPY MOVE LOCK UNLOCK"
METHODS = frozenset(_METHODS.split())
_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")


class RequestBinding:
    """The functions of one server."""

    def __init__(self, services: Services, exchanges: Exchanges) -> None:
        self._services = services
        self._of = exchanges.request
        self._exchange = exchanges.of

    def method(self, handle: int) -> bytes:
        return self._of(handle).method.encode()

    def has_body(self, handle: int) -> bool:
        return self._of(handle).has_body

    def parameters(self, handle: int) -> tuple[bytes, ...] | bool:
        """Names and values in turn, of the query and a urlencoded body; False when the body is refused."""
        exchange = self._exchange(handle)
        try:
            return tuple(text for pair in exchange.request.raw_params() for text in pair)
        except HttpError as error:
            exchange.refusal = error
            return False

    def header(self, handle: int, name: bytes) -> bytes | None:
        value = self._of(handle).get(from_latin1(name))
        return None if value is None else latin1(value)

    def headers(self, handle: int) -> tuple[bytes, ...]:
        return tuple(latin1(text) for field in self._of(handle).fields() for text in field)

    def uri(self, handle: int) -> bytes:
        return utf8(self._of(handle).path)

    def url(self, handle: int, tls: bool) -> bytes:
        return url_of(self._of(handle), (self._services.https_port or 443) if tls else 0).encode()

    def domain(self, handle: int) -> LuaResult:
        request = self._of(handle)
        host = request.get("host")
        return address(*request.peer[:2]) if host is None else latin1(without_port(host))

    def peername(self, handle: int) -> tuple[bytes, int, bool]:
        return address(*self._of(handle).peer[:2])

    def sockname(self, handle: int) -> tuple[bytes, int, bool]:
        return address(*self._of(handle).local[:2])

    def issecure(self, handle: int) -> bool:
        return self._of(handle).secure

    def version(self, handle: int) -> bytes:
        return self._of(handle).version.encode()

    def setnodelay(self, handle: int, on: bool) -> bool:
        """Small packets leave at once (as they do from the start) or are collected by the system."""
        self._of(handle).transport.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, on)
        return True

    def cipher(self, handle: int) -> tuple[bytes, bytes] | None:
        """The name of the cipher and the version of TLS, None without TLS."""
        transport = self._of(handle).transport
        cipher = transport.cipher() if isinstance(transport, TlsTransport) else None
        return None if cipher is None else (cipher[0].encode(), cipher[1].encode())

    def certificate(self, handle: int) -> bytes | None:
        """The client's certificate as JSON text, None when it sent none."""
        transport = self._of(handle).transport
        return describe(transport.peer_certificate()) if isinstance(transport, TlsTransport) else None

    def allow(self, handle: int, listed: bytes, defaults: bool) -> bool:
        """Whether the request's method is among `listed`; when not, the response says which are."""
        request = self._of(handle)
        methods = from_latin1(listed).upper().split()
        for method in methods:
            if method not in METHODS:
                raise ArgumentError(f"allow: unknown method '{method}'")
        if request.method in methods or (defaults and request.method == "HEAD"):
            return True
        if defaults:
            methods += [method for method in ("HEAD", "OPTIONS") if method not in methods]
        response = request.response
        response.reset()
        response.status = 200 if request.method == "OPTIONS" and defaults else 405
        response.headers.set("Allow", ", ".join(methods))
        return False

    def is_newer(self, handle: int, time_s: int) -> bool:
        """Whether a resource of that time is newer than what the client has; when not, the response says 304."""
        request = self._of(handle)
        known = parse_date(request.get("if-modified-since") or "")
        is_newer = known is None or time_s > known or request.method not in ("GET", "HEAD")
        response = request.response
        if not is_newer:
            response.reset()
            response.status = 304
        response.headers.set("Last-Modified", http_date(time_s))
        return is_newer

    def open_body(self, handle: int, size_bytes: int) -> None:
        exchange = self._exchange(handle)
        request = exchange.request
        kind = (request.get("content-type") or "").partition(";")[0].strip().lower()
        if kind in _FORMS:
            raise exchange.mismatched(415, f"rawrdr: a body of type {kind} is read by data() or multipart()")
        if not request.has_body and request.get("content-length") is None:
            raise exchange.mismatched(411, "rawrdr: the request has neither Content-Length nor chunked encoding")
        if size_bytes < 1:
            raise ArgumentError("rawrdr: the size must be at least 1")
        exchange.body = request.chunks(size_bytes)

    def read_body(self, handle: int) -> bytes | bool | None:
        """The next piece of the body, None at its end, False when the rest will not come."""
        exchange = self._exchange(handle)
        try:
            return next(exchange.body, None)
        except HttpError as error:
            exchange.refusal = error
            return False


def without_port(host: str) -> str:
    """The name of a Host field, brackets kept."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host


def url_of(request: Request, https_port: int = 0) -> str:
    """The absolute URL of a request without its query; `https_port`: as an https URL for that port."""
    host = request.authority
    scheme = "https" if request.secure or https_port else "http"
    if https_port and not request.secure:
        host = without_port(host) + ("" if https_port == 443 else f":{https_port}")
    return f"{scheme}://{host}{request.prefix}{request.target.partition('?')[0]}"


def _install_multipart(vm: Vm, exchanges: Exchanges) -> None:
    """`request:multipart`: forms with files, read as they arrive."""
    forms: dict[int, Iterator[Event]] = {}

    def open_form(handle: int, size_bytes: int) -> None:
        exchange = exchanges.of(handle)
        request = exchange.request
        boundary = boundary_of(request.get("content-type") or "")
        if boundary is None:
            raise exchange.mismatched(415, f"multipart: the body is not {FORM_TYPE}", Accept=FORM_TYPE)
        if request.response.committed:
            raise ArgumentError("multipart: iscommitted")
        if size_bytes < 1:
            raise ArgumentError("multipart: the buffer size must be at least 1")
        forms[handle] = read_form(request.chunks(size_bytes), boundary, request.hold)

    def next_event(handle: int) -> LuaResult:
        """The kind of the next event and its values: "field", "file", "data", "end", "error"; False when refused."""
        try:
            return _for_lua(next(forms[handle], None))
        except MultipartError as error:
            return b"error", str(error).encode()
        except HttpError as error:
            exchanges.of(handle).refusal = error
            return False

    def close_form(handle: int) -> None:
        forms.pop(handle, None)

    vm.namespace("ba.multipart", {"open_form": open_form, "close_form": close_form}, {"next_event": next_event})


def _for_lua(event: Event | None) -> tuple[bytes, ...]:
    if event is None:
        return (b"end",)
    if isinstance(event, Field):
        return b"field", utf8(event.name), event.value
    if isinstance(event, File):
        return b"file", *map(utf8, event)
    return b"data", event


_DIRECT = (
    "method has_body parameters header headers uri url domain peername sockname issecure version setnodelay cipher "
    "certificate allow is_newer open_body"
)


def install_request(vm: Vm, services: Services, exchanges: Exchanges) -> None:
    """Give Lua the request half of exchanges, and their forms."""
    binding = RequestBinding(services, exchanges)
    functions = methods(binding, _DIRECT)
    vm.namespace("ba.request", functions, {"read_parameters": binding.parameters, "read_body": binding.read_body})
    _install_multipart(vm, exchanges)

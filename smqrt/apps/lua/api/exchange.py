"""Python half of `request`, `response`, cookies and deferred responses (spec: bas-api §2.1, §2.2).

An exchange is a request that a page or directory function in Lua handles. Lua refers to it by a handle. A directory
function that returns false passes its Lua environment to the next handler of the same request. After the end of the
request, Lua drops the environment before the next exchange begins.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec
from urllib.parse import quote, urljoin

from gevent.event import Event

from smqrt.apps.lua.api.sockets import describe
from smqrt.apps.lua.bridge import (
    LuaError,
    LuaResult,
    LuaValue,
    LuaValues,
    address,
    fail,
    from_latin1,
    from_utf8,
    latin1,
    methods,
    utf8,
)
from smqrt.apps.lua.vm import Services, Vm
from smqrt.errors import ArgumentError
from smqrt.http.forms import FORM_TYPE, Field, File, MultipartError, boundary_of, read_form
from smqrt.http.forms import Event as FormEvent
from smqrt.http.headers import (
    ClientGoneError,
    Headers,
    HttpError,
    cookie_of,
    error_page,
    http_date,
    parse_date,
    set_cookie_field,
)
from smqrt.http.message import Request, log_failure, report_failure
from smqrt.http.response import Response
from smqrt.http.tree import Directory, DispatchError, Root
from smqrt.transport.tls import TlsTransport

Base = tuple[Directory, str]
P = ParamSpec("P")

_KEY = "lua"  # key of the exchange in Request.env


class Exchange:
    """State of a request that a Lua handler has handled.

    Attributes:
        handle: its handle in Lua; 0 after Lua has dropped it.
        request: the request.
        depth: number of nested Lua handlers, by include and forward.
        base: the directory of the running handler, and the folder of the page in it, to which paths are relative.
        body: the reader that `rawrdr` opened.
        wait: blocks until a deferred response is complete; None without one.
        refusal: an error while the body was read; it replaces the response of the page.
        mismatch: replaces the error page if the page failed because it does not accept the request.
    """

    __slots__ = ("_abandoned", "base", "body", "depth", "handle", "mismatch", "refusal", "request", "wait")

    def __init__(self, handle: int, request: Request, abandoned: list[int]) -> None:
        self.handle = handle
        self.request = request
        self.depth = 0
        self.base: Base | None = None
        self.body: Iterator[bytes] = iter(())
        self.refusal: HttpError | None = None
        self.mismatch: HttpError | None = None
        self.wait: Callable[[], None] | None = None
        self._abandoned = abandoned

    def mismatched(self, status: int, sentence: str, **headers: str) -> ArgumentError:
        """Return the error to raise when a page rejects a request; the response is `status` unless Lua catches it."""
        self.mismatch = HttpError(status, sentence, headers=headers)
        return ArgumentError(sentence)

    def __del__(self) -> None:
        if self.handle:
            self._abandoned.append(self.handle)


class Exchanges:
    """Requests that Lua handles.

    Args:
        vm: the runtime; `attach` is called with the references of its entry functions.
    """

    def __init__(self, vm: Vm) -> None:
        self._vm = vm
        self._next_handle = itertools.count(1).__next__
        self._live: dict[int, Exchange] = {}
        self._abandoned: list[int] = []
        self._page = self._call = self._drop = 0

    def attach(self, page: int, call: int, drop: int) -> None:
        """Set the references of the Lua functions that run a page, call a function, and drop an exchange."""
        self._page, self._call, self._drop = page, call, drop

    def of(self, handle: int) -> Exchange:
        """Return the exchange of a handle.

        Raises:
            ArgumentError: its request has ended.
        """
        exchange = self._live.get(handle)
        if exchange is None:
            raise ArgumentError("request/response expired")
        return exchange

    def request(self, handle: int) -> Request:
        """Return the request of a handle. Raises as `of`."""
        exchange = self._live.get(handle)
        return exchange.request if exchange is not None else self.of(handle).request

    def page(self, request: Request, reader: int, pathname: bytes, base: Base) -> None:
        """Run a compiled page of the resource reader with the handle `reader`; blocks until it ended."""
        exchange = self._exchange(request)
        is_outermost = exchange.depth == 0
        result = self._enter(exchange, base, self._page, reader, pathname, is_outermost)
        if is_outermost:
            self._answer(exchange, result)

    def call(self, request: Request, directory: int, relpath: bytes, base: Base) -> bool:
        """Run the function of the directory with the handle `directory`; return whether it handled the request."""
        exchange = self._exchange(request)
        is_outermost = exchange.depth == 0
        is_handled, *result = self._enter(exchange, base, self._call, directory, relpath, is_outermost)
        if is_handled and is_outermost:
            self._answer(exchange, result)
        return bool(is_handled)

    def consult(self, request: Request, entry: int, *args: LuaValue) -> LuaValues | None:
        """Call the Lua function `entry` for a request without a response.

        Returns its values; None if the function has answered the request itself.
        """
        exchange = self._exchange(request)
        is_outermost = exchange.depth == 0
        is_open, *result = self._enter(exchange, exchange.base, entry, is_outermost, *args)
        if is_open:
            return tuple(result)
        if is_outermost:
            self._answer(exchange, result)
        return None

    def show(self, request: Request, base: Base | None, entry: int, *args: LuaValue) -> None:
        """Answer a request with the Lua function `entry`.

        Paths are relative to `base`; None for that of the exchange.
        """
        exchange = self._exchange(request)
        is_outermost = exchange.depth == 0
        result = self._enter(exchange, base or exchange.base, entry, is_outermost, *args)
        if is_outermost:
            self._answer(exchange, result)

    def inside(
        self,
        handle: int,
        written: bytes | None,
        operation: Callable[Concatenate[Exchange, P], LuaResult],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> LuaResult:
        """Run `operation(exchange, *args)` for the running Lua handler. The operation may run other handlers.

        Args:
            handle: of the exchange.
            written: the data in Lua's buffer, which is written first; None to write nothing.
            operation: the operation.
            args: its other arguments.
            kwargs: its keyword arguments.

        Returns:
            The value of the operation, or True for None; nil and an error word after a failure; False if the request is
            rejected.
        """
        exchange = self.of(handle)
        try:
            if written is not None:
                exchange.request.response.write(written)
            value = operation(exchange, *args, **kwargs)
        except DispatchError as error:
            return fail(error.word)
        except HttpError as error:
            exchange.refusal = error
            return False
        except ConnectionError:
            return True  # the client has disconnected; the next write of the page fails
        return True if value is None else value

    def fail(self, request: Request, error: LuaError) -> None:
        """Answer with the error of a page that can't be compiled, or raise it in the Lua handler around it."""
        exchange: Exchange | None = request.env.get(_KEY)
        if exchange is not None and exchange.depth:
            raise error
        report_failure(request, "Lua", str(error))

    def _exchange(self, request: Request) -> Exchange:
        exchange: Exchange | None = request.env.get(_KEY)
        if exchange is None:
            while self._abandoned:  # finalizers of exchanges must not run Lua, so it is done here
                self._vm.run(self._drop, self._abandoned.pop())
            exchange = request.env[_KEY] = Exchange(self._next_handle(), request, self._abandoned)
        return exchange

    def _enter(self, exchange: Exchange, base: Base | None, entry: int, *args: LuaValue) -> LuaValues:
        handle = exchange.handle
        self._live[handle] = exchange
        exchange.depth += 1
        outer, exchange.base = exchange.base, base
        try:
            return self._vm.run(entry, handle, *args)
        finally:
            exchange.base = outer
            exchange.depth -= 1
            if exchange.depth == 0:
                del self._live[handle]

    def _answer(self, exchange: Exchange, result: Sequence[Any]) -> None:
        body, failure = result
        request = exchange.request
        del request.env[_KEY]
        exchange.handle = 0  # Lua has dropped its environment, so the finalizer has nothing to do
        response = request.response
        if exchange.wait is not None:
            if failure is not None:
                log_failure(request, failure.decode("utf-8", "replace"))
                failure = None  # the application completes the deferred response, not the page
            exchange.wait()
        if exchange.refusal is not None and not response.committed:
            raise exchange.refusal
        mismatch = exchange.mismatch
        # Its text is in the traceback, unless Lua has caught the error and failed for another reason.
        if failure and mismatch is not None and mismatch.detail.encode() in failure and not response.committed:
            raise mismatch
        if failure is None and request.initial:
            response.end(body or b"")
        elif body is not None and (failure is None or response.committed):
            response.write(body)
        if failure is not None:
            report_failure(request, "Lua", failure.decode("utf-8", "replace"))


def install_exchange(vm: Vm) -> Exchanges:
    """Install the exchanges; return the object that runs them."""
    exchanges = Exchanges(vm)

    def write(handle: int, data: bytes) -> bool:
        """Send Lua's buffer; return False if the client has disconnected."""
        try:
            exchanges.request(handle).response.write(data)
        except ConnectionError:
            return False
        return True

    vm.namespace("ba.output", {}, {"write": write})
    vm.namespace("ba.exchange", {"attach": exchanges.attach})
    return exchanges


# ---- `request`. The first argument of each function is the handle of the exchange.

_METHODS = "GET HEAD POST PUT PATCH DELETE OPTIONS TRACE CONNECT PROPFIND PROPPATCH MKCOL COPY MOVE LOCK UNLOCK"
METHODS = frozenset(_METHODS.split())
_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")


class RequestBinding:
    """Functions of requests."""

    def __init__(self, services: Services, exchanges: Exchanges) -> None:
        self._services = services
        self._of = exchanges.request
        self._exchange = exchanges.of

    def method(self, handle: int) -> bytes:
        return self._of(handle).method.encode()

    def has_body(self, handle: int) -> bool:
        return self._of(handle).has_body

    def parameters(self, handle: int) -> tuple[bytes, ...] | bool:
        """Return `name, value, ...` of the query and a urlencoded body; False if the body is rejected."""
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
        """Set TCP_NODELAY: whether small packets are sent immediately, which is the default."""
        transport = self._of(handle).transport
        if getattr(transport, "family", None) != socket.AF_UNIX:  # a Unix socket sends everything immediately
            transport.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, on)
        return True

    def cipher(self, handle: int) -> tuple[bytes, bytes] | None:
        """Return the name of the cipher and the TLS version; None without TLS."""
        transport = self._of(handle).transport
        cipher = transport.cipher() if isinstance(transport, TlsTransport) else None
        return None if cipher is None else (cipher[0].encode(), cipher[1].encode())

    def certificate(self, handle: int) -> bytes | None:
        """Return the client's certificate as JSON; None if it sent none."""
        transport = self._of(handle).transport
        return describe(transport.peer_certificate()) if isinstance(transport, TlsTransport) else None

    def allow(self, handle: int, listed: bytes, defaults: bool) -> bool:
        """Return whether `listed` contains the request's method; if not, set a response with the header Allow."""
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
        """Return whether a resource is newer than the client's copy; if not, set the status 304."""
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
        """Return the next part of the body; None at its end, False if the rest is rejected."""
        exchange = self._exchange(handle)
        try:
            return next(exchange.body, None)
        except HttpError as error:
            exchange.refusal = error
            return False


def without_port(host: str) -> str:
    """Return the host of a Host field; the brackets of an IPv6 address are kept."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host


def url_of(request: Request, https_port: int = 0) -> str:
    """Return the absolute URL of a request without its query; with `https_port`, an https URL for that port."""
    host = request.authority
    scheme = "https" if request.secure or https_port else "http"
    if https_port and not request.secure:
        host = without_port(host) + ("" if https_port == 443 else f":{https_port}")
    return f"{scheme}://{host}{request.prefix}{request.target.partition('?')[0]}"


def _install_multipart(vm: Vm, exchanges: Exchanges) -> None:
    """Install `request:multipart`, which reads forms with files as they arrive."""
    forms: dict[int, Iterator[FormEvent]] = {}

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
        forms[handle] = read_form(request.chunks(size_bytes), boundary, request.reader().hold)

    def next_event(handle: int) -> LuaResult:
        """Return the kind of the next event ("field", "file", "data", "end" or "error") and its values.

        Returns False if the body is rejected.
        """
        try:
            event = next(forms[handle], None)
        except MultipartError as error:
            return b"error", str(error).encode()
        except HttpError as error:
            exchanges.of(handle).refusal = error
            return False
        if event is None:
            return (b"end",)
        if isinstance(event, Field):
            return b"field", utf8(event.name), event.value
        if isinstance(event, File):
            return b"file", *map(utf8, event)
        return b"data", event

    def close_form(handle: int) -> None:
        forms.pop(handle, None)

    vm.namespace("ba.multipart", {"open_form": open_form, "close_form": close_form}, {"next_event": next_event})


_DIRECT = (
    "method has_body parameters header headers uri url domain peername sockname issecure version setnodelay cipher "
    "certificate allow is_newer open_body"
)


def install_request(vm: Vm, services: Services, exchanges: Exchanges) -> None:
    """Install the functions of `request`."""
    binding = RequestBinding(services, exchanges)
    functions = methods(binding, _DIRECT)
    vm.namespace("ba.request", functions, {"read_parameters": binding.parameters, "read_body": binding.read_body})
    _install_multipart(vm, exchanges)


# ---- `response`, cookies and deferred responses. The first argument of each function is the handle of the exchange.

_JSON_FIELDS = Headers(
    {"Content-Type": "application/json", "Cache-Control": "no-store, no-cache, must-revalidate, max-age=0"}
)
_URL_CHARACTERS = "%/:=&?~#+!$,;'@()*[]"


class ResponseBinding:
    """Functions of responses. Those that send data may block, so Lua calls them by an `Op`."""

    def __init__(self, services: Services, exchanges: Exchanges) -> None:
        self._root: Root = services.root
        self._exchanges = exchanges
        self._of = exchanges.request

    def committed(self, handle: int) -> bool:
        return self._of(handle).response.committed

    def status(self, handle: int) -> int:
        return self._of(handle).response.status

    def set_status(self, handle: int, status: int) -> None:
        if not 100 <= status <= 999:
            raise ArgumentError(f"setstatus: {status} is not a status code of three digits")
        self._of(handle).response.status = status

    def response_header(self, handle: int, name: bytes) -> bytes | None:
        value = self._of(handle).response.headers.get(from_latin1(name))
        return None if value is None else latin1(value)

    def set_header(self, handle: int, name: bytes, value: bytes) -> None:
        try:
            self._of(handle).response.headers.set(from_latin1(name), from_latin1(value))
        except ValueError as error:
            raise ArgumentError(f"setheader: {error}") from None

    def set_json_headers(self, handle: int) -> None:
        self._of(handle).response.headers.merge(_JSON_FIELDS)

    def remove_header(self, handle: int, name: bytes) -> None:
        self._of(handle).response.headers.remove(from_latin1(name))

    def set_date_header(self, handle: int, name: bytes, time_s: int) -> None:
        self.set_header(handle, name, http_date(time_s).encode())

    def redirect(self, handle: int, url: bytes, is_permanent: bool) -> None:
        response = self._of(handle).response
        response.status = 301 if is_permanent else 302
        response.headers.set("Location", from_latin1(self.absolute_url(handle, url, False)))

    def absolute_url(self, handle: int, url: bytes, with_query: bool) -> bytes:
        """Return a URL resolved against that of the request; for "" the URL of the request itself."""
        request = self._of(handle)
        location = urljoin(url_of(request), quote(url, safe=_URL_CHARACTERS))
        if with_query and request.query:
            location += ("&" if "?" in location else "?") + request.query
        return location.encode("ascii")

    def cookie(self, handle: int, name: bytes) -> bytes | None:
        """Return the value of a cookie of the request; None without it."""
        value = cookie_of(self._of(handle).get("cookie") or "", from_latin1(name))
        return None if value is None else latin1(value)

    def add_cookie(self, handle: int, name: bytes, value: bytes, *attributes: bytes | bool) -> None:
        """Add a cookie to the response.

        `attributes` are alternating names and values; the value of an attribute without a value is True.
        """
        texts = (None if isinstance(text, bool) else from_latin1(text) for text in attributes[1::2])
        names = (from_latin1(bytes(key)) for key in attributes[::2])
        try:
            field = set_cookie_field(from_latin1(name), from_latin1(value), dict(zip(names, texts, strict=True)))
        except ValueError as error:
            raise ArgumentError(str(error)) from None
        self._of(handle).response.headers.add("Set-Cookie", field)

    def error_body(self, handle: int, status: int, text: bytes | None) -> bytes:
        """Return the error page of a status; the connection is closed after the response."""
        response = self._of(handle).response
        response.reset()
        self.set_status(handle, status)
        response.headers.set("Content-Type", "text/html; charset=utf-8")
        response.close = True
        return error_page(status).replace(b"</main>", (text or b"") + b"</main>")

    def reset(self, handle: int, what: bytes) -> None:
        self._of(handle).response.reset(what.decode("ascii"))

    def initial(self, handle: int) -> bool:
        return self._of(handle).initial

    def is_include(self, handle: int) -> tuple[bool, int]:
        depth = self._of(handle).includes
        return depth > 0, depth

    def is_forward(self, handle: int) -> tuple[bool, int]:
        depth = self._of(handle).forwards
        return depth > 0, depth

    def is_valid(self, handle: int) -> bool:
        return not self._of(handle).response.ended

    def byte_count(self, handle: int) -> int:
        return self._of(handle).response.size

    def flush(self, handle: int, data: bytes | None) -> bool:
        """Write `data` and send all written data; return False if the client has disconnected."""
        response = self._of(handle).response
        try:
            response.write(data or b"")
            response.flush()
        except ConnectionError:
            return False
        return True

    def include(self, handle: int, path: bytes, written: bytes | None) -> LuaResult:
        """Append another resource to the response."""
        return self._exchanges.inside(handle, written, self._internal, path, "include")

    def forward(self, handle: int, path: bytes) -> LuaResult:
        """Respond with another resource in place of the page."""
        return self._exchanges.inside(handle, None, self._internal, path, "forward")

    def redirect_inside(self, handle: int, path: bytes) -> LuaResult:
        """As `forward`, but look up the path like that of a new request."""
        return self._exchanges.inside(handle, None, self._internal, path, "redirect")

    def _internal(self, exchange: Exchange, path: bytes, mode: str) -> None:
        assert exchange.base is not None  # since a handler of the exchange is running
        directory, folder = exchange.base
        target = from_utf8(path)
        self._root.internal(exchange.request, target if target.startswith("/") else folder + target, directory, mode)


class DeferredResponse:
    """A response that the application completes after its page has ended."""

    def __init__(self, response: Response) -> None:
        self.response = response
        self.closed = Event()
        self.is_aborted = False

    def wait(self) -> None:
        """Block until the response is closed.

        Raises:
            ClientGoneError: it was aborted; the connection is closed without a complete response.
        """
        self.closed.wait()
        if self.is_aborted:
            raise ClientGoneError("the deferred response was aborted")


class DeferredBinding:
    """Deferred responses by handle."""

    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges
        self._open: dict[int, DeferredResponse] = {}

    def defer(self, handle: int) -> int:
        """Turn the response of an exchange into a deferred response with the same handle."""
        exchange = self._exchanges.of(handle)
        if exchange.request.response.committed:
            raise ArgumentError("deferred: iscommitted")
        if exchange.wait is not None:
            raise ArgumentError("deferred: the response is already deferred, or is that of an upload")
        exchange.wait = self.open(handle, exchange.request.response).wait
        return handle

    def open(self, handle: int, response: Response) -> DeferredResponse:
        """Add a deferred response with this handle."""
        deferred = self._open[handle] = DeferredResponse(response)
        return deferred

    def set_status(self, handle: int, status: int) -> bool:
        self._of(handle).response.status = status
        return True

    def set_header(self, handle: int, name: bytes, value: bytes | None) -> bool:
        headers = self._of(handle).response.headers
        try:
            if value is None:
                headers.remove(from_latin1(name))
            else:
                headers.set(from_latin1(name), from_latin1(value))
        except ValueError as error:
            raise ArgumentError(f"setheader: {error}") from None
        return True

    def is_valid(self, handle: int) -> bool:
        return handle in self._open

    def write(self, handle: int, data: bytes, flush: bool) -> bool:
        """Append to the body; return False if the client has disconnected."""
        response = self._of(handle).response
        try:
            response.write(data)
            if flush:
                response.flush()
        except ConnectionError:
            self.abort(handle)
            return False
        return True

    def close(self, handle: int, close_connection: bool) -> bool:
        """Complete the response; the greenlet of the request sends the rest."""
        deferred = self._open.pop(handle, None)
        if deferred is None:
            return False
        deferred.response.close |= close_connection
        deferred.closed.set()
        return True

    def abort(self, handle: int) -> bool:
        """Close the connection without completing the response."""
        deferred = self._open.pop(handle, None)
        if deferred is None:
            return False
        deferred.is_aborted = True
        deferred.closed.set()
        return True

    def _of(self, handle: int) -> DeferredResponse:
        deferred = self._open.get(handle)
        if deferred is None:
            raise ArgumentError("the deferred response is closed")
        return deferred


_BLOCKING = "flush include forward redirect_inside"
_DIRECT_RESPONSE = (
    "committed status set_status response_header set_header set_json_headers remove_header set_date_header redirect "
    "absolute_url error_body reset initial is_include is_forward is_valid byte_count"
)
_DEFERRED = "defer set_status set_header is_valid close abort"


def install_response(vm: Vm, services: Services, exchanges: Exchanges) -> DeferredBinding:
    """Install `response`, cookies and deferred responses; return the binding of the latter."""
    binding, deferred = ResponseBinding(services, exchanges), DeferredBinding(exchanges)
    direct = methods(binding, _DIRECT_RESPONSE)
    vm.namespace("ba.response", direct, methods(binding, _BLOCKING))
    vm.namespace("ba.filter", {"committed": binding.committed})
    vm.namespace("ba.cookies", {"cookie": binding.cookie, "add_cookie": binding.add_cookie})
    vm.namespace("ba.deferred", methods(deferred, _DEFERRED), {"write": deferred.write})
    return deferred

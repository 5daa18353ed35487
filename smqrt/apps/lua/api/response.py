"""The Python half of `response`, cookies and deferred responses (spec: bas-api §2.1, §2.2). Every function takes the
exchange's handle first."""

from __future__ import annotations

from urllib.parse import quote, urljoin

from gevent.event import Event

from smqrt.apps.lua.api.exchange import Exchange, Exchanges
from smqrt.apps.lua.api.request import url_of
from smqrt.apps.lua.bridge import LuaResult, from_latin1, from_utf8, latin1, methods
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm
from smqrt.errors import ArgumentError
from smqrt.http.headers import ClientGoneError, cookie_of, error_page, http_date, set_cookie_field
from smqrt.http.response import Response
from smqrt.http.tree import Root

_URL_CHARACTERS = "%/:=&?~#+!$,;'@()*[]"


class ResponseBinding:
    """The functions of one server. The direct ones only set fields: what sends is an op, because it may block."""

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
            raise ArgumentError(f"setstatus: {status} is no status code, they have three digits")
        self._of(handle).response.status = status

    def response_header(self, handle: int, name: bytes) -> bytes | None:
        value = self._of(handle).response.headers.get(from_latin1(name))
        return None if value is None else latin1(value)

    def set_header(self, handle: int, name: bytes, value: bytes) -> None:
        try:
            self._of(handle).response.headers.set(from_latin1(name), from_latin1(value))
        except ValueError as error:
            raise ArgumentError(f"setheader: {error}") from None

    def remove_header(self, handle: int, name: bytes) -> None:
        self._of(handle).response.headers.remove(from_latin1(name))

    def set_date_header(self, handle: int, name: bytes, time_s: int) -> None:
        self.set_header(handle, name, http_date(time_s).encode())

    def redirect(self, handle: int, url: bytes, is_permanent: bool) -> None:
        response = self._of(handle).response
        response.status = 301 if is_permanent else 302
        response.headers.set("Location", from_latin1(self.absolute_url(handle, url, False)))

    def absolute_url(self, handle: int, url: bytes, with_query: bool) -> bytes:
        """`url` resolved against the request's; "" is that one itself."""
        request = self._of(handle)
        location = urljoin(url_of(request), quote(url, safe=_URL_CHARACTERS))
        if with_query and request.query:
            location += ("&" if "?" in location else "?") + request.query
        return location.encode("ascii")

    def cookie(self, handle: int, name: bytes) -> bytes | None:
        """The value of a cookie of the request."""
        value = cookie_of(self._of(handle).get("cookie") or "", from_latin1(name))
        return None if value is None else latin1(value)

    def add_cookie(self, handle: int, name: bytes, value: bytes, *attributes: bytes | bool) -> None:
        """`attributes`: names and values in turn; the value of one that has none is True."""
        texts = (None if isinstance(text, bool) else from_latin1(text) for text in attributes[1::2])
        names = (from_latin1(bytes(key)) for key in attributes[::2])
        try:
            field = set_cookie_field(from_latin1(name), from_latin1(value), dict(zip(names, texts, strict=True)))
        except ValueError as error:
            raise ArgumentError(str(error)) from None
        self._of(handle).response.headers.add("Set-Cookie", field)

    def error_body(self, handle: int, status: int, text: bytes | None) -> bytes:
        """The small page of an error status; the connection ends behind it."""
        response = self._of(handle).response
        response.reset()
        self.set_status(handle, status)
        response.headers.set("Content-Type", "text/html; charset=utf-8")
        response.close = True
        return error_page(status).replace(b"</body>", (text or b"") + b"</body>")

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
        """Send what was written so far; False when the client is gone."""
        response = self._of(handle).response
        try:
            response.write(data or b"")
            response.flush()
        except ConnectionError:
            return False
        return True

    def include(self, handle: int, path: bytes, written: bytes | None) -> LuaResult:
        """Add another resource to the response, behind what was written so far."""
        return self._exchanges.inside(handle, written, self._internal, path, "include")

    def forward(self, handle: int, path: bytes) -> LuaResult:
        """Let another resource answer in place of the page."""
        return self._exchanges.inside(handle, None, self._internal, path, "forward")

    def redirect_inside(self, handle: int, path: bytes) -> LuaResult:
        """As `forward`, searched like a new request."""
        return self._exchanges.inside(handle, None, self._internal, path, "redirect")

    def _internal(self, exchange: Exchange, path: bytes, mode: str) -> None:
        assert exchange.base is not None  # its handler is running
        directory, folder = exchange.base
        target = from_utf8(path)
        self._root.internal(exchange.request, target if target.startswith("/") else folder + target, directory, mode)


class DeferredResponse:
    """A response in the hands of Lua code that outlives its page."""

    def __init__(self, response: Response) -> None:
        self.response = response
        self.closed = Event()
        self.is_aborted = False

    def wait(self) -> None:
        """Block until it is closed.

        Raises ClientGoneError when it was aborted: the connection ends without a complete response.
        """
        self.closed.wait()
        if self.is_aborted:
            raise ClientGoneError("the deferred response was aborted")


class DeferredBinding:
    """The functions of one server."""

    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges
        self._open: dict[int, DeferredResponse] = {}

    def defer(self, handle: int) -> int:
        """Make the exchange's response a deferred one; its handle stays the same number."""
        exchange = self._exchanges.of(handle)
        if exchange.request.response.committed:
            raise ArgumentError("deferred: iscommitted")
        if exchange.wait is not None:
            raise ArgumentError("deferred: the response is deferred already, or that of an upload")
        exchange.wait = self.open(handle, exchange.request.response).wait
        return handle

    def open(self, handle: int, response: Response) -> DeferredResponse:
        """Put a response into the hands of Lua, by this handle."""
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
        """Add to the body; False when the client is gone."""
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
        """Complete the response; the worker sends what is left."""
        deferred = self._open.pop(handle, None)
        if deferred is None:
            return False
        deferred.response.close |= close_connection
        deferred.closed.set()
        return True

    def abort(self, handle: int) -> bool:
        """End the connection without completing the response."""
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
_DIRECT = (
    "committed status set_status response_header set_header remove_header set_date_header redirect absolute_url "
    "error_body reset initial is_include is_forward is_valid byte_count"
)
_DEFERRED = "defer set_status set_header is_valid close abort"


def install_response(vm: Vm, services: Services, exchanges: Exchanges) -> DeferredBinding:
    """Give Lua the response half of exchanges, their cookies, and deferred responses; return what keeps the latter."""
    binding, deferred = ResponseBinding(services, exchanges), DeferredBinding(exchanges)
    direct = methods(binding, _DIRECT)
    vm.namespace("ba.response", direct, methods(binding, _BLOCKING))
    vm.namespace("ba.filter", {"committed": binding.committed})
    vm.namespace("ba.cookies", {"cookie": binding.cookie, "add_cookie": binding.add_cookie})
    vm.namespace("ba.deferred", methods(deferred, _DEFERRED), {"write": deferred.write})
    return deferred

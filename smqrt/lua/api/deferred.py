"""`response:deferred`: a response that is written after the page has returned (spec: bas-api §2.2).

The worker of the request waits until the deferred response is closed; who writes it does so in an activity of its own.
"""

from __future__ import annotations

from gevent.event import Event

from smqrt.http.message import Response
from smqrt.http.status import ClientGoneError
from smqrt.lua.api.exchange import Exchanges
from smqrt.lua.api.text import from_latin1
from smqrt.lua.bridge import ArgumentError
from smqrt.lua.vm import Vm


class Deferred:
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


class DeferredHalf:
    """The functions of one server."""

    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges
        self._open: dict[int, Deferred] = {}

    def defer(self, handle: int) -> int:
        """Make the exchange's response a deferred one; its handle stays the same number."""
        exchange = self._exchanges.of(handle)
        if exchange.request.response.committed:
            raise ArgumentError("deferred: iscommitted")
        deferred = self._open[handle] = Deferred(exchange.request.response)
        exchange.wait = deferred.wait
        return handle

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

    def _of(self, handle: int) -> Deferred:
        deferred = self._open.get(handle)
        if deferred is None:
            raise ArgumentError("the deferred response is closed")
        return deferred


def install(vm: Vm, exchanges: Exchanges) -> None:
    """Give Lua deferred responses."""
    half = DeferredHalf(exchanges)
    direct = {name: getattr(half, name) for name in ("defer", "set_status", "set_header", "is_valid", "close", "abort")}
    vm.namespace("ba.deferred", direct, {"write": half.write})

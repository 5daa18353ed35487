"""HTTP requests in Lua: calls of pages and directory functions, by handles.

A handler that does not answer (a directory function that returns false) leaves its Lua environment to the next handler
of the same request. When the request has ended, Lua drops the environment before the next exchange begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Concatenate, ParamSpec, cast

from smqrt.apps.lua.bridge import LuaError, LuaResult, LuaValue, LuaValues, fail
from smqrt.apps.lua.vm import Vm
from smqrt.errors import ArgumentError
from smqrt.http.headers import HttpError
from smqrt.http.message import Request
from smqrt.http.tree import Directory, DispatchError

Base = tuple[Directory, str]
P = ParamSpec("P")

_KEY = "lua"  # of the exchange in Request.env


class Exchange:
    """State of a request that a Lua handler has handled.

    Attributes:
        handle: by which Lua refers to it; 0 when Lua has dropped it.
        depth: how many Lua handlers are nested, by include and forward.
        base: the directory that runs now, and the page's folder in it: where relative paths start.
        body: the reader that `rawrdr` opened.
        wait: blocks until a deferred response is complete.
        refusal: an error while the body was read; it replaces the response of the page.
        mismatch: the response in place of an error page, when the page failed because it does not accept the request.
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
        """Return the error to raise when a page rejects a request. The response is `status`, unless Lua catches it."""
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

        Raises ArgumentError when its request ended.
        """
        exchange = self._live.get(handle)
        if exchange is None:
            raise ArgumentError("request/response expired")
        return exchange

    def request(self, handle: int) -> Request:
        """Return the request of a handle. Raises as `of`."""
        return self.of(handle).request

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
        """Call the Lua function `entry` about a request that has no response yet.

        Returns its values; None when it has answered the request itself.
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
        """Let the Lua function `entry` answer a request.

        base: where relative paths start; None for that of the exchange.
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
        """Run `operation(exchange, *args)`, which may run other handlers, for the Lua handler that is running.

        written: data in Lua's buffer.
        Returns its value, or True for None; nil and an error word when it fails; False when the request is rejected.
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
            return True  # the client is gone; the next write of the page fails
        return True if value is None else value

    def fail(self, request: Request, error: LuaError) -> None:
        """Answer with the error of a page that can't be compiled, or raise it in the Lua handler around it."""
        exchange: Exchange | None = request.env.get(_KEY)
        if exchange is not None and exchange.depth:
            raise error
        request.report_failure("Lua", str(error))

    def _exchange(self, request: Request) -> Exchange:
        exchange: Exchange | None = request.env.get(_KEY)
        if exchange is None:
            while self._abandoned:  # filled by finalizers, which must not run Lua
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

    def _answer(self, exchange: Exchange, result: Sequence[LuaValue]) -> None:
        body, failure = cast(tuple[bytes | None, bytes | None], result)
        request = exchange.request
        del request.env[_KEY]
        exchange.handle = 0
        response = request.response
        if exchange.wait is not None:
            if failure is not None:
                request.log_failure(failure.decode("utf-8", "replace"))
                failure = None  # the deferred response is not the page's any more
            exchange.wait()
        if exchange.refusal is not None and not response.committed:
            raise exchange.refusal
        mismatch = exchange.mismatch
        if failure and mismatch is not None and mismatch.detail.encode() in failure and not response.committed:
            raise mismatch
        if failure is None and request.initial:
            response.end(body or b"")
        elif body is not None and (failure is None or response.committed):
            response.write(body)
        if failure is not None:
            request.report_failure("Lua", failure.decode("utf-8", "replace"))


def install_exchange(vm: Vm) -> Exchanges:
    """Give Lua the exchanges; return their table."""
    exchanges = Exchanges(vm)

    def write(handle: int, data: bytes) -> bool:
        """Send what Lua buffered; return False when the client is gone."""
        try:
            exchanges.request(handle).response.write(data)
        except ConnectionError:
            return False
        return True

    vm.namespace("ba.output", {}, {"write": write})
    vm.namespace("ba.exchange", {"attach": exchanges.attach})
    return exchanges

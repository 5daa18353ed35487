"""Activities: Lua functions that run in pooled coroutines and may block (design: lua.md, "blocking calls are yields").

An activity is started inline. As long as it doesn't block it costs about a microsecond and no greenlet. When it
blocks, it has yielded an `Op`: the Lua frames are off the C stack, a greenlet runs the op and resumes the activity
with what it returned.

    call, start ──> send ──> ended: result, coroutine back to the pool
                      └────> yielded an Op: a worker greenlet runs it, sends the answer, and so on until the end
    run          the same, with the calling greenlet as the worker
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from gevent import get_hub
from greenlet import GreenletExit, getcurrent, greenlet

from smqrt.broker.hooks import Pending
from smqrt.lua.bridge import LuaError, Op, error_text
from smqrt.net import workers

log = logging.getLogger("smqrt.lua")

MAX_IDLE = 64  # pooled coroutines, about 2 KB each; a burst's others are closed
MAX_DEPTH = 60  # of nested Lua -> Python -> Lua calls: each takes some KB of the C stack

Values = tuple[Any, ...]


class Activities:
    """The running and the idle activities of one Lua runtime.

    Args:
        new: makes a coroutine of the Lua activity loop, waiting for its first job.
        close_ref: reference of the Lua function that closes a coroutine.
        failure: the marker with which an op's answer becomes a Lua error.
    """

    def __init__(self, new: Callable[[], Any], close_ref: int, failure: Any) -> None:
        self._new = new
        self._close_ref = close_ref
        self._failure = failure
        self._idle: list[Any] = []
        self._drivers: set[greenlet] = set()
        self._depth = 0

    @property
    def blocked(self) -> int:
        """How many activities wait in an op at the moment."""
        return len(self._drivers)

    @property
    def idle(self) -> int:
        """How many coroutines wait in the pool."""
        return len(self._idle)

    @property
    def nested(self) -> bool:
        """Whether Lua is on the C stack, so that nobody may switch greenlets."""
        return self._depth > 0

    def call(self, ref: int, *args: Any) -> Values | Pending:
        """Run the Lua function `ref` without ever blocking the caller.

        args: None, bool, int, float or bytes. Callable from the Hub greenlet and from inside a Lua-to-Python call.
        Returns the values of the function when it ended without blocking, else a `Pending` of them.
        Raises LuaError when the function failed before it blocked; later errors reject the `Pending`.
        """
        co = self._idle.pop() if self._idle else self._new()
        answer = self._send(co, (ref, *args))
        if answer is True:
            self._idle.append(co)
            return ()
        if type(answer) is tuple and type(answer[0]) is bool:
            return self._ended(co, answer)
        pending = Pending()
        get_hub().loop.run_callback(workers.start, self._drive_later, co, answer, pending)
        return pending

    def start(self, ref: int, *args: Any) -> None:
        """Run the Lua function `ref` like `call`; an error is logged ("smqrt.lua") with the author's file, line and
        traceback."""
        try:
            result = self.call(ref, *args)
        except LuaError as error:
            log.error("%s", error)
        else:
            if type(result) is Pending:
                result.then(_log_error)

    def run(self, ref: int, *args: Any) -> Values:
        """Run the Lua function `ref` in the current greenlet, which may block, and return its values.

        Raises LuaError when the function failed, RuntimeError when Lua is on the C stack of the caller: use `call`
        there.
        """
        if self._depth:
            raise RuntimeError("run would switch greenlets inside a Lua call: use call")
        co = self._idle.pop() if self._idle else self._new()
        answer = self._send(co, (ref, *args))
        if answer is True:
            self._idle.append(co)
            return ()
        return self._drive(co, answer)

    def stop(self) -> None:
        """End all activities that wait in an op: their `<close>` variables are closed, Lua's pcall can't hold them."""
        for driver in list(self._drivers):
            get_hub().loop.run_callback(self._kill, driver)

    def _kill(self, driver: greenlet) -> None:
        if driver in self._drivers:  # otherwise it ended meanwhile and does something else
            driver.throw(GreenletExit)

    def _send(self, co: Any, values: Values) -> Any:
        if self._depth >= MAX_DEPTH:
            self._idle.append(co)
            raise LuaError(f"callbacks are nested more than {MAX_DEPTH} deep: one of them causes its own call")
        self._depth += 1
        try:
            return co.send(values)
        except Exception as error:  # the coroutine is dead or refused a value: it can't be used again
            raise LuaError(_text_of(error)) from error
        finally:
            self._depth -= 1

    def _ended(self, co: Any, answer: Values) -> Values:
        if len(self._idle) < MAX_IDLE:
            self._idle.append(co)
        if answer[0]:
            return answer[1:]
        raise LuaError(answer[1])

    def _drive_later(self, co: Any, answer: Any, pending: Pending) -> None:
        try:
            result = self._drive(co, answer)
        except Exception as error:
            pending.reject(error)
        except BaseException as error:
            pending.reject(error)
            raise
        else:
            pending.resolve(result)

    def _drive(self, co: Any, answer: Any) -> Values:
        """Run the ops that `co` yields until it ends. A greenlet that is killed meanwhile closes the coroutine."""
        me = getcurrent()
        self._drivers.add(me)
        try:
            while True:
                if type(answer) is not tuple:
                    answer = (answer,)
                if type(answer[0]) is bool:
                    break
                answer = self._send(co, self._perform(*answer))
        except BaseException:
            self.call(self._close_ref, co)
            raise
        finally:
            self._drivers.discard(me)
        return self._ended(co, answer)

    def _perform(self, op: Op, *args: Any) -> Values:
        try:
            result = op.fn(*args)
        except Exception as error:
            return (self._failure, error_text(error, op.fn))
        return result if type(result) is tuple else (result,)


def _text_of(error: Exception) -> bytes | str:
    detail = error.args[0] if error.args else error
    return detail if isinstance(detail, bytes | str) else str(detail)


def _log_error(_values: Values | None, error: BaseException | None) -> None:
    if error is not None and not isinstance(error, GreenletExit):
        log.error("%s", error)

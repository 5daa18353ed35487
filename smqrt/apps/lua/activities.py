"""Activities: Lua functions that run in pooled coroutines and may block.

An activity starts inline. As long as it does not block, it costs about a microsecond and no greenlet. To block, it
yields an `Op`: the Lua frames leave the C stack, and the result of the op resumes the activity.

    call, start ──> send ──> ended: result, coroutine back to the pool
                      ├────> yielded an op that parks: performed in place; while its `Deferred` is pending the
                      │      activity needs no greenlet, and the loop's greenlet resumes it
                      └────> yielded another op: a pooled greenlet runs it and resumes the activity
    run          the same, with the calling greenlet instead of the others
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol

from gevent import get_hub
from gevent.hub import Waiter
from greenlet import GreenletExit, getcurrent, greenlet

from smqrt.apps.lua.bridge import LuaError, LuaValue, LuaValues, Op, error_text
from smqrt.broker.deferred import Deferred
from smqrt.loop import greenlets
from smqrt.loop.scheduling import Share, share

log = logging.getLogger("smqrt.lua")

MAX_IDLE = 64  # pooled coroutines, about 2 KB each; further ones of a burst are closed
MAX_DEPTH = 60  # of nested Lua -> Python -> Lua calls: each takes some KB of the C stack

Outcome = Deferred[LuaValues]
Sent = tuple[object, ...]
"""Values that resume a coroutine; the first may be a reference or the failure marker."""


class LuaThread(Protocol):
    """A coroutine of lupa."""

    def send(self, values: Sent | None) -> object:
        """Resume the coroutine and return the values that it yields."""


class Coroutine:
    """A coroutine of the Lua activity loop.

    Attributes:
        thread: the lupa object.
        resumes: number of resumes.
        address: address of its Lua state, for the watchdog; 0 when it is unknown.
    """

    __slots__ = ("address", "resumes", "send", "thread")

    def __init__(self, thread: LuaThread) -> None:
        self.thread, self.send, self.resumes = thread, thread.send, 0
        self.address = _address_in(thread.send(None))


Run = tuple[Coroutine, int]
"""A run of an activity between two waits: its coroutine and the number of the resume."""


class _Parked:
    """An activity that waits without a greenlet, with the op and the start of the wait."""

    __slots__ = ("answer", "co", "op_name", "outcome", "since_s")

    def __init__(self, co: Coroutine, outcome: Outcome, answer: Deferred[Any], op_name: str) -> None:
        self.co, self.answer, self.op_name, self.outcome = co, answer, op_name, outcome
        self.since_s = monotonic()


class _Driver:
    """An activity that occupies a greenlet, with the op and its start."""

    __slots__ = ("co", "op_name", "since_s")

    def __init__(self, co: Coroutine) -> None:
        self.co, self.op_name, self.since_s = co, "", monotonic()


class _Later(Deferred[None]):
    """Resolves in a later iteration of the loop; the activity then performs `op`, an op with its arguments."""

    __slots__ = ("op",)

    def __init__(self, share: Share, op: LuaValues) -> None:
        super().__init__()
        self.op = op
        share.later(self.resolve)


class Activities:
    """The running and idle activities of a Lua runtime.

    Args:
        new: creates a coroutine of the Lua activity loop, which first yields the address of its Lua state.
        close_ref: reference of the Lua function that closes a coroutine.
        failure: marker that turns the result of an op into a Lua error.

    Attributes:
        limits: seconds of CPU time between two waits, by activity, where they differ from `lua_loop_s`. An entry with
            another key has no activity yet; it makes the watchdog measure as often as its limit needs.
    """

    def __init__(self, new: Callable[[], LuaThread], close_ref: int, failure: object) -> None:
        self._new = new
        self._close_ref = close_ref
        self._failure = failure
        self._idle: list[Coroutine] = []
        self._drivers: dict[greenlet, _Driver] = {}
        self._parked: set[_Parked] = set()
        self._call_stack: list[Coroutine] = []
        self.limits: dict[object, float] = {}
        self._share = share()

    @property
    def blocked(self) -> int:
        """The number of activities that wait in an op."""
        return len(self._drivers) + len(self._parked)

    def waiting(self) -> list[tuple[LuaThread, str, float]]:
        """Return coroutine, op and seconds of the wait of each waiting activity."""
        parked = [(one.co.thread, one.op_name, one.since_s) for one in self._parked]
        driven = [(one.co.thread, one.op_name, one.since_s) for one in self._drivers.values()]
        now_s = monotonic()
        return [(co, name, now_s - since_s) for co, name, since_s in parked + driven]

    @property
    def idle(self) -> int:
        """The number of coroutines in the pool."""
        return len(self._idle)

    @property
    def nested(self) -> bool:
        """Whether Lua is on the C stack, so that greenlets must not be switched."""
        return bool(self._call_stack)

    def runs(self) -> list[Run]:
        """Return the current runs, the innermost first. Callable from any thread."""
        return [(co, co.resumes) for co in self._call_stack[::-1]]

    def call(self, ref: int, *args: LuaValue | LuaThread) -> LuaValues | Outcome:
        """Run a Lua function without blocking the caller.

        Callable from the loop's greenlet and inside a Lua-to-Python call.

        Args:
            ref: reference of the function.
            args: None, bool, int, float or bytes.

        Returns:
            The values of the function when it ended without blocking, else a `Deferred` of them.

        Raises:
            LuaError: the function failed before it blocked; later errors reject the `Deferred`.
        """
        co = self._idle.pop() if self._idle else Coroutine(self._new())
        answer = self._send(co, (ref, *args))
        # At the end of an activity, the Lua loop yields whether it succeeded, then its values or the error.
        if answer is True:
            self._idle.append(co)
            return ()
        if type(answer) is tuple and type(answer[0]) is bool:
            return self._ended(co, answer)
        outcome: Outcome = Deferred()
        self._go_on(co, answer, outcome)
        if not outcome.done:
            return outcome
        return outcome.result()

    def start(self, ref: int, *args: LuaValue) -> None:
        """Run a Lua function like `call`; log an error ("smqrt.lua") with its file, line and traceback."""
        try:
            result = self.call(ref, *args)
        except LuaError as error:
            log.error("%s", error)
        else:
            if type(result) is Deferred:
                result.then(_log_failure)

    def run(self, ref: int, *args: LuaValue) -> LuaValues:
        """Run a Lua function in the current greenlet, which may block, and return its values.

        Raises:
            LuaError: the function failed.
            RuntimeError: Lua is on the C stack of the caller, which has to use `call`.
        """
        if self._call_stack:
            raise RuntimeError("run would switch greenlets inside a Lua call: use call")
        co = self._idle.pop() if self._idle else Coroutine(self._new())
        answer = self._send(co, (ref, *args))
        if answer is True:
            self._idle.append(co)
            return ()
        if type(answer) is tuple and type(answer[0]) is bool:  # ended without blocking
            return self._ended(co, answer)
        return self._drive(co, answer)

    def run_limited(self, limit_s: float, ref: int, *args: LuaValue) -> LuaValues:
        """Run a Lua function like `run`, with a limit of its own for its CPU time between two waits, in seconds.

        Raises:
            LuaError, RuntimeError: as `run`.
        """
        co = self._idle.pop() if self._idle else Coroutine(self._new())
        self._idle.append(co)  # `run` takes the last one
        self.limits[co] = limit_s
        try:
            return self.run(ref, *args)
        finally:
            del self.limits[co]

    def stop(self) -> None:
        """End all activities that wait in an op. Their `<close>` variables are closed; pcall does not catch this.

        An activity whose op has already finished, and which this iteration of the loop resumes, continues. Check
        `blocked` and call this again.
        """
        run_callback = get_hub().loop.run_callback
        for driver in list(self._drivers):
            run_callback(self._kill, driver)
        for parked in list(self._parked):
            run_callback(self._abandon, parked)

    def _kill(self, driver: greenlet) -> None:
        if driver in self._drivers:  # else its activity has ended, and the greenlet may run another job
            driver.throw(GreenletExit)

    def _abandon(self, parked: _Parked) -> None:
        if parked in self._parked:
            self._parked.discard(parked)
            parked.answer.cancel()
            self._close(parked.co)
            parked.outcome.reject(GreenletExit())

    def _close(self, co: Coroutine) -> None:
        self.call(self._close_ref, co.thread)

    def _send(self, co: Coroutine, values: Sent) -> Any:
        stack = self._call_stack
        if len(stack) >= MAX_DEPTH:
            self._idle.append(co)  # it has not started
            raise LuaError(f"callbacks are nested more than {MAX_DEPTH} deep: one of them causes its own call")
        co.resumes += 1
        stack.append(co)
        try:
            return co.send(values)
        except Exception as error:  # the coroutine is dead, or lupa rejected a value: it is not reusable
            detail = error.args[0] if error.args else error
            raise LuaError(detail if isinstance(detail, bytes | str) else str(detail)) from error
        finally:
            stack.pop()

    def _ended(self, co: Coroutine, answer: LuaValues) -> LuaValues:
        if len(self._idle) < MAX_IDLE:
            self._idle.append(co)
        if answer[0]:
            return answer[1:]
        raise LuaError(answer[1])

    def _advance(self, co: Coroutine, answer: Any) -> Any:
        """Perform ops that park, until the activity ends, blocks or waits.

        Returns its last values, or the op that blocks with its arguments, or a `Deferred` with the name of its op.

        An activity that never has to wait yields to others when its share of the loop is used up. It yields before an
        op, so that no result of an op is lost if the activity is ended at that moment.
        """
        is_first = True
        while True:
            if type(answer) is not tuple:
                answer = (answer,)
            op = answer[0]
            if type(op) is bool or not op.parks:
                return answer
            if not is_first and self._share.spent():
                return _Later(self._share, answer), ""
            is_first = False
            values = self._perform(*answer)
            if values and isinstance(values[0], Deferred):
                if not values[0].done:
                    return values[0], op.name
                values = self._answer_of(values[0])
            answer = self._send(co, values)

    def _go_on(self, co: Coroutine, answer: Any, outcome: Outcome) -> None:
        """Continue an activity until it ends, waits, or needs a greenlet."""
        try:
            answer = self._advance(co, answer)
            if isinstance(answer[0], Deferred):
                self._park(_Parked(co, outcome, *answer))
            elif type(answer[0]) is bool:
                outcome.resolve(self._ended(co, answer))
            else:
                # In the next iteration of the loop: Lua may be on the C stack now.
                get_hub().loop.run_callback(greenlets.start, self._drive_later, co, answer, outcome)
        except LuaError as error:
            outcome.reject(error)

    def _park(self, parked: _Parked) -> None:
        self._parked.add(parked)
        parked.answer.then(lambda value, error: self._in_hub(self._unpark, parked))

    def _in_hub(self, fn: Callable[..., object], *args: Any) -> None:
        """Call `fn` where greenlets may be switched: directly in the loop's greenlet unless Lua is on the C stack."""
        hub = get_hub()
        if self._call_stack or getcurrent() is not hub:
            hub.loop.run_callback(fn, *args)
        else:
            fn(*args)

    def _unpark(self, parked: _Parked) -> None:
        if parked not in self._parked:
            return  # `stop` has ended it
        self._parked.discard(parked)
        try:
            answer = self._continued(parked.co, parked.answer)
        except LuaError as error:
            parked.outcome.reject(error)
        else:
            self._go_on(parked.co, answer, parked.outcome)

    def _drive_later(self, co: Coroutine, answer: Any, outcome: Outcome) -> None:
        """Run a blocking op in this pooled greenlet, which is free again after the op."""
        try:
            answer = self._driven(co, self._perform_and_send, co, answer)
        except Exception as error:
            outcome.reject(error)
        except BaseException as error:
            outcome.reject(error)
            raise
        else:
            self._go_on(co, answer, outcome)

    def _drive(self, co: Coroutine, answer: Any) -> LuaValues:
        """Run the ops that a coroutine yields in this greenlet until it ends."""
        return self._ended(co, self._driven(co, self._to_the_end, co, answer))

    def _to_the_end(self, co: Coroutine, answer: Any) -> Any:
        while True:
            answer = self._advance(co, answer)
            if isinstance(answer[0], Deferred):
                self._await(*answer)
                answer = self._continued(co, answer[0])
            elif type(answer[0]) is bool:
                return answer
            else:
                answer = self._send(co, self._performed(answer))

    def _perform_and_send(self, co: Coroutine, answer: Any) -> Any:
        return self._send(co, self._performed(answer))

    def _performed(self, answer: Any) -> Sent:
        """Run a blocking op in this greenlet; first yield to others when the share of the loop is used up."""
        driver = self._drivers[getcurrent()]
        driver.op_name, driver.since_s = answer[0].name, monotonic()
        if self._share.spent():
            self._share.wait()
        return self._perform(*answer)

    def _driven(self, co: Coroutine, work: Callable[..., Any], *args: Any) -> Any:
        """Return the result of `work(*args)`. When the greenlet is killed meanwhile, close the coroutine."""
        me = getcurrent()
        outer = self._drivers.get(me)  # an op may run another activity in the same greenlet
        self._drivers[me] = _Driver(co)
        try:
            return work(*args)
        except BaseException:
            self._close(co)
            raise
        finally:
            if outer is None:
                del self._drivers[me]
            else:
                self._drivers[me] = outer

    def _await(self, answer: Deferred[Any], op_name: str) -> None:
        hub = get_hub()
        waiter: Waiter[None] = Waiter(hub)
        driver = self._drivers[getcurrent()]
        driver.op_name, driver.since_s = op_name, monotonic()
        answer.then(lambda value, error: self._in_hub(waiter.switch, None))
        try:
            waiter.get()
        except BaseException:
            answer.cancel()
            raise

    def _continued(self, co: Coroutine, answer: Deferred[Any]) -> Any:
        """Resume an activity whose `Deferred` is settled, and return the values that it yields next."""
        return answer.op if type(answer) is _Later else self._send(co, self._answer_of(answer))

    def _answer_of(self, answer: Deferred[Any]) -> Sent:
        try:
            result = answer.result()
        except Exception as error:
            return (self._failure, error_text(error, answer.resolve))
        return result if type(result) is tuple else (result,)

    def _perform(self, op: Op, *args: LuaValue) -> Sent:
        try:
            result = op.fn(*args)
        except Exception as error:
            return (self._failure, error_text(error, op.fn))
        return result if type(result) is tuple else (result,)


def _address_in(answer: object) -> int:
    """Return the address in the first values of a coroutine of the activity loop: true, and the text of a pointer."""
    text = answer[-1] if type(answer) is tuple else None
    try:
        return int(text, 16) if isinstance(text, bytes) else 0
    except ValueError:
        return 0


def _log_failure(_values: LuaValues | None, error: BaseException | None) -> None:
    if error is not None and not isinstance(error, GreenletExit):
        log.error("%s", error)

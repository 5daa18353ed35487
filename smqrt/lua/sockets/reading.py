"""An activity that waits in a read."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

from gevent import get_hub

from smqrt.broker.deferred import Deferred
from smqrt.errors import StreamError
from smqrt.lua.bridge import fail
from smqrt.net.turn import share

if TYPE_CHECKING:
    from smqrt.lua.sockets.ends import End


class Reading(Deferred[tuple[Any, ...]]):
    """Resolved with what the socket gives, with nil and "timeout", or with nil and the word of the error.

    Args:
        end: the socket.
        timeout_s: None waits for ever.
        is_soon: in a later turn of the loop there may be something, whether the socket tells or not.
    """

    __slots__ = ("_end", "_late_s", "_wait")

    def __init__(self, end: End, timeout_s: float | None, is_soon: bool = False) -> None:
        super().__init__()
        self._end = end
        self._late_s = None if timeout_s is None else monotonic() + timeout_s
        self._wait: Deferred[None] | None = None
        end.reading = self
        if is_soon:
            self._await_turn()
        elif not end.paused:
            self._await(timeout_s)

    def go_on(self) -> None:
        """The socket is not paused any more."""
        if self._wait is None:
            get_hub().loop.run_callback(self._try, None, None)

    def _await(self, timeout_s: float | None) -> None:
        self._wait = self._end.readable(timeout_s)
        self._wait.then(self._try)

    def _await_turn(self) -> None:
        turn: Deferred[None] = Deferred()
        self._wait = turn
        turn.then(self._try)
        share().later(turn.resolve)

    def _try(self, _value: None, error: BaseException | None) -> None:
        self._wait = None
        if self.done or (self._end.paused and error is None):
            return
        try:
            if error is not None:
                raise error
            values = self._end.receive()
            left_s = None if self._late_s is None else self._late_s - monotonic()
            if values:
                self.resolve(values)
            elif values is None:
                self._await(left_s)
            elif left_s is not None and left_s <= 0:
                raise StreamError("timeout")
            else:
                self._await_turn()
        except StreamError as failure:
            self.resolve(fail(failure.word))
        except Exception as fault:  # nobody would wake the reader again
            self.reject(fault)

    def _release(self) -> None:
        self._end.reading = None
        if self._wait is not None:
            self._wait.cancel()
            self._wait = None

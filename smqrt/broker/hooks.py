"""Every way in for others: the hooks of a hub, and `Pending`, the answer of a hook that has to wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Continuation = Callable[[Any, BaseException | None], None]


class Pending:
    """An answer that comes later. Resolved or rejected once; later calls are ignored."""

    __slots__ = ("_done", "_error", "_value", "_waiting")

    def __init__(self) -> None:
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._waiting: list[Continuation] = []

    @property
    def done(self) -> bool:
        """Whether the answer is there."""
        return self._done

    @property
    def failed(self) -> bool:
        """Whether it was rejected."""
        return self._error is not None

    def result(self) -> Any:
        """The value, once `done`; raises what it was rejected with."""
        if self._error is not None:
            raise self._error
        return self._value

    def then(self, continuation: Continuation) -> None:
        """Call `continuation(value, error)` when the answer comes, at once if it is there already."""
        if self._done:
            continuation(self._value, self._error)
        else:
            self._waiting.append(continuation)

    def resolve(self, value: Any = None) -> None:
        """Give the answer `value`."""
        self._finish(value, None)

    def reject(self, error: BaseException) -> None:
        """Give `error` instead of an answer."""
        self._finish(None, error)

    def _finish(self, value: Any, error: BaseException | None) -> None:
        if self._done:
            return
        self._done, self._value, self._error = True, value, error
        waiting, self._waiting = self._waiting, []
        failure: Exception | None = None
        for continuation in waiting:
            try:
                continuation(value, error)
            except Exception as fault:  # the others wait for the answer as well
                failure = failure or fault
        if failure is not None:
            raise failure


def settle(answer: Any, continuation: Continuation) -> None:
    """Pass `answer` on, whether it is there already or is `Pending`."""
    if isinstance(answer, Pending):
        answer.then(continuation)
    else:
        continuation(answer, None)


@dataclass(slots=True)
class Hooks:
    """Every extension point of a hub (specification: smq.md §2.2). An unset hook costs nothing.

    A hook may answer with `Pending`; the client's input waits meanwhile. `peer` is the `Session` or the server's own
    client. A hook does not raise: the bindings (Python, Lua) catch and log what the application's function raises, and
    answer in its place.
    """

    authenticate: Callable[[bytes, Any], Any] | None = None
    """`(credentials, session)` gives `(code, text)`: 0 accepts, 1 to 6 refuse."""
    permittop: Callable[[bytes, bool, Any], Any] | None = None
    """`(topic, issub, session)` gives whether the client may subscribe (or create)."""
    permitsubtop: Callable[[bytes, Any], Any] | None = None
    """`(subtopic, session)` gives whether the client may create a new sub-topic."""
    onconnect: Callable[[Any], Any] | None = None
    """`(session)`, after Connack."""
    onclose: Callable[[Any, Any], Any] | None = None
    """`(session, reason)` for every ended connection that had been accepted; `reason` is a `CloseReason`."""
    onpublish: Callable[[bytes, int, int, Any], Any] | None = None
    """`(run, tid, ptid, peer)` gives the frames of the run that may pass, once per run."""
    ondrop: Callable[[bytes, int, int, Any], Any] | None = None
    """`(run, tid, ptid, peer)` for messages that nobody received."""
    log: Callable[[Any, str], Any] | None = None
    """`(session | None, text)` for what an operator may want to know."""

"""Callbacks of a hub: their types, and calls whose exceptions are logged."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial, wraps
from inspect import signature
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

from gevent import get_hub
from greenlet import getcurrent

from smqrt.broker.deferred import Deferred
from smqrt.hub.peer import Info, Peer, PeerSocket
from smqrt.loop import greenlet_pool
from smqrt.loop.log_limits import ErrorLimit
from smqrt.loop.scheduling import Turn
from smqrt.wire import smq as wire

# ---- former names of arguments

log = logging.getLogger("smqrt.hub")

F = TypeVar("F", bound=Callable[..., Any])


def renamed(**names: str) -> Callable[[F], F]:
    """Decorator of a method whose arguments had other names before.

    Args:
        names: former name to present name. The log names each former name at its first use.
    """

    def decorate(method: F) -> F:
        unused = set(names)

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old in kwargs.keys() & names.keys():
                if old in unused:
                    unused.discard(old)
                    line = f"{calling_line()}: the argument {old!r} of smq.{method.__name__}"
                    log.warning("%s is deprecated: its name is %r now", line, names[old])
                if names[old] not in kwargs:  # else the method complains of the former name
                    kwargs[names[old]] = kwargs.pop(old)
            return method(*args, **kwargs)

        return call  # type: ignore[return-value]  # the signature stays

    return decorate


CALLED_BY_CLOCK = 4
"""The time slice is checked after this many messages of a batch, since one call may take a millisecond."""
Given = Any
"""Values of several types: a name is str, or bytes when it is not UTF-8; a payload is bytes, or a JSON value; `err` is
a word or 0."""
_PACKAGE = str(Path(__file__).parents[1])


class Authenticate(Protocol):
    """Decides whether a client is accepted."""

    def __call__(self, credentials: bytes, info: Info, /) -> int | tuple[int, str | bytes] | None:
        """Return 0 to accept, or a code from 1 to 6, alone or with a reason. May raise `Refused`."""


class PermitTop(Protocol):
    """Decides whether a client may subscribe to a topic (`issub`), or publish to it by name."""

    def __call__(self, topic: Given, issub: bool, peer: Peer, /) -> object:
        """Return whether it may."""


class PermitSubtop(Protocol):
    """Decides whether a client may create a sub-topic."""

    def __call__(self, subtopic: Given, peer: Peer, /) -> object:
        """Return whether it may."""


class OnConnect(Protocol):
    """Called when a client is connected."""

    def __call__(self, etid: int, info: Info, peer: Peer, /) -> object:
        """The result is ignored."""


class OnClose(Protocol):
    """Called when a client is disconnected."""

    def __call__(self, etid: int, sock: PeerSocket, peer: Peer, err: Given, /) -> object:
        """The result is ignored. `err` is a word, or 0."""


class OnCloseWithReason(Protocol):
    """Called when a client is disconnected, with the close reason."""

    def __call__(self, etid: int, sock: PeerSocket, peer: Peer, err: Given, reason: str, /) -> object:
        """The result is ignored. `reason` is the value of a `CloseReason`."""


class OnPublish(Protocol):
    """Called before a message is delivered (`onpublish`), or when it had no receiver (`ondrop`)."""

    def __call__(self, data: bytes, ptid: int, tid: int, subtid: int, peer: Peer, /) -> object:
        """Return whether to deliver it."""


class OnMessage(Protocol):
    """Called with a message to the server."""

    def __call__(self, data: Given, ptid: int, tid: int, subtid: int, /) -> object:
        """The result is ignored."""


class OnNode(Protocol):
    """Called when another node of the cluster joins, is lost, returns or leaves."""

    def __call__(self, node: int, event: str, why: str, /) -> object:
        """The result is ignored. `event` is "joined", "lost", "back" or "left"."""


class Log(Protocol):
    """Called with events for operators."""

    def __call__(self, sock: PeerSocket | None, text: str, /) -> object:
        """The result is ignored."""


def takes_reason(onclose: Callable[..., object] | None) -> bool:
    """Return whether `onclose` takes a fifth argument, the reason. The documented function has four."""
    try:
        return onclose is not None and bool(signature(onclose).bind(*range(5)))
    except (TypeError, ValueError):
        return False


def calling_line() -> str:
    """Return where the application called the library, as `file:line`."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "?"


class Guard:
    """Calls functions of an application. Exceptions are logged with the names of the callback and the hub; the result
    is None then.

    Args:
        hub: name of the hub in the log.
    """

    def __init__(self, hub: str) -> None:
        self._hub = hub
        self._limit = ErrorLimit()

    def call(self, what: str, function: Callable[..., object], *arguments: object) -> object:
        """Return the result of `function`; a `Deferred` when it blocks while called on the loop's greenlet."""
        try:
            answer = _call(function, *arguments)
        except Exception:
            self.log_error(what)
            return None
        if isinstance(answer, Deferred):
            answer.then(partial(self._log_later, what))
        return answer

    def log_error(self, what: str, error: BaseException | bool = True) -> None:
        """Log an exception of a callback with its traceback, within the rate limit of such errors."""
        if (others := self._limit.others()) is not None:
            log.error("error in %s of %s%s", what, self._hub, others, exc_info=error)

    def _log_later(self, what: str, value: object, error: BaseException | None) -> None:
        if error:
            self.log_error(what, error)

    def each(self, what: str, function: OnPublish, run: bytes, peer: Peer) -> list[bytes]:
        """Call `function` for each message of a batch, and return the frames for which it returned true.

        An exception counts as false for that message only.
        """
        kept: list[bytes] = []
        for count, frame in enumerate(wire.frames(run), 1):
            if not count % CALLED_BY_CLOCK:
                Turn().yield_if_due()
            tid, ptid, stid, data = wire.unpack_publish(frame)
            try:
                if function(data, ptid, tid, stid, peer):
                    kept.append(frame)
            except Exception:
                self.log_error(what)
        return kept

    def passing(self, function: OnPublish, run: bytes, peer: Peer) -> bytes:
        """Return the frames of a batch that `onpublish` accepts."""
        kept = self.each("onpublish", function, run, peer)
        return run if sum(map(len, kept)) == len(run) else b"".join(kept)


def _call(function: Callable[..., object], *arguments: object) -> object:
    """Call a function that may block: on a pooled greenlet when this is the loop's greenlet."""
    return greenlet_pool.call(function, *arguments) if getcurrent() is get_hub() else function(*arguments)

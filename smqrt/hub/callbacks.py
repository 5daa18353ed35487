"""The callbacks of a hub: their types, and how each is called so that its errors stay in the log."""

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

# ---- Former names of arguments: they work, and the log names each once.

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
"""So many messages of a run are asked about before the clock is looked at: a function may take a millisecond."""
Given = Any
"""What a function may declare as the type it expects: a name is a str, or bytes when it is not UTF-8; a payload is
bytes, or a value that JSON knows; `err` is a word, or 0."""
_PACKAGE = str(Path(__file__).parents[1])


class Authenticate(Protocol):
    """May this client come in?"""

    def __call__(self, credentials: bytes, info: Info, /) -> int | tuple[int, str | bytes] | None:
        """Returns 0 for yes, or a code from 1 to 6, alone or with a reason; may raise `Refused`."""


class PermitTop(Protocol):
    """May this client subscribe to a topic (`issub`), or publish to it by name?"""

    def __call__(self, topic: Given, issub: bool, peer: Peer, /) -> object:
        """Returns whether it may."""


class PermitSubtop(Protocol):
    """May this client bring in a new sub-topic name?"""

    def __call__(self, subtopic: Given, peer: Peer, /) -> object:
        """Returns whether it may."""


class OnConnect(Protocol):
    """A client is connected."""

    def __call__(self, etid: int, info: Info, peer: Peer, /) -> object:
        """Returns nothing."""


class OnClose(Protocol):
    """A client is gone."""

    def __call__(self, etid: int, sock: PeerSocket, peer: Peer, err: Given, /) -> object:
        """Returns nothing. `err` is a word, or 0."""


class OnCloseWithReason(Protocol):
    """The same, told more finely why."""

    def __call__(self, etid: int, sock: PeerSocket, peer: Peer, err: Given, reason: str, /) -> object:
        """Returns nothing. `reason` is the value of a `CloseReason`."""


class OnPublish(Protocol):
    """A message is about to be delivered (`onpublish`), or nobody has received it (`ondrop`)."""

    def __call__(self, data: bytes, ptid: int, tid: int, subtid: int, peer: Peer, /) -> object:
        """Returns whether it shall be delivered."""


class OnMessage(Protocol):
    """A message to the server."""

    def __call__(self, data: Given, ptid: int, tid: int, subtid: int, /) -> object:
        """Returns nothing."""


class OnNode(Protocol):
    """Another node of the cluster has come or gone."""

    def __call__(self, node: int, event: str, why: str, /) -> object:
        """Returns nothing. `event` is "joined", "lost", "back" or "left"."""


class Log(Protocol):
    """What an operator may want to know."""

    def __call__(self, sock: PeerSocket | None, text: str, /) -> object:
        """Returns nothing."""


def takes_reason(onclose: Callable[..., object] | None) -> bool:
    """Whether the function takes a fifth argument: the original's has four."""
    try:
        return onclose is not None and bool(signature(onclose).bind(*range(5)))
    except (TypeError, ValueError):
        return False


def calling_line() -> str:
    """Where the application called the library, as `file:line`."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "?"


class Guard:
    """Calls an application's functions: what they raise is logged, with the name of the callback and of its hub, and
    counts as None.

    Args:
        hub: what the log calls the hub.
    """

    def __init__(self, hub: str) -> None:
        self._hub = hub
        self._limit = ErrorLimit()

    def call(self, what: str, function: Callable[..., object], *arguments: object) -> object:
        """The answer of `function`, or `Deferred` of it when it blocks in the Hub greenlet."""
        try:
            answer = _call(function, *arguments)
        except Exception:
            self.log_error(what)
            return None
        if isinstance(answer, Deferred):
            answer.then(partial(self._log_later, what))
        return answer

    def log_error(self, what: str, error: BaseException | bool = True) -> None:
        """Log an error of a callback with its traceback, within the limit of such errors."""
        if (others := self._limit.others()) is not None:
            log.error("error in %s of %s%s", what, self._hub, others, exc_info=error)

    def _log_later(self, what: str, value: object, error: BaseException | None) -> None:
        if error:
            self.log_error(what, error)

    def each(self, what: str, function: OnPublish, run: bytes, peer: Peer) -> list[bytes]:
        """Call `function` for each message of `run`; gives the frames for which it answered yes. An error of its
        counts as no for that message only.
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
        """The frames of `run` that the `onpublish` function lets pass."""
        kept = self.each("onpublish", function, run, peer)
        return run if sum(map(len, kept)) == len(run) else b"".join(kept)


def _call(function: Callable[..., object], *arguments: object) -> object:
    """Call what may block: in the Hub greenlet, which may not, in a worker."""
    return greenlet_pool.call(function, *arguments) if getcurrent() is get_hub() else function(*arguments)

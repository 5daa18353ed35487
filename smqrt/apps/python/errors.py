"""Errors in an application's Python code, as its author wants to read them: file and line first, Python's traceback
below, without the frames of the server around it."""

from __future__ import annotations

from collections.abc import Callable
from traceback import FrameSummary, TracebackException

_MAX_FRAMES = 50  # of an endless recursion
_MAX_CHARACTERS = 16_384  # an exception may carry what a stranger has sent


def describe(error: BaseException, is_own: Callable[[str], bool], position: str = "") -> str:
    """Give the text of a failure.

    Args:
        error: what was raised.
        is_own: tells by its name whether a file is the application's.
        position: the file to name when no line of the application took part.
    """
    told = TracebackException.from_exception(error, limit=-_MAX_FRAMES)
    _cut(told, is_own)
    places = [f"{frame.filename}:{frame.lineno}" for frame in told.stack if is_own(frame.filename)]
    if isinstance(error, SyntaxError) and error.filename and is_own(error.filename):
        places.append(f"{error.filename}:{error.lineno}")
    position = places[-1] if places else position
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    summary = ": ".join(part for part in (position, type(error).__name__, _short(message)) if part)
    return _short(f"{summary}\ntraceback:\n{''.join(told.format()).rstrip()}")


def _cut(told: TracebackException, is_own: Callable[[str], bool]) -> None:
    """Leave the frames before the first of the application out, there and in what it was raised from."""
    seen: list[TracebackException] = []
    rest: list[TracebackException | None] = [told]
    while rest:
        one = rest.pop()
        if one is None or one in seen or len(seen) > _MAX_FRAMES:
            continue
        seen.append(one)
        frames: list[FrameSummary] = list(one.stack)
        first = next((at for at, frame in enumerate(frames) if is_own(frame.filename)), 0)
        one.stack[:] = frames[first:]
        rest += [one.__cause__, one.__context__]


def _short(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + " …"

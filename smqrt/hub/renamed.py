"""Former names of arguments: they work, and the log names each once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from smqrt.hub.callbacks import calling_line

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

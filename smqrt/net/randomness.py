"""Random 32-bit numbers that nobody can guess, drawn by the thousand: a system call each would show in connects."""

from __future__ import annotations

import os
import struct

_DRAW = struct.Struct("1024I")
_pool: list[int] = []


def random_u32() -> int:
    """A random 32-bit number."""
    if not _pool:
        _pool.extend(_DRAW.unpack(os.urandom(_DRAW.size)))
    return _pool.pop()


os.register_at_fork(after_in_child=_pool.clear)  # two processes must not draw the same numbers

"""Damage for tests: one flipped bit after the other in a file."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path


def flipped(path: Path, count: int, seed: int, start: int = 0, end: int | None = None) -> Iterator[int]:
    """Yields the offset of a bit's byte while that is flipped in the file; the file is whole at the end.

    Args:
        path: the file.
        count: how many bits, one at a time.
        seed: which.
        start, end: between these bytes.
    """
    chance, data = random.Random(seed), path.read_bytes()
    try:
        for _ in range(count):
            at = chance.randrange(start, len(data) if end is None else end)
            damaged = bytearray(data)
            damaged[at] ^= 1 << chance.randrange(8)
            path.write_bytes(damaged)
            yield at
    finally:
        path.write_bytes(data)

"""Measurements of CPU time without the garbage collector, which walks through the objects of all tests before."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Collect no garbage meanwhile."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

"""The way to an io from a greenlet of the loop: what may take time is done where it holds nobody else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from smqrt.http.local_disks import disks
from smqrt.http.resources import Io, IoError

T = TypeVar("T")


def reach(io: Io, name: str, function: Callable[..., T], *args: object) -> T:
    """Give what `function(*args)` gives, which does something with the file `name` of `io` and may take long: in a
    thread, and this greenlet waits; an io of the loop blocks the greenlet itself.

    Raises:
        IoError: "ioerror", the disk did not answer in time.
        what the function raises.
    """
    if io.in_loop:
        return function(*args)
    try:
        return disks.call(io.place(name), function, *args)
    except TimeoutError as error:
        raise IoError.of(error, name) from None


def reach_near(io: Io, name: str, function: Callable[..., T], *args: object) -> T:
    """The same for what is soon done on a disk of this machine: there it needs no thread. Raises as `reach`."""
    if io.in_loop or io.is_near(name):
        return function(*args)
    return reach(io, name, function, *args)

"""Attributes that few objects of a class use, and those of sessions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from smqrt.broker.client_limits import Meter
from smqrt.broker.deferred import Deferred
from smqrt.broker.topics import Topic

Value = TypeVar("Value")
UnsavedAnswers = deque[tuple[Deferred[None] | None, Callable[[bool], None]]]
"""Answers that wait for the disk, in order: what each waits for, and what sends it."""


class HasRare(Protocol):
    """An object with rare attributes.

    Attributes:
        rare: their values; `no_rare` until the first is set.
        no_rare: the defaults, which all objects of the class share; never written to.
    """

    rare: Any

    @property
    def no_rare(self) -> Any: ...


class Rare(Generic[Value]):
    """An attribute that few objects of a class use: it takes memory only in these.

    The object of all rare attributes exists while one of them has another value than its default. Code that runs for
    each message or packet reads `rare.name`, which is no call.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: HasRare, owner: type) -> Value:
        value: Value = getattr(instance.rare, self._name)
        return value

    def __set__(self, instance: HasRare, value: Value) -> None:
        no_rare = instance.no_rare
        is_default = value is getattr(no_rare, self._name)
        if instance.rare is no_rare:
            if is_default:
                return
            instance.rare = type(no_rare)()
        rare = instance.rare
        setattr(rare, self._name, value)
        if is_default and all(getattr(rare, name) is getattr(no_rare, name) for name in _slots(type(rare))):
            instance.rare = no_rare


def _slots(kind: type) -> Iterator[str]:
    """Yield the names of all slots of a class."""
    for base in kind.__mro__:
        yield from getattr(base, "__slots__", ())


class RareSessionState:
    """The attributes of a session that few clients use, see `Session`."""

    __slots__ = (
        "fragments",
        "meter",
        "observed",
        "origin",
        "partitions",
        "pending",
        "unsaved_answers",
        "waits_for_disk",
    )

    def __init__(self) -> None:
        self.origin: Any = None
        self.partitions: Any = None
        self.pending: bytes | None = None
        self.meter: Meter | None = None
        self.observed: set[Topic] | None = None
        self.fragments: bytearray | None = None
        self.unsaved_answers: UnsavedAnswers | None = None
        self.waits_for_disk = False

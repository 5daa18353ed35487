"""What callers pass, checked and brought to one form."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from smqrt.client.routes import Subtopic, Topic
from smqrt.errors import ArgumentError
from smqrt.wire.smq import MAX_PACKET_BYTES

_MAX_NAME_BYTES = MAX_PACKET_BYTES - 1
_MAX_ID = 0xFFFFFFFF


def topic_key(topic: object) -> Topic:
    """`topic` as bytes or int.

    Raises:
        ArgumentError: it is neither a name nor an id.
    """
    if isinstance(topic, int) and not isinstance(topic, bool):
        return _id(topic, "topic")
    return _name(topic, "topic")


def subtopic_key(subtopic: object) -> Subtopic:
    """`subtopic` as bytes, int or None.

    Raises:
        ArgumentError: it is neither a name, nor an id, nor None.
    """
    if subtopic is None or subtopic == 0:
        return None
    if isinstance(subtopic, int) and not isinstance(subtopic, bool):
        return _id(subtopic, "subtopic")
    return _name(subtopic, "subtopic")


def _id(number: int, what: str) -> int:
    if not 0 < number <= _MAX_ID:
        raise ArgumentError(f"{what} id {number} must be from 1 to {_MAX_ID}")
    return number


def _name(name: object, what: str) -> bytes:
    if not isinstance(name, str | bytes | bytearray):
        raise ArgumentError(f"{what} must be a name (str or bytes) or an id (int), not {type(name).__name__}")
    key = name.encode() if isinstance(name, str) else bytes(name)
    if len(key) > _MAX_NAME_BYTES:
        raise ArgumentError(f"{what} names have at most {_MAX_NAME_BYTES} bytes, not {len(key)}")
    return key


def to_text(name: bytes | None) -> str | bytes | None:
    """A name as applications see it: str, or bytes when it is not UTF-8."""
    if name is None:
        return None
    try:
        return name.decode()
    except UnicodeDecodeError:
        return name


class FactoryOrMethod:
    """A name with two meanings, as documented: on the class it makes an instance, on an instance it is `method`."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, instance: object | None, owner: type) -> Callable[..., Any]:
        return owner if instance is None else MethodType(self._method, instance)

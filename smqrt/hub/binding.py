"""Binding of Python values to a broker's methods: checks by kind, each error naming the argument, and `bound`, which
makes a method of its row in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeGuard, TypeVar

from smqrt.broker.broker import METHODS, REQUIRED, Argument, Kind, Method
from smqrt.errors import ArgumentError
from smqrt.smq.messages import payload

F = TypeVar("F", bound=Callable[..., object])
Text = str | bytes
Name = str | bytes
"""A name as applications see it: `bytes` when it is not UTF-8."""


def is_number(value: object) -> TypeGuard[int]:
    """Whether it is an int and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def number(what: str, value: object) -> int:
    """A whole number."""
    if is_number(value):
        return int(value)
    raise ArgumentError(f"{what}: a number is needed, not {type(value).__name__}")


def text(what: str, value: object) -> bytes:
    """A str or bytes, as bytes."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if isinstance(value, bytes):
        return value
    raise ArgumentError(f"{what}: a str or bytes is needed, not {type(value).__name__}")


def destination(what: str, value: object) -> bytes | int:
    """The name of a topic or sub-topic as bytes, or its number."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if isinstance(value, bytes):
        return value
    if is_number(value):
        return int(value)
    raise ArgumentError(f"{what}: a name (str or bytes) or an id is needed, not {type(value).__name__}")


def function(what: str, value: object) -> Callable[..., object]:
    """Something that can be called."""
    if callable(value):
        return value
    raise ArgumentError(f"{what}: a function is needed, not {type(value).__name__}")


def text_of(name: bytes) -> Name:
    """A name as applications see it: str, or bytes when it is not UTF-8."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return name


def name_or_none(name: bytes | None) -> Name | None:
    """As `text_of`; None as it is."""
    return None if name is None else text_of(name)


def text_names(names: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, Name]]:
    """`(id, name)` with the names as `text_of` gives them."""
    return ((number, text_of(name)) for number, name in names)


# ---- methods

_CONVERSIONS = {
    Kind.NAME: "text({name!r}, {name})",
    Kind.NUMBER: "{name} if {name}.__class__ is int else number({name!r}, {name})",
    Kind.DESTINATION: "{name} if {name}.__class__ is int else destination({name!r}, {name})",
    Kind.FLAG: "bool({name})",
    Kind.PAYLOAD: "{name} if {name}.__class__ is bytes else payload({name})",
}
"""What passes as it is costs no call: publishing is on the path of every message."""
_CONVERTERS: dict[str, Callable[..., object]] = {
    "text": text,
    "number": number,
    "destination": destination,
    "payload": payload,
    "name_or_none": name_or_none,
    "text_names": text_names,
}
_RESULTS = {Kind.NAME: "name_or_none({call})", Kind.NAMES: "text_names({call})"}


def bound(declaration: F) -> F:
    """Decorator that gives a method of `Smq` its body: convert the arguments, call the broker, convert the result.

    The declaration is what editors, mypy and `help` show; the table says what the arguments are.

    Raises:
        TypeError: the declaration has other arguments, or other defaults, than the table.
    """
    method = METHODS[declaration.__name__]
    declared = [(one.name, one.default) for one in list(signature(declaration).parameters.values())[1:]]
    if declared != [(one.name, _default(one)) for one in method.arguments]:
        raise TypeError(f"{declaration.__qualname__} differs from its row in smqrt.broker.broker")
    names: dict[str, Any] = dict(_CONVERTERS)
    exec(compile(_source(method), f"{__file__}: {method.name}", "exec"), names)  # as namedtuple and dataclass do
    made: F = wraps(declaration)(names[method.name])  # type: ignore[assignment]
    return made


def _default(argument: Argument) -> object:
    return Parameter.empty if argument.default is REQUIRED else argument.default


def _source(method: Method) -> str:
    names = [one.name if one.default is REQUIRED else f"{one.name}={one.default!r}" for one in method.arguments]
    call = f"self._broker.{method.name}({', '.join(_converted(one) for one in method.arguments)})"
    result = _RESULTS.get(method.returns, "{call}").format(call=call)
    return f"def {method.name}({', '.join(['self', *names])}):\n    return {result}\n"


def _converted(argument: Argument) -> str:
    conversion = _CONVERSIONS[argument.kind].format(name=argument.name)
    return f"None if {argument.name} is None else {conversion}" if argument.optional else conversion

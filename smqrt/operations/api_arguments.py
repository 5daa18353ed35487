"""The arguments of an API request: names that are known, numbers that are ones."""

from __future__ import annotations

from smqrt.errors import ArgumentError
from smqrt.operations.paging import LIMIT

Arguments = dict[str, str]


def known(given: dict[str, object], names: tuple[str, ...]) -> dict[str, object]:
    """Returns what was given. Raises ArgumentError for a name that is none of `names`."""
    for name in given:
        if name not in names:
            raise ArgumentError(f"{name[:40]}: there is no such argument; there are {', '.join(names)}")
    return given


def known_arguments(arguments: Arguments, names: tuple[str, ...]) -> Arguments:
    """As `known`, of the arguments of a query."""
    known(dict(arguments), names)
    return arguments


def none(arguments: Arguments) -> None:
    """Raises ArgumentError when there are any."""
    if arguments:
        raise ArgumentError(f"{next(iter(arguments))[:40]}: this address takes no arguments")


def whole(what: str, value: str) -> int:
    """Returns the number that an argument says. Raises ArgumentError when it says none."""
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise ArgumentError(f"{what}: {value[:40]!r} is no number")
    return int(value)


def limit_of(arguments: Arguments) -> int:
    """Returns how many items are asked for. Raises ArgumentError when that is no number."""
    return whole("limit", arguments["limit"]) if "limit" in arguments else LIMIT

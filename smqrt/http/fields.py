"""Names and values that a client sends: the parameters of a query or a form, cookies; looked up by name."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import NoReturn, SupportsIndex, overload

from smqrt.http.forms import parse_parameters
from smqrt.http.status import HttpError


class MissingFieldError(HttpError, KeyError):
    """The client did not send what was asked for by its name: answered with 400, unless it is caught."""

    def __init__(self, name: str) -> None:
        super().__init__(400, f"The field {name!r} is missing.")

    __str__ = Exception.__str__  # that of KeyError shows the sentence in quotes


class Fields(dict[str, str]):
    """Values by name; where a name comes more than once, the first, and all with `getall`. An index that did not come
    raises MissingFieldError.

    Args:
        pairs: names and values in the client's order.
    """

    __slots__ = ("pairs",)

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        super().__init__()
        self.pairs: list[tuple[str, str]] = list(pairs)
        for name, value in self.pairs:
            self.setdefault(name, value)

    def __missing__(self, name: str) -> NoReturn:
        raise MissingFieldError(name)

    def getall(self, name: str) -> list[str]:
        """Give all values of that name, in their order."""
        return [value for key, value in self.pairs if key == name]


class QueryText(str):
    """A query as it was sent, without the "?". An index that is a text, `in`, `get`, `getall`, `keys` and `items` are
    about its parameters.
    """

    @cached_property
    def fields(self) -> Fields:
        """Its parameters, percent-decoded; bytes that are no UTF-8 become U+FFFD.

        Raises:
            HttpError: 413, there are too many.
        """
        return decoded(parse_parameters(self.encode("ascii", "replace")))

    @overload
    def get(self, name: str) -> str | None: ...
    @overload
    def get(self, name: str, default: str) -> str: ...
    def get(self, name: str, default: str | None = None) -> str | None:
        """Give the first parameter of that name. Raises as `fields`."""
        return self.fields.get(name, default)

    def getall(self, name: str) -> list[str]:
        """Give all parameters of that name. Raises as `fields`."""
        return self.fields.getall(name)

    def keys(self) -> Iterable[str]:
        """Give the names of the parameters, each once. Raises as `fields`."""
        return self.fields.keys()

    def items(self) -> Iterable[tuple[str, str]]:
        """Give names and values, the first of each name. Raises as `fields`."""
        return self.fields.items()

    def __getitem__(self, key: SupportsIndex | slice | str) -> str:
        return self.fields[key] if isinstance(key, str) else super().__getitem__(key)

    def __contains__(self, name: object) -> bool:
        return name in self.fields


def decoded(pairs: Iterable[tuple[bytes, bytes]]) -> Fields:
    """Give the fields of names and values as they were sent; bytes that are no UTF-8 become U+FFFD."""
    return Fields((name.decode("utf-8", "replace"), value.decode("utf-8", "replace")) for name, value in pairs)


def cookies_of(field: str) -> Fields:
    """Give the cookies of a Cookie header field (RFC 6265 §4.2), without the quotes around values."""
    pairs = (part.strip().partition("=") for part in field.split(";"))
    return Fields((name, _unquoted(value)) for name, equals, value in pairs if equals and name)


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value

"""The types of JSON payloads as Spark writes them: `device string, temp double, gps struct<lat: double>`.

One text serves everywhere: compaction to typed columns, `smqrt journal schema`, and Spark's own `from_json`. Only the
types that a JSON value can have are there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from smqrt.errors import ArgumentError

_ALIASES = {
    "boolean": "boolean",
    "tinyint": "tinyint",
    "byte": "tinyint",
    "smallint": "smallint",
    "short": "smallint",
    "int": "int",
    "integer": "int",
    "bigint": "bigint",
    "long": "bigint",
    "float": "float",
    "real": "float",
    "double": "double",
    "string": "string",
    "date": "date",
    "timestamp": "timestamp",
}
_TOKEN = re.compile(r"\s*(?:`((?:[^`]|``)+)`|(\w+)|([<>,:]))")
_PLAIN = re.compile(r"[A-Za-z_]\w*")
_DEEPEST = 64


@dataclass(frozen=True, slots=True)
class Scalar:
    """A type without parts; `name` is Spark's, such as "bigint"."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Array:
    """A list of values of one type."""

    item: Type

    def __str__(self) -> str:
        return f"array<{self.item}>"


@dataclass(frozen=True, slots=True)
class Struct:
    """Named values: a JSON object, and also a whole DDL text."""

    fields: tuple[tuple[str, Type], ...]

    def __str__(self) -> str:
        return f"struct<{', '.join(f'{quoted(name)}: {kind}' for name, kind in self.fields)}>"

    def ddl(self) -> str:
        """Returns the fields as a DDL text: `device string, temp double`."""
        return ", ".join(f"{quoted(name)} {kind}" for name, kind in self.fields)


Type = Scalar | Array | Struct


def quoted(name: str) -> str:
    """Returns a name as DDL needs it: in backquotes unless it is plain letters, digits and underscores."""
    return name if _PLAIN.fullmatch(name) else "`" + name.replace("`", "``") + "`"


def parse(text: str) -> Struct:
    """Reads a DDL text.

    Args:
        text: fields with their types, such as `device string, readings array<struct<at: timestamp, c: double>>`.

    Raises:
        ArgumentError: it can't be understood, names a type JSON has not, or has a name twice; the message says where.
    """
    return _Parser(text).whole()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(_tokens(text))
        self._at = 0

    def whole(self) -> Struct:
        struct = self._fields(end="", depth=0)
        if self._peek():
            raise self._wrong(f"{self._peek()!r} is one too many")
        return struct

    def _fields(self, end: str, depth: int) -> Struct:
        fields: dict[str, Type] = {}
        while True:
            name = self._name()
            if self._peek() == ":":
                self._next()
            if name.lower() in map(str.lower, fields):
                raise self._wrong(f"the name {name!r} is there twice (Spark takes no notice of case)")
            fields[name] = self._type(depth + 1)
            if self._peek() != ",":
                break
            self._next()
        if end:
            self._expect(end)
        return Struct(tuple(fields.items()))

    def _type(self, depth: int) -> Type:
        word = self._next().lower()
        if depth > _DEEPEST:
            raise self._wrong(f"it is nested deeper than {_DEEPEST}")
        if word == "array":
            self._expect("<")
            item = self._type(depth + 1)
            self._expect(">")
            return Array(item)
        if word == "struct":
            self._expect("<")
            return self._fields(">", depth)
        if word not in _ALIASES:
            known = ", ".join(dict.fromkeys(_ALIASES.values()))
            raise self._wrong(
                f"{word or 'the end'!r} is no type of JSON; the types are {known}, array<…>, struct<…: …>"
            )
        return Scalar(_ALIASES[word])

    def _name(self) -> str:
        kind, word = self._tokens[self._at] if self._at < len(self._tokens) else ("", "")
        if kind not in ("word", "quoted"):
            raise self._wrong(f"a name is missing before {word or 'the end'!r}")
        self._at += 1
        return word

    def _expect(self, sign: str) -> None:
        if self._peek() != sign:
            raise self._wrong(f"{sign!r} is missing before {self._peek() or 'the end'!r}")
        self._next()

    def _peek(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        word = self._peek()
        self._at += 1
        return word

    def _wrong(self, what: str) -> ArgumentError:
        return ArgumentError(f"schema {self._text!r}: {what}; it must look like 'device string, temp double'")


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while text[at:].strip():
        found = _TOKEN.match(text, at)
        if not found:
            place = text[at:].lstrip()[:10]
            raise ArgumentError(
                f"schema {text!r}: {place!r} can't be read; it must look like 'device string, temp double'"
            )
        name, word, sign = found.groups()
        yield ("quoted", name.replace("``", "`")) if name else ("word", word) if word else ("sign", sign)
        at = found.end()

"""Schemas of JSON payloads in Spark's DDL: `device string, temp double, gps struct<lat: double>`.

Compaction to typed columns, `smqrt journal schema` and Spark's `from_json` use the same text. It has only the types of
JSON values. A value of a wrong type becomes null, and other fields keep their values, as with Spark's `from_json`.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

from smqrt.errors import ArgumentError
from smqrt.journal.planning import Filter

if TYPE_CHECKING:
    import pyarrow as pa


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
_MAX_DEPTH = 64
DOMINANT = 0.95
"""A field gets the type of at least this share of its values; without such a type it is a string."""

_BITS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_INT64_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True)
class ScalarType:
    """A type without parts; `name` is Spark's, such as "bigint"."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class ArrayType:
    """A list of values of one type."""

    item: PayloadType

    def __str__(self) -> str:
        return f"array<{self.item}>"


@dataclass(frozen=True, slots=True)
class StructType:
    """Named values: a JSON object, and also a whole DDL text."""

    fields: tuple[tuple[str, PayloadType], ...]

    def __str__(self) -> str:
        return f"struct<{', '.join(f'{quoted_name(name)}: {kind}' for name, kind in self.fields)}>"

    def ddl(self) -> str:
        """Return the fields as a DDL text: `device string, temp double`."""
        return ", ".join(f"{quoted_name(name)} {kind}" for name, kind in self.fields)


PayloadType = ScalarType | ArrayType | StructType


def quoted_name(name: str) -> str:
    """Return a name for DDL: in backquotes unless it has only letters, digits and underscores."""
    return name if _PLAIN.fullmatch(name) else "`" + name.replace("`", "``") + "`"


def parse_ddl(text: str) -> StructType:
    """Parse a DDL text.

    Args:
        text: fields with their types, such as `device string, readings array<struct<at: timestamp, c: double>>`.

    Raises:
        ArgumentError: the text is invalid, has a type that JSON lacks, or a name twice; the message names the place.
    """
    return _Parser(text).parse()


def merge_schemas(schemas: Mapping[str, str]) -> StructType:
    """Return the fields of all schemas together.

    Args:
        schemas: DDL texts by topic pattern.

    Raises:
        ArgumentError: a DDL is invalid, or a name has different types in two of them.
    """
    fields: dict[str, tuple[str, PayloadType, str]] = {}
    for pattern, text in schemas.items():
        for name, kind in parse_ddl(text).fields:
            first, other, where = fields.setdefault(name.lower(), (name, kind, pattern))
            if (first, other) != (name, kind):
                raise ArgumentError(
                    f"schema: {first!r} is {other} for {where!r} and {name!r} is {kind} for {pattern!r}; one name "
                    "has one type in a compacted file, so give both the wider type, or string"
                )
    return StructType(tuple((name, kind) for name, kind, _ in fields.values()))


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(_tokens(text))
        self._at = 0

    def parse(self) -> StructType:
        struct = self._fields(end="", depth=0)
        if self._peek():
            raise self._error(f"{self._peek()!r} is unexpected")
        return struct

    def _fields(self, end: str, depth: int) -> StructType:
        fields: dict[str, PayloadType] = {}
        while True:
            kind, name = self._tokens[self._at] if self._at < len(self._tokens) else ("", "")
            if kind not in ("word", "quoted"):
                raise self._error(f"a name is missing before {name or 'the end'!r}")
            self._at += 1
            if self._peek() == ":":
                self._next()
            if name.lower() in map(str.lower, fields):
                raise self._error(f"the name {name!r} occurs twice (Spark ignores case)")
            fields[name] = self._type(depth + 1)
            if self._peek() != ",":
                break
            self._next()
        if end:
            self._expect(end)
        return StructType(tuple(fields.items()))

    def _type(self, depth: int) -> PayloadType:
        word = self._next().lower()
        if depth > _MAX_DEPTH:
            raise self._error(f"it is nested deeper than {_MAX_DEPTH}")
        if word == "array":
            self._expect("<")
            item = self._type(depth + 1)
            self._expect(">")
            return ArrayType(item)
        if word == "struct":
            self._expect("<")
            return self._fields(">", depth)
        if word not in _ALIASES:
            known = ", ".join(dict.fromkeys(_ALIASES.values()))
            raise self._error(
                f"{word or 'the end'!r} is not a type of JSON; the types are {known}, array<…>, struct<…: …>"
            )
        return ScalarType(_ALIASES[word])

    def _expect(self, sign: str) -> None:
        if self._peek() != sign:
            raise self._error(f"{sign!r} is missing before {self._peek() or 'the end'!r}")
        self._next()

    def _peek(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        word = self._peek()
        self._at += 1
        return word

    def _error(self, what: str) -> ArgumentError:
        return ArgumentError(f"schema {self._text!r}: {what}; it must look like 'device string, temp double'")


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while text[at:].strip():
        found = _TOKEN.match(text, at)
        if not found:
            rest = text[at:].lstrip()[:10]
            raise ArgumentError(
                f"schema {text!r}: {rest!r} can't be read; it must look like 'device string, temp double'"
            )
        name, word, sign = found.groups()
        yield ("quoted", name.replace("``", "`")) if name else ("word", word) if word else ("sign", sign)
        at = found.end()


# ---- values to columns


def load_json(payload: bytes) -> object:
    """Return the JSON value of a payload, or `Ellipsis` for a payload that is not JSON."""
    try:
        text = payload.decode()  # `json.loads` would accept UTF-16 bytes, too
        return json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested too deeply
        return ...


def _reject_constant(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")


def cast(value: object, kind: PayloadType) -> object:
    """Return a JSON value for a column of a type; None for a value of another type."""
    if value is None:
        return None
    if isinstance(kind, StructType):
        return {name: cast(value.get(name), inner) for name, inner in kind.fields} if isinstance(value, dict) else None
    if isinstance(kind, ArrayType):
        return [cast(item, kind.item) for item in value] if isinstance(value, list) else None
    return _CASTS[kind.name](value)


def fits(value: object, kind: PayloadType) -> bool:
    """Return whether each part of a JSON value has the type that `kind` gives it; other fields are ignored."""
    if value is None:
        return True
    if isinstance(kind, StructType):
        return isinstance(value, dict) and all(fits(value.get(name), inner) for name, inner in kind.fields)
    if isinstance(kind, ArrayType):
        return isinstance(value, list) and all(fits(item, kind.item) for item in value)
    return _CASTS[kind.name](value) is not None


def _whole(bits: int) -> Callable[[object], int | None]:
    limit = 1 << (bits - 1)

    def convert(value: object) -> int | None:
        return value if type(value) is int and -limit <= value < limit else None  # not bool, which is an int, too

    return convert


def _double(value: object) -> float | None:
    try:
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    except OverflowError:
        return None


def _boolean(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()  # a lone surrogate is valid JSON, but not valid text


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EARLIEST, _LATEST = datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)
"""A day less than the range of datetime at each end, so that the time is valid in each time zone."""


def _timestamp(value: object) -> datetime | None:
    """Return a timestamp; a whole number is seconds since 1970, as in Spark."""
    try:
        if isinstance(value, str):
            moment = datetime.fromisoformat(value)
            moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
        elif type(value) is int:
            moment = _EPOCH + timedelta(seconds=value)
        else:
            return None
    except (ValueError, OverflowError):
        return None
    return moment if _EARLIEST <= moment < _LATEST else None


def _date(value: object) -> date | None:
    try:
        return date.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None


_CASTS: dict[str, Callable[[Any], object]] = {
    **{name: _whole(bits) for name, bits in _BITS.items()},
    "float": _double,
    "double": _double,
    "boolean": _boolean,
    "string": _text,
    "timestamp": _timestamp,
    "date": _date,
}


# ---- values to a type


class SeenValues:
    """The types of all values at one position in JSON documents; `kind()` returns the narrowest type of nearly all."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._fields: dict[str, SeenValues] = {}
        self._items: SeenValues | None = None

    def add(self, value: object) -> None:
        """Add a JSON value."""
        self._counts[_kind_name(value)] += 1
        if isinstance(value, dict):
            for name, inner in value.items():
                self._fields.setdefault(name, SeenValues()).add(inner)
        elif isinstance(value, list):
            self._items = self._items or SeenValues()
            for item in value:
                self._items.add(item)

    def kind(self) -> PayloadType:
        """Return the type. Whole numbers and fractions together are double; values of many types are string."""
        numbers = self._counts["bigint"] + self._counts["double"]  # both fit into a double
        groups = {name: count for name, count in self._counts.items() if name not in ("null", "bigint", "double")}
        groups["number"] = numbers
        name, count = max(groups.items(), key=lambda group: group[1])
        if count < DOMINANT * sum(groups.values()) or not count:
            return ScalarType("string")
        if name == "number":
            return ScalarType("double" if self._counts["double"] else "bigint")
        if name == "list":
            return ArrayType(self._items.kind() if self._items else ScalarType("string"))
        if name != "object":
            return ScalarType(name)
        fields: dict[str, tuple[str, SeenValues]] = {}
        for field, seen in self._fields.items():
            fields.setdefault(field.lower(), (field, seen))  # Spark ignores case, so the first spelling is used
        if not fields:
            return ScalarType("string")
        return StructType(tuple((field, seen.kind()) for field, seen in fields.values()))


def _kind_name(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "bigint" if -_INT64_LIMIT <= value < _INT64_LIMIT else "double"
    return {float: "double", str: "string", dict: "object", list: "list"}[type(value)]


def infer_type(values: Iterable[object]) -> PayloadType:
    """Return the type of JSON values, from `SeenValues`."""
    seen = SeenValues()
    for value in values:
        seen.add(value)
    return seen.kind()


@dataclass(frozen=True)
class InferredSchema:
    """The result of `infer_schema`.

    Attributes:
        kind: the type of the payloads that are JSON.
        rows: number of payloads.
        json: number of payloads that are JSON.
        fitting: number of JSON payloads that the type describes without loss.
    """

    kind: PayloadType
    rows: int
    json: int
    fitting: int

    @property
    def ddl(self) -> str | None:
        """The DDL text; None when the payloads are not JSON objects, or have no fields."""
        return self.kind.ddl() if isinstance(self.kind, StructType) else None


def infer_schema(payloads: Iterable[bytes]) -> InferredSchema:
    """Return the type of payloads; see `SeenValues.kind`."""
    values = [load_json(payload) for payload in payloads]
    documents = [value for value in values if value is not ...]
    kind = infer_type(documents)
    fitting = sum(fits(value, kind) for value in documents if value is not None)
    return InferredSchema(kind, len(values), len(documents), fitting)


# ---- payloads as a typed column, which compaction writes beside the payload if the settings have a schema
#
# The column is a struct named `json` with the fields of all schemas. It is null for a payload that is not a JSON
# object, and a field is null for a value of another type. The payload itself is not changed.

JSON_COLUMN = "json"
_BLOCK_BYTES = 32 << 20
_BLOCK_ROWS = 1 << 16
_SMALL_ROWS = 1 << 10
"""pyarrow rejects a whole block for one unusual payload. Then smaller parts are parsed, rejected parts in Python."""
_MAX_PAYLOAD_BYTES = 1 << 16
_ROW_KEY = os.urandom(8).hex()
"""A field with the row's number during parsing. It is random, so that no payload can contain it."""


class TypedColumn:
    """Parses payloads of selected topics into a typed column.

    Args:
        schemas: the DDL of payloads by topic pattern, such as `{"site1/#": "device string, temp double"}`.

    Raises:
        ArgumentError: a DDL is invalid, or a name has different types in two of them.
        ImportError: pyarrow is missing.

    Attributes:
        schemas: as given.
        struct: the fields.
        field: the same as a pyarrow field.
    """

    def __init__(self, schemas: Mapping[str, str]) -> None:
        import pyarrow

        self.schemas, self.struct = dict(schemas), merge_schemas(schemas)
        self._filter = Filter(list(schemas))
        self._type: Any = arrow_type(self.struct)
        self.field: Any = pyarrow.field(JSON_COLUMN, self._type)

    def column(self, topics: pa.StringArray, payloads: pa.BinaryArray) -> pa.StructArray:
        """Return the column for rows.

        Args:
            topics: their topics.
            payloads: their payloads, as many as topics.
        """
        import pyarrow
        from pyarrow import compute

        encoded = topics.dictionary_encode()
        known = [name is not None and self._filter.matches(name) for name in encoded.dictionary.to_pylist()]
        chosen = compute.fill_null(compute.take(pyarrow.array(known, pyarrow.bool_()), encoded.indices), False)
        if not compute.any(chosen, min_count=0).as_py():
            return pyarrow.nulls(len(payloads), self._type)
        blocks = _blocks(payloads.filter(chosen).to_pylist())
        parsed = pyarrow.concat_arrays([array for block in blocks for array in self._block(block)])
        positions = compute.cumulative_sum(compute.cast(chosen, pyarrow.int64()))
        return compute.take(parsed, compute.if_else(chosen, compute.subtract(positions, 1), None))

    def _block(self, payloads: Sequence[bytes]) -> Iterator[Any]:
        array = self._fast(payloads)
        if array is not None:
            yield array
        elif len(payloads) > _SMALL_ROWS:
            for at in range(0, len(payloads), _SMALL_ROWS):
                yield from self._block(payloads[at : at + _SMALL_ROWS])
        else:
            yield self._slow(payloads)

    def _slow(self, payloads: Sequence[bytes]) -> Any:
        import pyarrow

        return pyarrow.array([cast(load_json(payload), self.struct) for payload in payloads], self._type)

    def _fast(self, payloads: Sequence[bytes]) -> Any:
        """Parse all payloads in one call of pyarrow; None when one of them is not a fitting object."""
        import pyarrow
        from pyarrow import json

        # pyarrow's parser crashes the process on a line `null`, and recurses: only short objects are given to it.
        if not all(payload[:1] == b"{" and len(payload) <= _MAX_PAYLOAD_BYTES for payload in payloads):
            return None
        key = _ROW_KEY.encode()
        text = b"\n".join([b'{"%b":%d,%b' % (key, row, payload[1:]) for row, payload in enumerate(payloads)])
        try:
            text.decode()
        except UnicodeDecodeError:
            return None
        if b"NaN" in text or b"Inf" in text:  # pyarrow accepts these as numbers
            return None
        fields = [pyarrow.field(_ROW_KEY, pyarrow.int64()), *self._type]
        options = json.ParseOptions(explicit_schema=pyarrow.schema(fields), unexpected_field_behavior="ignore")
        reading = json.ReadOptions(use_threads=False, block_size=len(text) + 1)
        try:
            table = json.read_json(io.BytesIO(text), reading, options)
        except pyarrow.ArrowInvalid:
            return None
        numbers, *columns = (column.combine_chunks() for column in table.columns)
        if not numbers.equals(pyarrow.array(range(len(payloads)), pyarrow.int64())):
            return None
        return pyarrow.StructArray.from_arrays(columns, fields=list(self._type))


def arrow_type(kind: PayloadType) -> pa.DataType:
    """Return the pyarrow type of a DDL type; all values may be null, times are microseconds in UTC."""
    import pyarrow

    if isinstance(kind, StructType):
        return pyarrow.struct([pyarrow.field(name, arrow_type(inner)) for name, inner in kind.fields])
    if isinstance(kind, ArrayType):
        return pyarrow.list_(pyarrow.field("element", arrow_type(kind.item)))
    types = {
        "boolean": pyarrow.bool_(),
        "tinyint": pyarrow.int8(),
        "smallint": pyarrow.int16(),
        "int": pyarrow.int32(),
        "bigint": pyarrow.int64(),
        "float": pyarrow.float32(),
        "double": pyarrow.float64(),
        "string": pyarrow.string(),
        "date": pyarrow.date32(),
        "timestamp": pyarrow.timestamp("us", "UTC"),
    }
    return types[kind.name]


def _blocks(payloads: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    block: list[bytes] = []
    size = 0
    for payload in payloads:
        if block and (size + len(payload) > _BLOCK_BYTES or len(block) >= _BLOCK_ROWS):
            yield block
            block, size = [], 0
        block.append(payload)
        size += len(payload)
    if block:
        yield block

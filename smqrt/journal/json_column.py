"""Payloads as a column of typed values: what compaction writes beside the payload when it is told a schema.

The column is a struct named `json` with the fields of all schemas. A payload that is no JSON object has null there, a
field of another type is null; the payload itself stays whatever it is.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from smqrt.journal.filters import Filter
from smqrt.journal.payload_schema import ArrayType, PayloadType, StructType, cast, load_json, merge_schemas

if TYPE_CHECKING:
    import pyarrow as pa

JSON_COLUMN = "json"
_BLOCK_BYTES = 32 << 20
_BLOCK_ROWS = 1 << 16
_SMALL_ROWS = 1 << 10
_LONGEST_BYTES = 1 << 16
_ROW_KEY = os.urandom(8).hex()
"""A field that numbers the rows while they are parsed. Nobody outside knows it, so no payload can pass for two rows."""


class TypedColumn:
    """Parses payloads of topics that match a pattern.

    Args:
        schemas: the DDL of payloads by topic pattern, such as `{"site1/#": "device string, temp double"}`.

    Raises:
        ArgumentError: a DDL is wrong, or two give one name different types.
        ImportError: pyarrow is missing.

    Attributes:
        schemas: as given.
        struct: the fields; field: the same as a field of pyarrow's.
    """

    def __init__(self, schemas: Mapping[str, str]) -> None:
        import pyarrow

        self.schemas, self.struct = dict(schemas), merge_schemas(schemas)
        self._filter = Filter(list(schemas))
        self._type: Any = arrow_type(self.struct)
        self.field: Any = pyarrow.field(JSON_COLUMN, self._type)

    def column(self, topics: pa.StringArray, payloads: pa.BinaryArray) -> pa.StructArray:
        """Returns the pyarrow struct array for arrays of topics (string) and payloads (binary) of one length."""
        import pyarrow
        from pyarrow import compute

        encoded = topics.dictionary_encode()
        known = [name is not None and self._filter.matches(name) for name in encoded.dictionary.to_pylist()]
        chosen = compute.fill_null(compute.take(pyarrow.array(known, pyarrow.bool_()), encoded.indices), False)
        if not compute.any(chosen, min_count=0).as_py():
            return pyarrow.nulls(len(payloads), self._type)
        parsed = self._parse(payloads.filter(chosen).to_pylist())
        positions = compute.cumulative_sum(compute.cast(chosen, pyarrow.int64()))
        return compute.take(parsed, compute.if_else(chosen, compute.subtract(positions, 1), None))

    def _parse(self, payloads: Sequence[bytes]) -> Any:
        import pyarrow

        return pyarrow.concat_arrays([array for block in _blocks(payloads) for array in self._block(block)])

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
        """All payloads in one call of pyarrow's parser; None when one of them is anything but a fitting object."""
        import pyarrow
        from pyarrow import json

        text = _numbered(payloads)
        if text is None:
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
    """Returns the pyarrow type of a DDL type; everything may be null, times are microseconds in UTC."""
    import pyarrow

    if isinstance(kind, StructType):
        return pyarrow.struct([pyarrow.field(name, arrow_type(inner)) for name, inner in kind.fields])
    if isinstance(kind, ArrayType):
        return pyarrow.list_(pyarrow.field("element", arrow_type(kind.item)))
    made = {
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
    return made[kind.name]


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


def _numbered(payloads: Sequence[bytes]) -> bytes | None:
    """One line for each payload, each a JSON object that begins with the row's number; None when one is no object.

    pyarrow's parser crashes the process on a line `null`, and recurses: long and foreign payloads don't get there.
    """
    if not all(payload[:1] == b"{" and len(payload) <= _LONGEST_BYTES for payload in payloads):
        return None
    key = _ROW_KEY.encode()
    text = b"\n".join([b'{"%b":%d,%b' % (key, row, payload[1:]) for row, payload in enumerate(payloads)])
    try:
        text.decode()
    except UnicodeDecodeError:
        return None
    return None if b"NaN" in text or b"Inf" in text else text  # pyarrow takes these for numbers

"""Which columns a read gives: all of the journal, or those of the schema that the user named.

A schema may name one more, `json`: the fields of JSON payloads that it lists, as compaction makes them (`typed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from smqrt.errors import ArgumentError
from smqrt.journal import ddl, typed
from smqrt.journal.record import COLUMNS

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

TYPES = {column.name: column.type.lower() for column in COLUMNS}
NULLABLE = {column.name for column in COLUMNS if column.nullable}


def checked(schema: StructType) -> list[str]:
    """Returns the journal's names of a schema's columns.

    Args:
        schema: what the user gave to `.schema()`, or all columns.

    Returns:
        The names, in the schema's order.

    Raises:
        ArgumentError: a column isn't in the journal, or has another type there.
    """
    for field in schema.fields:
        if field.name == typed.COLUMN:
            _struct(field.dataType)
            continue
        here = field.dataType.simpleString()
        if (there := TYPES.get(field.name)) is None:
            raise ArgumentError(f'The journal has no column "{field.name}". It has: {", ".join(TYPES)}.')
        if here != there:
            raise ArgumentError(
                f"The journal's column {field.name} is {there}, not {here}: read it as it is, then cast it."
            )
        if not field.nullable and field.name in NULLABLE:
            raise ArgumentError(f"The journal's column {field.name} may be null: leave out NOT NULL.")
    return schema.fieldNames()


def json_ddl(schema: StructType) -> str | None:
    """Returns which fields of payloads the column `json` of a schema has; None when it has no such column.

    Raises:
        ArgumentError: a field is of a type that JSON has not.
    """
    found = [field.dataType for field in schema.fields if field.name == typed.COLUMN]
    return _struct(found[0]).ddl() if found else None


def _struct(kind: DataType) -> ddl.Struct:
    found = _kind(kind)
    if not isinstance(found, ddl.Struct):
        raise ArgumentError(
            f"The column {typed.COLUMN} is {kind.simpleString()}; it's a struct such as json struct<temp: double>."
        )
    return ddl.parse(found.ddl())


def _kind(kind: DataType) -> ddl.Type:
    from pyspark.sql.types import ArrayType, StructType

    if isinstance(kind, StructType):
        return ddl.Struct(tuple((field.name, _kind(field.dataType)) for field in kind.fields))
    return ddl.Array(_kind(kind.elementType)) if isinstance(kind, ArrayType) else ddl.Scalar(kind.simpleString())


def arrow_schema(schema: StructType) -> Any:
    """Returns the pyarrow.Schema that Spark compares every batch with."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


def shaped(batch: Any, target: Any) -> Any:
    """Returns the columns of a pyarrow.RecordBatch that `target` (a pyarrow.Schema) names, as it declares them."""
    import pyarrow as pa

    columns = [batch.column(field.name) for field in target]
    columns = [one if one.type.equals(to.type) else one.cast(to.type) for one, to in zip(columns, target, strict=True)]
    if not columns:
        return batch.select([])
    return pa.RecordBatch.from_arrays(columns, schema=target)


def needed(names: Sequence[str], *more: str) -> list[str]:
    """Returns the columns to read, in the journal's order: those of the result and those that filters look at."""
    return [name for name in TYPES if name in names or name in more]

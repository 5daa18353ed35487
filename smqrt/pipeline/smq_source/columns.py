"""Which columns a read gives: all of the journal, or those of the schema that the user named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from smqrt.errors import ArgumentError
from smqrt.journal.record import COLUMNS

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

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

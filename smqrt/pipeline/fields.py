"""JSON payloads as columns: what `@source(json="device string, temp double")` does to the rows of a journal."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any, cast

from smqrt.errors import ArgumentError, PipelineError
from smqrt.journal import ddl as types
from smqrt.journal.record import COLUMNS
from smqrt.pipeline import variant
from smqrt.pipeline.expectations import REASON
from smqrt.pipeline.failures import first_line

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

BAD_JSON, WRONG_TYPE = "bad_json", "wrong_type"
"""Columns of the observation: payloads that are no JSON object, and rows with a field of another type."""

TYPED = "_smqrt_typed"
"""A column of a batch: the fields that compaction has written beside the payload; null where it has not."""
VARIANT = "variant"
"""Instead of a DDL: the whole payload, in a column of this name."""
_ALIKE = frozenset(("boolean", "tinyint", "smallint", "int", "bigint", "double", "string"))
"""Types of which a value that compaction has written is the one that Spark finds in the payload."""
_SHORT_BYTES = 1000
"""Longer payloads are looked at: Spark takes no number of more digits for JSON, and nothing that is nested deeper."""
_MADE_OF_OTHERS = '0123456789-[{"IN'
"""How texts may begin that were numbers, lists or objects; Spark writes some of these in another way."""

_JSON, _CORRUPT, _STATE = "_smqrt_json", "_smqrt_corrupt", "_smqrt_state"
_GOOD, _WRONG, _BAD = 0, 1, 2
_TAKEN = frozenset(column.name for column in COLUMNS)


def observation(source: str) -> str:
    """Returns under which name Spark's progress tells how many payloads of a source were bad."""
    return f"smqrt.json.{source}"


def readable(ddl: str | None) -> str | None:
    """Returns a DDL whose fields can be taken from compacted files instead of from the payload; None when not all can.

    Where a field is null in a file, the payload is looked at all the same: it may be of another type.
    """
    try:
        kinds = [kind for _, kind in types.parse(ddl or "").fields]
    except ArgumentError:
        return None
    return ddl if all(isinstance(kind, types.Scalar) and kind.name in _ALIKE for kind in kinds) else None


def parse(frame: DataFrame, name: str, options: Mapping[str, Any], where: str) -> tuple[DataFrame, DataFrame]:
    """Adds the fields of the payload to each row.

    Args:
        frame: rows of the journal.
        name: of the source.
        options: of its declaration; "json" and "prefix" are looked at.
        where: file:line, for messages.

    Returns:
        The rows with a column for each field, and those whose payload is no JSON object, with a column `reason`.

    Raises:
        PipelineError: the DDL can't be read, or a field is called as a column of the journal is.
    """
    from pyspark.sql import functions as F

    if options["json"] == VARIANT:
        return _variant(frame, name)
    names = _field_names(frame, options["json"], where)
    _no_collision(names, options["prefix"], where)
    marked = _marked(frame, options["json"]).observe(
        observation(name),
        F.count_if(F.col(_STATE) == _BAD).alias(BAD_JSON),
        F.count_if(F.col(_STATE) == _WRONG).alias(WRONG_TYPE),
    )
    fields = [F.col(f"{_JSON}.`{field}`").alias(options["prefix"] + field) for field in names]
    columns = [column for column in frame.columns if column != TYPED]
    good = marked.where(F.col(_STATE) != _BAD).select(*columns, *fields)
    bad = _marked(frame, options["json"]).where(F.col(_STATE) == _BAD).select(*columns)
    return good, bad.withColumn(REASON, F.lit("the payload is no JSON object"))


def _variant(frame: DataFrame, name: str) -> tuple[DataFrame, DataFrame]:
    """Adds the payload as a VARIANT; what compaction has written is there already."""
    from pyspark.sql import functions as F

    if VARIANT not in frame.columns:
        frame = frame.withColumn(VARIANT, variant.parsed())
    is_bad = F.col(VARIANT).isNull()
    counts = F.count_if(is_bad).alias(BAD_JSON), F.count_if(F.lit(False)).alias(WRONG_TYPE)
    good = frame.observe(observation(name), *counts).where(~is_bad)
    return good, frame.where(is_bad).drop(VARIANT).withColumn(REASON, F.lit("the payload is no JSON"))


def _field_names(frame: DataFrame, ddl: str, where: str) -> list[str]:
    from pyspark.sql.types import StructType

    try:
        schema = cast(StructType, StructType.fromDDL(ddl))
    except Exception as error:
        raise PipelineError(
            f"{where}: json={ddl!r} isn't a list of fields such as 'device string, temp double': {first_line(error)}"
        ) from None
    return [str(field.name) for field in schema.fields]


def _no_collision(names: list[str], prefix: str, where: str) -> None:
    for name in names:
        if prefix + name in _TAKEN:
            raise PipelineError(
                f"{where}: the JSON field {name!r} is called as a column of the journal is; "
                f"with prefix='m_' it becomes the column {'m_' + name!r}."
            )


def _marked(frame: DataFrame, ddl: str) -> DataFrame:
    from pyspark.sql import functions as F

    text = F.col("payload").cast("string")
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    parsed = F.from_json(text, f"{ddl}, {_CORRUPT} string", options)
    state = _state(text)
    if TYPED in frame.columns:
        whole, known = _whole(frame)
        parsed, state = F.when(whole, known).otherwise(parsed), F.when(whole, _GOOD).otherwise(state)
    return frame.withColumn(_JSON, parsed).withColumn(_STATE, state)


def _whole(frame: DataFrame) -> tuple[Column, Column]:
    """Returns in which rows the column `TYPED` has all fields, and what `from_json` would give there."""
    from pyspark.sql import functions as F

    kinds = cast("StructType", frame.schema[TYPED].dataType).fields
    fields = {kind.name: F.col(f"{TYPED}.`{kind.name}`") for kind in kinds}
    sure = [_is_sure(fields[kind.name], kind.dataType.simpleString()) for kind in kinds]
    whole = reduce(lambda one, more: one & more, sure, F.octet_length("payload") <= _SHORT_BYTES)
    values = [field.alias(name) for name, field in fields.items()]
    return whole, F.struct(*values, F.lit(None).cast("string").alias(_CORRUPT))


def _is_sure(field: Column, kind: str) -> Column:
    """Returns whether Spark finds the same value in the payload."""
    from pyspark.sql import functions as F

    if kind == "string":
        return field.isNotNull() & ~F.substring(field, 1, 1).isin(list(_MADE_OF_OTHERS))
    if kind == "double":
        return (field != 0) | (field.cast("string") == "0.0")  # no -0.0, which Spark makes of "-0.0" but not of "-0"
    return field.isNotNull()


def _state(text: Column) -> Column:
    from pyspark.sql import functions as F

    row = F.col(_JSON)
    is_object = F.ltrim(text).startswith("{")
    return (
        F.when(row.isNull() | ~is_object, _BAD)
        .when(row[_CORRUPT].isNull(), _GOOD)
        # Only now, as it parses once more: a field of another type, or no JSON at all?
        .when(F.get_json_object(text, "$").isNull(), _BAD)
        .otherwise(_WRONG)
    )

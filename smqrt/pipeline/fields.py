"""JSON payloads as columns: what `@source(json="device string, temp double")` does to the rows of a journal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from smqrt.errors import PipelineError
from smqrt.journal.record import COLUMNS
from smqrt.pipeline.expectations import REASON
from smqrt.pipeline.failures import first_line

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

BAD_JSON, WRONG_TYPE = "bad_json", "wrong_type"
"""Columns of the observation: payloads that are no JSON object, and rows with a field of another type."""

_JSON, _CORRUPT, _STATE = "_smqrt_json", "_smqrt_corrupt", "_smqrt_state"
_GOOD, _WRONG, _BAD = 0, 1, 2
_TAKEN = frozenset(column.name for column in COLUMNS)


def observation(source: str) -> str:
    """Returns under which name Spark's progress tells how many payloads of a source were bad."""
    return f"smqrt.json.{source}"


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

    names = _field_names(frame, options["json"], where)
    _no_collision(names, options["prefix"], where)
    marked = _marked(frame, options["json"]).observe(
        observation(name),
        F.count_if(F.col(_STATE) == _BAD).alias(BAD_JSON),
        F.count_if(F.col(_STATE) == _WRONG).alias(WRONG_TYPE),
    )
    fields = [F.col(f"{_JSON}.`{field}`").alias(options["prefix"] + field) for field in names]
    good = marked.where(F.col(_STATE) != _BAD).select(*frame.columns, *fields)
    bad = _marked(frame, options["json"]).where(F.col(_STATE) == _BAD).select(*frame.columns)
    return good, bad.withColumn(REASON, F.lit("the payload is no JSON object"))


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
    return frame.withColumn(_JSON, parsed).withColumn(_STATE, _state(text))


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

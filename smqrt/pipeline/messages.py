"""Rows of a result as messages: topic, sub-topic and payload."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from smqrt.errors import PipelineError
from smqrt.journal.record import COLUMNS
from smqrt.pipeline.api import Declaration
from smqrt.pipeline.template import Template

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

Message = tuple[bytes, bytes | None, bytes]
"""Topic, sub-topic or None, payload."""

_KEPT = ("topic", "ts", "payload")
BOOKKEEPING = frozenset(column.name for column in COLUMNS) - set(_KEPT)
"""Columns of the journal that say nothing to who receives the message."""

TIMES = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSXXX"}


def messages(frame: DataFrame, declaration: Declaration) -> DataFrame:
    """Returns the columns `topic`, `subtopic` and `payload` (binary) of what a query publishes.

    Args:
        frame: its result.
        declaration: says where to: "to" and "subtopic".

    Raises:
        PipelineError: the template names a column that the result doesn't have.
    """
    from pyspark.sql import functions as F

    options = declaration.options
    subtopic = options.get("subtopic")
    return frame.select(
        # A topic needs a name, and a row without one shall not end the query.
        F.coalesce(F.nullif(_filled(frame, declaration, options["to"]), F.lit("")), F.lit("null")).alias("topic"),
        (_filled(frame, declaration, subtopic) if subtopic else F.lit(None).cast("string")).alias("subtopic"),
        _payload(frame).alias("payload"),
    )


def collected(frame: DataFrame) -> Iterator[Message]:
    """Yields the messages of what `messages` returned, through Arrow."""
    for batch in frame.toArrow().to_batches():
        for topic, subtopic, payload in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            yield topic.encode(), None if subtopic is None else subtopic.encode(), payload or b""


def _payload(frame: DataFrame) -> Column:
    from pyspark.sql import functions as F

    if "payload" in frame.columns:
        kind = dict(frame.dtypes)["payload"]
        if kind in ("binary", "string"):
            return F.col("payload").cast("binary")
        nested = kind.startswith(("struct", "array", "map", "variant"))
        return (F.to_json("payload", TIMES) if nested else F.col("payload").cast("string")).cast("binary")
    return F.to_json(F.struct(*(F.col(f"`{name}`") for name in _told(frame.columns))), TIMES).cast("binary")


def _told(columns: list[str]) -> list[str]:
    """A result that still has all of the journal's columns never asked for them; one that has some, did."""
    if set(columns) >= BOOKKEEPING:
        return [name for name in columns if name not in BOOKKEEPING] or columns
    return columns


def _filled(frame: DataFrame, declaration: Declaration, text: str) -> Column:
    from pyspark.sql import functions as F

    template = Template(text)
    for name in template.columns:
        if name.split(".")[0] not in frame.columns:
            raise PipelineError(
                f"{declaration.where}: {declaration.name} publishes to {text!r}, but its result has no column "
                f"{name!r}; it has {', '.join(frame.columns)}."
            )
    pieces = [
        F.coalesce(F.col(piece).cast("string"), F.lit("null")) if is_column else F.lit(piece)
        for is_column, piece in template.parts
    ]
    return F.concat(*pieces)

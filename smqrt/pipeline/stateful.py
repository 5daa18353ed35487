"""Spark's transformWithState on rows, without pandas.

pyspark asks for pandas before it starts any function of this family, although the one that hands over rows uses none of
it, neither here nor in the workers. To install it and numpy for that alone would be a lot.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from smqrt.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, GroupedData
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor
    from pyspark.sql.types import StructType

_ASKING = "require_minimum_pandas_version"
_lock = threading.Lock()


def transform(
    grouped: GroupedData, processor: StatefulProcessor, schema: StructType, output_mode: str, time_mode: str
) -> DataFrame:
    """Returns what a processor makes of each group.

    Args:
        grouped: rows by key.
        processor: gets the rows of a key and keeps its state.
        schema: of the rows that it returns.
        output_mode: of the query: "Append" or "Update".
        time_mode: what its timers go by: "None", "ProcessingTime" or "EventTime".

    Raises:
        PipelineError: protobuf, over which Spark keeps state for Python, is missing.
    """
    try:
        import google.protobuf.descriptor  # type: ignore[import-untyped,unused-ignore]  # noqa: F401
    except ImportError:
        raise PipelineError(
            "Alerts need protobuf, which isn't installed: pip install 'smqrt[spark]' brings it."
        ) from None
    with _without_pandas():
        return grouped.transformWithState(processor, schema, output_mode, time_mode)


@contextmanager
def _without_pandas() -> Iterator[None]:
    from pyspark.sql.pandas import functions

    with _lock:
        asking = getattr(functions, _ASKING, None)
        setattr(functions, _ASKING, lambda: None)
        try:
            yield
        finally:
            setattr(functions, _ASKING, asking)

"""Spark's transformWithState on rows."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from smqrt.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, GroupedData
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor
    from pyspark.sql.types import StructType

NEEDED = {"pandas": "pandas", "google.protobuf.descriptor": "protobuf"}
"""What pyspark asks for before it keeps state for Python, although rows pass by without pandas: module, package."""


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
    for module, package in NEEDED.items():
        try:
            import_module(module)
        except ImportError:
            raise PipelineError(
                f"Alerts need {package}, which isn't installed: pip install 'smqrt[spark]' brings it."
            ) from None
    return grouped.transformWithState(processor, schema, output_mode, time_mode)

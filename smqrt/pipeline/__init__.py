"""Pipelines: plain functions from DataFrame to DataFrame, run by Spark on the journal of a hub.

    from smqrt.pipeline import source, publish, table, expect, alert, reference, stateful, view

    from smqrt.pipeline import read_journal         # for other Spark programs

The import is fast: pyspark and pyarrow are loaded when a pipeline runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smqrt.errors import PipelineError
from smqrt.pipeline.api import alert, expect, publish, reference, source, stateful, table, view

if TYPE_CHECKING:
    from smqrt.pipeline.history import read_journal

__all__ = [
    "PipelineError",
    "alert",
    "expect",
    "publish",
    "read_journal",
    "reference",
    "source",
    "stateful",
    "table",
    "view",
]


def __getattr__(name: str) -> Any:
    if name != "read_journal":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from smqrt.pipeline.history import read_journal

    return read_journal

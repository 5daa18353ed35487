"""Pipelines: plain functions from DataFrame to DataFrame, run by Spark on the journal of a hub.

    from smqrt.pipeline import source, publish, table, expect, alert, reference, stateful, view

Importing this is light: neither pyspark nor pyarrow is loaded before a pipeline runs.
"""

from __future__ import annotations

from smqrt.errors import PipelineError
from smqrt.pipeline.api import alert, expect, publish, reference, source, stateful, table, view

__all__ = ["PipelineError", "alert", "expect", "publish", "reference", "source", "stateful", "table", "view"]

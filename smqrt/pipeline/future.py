"""Rows that come from the future: one device whose clock is an hour ahead would move the watermark past all others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from smqrt.pipeline import intervals
from smqrt.pipeline.expectations import REASON

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

FUTURE = "future"
"""Column of the observation: how many rows there were."""

_STATE = "_smqrt_future"
_TIMES = ("timestamp", "timestamp_ntz")


def observation(source: str) -> str:
    """Returns under which name Spark's progress tells how many rows of a source come from the future."""
    return f"smqrt.future.{source}"


def split(frame: DataFrame, name: str, options: Mapping[str, Any]) -> tuple[DataFrame, DataFrame | None]:
    """Takes out the rows whose event time is more than `max_future` after the hub got them.

    In a stream it is compared with the time of reading too, as a hub's own clock may be wrong. Spark keeps that time
    with the micro-batch, which therefore gives the same when it is done again.

    Args:
        frame: rows with the column of the event time.
        name: of the source.
        options: of its declaration; "event_time", "max_future" and "recorded" are looked at.

    Returns:
        The other rows, and those with a column `reason`; None when nothing tells the time, or it isn't to be looked at.
    """
    from pyspark.sql import functions as F

    column, most = options["event_time"], options["max_future"]
    now = _now(frame, options)
    if most is None or now is None or dict(frame.dtypes)[column] not in _TIMES:
        return frame, None
    ahead = F.col(f"`{column}`").cast("timestamp") > now + F.expr(f"INTERVAL '{intervals.for_spark(most)}'")
    marked = frame.withColumn(_STATE, F.coalesce(ahead, F.lit(False)))
    reason = F.lit(f"{column} is more than {most} in the future").alias(REASON)
    future = marked.where(F.col(_STATE)).select(*frame.columns, reason)
    counted = marked.observe(observation(name), F.count_if(F.col(_STATE)).alias(FUTURE))
    return counted.where(~F.col(_STATE)).select(*frame.columns), future


def _now(frame: DataFrame, options: Mapping[str, Any]) -> Column | None:
    """Recorded rows, of a backfill or a test, are compared with their own `ts`."""
    from pyspark.sql import functions as F

    live = frame.isStreaming and not options.get("recorded")
    times = [F.col("ts")] if "ts" in frame.columns and (live or options["event_time"] != "ts") else []
    times += [F.current_timestamp()] if live else []
    return F.least(*times) if len(times) > 1 else times[0] if times else None

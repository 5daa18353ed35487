"""Rows that failed, as messages: what was published, where it came from and what is wrong with it.

Source: design of the pipeline §7 (help/pipeline-rules.md is the page for users).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING

from smqrt.pipeline.expectations import REASON

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_ORIGIN = ("topic", "subtopic", "uid", "node", "seq", "ts")
_JSON = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX", "ignoreNullFields": "true"}


def letters(rejected: Sequence[tuple[str, DataFrame]]) -> DataFrame:
    """Returns the dead letters of a declaration, ready to be published.

    Args:
        rejected: where rows go, and these rows with a column `reason`; not empty.

    Returns:
        A DataFrame with the columns `topic` and `payload`, one row for each that was rejected. `payload` is a JSON
        object with `reason`, and with the message's `topic`, `subtopic`, `uid`, `node`, `seq`, `ts` and `payload`
        (`payload_base64` when it is no UTF-8 text). Rows that aren't messages, such as those of an aggregate, give
        `row` instead: all their columns.
    """
    return reduce(lambda one, more: one.unionByName(more), (_letters(topic, frame) for topic, frame in rejected))


def _letters(topic: str, frame: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    letter = F.struct(F.col(REASON), *_told(frame))
    return frame.select(F.lit(topic).alias("topic"), F.to_json(letter, _JSON).alias("payload"))


def _told(frame: DataFrame) -> list[Column]:
    from pyspark.sql import functions as F

    if "payload" not in frame.columns:
        return [F.struct(*(F.col(f"`{name}`") for name in frame.columns if name != REASON)).alias("row")]
    text = F.col("payload").cast("string")
    valid = F.is_valid_utf8(text)
    payload = F.when(valid, text).alias("payload")
    coded = F.when(~valid, F.base64("payload")).alias("payload_base64")
    return [*(F.col(name) for name in _ORIGIN if name in frame.columns), payload, coded]

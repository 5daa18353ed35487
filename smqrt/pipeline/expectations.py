"""What rows must be like: `@expect` taken apart into the rows that go on, and the rows that fail.

A condition that gives NULL has failed: what isn't known to be good is not good. Each condition is counted by Spark
itself while the rows pass (`DataFrame.observe`), so counting costs no pass of its own and replayed micro-batches are
not counted twice in one progress.

Source: design of the pipeline §7 (help/pipeline-rules.md is the page for users).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any

from smqrt.errors import PipelineError
from smqrt.pipeline.api import Expectation
from smqrt.pipeline.failures import first_line

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

METRIC = "smqrt.expect."
"""How the name of an observed metric begins; the name of the declaration follows."""

REASON = "reason"
"""The column of rejected rows that says what they failed."""

_ROWS = "rows"
_SHOWN = 500


def split(
    frame: DataFrame, expectations: Sequence[Expectation], name: str = "rows", where: str = ""
) -> tuple[DataFrame, list[tuple[str, DataFrame]]]:
    """Returns the rows that meet every expectation, and those that go to dead-letter topics.

    Args:
        frame: what a declaration's function returned; batch or stream.
        expectations: of this declaration, in order.
        name: of the declaration; part of the metric's name, so different for each in one query.
        where: `file:line`, with which messages begin.

    Returns:
        The good rows, which Spark counts as they pass (see `counts`); a row that fails an expectation with
        on_fail="fail" ends the query when it is read, with a sentence that shows the row. And for each topic the rows
        that go there: to the topic of the first expectation they fail, with a column `reason` that tells all they fail.

    Raises:
        PipelineError: a condition can't be resolved on these columns, or is no condition.
    """
    for each in expectations:
        _resolvable(frame, each, where or name)
    if not expectations:
        return frame, []
    return _good(frame, expectations, name, where or name), _rejected(frame, expectations)


def met(expectation: Expectation) -> Column:
    """Returns the column that is true where a row meets an expectation, and false, never NULL, where it doesn't."""
    from pyspark.sql import functions as F

    return F.coalesce(F.expr(expectation.condition), F.lit(False))


def counts(observed: Mapping[str, Any]) -> dict[str, int]:
    """Returns how many rows failed each expectation in one micro-batch.

    Args:
        observed: `observedMetrics` of a streaming query's progress, or of `Observation.get` by name.

    Returns:
        The number by the expectation's name; of two declarations with the same condition the sum.
    """
    found: dict[str, int] = {}
    for metric, values in observed.items():
        if metric.startswith(METRIC):
            for name, failed in _named(values):
                found[name] = found.get(name, 0) + failed
    return found


def _good(frame: DataFrame, expectations: Sequence[Expectation], name: str, where: str) -> DataFrame:
    from pyspark.sql import functions as F

    good = frame.observe(METRIC + name, *_metrics(expectations))
    for each in expectations:
        if each.on_fail == "fail":
            stop = F.raise_error(_complaint(frame, each, name, where)).cast("boolean")
            good = good.filter(F.when(met(each), F.lit(True)).otherwise(stop))
    left_out = [met(each) for each in expectations if each.on_fail != "fail"]
    return good.filter(reduce(and_, left_out)) if left_out else good


def _rejected(frame: DataFrame, expectations: Sequence[Expectation]) -> list[tuple[str, DataFrame]]:
    from pyspark.sql import functions as F

    sends = [each for each in expectations if each.on_fail == "dead_letter"]
    topic = F.coalesce(*(F.when(~met(each), F.lit(each.topic)) for each in sends), F.lit(None))
    failed = (F.when(~met(each), F.lit(each.name)) for each in expectations)
    told = frame.withColumn(REASON, F.concat_ws("; ", *failed))
    return [(name, told.filter(topic == name)) for name in dict.fromkeys(each.topic for each in sends)]


def _metrics(expectations: Sequence[Expectation]) -> Iterable[Column]:
    from pyspark.sql import functions as F

    yield F.count(F.lit(1)).alias(_ROWS)
    for number, each in enumerate(expectations):
        yield F.count_if(~met(each)).alias(f"{number}:{each.name}")


def _named(values: Any) -> Iterable[tuple[str, int]]:
    pairs = values.asDict() if hasattr(values, "asDict") else dict(values)
    return ((key.partition(":")[2], int(failed or 0)) for key, failed in pairs.items() if key != _ROWS)


def _resolvable(frame: DataFrame, each: Expectation, where: str) -> None:
    """Asks Spark now, so that the sentence names the expectation and not a plan."""
    from pyspark.errors import AnalysisException, ParseException
    from pyspark.sql import functions as F

    try:
        kind = frame.select(F.expr(each.condition).alias("met")).schema[0].dataType.simpleString()
    except (ParseException, AnalysisException) as error:
        said = f"{where}: @expect({each.condition!r}) can't be checked: {first_line(error)}"
        raise PipelineError(f"{said} The columns are {', '.join(frame.columns)}.") from None
    if kind not in ("boolean", "void"):
        raise PipelineError(f"{where}: @expect({each.condition!r}) gives {kind}; write a condition, true or false.")


def _complaint(frame: DataFrame, each: Expectation, name: str, where: str) -> Column:
    from pyspark.sql import functions as F

    shown = [F.col(f"`{column}`") for column, kind in frame.dtypes if kind != "binary"]
    text = f"a row of {name} ({where}) fails @expect({each.condition!r}, on_fail='fail'): "
    return F.concat(F.lit(text), F.substring(F.to_json(F.struct(*shown)), 1, _SHOWN))

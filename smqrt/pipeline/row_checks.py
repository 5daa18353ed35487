"""Checks of rows: expectations, times in the future, JSON payloads. Some rows go on, the others become dead letters.

Spark itself counts what fails while the rows pass (`DataFrame.observe`), so counting costs no pass of its own and
replayed micro-batches are not counted twice in one progress.

Source: design of the pipeline §7 (help/pipeline-rules.md is the page for users).
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from smqrt.errors import ArgumentError, PipelineError
from smqrt.journal import payload_schema as types
from smqrt.journal.commit import MOST_PAYLOAD_BYTES
from smqrt.journal.record import COLUMNS
from smqrt.pipeline.api import Declaration, Expectation, spark_duration
from smqrt.pipeline.failures import first_line
from smqrt.pipeline.references import column, quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType


# ---- expectations: NULL has failed, since what isn't known to be good is not good

METRIC = "smqrt.expect."
"""How the name of an observed metric begins; the name of the declaration follows."""

REASON = "reason"
"""The column of rejected rows that says what they failed."""

_ROW_COUNT = "rows"
_SHOWN_CHARACTERS = 500


def split_expectations(
    frame: DataFrame, expectations: Sequence[Expectation], name: str = "rows", where: str = ""
) -> tuple[DataFrame, list[tuple[str, DataFrame]]]:
    """Return the rows that meet every expectation, and those that go to dead-letter topics.

    Args:
        frame: what a declaration's function returned; batch or stream.
        expectations: of this declaration, in order.
        name: of the declaration; part of the metric's name, so different for each in one query.
        where: `file:line`, with which messages begin.

    Returns:
        The good rows, which Spark counts as they pass (see `failed_counts`); a row that fails an expectation with
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
    """Return the column that is true where a row meets an expectation, and false, never NULL, where it doesn't."""
    from pyspark.sql import functions as F

    return F.coalesce(F.expr(expectation.condition), F.lit(False))


def failed_counts(observed: Mapping[str, object]) -> dict[str, int]:
    """Return how many rows failed each expectation in one micro-batch.

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

    yield F.count(F.lit(1)).alias(_ROW_COUNT)
    for number, each in enumerate(expectations):
        yield F.count_if(~met(each)).alias(f"{number}:{each.name}")


def _named(values: Any) -> Iterable[tuple[str, int]]:
    pairs = values.asDict() if hasattr(values, "asDict") else dict(values)
    return ((key.partition(":")[2], int(failed or 0)) for key, failed in pairs.items() if key != _ROW_COUNT)


def _resolvable(frame: DataFrame, each: Expectation, where: str) -> None:
    """Ask Spark now, so that the sentence names the expectation and not a plan."""
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

    shown = [column(name) for name, kind in frame.dtypes if kind != "binary"]
    text = f"a row of {name} ({where}) fails @expect({each.condition!r}, on_fail='fail'): "
    return F.concat(F.lit(text), F.substring(F.to_json(F.struct(*shown)), 1, _SHOWN_CHARACTERS))


# ---- dead letters

_ORIGIN = ("topic", "subtopic", "uid", "node", "seq", "ts")
_LETTER_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_LETTER_JSON = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX", "ignoreNullFields": "true"}


def dead_letters(rejected: Sequence[tuple[str, DataFrame]]) -> DataFrame:
    """Return the dead letters of a declaration, ready to be published.

    Args:
        rejected: where rows go, and these rows with a column `reason`; not empty.

    Returns:
        A DataFrame with the columns `topic` and `payload`, one row for each that was rejected. `payload` is a JSON
        object with `reason`, and with the message's `topic`, `subtopic`, `uid`, `node`, `seq`, `ts` and `payload`
        (`payload_base64` when it is no UTF-8 text). Rows that aren't messages, such as those of an aggregate, give
        `row` instead: all their columns.
    """
    return reduce(lambda one, more: one.unionByName(more), (_dead_letters(topic, frame) for topic, frame in rejected))


def _dead_letters(topic: str, frame: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    whole = F.to_json(F.struct(F.col(REASON), *_row_columns(frame)), _LETTER_JSON)
    letters = frame.select(F.struct(*(column(name) for name in frame.columns)).alias("row"), whole.alias("payload"))
    short = F.to_json(F.struct(*_short_columns(frame)), _LETTER_JSON)
    fits = F.octet_length("payload") <= MOST_PAYLOAD_BYTES
    return letters.select(F.lit(topic).alias("topic"), F.when(fits, F.col("payload")).otherwise(short).alias("payload"))


def _short_columns(frame: DataFrame) -> list[Column]:
    """Of a letter that no message can carry: node and seq tell where the payload is."""
    from pyspark.sql import functions as F

    def cut(name: str) -> Column:
        value = F.col(f"row.{name}")
        is_text = dict(frame.dtypes)[name] == "string"
        return (F.substring(value, 1, _SHOWN_CHARACTERS) if is_text else value).alias(name)

    known = [cut(name) for name in (REASON, *_ORIGIN) if name in frame.columns]
    if "payload" in frame.columns:
        return [*known, F.octet_length("row.payload").alias("payload_bytes")]
    return [*known, F.substring(F.to_json("row", _LETTER_JSON), 1, _SHOWN_CHARACTERS).alias("row_begin")]


def letter_text(origin: Mapping[str, object], payload: bytes) -> str:
    """Return one dead letter as `dead_letters` makes them.

    Args:
        origin: its reason, and where it comes from, without what is NULL.
        payload: of the message.
    """
    try:
        told = {"payload": payload.decode()}
    except UnicodeDecodeError:
        told = {"payload_base64": base64.b64encode(payload).decode()}
    whole = _LETTER_ENCODER.encode({**origin, **told})
    if len(whole.encode()) <= MOST_PAYLOAD_BYTES:
        return whole
    cut = {name: value[:_SHOWN_CHARACTERS] if isinstance(value, str) else value for name, value in origin.items()}
    return _LETTER_ENCODER.encode({**cut, "payload_bytes": len(payload)})


def _row_columns(frame: DataFrame) -> list[Column]:
    from pyspark.sql import functions as F

    if "payload" not in frame.columns:
        return [F.struct(*(column(name) for name in frame.columns if name != REASON)).alias("row")]
    text = F.col("payload").cast("string")
    valid = F.is_valid_utf8(text)
    payload = F.when(valid, text).alias("payload")
    coded = F.when(~valid, F.base64("payload")).alias("payload_base64")
    return [*(F.col(name) for name in _ORIGIN if name in frame.columns), payload, coded]


# ---- times in the future: one device whose clock is an hour ahead would move the watermark past all others

FUTURE = "future"
"""Column of the observation: how many rows there were."""

_AHEAD = "_smqrt_future"
_TIMES = ("timestamp", "timestamp_ntz")


def future_observation(source: str) -> str:
    """Return under which name Spark's progress tells how many rows of a source come from the future."""
    return f"smqrt.future.{source}"


def split_future(frame: DataFrame, source: Declaration) -> tuple[DataFrame, DataFrame | None]:
    """Take out the rows whose event time is more than `max_future` after the hub got them.

    In a stream it is compared with the time of reading too, as a hub's own clock may be wrong. Spark keeps that time
    with the micro-batch, which therefore gives the same when it is done again.

    Args:
        frame: rows with the column of the event time.
        source: its options "event_time", "max_future" and "recorded" are looked at.

    Returns:
        The other rows, and those with a column `reason`; None when nothing tells the time, or it isn't to be looked at.
    """
    from pyspark.sql import functions as F

    time, most = source.options["event_time"], source.options["max_future"]
    now = _now(frame, source.options)
    if most is None or now is None or dict(frame.dtypes)[time] not in _TIMES:
        return frame, None
    ahead = column(time).cast("timestamp") > now + F.expr(f"INTERVAL '{spark_duration(most)}'")
    marked = frame.withColumn(_AHEAD, F.coalesce(ahead, F.lit(False)))
    reason = F.lit(f"{time} is more than {most} in the future").alias(REASON)
    future = marked.where(F.col(_AHEAD)).select(*map(column, frame.columns), reason)
    counted = marked.observe(future_observation(source.name), F.count_if(F.col(_AHEAD)).alias(FUTURE))
    return counted.where(~F.col(_AHEAD)).select(*map(column, frame.columns)), future


def _now(frame: DataFrame, options: Mapping[str, Any]) -> Column | None:
    """Recorded rows, of a backfill or a test, are compared with their own `ts`."""
    from pyspark.sql import functions as F

    live = frame.isStreaming and not options.get("recorded")
    times = [F.col("ts")] if "ts" in frame.columns and (live or options["event_time"] != "ts") else []
    times += [F.current_timestamp()] if live else []
    return F.least(*times) if len(times) > 1 else times[0] if times else None


# ---- JSON payloads as columns

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
_GOOD, _WRONG, _BAD, _FAR = 0, 1, 2, 3
_STRICT = {"allowSingleQuotes": "false", "allowNonNumericNumbers": "false"}
"""Spark takes more for JSON than others do."""
_BEHIND = secrets.token_hex(8)
"""Stands behind a payload while that is looked at. Nobody outside knows it, so no payload can bring it."""
_TAKEN = frozenset(column.name for column in COLUMNS)


def json_observation(source: str) -> str:
    """Return under which name Spark's progress tells how many payloads of a source were bad."""
    return f"smqrt.json.{source}"


def compacted_ddl(ddl: str | None) -> str | None:
    """Return a DDL whose fields can be taken from compacted files instead of from the payload; None when not all can.

    Where a field is null in a file, the payload is looked at all the same: it may be of another type.
    """
    try:
        kinds = [kind for _, kind in types.parse_ddl(ddl or "").fields]
    except ArgumentError:
        return None
    return ddl if all(isinstance(kind, types.ScalarType) and kind.name in _ALIKE for kind in kinds) else None


def parse_json(frame: DataFrame, source: Declaration) -> tuple[DataFrame, DataFrame]:
    """Add the fields of the payload to each row.

    Args:
        frame: rows of the journal.
        source: its options "json" and "prefix" are looked at.

    Returns:
        The rows with a column for each field, and those whose payload is no JSON object, with a column `reason`.

    Raises:
        PipelineError: the DDL can't be read, or a field is called as a column of the journal is.
    """
    from pyspark.sql import functions as F

    options = source.options
    if options["json"] == VARIANT:
        return _variant(frame, source.name)
    names = _field_names(options["json"], source.where)
    _no_collision(names, options["prefix"], source.where)
    marked = _marked(frame, options["json"]).observe(
        json_observation(source.name),
        F.count_if(F.col(_STATE) >= _BAD).alias(BAD_JSON),
        F.count_if(F.col(_STATE) == _WRONG).alias(WRONG_TYPE),
    )
    fields = [F.col(f"{_JSON}.{quoted(field)}").alias(options["prefix"] + field) for field in names]
    columns = [column(name) for name in frame.columns if name != TYPED]
    good = marked.where(F.col(_STATE) < _BAD).select(*columns, *fields)
    reason = F.when(F.col(_STATE) == _BAD, "the payload is no JSON object").otherwise(FAR_TIME)
    bad = _marked(frame, options["json"]).where(F.col(_STATE) >= _BAD)
    return good, bad.select(*columns, reason.alias(REASON))


FAR_TIME = "a time is not within the years 1 to 9999; whole numbers are seconds since 1970"
"""The reason of rows with a time that most readers of tables, and Python, can't have."""
_BOUNDS = {kind: (f"{kind}'0001-01-02'", f"{kind}'9999-12-31'") for kind in ("timestamp", "timestamp_ntz", "date")}
"""A day less on each side, so that the time fits in each time zone."""


def is_far(value: Column, kind: DataType) -> Column | None:
    """Return whether there is a time outside the years 1 to 9999 in a column, however deep; None when it has none.

    Args:
        value: the column; kind: its type.
    """
    from pyspark.sql import functions as F

    def far(time: Column, name: str) -> Column | None:
        if name not in _BOUNDS:
            return None
        earliest, latest = map(F.expr, _BOUNDS[name])
        return F.coalesce((time < earliest) | (time >= latest), F.lit(False))

    return _any_inside(value, kind, far)


def is_no_text(value: Column, kind: DataType) -> Column | None:
    """Return whether there is a text in a column that is no UTF-8, as `is_far`."""
    from pyspark.sql import functions as F

    def no_text(text: Column, name: str) -> Column | None:
        return F.coalesce(~F.is_valid_utf8(text), F.lit(False)) if name == "string" else None

    return _any_inside(value, kind, no_text)


def _any_inside(value: Column, kind: DataType, wrong: Callable[[Column, str], Column | None]) -> Column | None:
    """Return whether `wrong` is true of a value or of what is in it; None where it is asked of nothing."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(kind, StructType):
        inner = [_any_inside(value.getField(field.name), field.dataType, wrong) for field in kind.fields]
        found = [each for each in inner if each is not None]
        return reduce(lambda one, more: one | more, found) if found else None
    if isinstance(kind, MapType):
        entries = ArrayType(StructType().add("key", kind.keyType).add("value", kind.valueType))
        return _any_inside(F.map_entries(value), entries, wrong)
    if isinstance(kind, ArrayType):
        item = kind.elementType
        if _any_inside(F.lit(None), item, wrong) is None:
            return None
        return F.coalesce(F.exists(value, lambda each: cast("Column", _any_inside(each, item, wrong))), F.lit(False))
    return wrong(value, kind.typeName())


NO_TEXT = "a text is no UTF-8"
_LONGEST_NAME = 255
"""Bytes of a folder's name, in nearly all file systems."""
FITS_TABLE = "fits the table"
"""How the status calls what rows of each table must meet."""


def split_unfit(frame: DataFrame, table: Declaration) -> tuple[DataFrame, list[tuple[str, DataFrame]]]:
    """Take out the rows that no table can keep: they would end the query again and again.

    Args:
        frame: what the function of a @table returned.
        table: its options "partition_by" and "dead_letter" are looked at.

    Returns:
        The other rows, and the dead letters, as `split_expectations`.
    """
    from pyspark.sql import functions as F

    by = set(table.options["partition_by"])
    reasons = [
        F.when(far, FAR_TIME)
        for field in frame.schema
        if (far := is_far(column(field.name), field.dataType)) is not None
    ]
    if table.options["format"] != "parquet":  # which others read, and can't when there is one such text in it
        texts = [is_no_text(column(field.name), field.dataType) for field in frame.schema]
        reasons += [F.when(wrong, NO_TEXT) for wrong in texts if wrong is not None]
    for field in frame.schema:
        if field.name in by and field.dataType.typeName() in ("string", "binary"):
            value = column(field.name).cast("string")
            told = f"the value of {field.name} in partition_by"
            reasons.append(F.when(~F.is_valid_utf8(value), f"{told} is no UTF-8 text"))
            reasons.append(F.when(_folder_bytes(field.name) > _LONGEST_NAME, f"{told} is too long for a folder's name"))
    topic = table.options.get("dead_letter")
    if not reasons:  # every row fits; the query of its dead letters has none then
        return frame, [(topic, frame.where(F.lit(False)).withColumn(REASON, F.lit("")))] if topic else []
    reason = F.concat_ws("; ", F.array_distinct(F.array_compact(F.array(*reasons))))
    marked = frame.withColumn(_STATE, reason)
    counts = F.count(F.lit(1)).alias(_ROW_COUNT), F.count_if(F.col(_STATE) != "").alias(f"0:{FITS_TABLE}")
    good = marked.observe(f"{METRIC}{table.name}.{_FIT}", *counts).where(F.col(_STATE) == "").drop(_STATE)
    return good, [(topic, marked.where(F.col(_STATE) != "").withColumnRenamed(_STATE, REASON))] if topic else []


_FIT = "fit"


def _folder_bytes(name: str) -> Column:
    """How long a folder's name becomes: NAME=VALUE, with other characters than letters and digits as %XX."""
    from pyspark.sql import functions as F

    text = F.make_valid_utf8(column(name).cast("string"))
    coded = F.replace(F.replace(F.url_encode(text), F.lit("+"), F.lit("%20")), F.lit("*"), F.lit("%2A"))
    return F.coalesce(F.octet_length(coded), F.lit(0)) + len(quote(name)) + len("_=")


def payload_variant() -> Column:
    """Return the payload as a VARIANT; null where it is no JSON."""
    from pyspark.sql import functions as F

    text = F.col("payload").cast("string")
    return F.when(_is_sound(text), F.try_parse_json(text))


def _is_sound(text: Column) -> Column:
    """Return whether a text is exactly one JSON value in UTF-8: Spark's parsers stop behind the first one."""
    from pyspark.sql import functions as F

    behind = F.concat(F.lit("["), text, F.lit(f',"{_BEHIND}"]'))
    found = F.from_json(behind, "array<string>", _STRICT)
    return F.is_valid_utf8(text) & F.coalesce((F.size(found) == 2) & (F.get(found, F.lit(1)) == _BEHIND), F.lit(False))


def _variant(frame: DataFrame, name: str) -> tuple[DataFrame, DataFrame]:
    """Add the payload as a VARIANT; what compaction has written is there already."""
    from pyspark.sql import functions as F

    if VARIANT not in frame.columns:
        frame = frame.withColumn(VARIANT, payload_variant())
    is_bad = F.col(VARIANT).isNull()
    counts = F.count_if(is_bad).alias(BAD_JSON), F.count_if(F.lit(False)).alias(WRONG_TYPE)
    good = frame.observe(json_observation(name), *counts).where(~is_bad)
    return good, frame.where(is_bad).drop(VARIANT).withColumn(REASON, F.lit("the payload is no JSON"))


def _field_names(ddl: str, where: str) -> list[str]:
    from pyspark.sql.types import StructType

    try:
        schema = cast(StructType, StructType.fromDDL(ddl))
    except Exception as error:
        raise PipelineError(
            f"{where}: json={ddl!r} isn't a list of fields such as 'device string, temp double': {first_line(error)}"
        ) from None
    return [str(field.name) for field in schema.fields]


def _no_collision(names: list[str], prefix: str, where: str) -> None:
    known: dict[str, str] = {}
    for name in names:
        if (other := known.setdefault(name.lower(), name)) != name:
            raise PipelineError(
                f"{where}: json= has the fields {other!r} and {name!r}, which Spark takes for one column; name one of "
                "them, or take both out of json='variant'."
            )
        if prefix + name in _TAKEN:
            raise PipelineError(
                f"{where}: the JSON field {name!r} is called as a column of the journal is; "
                f"with prefix='m_' it becomes the column {'m_' + name!r}."
            )


def _marked(frame: DataFrame, ddl: str) -> DataFrame:
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    text = F.col("payload").cast("string")
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT, **_STRICT}
    parsed = F.from_json(text, f"{ddl}, {_CORRUPT} string", options)
    kinds = cast("StructType", StructType.fromDDL(ddl))
    far = [each for each in (is_far(F.col(_JSON), kinds), _is_wrapped(text, kinds)) if each is not None]
    state = _state(text, reduce(lambda one, more: one | more, far, F.lit(False)))
    if TYPED in frame.columns:
        whole, known = _taken_whole(frame)
        parsed, state = F.when(whole, known).otherwise(parsed), F.when(whole, _GOOD).otherwise(state)
    return frame.withColumn(_JSON, parsed).withColumn(_STATE, state)


_MOST_SECONDS = (2**63 - 1) // 1_000_000
"""Of a time in Spark. It multiplies without looking, so more of them are any time, as epoch microseconds are."""


def _is_wrapped(text: Column, kinds: StructType) -> Column | None:
    """Return whether a whole number in a field of times is too large for Spark; None where there is no such field."""
    from pyspark.sql import functions as F

    numbers = _times_as_numbers(kinds)
    if numbers is None:
        return None
    found = _any_wrapped(F.from_json(text, cast("StructType", numbers), _STRICT), numbers)
    # Only payloads with such a number are parsed once more.
    return F.when(text.rlike("[0-9]{13}"), F.coalesce(found, F.lit(False))).otherwise(F.lit(False))


def _times_as_numbers(kind: DataType) -> DataType | None:
    """Return a type with nothing but the times of another one, which are whole numbers there; None without any."""
    from pyspark.sql.types import ArrayType, LongType, MapType, StructField, StructType, TimestampType

    if isinstance(kind, StructType):
        inner = [(field.name, _times_as_numbers(field.dataType)) for field in kind.fields]
        fields = [StructField(name, found) for name, found in inner if found is not None]
        return StructType(fields) if fields else None
    if isinstance(kind, MapType):
        value = _times_as_numbers(kind.valueType)
        return None if value is None else MapType(kind.keyType, value)
    if isinstance(kind, ArrayType):
        item = _times_as_numbers(kind.elementType)
        return None if item is None else ArrayType(item)
    return LongType() if isinstance(kind, TimestampType) else None


def _any_wrapped(value: Column, kind: DataType) -> Column:
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(kind, StructType):
        inner = [_any_wrapped(value.getField(field.name), field.dataType) for field in kind.fields]
        return reduce(lambda one, more: one | more, inner)
    if isinstance(kind, MapType):
        return _any_wrapped(F.map_values(value), ArrayType(kind.valueType))
    if isinstance(kind, ArrayType):
        item = kind.elementType
        return F.coalesce(F.exists(value, lambda each: _any_wrapped(each, item)), F.lit(False))
    return F.coalesce((value > _MOST_SECONDS) | (value < -_MOST_SECONDS), F.lit(False))


def _taken_whole(frame: DataFrame) -> tuple[Column, Column]:
    """Return in which rows the column `TYPED` has all fields, and what `from_json` would give there."""
    from pyspark.sql import functions as F

    kinds = cast("StructType", frame.schema[TYPED].dataType).fields
    fields = {kind.name: F.col(f"{TYPED}.{quoted(kind.name)}") for kind in kinds}
    sure = [_is_sure(fields[kind.name], kind.dataType.simpleString()) for kind in kinds]
    whole = reduce(lambda one, more: one & more, sure, F.octet_length("payload") <= _SHORT_BYTES)
    values = [field.alias(name) for name, field in fields.items()]
    return whole, F.struct(*values, F.lit(None).cast("string").alias(_CORRUPT))


def _is_sure(field: Column, kind: str) -> Column:
    """Return whether Spark finds the same value in the payload."""
    from pyspark.sql import functions as F

    if kind == "string":
        return field.isNotNull() & ~F.substring(field, 1, 1).isin(list(_MADE_OF_OTHERS))
    if kind == "double":
        return (field != 0) | (field.cast("string") == "0.0")  # no -0.0, which Spark makes of "-0.0" but not of "-0"
    return field.isNotNull()


def _state(text: Column, far: Column) -> Column:
    from pyspark.sql import functions as F

    row = F.col(_JSON)
    is_object = F.ltrim(text, F.lit(" \t\r\n")).startswith("{")
    # Most payloads have one closing brace, and end with it: nothing can stand behind the object.
    is_whole = F.is_valid_utf8(text) & (F.instr(text, "}") == F.length(text))
    return (
        F.when(row.isNull() | ~is_object, _BAD)
        .when(row[_CORRUPT].isNull() & is_whole, F.when(far, _FAR).otherwise(_GOOD))
        # Only now, as it parses once more: something behind it, a field of another type, or no JSON at all?
        .when(~_is_sound(text), _BAD)
        .when(far, _FAR)
        .when(row[_CORRUPT].isNull(), _GOOD)
        .otherwise(_WRONG)
    )

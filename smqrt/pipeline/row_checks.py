"""Checks of rows: expectations, times in the future, JSON payloads. Rejected rows become dead letters.

Spark counts the failures while it computes the rows (`DataFrame.observe`), without a separate job.

(help: pipeline-rules)
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from smqrt.errors import ArgumentError, PipelineError
from smqrt.journal import payload_schema
from smqrt.journal.commit import MAX_PAYLOAD_BYTES
from smqrt.journal.record import COLUMNS
from smqrt.pipeline.api import Declaration, Expectation, spark_duration
from smqrt.pipeline.discover import column, quoted
from smqrt.pipeline.failures import first_line

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType


# ---- Expectations. A condition that is NULL counts as a failure.

METRIC = "smqrt.expect."
"""Prefix of an observed metric's name, before the name of the declaration."""

REASON = "reason"
"""The column of rejected rows with the failed rules."""

_ROW_COUNT = "rows"
_SHOWN_CHARACTERS = 500


def split_expectations(
    frame: DataFrame, expectations: Sequence[Expectation], name: str = "rows", where: str = ""
) -> tuple[DataFrame, list[tuple[str, DataFrame]]]:
    """Return the rows that meet every expectation, and those that go to dead-letter topics.

    Args:
        frame: the result of a declaration's function; batch or stream.
        expectations: the expectations of this declaration, in order.
        name: the name of the declaration, a part of the metric's name, which must be unique in a query.
        where: `file:line`, the start of error messages.

    Returns:
        The valid rows, and pairs of a topic and its rejected rows. Spark counts the rows (see `failed_counts`). A row
        that fails an expectation with on_fail="fail" ends the query with a message that shows the row. A rejected row
        goes to the topic of the first expectation that it fails; its column `reason` lists all failed expectations.

    Raises:
        PipelineError: a condition can't be resolved on these columns, or is not a condition.
    """
    from pyspark.sql import functions as F

    where = where or name
    for each in expectations:
        _check_condition(frame, each, where)
    if not expectations:
        return frame, []
    metrics = [F.count(F.lit(1)).alias(_ROW_COUNT)]
    metrics += [F.count_if(~met(each)).alias(f"{number}:{each.name}") for number, each in enumerate(expectations)]
    good = frame.observe(METRIC + name, *metrics)  # before the filters, which remove the failing rows
    for each in expectations:
        if each.on_fail == "fail":
            shown = [column(name) for name, kind in frame.dtypes if kind != "binary"]
            text = F.lit(f"a row of {name} ({where}) fails @expect({each.condition!r}, on_fail='fail'): ")
            message = F.concat(text, F.substring(F.to_json(F.struct(*shown)), 1, _SHOWN_CHARACTERS))
            good = good.filter(F.when(met(each), F.lit(True)).otherwise(F.raise_error(message).cast("boolean")))
    kept = [met(each) for each in expectations if each.on_fail != "fail"]
    good = good.filter(reduce(and_, kept)) if kept else good
    letters = [each for each in expectations if each.on_fail == "dead_letter"]
    topic = F.coalesce(*(F.when(~met(each), F.lit(each.topic)) for each in letters), F.lit(None))
    failed = (F.when(~met(each), F.lit(each.name)) for each in expectations)
    reasons = frame.withColumn(REASON, F.concat_ws("; ", *failed))
    return good, [(name, reasons.filter(topic == name)) for name in dict.fromkeys(each.topic for each in letters)]


def met(expectation: Expectation) -> Column:
    """Return the column that is true where a row meets an expectation, and false, never NULL, elsewhere."""
    from pyspark.sql import functions as F

    return F.coalesce(F.expr(expectation.condition), F.lit(False))


def failed_counts(observed: Mapping[str, object]) -> dict[str, int]:
    """Return how many rows failed each expectation in one micro-batch.

    Args:
        observed: `observedMetrics` of a streaming query's progress, or of `Observation.get` by name.

    Returns:
        The number by the expectation's name; for two declarations with the same condition, the sum.
    """
    found: dict[str, int] = {}
    for metric, values in observed.items():
        if metric.startswith(METRIC):
            pairs = values.asDict() if hasattr(values, "asDict") else dict(cast("Any", values))
            for key, failed in pairs.items():
                if key != _ROW_COUNT:
                    name = key.partition(":")[2]
                    found[name] = found.get(name, 0) + int(failed or 0)
    return found


def _check_condition(frame: DataFrame, each: Expectation, where: str) -> None:
    """Check a condition with Spark, so that the error has the expectation instead of a plan."""
    from pyspark.errors import AnalysisException, ParseException
    from pyspark.sql import functions as F

    try:
        kind = frame.select(F.expr(each.condition).alias("met")).schema[0].dataType.simpleString()
    except (ParseException, AnalysisException) as error:
        message = f"{where}: @expect({each.condition!r}) can't be checked: {first_line(error)}"
        raise PipelineError(f"{message} The columns are {', '.join(frame.columns)}.") from None
    if kind not in ("boolean", "void"):
        raise PipelineError(f"{where}: @expect({each.condition!r}) returns {kind}; write a condition, true or false.")


# ---- Dead letters

_ORIGIN = ("topic", "subtopic", "uid", "node", "seq", "ts")
_LETTER_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_LETTER_JSON = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX", "ignoreNullFields": "true"}


def dead_letters(rejected: Sequence[tuple[str, DataFrame]]) -> DataFrame:
    """Return the dead letters of a declaration.

    Args:
        rejected: pairs of a topic and rows with a column `reason`; not empty.

    Returns:
        A DataFrame with the columns `topic` and `payload`, one row for each rejected row. `payload` is a JSON object
        with `reason`, and with the message's `topic`, `subtopic`, `uid`, `node`, `seq`, `ts` and `payload`
        (`payload_base64` when it is not UTF-8). Rows without a payload, such as those of an aggregate, have all their
        columns in `row` instead.
    """
    return reduce(lambda one, more: one.unionByName(more), (_dead_letters(topic, frame) for topic, frame in rejected))


def _dead_letters(topic: str, frame: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    def cut(name: str) -> Column:
        value = F.col(f"row.{name}")
        is_text = dict(frame.dtypes)[name] == "string"
        return (F.substring(value, 1, _SHOWN_CHARACTERS) if is_text else value).alias(name)

    # The payload may not fit into a message. The short letter then has its size; node and seq identify the row.
    short = [cut(name) for name in (REASON, *_ORIGIN) if name in frame.columns]
    if "payload" in frame.columns:
        text = F.col("payload").cast("string")
        valid = F.is_valid_utf8(text)
        whole = [F.col(name) for name in _ORIGIN if name in frame.columns]
        whole.append(F.when(valid, text).alias("payload"))
        whole.append(F.when(~valid, F.base64("payload")).alias("payload_base64"))
        short.append(F.octet_length("row.payload").alias("payload_bytes"))
    else:
        whole = [F.struct(*(column(name) for name in frame.columns if name != REASON)).alias("row")]
        short.append(F.substring(F.to_json("row", _LETTER_JSON), 1, _SHOWN_CHARACTERS).alias("row_begin"))
    letter = F.to_json(F.struct(F.col(REASON), *whole), _LETTER_JSON).alias("payload")
    letters = frame.select(F.struct(*(column(name) for name in frame.columns)).alias("row"), letter)
    fits = F.octet_length("payload") <= MAX_PAYLOAD_BYTES
    payload = F.when(fits, F.col("payload")).otherwise(F.to_json(F.struct(*short), _LETTER_JSON))
    return letters.select(F.lit(topic).alias("topic"), payload.alias("payload"))


def letter_text(origin: Mapping[str, object], payload: bytes) -> str:
    """Return one dead letter in the format of `dead_letters`.

    Args:
        origin: its reason and origin, without NULLs.
        payload: the payload of the message.
    """
    try:
        fields = {"payload": payload.decode()}
    except UnicodeDecodeError:
        fields = {"payload_base64": base64.b64encode(payload).decode()}
    whole = _LETTER_ENCODER.encode({**origin, **fields})
    if len(whole.encode()) <= MAX_PAYLOAD_BYTES:
        return whole
    cut = {name: value[:_SHOWN_CHARACTERS] if isinstance(value, str) else value for name, value in origin.items()}
    return _LETTER_ENCODER.encode({**cut, "payload_bytes": len(payload)})


# ---- Times in the future: a device whose clock is an hour ahead would move the watermark past all other messages

FUTURE = "future"
"""Column of the observation: the number of these rows."""

_IS_FUTURE = "_smqrt_future"
_TIMES = ("timestamp", "timestamp_ntz")


def future_observation(source: str) -> str:
    """Return the name of the observation in Spark's progress that counts rows of a source from the future."""
    return f"smqrt.future.{source}"


def split_future(frame: DataFrame, source: Declaration) -> tuple[DataFrame, DataFrame | None]:
    """Separate the rows whose event time is more than `max_future` after the hub received them.

    In a stream the event time is also compared with the time of reading, because a hub's clock may be wrong. Spark
    stores the time of reading with the micro-batch, so that a repetition has the same result.

    Args:
        frame: rows with the column of the event time.
        source: a source with the options "event_time", "max_future" and optionally "recorded".

    Returns:
        The other rows, and the separated rows with a column `reason`; None when there is no time for the comparison.
    """
    from pyspark.sql import functions as F

    options = source.options
    time, limit = options["event_time"], options["max_future"]
    # The recorded rows of a backfill or a test are only compared with their `ts`.
    is_live = frame.isStreaming and not options.get("recorded")
    times = [F.col("ts")] if "ts" in frame.columns and (is_live or time != "ts") else []
    times += [F.current_timestamp()] if is_live else []
    if limit is None or not times or dict(frame.dtypes)[time] not in _TIMES:
        return frame, None
    now = F.least(*times) if len(times) > 1 else times[0]
    is_future = column(time).cast("timestamp") > now + F.expr(f"INTERVAL '{spark_duration(limit)}'")
    marked = frame.withColumn(_IS_FUTURE, F.coalesce(is_future, F.lit(False)))
    reason = F.lit(f"{time} is more than {limit} in the future").alias(REASON)
    future = marked.where(F.col(_IS_FUTURE)).select(*map(column, frame.columns), reason)
    counted = marked.observe(future_observation(source.name), F.count_if(F.col(_IS_FUTURE)).alias(FUTURE))
    return counted.where(~F.col(_IS_FUTURE)).select(*map(column, frame.columns)), future


# ---- JSON payloads as columns

BAD_JSON, WRONG_TYPE = "bad_json", "wrong_type"
"""Columns of the observation: payloads that are not a JSON object, and rows with a field of another type."""

TYPED = "_smqrt_typed"
"""A column of a batch: the fields that compaction has written beside the payload; NULL elsewhere."""
VARIANT = "variant"
"""Value of the option "json" that selects the whole payload, in a column of this name, instead of fields."""
_SAME_TYPES = frozenset(("boolean", "tinyint", "smallint", "int", "bigint", "double", "string"))
"""Types for which compaction and Spark parse the same value from a payload."""
_SHORT_BYTES = 1000
"""Longer payloads are always parsed, because Spark rejects very long numbers and very deep nesting as JSON."""
_CONVERTED_START = '0123456789-[{"IN'
"""First characters of texts that may be converted numbers, lists or objects. Spark writes some of them differently."""

_JSON, _CORRUPT, _STATE = "_smqrt_json", "_smqrt_corrupt", "_smqrt_state"
_GOOD, _WRONG, _BAD, _FAR = 0, 1, 2, 3
_STRICT = {"allowSingleQuotes": "false", "allowNonNumericNumbers": "false"}
"""Spark accepts more than standard JSON by default."""
_SENTINEL = secrets.token_hex(8)
"""Appended to a payload for its check. It is random, so that clients can't put it into payloads."""
_HIDDEN_COLUMNS = frozenset({"qos", "retain", "properties"})
"""Columns of the journal that JSON fields with these names replace: sources with such fields are older than they."""
_JOURNAL_COLUMNS = frozenset(column.name for column in COLUMNS) - _HIDDEN_COLUMNS


def json_observation(source: str) -> str:
    """Return the name of the observation in Spark's progress that counts invalid payloads of a source."""
    return f"smqrt.json.{source}"


def compacted_ddl(ddl: str | None) -> str | None:
    """Return the DDL if all its fields can be read from compacted files instead of the payload, else None.

    If a field is NULL in a file, the payload is parsed too, because the field may have another type.
    """
    try:
        kinds = [kind for _, kind in payload_schema.parse_ddl(ddl or "").fields]
    except ArgumentError:
        return None
    return (
        ddl if all(isinstance(kind, payload_schema.ScalarType) and kind.name in _SAME_TYPES for kind in kinds) else None
    )


def parse_json(frame: DataFrame, source: Declaration) -> tuple[DataFrame, DataFrame]:
    """Add the fields of the payload to each row.

    Args:
        frame: rows of the journal.
        source: a source with the options "json" and "prefix".

    Returns:
        The rows with a column for each field, and those whose payload is not a JSON object, with a column `reason`.

    Raises:
        PipelineError: the DDL can't be read, or a field has the name of a column of the journal.
    """
    from pyspark.sql import functions as F

    options = source.options
    if options["json"] == VARIANT:
        if VARIANT not in frame.columns:  # compaction may have written it
            frame = frame.withColumn(VARIANT, payload_variant())
        is_bad = F.col(VARIANT).isNull()
        counts = F.count_if(is_bad).alias(BAD_JSON), F.count_if(F.lit(False)).alias(WRONG_TYPE)
        good = frame.observe(json_observation(source.name), *counts).where(~is_bad)
        return good, frame.where(is_bad).drop(VARIANT).withColumn(REASON, F.lit("the payload is not JSON"))
    names = _field_names(options["json"], options["prefix"], source.where)
    marked = _marked(frame, options["json"]).observe(
        json_observation(source.name),
        F.count_if(F.col(_STATE) >= _BAD).alias(BAD_JSON),
        F.count_if(F.col(_STATE) == _WRONG).alias(WRONG_TYPE),
    )
    fields = [F.col(f"{_JSON}.{quoted(field)}").alias(options["prefix"] + field) for field in names]
    columns = [column(name) for name in frame.columns if name != TYPED]
    replaced = _HIDDEN_COLUMNS.intersection(options["prefix"] + name for name in names)
    kept = [column(name) for name in frame.columns if name != TYPED and name not in replaced]
    good = marked.where(F.col(_STATE) < _BAD).select(*kept, *fields)
    reason = F.when(F.col(_STATE) == _BAD, "the payload is not a JSON object").otherwise(FAR_TIME)
    bad = _marked(frame, options["json"]).where(F.col(_STATE) >= _BAD)
    return good, bad.select(*columns, reason.alias(REASON))


FAR_TIME = "a time is not within the years 1 to 9999; whole numbers are seconds since 1970"
"""The reason for rows with a time that Python and most readers of tables don't support."""
_BOUNDS = {kind: (f"{kind}'0001-01-02'", f"{kind}'9999-12-31'") for kind in ("timestamp", "timestamp_ntz", "date")}
"""The bounds are one day inside the limits, so that a time is valid in every time zone."""


def is_far(value: Column, kind: DataType) -> Column | None:
    """Return whether a column has a time outside the years 1 to 9999, even nested; None for a type without times.

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
    """Return whether a string in a column is not UTF-8; arguments as for `is_far`."""
    from pyspark.sql import functions as F

    def no_text(text: Column, name: str) -> Column | None:
        return F.coalesce(~F.is_valid_utf8(text), F.lit(False)) if name == "string" else None

    return _any_inside(value, kind, no_text)


def _any_inside(value: Column, kind: DataType, wrong: Callable[[Column, str], Column | None]) -> Column | None:
    """Return whether `wrong` is true of a value or of a value nested in it; None when `wrong` applies to none."""
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


NO_TEXT = "a string is not UTF-8"
_MAX_NAME_BYTES = 255
"""The limit of a folder's name in nearly all file systems."""
FITS_TABLE = "fits the table"
"""The name in the status of the rule that rows of each table must meet."""


def split_unfit(frame: DataFrame, table: Declaration) -> tuple[DataFrame, list[tuple[str, DataFrame]]]:
    """Separate the rows that a table can't store. Each of them would end the query at every attempt.

    Args:
        frame: the result of the function of a @table.
        table: a table with the options "partition_by" and "dead_letter".

    Returns:
        The other rows, and the dead letters as returned by `split_expectations`.
    """
    from pyspark.sql import functions as F

    by = set(table.options["partition_by"])
    reasons = [
        F.when(far, FAR_TIME)
        for field in frame.schema
        if (far := is_far(column(field.name), field.dataType)) is not None
    ]
    if table.options["format"] != "parquet":  # other programs can't read a Delta or Iceberg table with such a string
        texts = [is_no_text(column(field.name), field.dataType) for field in frame.schema]
        reasons += [F.when(wrong, NO_TEXT) for wrong in texts if wrong is not None]
    for field in frame.schema:
        if field.name in by and field.dataType.typeName() in ("string", "binary"):
            value = column(field.name).cast("string")
            subject = f"the value of {field.name} in partition_by"
            # The name of the folder is NAME=VALUE, with characters other than letters and digits as %XX.
            coded = F.replace(F.url_encode(F.make_valid_utf8(value)), F.lit("+"), F.lit("%20"))
            value_bytes = F.coalesce(F.octet_length(F.replace(coded, F.lit("*"), F.lit("%2A"))), F.lit(0))
            is_long = value_bytes + len(quote(field.name)) + len("_=") > _MAX_NAME_BYTES
            reasons.append(F.when(~F.is_valid_utf8(value), f"{subject} is not UTF-8 text"))
            reasons.append(F.when(is_long, f"{subject} is too long for a folder's name"))
    topic = table.options.get("dead_letter")
    if not reasons:  # all rows fit, so the dead letters are empty
        return frame, [(topic, frame.where(F.lit(False)).withColumn(REASON, F.lit("")))] if topic else []
    reason = F.concat_ws("; ", F.array_distinct(F.array_compact(F.array(*reasons))))
    marked = frame.withColumn(_STATE, reason)
    counts = F.count(F.lit(1)).alias(_ROW_COUNT), F.count_if(F.col(_STATE) != "").alias(f"0:{FITS_TABLE}")
    good = marked.observe(f"{METRIC}{table.name}.fit", *counts).where(F.col(_STATE) == "").drop(_STATE)
    return good, [(topic, marked.where(F.col(_STATE) != "").withColumnRenamed(_STATE, REASON))] if topic else []


def payload_variant() -> Column:
    """Return the payload as a VARIANT; NULL where it is not JSON."""
    from pyspark.sql import functions as F

    text = F.col("payload").cast("string")
    return F.when(_is_sound(text), F.try_parse_json(text))


def _is_sound(text: Column) -> Column:
    """Return whether a string is exactly one JSON value in UTF-8; Spark's parsers ignore text after the first value."""
    from pyspark.sql import functions as F

    extended = F.concat(F.lit("["), text, F.lit(f',"{_SENTINEL}"]'))
    found = F.from_json(extended, "array<string>", _STRICT)
    is_pair = (F.size(found) == 2) & (F.get(found, F.lit(1)) == _SENTINEL)
    return F.is_valid_utf8(text) & F.coalesce(is_pair, F.lit(False))


def _field_names(ddl: str, prefix: str, where: str) -> list[str]:
    from pyspark.sql.types import StructType

    try:
        schema = cast(StructType, StructType.fromDDL(ddl))
    except Exception as error:
        raise PipelineError(
            f"{where}: json={ddl!r} isn't a list of fields such as 'device string, temp double': {first_line(error)}"
        ) from None
    names = [str(field.name) for field in schema.fields]
    known: dict[str, str] = {}
    for name in names:
        if (other := known.setdefault(name.lower(), name)) != name:
            raise PipelineError(
                f"{where}: json= has the fields {other!r} and {name!r}, which are one column for Spark; keep one of "
                "them, or read both from json='variant'."
            )
        if prefix + name in _JOURNAL_COLUMNS:
            raise PipelineError(
                f"{where}: the JSON field {name!r} has the name of a column of the journal; "
                f"with prefix='m_' it becomes the column {'m_' + name!r}."
            )
    return names


def _marked(frame: DataFrame, ddl: str) -> DataFrame:
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    text = F.col("payload").cast("string")
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT, **_STRICT}
    parsed = F.from_json(text, f"{ddl}, {_CORRUPT} string", options)
    kinds = cast("StructType", StructType.fromDDL(ddl))
    far = [] if (is_outside := is_far(F.col(_JSON), kinds)) is None else [is_outside]
    if (numbers := _times_as_numbers(kinds)) is not None:
        # Only payloads with a number that may be too large are parsed a second time.
        overflow = _any_overflow(F.from_json(text, cast("StructType", numbers), _STRICT), numbers)
        is_overflow = F.when(text.rlike("[0-9]{13}"), F.coalesce(overflow, F.lit(False))).otherwise(F.lit(False))
        far.append(is_overflow)
    state = _state(text, reduce(lambda one, more: one | more, far, F.lit(False)))
    if TYPED in frame.columns:
        whole, known = _compacted_fields(frame)
        parsed, state = F.when(whole, known).otherwise(parsed), F.when(whole, _GOOD).otherwise(state)
    return frame.withColumn(_JSON, parsed).withColumn(_STATE, state)


_MAX_SECONDS = (2**63 - 1) // 1_000_000
"""The maximum of a time in seconds. Spark does not check for overflow, for example of microseconds used as seconds."""


def _times_as_numbers(kind: DataType) -> DataType | None:
    """Return a type with only the times of another type, as integers; None without times."""
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


def _any_overflow(value: Column, kind: DataType) -> Column:
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(kind, StructType):
        inner = [_any_overflow(value.getField(field.name), field.dataType) for field in kind.fields]
        return reduce(lambda one, more: one | more, inner)
    if isinstance(kind, MapType):
        return _any_overflow(F.map_values(value), ArrayType(kind.valueType))
    if isinstance(kind, ArrayType):
        item = kind.elementType
        return F.coalesce(F.exists(value, lambda each: _any_overflow(each, item)), F.lit(False))
    return F.coalesce((value > _MAX_SECONDS) | (value < -_MAX_SECONDS), F.lit(False))


def _compacted_fields(frame: DataFrame) -> tuple[Column, Column]:
    """Return in which rows the column `TYPED` has all fields, and their struct as `from_json` would return it."""
    from pyspark.sql import functions as F

    whole, fields = F.octet_length("payload") <= _SHORT_BYTES, []
    for kind in cast("StructType", frame.schema[TYPED].dataType).fields:
        field, type_name = F.col(f"{TYPED}.{quoted(kind.name)}"), kind.dataType.simpleString()
        # Only values that Spark would certainly parse from the payload too.
        is_same = field.isNotNull()
        if type_name == "string":
            is_same = is_same & ~F.substring(field, 1, 1).isin(list(_CONVERTED_START))
        elif type_name == "double":
            is_same = (field != 0) | (field.cast("string") == "0.0")  # not -0.0: Spark reads "-0" as 0.0
        whole = whole & is_same
        fields.append(field.alias(kind.name))
    return whole, F.struct(*fields, F.lit(None).cast("string").alias(_CORRUPT))


def _state(text: Column, far: Column) -> Column:
    from pyspark.sql import functions as F

    row = F.col(_JSON)
    is_object = F.ltrim(text, F.lit(" \t\r\n")).startswith("{")
    # Most payloads have one closing brace, at the end, so that no text follows the object.
    is_whole = F.is_valid_utf8(text) & (F.instr(text, "}") == F.length(text))
    return (
        F.when(row.isNull() | ~is_object, _BAD)
        .when(row[_CORRUPT].isNull() & is_whole, F.when(far, _FAR).otherwise(_GOOD))
        # Last, because it parses again, to distinguish trailing text, a field of another type, and invalid JSON.
        .when(~_is_sound(text), _BAD)
        .when(far, _FAR)
        .when(row[_CORRUPT].isNull(), _GOOD)
        .otherwise(_WRONG)
    )

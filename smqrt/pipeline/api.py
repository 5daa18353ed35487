"""Decorators of pipeline files, and the `Declaration` objects that they create.

A decorated function remains a plain function, so it can be called and tested with any DataFrame. The decorator stores
its options in an attribute of the function, which `declaration_of(function)` returns. `smqrt.pipeline.discover`
collects the declarations of a folder.

(help: pipelines)
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from smqrt.errors import ArgumentError, PipelineError
from smqrt.settings.option_types import parse_duration, parse_size

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor


# ---- Durations such as "200 ms", and topic templates such as "agg/{device}".


def milliseconds(text: object, name: str = "") -> int:
    """Return a duration in milliseconds: 200 for "200 ms", 90000 for "1.5 minutes".

    Args:
        text: the duration.
        name: prefix of the error message, such as "--trigger ".

    Raises:
        PipelineError: `text` is not a duration.
    """
    try:
        return round(parse_duration(str(text)) * 1000)
    except ArgumentError as error:
        raise PipelineError(f"{name}{error}.") from None


def spark_duration(text: str) -> str:
    """Convert a duration to the syntax of Spark, whose parser does not accept "ms".

    Raises:
        PipelineError: `text` is not a duration.
    """
    return f"{milliseconds(text)} milliseconds"


_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]|[^{}]+")
"""Matches, in this order: an escaped brace, a column in braces, a brace without its counterpart, literal text."""


class Template:
    """A string with placeholders: `{column}` is a column of the row; `{{` and `}}` are literal braces.

    Args:
        text: such as "agg/{device}" or "agg/{window.start}".

    Attributes:
        text: the argument.
        parts: pairs (is a column, text or column name), in order.

    Raises:
        PipelineError: a brace has no counterpart, or a pair of braces is empty.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.parts: list[tuple[bool, str]] = []
        for match in _PART.finditer(text):
            piece, column = match[0], match[1]
            if piece in ("{", "}") or (column is not None and not column.strip()):
                raise PipelineError(f"{text!r} has a brace without a column; write {{column}}, or {{{{ for a brace.")
            if column is not None:
                self.parts.append((True, column.strip()))
            else:
                self.parts.append((False, {"{{": "{", "}}": "}"}.get(piece, piece)))

    @property
    def columns(self) -> list[str]:
        """The columns that a row must have, in order."""
        return [piece for is_column, piece in self.parts if is_column]


# ---- Checks of options. Each takes the `file:line` of a decorator, an option's name and its value; each returns the
# value to store, or raises PipelineError.

Check = Callable[[str, str, object], object]


def optional(check: Check) -> Check:
    """Return a check that also accepts None."""
    return lambda where, name, value: None if value is None else check(where, name, value)


def choice(*choices: str) -> Check:
    """Return a check that accepts only the given words."""

    def check(where: str, name: str, value: object) -> str:
        if value not in choices:
            raise PipelineError(f"{where}: {name}={value!r} must be one of {', '.join(map(repr, choices))}.")
        return str(value)

    return check


def string(where: str, name: str, value: object) -> str:
    """Check for a string."""
    if not isinstance(value, str):
        raise PipelineError(f"{where}: {name}={value!r} must be a string.")
    return value


def text(where: str, name: str, value: object) -> str:
    """Check for a non-empty string."""
    if not isinstance(value, str) or not value:
        raise PipelineError(f"{where}: {name}={value!r} must be a string that is not empty.")
    return value


def texts(where: str, name: str, value: object) -> tuple[str, ...]:
    """Check for one non-empty string or a list of non-empty strings; return a tuple."""
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, Sequence) or not all(isinstance(item, str) and item for item in values):
        raise PipelineError(f"{where}: {name}={value!r} must be a string or a list of strings.")
    return tuple(values)


def flag(where: str, name: str, value: object) -> bool:
    """Check for True or False."""
    if not isinstance(value, bool):
        raise PipelineError(f"{where}: {name}={value!r} must be True or False.")
    return value


def count(where: str, name: str, value: object) -> int:
    """Check for an integer above 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:  # True is an instance of int
        raise PipelineError(f"{where}: {name}={value!r} must be an integer above 0.")
    return value


def size(where: str, name: str, value: object) -> int:
    """Check for a size such as "64MB" or a number of bytes; return bytes."""
    try:
        return count(where, name, parse_size(value))
    except ArgumentError as error:
        raise PipelineError(f"{where}: {name}={value!r}: {error}") from None


def duration(where: str, name: str, value: object) -> str:
    """Check for a duration; return it unchanged."""
    try:
        milliseconds(value)
    except PipelineError as error:
        raise PipelineError(f"{where}: {name}: {error}") from None
    return str(value)


def topic(where: str, name: str, value: object) -> str:
    """Check for the text of a `Template`."""
    try:
        return Template(text(where, name, value)).text
    except PipelineError as error:
        raise PipelineError(f"{where}: {name}: {error}") from None


def on_error(where: str, name: str, value: object) -> str:
    """Check for "fail", "drop", "dead_letter" or "dead_letter:TOPIC"."""
    action, colon, rest = value.partition(":") if isinstance(value, str) else ("", "", "")
    if action not in ("fail", "drop", "dead_letter") or (colon and (action != "dead_letter" or not rest)):
        raise PipelineError(f"{where}: {name}={value!r} must be 'fail', 'drop', 'dead_letter' or 'dead_letter:TOPIC'.")
    return str(value)


OPTION_CHECKS: dict[str, dict[str, Check]] = {
    "source": {
        "topics": texts,
        "exclude": texts,
        "json": optional(text),
        "prefix": string,
        "watermark": optional(duration),
        "event_time": text,
        "max_future": optional(duration),
        "dead_letter": optional(text),
        "include_pipeline": flag,
        "max_rows": count,
        "max_bytes": optional(size),
        "min_partitions": optional(count),
        "rows_per_partition": optional(count),
        "bytes_per_partition": optional(size),
        "fail_on_data_loss": flag,
    },
    "publish": {
        "to": topic,
        "subtopic": optional(topic),
        "mode": choice("append", "update", "complete"),
        "trigger": duration,
        "on_error": on_error,
    },
    "table": {
        "path": text,
        "partition_by": texts,
        "dead_letter": optional(text),
        "format": choice("parquet", "delta", "iceberg"),
        "trigger": duration,
        "on_error": on_error,
    },
    "alert": {
        "to": topic,
        "key": texts,
        "when": optional(text),
        "clear": optional(text),
        "cooldown": optional(duration),
        "absent": optional(duration),
        "rate": optional(text),
        "trigger": duration,
        "on_error": on_error,
    },
    "reference": {"path": text, "schema": optional(text)},
    "stateful": {"key": texts, "schema": text, "time": optional(choice("processing", "event"))},
}
"""The check of each option, by decorator."""


Kind = Literal["source", "view", "publish", "table", "alert", "reference"]
Mode = Literal["append", "update", "complete"]
PipelineFunction = Callable[..., "DataFrame"]
Function = TypeVar("Function", bound=Callable[..., Any])
"""The type of a decorated function; decorators return the function unchanged."""

QUERY_KINDS: tuple[Kind, ...] = ("publish", "table", "alert")
DEFAULT_TRIGGER = "200 ms"
TIMED_TRIGGER = "1 second"
"""The default trigger of an alert with `absent`, which also runs micro-batches without rows."""

DECLARED_AT: ContextVar[str] = ContextVar("declared_at", default="")
"""`file:line` at the start of error messages while a decorator is applied for a SQL file."""

_DECLARATION = "__smqrt_declaration__"
_EXPECTATIONS = "__smqrt_expectations__"
_STATE = "__smqrt_state__"
_STATEFUL_KINDS: tuple[Kind, ...] = ("view", "publish", "table")
_ON_FAIL = choice("drop", "dead_letter", "fail")


@dataclass(frozen=True)
class Expectation:
    """A condition that rows must meet.

    Attributes:
        condition: a Spark SQL condition, such as "temp between -60 and 150".
        on_fail: "drop" leaves the row out, "dead_letter" also publishes it to `topic`, "fail" ends the query.
        topic: the topic of dead letters; empty unless `on_fail` is "dead_letter".
        name: the name in the status.
    """

    condition: str
    on_fail: Literal["drop", "dead_letter", "fail"]
    topic: str
    name: str


@dataclass(frozen=True)
class StatefulOptions:
    """The options of @stateful: see `stateful`.

    Attributes:
        processor: a StatefulProcessor of Spark, or its class.
        key: columns; each combination of their values has a separate state.
        schema: the columns of the rows that the processor yields, as Spark DDL.
        time: the clock of timers: "processing", "event", or None without timers.
        recorded: whether the times of the rows are the clock, as in `smqrt pipeline test`.
    """

    processor: StatefulProcessor | type[StatefulProcessor]
    key: tuple[str, ...]
    schema: str
    time: Literal["processing", "event"] | None
    recorded: bool = False


@dataclass
class Declaration:
    """One function or SQL file of a pipeline.

    Attributes:
        name: the name of the function or of the SQL file; other functions read it by a parameter of this name.
        kind: "publish", "table" and "alert" are queries; the other kinds are inputs of queries.
        function: takes the DataFrames of `inputs` in order, and returns a DataFrame. Sources and references take their
            raw DataFrame instead.
        inputs: the names of the sources, views, queries and references that it reads.
        options: the options of its decorator by name, with defaults filled in.
        expectations: the expectations in the order of the file.
        file, line: its position in the source.
        state: the options of @stateful, which is applied after the expectations; None without @stateful.
    """

    name: str
    kind: Kind
    function: PipelineFunction
    inputs: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    expectations: list[Expectation] = field(default_factory=list)
    file: str = ""
    line: int = 0
    state: StatefulOptions | None = None

    @property
    def where(self) -> str:
        """`file:line`, the start of error messages."""
        return f"{self.file}:{self.line}"

    @property
    def is_query(self) -> bool:
        """Whether it is a query; other kinds are inputs of queries."""
        return self.kind in QUERY_KINDS

    @property
    def skips_failing_rows(self) -> bool:
        """Whether failing rows are left out; otherwise they end the query."""
        return str(self.options.get("on_error", "fail")) != "fail"

    @property
    def error_topic(self) -> str | None:
        """The topic for failing rows; None when such rows are only left out, or end the query."""
        action, _, topic = str(self.options.get("on_error", "fail")).partition(":")
        if action != "dead_letter":
            return None
        return topic or self.options.get("dead_letter") or f"dead_letters/{self.name}"


def source(
    topics: str | Sequence[str] = "#",
    *,
    exclude: str | Sequence[str] = (),
    json: str | None = None,
    prefix: str = "",
    watermark: str | None = None,
    event_time: str = "ts",
    max_future: str | None = "5 minutes",
    dead_letter: str | None = None,
    include_pipeline: bool = False,
    max_rows: int = 500_000,
    max_bytes: int | str | None = None,
    min_partitions: int | None = None,
    rows_per_partition: int | None = None,
    bytes_per_partition: int | str | None = None,
    fail_on_data_loss: bool = True,
    **unknown: object,
) -> Callable[[Function], Function]:
    """Declare a source of messages. The function takes the messages as a DataFrame; other functions read its result.

    Args:
        topics: topic names, with MQTT's wildcards `+` and `#`.
        exclude: topics to leave out of these.
        json: the fields of a JSON payload as Spark DDL, such as "device string, temp double"; each becomes a column.
            Rows whose payload is not a JSON object are left out and counted. A field of another type becomes NULL and
            is counted. With "variant" the whole payload becomes a VARIANT, in the column `variant`.
        prefix: prefix of the names of these columns, for fields whose names are columns of the journal.
        watermark: how late messages may be, such as "10 seconds".
        event_time: the column of the watermark; by default "ts", the time of arrival.
        max_future: with a watermark, rows whose event time is more than this in the future are left out and counted,
            because they would make all other rows too late. None accepts them.
        dead_letter: the topic for the rows that `json` and `max_future` leave out.
        include_pipeline: whether to read messages that pipelines have published too.
        max_rows: the maximum number of rows in one micro-batch.
        max_bytes: the approximate maximum size of one micro-batch, such as "64MB"; by default an eighth of the
            driver's memory.
        min_partitions: the minimum number of Spark tasks that read a micro-batch.
        rows_per_partition, bytes_per_partition: the maximum for one of these tasks. Without these three options there
            are as many tasks as cores, if there are enough rows.
        fail_on_data_loss: whether unread rows that retention has removed end the query; otherwise they are skipped.

    Raises:
        PipelineError: an option is unknown or invalid.
    """
    where = _where("source", unknown)
    options = _checked_options(
        where,
        "source",
        topics=topics,
        exclude=exclude,
        json=json,
        prefix=prefix,
        watermark=watermark,
        event_time=event_time,
        max_future=max_future,
        dead_letter=dead_letter,
        include_pipeline=include_pipeline,
        max_rows=max_rows,
        max_bytes=max_bytes,
        min_partitions=min_partitions,
        rows_per_partition=rows_per_partition,
        bytes_per_partition=bytes_per_partition,
        fail_on_data_loss=fail_on_data_loss,
    )
    if options["dead_letter"] and not json and not watermark:
        raise PipelineError(f"{where}: @source has dead_letter= but no json=; without json= every payload is valid.")
    return _decorator("source", options, raw_frame=True)


@overload
def view(function: Function) -> Function: ...
@overload
def view(function: None = None, **unknown: object) -> Callable[[Function], Function]: ...
def view(function: Function | None = None, **unknown: object) -> Function | Callable[[Function], Function]:
    """Declare a function that other functions read and that is not a query. Written `@view`.

    Raises:
        PipelineError: an option is given.
    """
    _where("view", unknown)
    return _decorator("view", {}) if function is None else _decorator("view", {})(function)


def publish(
    to: str,
    *,
    subtopic: str | None = None,
    mode: Mode = "append",
    trigger: str = DEFAULT_TRIGGER,
    on_error: str = "fail",
    **unknown: object,
) -> Callable[[Function], Function]:
    """Declare a query whose rows are published, each exactly once.

    The message is the column `payload` if there is one, else the row as JSON without the journal's own columns.

    Args:
        to: the topic, such as "alerts/{device}": a name in braces is a column of the row.
        subtopic: the sub-topic, a template like `to`.
        mode: "append" publishes rows when they are final, "update" when they change, "complete" all of them each time.
        trigger: the shortest time between micro-batches, such as "200 ms".
        on_error: the treatment of messages that make a function or a UDF fail: "fail" ends the query, "drop" leaves
            them out and counts them, "dead_letter" also publishes them to `dead_letters/NAME`, "dead_letter:TOPIC" to
            another topic.

    Raises:
        PipelineError: an option is unknown or invalid.
    """
    where = _where("publish", unknown)
    options = _checked_options(
        where, "publish", to=to, subtopic=subtopic, mode=mode, trigger=trigger, on_error=on_error
    )
    return _decorator("publish", options)


def table(
    path: str,
    *,
    partition_by: str | Sequence[str] = (),
    dead_letter: str | None = None,
    format: str = "parquet",
    trigger: str = "10 seconds",
    on_error: str = "fail",
    **unknown: object,
) -> Callable[[Function], Function]:
    """Declare a query whose rows are stored in a table, each exactly once.

    Args:
        path: the folder, relative to the folder `.tables` of the application; an absolute path or a URI (s3a://,
            hdfs://) is used unchanged.
        partition_by: columns that become folders.
        dead_letter: the topic for rows that a table can't store: with a time outside the years 1 to 9999, or a string
            in `partition_by` that is too long for a folder's name. They are always left out and counted.
        format: "parquet" (files with a log that Spark reads), "delta" (a Delta Lake table) or "iceberg" (an Iceberg
            table).
        trigger: the shortest time between micro-batches; each micro-batch writes at least one file.
        on_error: as for @publish; "dead_letter" without a topic uses that of `dead_letter` if it is set.

    Raises:
        PipelineError: an option is unknown or invalid.
    """
    options = _checked_options(
        _where("table", unknown),
        "table",
        path=path,
        partition_by=partition_by,
        dead_letter=dead_letter,
        format=format,
        trigger=trigger,
        on_error=on_error,
    )
    return _decorator("table", options | {"mode": "append"})


def alert(
    to: str,
    *,
    key: str | Sequence[str],
    when: str | None = None,
    clear: str | None = None,
    cooldown: str | None = None,
    absent: str | None = None,
    rate: str | None = None,
    trigger: str | None = None,
    on_error: str = "fail",
    **unknown: object,
) -> Callable[[Function], Function]:
    """Declare a query that publishes when a key raises an alarm and when the alarm ends.

    Args:
        to: the topic of the alarms, such as "alerts/{device}": a name in braces is one of the columns in `key`.
        key: columns; each combination of their values has a separate alarm.
        when: the condition that raises it, such as "temp > 80".
        clear: the condition that ends it, such as "temp < 75"; by default the opposite of `when`.
        cooldown: the shortest time between two alarms of one key.
        absent: raise the alarm when a key has sent no message for this long.
        rate: raise the alarm when a value changes by more than this, such as "temp > 5 per 1 minute" (a rise from the
            lowest value within that time) or "temp < -5 per 1 minute" (a fall).
        trigger: the shortest time between micro-batches; "1 second" with `absent`, whose clock needs micro-batches
            without rows too.
        on_error: as for @publish.

    Raises:
        PipelineError: an option is unknown or invalid.
    """
    where = _where("alert", unknown)
    if not (when or absent or rate):
        raise PipelineError(f"{where}: @alert needs a condition that raises it: when=, absent= or rate=.")
    trigger = trigger or (TIMED_TRIGGER if absent else DEFAULT_TRIGGER)
    options = _checked_options(
        where,
        "alert",
        to=to,
        key=key,
        when=when,
        clear=clear,
        cooldown=cooldown,
        absent=absent,
        rate=rate,
        trigger=trigger,
        on_error=on_error,
    )
    return _decorator("alert", options | {"subtopic": None, "mode": "update"})


def reference(path: str, *, schema: str | None = None, **unknown: object) -> Callable[[Function], Function]:
    """Declare a table that streams are joined with: a CSV, JSON or Parquet file, read again when it changes.

    Args:
        path: the file or folder, relative to the folder of pipelines.
        schema: its columns as Spark DDL; by default derived from the file.

    Raises:
        PipelineError: an option is unknown or invalid.
    """
    options = _checked_options(_where("reference", unknown), "reference", path=path, schema=schema)
    return _decorator("reference", options, raw_frame=True)  # its parameter is not an input


def stateful(
    processor: StatefulProcessor | type[StatefulProcessor],
    *,
    key: str | Sequence[str],
    schema: str,
    time: Literal["processing", "event"] | None = None,
    **unknown: object,
) -> Callable[[Function], Function]:
    """Declare that the rows of a function pass through a processor that keeps state for each key.

    Written below the kind, like @expect; with @publish, @table, @view, or alone.

    Args:
        processor: a subclass of pyspark.sql.streaming.StatefulProcessor, or an instance of one. Spark's
            `transformWithState` runs it.
        key: columns; each combination of their values has a separate state. Rows with a NULL in the key are left out.
        schema: the columns of the rows that the processor yields, such as "device string, since timestamp". Other
            functions read these rows, not those of the function.
        time: the clock of its timers: "processing" (the computer's clock), "event" (the watermark), or None without
            timers. A time to live of its state needs "processing".

    Raises:
        PipelineError: an option is unknown or invalid, or the function is a source, a reference or an alert.
    """
    where = _where("stateful", unknown)
    if not callable(getattr(processor, "handleInputRows", None)):
        raise PipelineError(
            f"{where}: {processor!r} is not a StatefulProcessor of pyspark.sql.streaming, nor an instance of one."
        )
    options = StatefulOptions(processor, **_checked_options(where, "stateful", key=key, schema=schema, time=time))

    def decorate(function: Function) -> Function:
        if getattr(function, _STATE, None) is not None:
            raise PipelineError(
                f"{where}: {function.__name__} has two @stateful; use a second function for one of them."
            )
        setattr(function, _STATE, options)
        if (earlier := getattr(function, _DECLARATION, None)) is not None:
            earlier.state = _stateful_options(earlier.kind, function)
        return function

    return decorate


def _stateful_options(kind: Kind, function: PipelineFunction) -> StatefulOptions | None:
    state: StatefulOptions | None = getattr(function, _STATE, None)
    if state is not None and kind not in _STATEFUL_KINDS:
        raise PipelineError(
            f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}: {function.__name__} is a @{kind}, "
            "which can't have @stateful; add it to a function that reads this one, or that has the same inputs."
        )
    return state


def expect(
    condition: str, *, on_fail: str = "drop", topic: str | None = None, name: str | None = None, **unknown: object
) -> Callable[[Function], Function]:
    """Declare a condition that the rows of a function must meet. May be repeated; written below the kind.

    Args:
        condition: a Spark SQL condition; NULL counts as a failure.
        on_fail: "drop" leaves the row out and counts it, "dead_letter:TOPIC" also publishes it, "fail" ends the query.
        topic: the topic, when `on_fail` is "dead_letter".
        name: the name in the status; by default the condition.

    Raises:
        PipelineError: an option is unknown or invalid.
    """
    where = _where("expect", unknown)
    found = expectation(where, condition, on_fail, topic, name)

    def decorate(function: Function) -> Function:
        # Decorators are applied from the bottom up; the list has the order of the file.
        function.__dict__.setdefault(_EXPECTATIONS, []).insert(0, found)
        return function

    return decorate


def expectation(
    where: str, condition: str, on_fail: str = "drop", topic: str | None = None, name: str | None = None
) -> Expectation:
    """Return a checked `Expectation`; error messages begin with `where`.

    Raises:
        PipelineError: an option is invalid.
    """
    action, _, rest = on_fail.partition(":")
    _ON_FAIL(where, "on_fail", action)
    topic = rest or topic or ""
    if (action == "dead_letter") != bool(topic):
        raise PipelineError(
            f"{where}: on_fail={on_fail!r} and topic={topic!r} don't match; "
            "use on_fail='dead_letter:TOPIC', 'drop' or 'fail'."
        )
    text(where, "condition", condition)
    return Expectation(condition, action, topic, name or condition)  # type: ignore[arg-type]


def declaration_of(function: object) -> Declaration | None:
    """Return the declaration of a decorated function; with `@expect` or `@stateful` alone it is a view."""
    found = getattr(function, _DECLARATION, None)
    if isinstance(found, Declaration):
        return found
    is_decorated = getattr(function, _EXPECTATIONS, None) or getattr(function, _STATE, None)
    return implied_view(function) if is_decorated and callable(function) else None


def implied_view(function: PipelineFunction) -> Declaration:
    """Return the declaration of an undecorated function that is an input of another function."""
    return _declaration("view", {}, function, raw_frame=False)


def _decorator(kind: Kind, options: dict[str, Any], raw_frame: bool = False) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        earlier = getattr(function, _DECLARATION, None)
        if earlier is not None:
            raise PipelineError(
                f"{earlier.where}: {earlier.name} is a @{earlier.kind} and a @{kind}; "
                f"use a second function for one of them: def {earlier.name}_2({earlier.name}): return {earlier.name}."
            )
        setattr(function, _DECLARATION, _declaration(kind, options, function, raw_frame))
        return function

    return decorate


def _declaration(kind: Kind, options: dict[str, Any], function: PipelineFunction, raw_frame: bool) -> Declaration:
    code = function.__code__
    where = f"{code.co_filename}:{code.co_firstlineno}"
    inputs = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.KEYWORD_ONLY):
            raise PipelineError(f"{where}: {function.__name__} has the parameter {name}; give each input a plain name.")
        if parameter.default is parameter.empty:  # a parameter with a default is not an input
            inputs.append(name)
    if raw_frame and len(inputs) != 1:
        raise PipelineError(
            f"{where}: {function.__name__} has {len(inputs)} parameters; a @{kind} has one, the DataFrame."
        )
    if not inputs:
        raise PipelineError(f"{where}: {function.__name__} has no parameter; its parameters name its inputs.")
    expectations = function.__dict__.setdefault(_EXPECTATIONS, [])
    return Declaration(
        function.__name__,
        kind,
        function,
        () if raw_frame else tuple(inputs),
        options,
        expectations,
        code.co_filename,
        code.co_firstlineno,
        _stateful_options(kind, function),
    )


def _where(decorator: str, unknown: Mapping[str, object]) -> str:
    """Return `file:line` of the decorator's call; raise PipelineError for unknown options."""
    where = DECLARED_AT.get()
    if not where:
        # The first frame outside this module is the pipeline file.
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    for name in unknown:
        parameters = inspect.signature(globals()[decorator]).parameters
        known = [known for known in parameters if known not in ("unknown", "function")]
        matches = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {matches[0]!r}? " if matches else ""
        options = f"its options are {', '.join(known)}" if known else "it has no options"
        raise PipelineError(f"{where}: @{decorator} has no option {name!r}; {hint}{options}.")
    return where


def _checked_options(where: str, decorator: str, /, **arguments: object) -> dict[str, Any]:
    return {name: check(where, name, arguments[name]) for name, check in OPTION_CHECKS[decorator].items()}

"""The decorators of a pipeline file, and the `Declaration` that each leaves on its function.

A decorated function stays what it was, so it can be called and tested with any DataFrame. What the decorator said is
kept beside it: `declaration_of(function)`. `smqrt.pipeline.discover` collects the declarations of a folder.

Source: design of the pipeline §8 (help/pipelines.md is the page for users).
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
from smqrt.settings.options import parse_duration, parse_size

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor


# ---- Options of decorators: how each is checked, durations ("200 ms") and topics with columns in them
# ("agg/{device}").


def milliseconds(text: object, name: str = "") -> int:
    """Return a duration in milliseconds: "200 ms" is 200, "1.5 minutes" is 90000.

    Args:
        text: the duration.
        name: what the error begins with, such as "--trigger ".

    Raises:
        PipelineError: `text` is no duration.
    """
    try:
        return round(parse_duration(str(text)) * 1000)
    except ArgumentError as error:
        raise PipelineError(f"{name}{error}.") from None


def spark_duration(text: str) -> str:
    """Return the same duration as Spark's own parser takes it; it doesn't know "ms".

    Raises:
        PipelineError: `text` is no duration.
    """
    return f"{milliseconds(text)} milliseconds"


_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]|[^{}]+")


class Template:
    """A text in which `{column}` stands for a column of the row; `{{` and `}}` are braces.

    Args:
        text: such as "agg/{device}" or "agg/{window.start}".

    Attributes:
        text: as it was given.
        parts: (is a column, text or column) in order.

    Raises:
        PipelineError: a brace is without its partner, or there is nothing between them.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.parts: list[tuple[bool, str]] = []
        for match in _PART.finditer(text):
            self._add(match[0], match[1])

    def _add(self, piece: str, column: str | None) -> None:
        if piece in ("{", "}") or (column is not None and not column.strip()):
            raise PipelineError(f"{self.text!r} has a brace without a column; write {{column}}, or {{{{ for a brace.")
        if column is not None:
            self.parts.append((True, column.strip()))
        else:
            self.parts.append((False, {"{{": "{", "}}": "}"}.get(piece, piece)))

    @property
    def columns(self) -> list[str]:
        """The columns that the row must have, in order."""
        return [piece for is_column, piece in self.parts if is_column]


# ---- checks: each takes `file:line` of a decorator, an option's name and what was given, and returns what to keep

Check = Callable[[str, str, object], object]


def optional(check: Check) -> Check:
    """Return a check that lets None pass."""
    return lambda where, name, value: None if value is None else check(where, name, value)


def choice(*choices: str) -> Check:
    """Return a check for one of some words."""

    def check(where: str, name: str, value: object) -> str:
        if value not in choices:
            raise PipelineError(f"{where}: {name}={value!r} must be one of {', '.join(map(repr, choices))}.")
        return str(value)

    return check


def text_or_empty(where: str, name: str, value: object) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise PipelineError(f"{where}: {name}={value!r} must be a text.")
    return value


def text(where: str, name: str, value: object) -> str:
    """Return a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise PipelineError(f"{where}: {name}={value!r} must be a text that is not empty.")
    return value


def texts(where: str, name: str, value: object) -> tuple[str, ...]:
    """Return several texts, of which one may be given alone."""
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, Sequence) or not all(isinstance(item, str) and item for item in values):
        raise PipelineError(f"{where}: {name}={value!r} must be a text or a list of texts.")
    return tuple(values)


def flag(where: str, name: str, value: object) -> bool:
    """Return True or False."""
    if not isinstance(value, bool):
        raise PipelineError(f"{where}: {name}={value!r} must be True or False.")
    return value


def count(where: str, name: str, value: object) -> int:
    """Return a whole number above 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PipelineError(f"{where}: {name}={value!r} must be a whole number above 0.")
    return value


def size(where: str, name: str, value: object) -> int:
    """Return the bytes of "64MB", or of a number."""
    try:
        return count(where, name, parse_size(value))
    except ArgumentError as error:
        raise PipelineError(f"{where}: {name}={value!r}: {error}") from None


def duration(where: str, name: str, value: object) -> str:
    """Return a duration as it is written."""
    try:
        milliseconds(value)
    except PipelineError as error:
        raise PipelineError(f"{where}: {name}: {error}") from None
    return str(value)


def topic(where: str, name: str, value: object) -> str:
    """Return the text of a `Template`."""
    try:
        return Template(text(where, name, value)).text
    except PipelineError as error:
        raise PipelineError(f"{where}: {name}: {error}") from None


def on_error(where: str, name: str, value: object) -> str:
    """Return "fail", "drop", "dead_letter" or "dead_letter:TOPIC"."""
    action, colon, rest = value.partition(":") if isinstance(value, str) else ("", "", "")
    if action not in ("fail", "drop", "dead_letter") or (colon and (action != "dead_letter" or not rest)):
        raise PipelineError(f"{where}: {name}={value!r} must be 'fail', 'drop', 'dead_letter' or 'dead_letter:TOPIC'.")
    return str(value)


CHECKS: dict[str, dict[str, Check]] = {
    "source": {
        "topics": texts,
        "exclude": texts,
        "json": optional(text),
        "prefix": text_or_empty,
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
"""How the options of each decorator are checked."""


Kind = Literal["source", "view", "publish", "table", "alert", "reference"]
Mode = Literal["append", "update", "complete"]
PipelineFunction = Callable[..., "DataFrame"]
Function = TypeVar("Function", bound=Callable[..., Any])
"""As it was written: for a type checker a decorator changes nothing."""

QUERY_KINDS: tuple[Kind, ...] = ("publish", "table", "alert")
DEFAULT_TRIGGER = "200 ms"
TIMED_TRIGGER = "1 second"

DECLARED_AT: ContextVar[str] = ContextVar("declared_at", default="")
"""`file:line` that messages begin with when a decorator is applied for a SQL file."""

_DECLARATION = "__smqrt_declaration__"
_EXPECTATIONS = "__smqrt_expectations__"
_STATE = "__smqrt_state__"
_WITH_STATE: tuple[Kind, ...] = ("view", "publish", "table")
_ON_FAIL = choice("drop", "dead_letter", "fail")


@dataclass(frozen=True)
class Expectation:
    """A condition that every row should meet.

    Attributes:
        condition: a Spark SQL condition, such as "temp between -60 and 150".
        on_fail: "drop" leaves the row out, "dead_letter" publishes it to `topic` too, "fail" ends the query.
        topic: where the rows that fail go; empty unless `on_fail` is "dead_letter".
        name: how the status calls it.
    """

    condition: str
    on_fail: Literal["drop", "dead_letter", "fail"]
    topic: str
    name: str


@dataclass(frozen=True)
class StatefulOptions:
    """What a function's rows go through, key by key: see `stateful`.

    Attributes:
        processor: a StatefulProcessor of Spark's, or its class.
        key: columns; each of their values has a state of its own.
        schema: of the rows that the processor gives, as Spark DDL.
        time: what timers go by: "processing", "event", or None where there are none.
        recorded: the times of the rows are the clock, as `smqrt pipeline test` has it.
    """

    processor: StatefulProcessor | type[StatefulProcessor]
    key: tuple[str, ...]
    schema: str
    time: Literal["processing", "event"] | None
    recorded: bool = False


@dataclass
class Declaration:
    """What one function or SQL file of a pipeline is.

    Attributes:
        name: of the function or the SQL file; what other functions call it by.
        kind: what it is; "publish", "table" and "alert" are queries, the others are what queries are made of.
        function: DataFrames in, in the order of `inputs`, a DataFrame out; sources and references get their raw frame.
        inputs: names of the sources, views, queries and references that it reads.
        options: what its decorator was given, by name, with defaults filled in.
        expectations: in the order in which they are written.
        file, line: where it is written.
        state: what its rows go through when they have met the expectations; None without @stateful.
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
        """`file:line`, with which messages begin."""
        return f"{self.file}:{self.line}"

    @property
    def is_query(self) -> bool:
        """Whether it runs by itself, rather than being a part of what runs."""
        return self.kind in QUERY_KINDS

    @property
    def leaves_out(self) -> bool:
        """Whether rows that it fails with are left out, rather than ending it."""
        return str(self.options.get("on_error", "fail")) != "fail"

    @property
    def error_topic(self) -> str | None:
        """The topic for rows that it fails with; None when they are only left out, or end it."""
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
    """Declare where messages come from: the function gets them as a DataFrame and returns the one that others read.

    Args:
        topics: topic names, with MQTT's wildcards `+` and `#`.
        exclude: topics to leave out of these.
        json: fields of a JSON payload as Spark DDL, such as "device string, temp double"; each becomes a column. Rows
            whose payload is no JSON object are left out and counted; a field of another type is NULL and counted.
            "variant" instead: the whole payload as a VARIANT, in the column `variant`.
        prefix: put before the name of each of these columns, when a field is called as a column of the journal is.
        watermark: how late messages may be, such as "10 seconds".
        event_time: the column that the watermark is on; the time of arrival, "ts", if not given.
        max_future: with a watermark, rows whose event time is later than this after now are left out and counted, as
            they would make all others too late; None takes them.
        dead_letter: topic for the rows that `json` and `max_future` leave out.
        include_pipeline: also read what pipelines have published.
        max_rows: the most rows of one micro-batch.
        max_bytes: about the most bytes of one, such as "64MB"; an eighth of the driver's memory if not given.
        min_partitions: at least so many tasks of Spark read a micro-batch.
        rows_per_partition, bytes_per_partition: at most so much in one of these tasks. Without these three there are as
            many tasks as cores when there are rows enough.
        fail_on_data_loss: rows that retention removed before they were read end the query; else they're passed over.

    Raises:
        PipelineError: an option is unknown or wrong.
    """
    where = _where("source", unknown)
    options = _checked(where, "source", locals())
    if options["dead_letter"] and not json and not watermark:
        raise PipelineError(f"{where}: @source has dead_letter= but no json=; without json= every payload is good.")
    return _declares("source", options, raw_frame=True)


@overload
def view(function: Function) -> Function: ...
@overload
def view(function: None = None, **unknown: object) -> Callable[[Function], Function]: ...
def view(function: Function | None = None, **unknown: object) -> Function | Callable[[Function], Function]:
    """Declare a function that others name as an input, and that doesn't run by itself. Written `@view`.

    Raises:
        PipelineError: it is given options.
    """
    _where("view", unknown)
    return _declares("view", {}) if function is None else _declares("view", {})(function)


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

    Args:
        to: the topic, such as "alerts/{device}": what is in braces is a column of the row.
        subtopic: the sub-topic, a template as `to` is.
        mode: "append" publishes rows when they are final, "update" when they change, "complete" all of them each time.
        trigger: the shortest time between micro-batches, such as "200 ms".
        on_error: what becomes of the messages that a function or a UDF fails with: "fail" ends the query, "drop" leaves
            them out and counts them, "dead_letter" publishes them too, to `dead_letters/NAME`, "dead_letter:TOPIC" to
            another topic.

    The message is the column `payload` if there is one, else the row as JSON without the journal's own columns.

    Raises:
        PipelineError: an option is unknown or wrong.
    """
    return _declares("publish", _checked(_where("publish", unknown), "publish", locals()))


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
    """Declare a query whose rows are kept as a table, each exactly once.

    Args:
        path: the folder, relative to the application's `tables` folder; an absolute path or a URI (s3a://, hdfs://)
            is taken as it is.
        partition_by: columns that become folders.
        dead_letter: topic for the rows that no table can keep: a time outside the years 1 to 9999, or a text in
            `partition_by` that is too long for a folder's name. They are left out and counted in any case.
        format: "parquet", files with a log that Spark knows; "delta", a table of Delta Lake; or
            "iceberg", one of Iceberg.
        trigger: the shortest time between micro-batches: each makes at least one file.
        on_error: as for @publish; "dead_letter" alone takes the topic of `dead_letter` when that is given.

    Raises:
        PipelineError: an option is unknown or wrong.
    """
    return _declares("table", _checked(_where("table", unknown), "table", locals()) | {"mode": "append"})


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
    """Declare a query that publishes when a key raises an alarm, and when the alarm is over.

    Args:
        to: the topic of the alarms, such as "alerts/{device}": what is in braces is one of the columns in `key`.
        key: the columns whose every value has an alarm of its own.
        when: condition that raises it, such as "temp > 80".
        clear: condition that ends it, such as "temp < 75"; the contrary of `when` if not given.
        cooldown: the shortest time between two alarms of one key.
        absent: raise it when a key has sent nothing for this long.
        rate: raise it when a value changes by more than this, such as "temp > 5 per 1 minute" (a rise, counted from the
            lowest value within that time) or "temp < -5 per 1 minute" (a fall).
        trigger: the shortest time between micro-batches; "1 second" with absent=, whose clock needs one all the time.
        on_error: as for @publish.

    Raises:
        PipelineError: an option is unknown or wrong.
    """
    where = _where("alert", unknown)
    if not (when or absent or rate):
        raise PipelineError(f"{where}: @alert needs when=, absent= or rate=, which say what raises it.")
    trigger = trigger or (TIMED_TRIGGER if absent else DEFAULT_TRIGGER)
    return _declares("alert", _checked(where, "alert", locals()) | {"subtopic": None, "mode": "update"})


def reference(path: str, *, schema: str | None = None, **unknown: object) -> Callable[[Function], Function]:
    """Declare a table that streams are joined with: a CSV, JSON or Parquet file, read again when it changes.

    Args:
        path: the file or folder, relative to the folder of pipelines.
        schema: its columns as Spark DDL; found by looking into the file if not given.

    Raises:
        PipelineError: an option is unknown or wrong.
    """
    return _declares("reference", _checked(_where("reference", unknown), "reference", locals()), raw_frame=True)


def stateful(
    processor: StatefulProcessor | type[StatefulProcessor],
    *,
    key: str | Sequence[str],
    schema: str,
    time: Literal["processing", "event"] | None = None,
    **unknown: object,
) -> Callable[[Function], Function]:
    """Declare that the rows which a function returns go, key by key, through a processor that remembers what it likes.

    Written below the kind, as @expect is; with @publish, @table, @view, or alone.

    Args:
        processor: a subclass of pyspark.sql.streaming.StatefulProcessor, or an object of one: Spark's
            `transformWithState` is what runs it.
        key: the columns whose every value has a state of its own; rows in which one is NULL are left out.
        schema: of the rows that the processor yields, such as "device string, since timestamp"; these are what others
            get instead of the function's rows.
        time: what its timers go by: "processing" (the clock of the computer), "event" (the watermark), or None where it
            sets none. A time to live of its state needs "processing".

    Raises:
        PipelineError: an option is unknown or wrong, or the function is a source, a reference or an alert.
    """
    where = _where("stateful", unknown)
    if not callable(getattr(processor, "handleInputRows", None)):
        raise PipelineError(
            f"{where}: {processor!r} is no StatefulProcessor of pyspark.sql.streaming, nor an object of one."
        )
    found = StatefulOptions(processor, **_checked(where, "stateful", locals()))

    def decorate(function: Function) -> Function:
        if getattr(function, _STATE, None) is not None:
            raise PipelineError(
                f"{where}: {function.__name__} has two @stateful; write a second function for one of them."
            )
        setattr(function, _STATE, found)
        if (earlier := getattr(function, _DECLARATION, None)) is not None:
            earlier.state = _fitting_state(earlier.kind, function)
        return function

    return decorate


def _fitting_state(kind: Kind, function: PipelineFunction) -> StatefulOptions | None:
    state: StatefulOptions | None = getattr(function, _STATE, None)
    if state is not None and kind not in _WITH_STATE:
        raise PipelineError(
            f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}: {function.__name__} is a @{kind}, "
            "which has no @stateful; write it on a function that reads it, or reads what it reads."
        )
    return state


def expect(
    condition: str, *, on_fail: str = "drop", topic: str | None = None, name: str | None = None, **unknown: object
) -> Callable[[Function], Function]:
    """Declare what the rows that a function returns must be like. May be given several times; written below the kind.

    Args:
        condition: a Spark SQL condition; NULL fails it.
        on_fail: "drop" leaves the row out and counts it, "dead_letter:TOPIC" publishes it too, "fail" ends the query.
        topic: the topic, when `on_fail` is "dead_letter".
        name: how the status calls it; the condition if not given.

    Raises:
        PipelineError: an option is unknown or wrong.
    """
    where = _where("expect", unknown)
    found = expectation(where, condition, on_fail, topic, name)

    def decorate(function: Function) -> Function:
        own: list[Expectation] = function.__dict__.setdefault(_EXPECTATIONS, [])
        own.insert(0, found)
        return function

    return decorate


def expectation(
    where: str, condition: str, on_fail: str = "drop", topic: str | None = None, name: str | None = None
) -> Expectation:
    """Return a checked `Expectation`; `where` begins the messages.

    Raises:
        PipelineError: an option is wrong.
    """
    action, _, rest = on_fail.partition(":")
    _ON_FAIL(where, "on_fail", action)
    topic = rest or topic or ""
    if (action == "dead_letter") != bool(topic):
        raise PipelineError(
            f"{where}: on_fail={on_fail!r} and topic={topic!r} don't go together; "
            "write on_fail='dead_letter:TOPIC', 'drop' or 'fail'."
        )
    text(where, "condition", condition)
    return Expectation(condition, action, topic, name or condition)  # type: ignore[arg-type]


def declaration_of(function: object) -> Declaration | None:
    """Return what a decorator has left on a function; one with `@expect` or `@stateful` alone is a view."""
    found = getattr(function, _DECLARATION, None)
    if isinstance(found, Declaration):
        return found
    said = getattr(function, _EXPECTATIONS, None) or getattr(function, _STATE, None)
    return implied_view(function) if said and callable(function) else None


def implied_view(function: PipelineFunction) -> Declaration:
    """Return the declaration of a plain function that another one names as an input."""
    return _declaration("view", {}, function, raw_frame=False)


def _declares(kind: Kind, options: dict[str, Any], raw_frame: bool = False) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        earlier = getattr(function, _DECLARATION, None)
        if earlier is not None:
            raise PipelineError(
                f"{earlier.where}: {earlier.name} is a @{earlier.kind} and a @{kind}; "
                f"write a second function for one of them: def {earlier.name}_2({earlier.name}): return {earlier.name}."
            )
        setattr(function, _DECLARATION, _declaration(kind, options, function, raw_frame))
        return function

    return decorate


def _declaration(kind: Kind, options: dict[str, Any], function: PipelineFunction, raw_frame: bool) -> Declaration:
    code = function.__code__
    where = f"{code.co_filename}:{code.co_firstlineno}"
    inputs = _parameters(where, function)
    if raw_frame and len(inputs) != 1:
        raise PipelineError(
            f"{where}: {function.__name__} takes {len(inputs)} parameters; a @{kind} takes one, the DataFrame."
        )
    if not inputs:
        raise PipelineError(f"{where}: {function.__name__} has no parameter; its parameters name what it reads.")
    expectations = function.__dict__.setdefault(_EXPECTATIONS, [])
    return Declaration(
        function.__name__,
        kind,
        function,
        () if raw_frame else inputs,
        options,
        expectations,
        code.co_filename,
        code.co_firstlineno,
        _fitting_state(kind, function),
    )


def _parameters(where: str, function: PipelineFunction) -> tuple[str, ...]:
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.KEYWORD_ONLY):
            raise PipelineError(f"{where}: {function.__name__} has the parameter {name}; give each input a plain name.")
        if parameter.default is parameter.empty:
            found.append(name)
    return tuple(found)


def _caller() -> str:
    if where := DECLARED_AT.get():
        return where
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _where(decorator: str, unknown: Mapping[str, object]) -> str:
    """Return `file:line` of a decorator, which has no unknown options."""
    where = _caller()
    for name in unknown:
        parameters = inspect.signature(globals()[decorator]).parameters
        known = [known for known in parameters if known not in ("unknown", "function")]
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        options = f"its options are {', '.join(known)}" if known else "it takes none"
        raise PipelineError(f"{where}: @{decorator} has no option {name!r}; {hint}{options}.")
    return where


def _checked(where: str, decorator: str, given: Mapping[str, object]) -> dict[str, Any]:
    """Return the options of a decorator, each checked; `given` has its arguments, and may have more."""
    return {name: check(where, name, given[name]) for name, check in CHECKS[decorator].items()}

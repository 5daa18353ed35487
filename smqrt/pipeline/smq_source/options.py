"""Options of `format("smq")`: names, values, and one clear error for each mistake."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

from smqrt.errors import ArgumentError, SmqrtError
from smqrt.journal import files
from smqrt.journal.planning import Filter
from smqrt.settings.option_types import parse_duration, parse_size

Offsets = dict[str, int]
"""By node, the number of the next row. Spark needs offsets as a dict."""

ROWS_PER_PARTITION = 1 << 19
BYTES_PER_PARTITION = 64 << 20
BATCH_ROWS = 8192
MAX_BYTES = 128 << 20
"""The maximum size of a micro-batch: an eighth of the default memory of Spark's driver (1 GiB)."""
RETRY_S = 60.0


class Splits(NamedTuple):
    """Offsets at which micro-batches end.

    Attributes:
        at: offsets in ascending order; no micro-batch has rows on both sides of one.
        pauses: whether one trigger at each offset returns no rows, so that Spark closes windows before the next rows.
    """

    at: tuple[Offsets, ...] = ()
    pauses: bool = False


def wrong(name: str, value: object, rule: str) -> ArgumentError:
    """Return the error for an invalid value of an option."""
    return ArgumentError(f'smq option {name}="{value}": {rule}.')


def positive(name: str, value: str) -> int:
    """Return an integer of at least 1."""
    if not re.fullmatch(r"[0-9_]+", value) or int(value) < 1:
        raise wrong(name, value, "it must be a whole number of at least 1")
    return int(value)


def whole(name: str, value: str) -> int:
    """Return an integer of at least 0."""
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise wrong(name, value, "it must be a whole number")
    return int(value)


def size(name: str, value: str) -> int:
    """Return the bytes of a size such as "64MB", "1GiB" or "100000"."""
    try:
        found = parse_size(int(value) if value.isdecimal() else value)
    except ArgumentError as error:
        raise wrong(name, value, f"it must be a size like 64MB: {error}") from None
    if found < 1:
        raise wrong(name, value, "it must be at least 1 byte")
    return found


def switch(name: str, value: str) -> bool:
    """Return True for "true" and False for "false"."""
    if value.lower() not in ("true", "false"):
        raise wrong(name, value, 'it must be "true" or "false"')
    return value.lower() == "true"


def duration_s(name: str, value: str) -> float:
    """Return the seconds of a duration such as "30s", "2h" or "500ms"."""
    try:
        return parse_duration(value)
    except ArgumentError as error:
        raise wrong(name, value, f"it must be a duration like 30s or 2h: {error}") from None


def names(name: str, value: str) -> tuple[str, ...]:
    """Return topic filters, from a JSON list or names with commas."""
    if not value.lstrip().startswith("["):  # names with commas need a JSON list
        return tuple(part.strip() for part in value.split(",") if part.strip())
    try:
        found = json.loads(value)
    except ValueError:
        raise wrong(name, value, "it starts like a JSON list but isn't one") from None
    if not all(isinstance(part, str) for part in found):
        raise wrong(name, value, "every element of the list must be a string")
    return tuple(found)


def seqs(name: str, value: str) -> Offsets:
    """Return offsets, from JSON such as {"n1": 12345}."""
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    # `type`, because True is an instance of int.
    if not isinstance(found, dict) or not all(type(seq) is int and seq >= 0 for seq in found.values()):
        raise wrong(name, value, 'it must be JSON with a seq for each node, such as {"n1": 12345}')
    return found


def splits(name: str, value: str) -> Splits:
    """Return the ends of micro-batches, from offsets or a JSON list of offsets."""
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if not isinstance(found, list):
        return Splits((seqs(name, value),), False)
    return Splits(tuple(seqs(name, json.dumps(each)) for each in found), True)


def offsets_or_edge(name: str, value: str) -> str | Offsets:
    """Return "earliest", "latest" or offsets."""
    return value.lower() if value.lower() in ("earliest", "latest") else seqs(name, value)


def time_us(name: str, value: str) -> int:
    """Return microseconds since 1970, from an ISO time (by default UTC) or a duration before now."""
    if re.fullmatch(r"[0-9.]+ *[a-z]+", value):
        when = datetime.now(UTC) - timedelta(seconds=duration_s(name, value))
    else:
        try:
            when = datetime.fromisoformat(value)
        except ValueError:
            raise wrong(name, value, "it must be a time like 2026-11-21T15:00:00Z, or 2h for two hours ago") from None
    return epoch_us(when)


def timestamp_us(name: str, value: str) -> int:
    """Return microseconds since 1970, from milliseconds as in Kafka's source, or from a value for `time_us`."""
    return int(value) * 1000 if value.isdecimal() else time_us(name, value)


def epoch_us(when: datetime) -> int:
    """Return microseconds since 1970; a time without a zone is UTC."""
    aware = when if when.tzinfo else when.replace(tzinfo=UTC)
    return (aware - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)


def text(name: str, value: str) -> str:
    """Return the value; an empty one is an error."""
    if not value:
        raise wrong(name, value, "it must not be empty")
    return value


def certificates(name: str, value: str) -> str | None:
    """Return the content of a PEM file on the driver's machine, for workers without this file."""
    return files.trusted_certificates(text(name, value))


def app_id(name: str, value: str) -> str:
    """Return an id of commits; the numbers of parts are appended to it."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,80}", value):
        raise wrong(name, value, "it must be 1 to 80 letters, digits, '-', '_' and '.'")
    return value


OptionParser = Callable[[str, str], object]

LOCATION_OPTIONS: dict[str, OptionParser] = {
    "path": text,
    "url": text,
    "token": text,
    "cafile": certificates,
    "retry": duration_s,
}
READ_OPTIONS: dict[str, OptionParser] = LOCATION_OPTIONS | {
    "topics": names,
    "exclude": names,
    "startingOffsets": offsets_or_edge,
    "startingTime": time_us,
    "endingOffsets": offsets_or_edge,
    "endingTime": time_us,
    "maxRowsPerTrigger": positive,
    "maxBytesPerTrigger": size,
    "minPartitions": positive,
    "rowsPerPartition": positive,
    "bytesPerPartition": size,
    "parallelism": positive,
    "batchRows": positive,
    "splitAt": splits,
    "failOnDataLoss": switch,
    "includePipeline": switch,
    "queryName": text,
}
WRITE_OPTIONS: dict[str, OptionParser] = LOCATION_OPTIONS | {"txnAppId": app_id, "txnVersion": whole}
KAFKA_NAMES: dict[str, tuple[str, OptionParser]] = {
    "startingTimestamp": ("startingTime", timestamp_us),
    "endingTimestamp": ("endingTime", timestamp_us),
    "maxOffsetsPerTrigger": ("maxRowsPerTrigger", positive),
}
"""Options with their names in Spark's source for Kafka: the name in this source, and the parser."""
OTHER_SOURCES = {
    "subscribe": "topics",
    "subscribepattern": "topics",
    "assign": "topics",
    "kafka.bootstrap.servers": "url",
    "startingoffsetsbytimestamp": "startingTimestamp",
    "endingoffsetsbytimestamp": "endingTimestamp",
    "minoffsetspertrigger": "trigger(processingTime=...)",
    "maxfilespertrigger": "maxBytesPerTrigger",
    "groupidprefix": "queryName",
    "kafka.group.id": "queryName",
}
"""Options of other sources, in lower case, and the corresponding options of this source, for hints in errors."""
SPARK_OPTIONS = ("checkpointlocation", "queryname")
"""Options that Spark passes to a sink together with the sink's own options."""


def _parsed(given: Mapping[str, str], known: Mapping[str, OptionParser]) -> dict[str, Any]:
    """Return the values of the options by name; names are compared without case, as Spark does."""
    parsers = {name: (name, parser) for name, parser in known.items()}
    parsers |= {name: target for name, target in KAFKA_NAMES.items() if target[0] in known}
    spelling = {name.lower(): name for name in parsers}
    values: dict[str, Any] = {}
    given_as: dict[str, str] = {}
    for option, value in given.items():
        if (name := spelling.get(option.lower())) is None:
            close = difflib.get_close_matches(option.lower(), spelling, 1)
            other = OTHER_SOURCES.get(option.lower()) if "topics" in known else None  # only for reads
            suggestion = other or (spelling[close[0]] if close else None)
            hint = f"Did you mean {suggestion}? " if suggestion else ""
            listed = ", ".join(sorted(known))
            raise ArgumentError(f'Format smq has no option "{option}" here. {hint}It has: {listed}.')
        target, parser = parsers[name]
        if target in values:
            raise ArgumentError(f"smq options {given_as[target]} and {name} have the same meaning: give one of them.")
        values[target], given_as[target] = parser(name, value), name
    return values


def _location(values: dict[str, Any]) -> str:
    """Return the folder or the address of the journal."""
    if ("path" in values) == ("url" in values):
        raise ArgumentError(
            'The source smq needs one journal: load("app/.journal") for a folder, or option '
            'url="http://host:9357/rtl/journal/NAME" for a hub, and not both.'
        )
    where: str = values.pop("path", None) or values.pop("url")
    # Absolute, because workers may have another current folder than the driver.
    return where if files.is_address(where) else os.path.abspath(files.journal_folder(where))


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class ReadOptions:
    """The options of a read, batch or stream.

    Attributes:
        journal: absolute path of the folder, or the http(s) address.
        token: the hub's token; None uses the one in the journal's folder.
        cafile: certificates to trust instead of the system's, PEM text.
        topics, exclude: MQTT filters; no topics means every row, including those addressed to an ETID.
        starting, ending: "earliest", "latest" or offsets; None is the default of the kind of read.
        starting_us, ending_us: times instead of offsets, microseconds since 1970, UTC.
        max_rows: the maximum number of rows in a micro-batch; None is unlimited.
        max_bytes: the approximate maximum size of a micro-batch; None is `MAX_BYTES`.
        min_partitions: the minimum number of Spark tasks, if there are as many rows.
        rows_per_partition, bytes_per_partition: the maximum of a task.
        parallelism: the number of tasks that run at the same time, and of the tasks of a large micro-batch.
        batch_rows: Arrow batches are merged until they have this many rows.
        split_at: offsets at which micro-batches end.
        fail_on_data_loss: whether missing rows are an error; otherwise they are skipped.
        include_pipeline: whether the result has rows that a pipeline published.
        query: the name under which progress is reported to the journal; None reports nothing.
        retry_s: how many seconds the source waits for an unreachable hub.
    """

    journal: str
    token: str | None = None
    cafile: str | None = None
    topics: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    starting: str | Offsets | None = None
    starting_us: int | None = None
    ending: str | Offsets | None = None
    ending_us: int | None = None
    max_rows: int | None = None
    max_bytes: int | None = None
    min_partitions: int = 1
    rows_per_partition: int = ROWS_PER_PARTITION
    bytes_per_partition: int = BYTES_PER_PARTITION
    parallelism: int = field(default_factory=cores)
    batch_rows: int = BATCH_ROWS
    split_at: Splits = Splits()
    fail_on_data_loss: bool = True
    include_pipeline: bool = True
    query: str | None = None
    retry_s: float = RETRY_S

    FIELDS = {
        "startingOffsets": "starting",
        "startingTime": "starting_us",
        "endingOffsets": "ending",
        "endingTime": "ending_us",
        "maxRowsPerTrigger": "max_rows",
        "maxBytesPerTrigger": "max_bytes",
        "minPartitions": "min_partitions",
        "rowsPerPartition": "rows_per_partition",
        "bytesPerPartition": "bytes_per_partition",
        "batchRows": "batch_rows",
        "splitAt": "split_at",
        "failOnDataLoss": "fail_on_data_loss",
        "includePipeline": "include_pipeline",
        "queryName": "query",
        "retry": "retry_s",
    }

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Self:
        """Read Spark's options.

        Args:
            given: Spark's own mapping, with names in lower case.

        Returns:
            The options.

        Raises:
            ArgumentError: an option is unknown or invalid, or two options exclude each other.
        """
        values = _parsed(given, READ_OPTIONS)
        for edge in ("starting", "ending"):
            if f"{edge}Offsets" in values and f"{edge}Time" in values:
                raise ArgumentError(f"smq options {edge}Offsets and {edge}Time exclude each other: give one of them.")
        where = _location(values)
        options = cls(where, **{cls.FIELDS.get(name, name): value for name, value in values.items()})
        options.filter()
        return options

    def filter(self) -> Filter | None:
        """Return the filter of topics; None selects all rows."""
        return Filter(self.topics or ("#",), self.exclude) if self.topics or self.exclude else None


@dataclass(frozen=True)
class WriteOptions:
    """The options of a write.

    Attributes:
        journal: absolute path of the folder, or the http(s) address.
        token: the hub's token; None uses the one in the journal's folder.
        cafile: as for `ReadOptions`.
        retry_s: how many seconds a write waits for an unreachable hub.
        app_id, version: repeated writes with the same values are done once; the names are Delta's.
    """

    journal: str
    token: str | None = None
    retry_s: float = RETRY_S
    app_id: str | None = None
    version: int = 0
    cafile: str | None = None

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Self:
        """Read Spark's options.

        Args:
            given: Spark's own mapping, which includes options of Spark.

        Returns:
            The options.

        Raises:
            ArgumentError: an option is unknown or invalid.
        """
        values = _parsed(
            {name: value for name, value in given.items() if name.lower() not in SPARK_OPTIONS}, WRITE_OPTIONS
        )
        if ("txnAppId" in values) != ("txnVersion" in values):
            raise ArgumentError(
                "smq options txnAppId and txnVersion need each other: the writer, and the number of its write."
            )
        where, retry_s = _location(values), values.get("retry", RETRY_S)
        by = values.get("txnAppId"), values.get("txnVersion", 0)
        return cls(where, values.get("token"), retry_s, *by, values.get("cafile"))


P = ParamSpec("P")
T = TypeVar("T")


def without_traceback(method: Callable[P, T]) -> Callable[P, T]:
    """Make a method raise errors of smqrt without their traceback, which Spark would print."""

    @wraps(method)
    def call(*args: P.args, **keywords: P.kwargs) -> T:
        try:
            return method(*args, **keywords)
        except SmqrtError as error:
            raise error.with_traceback(None) from None

    return call

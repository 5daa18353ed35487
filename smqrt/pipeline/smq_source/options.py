"""The options of `format("smq")`: what they are called, what they may be, and one clear error for each mistake."""

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
from smqrt.journal.filters import Filter
from smqrt.settings.options import parse_duration, parse_size

Offsets = dict[str, int]
"""By node, the number of the next row: an offset of Spark's, which wants a dict."""

ROWS_PER_PARTITION = 1 << 19
BYTES_PER_PARTITION = 64 << 20
BATCH_ROWS = 8192
MAX_BYTES = 128 << 20
"""Of a micro-batch: an eighth of the 1 GiB that Spark's driver has by default."""
RETRY_S = 60.0


class Splits(NamedTuple):
    """Offsets that micro-batches end at.

    Attributes:
        at: in ascending order; no micro-batch has rows on both sides of one.
        pauses: at each of them a trigger finds nothing new, so that Spark closes windows in a micro-batch without rows.
    """

    at: tuple[Offsets, ...] = ()
    pauses: bool = False


def wrong(name: str, value: object, rule: str) -> ArgumentError:
    """Return the error for a value that an option can't have."""
    return ArgumentError(f'smq option {name}="{value}": {rule}.')


def positive(name: str, value: str) -> int:
    """Return a whole number of at least 1."""
    if not re.fullmatch(r"[0-9_]+", value) or int(value) < 1:
        raise wrong(name, value, "it's a whole number of at least 1")
    return int(value)


def whole(name: str, value: str) -> int:
    """Return a whole number of at least 0."""
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise wrong(name, value, "it's a whole number")
    return int(value)


def size(name: str, value: str) -> int:
    """Return the bytes of "64MB", "1GiB", "100000"."""
    try:
        found = parse_size(int(value) if value.isdecimal() else value)
    except ArgumentError as error:
        raise wrong(name, value, f"it's a size like 64MB: {error}") from None
    if found < 1:
        raise wrong(name, value, "it's at least 1 byte")
    return found


def switch(name: str, value: str) -> bool:
    """Return True for "true" and False for "false"."""
    if value.lower() not in ("true", "false"):
        raise wrong(name, value, 'it is "true" or "false"')
    return value.lower() == "true"


def duration_s(name: str, value: str) -> float:
    """Return the seconds of "30s", "2h", "500ms"."""
    try:
        return parse_duration(value)
    except ArgumentError as error:
        raise wrong(name, value, f"it's a duration like 30s or 2h: {error}") from None


def names(name: str, value: str) -> tuple[str, ...]:
    """Return topic filters: a JSON list, or names between commas."""
    if not value.lstrip().startswith("["):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    try:
        found = json.loads(value)
    except ValueError:
        raise wrong(name, value, "it starts like a JSON list but isn't one") from None
    if not all(isinstance(part, str) for part in found):
        raise wrong(name, value, "every element of the list is a string")
    return tuple(found)


def seqs(name: str, value: str) -> Offsets:
    """Return the offsets in JSON such as {"n1": 12345}."""
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(type(seq) is int and seq >= 0 for seq in found.values()):
        raise wrong(name, value, 'it\'s JSON with a seq for each node, such as {"n1": 12345}')
    return found


def splits(name: str, value: str) -> Splits:
    """Return where micro-batches end: offsets, or a JSON list of them."""
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
    """Return microseconds since 1970 of an ISO time (UTC when it names no zone) or of a duration before now."""
    if re.fullmatch(r"[0-9.]+ *[a-z]+", value):
        when = datetime.now(UTC) - timedelta(seconds=duration_s(name, value))
    else:
        try:
            when = datetime.fromisoformat(value)
        except ValueError:
            raise wrong(name, value, "it's a time like 2026-11-21T15:00:00Z, or 2h for two hours ago") from None
    return epoch_us(when)


def timestamp_us(name: str, value: str) -> int:
    """Return microseconds since 1970 of milliseconds since then, as Kafka's source takes them, or as `time_us`."""
    return int(value) * 1000 if value.isdecimal() else time_us(name, value)


def epoch_us(when: datetime) -> int:
    """Return microseconds since 1970; a time without a zone is UTC."""
    aware = when if when.tzinfo else when.replace(tzinfo=UTC)
    return (aware - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)


def text(name: str, value: str) -> str:
    """Return the value as it is; an empty one is an error."""
    if not value:
        raise wrong(name, value, "it must not be empty")
    return value


def certificates(name: str, value: str) -> str | None:
    """Return what a PEM file of the driver's machine holds, for workers that have no such file."""
    return files.trusted_certificates(text(name, value))


def app_id(name: str, value: str) -> str:
    """Return an id under which a hub keeps commits; it puts the numbers of parts behind it."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,80}", value):
        raise wrong(name, value, "it's 1 to 80 letters, digits, '-', '_' and '.'")
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
"""Options under the names that they have in Spark's source for Kafka: which they are here, and how they are read."""
MEANT_NAMES = {
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
"""What options of other sources are called here."""
SPARKS_OWN = ("checkpointlocation", "queryname")
"""What Spark hands to a sink with the sink's own options."""


def _parsed(given: Mapping[str, str], known: Mapping[str, OptionParser]) -> dict[str, Any]:
    """Return the values of the options by their proper names; names are compared as Spark does, without case."""
    names = {name: (name, reader) for name, reader in known.items()}
    names |= {name: meant for name, meant in KAFKA_NAMES.items() if meant[0] in known}
    proper = {name.lower(): name for name in names}
    values: dict[str, Any] = {}
    by: dict[str, str] = {}
    for option, value in given.items():
        if (name := proper.get(option.lower())) is None:
            raise _unknown(option, known, proper)
        meant, reader = names[name]
        if meant in values:
            raise ArgumentError(f"smq options {by[meant]} and {name} say the same thing: give one of them.")
        values[meant], by[meant] = reader(name, value), name
    return values


def _unknown(option: str, known: Mapping[str, OptionParser], proper: Mapping[str, str]) -> ArgumentError:
    """Return the error for an option that there isn't, with the one that was meant, if that can be told."""
    close = difflib.get_close_matches(option.lower(), proper, 1)
    meant = MEANT_NAMES.get(option.lower()) if "topics" in known else None
    near = meant or (proper[close[0]] if close else None)
    hint = f"Did you mean {near}? " if near else ""
    return ArgumentError(f'Format smq has no option "{option}" here. {hint}It has: {", ".join(sorted(known))}.')


def _location(values: dict[str, Any]) -> str:
    """Return the folder or the address of the journal; a folder's path is made absolute here, on the driver."""
    if ("path" in values) == ("url" in values):
        raise ArgumentError(
            'The source smq needs to know the journal: load("app/.journal") for a folder, or option '
            'url="http://host:9357/rtl/journal/NAME" for a hub, and not both.'
        )
    where: str = values.pop("path", None) or values.pop("url")
    return where if files.is_address(where) else os.path.abspath(files.journal_folder(where))


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class ReadOptions:
    """The options of a read, batch or stream.

    Attributes:
        journal: absolute path of the folder, or the http(s) address.
        token: what the hub asks for; None takes it from the journal's folder.
        cafile: certificates to trust instead of the system's, PEM text.
        topics, exclude: MQTT filters; no topics means every row, those addressed to an ETID too.
        starting, ending: "earliest", "latest" or offsets; None is the default of the kind of read.
        starting_us, ending_us: times instead of offsets, microseconds since 1970, UTC.
        max_rows: at most so many rows in a micro-batch; None is no limit.
        max_bytes: about so many bytes at most in a micro-batch; None is `MAX_BYTES`.
        min_partitions: at least so many tasks of Spark, if there are as many rows.
        rows_per_partition, bytes_per_partition: at most so much in a task.
        parallelism: how many tasks work at a time; a micro-batch that is worth it has so many.
        batch_rows: Arrow batches are merged until they have so many rows.
        split_at: where micro-batches end in any case.
        fail_on_data_loss: rows that are gone are an error, otherwise they're passed over.
        include_pipeline: rows that a pipeline published are among the result.
        query: the name under which progress is reported to the journal; None reports nothing.
        retry_s: so long the source waits for a hub that is away.
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
            given: Spark's own mapping, whose names have lost their case.

        Returns:
            The options.

        Raises:
            ArgumentError: an unknown option, a value it can't have, or two that exclude each other.
        """
        values = _parsed(given, READ_OPTIONS)
        for edge in ("starting", "ending"):
            if f"{edge}Offsets" in values and f"{edge}Time" in values:
                raise ArgumentError(f"smq options {edge}Offsets and {edge}Time say the same thing: give one of them.")
        where = _location(values)
        options = cls(where, **{cls.FIELDS.get(name, name): value for name, value in values.items()})
        options.filter()
        return options

    def filter(self) -> Filter | None:
        """Return which topics to keep; None keeps all rows."""
        return Filter(self.topics or ("#",), self.exclude) if self.topics or self.exclude else None


@dataclass(frozen=True)
class WriteOptions:
    """The options of a write.

    Attributes:
        journal: absolute path of the folder, or the http(s) address.
        token: what the hub asks for; None takes it from the journal's folder.
        cafile: as for `ReadOptions`.
        retry_s: so long a write waits for a hub that is away.
        app_id, version: a write with the same two is done once, however often it is repeated; as Delta calls them.
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
            given: Spark's own mapping, with what it adds itself.

        Returns:
            The options.

        Raises:
            ArgumentError: an unknown option or a value it can't have.
        """
        values = _parsed(
            {name: value for name, value in given.items() if name.lower() not in SPARKS_OWN}, WRITE_OPTIONS
        )
        if ("txnAppId" in values) != ("txnVersion" in values):
            raise ArgumentError("smq options txnAppId and txnVersion go together: who writes, and which write of its.")
        where, retry_s = _location(values), values.get("retry", RETRY_S)
        by = values.get("txnAppId"), values.get("txnVersion", 0)
        return cls(where, values.get("token"), retry_s, *by, values.get("cafile"))


P = ParamSpec("P")
T = TypeVar("T")


def without_traceback(method: Callable[P, T]) -> Callable[P, T]:
    """Make a method raise errors of smqrt without where they came from."""

    @wraps(method)
    def call(*args: P.args, **keywords: P.kwargs) -> T:
        try:
            return method(*args, **keywords)
        except SmqrtError as error:
            raise error.with_traceback(None) from None

    return call

"""The options of `format("smq")`: what they are called, what they may be, and one clear error for each mistake."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from smqrt.errors import ArgumentError
from smqrt.journal import uris
from smqrt.journal.filters import Filter
from smqrt.journal.settings import parse_duration

Offsets = dict[str, int]
"""The next seq of every node, as in every offset of the journal."""

ROWS_PER_PARTITION = 1 << 19
BATCH_ROWS = 8192
RETRY_S = 60.0


def wrong(name: str, value: object, rule: str) -> ArgumentError:
    """Returns the error for a value that an option can't have."""
    return ArgumentError(f'smq option {name}="{value}": {rule}.')


def positive(name: str, value: str) -> int:
    """Returns a whole number of at least 1."""
    if not re.fullmatch(r"[0-9_]+", value) or int(value) < 1:
        raise wrong(name, value, "it's a whole number of at least 1")
    return int(value)


def switch(name: str, value: str) -> bool:
    """Returns True for "true" and False for "false"."""
    if value.lower() not in ("true", "false"):
        raise wrong(name, value, 'it is "true" or "false"')
    return value.lower() == "true"


def duration_s(name: str, value: str) -> float:
    """Returns the seconds of "30s", "2h", "500ms"."""
    try:
        return parse_duration(value)
    except ArgumentError as error:
        raise wrong(name, value, f"it's a duration like 30s or 2h: {error}") from None


def names(name: str, value: str) -> tuple[str, ...]:
    """Returns topic filters: a JSON list, or names between commas."""
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
    """Returns the offsets in JSON such as {"n1": 12345}."""
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(type(seq) is int and seq >= 0 for seq in found.values()):
        raise wrong(name, value, 'it\'s JSON with a seq for each node, such as {"n1": 12345}')
    return found


def place(name: str, value: str) -> str | Offsets:
    """Returns "earliest", "latest" or offsets."""
    return value.lower() if value.lower() in ("earliest", "latest") else seqs(name, value)


def time_us(name: str, value: str) -> int:
    """Returns microseconds since 1970 of an ISO time (UTC when it names no zone) or of a duration before now."""
    if re.fullmatch(r"[0-9.]+ *[a-z]+", value):
        when = datetime.now(UTC) - timedelta(seconds=duration_s(name, value))
    else:
        try:
            when = datetime.fromisoformat(value)
        except ValueError:
            raise wrong(name, value, "it's a time like 2026-11-21T15:00:00Z, or 2h for two hours ago") from None
    return epoch_us(when)


def epoch_us(when: datetime) -> int:
    """Returns microseconds since 1970; a time without a zone is UTC."""
    aware = when if when.tzinfo else when.replace(tzinfo=UTC)
    return (aware - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)


def text(name: str, value: str) -> str:
    """Returns the value as it is; an empty one is an error."""
    if not value:
        raise wrong(name, value, "it must not be empty")
    return value


Reader = Callable[[str, str], Any]

PLACE: dict[str, Reader] = {"path": text, "url": text, "token": text, "retry": duration_s}
READ: dict[str, Reader] = PLACE | {
    "topics": names,
    "exclude": names,
    "startingOffsets": place,
    "startingTime": time_us,
    "endingOffsets": place,
    "endingTime": time_us,
    "maxRowsPerTrigger": positive,
    "rowsPerPartition": positive,
    "batchRows": positive,
    "splitAt": seqs,
    "failOnDataLoss": switch,
    "includePipeline": switch,
    "queryName": text,
}
SPARKS_OWN = ("checkpointlocation", "queryname")
"""What Spark hands to a sink with the sink's own options."""


def parsed(given: Mapping[str, str], known: Mapping[str, Reader]) -> dict[str, Any]:
    """Returns the values of the options by their proper names; names are compared as Spark does, without case."""
    proper = {name.lower(): name for name in known}
    values: dict[str, Any] = {}
    for option, value in given.items():
        if (name := proper.get(option.lower())) is None:
            raise ArgumentError(f'Format smq has no option "{option}" here. It has: {", ".join(sorted(known))}.')
        values[name] = known[name](name, value)
    return values


def location(values: dict[str, Any]) -> str:
    """Returns the folder or the address of the journal; a folder's path is made absolute here, on the driver."""
    if ("path" in values) == ("url" in values):
        raise ArgumentError(
            'The source smq needs to know the journal: load("app/.journal") for a folder, or option '
            'url="http://host:9357/rtl/journal/NAME" for a hub, and not both.'
        )
    where: str = values.pop("path", None) or values.pop("url")
    return where if uris.is_address(where) else os.path.abspath(uris.journal(where))


@dataclass(frozen=True)
class ReadOptions:
    """The options of a read, batch or stream.

    Attributes:
        journal: absolute path of the folder, or the http(s) address.
        token: what the hub asks for; None takes it from the journal's folder.
        topics, exclude: MQTT filters; no topics means every row, those addressed to an ETID too.
        starting, ending: "earliest", "latest" or offsets; None is the default of the kind of read.
        starting_us, ending_us: times instead of offsets, microseconds since 1970, UTC.
        max_rows: at most so many rows in a micro-batch; None is no limit.
        rows_per_partition: at most so many rows in a task of Spark.
        batch_rows: Arrow batches are merged until they have so many rows.
        split_at: no micro-batch has rows on both sides of these offsets.
        fail_on_data_loss: rows that are gone are an error, otherwise they're passed over.
        include_pipeline: rows that a pipeline published are among the result.
        query: the name under which progress is reported to the journal; None reports nothing.
        retry_s: so long the source waits for a hub that is away.
    """

    journal: str
    token: str | None = None
    topics: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    starting: str | Offsets | None = None
    starting_us: int | None = None
    ending: str | Offsets | None = None
    ending_us: int | None = None
    max_rows: int | None = None
    rows_per_partition: int = ROWS_PER_PARTITION
    batch_rows: int = BATCH_ROWS
    split_at: Offsets = field(default_factory=dict)
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
        "rowsPerPartition": "rows_per_partition",
        "batchRows": "batch_rows",
        "splitAt": "split_at",
        "failOnDataLoss": "fail_on_data_loss",
        "includePipeline": "include_pipeline",
        "queryName": "query",
        "retry": "retry_s",
    }

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Self:
        """Reads Spark's options.

        Args:
            given: Spark's own mapping, whose names have lost their case.

        Returns:
            The options.

        Raises:
            ArgumentError: an unknown option, a value it can't have, or two that exclude each other.
        """
        values = parsed(given, READ)
        for edge in ("starting", "ending"):
            if f"{edge}Offsets" in values and f"{edge}Time" in values:
                raise ArgumentError(f"smq options {edge}Offsets and {edge}Time say the same thing: give one of them.")
        where = location(values)
        options = cls(where, **{cls.FIELDS.get(name, name): value for name, value in values.items()})
        options.filter()
        return options

    def filter(self) -> Filter | None:
        """Returns which topics to keep; None keeps all rows."""
        return Filter(self.topics or ("#",), self.exclude) if self.topics or self.exclude else None


@dataclass(frozen=True)
class WriteOptions:
    """The options of a write.

    Attributes:
        journal: absolute path of the folder, or the http(s) address.
        token: what the hub asks for; None takes it from the journal's folder.
        retry_s: so long a write waits for a hub that is away.
    """

    journal: str
    token: str | None = None
    retry_s: float = RETRY_S

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Self:
        """Reads Spark's options.

        Args:
            given: Spark's own mapping, with what it adds itself.

        Returns:
            The options.

        Raises:
            ArgumentError: an unknown option or a value it can't have.
        """
        values = parsed({name: value for name, value in given.items() if name.lower() not in SPARKS_OWN}, PLACE)
        where = location(values)
        return cls(where, values.get("token"), values.get("retry", RETRY_S))

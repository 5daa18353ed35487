"""Settings of a journal: `journal=` of a hub, in Python, Lua and `smqrt.toml`.

True                                          record everything, with the defaults
"path"                                        the same, in this folder
{"topics": ["site1/#"], "retain": "30d", …}   settings by name
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smqrt.errors import ArgumentError
from smqrt.journal import files
from smqrt.journal.payload_schema import merge_schemas
from smqrt.journal.planning import Filter
from smqrt.settings.option_types import (
    InvalidValueError,
    Rule,
    choice,
    duration,
    make,
    number,
    option,
    optional,
    options_of,
    positive_duration,
    read,
    size,
    switch,
)

FOLDER = ".journal"
PREFIX = "journal."
_DEFAULT_MAX_BYTES = 20 * 10**9
_HARD_FACTOR = 2
"""`hard_bytes` is this many times `max_bytes`: a stopped pipeline may lag by another `max_bytes`."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _name(value: object) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InvalidValueError
    return value


def _path(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise InvalidValueError
    remedy = "a hub writes to a local disk; `smqrt journal export` writes files for other places"
    return files.local_folder(value, f"{PREFIX}path:", remedy).expanduser()


def _topic_filters(value: object) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, Sequence):
        raise InvalidValueError
    try:
        return Filter(listed).topics
    except ArgumentError as error:
        raise InvalidValueError(
            f"a list of topic filters ({str(error).removeprefix('topics: ').rstrip('.')})"
        ) from None


def _sync(value: object) -> Any:  # `parse` moves a time to `sync_s`
    return value if value in ("publish", "always") else duration(0.01, 3600).read(value)


def _schema(value: object) -> Mapping[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(ddl, str) for ddl in value.values()):
        raise InvalidValueError
    Filter(list(value) or ["#"])
    merge_schemas(value)
    return dict(value)


_NAMED = Rule("a name: up to 64 letters, digits, '.', '_' and '-'", _name)
_TOPICS = Rule("a list of topic filters such as ['site1/#']", _topic_filters)
_SCHEMA = Rule("DDL by topic filter such as {'site1/#': 'device string, temp double'}", _schema)


@dataclass(frozen=True)
class CompactSettings:
    """The settings of compaction, which converts segments to Parquet files: the table of `compact`."""

    after_s: float = option(
        600.0, duration(), "The age of a segment at which it is compacted.", name="after", shown="`10m`"
    )
    json: str | None = option(None, optional(choice("variant")), "`variant`: JSON is stored as VARIANT too.")
    schema: Mapping[str, str] = option(
        dict, _SCHEMA, "Spark DDL by topic filter: payloads get typed columns.", shown=""
    )


def _compact(value: object) -> CompactSettings | None:
    if value is None or value is False:
        return None
    if not isinstance(value, Mapping) and value is not True:
        raise InvalidValueError
    return make(CompactSettings, {} if value is True else value, f"{PREFIX}compact.")


@dataclass(frozen=True)
class JournalSettings:
    """The settings of a journal: the table of `journal=`. `parse` creates an object.

    Attributes:
        sync: "interval": synced to the disk every `sync_s`. "publish": written to the file before any subscriber
            receives the message. "always": synced to the disk before that.
        sync_s: the interval, seconds.
        hard_bytes: `parse` uses twice `max_bytes` unless it is given.
    """

    path: Path = option(
        Path(FOLDER),
        Rule("a folder, relative to the application's", _path),
        "The folder, relative to that of the application",
    )
    name: str = option(
        "journal",
        _NAMED,
        "The journal's name in addresses: `/rtl/journal/NAME/`",
        shown="the application's folder",
    )
    node: str = option(
        "n1",
        _NAMED,
        "The name of the writer, in every row. Hubs that [share a folder](#several-hubs-one-folder) need "
        "different names",
    )
    topics: tuple[str, ...] = option(
        ("#",), _TOPICS, "The topics to record, with the wildcards `+` and `#`", shown='`["#"]`'
    )
    exclude: tuple[str, ...] = option((), _TOPICS, "Topics among these that are not recorded", shown="`[]`")
    direct: bool = option(True, switch(), "Also record messages to one client (an etid)")
    flush_ms: float = option(
        10.0, number(0.1, 60_000, "ms"), "Maximum time until a message is in a file, in ms", shown="`10`"
    )
    sync: str = option(
        "interval",
        Rule("'publish', 'always' or a time from '10ms' to '1h'", _sync),
        "When messages are synced to the disk, see [guarantees](#guarantees): a time, `publish`, or `always`",
        shown="`1s`",
    )
    sync_s: float = 1.0
    retain_s: float | None = option(
        7 * 86400.0,
        optional(positive_duration()),
        "How long messages are kept; null: while there is space",
        name="retain",
        shown="`7d`",
    )
    max_bytes: int | None = option(_DEFAULT_MAX_BYTES, optional(size()), "Maximum size of the journal", shown="`20GB`")
    hard_bytes: int | None = option(
        _HARD_FACTOR * _DEFAULT_MAX_BYTES,
        optional(size()),
        "Maximum size including messages that a pipeline has not read. The default lets a stopped pipeline "
        "lag by `max_bytes` more; null: no limit",
        shown="twice `max_bytes`",
    )
    reader_timeout_s: float | None = option(
        7 * 86400.0,
        optional(positive_duration()),
        "Time without a read after which messages are no longer kept for a pipeline; null: never",
        shown="`7d`",
    )
    min_free_bytes: int = option(
        10**9,
        size(),
        "With less free space on the disk, `retain` and `max_bytes` also limit messages that a pipeline has not read",
        shown="`1GB`",
    )
    segment_bytes: int = option(
        64 * 10**6, size(65536), "Size at which a segment is complete and the next one begins", shown="`64MB`"
    )
    compact: CompactSettings | None = option(
        None,
        Rule("true, false or a table with after, json and schema", _compact),
        "Convert complete segments to Parquet files: true, or a table with `after` (`10m`), `json` and "
        "`schema`, see [compaction](#compaction)",
        shown="none",
    )


def parse(value: object, folder: Path) -> JournalSettings | None:
    """Return the settings of a journal; None for no journal.

    Args:
        value: False or None, True, a path, or the settings by name.
        folder: the application's folder: paths are relative to it, and the default is `.journal` in it.

    Raises:
        ArgumentError: one sentence that names the setting, the rule and the value.
    """
    if value is None or value is False:
        return None
    if value is True:
        value = {}
    elif isinstance(value, str | Path):
        value = {"path": value}
    if not isinstance(value, Mapping):
        raise ArgumentError(f"journal must be true, false, a path, or a table of settings, not {value!r}.")
    folder = Path(folder)
    found: dict[str, Any] = {"name": folder.resolve().name}
    if not _NAME.fullmatch(found["name"]):
        found["name"] = "journal"
    found |= read(JournalSettings, value, PREFIX)
    found["path"] = folder / found.get("path", FOLDER)
    if isinstance(every_s := found.get("sync"), float):  # a time: the interval of syncs
        found |= {"sync": "interval", "sync_s": every_s}
    settings = JournalSettings(**found)
    if "hard_bytes" not in found:
        settings = replace(settings, hard_bytes=settings.max_bytes and _HARD_FACTOR * settings.max_bytes)
    if settings.hard_bytes is not None and settings.hard_bytes < (settings.max_bytes or 0):
        raise ArgumentError(
            f"{PREFIX}hard_bytes must be at least max_bytes ({settings.max_bytes}), not {settings.hard_bytes}."
        )
    if settings.max_bytes is not None and settings.max_bytes < 2 * settings.segment_bytes:
        raise ArgumentError(
            f"{PREFIX}max_bytes must be at least two segments ({2 * settings.segment_bytes} bytes), not "
            f"{settings.max_bytes}; a smaller segment_bytes lowers this limit."
        )
    return settings


def names() -> list[str]:
    """Return the names of the settings, in the order of the manual."""
    return list(options_of(JournalSettings))

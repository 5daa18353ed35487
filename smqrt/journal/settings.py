"""What a journal can be told: `journal=` of a hub, in Python, Lua and `smqrt.toml`.

True                      everything, with the defaults
"path"                    the same, in this folder
{"topics": ["site1/#"], "retain": "30d", …}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from smqrt.errors import ArgumentError
from smqrt.journal import uris
from smqrt.journal.filters import Filter
from smqrt.journal.typed import merged

FOLDER = ".journal"
_HARD = 2
"""So many times `max_bytes` is `hard_bytes`: a pipeline that is away may be as far behind as the journal is long."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SECONDS = {
    "us": 1e-6, "ms": 1e-3, "s": 1, "second": 1, "m": 60, "min": 60, "minute": 60, "h": 3600, "hour": 3600,
    "d": 86400, "day": 86400, "w": 604800, "week": 604800,
}  # fmt: skip
_BYTES = {"": 1, "b": 1} | {
    f"{prefix}{i}b": (1024 if i else 1000) ** power for power, prefix in enumerate("kmgt", 1) for i in ("", "i")
}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_duration(value: object) -> float:
    """Returns seconds.

    Args:
        value: a text such as "200 ms", "10m", "7d", "1 hour"; or a number of seconds.

    Raises:
        ArgumentError: it is none, or negative.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return float(value)
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    unit = match[2].lower() if match else ""
    factor = _SECONDS.get(unit) or _SECONDS.get(unit.removesuffix("s"))
    if not match or not factor:
        raise ArgumentError(f"{value!r} is no duration; it's a number and a unit, such as '200 ms', '10m', '2h', '7d'")
    return float(match[1]) * factor


def parse_size(value: object) -> int:
    """Returns bytes.

    Args:
        value: a text such as "64MB" (10⁶), "64MiB" (2²⁰), "20 GB"; or a number of bytes.

    Raises:
        ArgumentError: it is none, or negative.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    factor = _BYTES.get(match[2].lower()) if match else None
    if not match or not factor:
        raise ArgumentError(f"{value!r} is no size; it's a number and a unit, such as '64MB', '20GB', '512MiB'")
    return int(float(match[1]) * factor)


@dataclass(frozen=True)
class CompactSettings:
    """How segments become Parquet.

    Attributes:
        after_s: how old a segment is then, seconds.
        json: "variant": payloads that are JSON are kept as VARIANT too.
        schema: Spark DDL by topic filter: payloads get typed columns.
    """

    after_s: float = 600.0
    json: str | None = None
    schema: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class JournalSettings:
    """What a journal keeps, where, and for how long. `parse` makes one out of what users write.

    Attributes:
        path: its folder.
        name: what it is called in addresses; the application's folder by default.
        node: who writes: part of every row, and of file names.
        topics, exclude: filters of the topics it keeps.
        direct: keep messages to one client too.
        flush_ms: how long a message waits at most until it is in a file, milliseconds.
        sync: "interval": the disk is told every `sync_s`; "publish": in the file before any subscriber gets it;
            "always": on the disk before.
        sync_s: how often the disk is told to keep what it has, seconds.
        retain_s: how long rows are kept, seconds; None: as long as there is room.
        max_bytes: how long the journal may become, but not past what a pipeline has yet to read.
        hard_bytes: how long at the very most, pipelines or not; None: no such limit. `parse` takes twice `max_bytes`.
        reader_timeout_s: a pipeline that has read nothing for so long is given up: its rows are kept no longer than
            others; None: never.
        min_free_bytes: with less on the disk, no pipeline keeps rows that would go otherwise.
        segment_bytes: how long a segment becomes.
        compact: how segments become Parquet; None: they don't.
    """

    path: Path
    name: str = "journal"
    node: str = "n1"
    topics: tuple[str, ...] = ("#",)
    exclude: tuple[str, ...] = ()
    direct: bool = True
    flush_ms: float = 10.0
    sync: str = "interval"
    sync_s: float = 1.0
    retain_s: float | None = 7 * 86400.0
    max_bytes: int | None = 20 * 10**9
    hard_bytes: int | None = _HARD * 20 * 10**9
    reader_timeout_s: float | None = 7 * 86400.0
    min_free_bytes: int = 10**9
    segment_bytes: int = 64 * 10**6
    compact: CompactSettings | None = None


def parse(value: object, folder: Path) -> JournalSettings | None:
    """Returns the settings of a journal; None when there is to be none.

    Args:
        value: False or None, True, a path, or the settings by name.
        folder: of the application: what paths are relative to, and where `.journal` goes by default.

    Raises:
        ArgumentError: one sentence that names the setting, the rule and the remedy.
    """
    if value is None or value is False:
        return None
    if value is True:
        value = {}
    elif isinstance(value, str | Path):
        value = {"path": value}
    if not isinstance(value, Mapping):
        raise ArgumentError(f"journal: {value!r} is none of true, false, a path, or settings such as topics and retain")
    return _settings(value, Path(folder))


def _settings(values: Mapping[str, object], folder: Path) -> JournalSettings:
    known = _READERS
    for name in values:
        if name not in known and name != "path":
            _refuse(str(name), f"there is no such setting; there are {', '.join(['path', *known])}")
    found: dict[str, Any] = {"path": _path(values.get("path"), folder), "name": _default_name(folder)}
    for name, value in values.items():
        if name != "path":
            try:
                found |= known[name](value)
            except ArgumentError as error:
                _refuse(name, str(error).removeprefix(f"{name}: ").rstrip("."))
    settings = JournalSettings(**found)
    if "hard_bytes" not in found:
        settings = replace(settings, hard_bytes=settings.max_bytes and _HARD * settings.max_bytes)
    _check_limits(settings)
    return settings


def _refuse(name: str, what: str) -> NoReturn:
    raise ArgumentError(f"journal.{name}: {what}.")


def _path(value: object, folder: Path) -> Path:
    if value is None:
        return folder / FOLDER
    if not isinstance(value, str | Path) or not str(value):
        _refuse("path", f"{value!r} is no path; it's a folder, relative to the application's")
    remedy = "a hub writes to a disk of its own; `smqrt journal export` makes files for other places"
    return folder / uris.folder(value, "journal.path:", remedy).expanduser()


def _default_name(folder: Path) -> str:
    name = folder.resolve().name
    return name if _NAME.fullmatch(name) else "journal"


def _check_limits(settings: JournalSettings) -> None:
    if settings.hard_bytes is not None and settings.hard_bytes < (settings.max_bytes or 0):
        _refuse("hard_bytes", f"{settings.hard_bytes} is less than max_bytes ({settings.max_bytes}); give more")
    if settings.max_bytes is not None and settings.max_bytes < 2 * settings.segment_bytes:
        _refuse(
            "max_bytes",
            f"{settings.max_bytes} is less than two segments ({2 * settings.segment_bytes}); give more, or a smaller "
            "segment_bytes",
        )


_Reader = Callable[[object], dict[str, Any]]


def _word(name: str) -> _Reader:
    def read(value: object) -> dict[str, Any]:
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise ArgumentError(f"{value!r} is no name; use up to 64 letters, digits, '.', '_' and '-'")
        return {name: value}

    return read


def _filters(name: str) -> _Reader:
    def read(value: object) -> dict[str, Any]:
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, Sequence):
            raise ArgumentError(f"{value!r} is no list of topic filters, such as ['site1/#']")
        try:
            return {name: Filter(listed).topics}
        except ArgumentError as error:
            raise ArgumentError(str(error).removeprefix("topics: ")) from None

    return read


def _switch(name: str) -> _Reader:
    def read(value: object) -> dict[str, Any]:
        if not isinstance(value, bool):
            raise ArgumentError(f"{value!r} is neither true nor false")
        return {name: value}

    return read


def _flush(value: object) -> dict[str, Any]:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.1 <= value <= 60_000:
        raise ArgumentError(f"{value!r} is no number of milliseconds from 0.1 to 60000; 10 is the default")
    return {"flush_ms": float(value)}


def _sync(value: object) -> dict[str, Any]:
    if value in ("publish", "always"):
        return {"sync": value}
    try:
        seconds = parse_duration(value)
    except ArgumentError:
        seconds = 0.0
    if not 0.01 <= seconds <= 3600:
        raise ArgumentError(f"{value!r} is none of 'publish', 'always' or a time from '10ms' to '1h', such as '1s'")
    return {"sync": "interval", "sync_s": seconds}


def _retain(value: object) -> dict[str, Any]:
    seconds = None if value is None else parse_duration(value)
    if seconds == 0:
        raise ArgumentError(f"{value!r} would keep nothing; give a time such as '7d', or leave the journal off")
    return {"retain_s": seconds}


def _reader_timeout(value: object) -> dict[str, Any]:
    seconds = None if value is None else parse_duration(value)
    if seconds == 0:
        raise ArgumentError(f"{value!r} would keep nothing for pipelines; give a time such as '7d', or null for ever")
    return {"reader_timeout_s": seconds}


def _bytes(name: str, least: int = 0, optional: bool = True) -> _Reader:
    def read(value: object) -> dict[str, Any]:
        size = None if value is None and optional else parse_size(value)
        if size is not None and size < least:
            raise ArgumentError(f"{value!r} is too small; it's at least {least} bytes")
        return {name: size}

    return read


def _compact(value: object) -> dict[str, Any]:
    if value is None or value is False:
        return {"compact": None}
    if not isinstance(value, Mapping) and value is not True:
        raise ArgumentError(f"{value!r} is neither true, false nor settings: after, json, schema")
    values = {} if value is True else dict(value)
    return {"compact": _compact_settings(values)}


def _compact_settings(values: dict[str, Any]) -> CompactSettings:
    for name in values:
        if name not in ("after", "json", "schema"):
            raise ArgumentError(f"there is no setting {name!r}; there are after, json, schema")
    json, schema = values.get("json"), values.get("schema") or {}
    if json not in (None, "variant"):
        raise ArgumentError(f"json: {json!r} is not 'variant'; leave it out to keep payloads as they are")
    if not isinstance(schema, Mapping) or not all(isinstance(ddl, str) for ddl in schema.values()):
        raise ArgumentError("schema: it's DDL by topic filter, such as {'site1/#': 'device string, temp double'}")
    Filter(list(schema) or ["#"])
    merged(schema)
    return CompactSettings(parse_duration(values.get("after", "10m")), json, dict(schema))


_READERS: dict[str, _Reader] = {
    "name": _word("name"),
    "node": _word("node"),
    "topics": _filters("topics"),
    "exclude": _filters("exclude"),
    "direct": _switch("direct"),
    "flush_ms": _flush,
    "sync": _sync,
    "retain": _retain,
    "max_bytes": _bytes("max_bytes"),
    "hard_bytes": _bytes("hard_bytes"),
    "reader_timeout_s": _reader_timeout,
    "min_free_bytes": _bytes("min_free_bytes", optional=False),
    "segment_bytes": _bytes("segment_bytes", least=65536, optional=False),
    "compact": _compact,
}


def names() -> list[str]:
    """Returns what a journal can be told, in the order of the manual."""
    return ["path", *_READERS]

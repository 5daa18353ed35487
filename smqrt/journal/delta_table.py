"""Delta tables of compacted files: a log beside the files, or a copy elsewhere.

The log, in `data/_delta_log`, lists the files of the manifest; it copies no data. Each update is one commit: new
compacted files are added, merged and expired files are removed, so that a reader of the table sees each row once. The
log can be rebuilt from the manifest at any time.

A copy, in another folder or an object store, keeps the rows that retention removes from the journal. A merged file
replaces its sources.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from smqrt.errors import JournalError
from smqrt.journal import files as locations
from smqrt.journal import manifest, parquet_files, retention, tables
from smqrt.journal.manifest import DataFile
from smqrt.journal.record import iso

if TYPE_CHECKING:
    from deltalake import DeltaTable, Schema

NEEDS_DELTA = "Delta tables need deltalake, which is not installed: pip install 'smqrt[delta]'."
TABLE, _LOG, _TYPED = "data", "_delta_log", "json"
_FOLDERS = ("date", "hour")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_NULL = "__HIVE_DEFAULT_PARTITION__"  # the folder name of null in Hive's layout
_FILES_PER_COMMIT = 64
"""Number of files of one commit. After a kill, committed files are not copied again."""
_KEPT_HOURS = 7 * 24
"""Time for which replaced files stay for readers of older versions of the table."""


class UpdatedTable(NamedTuple):
    """The result of an update.

    Attributes:
        table: the folder or URI of the table.
        added, removed: number of files.
        files: number of files in the table.
    """

    table: Path | str
    added: int
    removed: int
    files: int


def import_deltalake() -> ModuleType:
    """Return the module deltalake.

    Raises:
        JournalError: it is not installed.
    """
    try:
        import deltalake
    except ImportError:
        raise JournalError(NEEDS_DELTA) from None
    return deltalake


def one_line(error: Exception) -> str:
    """Return the message of a deltalake error as one line without colors."""
    lines = (_COLOR.sub("", line).strip(" ↳\t.") for line in str(error).splitlines())
    return ": ".join(filter(None, lines)) or type(error).__name__


def update_table(journal: Path) -> UpdatedTable:
    """Create or update the Delta table of a journal.

    Args:
        journal: the journal's folder.

    Raises:
        JournalError: deltalake or pyarrow is missing, the journal can't be read, or the table can't be written.
    """
    import pyarrow

    deltalake = import_deltalake()
    location = journal / TABLE
    try:
        wanted = table_files(journal)
        table = deltalake.DeltaTable(location) if (location / _LOG).is_dir() else None
        known: set[str] = set()
        if table is not None:
            known = set(pyarrow.table(table.get_add_actions())["path"].to_pylist())
        schema = table_schema(deltalake, table, [location / path for path in wanted if path not in known])
        if table is None or table.schema() != schema:
            shutil.rmtree(location / _LOG, ignore_errors=True)  # a table's columns can't change their types
            os.makedirs(location, exist_ok=True)
            table, known = create_table(deltalake, location, schema), set()
        fresh, obsolete = sorted(wanted.keys() - known), sorted(known - wanted.keys())
        if fresh or obsolete:
            commit_files(table, schema, {path: wanted[path] for path in fresh}, obsolete)
    except (deltalake.exceptions.DeltaError, OSError) as error:
        raise JournalError(f"The Delta table in {location} can't be written: {one_line(error)}.") from None
    return UpdatedTable(location, len(fresh), len(obsolete), len(wanted))


def table_files(journal: Path) -> dict[str, DataFile]:
    """Return the compacted files of a journal by their paths in the table."""
    return {file.path.removeprefix(f"{TABLE}/"): file for file in manifest.load(journal).all_files()}


def create_table(deltalake: ModuleType, location: Path | str, schema: Schema) -> DeltaTable:
    """Create an empty table, and return it.

    Args:
        deltalake: the module.
        location: the folder or URI of the table.
        schema: its columns.
    """
    table: DeltaTable = deltalake.DeltaTable.create(location, schema, partition_by=list(_FOLDERS), name="messages")
    return table


def commit_files(table: DeltaTable, schema: Schema, added: Mapping[str, DataFile], removed: Sequence[str]) -> None:
    """Add and remove files in one commit.

    Args:
        table: the deltalake table.
        schema: its columns.
        added: files by path.
        removed: paths.
    """
    from deltalake.transaction import AddAction, RemoveAction

    now_ms = time.time_ns() // 1_000_000
    actions: list[Any] = []
    for path, file in added.items():
        minimum = {"seq": file.first, "ts": milliseconds(file.ts_min_us), "node": file.node}
        # The maximum is rounded up to milliseconds: too small a maximum would hide rows from a query.
        maximum = {"seq": file.last, "ts": milliseconds(file.ts_max_us + 999), "node": file.node}
        statistics = json.dumps({"numRecords": file.rows, "minValues": minimum, "maxValues": maximum})
        actions.append(AddAction(path, file.bytes, _partition_values(path), now_ms, True, statistics))
    actions += [RemoveAction(path, True, now_ms, None, _partition_values(path)) for path in removed]
    table.create_write_transaction(actions, "append", schema, partition_by=list(_FOLDERS))


def table_schema(deltalake: ModuleType, table: DeltaTable | None, paths: Iterable[Path]) -> Schema:
    """Return the columns: those of rows, those of folders, and `json` if all files with that column agree on its type.

    Args:
        deltalake: the module.
        table: the table so far; None for a new one.
        paths: the new files.
    """
    import pyarrow

    found = [parquet_files.plain_schema(path) for path in paths]
    if table is not None:
        found.append(pyarrow.schema(table.schema().to_arrow()))
    typed = {
        deltalake.Schema.from_arrow(pyarrow.schema([one.field(_TYPED)])).to_json()
        for one in found
        if _TYPED in one.names
    }
    fields = [field.with_nullable(True) for field in tables.schema()]
    fields += [pyarrow.field("date", pyarrow.date32()), pyarrow.field("hour", pyarrow.string())]
    plain = json.loads(deltalake.Schema.from_arrow(pyarrow.schema(fields)).to_json())
    if len(typed) == 1:  # files with different types of the column can't be in one table
        plain["fields"] += json.loads(typed.pop())["fields"]
    columns: Schema = deltalake.Schema.from_json(json.dumps(plain))
    return columns


def _partition_values(path: str) -> dict[str, str | None]:
    pairs = (folder.split("=", 1) for folder in path.split("/")[:-1])
    return {name: None if value == _NULL else unquote(value) for name, value in pairs}


def milliseconds(ts_us: int) -> str:
    """Return a time in Delta's format: truncated to milliseconds."""
    return f"{iso(ts_us)[:23]}Z"


# ---- a copy elsewhere


class _Span(NamedTuple):
    """The range of a file's rows: node, numbers, and times in Delta's format."""

    node: str
    first: int
    last: int
    earliest: str
    latest: str

    @classmethod
    def of(cls, file: DataFile) -> _Span:
        times = milliseconds(file.ts_min_us), milliseconds(file.ts_max_us + 999)
        return cls(file.node, file.first, file.last, *times)

    def contains(self, other: _Span) -> bool:
        in_time = self.earliest <= other.earliest and other.latest <= self.latest
        return in_time and self.first <= other.first and other.last <= self.last

    def overlaps(self, other: _Span) -> bool:
        return self.node == other.node and self.first <= other.last and other.first <= self.last


def update_copy(journal: Path, to: str, on_files: Callable[[int], object] = lambda count: None) -> UpdatedTable:
    """Copy new compacted files into a Delta table, which is created when it is missing.

    Args:
        journal: the journal's folder.
        to: a folder, or a URI that pyarrow and deltalake support, such as s3://bucket/x, with keys in the environment.
        on_files: called with the number of files after each commit.

    Raises:
        JournalError: deltalake or pyarrow is missing, the journal can't be read, the table can't be written, or it
            belongs to another journal.
        ArgumentError: the URI is not supported.
    """
    deltalake = import_deltalake()
    to = to if locations.scheme(to) else str(Path(to).absolute())
    try:
        system, root = locations.filesystem(to)
        makes_folders = not locations.is_elsewhere(to)  # object stores have none
        table = deltalake.DeltaTable(to) if deltalake.DeltaTable.is_deltatable(to) else None
        known = _known(table, to)
        wanted = table_files(journal)
        fresh = {path: file for path, file in sorted(wanted.items()) if path not in known}
        replaced = _replaced(known, fresh, to)
        paths = dict(zip(fresh, retention.hold_files(journal.absolute(), list(fresh.values())), strict=True))
        schema = _schema(deltalake, table, list(paths.values()), to)
        if table is None:
            if makes_folders:
                system.create_dir(root, recursive=True)
            table = create_table(deltalake, to, schema)
        names = list(fresh)
        for group in (names[at : at + _FILES_PER_COMMIT] for at in range(0, len(names), _FILES_PER_COMMIT)):
            for path in group:
                _copy(paths[path], system, f"{root}/{path}", makes_folders)
            obsolete = [old for path in group for old in replaced.get(path, ())]
            commit_files(table, schema, {path: fresh[path] for path in group}, obsolete)
            on_files(len(group))
        removed = sum(map(len, replaced.values()))
        if removed:
            table.vacuum(_KEPT_HOURS, dry_run=False)
    except (deltalake.exceptions.DeltaError, OSError) as error:
        raise JournalError(f"The Delta table in {to} can't be written: {one_line(error)}.") from None
    return UpdatedTable(to, len(fresh), removed, len(known) + len(fresh) - removed)


def _known(table: Any, to: str) -> dict[str, _Span]:
    """Return the files of the table and their ranges, from the statistics that `commit_files` stored."""
    import pyarrow

    if table is None:
        return {}
    actions = pyarrow.table(table.get_add_actions(flatten=True)).to_pylist()
    names = ("min.node", "min.seq", "max.seq", "min.ts", "max.ts")
    if any(action.get(name) is None for action in actions for name in names):
        raise JournalError(f"The Delta table in {to} was not created from a journal: choose another location.")
    found = {}
    for action in actions:
        node, first, last, *times = (action[name] for name in names)
        earliest, latest = (milliseconds(round(at.timestamp() * 1e6)) for at in times)
        found[action["path"]] = _Span(node, first, last, earliest, latest)
    return found


def _replaced(known: Mapping[str, _Span], fresh: Mapping[str, DataFile], to: str) -> dict[str, list[str]]:
    """Return, by new file, the files of the table that it replaces."""
    found: dict[str, list[str]] = {}
    for path, file in fresh.items():
        span = _Span.of(file)
        overlapping = [old for old, other in known.items() if span.overlaps(other)]
        if not all(span.contains(known[old]) for old in overlapping):  # a merged file has all rows of its sources
            raise JournalError(
                f"The Delta table in {to} has rows of another journal with the same numbers ({file.first} to "
                f"{file.last} of {file.node}): choose another location."
            )
        if overlapping:
            found[path] = overlapping
    return found


def _schema(deltalake: ModuleType, table: Any, paths: list[Path], to: str) -> Any:
    """Return the columns of the table, with the column `json` if the first files had it."""
    if table is None:
        return table_schema(deltalake, None, paths)
    kind = _json_type(table.schema())
    for path in paths if kind is not None else ():
        new = _json_type(table_schema(deltalake, None, [path]))
        if new is not None and new != kind:
            raise JournalError(
                f"The Delta table in {to} has the typed column json as {kind}, and {path.name} has it as {new}: "
                "compact with the same --schema, or choose another location."
            )
    _add_columns(deltalake, table)
    return table.schema()


def _add_columns(deltalake: ModuleType, table: Any) -> None:
    """Add the columns that a table lacks, because an older version created it; they are null in its rows."""
    known = {field.name for field in table.schema().fields}
    wanted = table_schema(deltalake, None, ())
    if missing := [field for field in wanted.fields if field.name not in known]:
        table.alter.add_columns(missing)


def _json_type(schema: Any) -> Any:
    return {field.name: field.type for field in schema.fields}.get(_TYPED)


def _copy(path: Path, system: Any, to: str, makes_folders: bool) -> None:
    from pyarrow import fs

    if makes_folders:
        system.create_dir(to.rpartition("/")[0], recursive=True)
    fs.copy_files(str(path), to, source_filesystem=fs.LocalFileSystem(), destination_filesystem=system)

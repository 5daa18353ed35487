"""Compacted files as a Delta table: a log in `data/_delta_log` that names the files which the manifest names.

Nothing is copied. Each update is one commit: what was compacted since then is added, what was joined or has expired is
removed, so that a reader of the table sees each row once. The log can be made anew at any time from the manifest.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from smqrt.errors import JournalError
from smqrt.journal import manifest, merge, tables
from smqrt.journal.manifest import DataFile
from smqrt.journal.timestamps import iso

NEEDS_DELTA = "Delta tables need deltalake, which is not installed: pip install 'smqrt[delta]' brings it."
TABLE, _LOG, _TYPED = "data", "_delta_log", "json"
_FOLDERS = ("date", "hour")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NULL = "__HIVE_DEFAULT_PARTITION__"


class Updated(NamedTuple):
    """What an update did.

    Attributes:
        table: the folder or URI to name to others.
        added, removed: how many files.
        files: how many the table has.
    """

    table: Path | str
    added: int
    removed: int
    files: int


def imported() -> Any:
    """Returns the module deltalake.

    Raises:
        JournalError: it is missing.
    """
    try:
        import deltalake
    except ImportError:
        raise JournalError(NEEDS_DELTA) from None
    return deltalake


def one_line(error: Exception) -> str:
    """Returns what an error of deltalake says, which has lines and colours, as the end of a sentence."""
    lines = (_COLOUR.sub("", line).strip(" ↳\t.") for line in str(error).splitlines())
    return ": ".join(filter(None, lines)) or type(error).__name__


def update(journal: Path) -> Updated:
    """Makes the Delta table of a journal, or brings it up to date.

    Args:
        journal: the journal's folder.

    Raises:
        JournalError: deltalake or pyarrow is missing, the journal can't be read, or the table can't be written.
    """
    deltalake = imported()
    try:
        return _updated(deltalake, journal)
    except (deltalake.exceptions.DeltaError, OSError) as error:
        raise JournalError(f"The Delta table in {journal / TABLE} can't be written: {one_line(error)}.") from None


def _updated(deltalake: Any, journal: Path) -> Updated:
    place, wanted = journal / TABLE, files(journal)
    table = deltalake.DeltaTable(place) if (place / _LOG).is_dir() else None
    known = _known(table)
    schema = schema_of(deltalake, table, [place / path for path in wanted if path not in known])
    if table is None or table.schema() != schema:
        shutil.rmtree(place / _LOG, ignore_errors=True)  # a table can't change the type of a column
        os.makedirs(place, exist_ok=True)
        table, known = create(deltalake, place, schema), set()
    fresh, gone = sorted(wanted.keys() - known), sorted(known - wanted.keys())
    if fresh or gone:
        commit(table, schema, {path: wanted[path] for path in fresh}, gone)
    return Updated(place, len(fresh), len(gone), len(wanted))


def files(journal: Path) -> dict[str, DataFile]:
    """Returns the compacted files of a journal by the paths that they have in its table."""
    return {file.path.removeprefix(f"{TABLE}/"): file for file in manifest.load(journal).all_files()}


def create(deltalake: Any, place: Path | str, schema: Any) -> Any:
    """Makes a table without rows, and returns it."""
    return deltalake.DeltaTable.create(place, schema, partition_by=list(_FOLDERS), name="messages")


def commit(table: Any, schema: Any, added: Mapping[str, DataFile], removed: Sequence[str]) -> None:
    """Adds files to a table and takes others off, in one commit.

    Args:
        table: deltalake's.
        schema: of its columns.
        added: files by path.
        removed: paths.
    """
    actions = [*_additions(added.items()), *_removals(removed)]
    table.create_write_transaction(actions, "append", schema, partition_by=list(_FOLDERS))


def _known(table: Any) -> set[str]:
    import pyarrow

    return set(pyarrow.table(table.get_add_actions())["path"].to_pylist()) if table is not None else set()


def schema_of(deltalake: Any, table: Any, paths: Iterable[Path]) -> Any:
    """Returns the columns of rows, those of the folders, and typed JSON where all files that have it have it alike.

    Args:
        deltalake: the module.
        table: with files of before; None for none.
        paths: of files.
    """
    import pyarrow

    found = [merge.plain_schema(path) for path in paths]
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
    if len(typed) == 1:
        plain["fields"] += json.loads(typed.pop())["fields"]
    return deltalake.Schema.from_json(json.dumps(plain))


def _additions(files: Iterable[tuple[str, DataFile]]) -> Iterator[Any]:
    from deltalake.transaction import AddAction

    now_ms = time.time_ns() // 1_000_000
    for path, file in files:
        yield AddAction(path, file.bytes, _values(path), now_ms, True, _statistics(file))


def _removals(paths: Iterable[str]) -> Iterator[Any]:
    from deltalake.transaction import RemoveAction

    now_ms = time.time_ns() // 1_000_000
    for path in paths:
        yield RemoveAction(path, True, now_ms, None, _values(path))


def _values(path: str) -> dict[str, str | None]:
    pairs = (folder.split("=", 1) for folder in path.split("/")[:-1])
    return {name: None if value == _NULL else unquote(value) for name, value in pairs}


def _statistics(file: DataFile) -> str:
    least = {"seq": file.first, "ts": milliseconds(file.ts_min_us), "node": file.node}
    most = {"seq": file.last, "ts": milliseconds(file.ts_max_us + 999), "node": file.node}
    return json.dumps({"numRecords": file.rows, "minValues": least, "maxValues": most})


def milliseconds(ts_us: int) -> str:
    """Returns a time as Delta has it: milliseconds, cut off."""
    return f"{iso(ts_us)[:23]}Z"

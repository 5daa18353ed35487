"""Compacted files copied into a Delta table elsewhere: a folder, or an object store.

What retention removes from the journal stays there. What was joined takes the place of the files that it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from smqrt.errors import JournalError
from smqrt.journal import deltalog, held, locations
from smqrt.journal.deltalog import Updated, milliseconds
from smqrt.journal.manifest import DataFile

_FILES = 64
"""Of a commit: what was copied before a kill is not copied again."""
_JSON = "json"
_KEPT_HOURS = 7 * 24
"""So long files that were joined are kept for readers of older versions."""


class _Span(NamedTuple):
    """The rows of a file: those of a node between two numbers, and their times as Delta has them."""

    node: str
    first: int
    last: int
    earliest: str
    latest: str

    @classmethod
    def of(cls, file: DataFile) -> _Span:
        times = milliseconds(file.ts_min_us), milliseconds(file.ts_max_us + 999)
        return cls(file.node, file.first, file.last, *times)

    def has(self, other: _Span) -> bool:
        in_time = self.earliest <= other.earliest and other.latest <= self.latest
        return in_time and self.first <= other.first and other.last <= self.last

    def meets(self, other: _Span) -> bool:
        return self.node == other.node and self.first <= other.last and other.first <= self.last


def update(journal: Path, to: str, on_files: Callable[[int], object] = lambda count: None) -> Updated:
    """Copies what is new into the Delta table, or makes it.

    Args:
        journal: the journal's folder.
        to: a folder, or a URI that pyarrow and deltalake know, such as s3://bucket/x, with keys in the environment.
        on_files: is called with the number of files after each commit.

    Raises:
        JournalError: deltalake or pyarrow is missing, the journal can't be read, the table can't be written, or it is
            one of another journal.
        ArgumentError: it is no such URI.
    """
    deltalake = deltalog.imported()
    to = to if locations.scheme(to) else str(Path(to).absolute())
    try:
        return _updated(deltalake, journal, to, on_files)
    except (deltalake.exceptions.DeltaError, OSError) as error:
        raise JournalError(f"The Delta table in {to} can't be written: {deltalog.one_line(error)}.") from None


def _updated(deltalake: Any, journal: Path, to: str, on_files: Callable[[int], object]) -> Updated:
    system, root = locations.filesystem(to)
    table = deltalake.DeltaTable(to) if deltalake.DeltaTable.is_deltatable(to) else None
    known = _known(table, to)
    wanted = deltalog.files(journal)
    fresh = {path: file for path, file in sorted(wanted.items()) if path not in known}
    joined = _joined(known, fresh, to)
    paths = dict(zip(fresh, held.hold(journal.absolute(), list(fresh.values())), strict=True))
    schema = _schema(deltalake, table, list(paths.values()), to)
    if table is None:
        if not locations.is_elsewhere(to):
            system.create_dir(root, recursive=True)
        table = deltalog.create(deltalake, to, schema)
    names = list(fresh)
    for some in (names[at : at + _FILES] for at in range(0, len(names), _FILES)):
        for path in some:
            _copy(paths[path], system, f"{root}/{path}", not locations.is_elsewhere(to))
        gone = [old for path in some for old in joined.get(path, ())]
        deltalog.commit(table, schema, {path: fresh[path] for path in some}, gone)
        on_files(len(some))
    removed = sum(map(len, joined.values()))
    if removed:
        table.vacuum(_KEPT_HOURS, dry_run=False)
    return Updated(to, len(fresh), removed, len(known) + len(fresh) - removed)


def _known(table: Any, to: str) -> dict[str, _Span]:
    """The files of the table and what is in them, which our commits have said."""
    import pyarrow

    if table is None:
        return {}
    actions = pyarrow.table(table.get_add_actions(flatten=True)).to_pylist()
    names = ("min.node", "min.seq", "max.seq", "min.ts", "max.ts")
    if any(action.get(name) is None for action in actions for name in names):
        raise JournalError(f"The Delta table in {to} is not one of a journal: give another place.")
    return {action["path"]: _span(*(action[name] for name in names)) for action in actions}


def _span(node: str, first: int, last: int, earliest: Any, latest: Any) -> _Span:
    return _Span(node, first, last, *(milliseconds(round(at.timestamp() * 1e6)) for at in (earliest, latest)))


def _joined(known: Mapping[str, _Span], fresh: Mapping[str, DataFile], to: str) -> dict[str, list[str]]:
    """Returns which files of the table each new one takes the place of."""
    found: dict[str, list[str]] = {}
    for path, file in fresh.items():
        span = _Span.of(file)
        met = [old for old, other in known.items() if span.meets(other)]
        if not all(span.has(known[old]) for old in met):
            raise JournalError(
                f"The Delta table in {to} has rows of another journal with the same numbers ({file.first} to "
                f"{file.last} of {file.node}): give another place."
            )
        if met:
            found[path] = met
    return found


def _schema(deltalake: Any, table: Any, paths: list[Path], to: str) -> Any:
    """The columns of the table; typed JSON is one of them when it was made with it."""
    if table is None:
        return deltalog.schema_of(deltalake, None, paths)
    now = _json(table.schema())
    for path in paths if now is not None else ():
        new = _json(deltalog.schema_of(deltalake, None, [path]))
        if new is not None and new != now:
            raise JournalError(
                f"The Delta table in {to} has the typed column json as {now}, and {path.name} has it as {new}: compact "
                "with the same --schema, or give another place."
            )
    return table.schema()


def _json(schema: Any) -> Any:
    return {field.name: field.type for field in schema.fields}.get(_JSON)


def _copy(path: Path, system: Any, to: str, makes_folders: bool) -> None:
    from pyarrow import fs

    if makes_folders:
        system.create_dir(to.rpartition("/")[0], recursive=True)
    fs.copy_files(str(path), to, source_filesystem=fs.LocalFileSystem(), destination_filesystem=system)

"""`smqrt backup`: a copy of what a server keeps, taken while it writes: journals, SQLite files, and all other files.

A journal is copied in an order in which everything that a file speaks of is copied behind it: what pipelines have
committed, the segments, each behind its index, the manifest, the compacted files. What compaction has removed meanwhile
is in the manifest that is copied later. SQLite files are copied by SQLite.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from smqrt.errors import StartError
from smqrt.journal import files, manifest
from smqrt.journal.recovery import DAMAGED
from smqrt.journal.verify import VerifyReport, repair, verify
from smqrt.printable import printable

_SQLITE = b"SQLite format 3\0"
_BESIDE_SQLITE = ("-wal", "-shm", "-journal", "-lock")
_NOT_COPIED = {"hub.json", "hub.lock", "commits.lock", "lock"}
"""Of a journal: who has it at the moment."""
_NOT_COPIED_FOLDERS = {"held", "retired"}
_PASSES = 5
"""Compaction may replace files while they are copied; it takes longer than a pass."""


@click.command()
@click.argument("target", type=click.Path(path_type=Path))
@click.argument("sources", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
def backup(target: Path, sources: tuple[Path, ...]) -> None:
    """Copy SOURCES, folders of applications, journals or files, into the new folder TARGET.

    The server may run and write. The copy is checked; exit code 1 when it is not whole. To restore, stop the server and
    put the copies in their places.
    """
    try:
        target.mkdir(parents=True)
    except FileExistsError:
        raise StartError(f"{target} exists; name a new folder for each backup.") from None
    counts: Counter[str] = Counter()
    for source in sources:
        place = target / source.resolve().name
        if place.exists():
            raise StartError(f"{source}: there is a {place.name} among the sources already; back it up by itself.")
        _copy(source.resolve(), place, counts)
    made = ", ".join(f"{count} {what}{'' if count == 1 else 's'}" for what, count in sorted(counts.items()))
    click.echo(printable(f"{target}: {made or 'nothing'}, checked"))


def _copy(source: Path, target: Path, counts: Counter[str]) -> None:
    if source.is_symlink():
        target.symlink_to(os.readlink(source))
    elif source.is_dir() and files.is_journal(source):
        _copy_journal(source, target)
        counts["journal"] += 1
    elif source.is_dir():
        target.mkdir()
        for inner in sorted(source.iterdir()):
            _copy(inner, target / inner.name, counts)
        shutil.copystat(source, target)
    elif source.is_file() and (what := _copy_one(source, target)):
        counts[what] += 1


def _copy_one(source: Path, target: Path) -> str:
    """Copies a file; gives what it was, nothing when it was left out."""
    try:
        if _is_sqlite(source):
            _copy_sqlite(source, target)
            return "SQLite file"
        if not _is_beside_sqlite(source):
            shutil.copy2(source, target)
            return "file"
    except FileNotFoundError:
        pass  # it was removed a moment ago
    except OSError as error:
        raise StartError(f"{source} can't be copied: {error.strerror or error}.") from None
    return ""


def _is_sqlite(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_SQLITE)) == _SQLITE


def _is_beside_sqlite(path: Path) -> bool:
    end = next((end for end in _BESIDE_SQLITE if path.name.endswith(end)), None)
    whole = path.with_name(path.name.removesuffix(end)) if end else path
    return end is not None and whole.is_file() and _is_sqlite(whole)


def _copy_sqlite(source: Path, target: Path) -> None:
    try:
        with sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True, timeout=30) as there:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, source.stat().st_mode & 0o777))
            with sqlite3.connect(target) as here:
                there.backup(here, pages=256)
                found = here.execute("PRAGMA integrity_check").fetchone()[0]
            here.close()
        there.close()
    except sqlite3.Error as error:
        raise StartError(f"{source} can't be copied: {error}.") from None
    if found != "ok":
        raise StartError(f"{source} is damaged: {found.splitlines()[0]}.")


# ---- journals


def _copy_journal(source: Path, target: Path) -> None:
    target.mkdir(mode=0o700)
    for path in _in_order(source):
        _copy_file(source, target, path)
    faults = []
    for _ in range(_PASSES):
        _copy_compacted(source, target)
        report = verify(target)
        if any(fault.torn for fault in report.faults):  # the hub was writing
            _cut_torn_ends(target, report)
            report = verify(target)
        faults = report.faults
        if not faults:
            return
    raise StartError(f"The copy of {source} is not whole: {faults[0]}")


def _cut_torn_ends(journal: Path, report: VerifyReport) -> None:
    before = set(_below(journal))
    repair(journal, report)
    for path in set(_below(journal)) - before:
        if path.name in _NOT_COPIED or path.name.endswith(DAMAGED):  # what was cut off is in the journal itself
            path.unlink()


def _in_order(journal: Path) -> Iterator[Path]:
    """What pipelines have committed, then the segments, each behind its index, then the rest."""
    committed = [*journal.glob("wal/*/txn.json"), *_below(journal / "readers")]
    yield from committed
    segments = [path for path in _below(journal / "wal") if path not in committed]
    yield from sorted(segments, key=lambda path: (path.parent, path.stem, path.suffix == ".arrows"))
    compacted = {journal / "wal", journal / "readers", journal / "data", journal / "manifest", journal / manifest.FILE}
    for path in sorted(journal.iterdir()):
        if path not in compacted and path.name not in _NOT_COPIED_FOLDERS:
            yield from _below(path) if path.is_dir() else [path]


def _copy_compacted(source: Path, target: Path) -> None:
    for folder in ("manifest", "data"):
        shutil.rmtree(target / folder, ignore_errors=True)
    for path in ([source / manifest.FILE], _below(source / "manifest"), _below(source / "data")):
        _copy_all(source, target, path)


def _copy_all(source: Path, target: Path, paths: Iterable[Path]) -> None:
    for path in paths:
        _copy_file(source, target, path)


def _below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _copy_file(source: Path, target: Path, path: Path) -> None:
    if path.name in _NOT_COPIED:
        return
    copy = target / path.relative_to(source)
    copy.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copy2(path, copy)
    except FileNotFoundError:
        pass  # compacted and removed meanwhile, or there never was one
    except OSError as error:
        raise StartError(f"{path} can't be copied: {error.strerror or error}.") from None

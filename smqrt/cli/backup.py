"""`smqrt backup`: copies of journals, SQLite files and other files of a running server.

The files of a journal are copied in an order in which a file precedes the files that it refers to: commits of
pipelines, segments (each after its index), the manifest, compacted files. The manifest of the copy is therefore newer
than its segments, and lists the compacted files of segments that compaction removed during the copy. SQLite files are
copied with SQLite's backup function.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

import click

from smqrt.errors import StartError
from smqrt.journal import files, manifest
from smqrt.journal.recovery import DAMAGED
from smqrt.journal.verification import repair, verify
from smqrt.printable import printable

_SQLITE = b"SQLite format 3\0"
_SQLITE_COMPANIONS = ("-wal", "-shm", "-journal", "-lock")
_NOT_COPIED = {"hub.json", "hub.lock", "commits.lock", "lock"}  # files that describe or lock the running hub
_NOT_COPIED_FOLDERS = {"held", "retired"}
_PASSES = 5  # attempts to copy the compacted files: compaction may replace them meanwhile, but is slower than a copy


@click.command()
@click.argument("target", type=click.Path(path_type=Path))
@click.argument("sources", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
def backup(target: Path, sources: tuple[Path, ...]) -> None:
    """Copy the files of a server while it runs.

    SOURCES are folders of applications, journals, or files. TARGET is a new folder for the copies. Journals and SQLite
    files are checked after the copy; exit code 1 when a copy is incomplete. To restore, stop the server and put the
    copies back.
    """
    try:
        target.mkdir(parents=True)
    except FileExistsError:
        raise StartError(f"{target} exists. Use a new folder for each backup.") from None
    counts: Counter[str] = Counter()
    for source in sources:
        copy = target / source.resolve().name
        if copy.exists():
            raise StartError(f"{source}: another source is also named {copy.name}. Back it up separately.")
        _copy(source.resolve(), copy, counts)
    copied = ", ".join(f"{count} {kind}{'' if count == 1 else 's'}" for kind, count in sorted(counts.items()))
    click.echo(printable(f"{target}: {copied or 'nothing'}, checked"))


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
    elif source.is_file():
        try:
            if _is_sqlite(source):
                _copy_sqlite(source, target)
                counts["SQLite file"] += 1
            elif not _is_sqlite_companion(source):
                shutil.copy2(source, target)
                counts["file"] += 1
        except FileNotFoundError:
            pass  # removed since the folder was listed
        except OSError as error:
            raise StartError(f"Cannot copy {source}: {error.strerror or error}.") from None


def _is_sqlite(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_SQLITE)) == _SQLITE


def _is_sqlite_companion(path: Path) -> bool:
    """Return whether a file is the log or the lock of an SQLite file, whose content the backup function includes."""
    suffix = next((suffix for suffix in _SQLITE_COMPANIONS if path.name.endswith(suffix)), None)
    if suffix is None:
        return False
    database = path.with_name(path.name.removesuffix(suffix))
    return database.is_file() and _is_sqlite(database)


def _copy_sqlite(source: Path, target: Path) -> None:
    try:
        with sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True, timeout=30) as original:
            # SQLite would create the file with the default mode, which may be readable by other users.
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, source.stat().st_mode & 0o777))
            with sqlite3.connect(target) as copy:
                original.backup(copy, pages=256)
                result = copy.execute("PRAGMA integrity_check").fetchone()[0]
            copy.close()
        original.close()
    except sqlite3.Error as error:
        raise StartError(f"Cannot copy {source}: {error}.") from None
    if result != "ok":
        raise StartError(f"{source} is damaged: {result.splitlines()[0]}.")


# ---- journals


def _copy_journal(source: Path, target: Path) -> None:
    target.mkdir(mode=0o700)
    commits = [*source.glob("wal/*/txn.json"), *_files_below(source / "readers")]
    for path in commits:
        _copy_file(source, target, path)
    # Segments are listed only now, so that the copy has all messages of the commits; each follows its index.
    segments = [path for path in _files_below(source / "wal") if path not in commits]
    for path in sorted(segments, key=lambda path: (path.parent, path.stem, path.suffix == ".arrows")):
        _copy_file(source, target, path)
    copied_separately = {source / name for name in ("wal", "readers", "data", "manifest", manifest.FILE)}
    for other in sorted(source.iterdir()):
        if other not in copied_separately and other.name not in _NOT_COPIED_FOLDERS:
            for path in _files_below(other) if other.is_dir() else [other]:
                _copy_file(source, target, path)
    faults = []
    for _ in range(_PASSES):
        for folder in ("manifest", "data"):
            shutil.rmtree(target / folder, ignore_errors=True)
        for path in [source / manifest.FILE, *_files_below(source / "manifest"), *_files_below(source / "data")]:
            _copy_file(source, target, path)
        report = verify(target)
        if any(fault.torn for fault in report.faults):  # the hub was writing during the copy
            before = set(_files_below(target))
            repair(target, report)
            # `repair` creates a lock file, and files with the removed bytes, which the journal itself still has.
            for path in set(_files_below(target)) - before:
                if path.name in _NOT_COPIED or path.name.endswith(DAMAGED):
                    path.unlink()
            report = verify(target)
        faults = report.faults
        if not faults:
            return
    raise StartError(f"The copy of {source} is incomplete: {faults[0]}")


def _files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _copy_file(source: Path, target: Path, path: Path) -> None:
    if path.name in _NOT_COPIED:
        return
    copy = target / path.relative_to(source)
    copy.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copy2(path, copy)
    except FileNotFoundError:
        pass  # removed by compaction since it was listed, or a journal without a manifest
    except OSError as error:
        raise StartError(f"Cannot copy {path}: {error.strerror or error}.") from None

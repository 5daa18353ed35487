"""Merging: small compacted files become large ones, the files of an hour first, then those of a day.

A question opens few files then, and what every file costs by itself (its footer, its entry in the manifest) is paid
once. Rows stay where their numbers are: files that follow each other become one that follows its neighbours.

Files that were merged go to `retired/` for the grace: who has planned to read one finds it there, and who reads all of
`data/` with other tools finds no row twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from smqrt.errors import JournalError
from smqrt.journal import tables
from smqrt.journal.files import age_s, make_folder
from smqrt.journal.index import REMEDY
from smqrt.journal.manifest import DataFile
from smqrt.journal.parquet import MergedFile, Shred, Unnamed, day_folder_of, folder_of, hour_of
from smqrt.journal.planning import PARQUET, Chunk

RETIRED = "retired"
_DAY_HOURS = 24
_LATE_HOURS = 2
"""An hour is over when rows of a later one are compacted, or after so long: what belongs to it came by then."""
_VARIANT = "variant"


# ---- which files


def groups(
    files: Sequence[DataFile], now_us: int, most_bytes: int, fits: Callable[[DataFile, DataFile], bool]
) -> Iterator[list[DataFile]]:
    """Yields files of a node, some that follow each other, each group to become one.

    Args:
        files: in order.
        now_us: the time, microseconds since 1970.
        most_bytes: a group is not larger; files half as large stay as they are.
        fits: says whether two files can be in a group.
    """
    newest_hour = _newest_over(files, now_us)
    group: list[DataFile] = []
    for file in files:
        if group:
            last, period = group[-1], _period(file, newest_hour)
            alike = period is not None and period == _period(last, newest_hour) and last.last + 1 == file.first
            small = max(last.bytes, file.bytes) <= most_bytes // 2
            if not (alike and small and sum(one.bytes for one in (*group, file)) <= most_bytes and fits(last, file)):
                yield from [group] * (len(group) > 1)
                group = []
        group.append(file)
    yield from [group] * (len(group) > 1)


def settled(files: Sequence[DataFile], now_us: int) -> int | None:
    """Returns the number below which no file will be merged any more, once `groups` are; None when there is no file."""
    newest_hour = _newest_over(files, now_us)
    for file in files:
        period = _period(file, newest_hour)
        if period is None or period[0] == "hour":
            return file.first
    return files[-1].last + 1 if files else None


def _newest_over(files: Sequence[DataFile], now_us: int) -> int:
    """Returns the newest hour since 1970 that is over."""
    newest = max((hour_of(file.ts_max_us) for file in files), default=0) - 1
    return max(newest, hour_of(now_us) - _LATE_HOURS)


def _period(file: DataFile, newest_hour: int) -> tuple[str, int] | None:
    """Returns the day or the hour whose files may be merged with a file; None while its hour isn't over."""
    first, last = hour_of(file.ts_min_us), hour_of(file.ts_max_us)
    if first // _DAY_HOURS != last // _DAY_HOURS or last > newest_hour:
        return None
    if (first // _DAY_HOURS + 1) * _DAY_HOURS - 1 <= newest_hour:
        return "day", first // _DAY_HOURS
    return ("hour", first) if first == last else None


# ---- one file of some


def merged(journal: Path, files: Sequence[DataFile], shred: Shred | None) -> Unnamed:
    """Writes a file with the rows of others.

    Args:
        journal: its folder.
        files: that follow each other.
        shred: makes a VARIANT column; needed where the files have one.

    Returns:
        The file, which has no name that anybody reads.

    Raises:
        JournalError: a file is damaged.
        OSError: the disk is full or broken, or a file has gone.
    """
    hours = {hour_of(one) for file in files for one in (file.ts_min_us, file.ts_max_us)}
    folder = folder_of(min(hours)) if len(hours) == 1 else day_folder_of(min(hours))
    schema, schemas = plain_schema(journal / files[0].path), files[0].schemas
    if any(file.schemas != schemas for file in files):  # of the same columns, but for other topics
        schemas = ()
    opened = MergedFile(journal, files[0].node, folder, files[0].first, schema, schemas, by_topic=shred is None)
    try:
        for batch in chain.from_iterable(_batches(journal, file) for file in files):
            opened.add(batch, "")
        return opened.close(shred)
    except BaseException:
        opened.discard()
        raise


def plain_schema(path: Path) -> Any:
    """Returns the pyarrow.Schema of a file without its VARIANT column, which is made of the others."""
    from pyarrow import parquet, schema

    return schema([field for field in parquet.read_schema(path) if field.name != _VARIANT])


def has_variant(path: Path) -> bool:
    """Says whether a file has a VARIANT column."""
    from pyarrow import parquet

    return _VARIANT in parquet.read_schema(path).names


def _batches(journal: Path, file: DataFile) -> Iterator[Any]:
    """Yields the rows of a file, checked, in the order of their numbers."""
    from pyarrow import ArrowException

    try:
        yield from _checked(journal / file.path, file)
    except (ArrowException, ValueError, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise  # of the disk
        raise JournalError(f"{journal / file.path} can't be merged: {error}; {REMEDY}.") from None


def _checked(path: Path, file: DataFile) -> Iterator[Any]:
    whole = Chunk(file.path, PARQUET, 0, file.bytes, 0, file.rows, file.node, file.first, file.footer_crc32)
    names = plain_schema(path).names
    with path.open("rb") as source:
        opened = tables.parquet_file(source, whole)
        for group in tables.groups(opened.metadata, whole):
            yield from tables.in_order(opened.read_row_group(group, names)).to_batches()


# ---- files that were merged


def retire(journal: Path, paths: Iterable[Path]) -> None:
    """Takes files out of `data/`; who has planned to read one finds it in `retired/` until its grace is over.

    Raises:
        OSError: that isn't possible.
    """
    folder = journal / RETIRED
    make_folder(folder)
    for path in paths:
        with suppress(FileNotFoundError):  # it has expired meanwhile
            os.utime(path)
            os.replace(path, folder / path.name)


def remove_retired(journal: Path, grace_s: float) -> None:
    """Removes files whose grace is over.

    Raises:
        OSError: that isn't possible.
    """
    for path in (journal / RETIRED).glob("*.parquet"):
        if age_s(path) >= grace_s:
            path.unlink()


def opened(journal: Path, file: str) -> Path:
    """Returns where a compacted file is: at its place, or retired."""
    path = journal / file
    return path if path.exists() else journal / RETIRED / path.name

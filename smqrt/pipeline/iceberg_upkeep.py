"""Upkeep of Iceberg tables: small files are joined, old snapshots expire, and files that nobody refers to go.

`pyiceberg` expires snapshots, but joins no files and removes none; it has the commits of which both are made here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from smqrt.errors import PipelineError
from smqrt.journal import uris
from smqrt.pipeline import lake_files
from smqrt.pipeline.lake_files import Joined

TARGET_BYTES = 128 << 20
"""Size of files that others are joined to, where the table's `write.target-file-size-bytes` doesn't say another."""
MOST_SNAPSHOTS = 2000
_TARGET = "write.target-file-size-bytes"
_SMALL = 0.75
"""So much of the target is large enough to be left alone."""
_ATTEMPTS = 5
"""Of a commit: each time a query has appended in the same moment."""
_FOLDERS = ("data", "metadata")


def join(table: Any, target_bytes: int | None) -> Joined:
    """Joins the small files of each partition, in one snapshot.

    Args:
        table: pyiceberg's.
        target_bytes: about the size of the large ones, at most.

    Raises:
        PipelineError: others go on changing the table, or have just changed the same files.
    """
    target_bytes = target_bytes or int(table.properties.get(_TARGET) or TARGET_BYTES)
    groups = list(_groups(table.refresh(), target_bytes))
    if not groups:
        return Joined(0, 0)
    large = [made for group in groups for made in _large(table, group)]
    small = [task.file for group in groups for task in group]
    attempted(table, lambda change: _replace(change, small, large))
    return Joined(len(small), len(large))


def _groups(table: Any, target_bytes: int) -> Iterator[list[Any]]:
    """Yields files to be joined; those with deleted rows beside them are left to engines that know all kinds."""
    by_partition: dict[Any, list[Any]] = defaultdict(list)
    for task in table.scan().plan_files():
        is_small = task.file.file_size_in_bytes < _SMALL * target_bytes
        if is_small and not task.delete_files and task.file.spec_id == table.spec().spec_id:
            by_partition[task.file.partition].append(task)
    for tasks in by_partition.values():
        yield from (group for group in _filled(tasks, target_bytes) if len(group) > 1)


def _filled(tasks: Iterable[Any], target_bytes: int) -> Iterator[list[Any]]:
    group: list[Any] = []
    size_bytes = 0
    for task in sorted(tasks, key=lambda task: task.file.file_size_in_bytes):
        if group and size_bytes + task.file.file_size_in_bytes > target_bytes:
            yield group
            group, size_bytes = [], 0
        group.append(task)
        size_bytes += task.file.file_size_in_bytes
    yield group


def _large(table: Any, tasks: list[Any]) -> Iterator[Any]:
    """Writes the rows of files, one of them at a time in memory, with the columns that the table has now."""
    from pyiceberg.expressions import AlwaysTrue
    from pyiceberg.io.pyarrow import ArrowScan, parquet_files_to_data_files, schema_to_pyarrow

    schema = schema_to_pyarrow(table.schema())
    scan = ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue())
    batches = (batch.cast(schema) for task in tasks for batch in scan.to_record_batches([task]))
    rows = sum(task.file.record_count for task in tasks)
    size_bytes = sum(task.file.file_size_in_bytes for task in tasks)
    place = f"{table.location()}/data"
    files = lake_files.stored(batches, schema, place, group_rows=lake_files.group_rows(rows, size_bytes))
    paths = [f"{place}/{file.path}" for file in files]
    return parquet_files_to_data_files(table.io, table.metadata, iter(paths))


def _replace(change: Any, small: Iterable[Any], large: Iterable[Any]) -> None:
    with change.update_snapshot().overwrite() as snapshot:
        for file in small:
            snapshot.delete_data_file(file)
        for file in large:
            snapshot.append_data_file(file)


def attempted(table: Any, change: Callable[[Any], None]) -> None:
    """Commits a change of a table, again where somebody else was quicker.

    Raises:
        PipelineError: that went on, or what is to be changed is there no more.
    """
    from pyiceberg.exceptions import CommitFailedException, ValidationException

    for attempt in range(_ATTEMPTS):
        try:
            with table.refresh().transaction() as transaction:
                change(transaction)
            return
        except (CommitFailedException, ValidationException) as error:
            if attempt == _ATTEMPTS - 1:
                raise PipelineError(
                    f"{table.location()} was changed by others in the same moment, {_ATTEMPTS} times: {error}. Nothing "
                    "is lost; run it again."
                ) from None


def delete(table: Any, condition: str) -> int:
    """Deletes the rows that meet a condition, in SQL as pyiceberg knows it; returns how many.

    Raises:
        PipelineError: it is none.
    """
    from pyparsing import ParseBaseException

    known = {one.snapshot_id for one in table.refresh().snapshots()}
    try:
        table.delete(condition)
    except ParseBaseException:  # it tells its whole grammar
        raise PipelineError(f"""{condition!r} is no condition: write it like "n < 5 and k = 'a'".""") from None
    except Exception as error:  # of its parser, of types, of columns
        raise PipelineError(f"{condition!r} can't be deleted from {table.location()}: {error}.") from None
    new = [one.summary for one in table.refresh().snapshots() if one.snapshot_id not in known and one.summary]
    figures = [summary.additional_properties for summary in new if summary.operation.value in ("delete", "overwrite")]
    return sum(int(one.get("deleted-records", 0)) - int(one.get("added-records", 0)) for one in figures)


def expire(table: Any, before: datetime, properties: Mapping[str, str]) -> int:
    """Forgets the snapshots from before a time, except the last one and those that have names; then removes files
    from before that time which nobody refers to, also those that were never committed.

    Args:
        table: pyiceberg's.
        before: the time, with its zone.
        properties: what is known from snapshots only and shall stay known.

    Returns:
        How many files were removed.

    Raises:
        PipelineError: others go on changing the table.
    """
    before_ms = before.timestamp() * 1000
    _forget(table, properties, lambda snapshot: snapshot.timestamp_ms < before_ms)
    return sum(1 for _ in _removed(table.refresh(), before))


def limit(table: Any, properties: Mapping[str, str]) -> None:
    """Forgets the older half of the snapshots when there are more than `MOST_SNAPSHOTS`: each commit writes and reads a
    description of all. Their files go with the next `expire`.

    Args:
        table, properties: as for `expire`.

    Raises:
        PipelineError: as `expire`.
    """
    numbers = sorted(snapshot.sequence_number for snapshot in table.snapshots())
    if len(numbers) > MOST_SNAPSHOTS:
        _forget(table, properties, lambda snapshot: snapshot.sequence_number < numbers[len(numbers) // 2])


def _forget(table: Any, properties: Mapping[str, str], is_old: Callable[[Any], bool]) -> None:
    if properties:
        attempted(table, lambda change: change.set_properties(dict(properties)))
    heads = {ref.snapshot_id for ref in table.refresh().metadata.refs.values()}
    old = [one.snapshot_id for one in table.snapshots() if is_old(one) and one.snapshot_id not in heads]
    if old:
        table.maintenance.expire_snapshots().by_ids(old).commit()


def _removed(table: Any, before: datetime) -> Iterator[str]:
    from pyarrow import fs

    system, root = uris.filesystem(table.location())
    # Listed before anybody asks what is referred to: what is committed in between was not there, or is in the answer.
    folders = [fs.FileSelector(f"{root}/{name}", allow_not_found=True, recursive=True) for name in _FOLDERS]
    found = [one for folder in folders for one in system.get_file_info(folder) if one.is_file]
    old = {one.path for one in found if one.mtime < before.astimezone(UTC)}
    for path in sorted(old - {uris.filesystem(uri)[1] for uri in set(_referred(table.refresh()))}):
        system.delete_file(path)
        yield path


def _referred(table: Any) -> Iterator[str]:
    """Yields the URIs of all files that a snapshot, or the table itself, refers to."""
    metadata = table.metadata
    yield table.metadata_location
    yield from (entry.metadata_file for entry in metadata.metadata_log)
    yield from (one.statistics_path for one in [*metadata.statistics, *metadata.partition_statistics])
    manifests = {}
    for snapshot in table.snapshots():
        yield snapshot.manifest_list
        manifests.update({one.manifest_path: one for one in snapshot.manifests(table.io)})
    for path, manifest in manifests.items():
        yield path
        yield from (entry.data_file.file_path for entry in manifest.fetch_manifest_entry(table.io))

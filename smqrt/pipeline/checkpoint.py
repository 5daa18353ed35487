"""State of a query beside Spark's own checkpoint: its identity and its position in the journal.

<state>/<query>/query.json        the query that the checkpoint belongs to; another query of this name is rejected
<state>/<query>/start.json        {"starting": {node: seq}, "split": {node: seq} or null, "pending": the same}
<state>/<query>/commit.json       the last commit that was begun, to be compared with the hub's list of commits
<state>/<query>/operators.json    the stateful operators that wrote the state in the checkpoint
<state>/<query>/checkpoint        Spark's checkpoint
<state>/<query>/table.json        {"folder": the stream's folder, "start": its first rows, if the folder changed}
<state>/<query>/backfills.json    {folder: [first, end]} of backfills and of earlier streams
A reset that keeps the table keeps the last two files.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from smqrt.errors import PipelineError
from smqrt.journal import files
from smqrt.journal.files import sync_folder
from smqrt.journal.record import parse_moment
from smqrt.pipeline import stateful_plan, tables
from smqrt.pipeline.api import Declaration

if TYPE_CHECKING:
    from smqrt.journal.reader import Journal
    from smqrt.journal.remote import RemoteJournal


# ---- Repair of Spark's checkpoint after a full disk or a power failure.
#
# Spark writes a file under a name such as `.0.<uuid>.tmp` and renames it, without a sync. A full disk leaves the
# temporary file, and Spark rejects a checkpoint without a micro-batch when `offsets`, `commits` or `state` has any
# file. A power failure can leave a file without content, which Spark can't read.

_LOGS = ("offsets", "commits")


def repair(query: Path, written: int | None) -> str:
    """Remove incomplete files of a micro-batch whose start or end was not recorded; Spark repeats the micro-batch.

    Call this while no process runs the query. A micro-batch with incomplete offsets has no published results: the
    offsets are synced before results are published (`sync_batch`), unless Spark itself writes the results.

    Args:
        query: `<state>/<name>`.
        written: the last micro-batch that Spark itself has written to a table, whose offsets are always kept; None
            when it is unknown, and -1 when there is none.

    Returns:
        A sentence to report, which may be empty.

    Raises:
        OSError: a file can't be read or removed.
    """
    place = folder(query)
    if not place.is_dir():
        return ""
    if (place / "metadata").exists() and _is_torn(place / "metadata"):
        # The file has the key of all commits in the hub and in tables, so the whole checkpoint is lost.
        shutil.rmtree(place)
        return ""
    for log in _LOGS:
        for path in (place / log).glob(".*.tmp*"):  # left by a full disk
            path.unlink()
    done = last_batch(query)
    if done >= 0 and _is_torn(place / "commits" / str(done)):
        _remove(place / "commits" / str(done))
    begun, notice = last_begun_batch(query), ""
    if written is not None and begun > max(written, last_batch(query)):
        path = place / "offsets" / str(begun)
        if _is_torn(path):
            _remove(path)
            notice = (
                f"its checkpoint has incomplete offsets of micro-batch {begun}, which had only begun and is repeated."
            )
    if last_begun_batch(query) < 0 and last_batch(query) < 0:
        for name in (*_LOGS, "state"):
            shutil.rmtree(place / name, ignore_errors=True)
    return notice


def _is_torn(path: Path) -> bool:
    """Return whether a file of Spark (a version, then lines of JSON) is incomplete."""
    try:
        text = path.read_text("utf-8")
        for line in text.splitlines():
            if line.startswith("{"):
                json.loads(line)
    except ValueError:
        return True
    return "{" not in text or "\0" in text


def _remove(path: Path) -> None:
    path.unlink()
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)  # Hadoop's checksum of the file


Offsets = dict[str, int]
"""By node, the number of the next row."""

_IDENTITY_DEFAULTS = {"format": "parquet"}
"""Fields of identities that older versions, which had only one table format, did not write."""
_IDENTITY, _START, _COMMIT, _CHECKPOINT = "query.json", "start.json", "commit.json", "checkpoint"
_OPERATORS = "operators.json"
_OPERATORS_FORMAT = 1
"""Version of the descriptions of operators; those with another version are not compared."""


@dataclass(frozen=True)
class QueryStart:
    """The start of a query when it ran for the first time.

    Attributes:
        starting: the first seq of each node.
        split: results of rows before these offsets are not published; None publishes all results.
        pending: windows that rows between these offsets and `split` close are published. Spark returns the windows that
            a micro-batch closes with the next micro-batch, and the checkpoint was lost between the two.
    """

    starting: Offsets
    split: Offsets | None
    pending: Offsets | None = None


@dataclass(frozen=True)
class PublishCommit:
    """A micro-batch whose results were about to be published.

    Attributes:
        query_id, batch: Spark's id of the query, and the number of the micro-batch: the key of the commit.
        start, end: the next seq of each node before and after the micro-batch.
        stateful: whether the query keeps state between micro-batches.
        before: as `start`, for the preceding micro-batch; None when there was none.
    """

    query_id: str
    batch: int
    start: Offsets
    end: Offsets
    stateful: bool
    before: Offsets | None = None


def folder(query: Path) -> Path:
    """Return the folder of Spark's checkpoint of a query, given `<state>/<name>`."""
    return query / _CHECKPOINT


def exists(query: Path) -> bool:
    """Return whether a query has a checkpoint, given `<state>/<name>`."""
    return (folder(query) / "metadata").exists()


def claim(query: Path, declaration: Declaration, sources: list[str]) -> None:
    """Check that the checkpoint belongs to this query, and record the query.

    Args:
        query: `<state>/<name>`.
        declaration: the query.
        sources: names of the sources that the query reads.

    Raises:
        PipelineError: another query wrote the checkpoint.
    """
    options = declaration.options
    now: dict[str, Any] = {"kind": declaration.kind, "sources": sources, "mode": options["mode"]}
    if declaration.kind == "table":
        now |= {"path": options["path"], "format": options["format"]}
        if options["format"] == "parquet":
            # Delta and Iceberg check the partitions; a folder of plain files with two layouts would be unreadable.
            now["partition_by"] = list(options.get("partition_by", ()))
    earlier = read_json(query / _IDENTITY)
    message = (
        f"{declaration.where}: the checkpoint in {query} belongs to another version of {declaration.name}; rename the "
        f"query, or run smqrt pipeline reset {declaration.name}:"
    )
    if earlier is None and folder(query).exists():
        raise PipelineError(f"{message} it has no {_IDENTITY}.")
    for key, value in (_IDENTITY_DEFAULTS | earlier if earlier and "path" in earlier else earlier or {}).items():
        if now.get(key) != value:
            before, after = (", ".join(map(str, x)) if isinstance(x, list) else x for x in (value, now.get(key)))
            raise PipelineError(f"{message} {key} was {before} and is {after}.")
    write_json(query / _IDENTITY, now)


def claim_state(query: Path, declaration: Declaration, operators: list[dict[str, Any]], spark_version: str) -> None:
    """Check that the stateful operators of the query wrote the state in the checkpoint, and record them.

    Args:
        query: `<state>/<name>`.
        declaration: the query.
        operators: `stateful_plan.Operator.description` of each.
        spark_version: the version of Spark. Its plans may differ from those of another version, so they are not
            compared with them.

    Raises:
        PipelineError: other operators wrote it.
    """
    now = {"format": _OPERATORS_FORMAT, "spark": ".".join(spark_version.split(".")[:2]), "operators": operators}
    earlier = cast("dict[str, Any]", read_json(query / _OPERATORS) or {})
    is_comparable = all(earlier.get(name) == now[name] for name in ("format", "spark"))
    has_state = exists(query) and (last_batch(query) >= 0 or (folder(query) / "state").exists())
    if is_comparable and has_state and (changed := stateful_plan.changes(earlier["operators"], operators)):
        raise PipelineError(
            f"{declaration.where}: {declaration.name}: its checkpoint holds the state of another version of this "
            f"query: {'; '.join(changed)}. Restore that version, or smqrt pipeline reset {declaration.name} "
            "removes it, and run --from earliest computes it again."
        )
    if earlier != now:
        write_json(query / _OPERATORS, now)


def start(query: Path, journal: Journal | RemoteJournal, begin: str, quiet: bool) -> QueryStart:
    """Return the start of the query; the first call determines and records it.

    Args:
        query: `<state>/<name>`.
        journal: the journal, opened.
        begin: "latest", "earliest", a duration before now such as "2h", an ISO time, a seq, or JSON {node: seq}.
        quiet: whether results of rows that are already in the journal are not published.

    Raises:
        PipelineError: `begin` is invalid.
    """
    found = saved_start(query)
    if found is None:
        end = dict(journal.end())
        starting = end if begin == "latest" else offsets(journal, begin)
        found = QueryStart(starting, end if quiet and starting != end else None)
        _save_start(query, found)
    return found


def saved_start(query: Path) -> QueryStart | None:
    """Return the recorded start of a query; None when it never ran."""
    found = cast("dict[str, Any] | None", read_json(query / _START))
    return None if found is None else QueryStart(found["starting"], found["split"], found.get("pending"))


def _save_start(query: Path, start: QueryStart) -> None:
    write_json(query / _START, {"starting": start.starting, "split": start.split, "pending": start.pending})


def start_offsets(query: Path) -> Offsets | None:
    """Return the first rows of a query's stream, or of its present folder; None when it never ran."""
    moved = read_json(query / _TABLE) or {}
    if (start := moved.get("start")) is not None:
        return cast("Offsets", start)
    found = saved_start(query)
    return None if found is None else dict(found.starting)


def replace_start(query: Path, start: QueryStart | None) -> None:
    """Change the start of a query without a checkpoint; with None the next call of `start` determines it."""
    if start is None:
        (query / _START).unlink(missing_ok=True)
    else:
        _save_start(query, start)
    (query / _COMMIT).unlink(missing_ok=True)  # it belongs to the lost checkpoint


def committed_offsets(query: Path, batch: int | None = None) -> Offsets | None:
    """Return the position of a query after a micro-batch: the next row of its slowest source, per node.

    Args:
        query: `<state>/<name>`.
        batch: the number of the micro-batch; None means the last one that Spark has completed.

    Returns:
        The position; None when Spark's checkpoint doesn't have the micro-batch.
    """
    batch = last_batch(query) if batch is None else batch
    try:
        ends = list(_ends(query, batch))
    except (OSError, ValueError):
        return None
    return {node: min(end[node] for end in ends if node in end) for end in ends for node in end}


def last_batch(query: Path) -> int:
    """Return the number of the last micro-batch that Spark has completed; -1 when there is none."""
    return _last_number(folder(query) / "commits")


def last_begun_batch(query: Path) -> int:
    """Return the number of the last micro-batch that Spark has begun; -1 when there is none."""
    return _last_number(folder(query) / "offsets")


def _last_number(log: Path) -> int:
    names = [path.name for path in log.iterdir()] if log.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=-1)


def batch_under_way(query: Path) -> tuple[Offsets, Offsets] | None:
    """Return the rows of the micro-batch that Spark has begun and not completed.

    Returns:
        The next seq of each node at its beginning and at its end; with several sources, the first beginning and the
        last end. None when there is no such micro-batch.
    """
    batch = last_begun_batch(query)
    if batch <= last_batch(query):
        return None
    try:
        ends = list(_ends(query, batch))
        starts = list(_ends(query, batch - 1)) if batch else []
    except (OSError, ValueError):
        return None
    if len(starts) != len(ends):  # a source had no offset yet
        starts = [start_offsets(query) or {}]
    end = {node: max(one[node] for one in ends if node in one) for one in ends for node in one}
    return {node: min(one.get(node, 0) for one in starts) for node in end}, end


def last_commit(query: Path) -> PublishCommit | None:
    """Return the last commit of a query that was begun; None when it is unknown."""
    found = cast("dict[str, Any]", read_json(query / _COMMIT) or {})
    return PublishCommit(**found) if found.get("start") is not None and found.get("end") is not None else None


def check_position(position: str, option: str) -> None:
    """Raise PipelineError or ArgumentError, with the name of the option, when `offsets` would reject the position."""
    if position.startswith("{"):
        _parse_offsets(position)
    elif not position.isdecimal():
        parse_moment(position, option)


def offsets(journal: Journal | RemoteJournal, position: str, end: bool = False) -> Offsets:
    """Return the next seq of each node at a position of the journal.

    Args:
        journal: the journal, opened.
        position: as for `start`.
        end: whether it is the end of a range.

    Raises:
        PipelineError: the position is invalid.
    """
    if position in ("earliest", "latest"):
        return dict(journal.begin() if position == "earliest" else journal.end())
    if position.isdecimal():
        return {node: max(seq, int(position)) for node, seq in journal.begin().items()}
    if position.startswith("{"):
        return _parse_offsets(position)
    find = journal.offsets_until if end else journal.offsets_at
    return dict(find(parse_moment(position, "--to" if end else "--from")))


def _parse_offsets(text: str) -> Offsets:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(type(seq) is int and seq >= 0 for seq in found.values()):
        raise PipelineError(f'{text!r} is not an offset: use JSON with a seq for each node, such as {{"n1": 12345}}.')
    return found


class PublishGate:
    """Decides which micro-batches have rows from before the query's first start.

    A micro-batch never has rows from both sides of the split. It is therefore completely old or completely new, even
    when it is repeated.

    Args:
        query: `<state>/<name>`.
        split, pending: as in `QueryStart`; without a split all micro-batches are new.

    Attributes:
        query: the argument.
    """

    def __init__(self, query: Path, split: Offsets | None, pending: Offsets | None = None) -> None:
        self.query, self._split = query, split
        self._closes_more = pending is not None and pending != split

    def save_commit(self, query_id: str, batch: int) -> None:
        """Record that a micro-batch is about to be published, so that a lost checkpoint can be replaced."""
        values = {
            "query_id": query_id,
            "batch": batch,
            "start": self._start(batch),
            "end": committed_offsets(self.query, batch),
            "stateful": (folder(self.query) / "state").exists(),
            "before": self._start(batch - 1),
        }
        # Not synced: after a power failure it's only needed if the checkpoint is lost too.
        write_json(self.query / _COMMIT, values, sync=False)

    def _start(self, batch: int) -> Offsets | None:
        if batch > 0:
            return committed_offsets(self.query, batch - 1)
        return start_offsets(self.query) if batch == 0 else None

    def is_old(self, batch: int) -> bool:
        """Return whether the results of a micro-batch are not published."""
        if self._split is None:
            return False
        split, ends = self._split, list(_ends(self.query, batch))
        if any(seq > split.get(node, 0) for end in ends for node, seq in end.items()):
            self._split = None
            return False
        is_at_split = all(end.get(node, 0) >= seq for end in ends for node, seq in split.items())
        return not (self._closes_more and is_at_split and self.rows(batch) == 0)

    def rows(self, batch: int) -> int:
        """Return the number of a micro-batch's rows in the journal; for the first micro-batch it counts from row 0."""
        before = list(_ends(self.query, batch - 1)) if batch else []
        ends = list(_ends(self.query, batch))
        starts = before if len(before) == len(ends) else [{} for _ in ends]
        pairs = zip(starts, ends, strict=True)
        return sum(seq - start.get(node, 0) for start, end in pairs for node, seq in end.items())


def _ends(query: Path, batch: int) -> Iterator[Offsets]:
    # Spark's file: a version, its settings, then one line for each source; "-" means no offset yet.
    lines = (folder(query) / "offsets" / str(batch)).read_text("utf-8").splitlines()[2:]
    for line in lines:
        if line.startswith("{"):
            yield {node: seq for node, seq in json.loads(line).items() if isinstance(seq, int)}


def read_json(path: Path) -> dict[str, object] | None:
    """Return the content of a file of the state; None when it doesn't exist. Raise PipelineError when it is damaged."""
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise PipelineError(f"{path} can't be read ({error}); remove the folder {path.parent} to restart.") from None


def write_json(path: Path, values: Mapping[str, object], sync: bool = True) -> None:
    """Replace the file atomically; `sync` makes the change survive a power failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    with fresh.open("w", encoding="utf-8") as file:
        json.dump(values, file)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    fresh.rename(path)
    if sync:
        sync_folder(path.parent)  # the new name of the file


def sync_batch(query: Path, batch: int) -> None:
    """Sync the offsets of a micro-batch to the disk, before its number is stored with the results.

    Spark itself does not sync: after a power failure it could give the number to other rows, and the hub would ignore
    these rows as already published.

    Args:
        query: `<state>/<name>`.
        batch: number of the micro-batch.

    Raises:
        OSError: the disk is full or broken.
    """
    place = folder(query)
    with suppress(FileNotFoundError):  # the checkpoint is on another machine
        _sync(place / "offsets" / str(batch))
        sync_folder(place / "offsets")
        # Once for each checkpoint; the inode distinguishes a checkpoint from an earlier one in the same folder.
        identity = place, (place / "metadata").stat().st_ino
        if identity not in _synced_checkpoints:
            _sync(place / "metadata")
            for above in (place, query, query.parent, query.parent.parent):
                with suppress(PermissionError):
                    sync_folder(above)
            _synced_checkpoints.add(identity)


_synced_checkpoints: set[tuple[Path, int]] = set()
"""Checkpoints whose folders and metadata were synced, with the inode of the metadata."""


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


# ---- Folders of a table, and the range of the journal of each

_TABLE, _RANGES = "table.json", "backfills.json"

Ranges = dict[str, tuple[Offsets, Offsets]]


def ranges_file(query: Path) -> Path:
    """Return the path of the file with the ranges of a query, given `<state>/<name>`."""
    return query / _RANGES


def table_folder(query: Path) -> str | None:
    """Return the folder of a query's stream; None when it never ran."""
    found = read_json(query / _TABLE)
    return None if found is None else str(found["folder"])


def save_table_folder(query: Path, folder: str, start: Offsets | None = None) -> None:
    """Record the folder of a query's stream; with `start` also its first rows in this folder."""
    if table_folder(query) != folder:
        write_json(query / _TABLE, {"folder": folder} | ({} if start is None else {"start": start}))


def table_ranges(query: Path) -> Ranges:
    """Return the range of rows of each folder."""
    found = cast("dict[str, tuple[Offsets, Offsets]]", read_json(query / _RANGES) or {})
    return {folder: (start, end) for folder, (start, end) in found.items()}


def add_table_range(query: Path, folder: str, start: Offsets, end: Offsets) -> None:
    """Record the rows of a folder."""
    write_json(query / _RANGES, table_ranges(query) | {folder: (start, end)})


def written_ranges(query: Path) -> Ranges:
    """Return the ranges of the existing folders; folders on other machines are assumed to exist."""

    def still_exists(name: str) -> bool:
        if files.is_elsewhere(name) or tables.is_shown(Path(name)):
            return True
        return tables.is_lake_table(name.rpartition(tables.BACKFILL)[0])  # its log also has the rows of backfills

    return {name: range_ for name, range_ in table_ranges(query).items() if still_exists(name)}


def table_end(query: Path) -> Offsets | None:
    """Return the end of a table's rows, the next row of each node; None when it is unknown."""
    found: Offsets = {}
    for _, ends in written_ranges(query).values():
        found = {node: max(found.get(node, 0), ends.get(node, 0)) for node in {*found, *ends}}
    return found or None


def overlap(start: Offsets, end: Offsets, other: Offsets, other_end: Offsets) -> bool:
    """Return whether two ranges have rows in common; a node that is missing in `other_end` is unlimited there."""
    for node, seq in end.items():
        first, last = max(start.get(node, 0), other.get(node, 0)), min(seq, other_end.get(node, seq))
        if first < last:
            return True
    return False


def covers(start: Offsets, end: Offsets, other: Offsets, other_end: Offsets) -> bool:
    """Return whether the first range includes all rows of the second."""
    return all(
        start.get(node, 0) <= other.get(node, 0) and seq <= end.get(node, 0)
        for node, seq in other_end.items()
        if other.get(node, 0) < seq
    )


def offset_text(offset: Mapping[str, int]) -> str:
    """Return an offset in the syntax of `--from`."""
    return json.dumps(dict(sorted(offset.items())))

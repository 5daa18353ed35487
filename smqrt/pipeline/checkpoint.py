"""State of a query beside Spark's own checkpoint: which query it is, and which rows of the journal it has.

<state>/<query>/query.json        what the checkpoint belongs to; another query with this name doesn't get it
<state>/<query>/start.json        {"starting": {node: seq}, "split": {node: seq} or null, "pending": the same}
<state>/<query>/commit.json       the last commit that was begun: what the hub's own list of commits is compared with
<state>/<query>/operators.json    what the state in the checkpoint means: the stateful operators that have made it
<state>/<query>/checkpoint        Spark's
<state>/<query>/table.json        {"folder": where its stream writes, "start": from which rows on, if it has moved}
<state>/<query>/backfills.json    {folder: [first, end]} of backfills, and of streams that were before this one
A reset that keeps the table keeps these two.
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
from smqrt.journal.timestamps import parse_moment
from smqrt.pipeline import stateful_plan, tables
from smqrt.pipeline.api import Declaration

if TYPE_CHECKING:
    from smqrt.journal.reader import Journal
    from smqrt.journal.remote import RemoteJournal


# ---- Repair of Spark's checkpoint when a full disk or a power failure left the rest of a file in it.
#
# Spark writes a file under a name such as `.0.<uuid>.tmp` and renames it, without a sync. When the disk is full the
# rest
# stays, and a checkpoint without a micro-batch is refused when there is anything in `offsets`, `commits` or `state`.
# After a power failure a file may have its name but nothing in it, which Spark can't read.

_LOGS = ("offsets", "commits")


def mend(query: Path, written: int | None) -> str:
    """Remove what is left of a micro-batch that was about to begin or to be noted as done: Spark does it (again).

    To be called while nobody runs the query. Nobody has results of a micro-batch whose offsets are torn: they are
    synced before results are given away (`checkpoint.keep_batch`), unless Spark itself writes them.

    Args:
        query: `<state>/<name>`.
        written: the last micro-batch that Spark itself has written to a table, whose offsets stay in any case; None
            when that isn't known, and -1 when there is none.

    Returns:
        What is to be said about it, or nothing.

    Raises:
        OSError: something can't be read or removed.
    """
    place = folder(query)
    if not place.is_dir():
        return ""
    if (place / "metadata").exists() and _is_torn(place / "metadata"):
        # Which has the name under which the hub and tables know what was done: it's as if all of it were gone.
        shutil.rmtree(place)
        return ""
    for log in _LOGS:
        for path in (place / log).glob(".*.tmp*"):
            path.unlink()
    done = last_batch(query)
    if done >= 0 and _is_torn(place / "commits" / str(done)):
        _remove(place / "commits" / str(done))
    begun, told = last_begun_batch(query), ""
    if written is not None and begun > max(written, last_batch(query)):
        path = place / "offsets" / str(begun)
        if _is_torn(path):
            _remove(path)
            told = f"what its checkpoint says of micro-batch {begun}, which had only begun, is torn; it begins anew."
    if last_begun_batch(query) < 0 and last_batch(query) < 0:
        for name in (*_LOGS, "state"):
            shutil.rmtree(place / name, ignore_errors=True)
    return told


def _is_torn(path: Path) -> bool:
    """Return whether a file of Spark's, JSON behind a line with a version, is not what was written."""
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
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)


Offsets = dict[str, int]
"""By node, the number of the next row."""

_FORMER = {"format": "parquet"}
"""What identities of tables don't say that were written before there were others."""
_IDENTITY, _START, _COMMIT, _CHECKPOINT = "query.json", "start.json", "commit.json", "checkpoint"
_OPERATORS = "operators.json"
_FORMAT = 1
"""Of descriptions of operators: those of another format are not compared."""


@dataclass(frozen=True)
class QueryStart:
    """Where a query began when it ran for the first time.

    Attributes:
        starting: the first seq of each node.
        split: results of rows before these aren't published; None publishes all.
        pending: windows that rows from these on to `split` have closed are to be published nevertheless: Spark gives
            the windows that a micro-batch closes with the next one, and the checkpoint was lost in between.
    """

    starting: Offsets
    split: Offsets | None
    pending: Offsets | None = None


@dataclass(frozen=True)
class PublishCommit:
    """A micro-batch whose results were about to be published.

    Attributes:
        query_id, batch: Spark's id of the query, and the number of the micro-batch: the key of the commit.
        start, end: the next seq of each node before and after it.
        stateful: whether the query remembers something from one micro-batch to the next.
        before: as `start`, of the micro-batch before this one; None when there was none.
    """

    query_id: str
    batch: int
    start: Offsets
    end: Offsets
    stateful: bool
    before: Offsets | None = None


def folder(query: Path) -> Path:
    """Return where Spark's checkpoint of a query is, given `<state>/<name>`."""
    return query / _CHECKPOINT


def exists(query: Path) -> bool:
    """Return whether there is a checkpoint of a query, given `<state>/<name>`."""
    return (folder(query) / "metadata").exists()


def claim(query: Path, declaration: Declaration, sources: list[str]) -> None:
    """Make sure that the checkpoint is this query's.

    Args:
        query: `<state>/<name>`.
        declaration: the query.
        sources: names of the sources that it reads.

    Raises:
        PipelineError: the checkpoint was made by another query.
    """
    now = _identity(declaration, sources)
    earlier = read_json(query / _IDENTITY)
    if earlier is None and folder(query).exists():
        raise PipelineError(f"{declaration.where}: {_not_ours(query, declaration)} it has no {_IDENTITY}.")
    for key, value in (_FORMER | earlier if earlier and "path" in earlier else earlier or {}).items():
        if now.get(key) != value:
            change = f"{key} was {_shown(value)} and is {_shown(now.get(key))}."
            raise PipelineError(f"{declaration.where}: {_not_ours(query, declaration)} {change}")
    write_json(query / _IDENTITY, now)


def claim_state(query: Path, declaration: Declaration, operators: list[dict[str, Any]], spark_version: str) -> None:
    """Make sure that the state in the checkpoint means what the query takes it for; the first time that is noted.

    Args:
        query: `<state>/<name>`.
        declaration: the query.
        operators: `stateful_plan.Operator.description` of each.
        spark_version: plans of another Spark may be written in another way, and are taken as they are.

    Raises:
        PipelineError: other operators have made it.
    """
    now = {"format": _FORMAT, "spark": ".".join(spark_version.split(".")[:2]), "operators": operators}
    earlier = cast("dict[str, Any]", read_json(query / _OPERATORS) or {})
    is_comparable = all(earlier.get(name) == now[name] for name in ("format", "spark"))
    if is_comparable and _remembers(query) and (changed := stateful_plan.changes(earlier["operators"], operators)):
        raise PipelineError(
            f"{declaration.where}: {declaration.name}: its checkpoint holds the state of another version of this "
            f"query: {'; '.join(changed)}. Write it as it was, or smqrt pipeline reset {declaration.name} forgets it, "
            "and run --from earliest computes it again."
        )
    if earlier != now:
        write_json(query / _OPERATORS, now)


def _remembers(query: Path) -> bool:
    return exists(query) and (last_batch(query) >= 0 or (folder(query) / "state").exists())


def start(query: Path, journal: Journal | RemoteJournal, begin: str, quiet: bool) -> QueryStart:
    """Return where the query began; the first time that is decided here, and kept.

    Args:
        query: `<state>/<name>`.
        journal: the journal, opened.
        begin: "latest", "earliest", a duration such as "2h" (so long ago), an ISO time, a seq, or JSON {node: seq}.
        quiet: whether results of rows that are in the journal by now stay unpublished.

    Raises:
        PipelineError: `begin` is none of these.
    """
    found = saved_start(query)
    if found is None:
        end = dict(journal.end())
        starting = end if begin == "latest" else offsets(journal, begin)
        found = QueryStart(starting, end if quiet and starting != end else None)
        _save_start(query, found)
    return found


def saved_start(query: Path) -> QueryStart | None:
    """Return where a query began, as it was decided; None when it never ran."""
    found = cast("dict[str, Any] | None", read_json(query / _START))
    return None if found is None else QueryStart(found["starting"], found["split"], found.get("pending"))


def _save_start(query: Path, start: QueryStart) -> None:
    write_json(query / _START, {"starting": start.starting, "split": start.split, "pending": start.pending})


def start_offsets(query: Path) -> Offsets | None:
    """Return where a query's stream began, or began to write to the folder that it writes to; None when it never
    ran.
    """
    moved = read_json(query / _TABLE) or {}
    if (start := moved.get("start")) is not None:
        return cast("Offsets", start)
    found = saved_start(query)
    return None if found is None else dict(found.starting)


def replace_start(query: Path, start: QueryStart | None) -> None:
    """Change where a query without a checkpoint begins; with None the next call of `start` decides."""
    if start is None:
        (query / _START).unlink(missing_ok=True)
    else:
        _save_start(query, start)
    (query / _COMMIT).unlink(missing_ok=True)


def committed_offsets(query: Path, batch: int | None = None) -> Offsets | None:
    """Return where a query is that has done a micro-batch: what the slowest of its sources reads next, per node.

    Args:
        query: `<state>/<name>`.
        batch: its number; None takes the last that Spark calls done.

    Returns:
        None when Spark's checkpoint doesn't have it.
    """
    batch = last_batch(query) if batch is None else batch
    try:
        ends = list(_ends(query, batch))
    except (OSError, ValueError):
        return None
    return {node: min(end[node] for end in ends if node in end) for end in ends for node in end}


def last_batch(query: Path) -> int:
    """Return the number of the last micro-batch that Spark calls done; -1 when there is none."""
    commits = folder(query) / "commits"
    names = [path.name for path in commits.iterdir()] if commits.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=-1)


def last_begun_batch(query: Path) -> int:
    """Return the number of the last micro-batch that Spark has begun; -1 when there is none."""
    begun = folder(query) / "offsets"
    names = [path.name for path in begun.iterdir()] if begun.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=-1)


def batch_under_way(query: Path) -> tuple[Offsets, Offsets] | None:
    """Return the rows of the micro-batch that Spark has begun and not done: the next seq of each node at its beginning
    and its end; of several sources from the first beginning to the last end. None when there is none.
    """
    batch = last_begun_batch(query)
    if batch <= last_batch(query):
        return None
    try:
        ends = list(_ends(query, batch))
        starts = list(_ends(query, batch - 1)) if batch else []
    except (OSError, ValueError):
        return None
    if len(starts) != len(ends):  # a source had nothing yet
        starts = [start_offsets(query) or {}]
    end = {node: max(one[node] for one in ends if node in one) for one in ends for node in one}
    return {node: min(one.get(node, 0) for one in starts) for node in end}, end


def last_commit(query: Path) -> PublishCommit | None:
    """Return the last commit of a query that was begun; None when nobody knows."""
    found = cast("dict[str, Any]", read_json(query / _COMMIT) or {})
    return PublishCommit(**found) if found.get("start") is not None and found.get("end") is not None else None


def check_position(position: str, option: str) -> None:
    """Raise PipelineError or ArgumentError, which names the option, when `offsets` could do nothing with it."""
    if position.startswith("{"):
        _given(position)
    elif not position.isdecimal():
        parse_moment(position, option)


def offsets(journal: Journal | RemoteJournal, position: str, end: bool = False) -> Offsets:
    """Return the next seq of each node at a position of the journal: a moment, a seq, or offsets.

    Args:
        journal: the journal, opened.
        position: as for `start`.
        end: it is where a range ends.

    Raises:
        PipelineError: it is none.
    """
    if position in ("earliest", "latest"):
        return dict(journal.begin() if position == "earliest" else journal.end())
    if position.isdecimal():
        return {node: max(seq, int(position)) for node, seq in journal.begin().items()}
    if position.startswith("{"):
        return _given(position)
    look_up = journal.offsets_until if end else journal.offsets_at
    return dict(look_up(parse_moment(position, "--to" if end else "--from")))


def _given(text: str) -> Offsets:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(type(seq) is int and seq >= 0 for seq in found.values()):
        raise PipelineError(f'{text!r} is no offset: write JSON with a seq for each node, such as {{"n1": 12345}}.')
    return found


class PublishGate:
    """Tells which micro-batches consist of rows from before the query's first start.

    Args:
        query: `<state>/<name>`.
        split, pending: as in `QueryStart`; without a split everything passes.

    Attributes:
        query: as given.

    The source never gives a micro-batch rows from both sides, so a batch is old or new as a whole, each time that it
    is replayed too.
    """

    def __init__(self, query: Path, split: Offsets | None, pending: Offsets | None = None) -> None:
        self.query, self._split = query, split
        self._closes_more = pending is not None and pending != split

    def save_commit(self, query_id: str, batch: int) -> None:
        """Note that a micro-batch is about to be published, so that a lost checkpoint can be replaced."""
        values = {
            "query_id": query_id,
            "batch": batch,
            "start": self._start(batch),
            "end": committed_offsets(self.query, batch),
            "stateful": (folder(self.query) / "state").exists(),
            "before": self._start(batch - 1),
        }
        # Not lasting: after a power failure it's only needed if the checkpoint is lost.
        write_json(self.query / _COMMIT, values, lasting=False)

    def _start(self, batch: int) -> Offsets | None:
        if batch > 0:
            return committed_offsets(self.query, batch - 1)
        return start_offsets(self.query) if batch == 0 else None

    def is_old(self, batch: int) -> bool:
        """Return whether the results of micro-batch number `batch` stay unpublished."""
        if self._split is None:
            return False
        ends = list(_ends(self.query, batch))
        if any(map(self._is_beyond, ends)):
            self._split = None
            return False
        return not (self._closes_more and all(map(self._is_at, ends)) and self.rows(batch) == 0)

    def rows(self, batch: int) -> int:
        """Return how many rows of the journal a micro-batch has; the first one is counted from the beginning."""
        before = list(_ends(self.query, batch - 1)) if batch else []
        ends = list(_ends(self.query, batch))
        starts = before if len(before) == len(ends) else [{} for _ in ends]
        pairs = zip(starts, ends, strict=True)
        return sum(seq - start.get(node, 0) for start, end in pairs for node, seq in end.items())

    def _is_at(self, end: Mapping[str, int]) -> bool:
        return all(end.get(node, 0) >= seq for node, seq in (self._split or {}).items())

    def _is_beyond(self, end: Mapping[str, int]) -> bool:
        split = self._split or {}
        return any(seq > split.get(node, 0) for node, seq in end.items())


def _ends(query: Path, batch: int) -> Iterator[Offsets]:
    # Spark's file: a version, its settings, then one line for each source; "-" has had nothing yet.
    lines = (folder(query) / "offsets" / str(batch)).read_text("utf-8").splitlines()[2:]
    for line in lines:
        if line.startswith("{"):
            yield {node: seq for node, seq in json.loads(line).items() if isinstance(seq, int)}


def _identity(declaration: Declaration, sources: list[str]) -> dict[str, Any]:
    options = declaration.options
    found = {"kind": declaration.kind, "sources": sources, "mode": options["mode"]}
    if declaration.kind != "table":
        return found
    found |= {"path": options["path"], "format": options["format"]}
    # Tables with commits say it themselves; folders of plain files in two layouts could not be read any more.
    return found | ({"partition_by": list(options.get("partition_by", ()))} if options["format"] == "parquet" else {})


def _not_ours(query: Path, declaration: Declaration) -> str:
    remedy = f"rename it, or smqrt pipeline reset {declaration.name} to start anew"
    return f"the checkpoint in {query} is another query's than {declaration.name} is now; {remedy}:"


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def read_json(path: Path) -> dict[str, object] | None:
    """Return what a file of the state holds; None when there is none. Raises PipelineError when it is damaged."""
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise PipelineError(f"{path} can't be read ({error}); remove the folder {path.parent} to start anew.") from None


def write_json(path: Path, values: Mapping[str, object], lasting: bool = True) -> None:
    """Replace the file as a whole, and for good when what follows relies on it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    with fresh.open("w", encoding="utf-8") as file:
        json.dump(values, file)
        file.flush()
        if lasting:
            os.fsync(file.fileno())
    fresh.rename(path)
    if lasting:
        sync_folder(path.parent)


def keep_batch(query: Path, batch: int) -> None:
    """Has the disk keep which rows a micro-batch has, before somebody else keeps its number: after a power failure
    Spark, which syncs nothing, would give the number to other rows, and they would be taken for rows that are known.

    Args:
        query: `<state>/<name>`.
        batch: number of the micro-batch.

    Raises:
        OSError: the disk is full or broken.
    """
    place = folder(query)
    with suppress(FileNotFoundError):  # of a checkpoint elsewhere
        _sync(place / "offsets" / str(batch))
        sync_folder(place / "offsets")
        identity = place, (place / "metadata").stat().st_ino
        if identity not in _kept_identities:
            _sync(place / "metadata")
            for above in (place, query, query.parent, query.parent.parent):
                with suppress(PermissionError):
                    sync_folder(above)
            _kept_identities.add(identity)


_kept_identities: set[tuple[Path, int]] = set()
"""Checkpoints whose names, and what Spark calls their queries, the disk has."""


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


# ---- folders of a table, and the rows of the journal that each was made of

_TABLE, _RANGES = "table.json", "backfills.json"

Ranges = dict[str, tuple[Offsets, Offsets]]


def ranges_file(query: Path) -> Path:
    """Return the file with the ranges of a query, given `<state>/<name>`."""
    return query / _RANGES


def table_folder(query: Path) -> str | None:
    """Return the folder that a query's stream writes to; None when it never ran."""
    found = read_json(query / _TABLE)
    return None if found is None else str(found["folder"])


def keep_table_folder(query: Path, folder: str, start: Offsets | None = None) -> None:
    """Note the folder that a query's stream writes to; with `start` the rows of the journal from which on it does."""
    if table_folder(query) != folder:
        write_json(query / _TABLE, {"folder": folder} | ({} if start is None else {"start": start}))


def table_ranges(query: Path) -> Ranges:
    """Return by folder where its rows begin and end."""
    found = cast("dict[str, tuple[Offsets, Offsets]]", read_json(query / _RANGES) or {})
    return {folder: (start, end) for folder, (start, end) in found.items()}


def add_table_range(query: Path, folder: str, start: Offsets, end: Offsets) -> None:
    """Note the rows of a folder."""
    write_json(query / _RANGES, table_ranges(query) | {folder: (start, end)})


def written_ranges(query: Path) -> Ranges:
    """Return the ranges of the folders that are still there, as far as this machine can see them."""
    return {name: both for name, both in table_ranges(query).items() if _is_there(name)}


def _is_there(name: str) -> bool:
    if files.is_elsewhere(name) or tables.counts(Path(name)):
        return True
    return tables.is_lake_table(name.rpartition(tables.BACKFILL)[0])  # whose log has the rows of backfills too


def table_end(query: Path) -> Offsets | None:
    """Return where the rows of a table end: the next of each node; None when nobody knows."""
    found: Offsets = {}
    for _, ends in written_ranges(query).values():
        found = {node: max(found.get(node, 0), ends.get(node, 0)) for node in {*found, *ends}}
    return found or None


def overlap(start: Offsets, end: Offsets, other: Offsets, other_end: Offsets) -> bool:
    """Return whether two ranges have rows in common; a node that an end doesn't name goes on for ever."""
    for node, seq in end.items():
        first, last = max(start.get(node, 0), other.get(node, 0)), min(seq, other_end.get(node, seq))
        if first < last:
            return True
    return False


def covers(start: Offsets, end: Offsets, other: Offsets, other_end: Offsets) -> bool:
    """Return whether the first range has all rows of the other one."""
    return all(
        start.get(node, 0) <= other.get(node, 0) and seq <= end.get(node, 0)
        for node, seq in other_end.items()
        if other.get(node, 0) < seq
    )


def offset_text(offset: Mapping[str, int]) -> str:
    """Return an offset as `--from` takes it."""
    return json.dumps(dict(sorted(offset.items())))

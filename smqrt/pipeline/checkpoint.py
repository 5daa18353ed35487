"""What a query remembers beside Spark's own checkpoint: which query it is, and where in the journal it began.

<state>/<query>/query.json     what the checkpoint belongs to; another query with this name doesn't get it
<state>/<query>/start.json     {"starting": {node: seq}, "split": {node: seq} or null}
<state>/<query>/checkpoint     Spark's
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smqrt.errors import PipelineError
from smqrt.pipeline.api import Declaration

Offsets = dict[str, int]

_IDENTITY, _START, _CHECKPOINT = "query.json", "start.json", "checkpoint"


@dataclass(frozen=True)
class Start:
    """Where a query began when it ran for the first time.

    Attributes:
        starting: the first seq of each node.
        split: results of rows before these aren't published; None publishes all.
    """

    starting: Offsets
    split: Offsets | None


def folder(query: Path) -> Path:
    """Returns where Spark's checkpoint of a query is, given `<state>/<name>`."""
    return query / _CHECKPOINT


def claim(query: Path, declaration: Declaration, sources: list[str]) -> None:
    """Makes sure that the checkpoint is this query's.

    Args:
        query: `<state>/<name>`.
        declaration: the query.
        sources: names of the sources that it reads.

    Raises:
        PipelineError: the checkpoint was made by another query.
    """
    now = _identity(declaration, sources)
    earlier = _read(query / _IDENTITY)
    if earlier is None and folder(query).exists():
        raise PipelineError(f"{declaration.where}: {_not_ours(query, declaration)} it has no {_IDENTITY}.")
    for key, value in (earlier or {}).items():
        if now.get(key) != value:
            change = f"{key} was {_shown(value)} and is {_shown(now.get(key))}."
            raise PipelineError(f"{declaration.where}: {_not_ours(query, declaration)} {change}")
    _write(query / _IDENTITY, now)


def start(query: Path, journal: Any, begin: str, quiet: bool) -> Start:
    """Returns where the query began; the first time that is decided here, and kept.

    Args:
        query: `<state>/<name>`.
        journal: the journal, opened.
        begin: "latest", "earliest", a duration such as "2h" (so long ago), an ISO time, a seq, or JSON {node: seq}.
        quiet: whether results of rows that are in the journal by now stay unpublished.

    Raises:
        PipelineError: `begin` is none of these.
    """
    path = query / _START
    kept = _read(path)
    if kept is None:
        end = dict(journal.end())
        starting = end if begin == "latest" else offsets(journal, begin)
        kept = {"starting": starting, "split": end if quiet and starting != end else None}
        _write(path, kept)
    return Start(kept["starting"], kept["split"])


def began(query: Path) -> Offsets | None:
    """Returns where a query's stream began; None when it never ran."""
    kept = _read(query / _START)
    return None if kept is None else dict(kept["starting"])


def offsets(journal: Any, moment: str) -> Offsets:
    """Returns the next seq of each node at a moment.

    Args:
        journal: the journal, opened.
        moment: as for `start`.

    Raises:
        PipelineError: it is none.
    """
    if moment in ("earliest", "latest"):
        return dict(journal.begin() if moment == "earliest" else journal.end())
    if moment.isdecimal():
        return {node: max(seq, int(moment)) for node, seq in journal.begin().items()}
    if moment.startswith("{"):
        return _given(moment)
    return dict(journal.offsets_at(_time_us(moment)))


def _given(text: str) -> Offsets:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(type(seq) is int and seq >= 0 for seq in found.values()):
        raise PipelineError(f'{text!r} is no offset: write JSON with a seq for each node, such as {{"n1": 12345}}.')
    return found


def _time_us(text: str) -> int:
    from smqrt.journal.moment import parse_moment

    return parse_moment(text, "--from")


class Gate:
    """Tells which micro-batches consist of rows from before the query's first start.

    Args:
        query: `<state>/<name>`.
        split: as in `Start`; None lets everything pass.

    The source never gives a micro-batch rows from both sides, so a batch is old or new as a whole, each time that it
    is replayed too.
    """

    def __init__(self, query: Path, split: Offsets | None) -> None:
        self._offsets = folder(query) / "offsets"
        self._split = split

    def is_old(self, batch: int) -> bool:
        """Whether the results of micro-batch number `batch` stay unpublished."""
        if self._split is None:
            return False
        if any(self._is_beyond(end) for end in self._ends(batch)):
            self._split = None
            return False
        return True

    def _is_beyond(self, end: Mapping[str, int]) -> bool:
        split = self._split or {}
        return any(seq > split.get(node, 0) for node, seq in end.items())

    def _ends(self, batch: int) -> Iterator[dict[str, int]]:
        # Spark's file: a version, its settings, then one line for each source; "-" has had nothing yet.
        lines = (self._offsets / str(batch)).read_text("utf-8").splitlines()[2:]
        for line in lines:
            if line.startswith("{"):
                yield {node: seq for node, seq in json.loads(line).items() if isinstance(seq, int)}


def _identity(declaration: Declaration, sources: list[str]) -> dict[str, Any]:
    options = declaration.options
    found = {"kind": declaration.kind, "sources": sources, "mode": options["mode"]}
    return found | ({"path": options["path"]} if declaration.kind == "table" else {})


def _not_ours(query: Path, declaration: Declaration) -> str:
    remedy = f"rename it, or smqrt pipeline reset {declaration.name} to start anew"
    return f"the checkpoint in {query} is another query's than {declaration.name} is now; {remedy}:"


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise PipelineError(f"{path} can't be read ({error}); remove the folder {path.parent} to start anew.") from None


def _write(path: Path, values: Mapping[str, Any]) -> None:
    """Replaces the file as a whole, and for good: what follows relies on it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    with fresh.open("w", encoding="utf-8") as file:
        json.dump(values, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)

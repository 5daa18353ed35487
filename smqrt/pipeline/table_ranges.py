"""The folders of a table, and the rows of the journal that each was made of. A reset that keeps the table keeps this.

<state>/<query>/table.json        {"folder": where its stream writes}
<state>/<query>/backfills.json    {folder: [first, end]} of backfills, and of streams that were before this one
"""

from __future__ import annotations

import json
from pathlib import Path

from smqrt.journal import uris
from smqrt.pipeline import lake_tables, tables
from smqrt.pipeline.checkpoint import Offsets, read_json, write_json

_STREAM, _RANGES = "table.json", "backfills.json"

Ranges = dict[str, tuple[Offsets, Offsets]]


def path(query: Path) -> Path:
    """Returns the file with the ranges of a query, given `<state>/<name>`."""
    return query / _RANGES


def stream(query: Path) -> str | None:
    """Returns the folder that a query's stream writes to; None when it never ran."""
    kept = read_json(query / _STREAM)
    return None if kept is None else str(kept["folder"])


def keep_stream(query: Path, folder: str) -> None:
    """Notes the folder that a query's stream writes to."""
    if stream(query) != folder:
        write_json(query / _STREAM, {"folder": folder})


def load(query: Path) -> Ranges:
    """Returns by folder where its rows begin and end."""
    return {folder: (start, end) for folder, (start, end) in (read_json(query / _RANGES) or {}).items()}


def add(query: Path, folder: str, start: Offsets, end: Offsets) -> None:
    """Notes the rows of a folder."""
    write_json(query / _RANGES, load(query) | {folder: (start, end)})


def written(query: Path) -> Ranges:
    """Returns the ranges of the folders that are still there, as far as this machine can see them."""
    return {name: both for name, both in load(query).items() if _is_there(name)}


def _is_there(name: str) -> bool:
    if uris.is_elsewhere(name) or tables.is_whole(Path(name)):
        return True
    return lake_tables.is_there(name.rpartition(tables.BACKFILL)[0])  # whose log has the rows of backfills too


def end(query: Path) -> Offsets | None:
    """Returns where the rows of a table end: the next of each node; None when nobody knows."""
    found: Offsets = {}
    for _, ends in written(query).values():
        found = {node: max(found.get(node, 0), ends.get(node, 0)) for node in {*found, *ends}}
    return found or None


def shown(offset: Offsets) -> str:
    """Returns an offset as `--from` takes it."""
    return json.dumps(dict(sorted(offset.items())))

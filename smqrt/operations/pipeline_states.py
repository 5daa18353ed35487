"""States of the queries of pipelines, which run in processes of their own: read from the files that these write."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from smqrt.loop.disk_threads import DiskThreads

log = logging.getLogger("smqrt.admin")

FOLDER, FILE = ".pipelines", "status.json"
QUERIES, BYTES = 500, 1 << 16
"""So many queries are looked at, and so much of each file."""
KEYS = {
    "name": str, "kind": str, "state": str, "batch": int, "batch_ms": int, "rows": int, "rows_per_s": float,
    "lag_rows": int, "lag_s": float, "published": int, "error": str, "trouble": str, "updated": float,
}  # fmt: skip
"""What is told of a query, and its type."""

_threads = DiskThreads("of the pipelines")


def queries(folders: Sequence[Path]) -> dict[Path, list[dict[str, object]]]:
    """Returns what is known of the queries of the applications in these folders; blocks the greenlet. None when the
    disk does not answer."""
    if not folders:
        return {}
    try:
        return _threads.call(_read_all, list(folders))
    except TimeoutError as error:
        log.warning("the states of pipelines can't be read: %s", error)
        return {}


def _read_all(folders: list[Path]) -> dict[Path, list[dict[str, object]]]:
    return {folder: list(filter(None, map(_read, _files(folder)))) for folder in folders}


def _files(folder: Path) -> list[Path]:
    with suppress(OSError):
        return sorted((folder / FOLDER).glob(f"*/{FILE}"))[:QUERIES]
    return []


def _read(path: Path) -> dict[str, object] | None:
    """In a thread. A file that is no status is left out."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(BYTES))
        return {name: kind(found[name]) for name, kind in KEYS.items() if name in found}
    except (OSError, ValueError, TypeError, RecursionError):
        return None

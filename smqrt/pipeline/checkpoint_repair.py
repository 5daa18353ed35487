"""Repair of Spark's checkpoint when a full disk or a power failure left the rest of a file in it.

Spark writes a file under a name such as `.0.<uuid>.tmp` and renames it, without a sync. When the disk is full the rest
stays, and a checkpoint without a micro-batch is refused when there is anything in `offsets`, `commits` or `state`.
After a power failure a file may have its name but nothing in it, which Spark can't read.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from smqrt.pipeline import checkpoint

_LOGS = ("offsets", "commits")


def mend(query: Path, written: int | None) -> str:
    """Removes what is left of a micro-batch that was about to begin or to be noted as done: Spark does it (again).

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
    place = checkpoint.folder(query)
    if not place.is_dir():
        return ""
    if (place / "metadata").exists() and _is_torn(place / "metadata"):
        # Which has the name under which the hub and tables know what was done: it's as if all of it were gone.
        shutil.rmtree(place)
        return ""
    for log in _LOGS:
        for path in (place / log).glob(".*.tmp*"):
            path.unlink()
    done = checkpoint.last_batch(query)
    if done >= 0 and _is_torn(place / "commits" / str(done)):
        _remove(place / "commits" / str(done))
    begun, told = checkpoint.last_begun_batch(query), ""
    if written is not None and begun > max(written, checkpoint.last_batch(query)):
        path = place / "offsets" / str(begun)
        if _is_torn(path):
            _remove(path)
            told = f"what its checkpoint says of micro-batch {begun}, which had only begun, is torn; it begins anew."
    if checkpoint.last_begun_batch(query) < 0 and checkpoint.last_batch(query) < 0:
        for name in (*_LOGS, "state"):
            shutil.rmtree(place / name, ignore_errors=True)
    return told


def _is_torn(path: Path) -> bool:
    """Whether a file of Spark's, JSON behind a line with a version, is not what was written."""
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

"""Progress of the queries of pipelines: `readers/<query>.json` of a journal. Retention goes no further."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal.files import is_journal, make_folder, touch

MOST_QUERIES = 10_000
"""That report: retention reads all they have said."""
MOST_NODES = 256
"""Of a report: a hub looks at all reports once a minute."""
_SHOWN = 100
_QUERY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


def checked_query(query: object) -> str:
    """Returns the id of a query that may name a file; raises ArgumentError for others."""
    if isinstance(query, str) and _QUERY.fullmatch(query):
        return query
    raise ArgumentError(f"query: {_shown(query)} is no id of a query; use 1 to 100 letters, digits, '-', '_' and '.'.")


def checked(body: bytes) -> dict[str, Any]:
    """Reads a report of progress.

    Args:
        body: JSON with `query`, `name`, `offset` (node: next sequence number) and perhaps `time_us`.

    Returns:
        What `save` takes.

    Raises:
        ArgumentError: one sentence that names the wrong field.
    """
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:  # the latter: nested without end
        raise ArgumentError(f"progress: this is no JSON ({error}); send query, name and offset.") from None
    if not isinstance(values, dict):
        raise ArgumentError("progress: this is no JSON object; send query, name and offset.")
    query, name = checked_query(values.get("query")), values.get("name") or ""
    if not isinstance(name, str):
        raise ArgumentError(f"name: {_shown(name)} is no text; the name of the query is needed.")
    time_us = values.get("time_us")
    if not _is_count(time_us):
        time_us = time.time_ns() // 1000
    return {"query": query, "name": name, "offset": _offset(values.get("offset")), "time_us": time_us}


def _offset(offset: object) -> dict[str, int]:
    if isinstance(offset, dict) and len(offset) > MOST_NODES:
        raise ArgumentError(f"offset: it names {len(offset)} nodes; a report has {MOST_NODES} at most.")
    if isinstance(offset, dict) and all(_is_count(seq) for seq in offset.values()):
        return offset
    raise ArgumentError(f"offset: {_shown(offset)} is no object of node: sequence number, such as {{'n1': 17}}.")


def _shown(value: object) -> str:
    """What is wrong, as far as it fits into a sentence."""
    try:
        text = repr(value)
    except RecursionError:
        return "what is nested so deep"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def queries(journal: Path) -> list[str]:
    """Returns the queries that have reported."""
    return [path.stem for path in (journal / "readers").glob("[!.]*.json")]


def save(journal: Path, values: dict[str, Any]) -> None:
    """Keeps a report in the journal's folder.

    Raises:
        ArgumentError: it would be one query too many.
        JournalError: it can't be written.
    """
    folder = journal / "readers"
    path = folder / f"{values['query']}.json"
    if not path.exists() and len(queries(journal)) >= MOST_QUERIES:
        raise ArgumentError(
            f"query: {MOST_QUERIES} queries have told {folder} how far they are; `smqrt pipeline reset` takes off "
            "those that are gone."
        )
    beside = folder / f".{path.name}.{secrets.token_hex(4)}"
    try:
        if is_journal(journal):  # and is not made anew
            make_folder(folder)
        touch(beside)
        beside.write_text(json.dumps(values) + "\n", "utf-8")
        os.replace(beside, path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise JournalError(f"{path} can't be written: {error.strerror}; make room on the disk.") from None

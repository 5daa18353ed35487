"""Results of a stream on their way to a hub: its tasks stage them in parts, its driver commits the parts by name."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Sequence

from smqrt.journal.commit import HubAddress, OutRow, encode, split, told


def stage(hub: HubAddress, query: str, batch: int, rows: Iterable[OutRow], retry_s: float) -> list[str]:
    """Gives rows to a hub, which publishes them when they are committed.

    Args:
        hub: where.
        query, batch: the streaming query's id and the number of the micro-batch.
        rows: at least one.
        retry_s: how long to wait for a hub that is away, seconds.

    Returns:
        The names of the parts that they became.

    Raises:
        ArgumentError: a topic is empty or too long.
        JournalError: the hub refuses them, or is away for too long.
    """
    names, attempt = [], secrets.token_hex(8)
    for number, part in enumerate(split(rows)):
        name = f"{attempt}.{number}"
        told(hub, "stage", {"query": query, "batch": batch, "part": name}, encode(part), "rows", retry_s)
        names.append(name)
    return names


def commit(
    hub: HubAddress,
    query: str,
    batch: int,
    parts: Sequence[str],
    retry_s: float,
    before: Callable[[int], None] = lambda number: None,
) -> None:
    """Publishes what was staged for a micro-batch, once, however often and with whatever parts it is called.

    Args:
        hub, query, batch, retry_s: as for `stage`.
        parts: their names, at least one.
        before: is called before each part with its number.

    Raises:
        JournalError: as `stage`.
    """
    body = json.dumps(list(parts)).encode()
    sealed = told(hub, "seal", {"query": query, "batch": batch}, body, "parts", retry_s)
    for number, part in enumerate(sealed[1:], 1):
        before(number)
        _commit(hub, query, batch, f"{query}.{number}", part, retry_s)
    for part in sealed[:1]:  # under the query's own name the last: a hub that has it has all of them
        _commit(hub, query, batch, query, part, retry_s)


def _commit(hub: HubAddress, query: str, batch: int, name: str, part: str, retry_s: float) -> None:
    told(hub, "commit", {"query": name, "batch": batch, "of": query, "part": part}, b"", "stored", retry_s)

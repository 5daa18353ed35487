"""Commits: results of pipelines back into a hub, which stores and publishes the rows of a micro-batch exactly once.

The hub keeps (query, batch) with the rows, in one write. So a commit may be repeated: after a hub that went away, after
a pipeline that was killed. The tasks of a stream stage their rows in parts; its driver commits the parts by name.
"""

from __future__ import annotations

import json
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NoReturn, TypeVar
from urllib.parse import urlencode

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal import committed, readers
from smqrt.journal.files import MOVED, HubAddress, Unreachable
from smqrt.journal.remote import HubLink

RETRY_S = 60.0
PROGRESS_RETRY_S = 5.0
_U16, _U32 = struct.Struct(">H"), struct.Struct(">I")
_MAX_NAME_BYTES = 0xFFFF
PART_BYTES = 1 << 20
MOST_PAYLOAD_BYTES, MOST_NAME_BYTES = 0xFFF0, 0xFFF7
"""Of a message, and of a topic or subtopic: what its frame can carry (`smqrt.wire.smq`)."""
MOST_ROWS = 4096
"""Of one commit: a hub numbers and stores all its rows in one go, and its clients wait meanwhile (some 20 ms)."""
_ROW_BYTES = 8
"""The three lengths in front of a row's parts."""

T = TypeVar("T")

OutRow = tuple[bytes, bytes | None, bytes]
"""Topic, subtopic or None, payload."""


def commit(hub: HubAddress, query: str, batch: int, rows: Iterable[OutRow], retry_s: float = RETRY_S) -> bool:
    """Store and publishes the rows of a micro-batch, once.

    Args:
        hub: where.
        query: the streaming query's id; it lasts as long as its checkpoint.
        batch: the number of the micro-batch; each is greater than the one before.
        rows: (topic, subtopic or None, payload).
        retry_s: how long to wait for a hub that is away, seconds.

    Returns:
        False: the hub had this batch, from an earlier try.

    Raises:
        ArgumentError: a topic is empty or too long.
        JournalError: the hub refuses it, or is away for too long.
    """
    return ask_hub(hub, "commit", {"query": query, "batch": batch}, encode(rows), "stored", bool, retry_s)


def publish(hub: HubAddress, rows: Iterable[OutRow], retry_s: float = RETRY_S) -> None:
    """Store and publishes rows that belong to no micro-batch; they are not sent twice.

    Raises:
        ArgumentError, JournalError: as `commit`; also when the hub went away in between, so that nobody knows.
    """
    for part in split(rows):
        _hub_link(hub, retry_s).post("publish", encode(part), again=False)


def stage(hub: HubAddress, query: str, batch: int, rows: Iterable[OutRow], retry_s: float) -> list[str]:
    """Give rows to a hub, which publishes them when they are committed.

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
        ask_hub(hub, "stage", {"query": query, "batch": batch, "part": name}, encode(part), "rows", int, retry_s)
        names.append(name)
    return names


def commit_staged(
    hub: HubAddress,
    query: str,
    batch: int,
    parts: Sequence[str],
    retry_s: float,
    before: Callable[[int], None] = lambda number: None,
) -> None:
    """Publish what was staged for a micro-batch, once, however often and with whatever parts it is called.

    Args:
        hub, query, batch, retry_s: as for `stage`.
        parts: their names, at least one.
        before: is called before each part with its number.

    Raises:
        JournalError: as `stage`.
    """
    body = json.dumps(list(parts)).encode()
    sealed = ask_hub(hub, "seal", {"query": query, "batch": batch}, body, "parts", list, retry_s)
    for number, part in enumerate(sealed[1:], 1):
        before(number)
        _commit_part(hub, query, batch, f"{query}.{number}", part, retry_s)
    for part in sealed[:1]:  # under the query's own name the last: a hub that has it has all of them
        _commit_part(hub, query, batch, query, part, retry_s)


def _commit_part(hub: HubAddress, query: str, batch: int, name: str, part: str, retry_s: float) -> None:
    ask_hub(hub, "commit", {"query": name, "batch": batch, "of": query, "part": part}, b"", "stored", bool, retry_s)


def last_batch(hub: HubAddress, query: str) -> int:
    """Return the number of the last micro-batch of a query that was committed; -1 when there is none.

    Args:
        hub: where; with a folder, the hub itself needn't run.
        query: the streaming query's id.

    Raises:
        JournalError: the hub is away, or what it has can't be read.
    """
    if hub.folder is not None:
        try:
            return committed.last_batches(hub.folder).get(query, -1)
        except FileNotFoundError:
            raise Unreachable(f"{hub.folder} {MOVED}") from None
        except OSError as error:
            raise JournalError(f"{error.filename} can't be read: {error.strerror}; give this user the files.") from None
    answer = _hub_link(hub, PROGRESS_RETRY_S).get("committed?" + urlencode({"query": query})).body
    try:
        return int(json.loads(answer)["batch"])
    except (ValueError, RecursionError, KeyError, TypeError):
        raise JournalError(f"{hub.url} can't say what was committed: {answer[:100]!r}; its server is older.") from None


def report_progress(
    hub: HubAddress,
    query: str,
    name: str,
    offset: Mapping[str, int],
    time_us: int | None = None,
    retry_s: float = PROGRESS_RETRY_S,
    results: bool = True,
) -> None:
    """Say how far a query has come: retention keeps what it has yet to read.

    Args:
        hub: where; with a folder, the hub itself needn't run.
        query: its id.
        name: what people call it.
        offset: by node, the number of the next row it will read.
        time_us: when, microseconds since 1970; now by default.
        retry_s: how long to wait for a hub that is away, seconds.
        results: whether it reads what pipelines have published; else that doesn't wait for it.

    Raises:
        ArgumentError: the id can't name a file.
        JournalError: it can't be kept.
    """
    time_us = time.time_ns() // 1000 if time_us is None else time_us
    values = {"query": query, "name": name, "offset": dict(offset), "time_us": time_us, "results": results}
    if hub.folder is not None:
        readers.save_report(hub.folder, readers.parse_report(json.dumps(values).encode()))
    else:
        _hub_link(hub, retry_s).post("progress", json.dumps(values).encode())


# ---- requests


def ask_hub(
    hub: HubAddress, action: str, values: Mapping[str, object], body: bytes, name: str, kind: type[T], retry_s: float
) -> T:
    """Return what a hub says to a request that may be repeated.

    Args:
        hub: where.
        action, values, body: what is asked for.
        name, kind: of the answer's values, the one that is wanted, and its type.
        retry_s: how long to wait for a hub that is away, seconds.

    Raises:
        JournalError: the hub refuses it, is away for too long, or is none.
    """
    answer = _hub_link(hub, retry_s).post(f"{action}?{urlencode(values)}", body).body
    try:
        if isinstance(found := json.loads(answer)[name], kind):
            return found
    except (ValueError, RecursionError, KeyError, TypeError):
        pass
    raise JournalError(f"{hub.url} is no journal of a hub: it says {answer[:100]!r} to a {action}.")


_threads = threading.local()


def _hub_link(hub: HubAddress, retry_s: float) -> HubLink:
    """Return this thread's connection: queries of one process don't wait for each other."""
    links: dict[HubAddress, HubLink] = _threads.__dict__.setdefault("links", {})
    link = links.setdefault(hub, HubLink(hub.find, retry_s))
    link.retry_s = retry_s
    return link


# ---- rows in parts


def parts(query: str, rows: Sequence[OutRow], most_bytes: int = PART_BYTES) -> Iterator[tuple[str, Sequence[OutRow]]]:
    """Yield the rows of a micro-batch in parts, each for a commit under a name of its own: `(query, rows)`.

    When there is more than one, the parts are of the rows in order: Spark may give the same rows in another order when
    it does the micro-batch again, and each part must be what it was.

    Args:
        query: the streaming query's id.
        rows: the messages.
        most_bytes: of one part, unless one message alone has more; of rows it has `MOST_ROWS` at most.
    """
    if is_one_part(rows, most_bytes):
        yield query, rows
        return
    yield from sorted_parts(query, sorted(rows, key=order), most_bytes)


def is_one_part(rows: Sequence[OutRow], most_bytes: int = PART_BYTES) -> bool:
    """Return whether rows are few enough for one commit."""
    return len(rows) <= MOST_ROWS and sum(map(size_bytes, rows)) <= most_bytes


def sorted_parts(
    query: str, rows: Iterable[OutRow], most_bytes: int = PART_BYTES
) -> Iterator[tuple[str, Sequence[OutRow]]]:
    """Yield what `parts` does, of rows that come in the order of `order`, without ever having all of them.

    Rows that are few enough for one part make the same one as there, so that a micro-batch may be repeated either way.
    The part under the query's own name comes last: a hub that has it has all of them.

    Args:
        query, most_bytes: as for `parts`.
        rows: at least one message.
    """
    cut = split(rows, most_bytes)
    first = next(cut)
    for number, part in enumerate(cut, 1):
        yield f"{query}.{number}", part
    yield query, first


def order(row: OutRow) -> tuple[bytes, bytes, bytes]:
    """Return what messages of a micro-batch that is cut are sorted by."""
    return row[0], row[1] or b"", row[2]


def split(rows: Iterable[OutRow], most_bytes: int = PART_BYTES) -> Iterator[list[OutRow]]:
    """Yield rows as they come, as many together as one commit takes; at least one list."""
    part: list[OutRow] = []
    in_part_bytes = 0
    for row in rows:
        if part and (len(part) == MOST_ROWS or in_part_bytes + size_bytes(row) > most_bytes):
            yield part
            part, in_part_bytes = [], 0
        part.append(row)
        in_part_bytes += size_bytes(row)
    yield part


def size_bytes(row: OutRow) -> int:
    """Return how many bytes a row is in a commit."""
    return len(row[0]) + len(row[1] or b"") + len(row[2]) + _ROW_BYTES


# ---- rows as bytes: u16 topic length, topic, u16 subtopic length, subtopic, u32 payload length, payload; big-endian


def encode(rows: Iterable[OutRow]) -> bytes:
    """Return the body of a commit: per row the topic, the subtopic and the payload, each behind its length.

    Raises:
        ArgumentError: a topic is empty or too long.
    """
    pieces: list[bytes] = []
    for number, (topic, subtopic, payload) in enumerate(rows, 1):
        below = subtopic or b""
        if not topic or max(len(topic), len(below)) > _MAX_NAME_BYTES:
            raise ArgumentError(f"row {number}: its topic is empty, or a name is longer than {_MAX_NAME_BYTES} bytes.")
        pieces += _U16.pack(len(topic)), topic, _U16.pack(len(below)), below, _U32.pack(len(payload)), payload
    return b"".join(pieces)


class RowDecoder:
    """Decodes records out of pieces of any size.

    Args:
        payload_bytes: the longest payload that is taken.

    Attributes:
        count: how many records were given so far.
    """

    def __init__(self, payload_bytes: int) -> None:
        self._payload_bytes = payload_bytes
        self._rest = b""
        self.count = 0

    def feed(self, piece: bytes) -> Iterator[OutRow]:
        """Take the next piece; yield the records that it completes, so that others may have their turn in between.

        Raises:
            ArgumentError: a record has no topic, or too long a payload.
        """
        data = self._rest + piece if self._rest else piece
        at = 0
        while (end := self._end(data, at)) is not None:
            yield _record(data, at)
            self.count += 1
            at = end
        self._rest = data[at:]

    def finish(self) -> None:
        """Say that the body has ended.

        Raises:
            ArgumentError: it did so inside a record.
        """
        if self._rest:
            self._refuse("the body ends inside it; send whole records (topic, subtopic, payload, each with its length)")

    def _end(self, data: bytes, at: int) -> int | None:
        """Where the record at `at` ends; None when it is not all there."""
        size = len(data)
        if size - at < 2:
            return None
        topic_bytes = _U16.unpack_from(data, at)[0]
        if not topic_bytes:
            self._refuse("the topic is empty; every row is published to one")
        at += 2 + topic_bytes
        if size - at < 2:
            return None
        at += 2 + int(_U16.unpack_from(data, at)[0])
        if size - at < 4:
            return None
        payload_bytes = _U32.unpack_from(data, at)[0]
        if payload_bytes > self._payload_bytes:
            self._refuse(
                f"the payload has {payload_bytes} bytes; a message carries at most {self._payload_bytes}, split it"
            )
        end = at + 4 + int(payload_bytes)
        return end if end <= size else None

    def _refuse(self, what: str) -> NoReturn:
        raise ArgumentError(f"record {self.count + 1}: {what}.")


def _record(data: bytes, at: int) -> OutRow:
    """Return the whole record at `at`."""
    subtopic_at = at + 4 + int(_U16.unpack_from(data, at)[0])
    payload_at = subtopic_at + 4 + int(_U16.unpack_from(data, subtopic_at - 2)[0])
    topic = data[at + 2 : subtopic_at - 2]
    payload_bytes = _U32.unpack_from(data, payload_at - 4)[0]
    return topic, data[subtopic_at : payload_at - 4] or None, data[payload_at : payload_at + payload_bytes]

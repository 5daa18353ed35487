"""Commits: results of pipelines, stored and published by a hub exactly once.

The hub stores (query, batch) with the rows, in one write. So a commit may be repeated after a hub or a pipeline was
killed: the hub ignores it. The tasks of a stream stage their rows in parts; the driver commits the parts by name.
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
from smqrt.journal.files import IS_MISSING, HubAddress, Unreachable
from smqrt.journal.remote import HubLink

RETRY_S = 60.0
PROGRESS_RETRY_S = 5.0
_U16, _U32 = struct.Struct(">H"), struct.Struct(">I")
_NAME_LENGTH, _PAYLOAD_LENGTH = 2, 4  # sizes of the length fields, bytes
_MAX_NAME_BYTES = 0xFFFF
MAX_PART_BYTES = 1 << 20
MAX_PAYLOAD_BYTES, MAX_NAME_BYTES = 0xFFF0, 0xFFF7
"""Limits of a message's payload, and of a topic or subtopic, which come from the size of a frame (`smqrt.wire.smq`)."""
MAX_COMMIT_ROWS = 4096
"""Maximum number of rows of one commit: a hub stores them without a pause, so its clients wait (some 20 ms)."""
_ROW_BYTES = 8
"""Size of the three lengths of a row: u16 topic, u16 subtopic, u32 payload."""

T = TypeVar("T")

OutRow = tuple[bytes, bytes | None, bytes]
"""Topic, subtopic or None, payload."""


def commit(hub: HubAddress, query: str, batch: int, rows: Iterable[OutRow], retry_s: float = RETRY_S) -> bool:
    """Store and publish the rows of a micro-batch, once.

    Args:
        hub: the hub.
        query: the streaming query's id, which lasts as long as its checkpoint.
        batch: the number of the micro-batch, greater than that of the previous one.
        rows: (topic, subtopic or None, payload).
        retry_s: how long to wait for a hub that does not answer, seconds.

    Returns:
        False when the hub already has this batch, from an earlier attempt.

    Raises:
        ArgumentError: a topic is empty or too long.
        JournalError: the hub rejects the commit, or does not answer in time.
    """
    return request_value(hub, "commit", {"query": query, "batch": batch}, encode(rows), "stored", bool, retry_s)


def publish(hub: HubAddress, rows: Iterable[OutRow], retry_s: float = RETRY_S) -> None:
    """Store and publish rows without a micro-batch; they are not sent twice.

    Args:
        hub, rows, retry_s: as for `commit`.

    Raises:
        ArgumentError, JournalError: as `commit`; also when the connection breaks, so that the result is not known.
    """
    for part in split(rows):
        _hub_link(hub, retry_s).post("publish", encode(part), may_repeat=False)


def stage(hub: HubAddress, query: str, batch: int, rows: Iterable[OutRow], retry_s: float) -> list[str]:
    """Send rows to a hub, which publishes them when they are committed.

    Args:
        hub: the hub.
        query, batch: the streaming query's id and the number of the micro-batch.
        rows: at least one.
        retry_s: how long to wait for a hub that does not answer, seconds.

    Returns:
        The names of the parts with the rows.

    Raises:
        ArgumentError: a topic is empty or too long.
        JournalError: the hub rejects the rows, or does not answer in time.
    """
    names, attempt = [], secrets.token_hex(8)
    for number, part in enumerate(split(rows)):
        name = f"{attempt}.{number}"
        request_value(hub, "stage", {"query": query, "batch": batch, "part": name}, encode(part), "rows", int, retry_s)
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
    """Publish the staged rows of a micro-batch once, even when it is called again with other parts.

    Args:
        hub, query, batch, retry_s: as for `stage`.
        parts: the names of the parts with its rows, at least one.
        before: called before each part except the last one, with its number.

    Raises:
        JournalError: as `stage`.
    """

    def commit_part(name: str, part: str) -> None:
        values = {"query": name, "batch": batch, "of": query, "part": part}
        request_value(hub, "commit", values, b"", "stored", bool, retry_s)

    body = json.dumps(list(parts)).encode()
    sealed = request_value(hub, "seal", {"query": query, "batch": batch}, body, "parts", list, retry_s)
    for number, part in enumerate(sealed[1:], 1):
        before(number)
        commit_part(f"{query}.{number}", part)
    for part in sealed[:1]:  # the query's own name comes last: it is committed only after all other parts
        commit_part(query, part)


def last_batch(hub: HubAddress, query: str) -> int:
    """Return the number of the last committed micro-batch of a query; -1 without one.

    Args:
        hub: the hub; with a folder, the hub need not run.
        query: the streaming query's id.

    Raises:
        JournalError: the hub does not answer, or its commits can't be read.
    """
    if hub.folder is not None:
        try:
            return committed.last_batches(hub.folder).get(query, -1)
        except FileNotFoundError:
            raise Unreachable(f"{hub.folder} {IS_MISSING}") from None
        except OSError as error:
            raise JournalError(
                f"{error.filename} can't be read: {error.strerror}; give this user access to the files."
            ) from None
    answer = _hub_link(hub, PROGRESS_RETRY_S).get("committed?" + urlencode({"query": query})).body
    try:
        return int(json.loads(answer)["batch"])
    except (ValueError, RecursionError, KeyError, TypeError):
        raise JournalError(
            f"{hub.url} does not return committed batches: {answer[:100]!r}; update its server."
        ) from None


def report_progress(
    hub: HubAddress,
    query: str,
    name: str,
    offset: Mapping[str, int],
    time_us: int | None = None,
    retry_s: float = PROGRESS_RETRY_S,
    results: bool = True,
) -> None:
    """Report the progress of a query, so that retention keeps the rows it has not read.

    Args:
        hub: the hub; with a folder, the hub need not run.
        query: the query's id.
        name: the query's name for users.
        offset: by node, the number of the next row it will read.
        time_us: the time, microseconds since 1970; now by default.
        retry_s: how long to wait for a hub that does not answer, seconds.
        results: whether it reads rows that pipelines have published; if not, such rows are not kept for it.

    Raises:
        ArgumentError: the id is not a valid file name.
        JournalError: the report can't be stored.
    """
    time_us = time.time_ns() // 1000 if time_us is None else time_us
    values = {"query": query, "name": name, "offset": dict(offset), "time_us": time_us, "results": results}
    if hub.folder is not None:
        readers.save_report(hub.folder, readers.parse_report(json.dumps(values).encode()))
    else:
        _hub_link(hub, retry_s).post("progress", json.dumps(values).encode())


# ---- requests


def request_value(
    hub: HubAddress, action: str, values: Mapping[str, object], body: bytes, name: str, kind: type[T], retry_s: float
) -> T:
    """Return a value of the hub's answer to a request that may be repeated.

    Args:
        hub: the hub.
        action, values, body: the request.
        name, kind: name and type of the wanted value in the answer.
        retry_s: how long to wait for a hub that does not answer, seconds.

    Raises:
        JournalError: the hub rejects the request, does not answer in time, or is not a hub.
    """
    answer = _hub_link(hub, retry_s).post(f"{action}?{urlencode(values)}", body).body
    try:
        if isinstance(found := json.loads(answer)[name], kind):
            return found
    except (ValueError, RecursionError, KeyError, TypeError):
        pass
    raise JournalError(f"{hub.url} is not a journal on a hub: it answers {answer[:100]!r} to a {action}.")


_threads = threading.local()


def _hub_link(hub: HubAddress, retry_s: float) -> HubLink:
    """Return this thread's connection, so that queries of one process don't wait for each other."""
    links: dict[HubAddress, HubLink] = _threads.__dict__.setdefault("links", {})
    link = links.setdefault(hub, HubLink(hub.find, retry_s))
    link.retry_s = retry_s
    return link


# ---- rows in parts


def parts(
    query: str, rows: Sequence[OutRow], max_bytes: int = MAX_PART_BYTES
) -> Iterator[tuple[str, Sequence[OutRow]]]:
    """Yield the rows of a micro-batch in parts, each for a commit under a separate name: `(query, rows)`.

    When there are several parts, the rows are sorted first: Spark may return the rows in another order when it repeats
    the micro-batch, and each part must be the same.

    Args:
        query: the streaming query's id.
        rows: the messages.
        max_bytes: maximum size of a part, unless a single message is larger; a part has `MAX_COMMIT_ROWS` rows at most.
    """
    if is_one_part(rows, max_bytes):
        yield query, rows
        return
    yield from sorted_parts(query, sorted(rows, key=sort_key), max_bytes)


def is_one_part(rows: Sequence[OutRow], max_bytes: int = MAX_PART_BYTES) -> bool:
    """Return whether rows are few enough for one commit."""
    return len(rows) <= MAX_COMMIT_ROWS and sum(map(size_bytes, rows)) <= max_bytes


def sorted_parts(
    query: str, rows: Iterable[OutRow], max_bytes: int = MAX_PART_BYTES
) -> Iterator[tuple[str, Sequence[OutRow]]]:
    """Yield the same as `parts`, from sorted rows (see `sort_key`), without all of them in memory.

    Rows that fit into one part give the same part as `parts`, so that a micro-batch may be repeated with either
    function. The part with the query's own name comes last, so a hub that has stored it has all parts.

    Args:
        query, max_bytes: as for `parts`.
        rows: at least one message.
    """
    cut = split(rows, max_bytes)
    first = next(cut)
    for number, part in enumerate(cut, 1):
        yield f"{query}.{number}", part
    yield query, first


def sort_key(row: OutRow) -> tuple[bytes, bytes, bytes]:
    """Return the sort key of a message in a micro-batch of several parts."""
    return row[0], row[1] or b"", row[2]


def split(rows: Iterable[OutRow], max_bytes: int = MAX_PART_BYTES) -> Iterator[list[OutRow]]:
    """Yield rows in lists that fit into one commit; at least one list."""
    part: list[OutRow] = []
    size_of_part = 0
    for row in rows:
        if part and (len(part) == MAX_COMMIT_ROWS or size_of_part + size_bytes(row) > max_bytes):
            yield part
            part, size_of_part = [], 0
        part.append(row)
        size_of_part += size_bytes(row)
    yield part


def size_bytes(row: OutRow) -> int:
    """Return the size of a row in a commit."""
    return len(row[0]) + len(row[1] or b"") + len(row[2]) + _ROW_BYTES


# ---- rows as bytes: u16 topic length, topic, u16 subtopic length, subtopic, u32 payload length, payload; big-endian


def encode(rows: Iterable[OutRow]) -> bytes:
    """Return the body of a commit.

    Raises:
        ArgumentError: a topic is empty or too long.
    """
    pieces: list[bytes] = []
    for number, (topic, subtopic, payload) in enumerate(rows, 1):
        subtopic_name = subtopic or b""
        if not topic or max(len(topic), len(subtopic_name)) > _MAX_NAME_BYTES:
            raise ArgumentError(f"row {number}: its topic is empty, or a name is longer than {_MAX_NAME_BYTES} bytes.")
        pieces += _U16.pack(len(topic)), topic, _U16.pack(len(subtopic_name)), subtopic_name
        pieces += _U32.pack(len(payload)), payload
    return b"".join(pieces)


class RowDecoder:
    """Decodes rows of a commit from pieces of any size.

    Args:
        max_payload_bytes: maximum size of a payload.

    Attributes:
        count: number of decoded rows.
    """

    def __init__(self, max_payload_bytes: int) -> None:
        self._max_payload_bytes = max_payload_bytes
        self._rest = b""
        self.count = 0

    def feed(self, piece: bytes) -> Iterator[OutRow]:
        """Decode the next piece, and yield the rows that it completes.

        Raises:
            ArgumentError: a row has no topic, or too long a payload.
        """
        data = self._rest + piece if self._rest else piece  # without a copy when no row was cut
        size, at = len(data), 0
        while size - at >= _NAME_LENGTH:
            topic_at = at + _NAME_LENGTH
            topic_end = topic_at + int(_U16.unpack_from(data, at)[0])
            if topic_end == topic_at:
                self._reject("the topic is empty; every row needs one")
            subtopic_at = topic_end + _NAME_LENGTH
            if size < subtopic_at:
                break
            subtopic_end = subtopic_at + int(_U16.unpack_from(data, topic_end)[0])
            payload_at = subtopic_end + _PAYLOAD_LENGTH
            if size < payload_at:
                break
            payload_bytes = int(_U32.unpack_from(data, subtopic_end)[0])
            if payload_bytes > self._max_payload_bytes:  # before the rest of the payload is received
                limit = self._max_payload_bytes
                self._reject(f"the payload has {payload_bytes} bytes; a message carries at most {limit}, split it")
            end = payload_at + payload_bytes
            if size < end:
                break
            yield data[topic_at:topic_end], data[subtopic_at:subtopic_end] or None, data[payload_at:end]
            self.count += 1
            at = end
        self._rest = data[at:]

    def finish(self) -> None:
        """Check that the body ended after a complete row.

        Raises:
            ArgumentError: the last row is incomplete.
        """
        if self._rest:
            self._reject(
                "the body ends within this row; send complete rows (topic, subtopic, payload, each with its length)"
            )

    def _reject(self, what: str) -> NoReturn:
        raise ArgumentError(f"row {self.count + 1}: {what}.")

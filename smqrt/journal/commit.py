"""Results of pipelines back into a hub: `commit` stores and publishes the rows of a micro-batch exactly once.

The hub keeps (query, batch) with the rows, in one write. So a commit may be repeated: after a hub that went away, after
a pipeline that was killed.
"""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal import committed, progress, uris
from smqrt.journal.link import MOVED, Address, Link, Unreachable, checked, trusted

RETRY_S = 60.0
PROGRESS_RETRY_S = 5.0
_U16, _U32 = struct.Struct(">H"), struct.Struct(">I")
_LONGEST_NAME = 0xFFFF
PART_BYTES = 1 << 20
MOST_ROWS = 4096
"""Of one commit: a hub numbers and stores all its rows in one go, and its clients wait meanwhile (some 20 ms)."""
_ROW_BYTES = 8
"""The three lengths in front of a row's parts."""

OutRow = tuple[bytes, bytes | None, bytes]
"""Topic, subtopic or None, payload."""


@dataclass(frozen=True)
class HubAddress:
    """Where a journal's hub is. `HubAddress.of` makes one.

    Attributes:
        folder: of the journal: its `hub.json` says where the hub is, each time anew.
        given: or the address itself.
    """

    folder: Path | None = None
    given: Address | None = None

    @classmethod
    def of(cls, place: Path | str, token: str | None = None, cafile: str | None = None) -> HubAddress:
        """Returns the address of a journal's hub; the hub may be away.

        Args:
            place: the journal's folder, or its address on the hub.
            token: for an address.
            cafile: PEM file with certificates to trust instead of the system's, or what it holds; for an address.

        Raises:
            JournalError: the address is none, or has no token; the file has no certificate.
            ArgumentError: it is a URI of another kind.
        """
        if not uris.is_address(place):
            return cls(folder=uris.journal(place))
        return cls(given=Address(checked(str(place)), with_token(str(place), token), trusted(cafile)))

    def find(self) -> Address:
        """Returns the address as it is now.

        Raises:
            JournalError: no hub serves the journal.
        """
        return self.given or _announced(self.folder or Path())

    @property
    def url(self) -> str:
        """The journal's address on the hub. Raises as `find`."""
        return self.find().url

    @property
    def token(self) -> str:
        """What the hub wants to see. Raises as `find`."""
        return self.find().token


def with_token(url: str, token: str | None) -> str:
    """Returns a token that there is.

    Raises:
        JournalError: there is none.
    """
    if not token or not token.isprintable() or not token.isascii():
        raise JournalError(f"{url} needs a token: what the file `token` in the journal's folder holds.")
    return token


def _announced(folder: Path) -> Address:
    path = folder / "hub.json"
    try:
        values = json.loads(path.read_bytes())
        return Address(checked(values["url"]), str(values["token"]))
    except FileNotFoundError:
        raise JournalError(f"No hub serves {folder}; start it with `smqrt serve`.") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JournalError(f"{path} can't be read ({error!r}); start the hub anew, which writes it.") from None


def commit(hub: HubAddress, query: str, batch: int, rows: Iterable[OutRow], retry_s: float = RETRY_S) -> bool:
    """Stores and publishes the rows of a micro-batch, once.

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
    return bool(told(hub, "commit", {"query": query, "batch": batch}, encode(rows), "stored", retry_s))


def told(hub: HubAddress, action: str, values: Mapping[str, object], body: bytes, name: str, retry_s: float) -> Any:
    """Returns what a hub says to a request that may be repeated.

    Args:
        hub: where.
        action, values, body: what is asked for.
        name: of the answer's values, the one that is wanted.
        retry_s: how long to wait for a hub that is away, seconds.

    Raises:
        JournalError: the hub refuses it, is away for too long, or is none.
    """
    answer = connection(hub, retry_s).post(f"{action}?{urlencode(values)}", body).body
    try:
        return json.loads(answer)[name]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise JournalError(f"{hub.url} is no journal of a hub: it says {answer[:100]!r} to a {action}.") from None


def parts(query: str, rows: Sequence[OutRow], most_bytes: int = PART_BYTES) -> Iterator[tuple[str, Sequence[OutRow]]]:
    """Yields the rows of a micro-batch in parts, each for a commit under a name of its own: `(query, rows)`.

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
    """Whether rows are few enough for one commit."""
    return len(rows) <= MOST_ROWS and sum(map(size_bytes, rows)) <= most_bytes


def sorted_parts(
    query: str, rows: Iterable[OutRow], most_bytes: int = PART_BYTES
) -> Iterator[tuple[str, Sequence[OutRow]]]:
    """Yields what `parts` does, of rows that come in the order of `order`, without ever having all of them.

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
    """Returns what messages of a micro-batch that is cut are sorted by."""
    return row[0], row[1] or b"", row[2]


def split(rows: Iterable[OutRow], most_bytes: int = PART_BYTES) -> Iterator[list[OutRow]]:
    """Yields rows as they come, as many together as one commit takes; at least one list."""
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
    """Returns how many bytes a row is in a commit."""
    return len(row[0]) + len(row[1] or b"") + len(row[2]) + _ROW_BYTES


def publish(hub: HubAddress, rows: Iterable[OutRow], retry_s: float = RETRY_S) -> None:
    """Stores and publishes rows that belong to no micro-batch; they are not sent twice.

    Raises:
        ArgumentError, JournalError: as `commit`; also when the hub went away amidst, so that nobody knows.
    """
    for part in split(rows):
        connection(hub, retry_s).post("publish", encode(part), again=False)


def last_batch(hub: HubAddress, query: str) -> int:
    """Returns the number of the last micro-batch of a query that was committed; -1 when there is none.

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
    answer = connection(hub, PROGRESS_RETRY_S).get("committed?" + urlencode({"query": query})).body
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
) -> None:
    """Says how far a query has come: retention keeps what it has yet to read.

    Args:
        hub: where; with a folder, the hub itself needn't run.
        query: its id.
        name: what people call it.
        offset: by node, the number of the next row it will read.
        time_us: when, microseconds since 1970; now by default.
        retry_s: how long to wait for a hub that is away, seconds.

    Raises:
        ArgumentError: the id can't name a file.
        JournalError: it can't be kept.
    """
    time_us = time.time_ns() // 1000 if time_us is None else time_us
    values = {"query": query, "name": name, "offset": dict(offset), "time_us": time_us}
    if hub.folder is not None:
        progress.save(hub.folder, progress.checked(json.dumps(values).encode()))
    else:
        connection(hub, retry_s).post("progress", json.dumps(values).encode())


def encode(rows: Iterable[OutRow]) -> bytes:
    """Returns the body of a commit: per row the topic, the subtopic and the payload, each behind its length.

    Raises:
        ArgumentError: a topic is empty or too long.
    """
    pieces: list[bytes] = []
    for number, (topic, subtopic, payload) in enumerate(rows, 1):
        below = subtopic or b""
        if not topic or max(len(topic), len(below)) > _LONGEST_NAME:
            raise ArgumentError(f"row {number}: its topic is empty, or a name is longer than {_LONGEST_NAME} bytes.")
        pieces += _U16.pack(len(topic)), topic, _U16.pack(len(below)), below, _U32.pack(len(payload)), payload
    return b"".join(pieces)


_threads = threading.local()


def connection(hub: HubAddress, retry_s: float) -> Link:
    """Returns this thread's connection: queries of one process don't wait for each other."""
    links: dict[HubAddress, Link] = _threads.__dict__.setdefault("links", {})
    link = links.setdefault(hub, Link(hub.find, retry_s))
    link.retry_s = retry_s
    return link

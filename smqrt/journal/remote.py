"""A journal over HTTP, for who doesn't share the hub's disk: `open_journal("http://hub:9357/rtl/journal/name", token)`.

The hub lists what there is and gives pieces of its files; everything else is as with a folder.
"""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from smqrt.errors import JournalError
from smqrt.journal import manifest, uris
from smqrt.journal.commit import with_token
from smqrt.journal.index import DATA, INDEX, INDEXED, REMEDY
from smqrt.journal.link import Address, Link, Refused, checked, trusted
from smqrt.journal.manifest import DataFile, Page
from smqrt.journal.planning import Chunk, Index, Offsets, Sealed, Snapshot, segment_file
from smqrt.journal.reader import Journal

RETRY_S = 60.0
_BLOCK_BYTES = 1 << 20
_KEPT_INDEXES = 64
_KEPT_PAGES = 32
MOST_WAIT_S = 20.0
"""A hub answers after so long though there is nothing new; less than what a connection waits for an answer."""


class _Listed(NamedTuple):
    """What the listing says of a segment that doesn't grow any more: how long its index is, and what it holds."""

    index_bytes: int
    sealed: Sealed | None


def open_journal(
    place: Path | str, token: str | None = None, *, cafile: str | None = None, retry_s: float = RETRY_S
) -> Journal | RemoteJournal:
    """Opens a journal for reading.

    Args:
        place: its folder, or its address on a hub.
        token: what the file `token` in its folder holds; for an address.
        cafile: PEM file with certificates to trust instead of the system's, or what it holds; for an address.
        retry_s: how long to wait for a hub that is away, seconds.

    Raises:
        JournalError: there is no such journal, or the token is missing.
        ArgumentError: it is a URI of another kind.
    """
    if uris.is_address(place):
        return RemoteJournal(str(place), token, cafile=cafile, retry_s=retry_s)
    return Journal(uris.journal(place))


class RemoteJournal(Journal):
    """A journal that a hub serves. Objects can be pickled; each process has its own connection.

    Args:
        url: its address, such as "http://hub:9357/rtl/journal/name".
        token: what the file `token` in its folder holds.
        cafile: as for `open_journal`.
        retry_s: how long every request waits for a hub that is away, seconds.
        verify: as for `Journal`.

    Raises:
        JournalError: the address or the token is none.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        *,
        cafile: str | None = None,
        retry_s: float = RETRY_S,
        verify: bool = True,
    ) -> None:
        address = Address(checked(url), with_token(url, token), trusted(cafile))
        self.url, self.verify = address.url, verify
        self._address = address
        self._link = Link(lambda: address, retry_s)
        self._brokers: dict[tuple[str, int], str] = {}
        self._listing: tuple[str, Snapshot] | None = None
        self._pages: OrderedDict[str, tuple[DataFile, ...]] = OrderedDict()
        self._segments: dict[tuple[str, int], _Listed] = {}
        self._indexes: dict[str, bytes] = {}

    def __repr__(self) -> str:
        return f"RemoteJournal({self.url!r})"

    def __reduce__(self) -> Any:
        return _opened, (*self._address, self._link.retry_s, self.verify)

    def close(self) -> None:
        """Closes the connection; the next request makes another."""
        self._link.close()

    def end(self, known: Collection[str] = ()) -> dict[str, int]:
        """As `Journal.end`, with a request of its own that is short."""
        return {node: last for node, last in self._ends("end").items() if node not in known}

    def wait(self, after: Offsets, timeout_s: float) -> dict[str, int]:
        """As `Journal.wait`: the hub answers when there is more."""
        seconds = min(timeout_s, MOST_WAIT_S)
        return self._ends(f"end?wait_s={seconds:g}&after={quote(json.dumps(dict(after)))}")

    def _ends(self, request: str) -> dict[str, int]:
        values = self._json("end", self._link.get(request).body)
        try:
            return {str(node): int(seq) for node, seq in values["end"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise JournalError(f"{self.url}/end is no journal of a hub: its answer is wrong ({error!r}).") from None

    # ---- what the hub has

    def _place(self, file: str) -> str:
        return f"{self.url}/{file}"

    def _snapshot(self) -> Snapshot:
        known, headers = self._listing, {"If-None-Match": self._listing[0]} if self._listing else {}
        answer = self._link.get("manifest", headers)
        if answer.status == 304 and known:
            return known[1]
        values = self._json("manifest", answer.body)
        try:
            snapshot = self._listed(values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise JournalError(f"{self.url} is no journal of a hub: its manifest is wrong ({error!r}).") from None
        self._listing = (answer.headers.get("etag", ""), snapshot) if answer.headers.get("etag") else None
        return snapshot

    def _listed(self, values: Any) -> Snapshot:
        self._segments = {
            (node, int(one["first"])): _Listed(int(one["idx_bytes"]), _sealed(one))
            for node, segments in values["wal"].items()
            for one in segments
            if "idx_bytes" in one
        }
        wal = {node: [int(one["first"]) for one in segments] for node, segments in values["wal"].items()}
        return Snapshot(wal, manifest.parse(values["manifest"], self._page))

    def _page(self, page: Page) -> tuple[DataFile, ...]:
        """Returns a page of the manifest; its name is that of its content, so that it is asked for once."""
        found = self._pages.get(page.name)
        if found is None:
            body = self._get(f"{manifest.PAGES_FOLDER}/{page.name}", 0)
            try:
                found = manifest.parse_page(page, body)
            except ValueError as error:
                raise JournalError(f"{self._place(page.name)} is damaged: {error}; {REMEDY}.") from None
            while len(self._pages) >= _KEPT_PAGES:
                self._pages.popitem(last=False)
            self._pages[page.name] = found
        return found

    def _json(self, what: str, body: bytes) -> Any:
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise JournalError(f"{self.url}/{what} is no journal of a hub: it answers with no JSON.") from None

    def _end(self, snapshot: Snapshot, node: str) -> int:
        return self.end().get(node, 0)

    def _index(self, node: str, first: int, newest: bool = False, until: int = 0) -> Index:
        file = segment_file(node, first)
        path = file.removesuffix(DATA) + INDEXED
        index = Index(self._indexes.get(path, b""), self._place(path))
        if until and index.end >= until:
            return index
        listed = self._segments.get((node, first))
        if until or newest or listed is None or index.size_bytes < listed.index_bytes:
            index = Index(self._grown(path, self._indexes.get(path, b"")), self._place(path))
        return index

    def _sealed(self, node: str, first: int) -> Sealed | None:
        listed = self._segments.get((node, first))
        return listed.sealed if listed else None

    def _grown(self, path: str, known: bytes) -> bytes:
        """Returns an index from what was known of it; the last record is compared, for the hub may have lost some."""
        at = max(0, len(known) - INDEX.size)
        new = self._get(path, at)
        if not new.startswith(known[at:]):
            at, new = 0, self._get(path, 0)
        data = known[:at] + new
        data = data[: len(data) // INDEX.size * INDEX.size]
        self._indexes.pop(path, None)
        self._indexes[path] = data
        if len(self._indexes) > _KEPT_INDEXES:
            del self._indexes[next(iter(self._indexes))]
        return data

    def _bytes(self, file: str, offset: int, length: int, head: bytes = b"") -> memoryview:
        return memoryview(head + self._get(file, offset, length))

    def _get(self, file: str, offset: int, length: int = 0) -> bytes:
        """Returns a piece of a file, or all from `offset` on; less when it is shorter."""
        end = offset + length - 1 if length else ""
        try:
            answer = self._link.get(quote(file), {"Range": f"bytes={offset}-{end}"})
        except Refused as refused:
            if refused.status == 404:
                raise FileNotFoundError(2, "gone from the hub", self._place(file)) from None
            if refused.status == 416:
                return b""
            raise
        if answer.status == 206:
            return answer.body
        return answer.body[offset : offset + length if length else None]

    def _parquet(self, chunk: Chunk) -> Any:
        return io.BufferedReader(_RemoteFile(self._get, chunk.file, chunk.length), _BLOCK_BYTES)


class _RemoteFile(io.RawIOBase):
    """A file on the hub, for pyarrow."""

    def __init__(self, get: Callable[[str, int, int], bytes], file: str, size_bytes: int) -> None:
        self._get, self._file, self._size_bytes, self._at = get, file, size_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._size_bytes - self._at)
        data = self._get(self._file, self._at, size) if size > 0 else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _sealed(listed: Mapping[str, Any]) -> Sealed | None:
    """What the listing says of a sealed segment's rows, unless the index has to: hubs of older versions say less."""
    if "end" not in listed:
        return None
    return Sealed(*(int(listed[name]) for name in ("end", "bytes", "ts_min_us", "ts_max_us")))


def _opened(url: str, token: str, trusted: str | None, retry_s: float, verify: bool) -> RemoteJournal:
    return RemoteJournal(url, token, cafile=trusted, retry_s=retry_s, verify=verify)

"""A journal over HTTP, for who doesn't share the hub's disk: `open_journal("http://hub:9357/rtl/journal/name", token)`.

The hub lists what there is and gives pieces of its files; everything else is as with a folder.
"""

from __future__ import annotations

import http.client
import io
import json
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, quote, urlsplit

from smqrt.errors import JournalError
from smqrt.journal import files, manifest, numbers
from smqrt.journal.files import Endpoint, Unreachable, checked_url, trusted_certificates, with_token
from smqrt.journal.manifest import DataFile, ManifestPage
from smqrt.journal.planning import Chunk, JournalSnapshot, Offsets, SealedSegment, SegmentIndex, segment_file
from smqrt.journal.reader import Journal
from smqrt.journal.segment import DATA, INDEX, INDEXED, REMEDY

RETRY_S = 60.0
_BLOCK_BYTES = 1 << 20
_KEPT_INDEXES = 64
_KEPT_PAGES = 32
MOST_WAIT_S = 20.0
"""A hub answers after so long though there is nothing new; less than what a connection waits for an answer."""


class _Listed(NamedTuple):
    """What the listing says of a segment that doesn't grow any more: how long its index is, and what it holds."""

    index_bytes: int
    sealed: SealedSegment | None


def open_journal(
    location: Path | str, token: str | None = None, *, cafile: str | None = None, retry_s: float = RETRY_S
) -> Journal | RemoteJournal:
    """Open a journal for reading.

    Args:
        location: its folder, or its address on a hub.
        token: what the file `token` in its folder holds; for an address.
        cafile: PEM file with certificates to trust instead of the system's, or what it holds; for an address.
        retry_s: how long to wait for a hub that is away, seconds.

    Raises:
        JournalError: there is no such journal, or the token is missing.
        ArgumentError: it is a URI of another kind.
    """
    if files.is_address(location):
        return RemoteJournal(str(location), token, cafile=cafile, retry_s=retry_s)
    return Journal(files.journal_folder(location))


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
        address = Endpoint(checked_url(url), with_token(url, token), trusted_certificates(cafile))
        self.url, self.verify = address.url, verify
        self._address = address
        self._link = HubLink(lambda: address, retry_s)
        self._brokers: dict[tuple[str, int], str] = {}
        self._listing: tuple[str, JournalSnapshot] | None = None
        self._pages: OrderedDict[str, tuple[DataFile, ...]] = OrderedDict()
        self._segments: dict[tuple[str, int], _Listed] = {}
        self._indexes: dict[str, bytes] = {}
        self._known_gaps: dict[str, list[tuple[int, int]]] = {}

    def __repr__(self) -> str:
        return f"RemoteJournal({self.url!r})"

    def __reduce__(self) -> Any:
        return _opened, (*self._address, self._link.retry_s, self.verify)

    def close(self) -> None:
        """Close the connection; the next request makes another."""
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

    def _location(self, file: str) -> str:
        return f"{self.url}/{file}"

    def _snapshot(self) -> JournalSnapshot:
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

    def _listed(self, values: Any) -> JournalSnapshot:
        self._segments = {
            (node, int(one["first"])): _Listed(int(one["idx_bytes"]), _sealed(one))
            for node, segments in values["wal"].items()
            for one in segments
            if "idx_bytes" in one
        }
        self._known_gaps = {node: numbers.parse_gaps(found) for node, found in values.get("gaps", {}).items()}
        wal = {node: [int(one["first"]) for one in segments] for node, segments in values["wal"].items()}
        return JournalSnapshot(wal, manifest.parse(values["manifest"], self._page))

    def _gaps(self, node: str) -> list[tuple[int, int]]:
        return self._known_gaps.get(node, [])

    def _page(self, page: ManifestPage) -> tuple[DataFile, ...]:
        """Return a page of the manifest; its name is that of its content, so that it is asked for once."""
        found = self._pages.get(page.name)
        if found is None:
            body = self._get(f"{manifest.PAGES_FOLDER}/{page.name}", 0)
            try:
                found = manifest.parse_page(page, body)
            except ValueError as error:
                raise JournalError(f"{self._location(page.name)} is damaged: {error}; {REMEDY}.") from None
            while len(self._pages) >= _KEPT_PAGES:
                self._pages.popitem(last=False)
            self._pages[page.name] = found
        return found

    def _json(self, what: str, body: bytes) -> Any:
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise JournalError(f"{self.url}/{what} is no journal of a hub: it answers with no JSON.") from None

    def _end(self, snapshot: JournalSnapshot, node: str) -> int:
        return self.end().get(node, 0)

    def _index(self, node: str, first: int, newest: bool = False, until: int = 0) -> SegmentIndex:
        file = segment_file(node, first)
        path = file.removesuffix(DATA) + INDEXED
        index = SegmentIndex(self._indexes.get(path, b""), self._location(path))
        if until and index.end >= until:
            return index
        listed = self._segments.get((node, first))
        if until or newest or listed is None or index.size_bytes < listed.index_bytes:
            index = SegmentIndex(self._grown(path, self._indexes.get(path, b"")), self._location(path))
        return index

    def _sealed(self, node: str, first: int) -> SealedSegment | None:
        listed = self._segments.get((node, first))
        return listed.sealed if listed else None

    def _grown(self, path: str, known: bytes) -> bytes:
        """Return an index from what was known of it; the last record is compared, for the hub may have lost some."""
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
        """Return a piece of a file, or all from `offset` on; less when it is shorter."""
        end = offset + length - 1 if length else ""
        try:
            answer = self._link.get(quote(file), {"Range": f"bytes={offset}-{end}"})
        except HubRefused as refused:
            if refused.status == 404:
                raise FileNotFoundError(2, "gone from the hub", self._location(file)) from None
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


def _sealed(listed: Mapping[str, Any]) -> SealedSegment | None:
    """Return what the listing says of a sealed segment's rows, unless the index has to: hubs of older versions say less."""
    if "end" not in listed:
        return None
    return SealedSegment(*(int(listed[name]) for name in ("end", "bytes", "ts_min_us", "ts_max_us")))


def _opened(url: str, token: str, certificates: str | None, retry_s: float, verify: bool) -> RemoteJournal:
    return RemoteJournal(url, token, cafile=certificates, retry_s=retry_s, verify=verify)


TIMEOUT_S = 30.0
ANSWER_BYTES = 256 << 20
"""More than any piece of a journal that is asked for."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_AWAY = (429, 502, 503, 504)


class HubAnswer(NamedTuple):
    """What the hub said; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HubRefused(JournalError):
    """The hub said no.

    Args:
        status: of HTTP.
        sentence: why.
    """

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class _Away(Exception):
    """The hub can't be asked now; later perhaps."""


class HubLink:
    """A connection to where a journal is served. Threads may share it; they take turns.

    Args:
        find: gives the address; it's asked again after every failure, for a hub may come back elsewhere. It raises
            `JournalError` when there is none.
        retry_s: how long a request is repeated while the hub is away, seconds; 0: it's tried once.
    """

    def __init__(self, find: Callable[[], Endpoint], retry_s: float) -> None:
        self.retry_s = retry_s
        self._find = find
        self._lock = threading.Lock()
        self._open: tuple[Endpoint, http.client.HTTPConnection] | None = None

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> HubAnswer:
        """Return what the hub says to a GET of a path below the journal's address.

        Raises:
            Refused: it said no.
            JournalError: the token is wrong, or the hub is away for too long.
        """
        return self._repeat("GET", path, None, headers or {})

    def post(self, path: str, body: bytes, again: bool = True) -> HubAnswer:
        """Return what the hub says to a POST.

        Args:
            path: below the journal's address.
            body: what is sent.
            again: it may be sent twice. If not, it's repeated only while no connection can be made.

        Raises:
            Refused, JournalError: as `get`.
        """
        return self._repeat("POST", path, body, {"Content-Type": "application/octet-stream"}, again)

    def close(self) -> None:
        """Close the connection; the next request makes another."""
        opened, self._open = self._open, None
        if opened:
            opened[1].close()

    def _repeat(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], again: bool = True
    ) -> HubAnswer:
        deadline, pause_s = time.monotonic() + self.retry_s, _FIRST_PAUSE_S
        with self._lock:
            while True:
                try:
                    return self._once(method, path, body, headers, again)
                except _Away as away:
                    self.close()
                    if time.monotonic() + pause_s > deadline:
                        raise self._given_up(away) from away.__cause__
                except JournalError:
                    self.close()
                    raise
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _given_up(self, why: _Away) -> Unreachable:
        patience = f"for {self.retry_s:g} s " if self.retry_s else ""
        return Unreachable(f"The hub hasn't answered {patience}({why}); start it with `smqrt serve`, then try again.")

    def _once(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], again: bool) -> HubAnswer:
        kept = self._open is not None and again
        if not kept:
            self.close()
        address, connection = self._open or self._connected()
        try:
            answer = _exchange(address, connection, method, path, body, headers)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if not again:
                raise JournalError(
                    f"The hub went away while it was told something ({error!r}); whether it took it is not known."
                ) from error
            if kept:  # it's no failure that the hub had closed a connection that was idle
                return self._once(method, path, body, headers, again)
            raise _Away(f"{address.url}: {error!r}") from error
        return _judged(answer, f"{address.url}/{path}")

    def _connected(self) -> tuple[Endpoint, http.client.HTTPConnection]:
        try:
            address = self._find()
        except JournalError as error:
            raise _Away(str(error).rstrip(".")) from error
        connection = _connection(urlsplit(address.url), address.certificates)
        try:
            connection.connect()
        except ssl.SSLCertVerificationError as error:
            raise JournalError(
                f"{address.url}: its certificate can't be trusted ({error.verify_message}); name the file with the "
                "certificate of its authority: --cafile, or cafile= in Python and as an option."
            ) from None
        except OSError as error:
            raise _Away(f"{address.url}: {error}") from error
        self._open = address, connection
        return self._open


def _exchange(
    address: Endpoint,
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None,
    headers: Mapping[str, str],
) -> HubAnswer:
    sent = {"Authorization": f"Bearer {address.token}", **headers}
    connection.request(method, f"{urlsplit(address.url).path}/{path}", body, sent)
    with connection.getresponse() as response:
        names = {name.lower(): value for name, value in response.getheaders()}
        body = response.read(ANSWER_BYTES + 1)
        if len(body) > ANSWER_BYTES:
            raise JournalError(f"{address.url}/{path}: the answer has more than {ANSWER_BYTES} bytes, as none has.")
        if response.length:  # it ended early, which http.client says only of whole reads
            raise http.client.IncompleteRead(body, response.length)
        return HubAnswer(response.status, names, body)


def _judged(answer: HubAnswer, url: str) -> HubAnswer:
    sentence = answer.body[:500].decode("utf-8", "replace").strip()
    if answer.status in _AWAY:
        raise _Away(sentence or f"{url}: {answer.status}")
    if answer.status == 403:  # the token is one, and lacks a right, which the hub names
        raise JournalError(f"{url}: {sentence or 'the hub says 403.'}")
    if answer.status == 401:
        raise JournalError(f"{url}: wrong token: it must be what the file `token` in the journal's folder holds.")
    if answer.status >= 400:
        raise HubRefused(answer.status, sentence or f"{url}: the hub says {answer.status}.")
    if answer.status >= 300 and answer.status != 304:
        raise HubRefused(answer.status, f"{url} answers {answer.status}, as no journal of a hub does.")
    return answer


def _connection(parts: SplitResult, trusted: str | None) -> http.client.HTTPConnection:
    if parts.scheme != "https":
        return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    context = ssl.create_default_context(cadata=trusted)
    return http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S, context=context)

"""A journal over HTTP: `open_journal("http://hub:9357/rtl/journal/name", token)`.

For readers without access to the hub's disk. The hub lists the files and sends parts of them.
"""

from __future__ import annotations

import errno
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
from urllib.parse import quote, urlsplit

from smqrt.errors import JournalError
from smqrt.journal import files, manifest, segment
from smqrt.journal.files import Endpoint, Unreachable, checked_token, checked_url, trusted_certificates
from smqrt.journal.manifest import DataFile, ManifestPage
from smqrt.journal.planning import Chunk, JournalSnapshot, Offsets, SealedSegment, SegmentIndex, segment_file
from smqrt.journal.reader import ChunkReader, Journal
from smqrt.journal.segment import DATA, INDEX, INDEXED, REMEDY

RETRY_S = 60.0
_BLOCK_BYTES = 1 << 20
_CACHED_INDEXES = 64
_CACHED_PAGES = 32
MAX_WAIT_S = 20.0
"""A hub answers a waiting request after this time, even without new rows: less than the timeout of a connection."""


class _Listed(NamedTuple):
    """A sealed segment in the listing: the size of its index, and its range and times if the hub sends them."""

    index_bytes: int
    sealed: SealedSegment | None


def open_journal(
    location: Path | str, token: str | None = None, *, cafile: str | None = None, retry_s: float = RETRY_S
) -> Journal | RemoteJournal:
    """Open a journal for reading.

    Args:
        location: its folder, or its address on a hub.
        token: the content of the file `token` in its folder; for an address.
        cafile: PEM file with certificates to trust instead of the system's, or its content; for an address.
        retry_s: how long to wait for a hub that does not answer, seconds.

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
        token: the content of the file `token` in its folder.
        cafile: as for `open_journal`.
        retry_s: how long each request waits for a hub that does not answer, seconds.
        verify: as for `Journal`.

    Raises:
        JournalError: the address or the token is invalid.
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
        address = Endpoint(checked_url(url), checked_token(url, token), trusted_certificates(cafile))
        self.url, self._address = address.url, address
        self._link = HubLink(lambda: address, retry_s)
        self._files = self._hub = HubFiles(address.url, self._link)
        self._reader = ChunkReader(self._files, verify)

    def __repr__(self) -> str:
        return f"RemoteJournal({self.url!r})"

    def __reduce__(self) -> Any:
        return _reopen, (*self._address, self._link.retry_s, self.verify)

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        self._link.close()

    def end(self, known: Collection[str] = ()) -> dict[str, int]:
        """Return the same as `Journal.end`, with one short request."""
        return {node: last for node, last in self._hub.ends("end").items() if node not in known}

    def wait(self, after: Offsets, timeout_s: float) -> dict[str, int]:
        """Return the same as `Journal.wait`: the hub answers once there are more rows."""
        seconds = min(timeout_s, MAX_WAIT_S)
        return self._hub.ends(f"end?wait_s={seconds:g}&after={quote(json.dumps(dict(after)))}")


class HubFiles:
    """The files of a journal on a hub; see `smqrt.journal.reader.JournalFiles`.

    Args:
        url: the journal's address.
        link: the connection to the hub.
    """

    def __init__(self, url: str, link: HubLink) -> None:
        self._url, self._link = url, link
        self._listing: tuple[str, JournalSnapshot] | None = None
        self._pages: OrderedDict[str, tuple[DataFile, ...]] = OrderedDict()
        self._segments: dict[tuple[str, int], _Listed] = {}
        self._indexes: dict[str, bytes] = {}
        self._known_gaps: dict[str, list[tuple[int, int]]] = {}

    def ends(self, request: str) -> dict[str, int]:
        """Return, by node, the number of the next row.

        Args:
            request: `end` with its parameters.

        Raises:
            JournalError: the hub rejects the request, doesn't answer, or is not a hub.
        """
        values = self._json("end", self._link.get(request).body)
        try:
            return {str(node): int(seq) for node, seq in values["end"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise JournalError(
                f"{self._url}/end is not a journal on a hub: its response is invalid ({error!r})."
            ) from None

    def location(self, file: str) -> str:
        """See `JournalFiles`."""
        return f"{self._url}/{file}"

    def snapshot(self) -> JournalSnapshot:
        """See `JournalFiles`. The hub sends the listing only if it has changed."""
        known, headers = self._listing, {"If-None-Match": self._listing[0]} if self._listing else {}
        response = self._link.get("manifest", headers)
        if response.status == 304 and known:
            return known[1]
        values = self._json("manifest", response.body)
        try:
            listed: dict[tuple[str, int], _Listed] = {}
            for node, segments in values["wal"].items():
                for one in (one for one in segments if "idx_bytes" in one):
                    sealed = None  # for a segment with missing numbers, and from hubs of older versions
                    if "end" in one:
                        numbers = (int(one[name]) for name in ("end", "bytes", "ts_min_us", "ts_max_us"))
                        sealed = SealedSegment(*numbers)
                    listed[node, int(one["first"])] = _Listed(int(one["idx_bytes"]), sealed)
            self._segments = listed
            self._known_gaps = {node: segment.parse_gaps(found) for node, found in values.get("gaps", {}).items()}
            wal = {node: [int(one["first"]) for one in segments] for node, segments in values["wal"].items()}
            snapshot = JournalSnapshot(wal, manifest.parse(values["manifest"], self._page))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise JournalError(f"{self._url} is not a journal on a hub: its manifest is invalid ({error!r}).") from None
        self._listing = (response.headers.get("etag", ""), snapshot) if response.headers.get("etag") else None
        return snapshot

    def gaps(self, node: str) -> list[tuple[int, int]]:
        """See `JournalFiles`."""
        return self._known_gaps.get(node, [])

    def end(self, snapshot: JournalSnapshot, node: str) -> int:
        """See `JournalFiles`."""
        return self.ends("end").get(node, 0)

    def index(self, node: str, first: int, newest: bool = False, until: int = 0) -> SegmentIndex:
        """See `JournalFiles`."""
        file = segment_file(node, first)
        path = file.removesuffix(DATA) + INDEXED
        index = SegmentIndex(self._indexes.get(path, b""), self.location(path))
        if until and index.end >= until:
            return index
        listed = self._segments.get((node, first))
        if not (until or newest or listed is None or index.size_bytes < listed.index_bytes):
            return index
        known = self._indexes.get(path, b"")
        # The last known record is read again and compared, since a hub that crashed may have lost some records.
        at = max(0, len(known) - INDEX.size)
        new = self._get(path, at)
        if not new.startswith(known[at:]):
            at, new = 0, self._get(path, 0)
        data = known[:at] + new
        data = data[: len(data) // INDEX.size * INDEX.size]
        self._indexes.pop(path, None)  # so that it becomes the newest entry of the cache
        self._indexes[path] = data
        if len(self._indexes) > _CACHED_INDEXES:
            del self._indexes[next(iter(self._indexes))]
        return SegmentIndex(data, self.location(path))

    def sealed(self, node: str, first: int) -> SealedSegment | None:
        """See `JournalFiles`."""
        listed = self._segments.get((node, first))
        return listed.sealed if listed else None

    def read(self, file: str, offset: int, length: int, head: bytes = b"") -> memoryview:
        """See `JournalFiles`."""
        return memoryview(head + self._get(file, offset, length))

    def open_parquet(self, chunk: Chunk) -> Any:
        """See `JournalFiles`."""
        return io.BufferedReader(_RemoteFile(self._get, chunk.file, chunk.length), _BLOCK_BYTES)

    def _page(self, page: ManifestPage) -> tuple[DataFile, ...]:
        """Return a page of the manifest. It is cached, since its name has the digest of its content."""
        found = self._pages.get(page.name)
        if found is None:
            body = self._get(f"{manifest.PAGES_FOLDER}/{page.name}", 0)
            try:
                found = manifest.parse_page(page, body)
            except ValueError as error:
                raise JournalError(f"{self.location(page.name)} is damaged: {error}; {REMEDY}.") from None
            while len(self._pages) >= _CACHED_PAGES:
                self._pages.popitem(last=False)
            self._pages[page.name] = found
        return found

    def _json(self, what: str, body: bytes) -> Any:
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise JournalError(f"{self._url}/{what} is not a journal on a hub: the response is not JSON.") from None

    def _get(self, file: str, offset: int, length: int = 0) -> bytes:
        """Return a part of a file; without a length, all bytes from `offset` on. Less when the file is shorter."""
        end = offset + length - 1 if length else ""
        try:
            response = self._link.get(quote(file), {"Range": f"bytes={offset}-{end}"})
        except HubRejected as rejection:
            if rejection.status == 404:
                raise FileNotFoundError(errno.ENOENT, "missing on the hub", self.location(file)) from None
            if rejection.status == 416:  # the file ends at or before the offset
                return b""
            raise
        if response.status == 206:
            return response.body
        # 200: a proxy may ignore the range, and then sends the whole file
        return response.body[offset : offset + length if length else None]


class _RemoteFile(io.RawIOBase):
    """A file on a hub, for pyarrow."""

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


def _reopen(url: str, token: str, certificates: str | None, retry_s: float, verify: bool) -> RemoteJournal:
    return RemoteJournal(url, token, cafile=certificates, retry_s=retry_s, verify=verify)


TIMEOUT_S = 30.0
MAX_RESPONSE_BYTES = 256 << 20
"""Maximum size of a response: more than any requested part of a journal."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 2.0  # between attempts; each pause is twice the one before
_RETRY_STATUSES = (429, 502, 503, 504)


class HubResponse(NamedTuple):
    """A response of the hub; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HubRejected(JournalError):
    """The hub rejected a request.

    Args:
        status: the HTTP status.
        sentence: the reason.
    """

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class _NoAnswer(Exception):
    """The hub does not answer; a later attempt may succeed."""


class HubLink:
    """A connection to the hub of a journal. Threads may share it: requests are sent one after the other.

    Args:
        find: returns the address. It is called after each failure, since a hub may restart at another address. It
            raises `JournalError` without an address.
        retry_s: how long a request is repeated while the hub does not answer, seconds; 0 for one attempt.
    """

    def __init__(self, find: Callable[[], Endpoint], retry_s: float) -> None:
        self.retry_s = retry_s
        self._find = find
        self._lock = threading.Lock()
        self._open: tuple[Endpoint, http.client.HTTPConnection] | None = None

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> HubResponse:
        """Return the response to a GET of a path below the journal's address.

        Raises:
            HubRejected: the hub rejected the request.
            JournalError: the token is wrong, or the hub did not answer in time.
        """
        return self._repeat("GET", path, None, headers or {})

    def post(self, path: str, body: bytes, may_repeat: bool = True) -> HubResponse:
        """Return the response to a POST.

        Args:
            path: a path below the journal's address.
            body: the body of the request.
            may_repeat: whether it may be sent twice. If not, it is repeated only while no connection can be opened.

        Raises:
            HubRejected, JournalError: as `get`.
        """
        return self._repeat("POST", path, body, {"Content-Type": "application/octet-stream"}, may_repeat)

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        opened, self._open = self._open, None
        if opened:
            opened[1].close()

    def _repeat(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], may_repeat: bool = True
    ) -> HubResponse:
        deadline, pause_s = time.monotonic() + self.retry_s, _FIRST_PAUSE_S
        with self._lock:  # http.client handles one request at a time
            while True:
                try:
                    return self._once(method, path, body, headers, may_repeat)
                except _NoAnswer as failure:
                    self.close()
                    if time.monotonic() + pause_s > deadline:
                        waited = f"for {self.retry_s:g} s " if self.retry_s else ""
                        raise Unreachable(
                            f"The hub hasn't answered {waited}({failure}); start it with `smqrt serve`, then retry."
                        ) from failure.__cause__
                except JournalError:
                    self.close()
                    raise
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _once(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], may_repeat: bool
    ) -> HubResponse:
        is_reused = self._open is not None and may_repeat
        if not is_reused:  # a request that may not be repeated gets a new connection, which is not idle
            self.close()
        address, connection = self._open or self._connect()
        try:
            response = _exchange(address, connection, method, path, body, headers)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if not may_repeat:
                raise JournalError(
                    f"The connection to the hub broke during a request ({error!r}); whether the hub has executed it is "
                    "not known."
                ) from error
            if is_reused:  # no failure yet: the hub closes idle connections
                return self._once(method, path, body, headers, may_repeat)
            raise _NoAnswer(f"{address.url}: {error!r}") from error
        return _checked_response(response, f"{address.url}/{path}")

    def _connect(self) -> tuple[Endpoint, http.client.HTTPConnection]:
        try:
            address = self._find()
        except JournalError as error:
            raise _NoAnswer(str(error).rstrip(".")) from error
        parts = urlsplit(address.url)
        host = parts.hostname or ""
        if parts.scheme == "https":
            context = ssl.create_default_context(cadata=address.certificates)
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, parts.port, timeout=TIMEOUT_S, context=context
            )
        else:
            connection = http.client.HTTPConnection(host, parts.port, timeout=TIMEOUT_S)
        try:
            connection.connect()
        except ssl.SSLCertVerificationError as error:
            raise JournalError(
                f"{address.url}: its certificate can't be trusted ({error.verify_message}); name the file with the "
                "certificate of its authority: --cafile, or cafile= in Python and as an option."
            ) from None
        except OSError as error:
            raise _NoAnswer(f"{address.url}: {error}") from error
        self._open = address, connection
        return self._open


def _exchange(
    address: Endpoint,
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None,
    headers: Mapping[str, str],
) -> HubResponse:
    sent = {"Authorization": f"Bearer {address.token}", **headers}
    connection.request(method, f"{urlsplit(address.url).path}/{path}", body, sent)
    with connection.getresponse() as response:
        names = {name.lower(): value for name, value in response.getheaders()}
        body = response.read(MAX_RESPONSE_BYTES + 1)
        if len(body) > MAX_RESPONSE_BYTES:
            raise JournalError(f"{address.url}/{path}: the response has more than {MAX_RESPONSE_BYTES} bytes.")
        if response.length:  # it ended early, which http.client reports only for reads without a size
            raise http.client.IncompleteRead(body, response.length)
        return HubResponse(response.status, names, body)


def _checked_response(response: HubResponse, url: str) -> HubResponse:
    sentence = response.body[:500].decode("utf-8", "replace").strip()
    if response.status in _RETRY_STATUSES:
        raise _NoAnswer(sentence or f"{url}: {response.status}")
    if response.status == 403:  # the token is valid, but lacks a right, which the hub's sentence names
        raise JournalError(f"{url}: {sentence or 'the hub answered 403.'}")
    if response.status == 401:
        raise JournalError(f"{url}: wrong token: it must be the content of the file `token` in the journal's folder.")
    if response.status >= 400:
        raise HubRejected(response.status, sentence or f"{url}: the hub answered {response.status}.")
    if response.status >= 300 and response.status != 304:
        raise HubRejected(response.status, f"{url} answers {response.status}: it is not a journal on a hub.")
    return response

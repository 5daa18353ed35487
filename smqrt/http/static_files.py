"""Static files with an in-memory cache, compression, conditions and ranges (spec: runtime §5.6).

Small files are cached, text also in compressed form. Each request checks the file with one `stat`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from mimetypes import MimeTypes
from secrets import token_hex
from typing import IO

from gevent.lock import BoundedSemaphore

from smqrt.http.access import MAGIC_BYTES, is_page
from smqrt.http.headers import Span, check_field, http_date, parse_date, parse_ranges
from smqrt.http.message import Request
from smqrt.http.open_files import call_blocking, call_blocking_unless_local
from smqrt.http.resources import Io, IoError, Stat
from smqrt.loop.scheduling import Turn
from smqrt.loop.threads import in_thread

MAX_KEPT_FILE_BYTES = 256 << 10  # larger files are read from the disk each time; the system caches them
MAX_KEPT_BYTES = 32 << 20  # for all files of one resource reader
MAX_KNOWN = 4096  # names of one resource reader
_PIECE_BYTES = 64 << 10
MIN_GZIP_BYTES = 1024  # a smaller response fits into one packet without compression
_MAX_GZIP_RATIO = 0.9  # compressed to original size; other files are not compressed
_GZIP_LEVEL = 6
_GZIP_WINDOW = 31  # for zlib: a window of 15 bits, plus 16 for the gzip format
_CONDITIONS = frozenset(("if-none-match", "if-modified-since", "if-match", "if-unmodified-since", "range"))
_compressing = BoundedSemaphore()  # one compression at a time, so that concurrent requests compress a file once
_unpacking = BoundedSemaphore()  # so that concurrent requests unpack an entry of a ZIP file once
_ALLOW = "GET, HEAD, OPTIONS"
_MULTIPART_BOUNDARY = f"smqrt-{token_hex(12)}"

_WITHOUT_CHARSET = ("application/json", "application/manifest+json", "application/wasm")
_TEXT_TYPES = (*_WITHOUT_CHARSET, "application/javascript", "application/xml", "image/svg+xml")
_UNKNOWN_TYPE = "application/octet-stream"
_types = MimeTypes()  # the table of the standard library, independent of the machine's mime.types
_FURTHER_TYPES = {
    ".avif": "image/avif",
    ".js": "text/javascript",
    ".lua": "text/plain",
    ".map": "application/json",
    ".md": "text/markdown",
    ".mjs": "text/javascript",
    ".ttf": "font/ttf",
    ".wasm": "application/wasm",
    ".webmanifest": "application/manifest+json",
    ".webp": "image/webp",
    ".woff": "font/woff",
    ".woff2": "font/woff2",
}
for _extension, _type in _FURTHER_TYPES.items():
    _types.add_type(_type, _extension)


@dataclass(slots=True)
class StaticFile:
    """A file or page that clients may see.

    Attributes:
        body: the content, while it is in memory.
        gzipped: the compressed content. It is empty if compression saves too little, None until a client accepts gzip.
        head, gzip_head: the prepared response heads, without `Date` and the empty line.
        fields: header fields of the reader in the heads.
    """

    name: str
    stat: Stat
    is_page: bool
    body: bytes | None = None
    gzipped: bytes | None = None
    head: bytes = b""
    gzip_head: bytes = b""
    fields: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if not (MIN_GZIP_BYTES <= self.stat.size <= MAX_KEPT_FILE_BYTES and is_text(content_type(self.name))):
            self.gzipped = b""

    @property
    def kept_bytes(self) -> int:
        """Bytes of the content in memory."""
        return len(self.body or b"") + len(self.gzipped or b"")

    @property
    def varies(self) -> bool:
        """Whether the response depends on Accept-Encoding."""
        return self.gzipped != b""


class StaticFiles:
    """Server of the files of one io.

    Args:
        io: the files.
    """

    def __init__(self, io: Io) -> None:
        self._io = io
        self._known: dict[str, StaticFile] = {}
        self._kept_bytes = 0

    def find(self, name: str) -> StaticFile | None:
        """Return the file or page of a name that clients may see, or None."""
        entry, io = self._known.get(name), self._io
        version = None
        if entry is not None:  # the usual case; as `call_blocking_unless_local`
            version = io.version(name) if io.in_loop or io.is_local(name) else call_blocking(io, name, io.version, name)
        if entry is None or version != entry.stat.version:
            self._remove(name)
            try:
                found = call_blocking_unless_local(io, name, _read_beginning, io, name)
                if found is None:
                    return None
                stat, begin = found
                entry = StaticFile(name, stat, is_page(name))
                if not entry.stat.isdir and io.private.has_private_content(name, begin):
                    return None
            except IoError:
                return None
            if len(self._known) >= MAX_KNOWN:
                self._remove(next(iter(self._known)))
            self._known[name] = entry
        return None if entry.stat.isdir else entry

    def serve(self, request: Request, entry: StaticFile, headers: dict[str, str]) -> None:
        """Respond with a file that `find` has returned.

        Args:
            request: the request.
            entry: the file.
            headers: fields to add to the response.
        """
        response = request.response
        if request.includes and entry.body is not None:
            response.write(entry.body)
        elif request.includes:
            with call_blocking(self._io, entry.name, self._io.open_published, entry.name) as file:
                for piece in _pieces(self._io, entry.name, file, Span(0, entry.stat.size)):
                    response.write(piece)
        elif request.initial and request.method not in ("GET", "HEAD"):
            if request.method == "OPTIONS":
                response.status = 204
                response.headers.set("Allow", _ALLOW)
                response.end()
            else:
                response.error(405, headers={"Allow": _ALLOW})
        elif not response.is_untouched() or request.has_any(_CONDITIONS) or not self._ensure_in_memory(entry, headers):
            try:
                _FileResponse(self._io, request, entry, headers).send()
            except IoError:  # the file was removed or replaced after `find`
                if response.committed:
                    raise
                response.error(404)
        else:
            is_gzipped = self._sends_gzipped(request, entry)
            head = entry.gzip_head if is_gzipped else entry.head
            body = (entry.gzipped if is_gzipped else entry.body) or b""
            if request.is_repeatable and self._io.is_local(entry.name):
                request.sent_file = _SentFile(self, entry, entry.fields, headers, head, body)
            response.send_ready(head, body)

    def _sends_gzipped(self, request: Request, entry: StaticFile) -> bool:
        """Return whether to send the compressed content; compress it first if necessary."""
        accepted = request.get("accept-encoding") if entry.varies else None
        if not accepted or not accepts_gzip(accepted):
            return False
        if entry.gzipped is not None:
            return bool(entry.gzipped)
        with _compressing:
            if entry.gzipped is not None or entry.body is None:  # another request has compressed it
                return bool(entry.gzipped)
            gzipped = in_thread(_gzip, entry.body)
        entry.gzipped = gzipped if len(gzipped) < _MAX_GZIP_RATIO * len(entry.body) else b""
        if self._known.get(entry.name) is entry:  # otherwise it was removed meanwhile, and does not count
            self._kept_bytes += len(entry.gzipped)
        _prepare_heads(entry, entry.fields or {})
        return bool(entry.gzipped)

    def is_current(self, entry: StaticFile) -> bool:
        """Return whether `find` would return this entry, and without blocking."""
        name = entry.name
        return (
            self._known.get(name) is entry and self._io.is_local(name) and self._io.version(name) == entry.stat.version
        )

    def _remove(self, name: str) -> None:
        entry = self._known.pop(name, None)
        if entry is not None:
            self._kept_bytes -= entry.kept_bytes

    def _ensure_in_memory(self, entry: StaticFile, headers: dict[str, str]) -> bool:
        """Load a small file and prepare its head; return whether it is in memory."""
        if entry.body is not None and entry.fields == headers:
            return True
        if entry.stat.size > MAX_KEPT_FILE_BYTES:
            return False
        try:
            read = self._io.read_published
            stat, body = call_blocking_unless_local(self._io, entry.name, read, entry.name, MAX_KEPT_FILE_BYTES + 1)
        except IoError:
            return False
        if stat.version != entry.stat.version or len(body) != stat.size:
            return False  # it has changed since `find`
        self._kept_bytes += len(body) - len(entry.body or b"")
        entry.body = body
        _prepare_heads(entry, headers)
        for name in list(self._known) if self._kept_bytes > MAX_KEPT_BYTES else ():  # the oldest first
            if name != entry.name:
                self._remove(name)
            if self._kept_bytes <= MAX_KEPT_BYTES:
                break
        return True


@dataclass(slots=True)
class _SentFile:
    """See `repeats.SentFile`."""

    files: StaticFiles
    entry: StaticFile
    fields: dict[str, str] | None
    headers: dict[str, str]
    head: bytes
    body: bytes

    @property
    def kept_bytes(self) -> int:
        return self.entry.kept_bytes

    def is_current(self) -> bool:
        # `fields` is replaced when the heads are prepared again, also for another request.
        is_same = self.entry.fields is self.fields and self.fields == self.headers
        return is_same and self.files.is_current(self.entry)


class _FileResponse:
    """The response with a file: conditions, ranges, or the whole content."""

    def __init__(self, io: Io, request: Request, entry: StaticFile, headers: dict[str, str]) -> None:
        self.io, self.request, self.response = io, request, request.response
        self.name, self.stat = entry.name, entry.stat
        file_name = entry.name.rpartition("/")[2]
        # A page that forwards to a file without extension, or to an include file, sends HTML.
        is_html = request.forwards and ("." not in file_name or file_name.lower().endswith(".shtml"))
        self.type = "text/html; charset=utf-8" if is_html else content_type(entry.name)
        self.etag = etag(entry.stat)
        for field, value in (*headers.items(), *_fields(entry)):
            self.response.headers.set(field, value)

    def send(self) -> None:
        """Send the response.

        Conditions and ranges apply only to a GET or HEAD of this file, not after a handler has set another status
        (RFC 9110 §13.2.1).
        """
        request, response, stat = self.request, self.response, self.stat
        if response.status != 200 or request.method not in ("GET", "HEAD"):
            self._send(self.type, stat.size, [(b"", Span(0, stat.size))], b"")
            return
        # A field with tags has precedence over the one with a date (RFC 9110 §13.2.2).
        tags = request.get("if-match")
        since = parse_date(request.get("if-unmodified-since") or "") if tags is None else None
        if (tags is not None and not _matches_file(tags, stat)) or (since is not None and stat.mtime > since):
            response.error(412)
            return
        tags = request.get("if-none-match")
        since = parse_date(request.get("if-modified-since") or "") if tags is None else None
        if (tags is not None and _matches_file(tags, stat)) or (since is not None and stat.mtime <= since):
            if _gzip_tag(self.etag) in (tags or ""):
                response.headers.set("ETag", _gzip_tag(self.etag))
            response.status = 304
            response.end()
            return
        self._send_spans()

    def _send_spans(self) -> None:
        header, condition = self.request.get("range"), self.request.get("if-range")
        spans = None
        is_valid = condition is None or condition in (self.etag, http_date(self.stat.mtime))
        if header is not None and self.request.method == "GET" and is_valid:
            spans = parse_ranges(header, self.stat.size)
        if spans is None:
            self._send(self.type, self.stat.size, [(b"", Span(0, self.stat.size))], b"")
        elif not spans:
            self.response.error(416, headers={"Content-Range": f"bytes */{self.stat.size}"})
        elif len(spans) == 1:
            span = spans[0]
            self.response.status = 206
            self.response.headers.set("Content-Range", f"bytes {span.first}-{span.end - 1}/{self.stat.size}")
            self._send(self.type, len(span), [(b"", span)], b"")
        else:
            self.response.status = 206
            begin = f"\r\n--{_MULTIPART_BOUNDARY}\r\nContent-Type: {self.type}\r\nContent-Range: bytes "
            ends = [f"{span.first}-{span.end - 1}/{self.stat.size}\r\n\r\n" for span in spans]
            heads = [f"{begin}{end}".encode("latin-1") for end in ends]
            tail = f"\r\n--{_MULTIPART_BOUNDARY}--\r\n".encode()
            kind = f"multipart/byteranges; boundary={_MULTIPART_BOUNDARY}"
            length = sum(map(len, heads)) + sum(map(len, spans)) + len(tail)
            self._send(kind, length, list(zip(heads, spans, strict=True)), tail)

    def _send(self, kind: str, length: int, parts: list[tuple[bytes, Span]], tail: bytes) -> None:
        self.response.headers.set("Content-Type", kind)
        self.response.headers.set("Content-Length", str(length))
        if self.request.method == "HEAD":
            self.response.end()
            return
        io, name = self.io, self.name
        if self.stat.size <= MAX_KEPT_FILE_BYTES:
            opened = call_blocking_unless_local(io, name, io.open_published, name)
        elif io.in_loop:
            opened = io.open_published(name)
        else:
            with _unpacking:
                opened = call_blocking(io, name, io.open_published, name)
        with opened as file:
            for head, span in parts:
                self.response.write(head)
                for piece in _pieces(io, name, file, span):
                    self.response.write(piece)
        self.response.end(tail)


def etag(stat: Stat) -> str:
    """Return the entity tag of a file's current content."""
    version = stat.version
    mark = version[0] if isinstance(version, tuple) else stat.mtime
    return f'"{mark:x}-{stat.size:x}"'


def _gzip_tag(tag: str) -> str:
    """Return the entity tag of the compressed content: other bytes need another tag (RFC 9110 §8.8.3)."""
    return f'{tag[:-1]}-gzip"'


def _fields(entry: StaticFile, gzipped: bool = False) -> list[tuple[str, str]]:
    tag = etag(entry.stat)
    fields = [("Last-Modified", http_date(entry.stat.mtime)), ("ETag", _gzip_tag(tag) if gzipped else tag)]
    if gzipped:
        fields.append(("Content-Encoding", "gzip"))
    else:
        fields.append(("Accept-Ranges", "bytes"))
    if entry.varies:
        fields.append(("Vary", "Accept-Encoding"))
    return fields


def _prepare_heads(entry: StaticFile, headers: dict[str, str]) -> None:
    """Prepare the response heads for the file and for its compressed content, if it has one."""
    for field, value in headers.items():
        check_field(field, value)
    entry.fields = dict(headers)
    entry.head = _build_head(entry, headers, entry.body or b"", False)
    entry.gzip_head = _build_head(entry, headers, entry.gzipped, True) if entry.gzipped else b""


def _build_head(entry: StaticFile, headers: dict[str, str], body: bytes, gzipped: bool) -> bytes:
    own = ("Content-Type", content_type(entry.name)), ("Content-Length", str(len(body))), *_fields(entry, gzipped)
    lines = [f"{field}: {value}\r\n" for field, value in (*headers.items(), *own)]
    return ("HTTP/1.1 200 OK\r\n" + "".join(lines)).encode("latin-1")


def _gzip(body: bytes) -> bytes:
    """Compress a body; runs in a thread."""
    compressor = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW)
    return compressor.compress(body) + compressor.flush()


def accepts_gzip(accept_encoding: str) -> bool:
    """Return whether an Accept-Encoding field accepts gzip (RFC 9110 §12.5.3)."""
    weights = {}
    for part in accept_encoding.lower().split(","):
        coding, _, weight = part.partition(";")
        weights[coding.strip()] = weight.replace(" ", "").rstrip("0").rstrip(".") not in ("q=", "q=0")
    return weights.get("gzip", weights.get("*", False))


def _read_beginning(io: Io, name: str) -> tuple[Stat, bytes] | None:
    """Return the stat and the first bytes of a name that clients may see; None if it does not exist."""
    if io.version(name) is None:  # one system call, and the usual case: the files of another directory
        return None
    stat = io.published(name)
    return stat, b"" if stat.isdir else io.read_published(name, MAGIC_BYTES)[1]


def _pieces(io: Io, name: str, file: IO[bytes], span: Span) -> Iterator[bytes]:
    file.seek(span.first)
    left, turn = len(span), Turn()
    while left:
        piece = call_blocking_unless_local(io, name, file.read, min(left, _PIECE_BYTES))
        if not piece:
            return  # the file was shortened: the response closes the connection, because its body is incomplete
        left -= len(piece)
        yield piece
        turn.yield_if_due()


def _matches(header: str, tag: str) -> bool:
    return header.strip() == "*" or tag in [candidate.strip().removeprefix("W/") for candidate in header.split(",")]


def _matches_file(header: str, stat: Stat) -> bool:
    tag = etag(stat)
    return _matches(header, tag) or _matches(header, _gzip_tag(tag))


def content_type(name: str) -> str:
    """Return the content type for a file's name, with the character set for text."""
    kind, encoding = _types.guess_type(name, strict=True)
    if kind is None or encoding is not None:  # with an encoding, a compressed file, which browsers must not unpack
        return _UNKNOWN_TYPE if encoding is None else f"application/{encoding}"
    return f"{kind}; charset=utf-8" if is_text(kind) and kind not in _WITHOUT_CHARSET else kind


def is_text(kind: str) -> bool:
    """Return whether a content type is text, which compresses well."""
    return kind.startswith("text/") or kind.partition(";")[0] in _TEXT_TYPES

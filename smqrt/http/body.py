"""Request bodies, read from the connection on demand.

The module also has the limits of HTTP connections, and parses the values in a body: JSON, forms and uploaded files.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import RawIOBase
from time import monotonic
from typing import Any, NoReturn, Protocol

from smqrt.errors import ArgumentError
from smqrt.http.forms import (
    FORM_TYPE,
    Field,
    Fields,
    File,
    FormTooLarge,
    MultipartError,
    boundary_of,
    cookies_of,
    decoded,
    parse_parameters,
    read_form,
)
from smqrt.http.headers import BadRequest, HttpError
from smqrt.loop.scheduling import Turn
from smqrt.loop.threads import in_thread
from smqrt.process.current_process import base_folder
from smqrt.settings.limits import Limit


@dataclass(frozen=True)
class HttpLimits:
    """Limits of an HTTP server. Times are in seconds, sizes in bytes.

    All except `bodies_bytes` apply to each connection.

    Attributes:
        first_byte_s: from accepting the connection to its first byte.
        header_s: from the first byte of a head to its last byte.
        body_idle_s: between two pieces of a body.
        body_grace_s: for a whole body; each `body_rate_bytes_s` bytes that arrive add a second.
        body_rate_bytes_s: lowest average rate of a body; a slower one is rejected with 408, see `body_grace_s`.
        keep_alive_s: between two requests.
        send_idle_s: without the client accepting any byte of a response.
        head_bytes: of the request line and the header fields.
        body_bytes: of a body that is read as a whole (`Request.body`).
        bodies_bytes: of all bodies in memory, read as a whole by requests that have not ended.
    """

    first_byte_s: float = 5.0
    header_s: float = 10.0
    body_idle_s: float = 10.0
    body_grace_s: float = 20.0
    body_rate_bytes_s: float = 500.0
    keep_alive_s: float = 60.0
    send_idle_s: float = 30.0
    head_bytes: int = 16384
    body_bytes: int = 4 << 20
    bodies_bytes: int = 128 << 20


BODIES = Limit("bodies", "bodies_mib", "memory for request bodies")


class BodyMemory:
    """Memory for bodies that are read as a whole, shared by all requests.

    Args:
        limit_bytes: the limit.

    Attributes:
        limit_bytes: see above.
        held_bytes: the bytes in use.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.held_bytes = 0
        self.limit_bytes = limit_bytes

    def reserve(self, count: int) -> None:
        """Reserve `count` bytes.

        Raises:
            HttpError: 503, the limit is reached.
        """
        if self.held_bytes + count > self.limit_bytes:
            mib = self.limit_bytes >> 20
            BODIES.refused("a request body", f"limit reached: bodies_mib ({mib})")
            detail = "The server has no memory for further request bodies; try again in a second."
            raise HttpError(503, detail, headers={"Retry-After": "1"}, close=True)
        self.held_bytes += count

    def release(self, count: int) -> None:
        """Release `count` bytes."""
        self.held_bytes -= count


_SIZE_LINE = re.compile(rb"0*([0-9A-Fa-f]{1,8})[\t ]*(;[\t\x20-\x7e\x80-\xff]*)?")
_UNFINISHED = re.compile(rb"(?:[0-9A-Fa-f]{1,32}[\t ]*(?:;[\t\x20-\x7e\x80-\xff]*)?)?\r?")
_TRAILER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]++):[\t\x20-\x7e\x80-\xff]*+")
_UNFINISHED_TRAILER = re.compile(rb"[\t\x20-\x7e\x80-\xff]*+\r?")
_FRAMING = frozenset((b"content-length", b"transfer-encoding", b"host"))
_CRLF = b"\r\n"
_PIECE_BYTES = 65536
_DECODED_BYTES = 16384  # decoded at once: 4 ms for 2,700 chunks of one byte
_MAX_DIGITS = 32  # of a chunk size, with leading zeros
_MAX_LINE = 1024  # bytes of a chunk size with its extensions, and of a trailer
_MAX_IGNORED = 16384  # bytes of extensions and trailers beyond the bytes of the body; more is an attack on the CPU


class ChunkedDecoder:
    """Decoder for a chunked body (RFC 9112 §7.1).

    It ignores extensions and whitespace after a size, drops trailers and accepts only CRLF. It rejects input that two
    servers could read differently (request smuggling), and trailers that concern framing.

    The work per byte is bounded, also for tiny chunks, because at most one line is kept between two calls.
    """

    def __init__(self) -> None:
        self.complete = False
        self._kept = b""  # an incomplete line, or the bytes after the end of the body
        self._missing = 0  # missing bytes of the current chunk, including its CRLF
        self._in_trailers = False  # after the last chunk: trailers and the empty line follow
        self._ignorable = _MAX_IGNORED

    def feed(self, data: bytes) -> bytes:
        """Decode bytes of the connection and return the payload in them.

        Raises:
            BadRequest: the bytes are not a valid chunked body.
        """
        data, self._kept = self._kept + data, b""
        payload: list[bytes] = []
        at, previous = 0, -1
        while at != previous and not self.complete:
            previous = at
            if self._missing:
                at = self._take_data(data, at, payload)
            else:
                at = self._take_trailer(data, at) if self._in_trailers else self._take_size(data, at)
        self._kept = data[at:]
        return b"".join(payload)

    @property
    def rest(self) -> bytes:
        """The bytes after the end of the body."""
        return self._kept

    def _take_data(self, data: bytes, at: int, payload: list[bytes]) -> int:
        size = self._missing - 2
        if size > 0:
            piece = data[at : at + size]
            payload.append(piece)
            at += len(piece)
            self._missing -= len(piece)
        end = data[at : at + 2]
        if self._missing <= 2 and end:
            if not _CRLF.startswith(end):
                raise BadRequest("chunk is longer than its size")
            if len(end) == 2:
                self._missing = 0
                return at + 2
        return at

    def _take_size(self, data: bytes, at: int) -> int:
        # The line end is searched within the limit, so that a long line is rejected without scanning all of it.
        end = data.find(_CRLF, at, at + _MAX_LINE + 2)
        if end < 0:
            line = data[at : at + _MAX_LINE + 2]
            if len(line) > _MAX_LINE + 1 or _UNFINISHED.fullmatch(line) is None:
                raise BadRequest("malformed chunk size")
            return at
        match = _SIZE_LINE.fullmatch(data, at, end)
        if match is None or match.end(1) - at > _MAX_DIGITS:
            raise BadRequest("malformed chunk size")
        size = int(match[1], 16)
        self._ignorable = min(self._ignorable + size, _MAX_IGNORED)
        if end != match.end(1):
            self._ignore(end - match.end(1))
        self._missing, self._in_trailers = (size + 2, False) if size else (0, True)
        return end + 2

    def _take_trailer(self, data: bytes, at: int) -> int:
        end = data.find(_CRLF, at, at + _MAX_LINE + 2)
        if end < 0:
            if len(data) - at > _MAX_LINE + 1 or _UNFINISHED_TRAILER.fullmatch(data, at) is None:
                raise BadRequest("malformed trailer")
            return at
        if end == at:
            self.complete = True
            return end + 2
        match = _TRAILER.fullmatch(data, at, end)
        if match is None:
            raise BadRequest("malformed trailer")
        if match[1].lower().replace(b"_", b"-") in _FRAMING:
            raise BadRequest("framing field in a trailer")
        self._ignore(end + 2 - at)
        return end + 2

    def _ignore(self, count: int) -> None:
        self._ignorable -= count
        if self._ignorable < 0:
            raise BadRequest(f"more than {_MAX_IGNORED} bytes of chunk extensions and trailers")


class Source(Protocol):
    """The connection that a body is read from."""

    data: bytes

    def receive(self, within_s: float) -> bytes:
        """Wait for more bytes, at most `within_s` seconds, and return them."""

    def send_continue(self) -> None:
        """Send 100 Continue."""


class Body:
    """Reader of one request's body. It leaves the bytes after the body in the connection.

    Reading yields to other greenlets between pieces, also when all of them have arrived.

    Args:
        source: the connection; its `data` begins with the body.
        length: in bytes; None for a chunked body.
        expects_continue: whether the client waits for 100 Continue.
        limits: the time limits.
        memory: counts the bytes of bodies that are read as a whole.
    """

    def __init__(
        self, source: Source, length: int | None, expects_continue: bool, limits: HttpLimits, memory: BodyMemory
    ) -> None:
        self._source = source
        self._left = length
        self._decoder = ChunkedDecoder() if length is None else None
        self._sends_continue = expects_continue
        self._limits = limits
        self._memory = memory
        self._held_bytes = 0
        self._time_left_s = limits.body_grace_s
        self._tapped: bytearray | None = None
        self._max_tapped = 0
        self.length = length
        self.complete = length == 0

    def pieces(self, size_bytes: int = _PIECE_BYTES) -> Iterator[bytes]:
        """Iterate over the body as it arrives, in pieces of up to `size_bytes`; blocks the greenlet.

        Raises:
            BadRequest: the body is malformed.
            HttpError: 408, it arrives too slowly.
        """
        turn = Turn()
        while not self.complete:
            if not self._source.data:
                if self._sends_continue:
                    self._sends_continue = False
                    self._source.send_continue()
                began_s = monotonic()
                data = self._source.receive(min(self._limits.body_idle_s, self._time_left_s))
                self._source.data = data
                self._time_left_s += len(data) / self._limits.body_rate_bytes_s - (monotonic() - began_s)
                if self._time_left_s <= 0:
                    raise HttpError(408, "the body arrived too slowly", close=True)
            data = self._take()
            for start in range(0, len(data), size_bytes):
                yield data[start : start + size_bytes]
                turn.yield_if_due()
            turn.yield_if_due()

    @property
    def has_arrived(self) -> bool:
        """Whether the whole body has arrived. True for a chunked body only after it was read."""
        return self.complete or (self._left is not None and self._left <= len(self._source.data))

    def skip_buffered(self) -> bool:
        """Discard the bytes that have arrived, without waiting; return whether the body is complete."""
        while not self.complete and self._source.data:
            self._take()
        return self.complete

    def whole(self, limit_bytes: int) -> bytes:
        """Return the whole body; blocks the greenlet. Its memory is counted until `forget`.

        Raises:
            HttpError: 413, it is longer than `limit_bytes`; 503, memory for bodies is full; and as `pieces`.
        """
        if self._left is not None and self._left > limit_bytes:
            raise too_large(limit_bytes)
        parts: list[bytes] = []
        for piece in self.pieces():
            self.hold(len(piece))
            if self._held_bytes > limit_bytes:
                raise too_large(limit_bytes)
            parts.append(piece)
        return b"".join(parts)

    def hold(self, count: int) -> None:
        """Count `count` bytes as memory of this body until `forget`.

        Raises:
            HttpError: 503, memory for bodies is full.
        """
        self._memory.reserve(count)
        self._held_bytes += count

    def forget(self) -> None:
        """Release the counted memory and stop reading."""
        self.complete = True
        self._memory.release(self._held_bytes)
        self._held_bytes = 0

    def tap(self, max_bytes: int) -> None:
        """Keep a copy of the first `max_bytes` that are read, for `tapped`."""
        self._tapped, self._max_tapped = bytearray(), max_bytes

    @property
    def tapped(self) -> bytes:
        """The copied beginning of the body, see `tap`."""
        return bytes(self._tapped or b"")

    def _take(self) -> bytes:
        self._sends_continue = False  # the client has not waited for 100 Continue
        decoder, data = self._decoder, self._source.data
        if decoder is None:
            left = self._left or 0
            payload, self._source.data = data[:left], data[left:]
            self._left = left - len(payload)
            self.complete = self._left == 0
        else:
            rest = data[_DECODED_BYTES:]
            payload = decoder.feed(data[:_DECODED_BYTES])
            self.complete = decoder.complete
            self._source.data = decoder.rest + rest if self.complete else rest
        if self._tapped is not None and len(self._tapped) < self._max_tapped:
            self._tapped += payload[: self._max_tapped - len(self._tapped)]
        return payload


def too_large(limit_bytes: int) -> HttpError:
    """Return the error for a body over the limit."""
    return HttpError(413, f"the body is larger than {limit_bytes} bytes", close=True)


# ---- Values in a body: JSON, forms, uploaded files.
#
# Invalid input raises an `HttpError`. Its status and detail become the response, unless the application catches it.

URLENCODED = "application/x-www-form-urlencoded"
MAX_JSON_VALUES = 1 << 18
"""Values in one JSON text. Python's parser blocks the loop; this number bounds that to 30 ms."""
MAX_UPLOAD_BYTES = 1 << 30
"""Default limit for all files of one form that are read as they arrive."""
_PARSED_BYTES = 65536  # between two yields to other greenlets
_WRITTEN_BYTES = 1 << 20  # per call in a thread: writing 64 KiB takes less time than the call


class BodySource(Protocol):
    """The parts of a request that forms use, see `smqrt.http.message.Request`."""

    @property
    def has_body(self) -> bool:
        """Whether the request has a body."""

    def get(self, name: str) -> str | None:
        """Return a header field, or None without it."""

    def body(self) -> bytes:
        """Return the whole body."""

    def chunks(self, size_bytes: int = 65536) -> Iterator[bytes]:
        """Iterate over the body as it arrives."""

    def reader(self) -> Body:
        """Return the reader of the body."""


def media_type(request: BodySource) -> str:
    """Return the media type of the body without its parameters, in lower case."""
    return (request.get("content-type") or "").partition(";")[0].strip().lower()


def parse_json(text: bytes) -> Any:
    """Parse a JSON text.

    Raises:
        HttpError: 400, it is malformed; 413, it has more than MAX_JSON_VALUES values.
    """
    # A cheap upper bound: commas inside strings count too. Lists and objects count twice: building them takes longer.
    if text.count(b",") + 2 * (text.count(b"[") + text.count(b"{")) > MAX_JSON_VALUES:
        raise HttpError(413, f"The JSON has more than {MAX_JSON_VALUES} values; send it in parts.")
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except RecursionError:
        raise HttpError(400, "The JSON is nested too deeply.") from None
    except ValueError as error:
        raise HttpError(400, f"The body is not JSON: {str(error)[:200]}") from None


def _reject_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON value")


class Upload:
    """A file of a form, read while it arrives.

    Iterate over its bytes, or call `read` or `save`, before requesting the next file.

    Attributes:
        name: name of the form's field.
        filename: name that the client sent, without folders. Do not use it as a path without a check: it is client
            input.
        content_type: media type that the client sent.
    """

    __slots__ = ("_pieces", "content_type", "filename", "name")

    def __init__(self, file: File, pieces: Iterator[bytes]) -> None:
        self.name, self.filename, self.content_type = file.name, file.filename, file.content_type
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces

    def __repr__(self) -> str:
        return f"<upload {self.name!r}, {self.filename!r}, {self.content_type}>"

    def read(self, limit_bytes: int = 4 << 20) -> bytes:
        """Return the rest of its content; blocks the greenlet until all of it has arrived.

        Raises:
            HttpError: 413, it has more than `limit_bytes`.
        """
        parts = list(_at_most(limit_bytes, self._pieces, f"The file {self.filename!r}"))
        return b"".join(parts)

    def save(self, path: str | os.PathLike[str], limit_bytes: int = MAX_UPLOAD_BYTES) -> int:
        """Write the rest of its content to a file; blocks the greenlet.

        Threads write the file under a temporary name. When it is complete, it is renamed to `path`, and replaces an
        existing file.

        Args:
            path: path of the file; a relative path is relative to the application's folder.
            limit_bytes: largest size of the rest.

        Returns:
            the size in bytes.

        Raises:
            HttpError: 413, it has more than `limit_bytes`; and as `Request.body`.
            OSError: the file cannot be written.
        """
        target = base_folder() / path
        part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        pieces = _at_most(limit_bytes, self._pieces, f"The file {self.filename!r}")
        file: RawIOBase = in_thread(lambda: part.open("xb", 0))

        def write_all(data: bytes) -> None:
            rest = memoryview(data)
            while rest:  # an unbuffered file may write less than it was given
                rest = rest[file.write(rest) or 0 :]

        size, batch = 0, bytearray()
        try:
            with file:
                for piece in pieces:
                    batch += piece
                    size += len(piece)
                    if len(batch) >= _WRITTEN_BYTES:
                        in_thread(write_all, bytes(batch))
                        batch.clear()
                in_thread(write_all, bytes(batch))
            in_thread(os.replace, part, target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return size


def _at_most(limit_bytes: int, pieces: Iterator[bytes], subject: str) -> Iterator[bytes]:
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > limit_bytes:
            raise HttpError(413, f"{subject} is larger than {limit_bytes} bytes.", close=True)
        yield piece


class Form:
    """The form in the body of a request.

    Args:
        request: the request.
    """

    def __init__(self, request: BodySource) -> None:
        self._request = request
        self._pairs: list[tuple[bytes, bytes]] = []
        self._files: list[tuple[File, bytes]] | None = None
        self._has_begun = False
        self._is_complete = False

    def fields(self) -> Fields:
        """Return the fields of the form.

        A form with files is read into memory. While `files` reads it, the result has the fields that have arrived.

        Raises:
            HttpError: 400, the form is malformed; 413, it is larger than the limit for bodies or has too many fields;
                415, the body is not a form.
        """
        if not self._has_begun:
            self._pairs = []
            request = self._request
            kind = media_type(request)
            if not request.has_body:
                self._files = []
            elif kind == URLENCODED:
                self._pairs, self._files = parse_parameters(request.body(), Turn().yield_if_due), []
            elif kind == FORM_TYPE:
                self._files = [(file, b"".join(content)) for file, content in self._parts(_pieces(request.body()))]
            else:
                accepted = {"Accept": f"{URLENCODED}, {FORM_TYPE}"}
                sent = kind[:100] or "none"
                detail = f"The body is not a form (Content-Type: {sent}); send {URLENCODED} or {FORM_TYPE}."
                raise HttpError(415, detail, headers=accepted)
            self._has_begun = True
        return decoded(self._pairs)

    def files(self, limit_bytes: int) -> Iterator[Upload]:
        """Return the files as they arrive. The unread rest of a file is skipped when the next one is requested.

        Args:
            limit_bytes: largest size of all files together.

        Raises:
            HttpError: as `fields`; 413, they are larger than `limit_bytes`.
            ArgumentError: another iterator of this form is reading them.
        """
        if self._files is not None:
            return (Upload(file, iter((content,))) for file, content in self._files)
        if self._is_complete:
            return iter(())
        if self._has_begun:
            raise ArgumentError("files: another iterator reads the files of this form; continue with that one")
        self._has_begun = True
        return self._read_arriving(limit_bytes)

    def _read_arriving(self, limit_bytes: int) -> Iterator[Upload]:
        request = self._request
        kind = media_type(request)
        if kind != FORM_TYPE or not request.has_body:
            self._has_begun = False
            self.fields()
            self._is_complete = True
            return
        pieces = _at_most(limit_bytes, request.chunks(), "The form")
        for file, content in self._parts(pieces, request.reader().hold):
            yield Upload(file, content)
            for _ in content:
                pass
        self._is_complete = True

    def _parts(
        self, pieces: Iterator[bytes], hold: Callable[[int], object] = lambda count: None
    ) -> Iterator[tuple[File, Iterator[bytes]]]:
        boundary = boundary_of(self._request.get("content-type") or "")
        if boundary is None:
            raise HttpError(400, f"The form has no usable boundary in its Content-Type: {FORM_TYPE}; boundary=…")
        events = read_form(pieces, boundary, hold)
        next_file: list[File] = []  # at most one: its head ended the content of the file before it

        def content() -> Iterator[bytes]:
            try:
                for event in events:
                    if isinstance(event, bytes):
                        yield event
                    elif isinstance(event, Field):
                        self._pairs.append((event.name.encode("utf-8", "surrogateescape"), event.value))
                    else:
                        next_file.append(event)
                        return
            except MultipartError as error:
                status = 413 if isinstance(error, FormTooLarge) else 400
                raise HttpError(status, f"{error}"[:200], close=True) from None

        for piece in content():  # the fields before the first file
            assert not piece
        while next_file:
            yield next_file.pop(), content()


def _pieces(body: bytes) -> Iterator[bytes]:
    turn = Turn()
    for start in range(0, len(body), _PARSED_BYTES):
        yield body[start : start + _PARSED_BYTES]
        turn.yield_if_due()


class BodyAndCookies:
    """Values of the body and the cookies of a request; a base class of `smqrt.http.message.Request`."""

    __slots__ = ()

    @property
    def cookies(self: BodySource) -> Fields:
        """The cookies by name."""
        return cookies_of(self.get("cookie") or "")

    def json(self: BodySource) -> Any:
        """Return the value of the JSON body, independent of its Content-Type.

        Raises:
            HttpError: 400, it is not JSON; 413, it has too many values; and as `body`.
        """
        return parse_json(self.body())

    def form(self) -> Fields:
        """Return the fields of the form in the body, urlencoded or multipart; empty without a body.

        The files of the form are then in memory, and `files` returns them. Call only `files` for large files.

        Raises:
            HttpError: 400, it is malformed; 413, it is larger than the limit for bodies or has too many fields; 415,
                the body is not a form; and as `body`.
        """
        return self._body_form().fields()

    def files(self, limit_bytes: int = MAX_UPLOAD_BYTES) -> Iterator[Upload]:
        """Iterate over the files of the form in the body, as they arrive, without keeping them in memory.

        The unread rest of a file is skipped when the next one is requested. `form` returns the fields until then.

        Args:
            limit_bytes: largest size of all files together.

        Raises:
            HttpError: 413, they are larger; and as `form`.
            ArgumentError: another iterator of this request is reading them.
        """
        return self._body_form().files(limit_bytes)

    @abstractmethod
    def _body_form(self) -> Form: ...

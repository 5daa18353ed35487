"""The body of a request, taken off the connection only when somebody asks for it; and what a client may take: the
limits of times, sizes and memory (design: reliability §5).
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
from smqrt.loop.greenlet_pool import in_thread
from smqrt.loop.scheduling import Turn
from smqrt.process.current_application import base_folder
from smqrt.settings.limit_register import Limit

_NO_ROOM = "The server holds as many bodies of requests in memory as it may; try again in a second."


@dataclass(frozen=True)
class HttpLimits:
    """What a client may take. Times in seconds, sizes in bytes.

    Attributes:
        first_byte_s: from accepting to the first byte.
        header_s: from the first byte of a head to its last.
        body_idle_s: between two pieces of a body.
        body_grace_s: what the server waits for a whole body; each `body_rate_bytes_s` bytes that came add a second.
        body_rate_bytes_s: see `body_grace_s`: a client that stays slower than this is cut off in the end.
        keep_alive_s: between two requests.
        send_idle_s: between two moments in which the client takes some of a response.
        head_bytes: request line and header fields.
        body_bytes: a body that is read as a whole (`Request.body`).
        bodies_bytes: all bodies that were read as a whole and whose requests are not over.
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


BODIES = Limit("bodies", "bodies_mib", "the bodies of requests in memory are as large as they may be")


class BodyMemory:
    """The memory for bodies that are read as a whole, of all requests together.

    Args:
        limit_bytes: how much there is.

    Attributes:
        held_bytes: how much is taken.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.held_bytes = 0
        self._limit_bytes = limit_bytes

    def take(self, count: int) -> None:
        """Take `count` bytes.

        Raises:
            HttpError: 503, they are not there.
        """
        if self.held_bytes + count > self._limit_bytes:
            mib = self._limit_bytes >> 20
            BODIES.refused("a body of a request", f"the bodies in memory have {mib} MiB already")
            raise HttpError(503, _NO_ROOM, headers={"Retry-After": "1"}, close=True)
        self.held_bytes += count

    def give_back(self, count: int) -> None:
        """Return `count` bytes back."""
        self.held_bytes -= count


_SIZE_LINE = re.compile(rb"0*([0-9A-Fa-f]{1,8})[\t ]*(;[\t\x20-\x7e\x80-\xff]*)?")
_UNFINISHED = re.compile(rb"(?:[0-9A-Fa-f]{1,32}[\t ]*(?:;[\t\x20-\x7e\x80-\xff]*)?)?\r?")
_TRAILER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]++):[\t\x20-\x7e\x80-\xff]*+")
_UNFINISHED_TRAILER = re.compile(rb"[\t\x20-\x7e\x80-\xff]*+\r?")
_FRAMING = frozenset((b"content-length", b"transfer-encoding", b"host"))
_CRLF = b"\r\n"
_PIECE_BYTES = 65536
_DECODED_BYTES = 16384  # at a time: 2,700 chunks of one byte, 4 ms
_MAX_DIGITS = 32  # and zeros, of a size
_MAX_LINE = 1024  # of a size with its extensions, and of a trailer
_MAX_IGNORED = 16384  # of extensions and trailers beyond the bytes of the body: more are sent to keep the server busy


class ChunkedDecoder:
    """Decodes a chunked body (RFC 9112 §7.1): ignores extensions and blanks behind a size, drops trailers, takes CRLF
    only. Refuses what two servers could read differently, and a trailer that is about framing.

    Looks at each byte a bounded number of times, however small the chunks are: between two calls it keeps no more than
    a line.
    """

    def __init__(self) -> None:
        self.complete = False
        self._kept = b""  # a line that is not complete, or what arrived behind the end
        self._missing = 0  # bytes of the present chunk still to come, its CRLF included
        self._ends = False  # the last chunk came: trailers and the empty line follow
        self._may_ignore = _MAX_IGNORED

    def feed(self, data: bytes) -> bytes:
        """Take bytes off the wire and give the payload they complete.

        Raises:
            BadRequest: when they are not what a chunked body looks like.
        """
        data, self._kept = self._kept + data, b""
        payload: list[bytes] = []
        at, last = 0, -1
        while at != last and not self.complete:
            last = at
            if self._missing:
                at = self._take_data(data, at, payload)
            else:
                at = self._take_trailer(data, at) if self._ends else self._take_size(data, at)
        self._kept = data[at:]
        return b"".join(payload)

    @property
    def rest(self) -> bytes:
        """What arrived behind the end of the body."""
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
                raise BadRequest("a chunk is longer than its size says")
            if len(end) == 2:
                self._missing = 0
                return at + 2
        return at

    def _take_size(self, data: bytes, at: int) -> int:
        end = data.find(_CRLF, at, at + _MAX_LINE + 2)
        if end < 0:
            _check_unfinished(data[at : at + _MAX_LINE + 2])
            return at
        match = _SIZE_LINE.fullmatch(data, at, end)
        if match is None or match.end(1) - at > _MAX_DIGITS:
            raise BadRequest("malformed chunk size")
        size = int(match[1], 16)
        self._may_ignore = min(self._may_ignore + size, _MAX_IGNORED)
        if end != match.end(1):
            self._ignore(end - match.end(1))
        self._missing, self._ends = (size + 2, False) if size else (0, True)
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
            raise BadRequest("a trailer that says where the message ends")
        self._ignore(end + 2 - at)
        return end + 2

    def _ignore(self, count: int) -> None:
        self._may_ignore -= count
        if self._may_ignore < 0:
            raise BadRequest(f"more than {_MAX_IGNORED} bytes of chunk extensions and trailers")


def _check_unfinished(line: bytes) -> None:
    if len(line) > _MAX_LINE + 1 or _UNFINISHED.fullmatch(line) is None:
        raise BadRequest("malformed chunk size")


class Source(Protocol):
    """Where a body comes from: the connection."""

    data: bytes

    def receive(self, within_s: float) -> bytes:
        """Wait for more bytes, for so many seconds at most, and give them."""

    def send_continue(self) -> None:
        """Tell the client to go on with the body."""


class Body:
    """Reads one request's body from its connection and leaves what follows there.

    Whoever takes its pieces gives way to others between them, also when all of them are there.

    Args:
        source: the connection; its `data` begins with the body.
        length: in bytes, None when the body is chunked.
        expects_continue: the client waits for a go.
        limits: how slow the client may be.
        memory: where a body that is read as a whole is counted.
    """

    def __init__(
        self, source: Source, length: int | None, expects_continue: bool, limits: HttpLimits, memory: BodyMemory
    ) -> None:
        self._source = source
        self._left = length
        self._decoder = ChunkedDecoder() if length is None else None
        self._owes_continue = expects_continue
        self._limits = limits
        self._memory = memory
        self._held_bytes = 0
        self._patience_s = limits.body_grace_s
        self._tapped: bytearray | None = None
        self._tap_bytes = 0
        self.length = length
        self.complete = length == 0

    def pieces(self, size_bytes: int = _PIECE_BYTES) -> Iterator[bytes]:
        """Iterate over the body as it arrives, in pieces of up to `size_bytes`; blocks the greenlet.

        Raises:
            BadRequest: the body is malformed.
            HttpError: 408 when it takes too long to come.
        """
        turn = Turn()
        while not self.complete:
            if not self._source.data:
                self._wait()
            data = self._take()
            for start in range(0, len(data), size_bytes):
                yield data[start : start + size_bytes]
                turn.yield_if_due()
            turn.yield_if_due()

    @property
    def is_here(self) -> bool:
        """Whether it is known to have arrived to its end; a chunked body is when it was read."""
        return self.complete or (self._left is not None and self._left <= len(self._source.data))

    def skip_buffered(self) -> bool:
        """Throw away what has arrived, without waiting; return whether that was the whole rest."""
        while not self.complete and self._source.data:
            self._take()
        return self.complete

    def whole(self, limit_bytes: int) -> bytes:
        """Return the whole body; blocks the greenlet. It counts as held until `forget`.

        Raises:
            HttpError: 413 when it is longer than `limit_bytes`, 503 when there is no room for it; and as `pieces`.
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
        """Count so many bytes of it as held in memory until `forget`.

        Raises:
            HttpError: 503, there is no room for them.
        """
        self._memory.take(count)
        self._held_bytes += count

    def forget(self) -> None:
        """Count it no longer as held, and read no more of it."""
        self.complete = True
        self._memory.give_back(self._held_bytes)
        self._held_bytes = 0

    def tap(self, most_bytes: int) -> None:
        """Keep a copy of the first `most_bytes` that are read, for `tapped`."""
        self._tapped, self._tap_bytes = bytearray(), most_bytes

    @property
    def tapped(self) -> bytes:
        """What `tap` has kept."""
        return bytes(self._tapped or b"")

    def _wait(self) -> None:
        if self._owes_continue:
            self._owes_continue = False
            self._source.send_continue()
        began_s = monotonic()
        self._source.data = data = self._source.receive(min(self._limits.body_idle_s, self._patience_s))
        self._patience_s += len(data) / self._limits.body_rate_bytes_s - (monotonic() - began_s)
        if self._patience_s <= 0:
            raise HttpError(408, "the body came too slowly", close=True)

    def _take(self) -> bytes:
        self._owes_continue = False  # the client did not wait
        decoder = self._decoder
        data = self._take_counted(self._left or 0) if decoder is None else self._take_chunked(decoder)
        if self._tapped is not None and len(self._tapped) < self._tap_bytes:
            self._tapped += data[: self._tap_bytes - len(self._tapped)]
        return data

    def _take_chunked(self, decoder: ChunkedDecoder) -> bytes:
        data, rest = self._source.data[:_DECODED_BYTES], self._source.data[_DECODED_BYTES:]
        payload = decoder.feed(data)
        self.complete = decoder.complete
        self._source.data = decoder.rest + rest if self.complete else rest
        return payload

    def _take_counted(self, left: int) -> bytes:
        data = self._source.data
        piece, self._source.data = data[:left], data[left:]
        self._left = left - len(piece)
        self.complete = self._left == 0
        return piece


def too_large(limit_bytes: int) -> HttpError:
    """Build the error for a body over the limit."""
    return HttpError(413, f"the body is larger than {limit_bytes} bytes", close=True)


# ---- The body of a request as applications want it: JSON, a form, uploaded files. Everything a client can get wrong
# ends
# in an `HttpError` whose status and sentence are the answer, unless the application catches it.

URLENCODED = "application/x-www-form-urlencoded"
MAX_JSON_VALUES = 1 << 18
"""So many values in one text of JSON: Python's parser holds the loop while it works, this long at most 30 ms."""
MAX_UPLOAD_BYTES = 1 << 30
"""All files of one form that are read as they arrive, unless the application says otherwise."""
_PARSED_BYTES = 65536  # then others have a turn
_WRITTEN_BYTES = 1 << 20  # at a time: a thread for each 64 KiB would cost more than the writing


class BodySource(Protocol):
    """What is needed of a request: see `smqrt.http.message.Request`."""

    @property
    def has_body(self) -> bool:
        """Whether there is one."""

    def get(self, name: str) -> str | None:
        """A header field, None without it."""

    def body(self) -> bytes:
        """The whole body."""

    def chunks(self, size_bytes: int = 65536) -> Iterator[bytes]:
        """The body as it arrives."""

    def hold(self, count: int) -> None:
        """Count bytes as held in memory."""


def kind_of(request: BodySource) -> str:
    """Return the type of the body without its parameters, in lower case."""
    return (request.get("content-type") or "").partition(";")[0].strip().lower()


def parse_json(text: bytes) -> Any:
    """Read a text of JSON.

    Raises:
        HttpError: 400, it is none; 413, it has more than MAX_JSON_VALUES values.
    """
    # An upper bound that costs nothing: commas inside strings count too. Lists and objects take longer than the rest.
    if text.count(b",") + 2 * (text.count(b"[") + text.count(b"{")) > MAX_JSON_VALUES:
        raise HttpError(413, f"The JSON has more than {MAX_JSON_VALUES} values; send it in parts.")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise HttpError(400, "The JSON is nested too deeply.") from None
    except ValueError as error:
        raise HttpError(400, f"The body is not JSON: {str(error)[:200]}") from None


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no value of JSON")


class Upload:
    """A file of a form, as it arrives: iterate over its bytes, `read` or `save` it, before the next file is asked for.

    Attributes:
        name: of the form's field.
        filename: what the client calls it, without folders. Never a path to write to as it is: a stranger chose it.
        content_type: what the client says it is.
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
        """Return what is left of its content; blocks the greenlet until all has come.

        Raises:
            HttpError: 413, it has more than `limit_bytes`.
        """
        parts = list(_at_most(limit_bytes, self._pieces, f"The file {self.filename!r}"))
        return b"".join(parts)

    def save(self, path: str | os.PathLike[str], limit_bytes: int = MAX_UPLOAD_BYTES) -> int:
        """Write what is left of its content to a file, in place of one that is there; blocks the greenlet. Threads do
        the writing. The file appears under its name when it is complete.

        Args:
            path: a relative one begins in the application's folder.
            limit_bytes: the longest that is taken.

        Returns:
            its size in bytes.

        Raises:
            HttpError: 413, it has more than `limit_bytes`; and what else the body of a request comes to.
            OSError: it can't be written.
        """
        target = base_folder() / path
        part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        pieces = _at_most(limit_bytes, self._pieces, f"The file {self.filename!r}")
        file = in_thread(lambda: part.open("xb", 0))
        try:
            with file:
                size = _write(file, pieces)
            in_thread(os.replace, part, target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return size


def _write(file: RawIOBase, pieces: Iterator[bytes]) -> int:
    size, parts, held = 0, [], 0
    for piece in pieces:
        parts.append(piece)
        held += len(piece)
        if held >= _WRITTEN_BYTES:
            size += _put(file, parts)
            held = 0
    return size + _put(file, parts)


def _put(file: RawIOBase, parts: list[bytes]) -> int:
    data = b"".join(parts)
    parts.clear()
    in_thread(_write_all, file, data)
    return len(data)


def _write_all(file: RawIOBase, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]


def _at_most(limit_bytes: int, pieces: Iterator[bytes], what: str) -> Iterator[bytes]:
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > limit_bytes:
            raise HttpError(413, f"{what} is larger than {limit_bytes} bytes.", close=True)
        yield piece


class Form:
    """The form in the body of a request.

    Args:
        request: whose body it is.
    """

    def __init__(self, request: BodySource) -> None:
        self._request = request
        self._pairs: list[tuple[bytes, bytes]] = []
        self._files: list[tuple[File, bytes]] | None = None
        self._began = False
        self._done = False

    def fields(self) -> Fields:
        """Return the fields: of a form without files all of them. Of one with files all, with the files in memory, or,
        when they are being read as they arrive, those that came until now.

        Raises:
            HttpError: 400, it is malformed; 413, it is larger than a body that is read as a whole may be, or has too
                many fields; 415, the body is no form.
        """
        if not self._began:
            self._pairs = []
            self._read_whole()
            self._began = True
        return decoded(self._pairs)

    def files(self, limit_bytes: int) -> Iterator[Upload]:
        """Return the files as they arrive. What was not read of one is skipped when the next one is asked for.

        Args:
            limit_bytes: the longest that they may be together.

        Raises:
            HttpError: as `fields`; 413 beyond `limit_bytes`.
            ArgumentError: a second call, while they are being read.
        """
        if self._files is not None:
            return (Upload(file, iter((content,))) for file, content in self._files)
        if self._done:
            return iter(())
        if self._began:
            raise ArgumentError("files: the files of this form are being read already; go on with that iterator")
        self._began = True
        return self._arriving(limit_bytes)

    def _read_whole(self) -> None:
        request = self._request
        kind = kind_of(request)
        if not request.has_body:
            self._files = []
        elif kind == URLENCODED:
            self._pairs, self._files = parse_parameters(request.body(), Turn().yield_if_due), []
        elif kind == FORM_TYPE:
            self._files = [(file, b"".join(content)) for file, content in self._parts(_pieces(request.body()))]
        else:
            raise _no_form(kind)

    def _arriving(self, limit_bytes: int) -> Iterator[Upload]:
        request = self._request
        kind = kind_of(request)
        if kind != FORM_TYPE or not request.has_body:
            self._began = False
            self.fields()
            self._done = True
            return
        pieces = _at_most(limit_bytes, request.chunks(), "The form")
        for file, content in self._parts(pieces, request.hold):
            yield Upload(file, content)
            for _ in content:
                pass
        self._done = True

    def _parts(
        self, pieces: Iterator[bytes], hold: Callable[[int], object] = bool
    ) -> Iterator[tuple[File, Iterator[bytes]]]:
        boundary = boundary_of(self._request.get("content-type") or "")
        if boundary is None:
            raise HttpError(400, f"The form has no usable boundary in its Content-Type: {FORM_TYPE}; boundary=…")
        events = _translated(read_form(pieces, boundary, hold))
        ahead: list[File] = []  # the file whose beginning ended the content before it

        def content() -> Iterator[bytes]:
            for event in events:
                if isinstance(event, bytes):
                    yield event
                elif isinstance(event, Field):
                    self._pairs.append((event.name.encode("utf-8", "surrogateescape"), event.value))
                else:
                    ahead.append(event)
                    return

        for piece in content():  # what comes before the first file
            assert not piece
        while ahead:
            yield ahead.pop(), content()


def _pieces(body: bytes) -> Iterator[bytes]:
    turn = Turn()
    for start in range(0, len(body), _PARSED_BYTES):
        yield body[start : start + _PARSED_BYTES]
        turn.yield_if_due()


class Posted:
    """What a request says about its body and its cookies; a part of `smqrt.http.message.Request`."""

    __slots__ = ()

    @property
    def cookies(self: BodySource) -> Fields:
        """The cookies by name."""
        return cookies_of(self.get("cookie") or "")

    def json(self: BodySource) -> Any:
        """Return the value that the body is in JSON, whatever its Content-Type says.

        Raises:
            HttpError: 400, it is no JSON; 413, it has too many values; and as `body`.
        """
        return parse_json(self.body())

    def form(self) -> Fields:
        """Return the fields of the form in the body, urlencoded or multipart; none without a body. The files of a form
        are in memory then, and `files` gives them; larger ones are for `files` alone.

        Raises:
            HttpError: 400, it is malformed; 413, it is larger than a body may be or has too many fields; 415, the body
                is no form; and as `body`.
        """
        return self._posted().fields()

    def files(self, limit_bytes: int = MAX_UPLOAD_BYTES) -> Iterator[Upload]:
        """Iterate over the files of the form in the body, as they arrive: nothing is kept of them. What was not read of
        one is skipped when the next one is asked for. `form` gives the fields that came until then.

        Args:
            limit_bytes: the longest that they may be together.

        Raises:
            HttpError: 413, they are longer; and as `form`.
            ArgumentError: another iterator of this request is reading them.
        """
        return self._posted().files(limit_bytes)

    @abstractmethod
    def _posted(self) -> Form: ...


def _translated(events: Iterator[Field | File | bytes]) -> Iterator[Field | File | bytes]:
    try:
        yield from events
    except FormTooLarge as error:
        raise HttpError(413, f"{error}"[:200], close=True) from None
    except MultipartError as error:
        raise HttpError(400, f"{error}"[:200], close=True) from None


def _no_form(kind: str) -> HttpError:
    return HttpError(
        415, f"The body is no form but {kind[:100] or 'of no type'}: send {URLENCODED} or {FORM_TYPE}.",
        headers={"Accept": f"{URLENCODED}, {FORM_TYPE}"},
    )  # fmt: skip

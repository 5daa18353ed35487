"""The body of a request as applications want it: JSON, a form, uploaded files. Everything a client can get wrong ends
in an `HttpError` whose status and sentence are the answer, unless the application catches it.
"""

from __future__ import annotations

import json
import os
import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterator
from io import RawIOBase
from typing import Any, NoReturn, Protocol

from smqrt.errors import ArgumentError
from smqrt.http.fields import Fields, cookies_of, decoded
from smqrt.http.forms import (
    FORM_TYPE,
    Field,
    File,
    FormTooLarge,
    MultipartError,
    boundary_of,
    parse_parameters,
    read_form,
)
from smqrt.http.status import HttpError
from smqrt.loop.greenlet_pool import in_thread
from smqrt.loop.scheduling import Turn
from smqrt.process.current_application import base_folder

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
    """Give the type of the body without its parameters, in lower case."""
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
        """Give what is left of its content; blocks the greenlet until all has come.

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
        """Give the fields: of a form without files all of them. Of one with files all, with the files in memory, or,
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
        """Give the files as they arrive. What was not read of one is skipped when the next one is asked for.

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
            self._pairs, self._files = parse_parameters(request.body(), Turn().breathe), []
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
        turn.breathe()


class Posted:
    """What a request says about its body and its cookies; a part of `smqrt.http.message.Request`."""

    __slots__ = ()

    @property
    def cookies(self: BodySource) -> Fields:
        """The cookies by name."""
        return cookies_of(self.get("cookie") or "")

    def json(self: BodySource) -> Any:
        """Give the value that the body is in JSON, whatever its Content-Type says.

        Raises:
            HttpError: 400, it is no JSON; 413, it has too many values; and as `body`.
        """
        return parse_json(self.body())

    def form(self) -> Fields:
        """Give the fields of the form in the body, urlencoded or multipart; none without a body. The files of a form
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

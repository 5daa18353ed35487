"""Names and visible files of a file server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import copy
from itertools import islice
from urllib.parse import quote_from_bytes, unquote
from xml.sax.saxutils import escape

from smqrt.http.access import NothingPrivate, hidden, is_page
from smqrt.http.head import decode_path
from smqrt.http.headers import BadRequest, HttpError
from smqrt.http.open_files import NewFile, call_blocking, call_blocking_file
from smqrt.http.resources import Io, IoError, Stat, segments

# ---- File names: for the WebDAV engine, in URLs and in XML

_URL_SYNTAX = re.compile("[%?;#\udc80-\udcff]")
_SAFE = "/!*'(),$-_.~+@:=&"
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_DESTINATION = re.compile(r"(?:(https?)://([^/?#]{1,255}))?(/[^?#]*)", re.IGNORECASE)


def canonical(path: str) -> str:
    """Return the canonical form of a path in a share, without leading and trailing slashes.

    Locks depend on a unique form.

    Raises:
        HttpError: 404, the name is invalid.
    """
    try:
        return "/".join(segments(path))
    except IoError:
        raise HttpError(404) from None


def escaped(path: str) -> str:
    """Escape a path for the engine: characters that it treats as URL syntax, and bytes that are not UTF-8."""
    return _URL_SYNTAX.sub(lambda match: f"%{ord(match[0]) & 0xFF:02X}", path)


def unescaped(path: str) -> str:
    """Reverse `escaped`."""
    return unquote(path, errors="surrogateescape")


def href(path: str) -> str:
    """Return a path as a URL path, percent-encoded."""
    return quote_from_bytes(path.encode("utf-8", "surrogateescape"), _SAFE)


def xml_text(text: str) -> str:
    """Return text escaped for XML. Characters that XML does not allow are replaced."""
    return escape(_NOT_XML.sub("\ufffd", text))


def destination(header: str, hosts: tuple[str, ...], bases: tuple[str, ...]) -> str:
    """Return the path in the share of a Destination header.

    Args:
        header: value of the field.
        hosts: names of this server.
        bases: paths of the share, each with "/" at its end.

    Raises:
        HttpError: 400, it is not a URL; 502, it is outside of the share.
    """
    found = _DESTINATION.fullmatch(header.strip())
    if found is None or not header.isascii():
        raise HttpError(400, "the Destination header is not a URL of a file")
    if found[2] is not None and found[2].lower() not in hosts:
        raise HttpError(502, "the destination is on another server")
    try:
        path = decode_path(found[3])
    except BadRequest as error:
        raise HttpError(400, f"Destination: {error}") from None
    for base in bases:
        if f"{path}/".startswith(base):
            return canonical(path[len(base) :])
    raise HttpError(502, "the destination is outside of this file server")


COPIED_BYTES = 8 << 20
"""Bytes of a file that are copied per call in a thread."""
MAX_ENTRIES = 10_000
"""Limit of files and folders in an operation on a whole folder."""
MAX_LISTED = 100_000
"""Limit of entries in a listing of a folder."""
_PIECE_BYTES = 1 << 20

_ROOT = Stat("", 0, 0, True, (0,))


class DavShare:
    """The files of an io that a client may see. Private and hidden files appear as missing and cannot be created.

    Every operation blocks the greenlet and raises `IoError`.

    Args:
        io: the files.
        state_folder: the folder of the locks, which is hidden from all clients; None without one.
        owner: whether the client has logged in here and sees all other files.
    """

    def __init__(self, io: Io, state_folder: str | None = None, owner: bool = False) -> None:
        self.io = io
        if owner:
            self.io = copy(io)  # the io of the application keeps its rules
            self.io.private = NothingPrivate()
        self._state_folder = state_folder
        self._owner = owner

    def shows(self, name: str) -> bool:
        """Return whether the client may see and create a file of this name."""
        if self._state_folder is not None and (name == self._state_folder or name.startswith(self._state_folder + "/")):
            return False
        folder, _, own = name.rpartition("/")
        # macOS writes files of these names when it copies, so only their folder decides whether they are hidden.
        is_from_macos = own.startswith("._") or own == ".DS_Store"
        is_hidden = hidden(f"{folder}/" if is_from_macos else name)
        return self._owner or not (is_hidden or is_page(name) or self.io.private.is_private(name))

    def stat(self, name: str) -> Stat | None:
        """Return the stat of a file or folder, None if the client may see no such file."""
        if not self.shows(name):
            return None
        try:
            return call_blocking(self.io, name, self.io.published, name)
        except IoError as error:
            if not name:
                return _ROOT  # an io in Lua may have no entry for its root
            if error.word == "ioerror":
                raise
            return None

    def list(self, name: str) -> list[tuple[str, Stat]]:
        """Return the visible content of a folder: full names with stats, folders first.

        Raises:
            IoError: "toomuchdata", more than `MAX_LISTED`.
        """
        return call_blocking(self.io, name, lambda: list(self._listed(name)))

    def walk(self, name: str) -> Iterator[tuple[str, Stat]]:
        """Iterate over everything below a folder, folders before their content.

        Raises:
            IoError: "toomuchdata", more than `MAX_ENTRIES`.
        """
        folders, count = [name], 0
        while folders:
            for path, stat in self.list(folders.pop()):
                count += 1
                if count > MAX_ENTRIES:
                    raise IoError("toomuchdata", f"more than {MAX_ENTRIES} files and folders")
                if stat.isdir:
                    folders.append(path)
                yield path, stat

    def has_invisible(self, name: str) -> bool:
        """Return whether a folder contains files that the client may not see."""
        if self._state_folder is not None and self._state_folder.startswith(name + "/"):
            return True
        if self._owner:
            return False

        def count(folder: str) -> int:
            return sum(entry.name not in (".", "..") for entry in self.io.files(folder))

        for path in [name, *(path for path, stat in self.walk(name) if stat.isdir)]:
            if len(self.list(path)) != call_blocking(self.io, path, count, path):  # `list` omits invisible files
                return True
        return False

    def mkdir(self, name: str) -> None:
        """Create a folder."""
        self._check(name)
        call_blocking(self.io, name, self.io.mkdir, name)

    def remove(self, name: str, isdir: bool) -> None:
        """Remove a file or an empty folder."""
        self._check(name)
        call_blocking(self.io, name, self.io.rmdir if isdir else self.io.remove, name)

    def remove_tree(self, name: str) -> None:
        """Remove a folder with its visible content. Raises "notempty" if it has other content."""
        folders = [(name, False)]  # each twice: to remove its content, then to remove the folder itself
        while folders:
            path, is_emptied = folders.pop()
            if is_emptied:
                self.remove(path, True)
                continue
            folders.append((path, True))
            for inside, stat in self.list(path):
                if stat.isdir:
                    folders.append((inside, False))
                else:
                    self.remove(inside, False)

    def rename(self, old: str, new: str) -> None:
        """Rename a file or folder; replaces an existing file."""
        self._check(old)
        self.check_new(new)
        call_blocking(self.io, old, self.io.rename, old, new)

    def copy(self, old: str, new: str) -> None:
        """Copy a file; replaces an existing file."""
        with self.new_file(new) as upload:
            source = call_blocking(self.io, old, self.io.open_published, old)

            def copy_some() -> bool:
                """Copy the next COPIED_BYTES, in a thread; return whether there may be more."""
                for _ in range(COPIED_BYTES // _PIECE_BYTES):
                    data = source.read(_PIECE_BYTES)
                    if not data:
                        return False
                    upload.file.write(data)
                return True

            try:
                while call_blocking_file(self.io, new, copy_some):
                    pass
            finally:
                call_blocking(self.io, old, source.close)
            upload.finish()

    def new_file(self, name: str) -> NewFile:
        """Begin to write a file. It replaces an existing file when it is complete."""
        self.check_new(name)
        return NewFile(self.io, name)

    def check_new(self, name: str) -> None:
        """Raise IoError if the client may not create or replace a file of this name.

        It may not replace an invisible file, such as a link out of the share.
        """
        self._check(name)
        if self.stat(name) is None and call_blocking(self.io, name, self._exists, name):
            raise IoError("noaccess", f"{name!r} is private")

    def _check(self, name: str) -> None:
        if not name or not self.shows(name):
            raise IoError("noaccess", f"{name!r} is private")

    def _exists(self, name: str) -> bool:
        try:
            self.io.stat(name)
        except IoError:
            return False
        return True

    def _listed(self, name: str) -> Iterator[tuple[str, Stat]]:
        prefix = name + "/" if name else ""
        found = list(islice(self.io.files(name), MAX_LISTED + 1))
        if len(found) > MAX_LISTED:
            raise IoError("toomuchdata", f"more than {MAX_LISTED} entries in {name}")
        # Folders first. The keys are not tuples: sorting 100,000 tuples blocks the loop for 80 ms.
        for entry in sorted(found, key=lambda entry: ("0" if entry.isdir else "1") + entry.name.casefold()):
            path = prefix + entry.name
            if entry.name in (".", "..") or not self.shows(path):
                continue
            try:
                yield path, entry if self.io.in_loop else self.io.published(path)
            except IoError:  # a link that leads out of the folder
                continue

"""The files of a file server as one client may see and change them."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from itertools import islice
from typing import IO

from smqrt.http.access import NothingPrivate, hidden, is_page
from smqrt.http.blocking_io import call_blocking
from smqrt.http.open_files import NewFile, call_blocking_file
from smqrt.http.resources import Io, IoError, Stat

COPIED_BYTES = 8 << 20
"""So much of a file is copied in one step."""
MAX_ENTRIES = 10_000
"""So many files and folders may an operation on a whole folder have."""
MAX_LISTED = 100_000
"""So many may a folder have that is listed."""
_PIECE_BYTES = 1 << 20

_ROOT = Stat("", 0, 0, True, (0,))


class DavShare:
    """An io as a client may see it: what is private or hidden is neither there nor can it be made.

    Every operation blocks the greenlet and raises `IoError`.

    Args:
        io: the files.
        kept: the folder of the locks, which nobody sees; None without one.
        owner: the client has logged in here and sees everything else.
    """

    def __init__(self, io: Io, kept: str | None = None, owner: bool = False) -> None:
        self.io = _unveiled(io) if owner else io
        self._kept = kept
        self._owner = owner

    def shows(self, name: str) -> bool:
        """Return whether a file of that name may be seen and made, if nothing else forbids it."""
        if self._kept is not None and (name == self._kept or name.startswith(self._kept + "/")):
            return False
        return self._owner or not (_hidden(name) or is_page(name) or self.io.private.name(name))

    def look(self, name: str) -> Stat | None:
        """Look at a file or folder; None when there is nothing that may be seen."""
        if not self.shows(name):
            return None
        try:
            return call_blocking(self.io, name, self.io.published, name)
        except IoError as error:
            if not name:
                return _ROOT  # an io in Lua need not know it
            if error.word == "ioerror":
                raise
            return None

    def list(self, name: str) -> list[tuple[str, Stat]]:
        """What is in a folder and may be seen: full names with what was found, folders first.

        Raises:
            IoError: "toomuchdata", there are more than `MAX_LISTED`.
        """
        return call_blocking(self.io, name, lambda: list(self._listed(name)))

    def walk(self, name: str) -> Iterator[tuple[str, Stat]]:
        """Everything below a folder, folders before what is in them.

        Raises:
            IoError: "toomuchdata", there are more than `MAX_ENTRIES`.
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

    def holds_unseen(self, name: str) -> bool:
        """Return whether there is something in a folder that may not be seen."""
        if self._kept is not None and self._kept.startswith(name + "/"):
            return True
        if self._owner:
            return False
        for path in [name, *(path for path, stat in self.walk(name) if stat.isdir)]:
            if len(self.list(path)) != self._count(path):
                return True
        return False

    def mkdir(self, name: str) -> None:
        """Make a folder."""
        self._check(name)
        call_blocking(self.io, name, self.io.mkdir, name)

    def remove(self, name: str, isdir: bool) -> None:
        """Remove a file or an empty folder."""
        self._check(name)
        call_blocking(self.io, name, self.io.rmdir if isdir else self.io.remove, name)

    def remove_tree(self, name: str) -> None:
        """Remove a folder with what is in it that may be seen; "notempty" when there is more."""
        folders = [(name, False)]
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
        """Rename a file or folder; replaces a file."""
        self._check(old)
        self.check_new(new)
        call_blocking(self.io, old, self.io.rename, old, new)

    def copy(self, old: str, new: str) -> None:
        """Copy a file; replaces a file."""
        with self.new_file(new) as upload:
            source = call_blocking(self.io, old, self.io.open_published, old)
            try:
                while call_blocking_file(self.io, new, lambda: _copy_some(source, upload.file)):
                    pass
            finally:
                call_blocking(self.io, old, source.close)
            upload.finish()

    def new_file(self, name: str) -> NewFile:
        """Begin to write a file; replaces a file when it is whole."""
        self.check_new(name)
        return NewFile(self.io, name)

    def _count(self, name: str) -> int:
        return call_blocking(self.io, name, lambda: sum(entry.name not in (".", "..") for entry in self.io.files(name)))

    def check_new(self, name: str) -> None:
        """Reject a name that can't be made or replaced, also since something is there that may not be seen: a link."""
        self._check(name)
        if self.look(name) is None and call_blocking(self.io, name, self._exists, name):
            raise IoError("noaccess", f"{name!r} is not for clients")

    def _check(self, name: str) -> None:
        if not name or not self.shows(name):
            raise IoError("noaccess", f"{name!r} is not for clients")

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
        for entry in sorted(found, key=_order):
            path = prefix + entry.name
            if entry.name in (".", "..") or not self.shows(path):
                continue
            try:
                yield path, entry if self.io.in_loop else self.io.published(path)
            except IoError:  # a link that leads out
                continue


def _order(entry: Stat) -> str:
    """Folders first. One text: sorting holds the interpreter, and 100,000 tuples take 80 ms."""
    return ("0" if entry.isdir else "1") + entry.name.casefold()


def _hidden(name: str) -> bool:
    """As `hidden`, but for the files that macOS writes beside others: without them it can't copy."""
    folder, _, own = name.rpartition("/")
    return hidden(f"{folder}/") if own.startswith("._") or own == ".DS_Store" else hidden(name)


def _copy_some(source: IO[bytes], target: IO[bytes]) -> bool:
    """Copy the next of it; return whether there may be more."""
    for _ in range(COPIED_BYTES // _PIECE_BYTES):
        data = source.read(_PIECE_BYTES)
        if not data:
            return False
        target.write(data)
    return True


def _unveiled(io: Io) -> Io:
    """The same files with nothing private among them."""
    same = copy(io)
    same.private = NothingPrivate()
    return same

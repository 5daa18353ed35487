"""Where files come from: folders and ZIP archives behind one interface (spec: bas-api §6, error words: §15)."""

from __future__ import annotations

import errno
import os
import stat as mode_bits
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from smqrt.errors import SmqrtError
from smqrt.http.private import Private

_WORDS = {
    errno.ENOENT: "notfound",
    errno.ENOTDIR: "notfound",
    errno.EISDIR: "noaccess",
    errno.EACCES: "noaccess",
    errno.EPERM: "noaccess",
    errno.EROFS: "noaccess",
    errno.EEXIST: "exist",
    errno.ENOTEMPTY: "notempty",
    errno.ENOSPC: "nospace",
    errno.EDQUOT: "nospace",
    errno.ENOMEM: "mem",
    errno.ENAMETOOLONG: "invalidname",
    errno.EINVAL: "invalidname",
}


class IoError(SmqrtError):
    """A file operation failed.

    Attributes:
        word: the short name applications test (spec: bas-api §15).
    """

    def __init__(self, word: str, detail: str = "") -> None:
        super().__init__(f"{word}: {detail}" if detail else word)
        self.word = word

    @classmethod
    def of(cls, error: OSError, name: str) -> IoError:
        """Translate an error of the system about `name`."""
        return cls(_WORDS.get(error.errno or 0, "ioerror"), f"{name}: {error.strerror or error}")


@dataclass(frozen=True, slots=True)
class Stat:
    """A file or directory.

    Attributes:
        name: its own name, without directories.
        size: in bytes.
        mtime: last change, in seconds since 1970.
        isdir: whether it is a directory.
        version: differs when the content may differ.
    """

    name: str
    size: int
    mtime: int
    isdir: bool
    version: Hashable = None


def segments(name: str) -> list[str]:
    """Split a name into its parts, without empty ones, "." and "..".

    Raises:
        IoError: "invalidname" for NUL, a backslash, or ".." that leads above the root.
    """
    if "\0" in name or "\\" in name:
        raise IoError("invalidname", f"{name!r} has a NUL or a backslash")
    parts: list[str] = []
    for part in name.split("/"):
        if part == "..":
            if not parts:
                raise IoError("invalidname", f"{name!r} leads above the root")
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    return parts


class Io:
    """A tree of files. Names are relative to its root; a leading "/" is allowed.

    Every operation raises `IoError`.
    """

    kind = "io"
    """What `resourcetype` tells: "disk" or "zip"."""
    private = Private()
    """Tells what no client is shown, beside what is hidden everywhere."""

    def open(self, name: str, mode: str = "r") -> IO[bytes]:
        """Open a file; mode "r", "w", "a", each also with "+". Always binary."""
        raise IoError("noimplementation", f"cannot open {name}")

    def stat(self, name: str) -> Stat:
        """Look at a file or directory."""
        raise IoError("noimplementation", f"cannot look at {name}")

    def files(self, path: str = "") -> Iterator[Stat]:
        """Iterate over the entries of a directory."""
        raise IoError("noimplementation", f"cannot list {path}")

    def sub(self, path: str) -> Io:
        """Make an io whose root is a directory of this one, or a ZIP file in it."""
        raise IoError("noimplementation", f"cannot open {path}")

    def published(self, name: str) -> Stat:
        """Look at what may be shown to a client under this name: a regular file or directory that no link smuggled
        in."""
        self._refuse_private("/".join(segments(name)))
        return self.stat(name)

    def _refuse_private(self, name: str) -> None:
        if self.private.name(name):
            raise IoError("notfound", f"{name} is not for clients")

    def version(self, name: str) -> Hashable:
        """Give the version a `Stat` of this name would have, cheaply; None when there is nothing."""
        try:
            return self.published(name).version
        except IoError:
            return None

    def read_published(self, name: str, limit_bytes: int) -> tuple[Stat, bytes]:
        """Read a file that may be shown, at most `limit_bytes` of it, and look at what was read."""
        with self.open_published(name) as file:
            return self.published(name), file.read(limit_bytes)

    def open_published(self, name: str) -> IO[bytes]:
        """Open a file that may be shown to a client."""
        self.published(name)
        return self.open(name)

    def read(self, name: str) -> bytes:
        """Read a whole file."""
        with self.open(name) as file:
            return file.read()

    def mkdir(self, name: str) -> None:
        """Make a directory."""
        raise IoError("noaccess", f"{name}: read only")

    def rmdir(self, name: str) -> None:
        """Remove an empty directory."""
        raise IoError("noaccess", f"{name}: read only")

    def remove(self, name: str) -> None:
        """Remove a file."""
        raise IoError("noaccess", f"{name}: read only")

    def rename(self, old: str, new: str) -> None:
        """Rename a file or directory; replaces a file of the new name."""
        raise IoError("noaccess", f"{old}: read only")

    def realpath(self, name: str = "") -> str:
        """Give the path the operating system knows."""
        raise IoError("noimplementation", f"{name} has no path")


_PATH_MAX = 4096  # of Linux
_MODES = {"r": "rb", "w": "wb", "a": "ab", "r+": "r+b", "w+": "w+b", "a+": "a+b"}


class DiskIo(Io):
    """A folder.

    Args:
        root: the folder.

    Raises:
        IoError: "notfound" when it is none.
    """

    kind = "disk"

    def __init__(self, root: str | Path) -> None:
        self._root = os.path.realpath(root)
        self._prefix = self._root if self._root.endswith("/") else self._root + "/"
        try:
            if not mode_bits.S_ISDIR(os.stat(self._root).st_mode):
                raise IoError("notfound", f"{root} is no folder")
        except OSError as error:
            raise IoError.of(error, str(root)) from None

    def open(self, name: str, mode: str = "r") -> IO[bytes]:
        """See `Io.open`."""
        kind = _MODES.get(mode.replace("b", ""))
        if kind is None:
            raise IoError("invalidname", f"mode {mode!r} is none of {', '.join(_MODES)}")
        try:
            return open(self.realpath(name), kind)
        except OSError as error:
            raise IoError.of(error, name) from None

    def stat(self, name: str) -> Stat:
        """See `Io.stat`."""
        path = self.realpath(name)
        try:
            return _stat_of(os.path.basename(path), os.stat(path))
        except OSError as error:
            raise IoError.of(error, name) from None

    def files(self, path: str = "") -> Iterator[Stat]:
        """See `Io.files`; entries that vanish meanwhile are left out."""
        try:
            entries = list(os.scandir(self.realpath(path)))
        except OSError as error:
            raise IoError.of(error, path) from None
        return _stats(entries)

    def sub(self, path: str) -> Io:
        """See `Io.sub`."""
        place = self.realpath(path)
        below: Io
        if os.path.isfile(place):
            from smqrt.http.zips import ZipIo

            below = ZipIo(place)
        else:
            below = DiskIo(place)
        below.private = self.private
        return below

    def published(self, name: str) -> Stat:
        """See `Io.published`."""
        path = self._published_path(name)
        try:
            info = os.stat(path, follow_symlinks=False)
        except OSError as error:
            raise IoError.of(error, name) from None
        if not (mode_bits.S_ISREG(info.st_mode) or mode_bits.S_ISDIR(info.st_mode)):
            raise IoError("notfound", f"{name} is neither a file nor a folder")
        return _stat_of(os.path.basename(path), info)

    def open_published(self, name: str) -> IO[bytes]:
        """See `Io.open_published`."""
        try:
            fd = os.open(self._published_path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            if not mode_bits.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise IoError("notfound", f"{name} is no file")
            return open(fd, "rb")
        except OSError as error:
            raise IoError.of(error, name) from None

    def read_published(self, name: str, limit_bytes: int) -> tuple[Stat, bytes]:
        """See `Io.read_published`."""
        with self.open_published(name) as file:
            return _stat_of(name.rpartition("/")[2], os.fstat(file.fileno())), file.read(limit_bytes)

    def version(self, name: str) -> Hashable:
        """Give the version a `Stat` of the name would have, with one cheap call; None when there is nothing.

        Follows links: only good to tell whether what was `published` before is still the same.
        """
        try:
            return _version(os.stat(self.realpath(name) if ".." in name else self._prefix + name))
        except (OSError, ValueError, IoError):
            return None

    def mkdir(self, name: str) -> None:
        """See `Io.mkdir`."""
        self._do(os.mkdir, name)

    def rmdir(self, name: str) -> None:
        """See `Io.rmdir`."""
        self._do(os.rmdir, name)

    def remove(self, name: str) -> None:
        """See `Io.remove`."""
        self._do(os.remove, name)

    def rename(self, old: str, new: str) -> None:
        """See `Io.rename`."""
        try:
            os.rename(self.realpath(old), self.realpath(new))
        except OSError as error:
            raise IoError.of(error, old) from None

    def realpath(self, name: str = "") -> str:
        """See `Io.realpath`."""
        parts = segments(name)
        return self._prefix + "/".join(parts) if parts else self._root

    def _do(self, operation: object, name: str) -> None:
        try:
            operation(self.realpath(name))  # type: ignore[operator]
        except OSError as error:
            raise IoError.of(error, name) from None

    def _published_path(self, name: str) -> str:
        asked = self.realpath(name)
        if len(asked) > _PATH_MAX:  # nor shall a stranger have us look for links in it
            raise IoError("notfound", "no path is that long")
        self._refuse_private(asked)
        try:
            os.lstat(asked)  # one call for what is not there; the next makes one for each folder above it
            path = os.path.realpath(asked, strict=True)  # to the first part that is missing, and no further
        except OSError as error:
            raise IoError.of(error, name) from None
        if path == asked or path == self._root:
            return path
        self._refuse_private(path)
        if not path.startswith(self._prefix):
            raise IoError("notfound", f"{name} is a link that leads out of the folder")
        if disguised(name, path[len(self._prefix) :]):
            raise IoError("notfound", f"{name} is a link to something hidden")
        return path


def disguised(name: str, real: str) -> bool:
    """Whether a link shows something hidden, or a page's source, under another kind of name."""
    return hidden(real) > hidden(name) or (is_page(real) and not is_page(name))


def hidden(path: str) -> bool:
    """Whether a path is closed to clients: it has a part that begins with a dot, or is an include file (spec: runtime
    §5.5)."""
    return "/." in path or path[:1] == "." or path[-6:].lower() == ".shtml"


def is_page(path: str) -> bool:
    """Whether a path names a Lua Server Page, in any letter case."""
    return path[-4:].lower() == ".lsp"


def _version(info: os.stat_result) -> Hashable:
    return info.st_mtime_ns, info.st_size, info.st_ino, info.st_dev


def _stat_of(name: str, info: os.stat_result) -> Stat:
    return Stat(name, info.st_size, int(info.st_mtime), mode_bits.S_ISDIR(info.st_mode), _version(info))


def _stats(entries: list[os.DirEntry[str]]) -> Iterator[Stat]:
    for entry in entries:
        try:
            yield _stat_of(entry.name, entry.stat())
        except OSError:
            continue

"""Resources: trees of files (folders, ZIP archives, virtual files) behind one interface (spec: bas-api §6, error words:
§15).
"""

from __future__ import annotations

import errno
import io
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from smqrt.errors import SmqrtError
from smqrt.http.access import Private
from smqrt.transport.certificates import self_signed_pair

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
    errno.EBUSY: "locked",
    errno.ETXTBSY: "locked",
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
    in_loop = False
    """Whether its operations run in the loop's own thread, where they block the greenlet: those of an io in Lua. All
    others are for threads, see `smqrt.http.blocking_io`."""

    def place(self, name: str = "") -> str:
        """Return the absolute path on whose disk an operation on `name` waits; "" when that is no disk."""
        return ""

    def is_near(self, name: str = "") -> bool:
        """Return whether looking at a file and opening it for reading takes no time worth a thread, because everything
        lies on a disk of this machine."""
        return False

    def stat_now(self, name: str) -> Stat | None:
        """Look as `stat` does, in the loop; None when that may take time."""
        return None

    def open_now(self, name: str) -> int | None:
        """Open a regular file to read, in the loop, and give its descriptor; None when that may take time."""
        return None

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
        self._reject_private("/".join(segments(name)))
        return self.stat(name)

    def _reject_private(self, name: str) -> None:
        if self.private.name(name):
            raise IoError("notfound", f"{name} is not for clients")

    def version(self, name: str) -> Hashable:
        """Return the version a `Stat` of this name would have, cheaply; None when there is nothing."""
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
        """Return the path the operating system knows."""
        raise IoError("noimplementation", f"{name} has no path")


# ---- Files that are made when somebody reads them: the io objects "vm" of applications.


class VirtualIo(Io):
    """A read-only tree of files that are functions.

    Args:
        files: name and maker of each; a maker that raises OSError has no file to offer.
        prefix: the folder in it that is the root.
    """

    kind = "vm"

    def __init__(self, files: Mapping[str, Callable[[], bytes]], prefix: str = "") -> None:
        self._files = files
        self._prefix = prefix
        self._made = int(time.time())

    def open(self, name: str, mode: str = "r") -> IO[bytes]:
        """See `Io.open`."""
        if mode.replace("b", "") != "r":
            raise IoError("noaccess", f"{name}: read only")
        return io.BytesIO(self._content(self._path(name)))

    def stat(self, name: str) -> Stat:
        """See `Io.stat`."""
        path = self._path(name)
        own = path.rpartition("/")[2]
        if path in self._files:
            return Stat(own, len(self._content(path)), self._made, False)
        if not any(self._below(path)):
            raise IoError("notfound", name)
        return Stat(own, 0, self._made, True)

    def files(self, path: str = "") -> Iterator[Stat]:
        """See `Io.files`."""
        folder = self._path(path)
        children = sorted({rest.partition("/")[0] for rest in self._below(folder)})
        if not children:
            raise IoError("notfound", path)
        return (self.stat(f"{path}/{child}") for child in children)

    def sub(self, path: str) -> Io:
        """See `Io.sub`."""
        if not self.stat(path).isdir:
            raise IoError("notfound", f"{path} is no folder")
        return VirtualIo(self._files, self._path(path))

    def realpath(self, name: str = "") -> str:
        """See `Io.realpath`; these files have no path, so it is one that names the io."""
        return f"vm:/{self._path(name)}"

    def _path(self, name: str) -> str:
        parts = segments(name)
        return "/".join([self._prefix, *parts] if self._prefix else parts)

    def _below(self, path: str) -> Iterator[str]:
        start = path + "/" if path else ""
        return (name[len(start) :] for name in self._files if name.startswith(start))

    def _content(self, path: str) -> bytes:
        maker = self._files.get(path)
        if maker is None:
            raise IoError("notfound", path)
        try:
            return maker()
        except OSError as error:
            raise IoError.of(error, path) from None


def server_io() -> VirtualIo:
    """What every server has: a certificate for trying TLS out, made by itself (spec: bas-api §10)."""
    return VirtualIo(
        {
            ".certificate/MakoServer.pem": lambda: _certificate(0),
            ".certificate/MakoServer.key": lambda: _certificate(1),
        }
    )


def _certificate(part: int) -> bytes:
    return Path(self_signed_pair("localhost")[part]).read_bytes()

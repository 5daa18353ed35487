"""Interface of file trees: folders, ZIP archives, virtual files (spec: bas-api §6).

Error words: spec: bas-api §15.
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
from smqrt.transport.tls_contexts import self_signed_pair

_WORDS = {  # error words of applications; any other error is "ioerror"
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
        word: error word for applications (spec: bas-api §15).
    """

    def __init__(self, word: str, detail: str = "") -> None:
        super().__init__(f"{word}: {detail}" if detail else word)
        self.word = word

    @classmethod
    def of(cls, error: OSError, name: str) -> IoError:
        """Return the IoError for an operating-system error on the file `name`."""
        return cls(_WORDS.get(error.errno or 0, "ioerror"), f"{name}: {error.strerror or error}")


@dataclass(frozen=True, slots=True)
class Stat:
    """A file or directory.

    Attributes:
        name: name without directories.
        size: in bytes.
        mtime: time of the last change, in seconds since 1970.
        isdir: whether it is a directory.
        version: a value that changes whenever the content may have changed.
    """

    name: str
    size: int
    mtime: int
    isdir: bool
    version: Hashable = None


def segments(name: str) -> list[str]:
    """Split a name into its parts, resolving "." and "..".

    Raises:
        IoError: "invalidname", it has a NUL or a backslash, or leads above the root.
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
    """Kind of the tree, as `resourcetype` returns it: "disk", "zip", "vm" or "lua"."""
    private = Private()
    """Rules for files that clients cannot see, besides hidden ones."""
    in_loop = False
    """Whether operations run in the thread of the loop and block only the greenlet, as for an io in Lua. Otherwise a
    thread runs them, see `smqrt.http.open_files`."""

    def disk_path(self, name: str = "") -> str:
        """Return an absolute path on the disk that an operation on `name` uses; "" without a disk."""
        return ""

    def is_local(self, name: str = "") -> bool:
        """Return whether `stat` and opening for reading need no thread, because all files are on a local disk."""
        return False

    def stat_now(self, name: str) -> Stat | None:
        """Return the result of `stat`, in the loop; None if that may block."""
        return None

    def open_now(self, name: str) -> int | None:
        """Open a regular file for reading, in the loop, and return its descriptor; None if that may block."""
        return None

    def open(self, name: str, mode: str = "r") -> IO[bytes]:
        """Open a file in binary mode "r", "w" or "a", each also with "+"."""
        raise IoError("noimplementation", f"cannot open {name}")

    def stat(self, name: str) -> Stat:
        """Return the stat of a file or directory."""
        raise IoError("noimplementation", f"cannot stat {name}")

    def files(self, path: str = "") -> Iterator[Stat]:
        """Iterate over the entries of a directory."""
        raise IoError("noimplementation", f"cannot list {path}")

    def sub(self, path: str) -> Io:
        """Return an io whose root is a directory of this one, or a ZIP file in it."""
        raise IoError("noimplementation", f"cannot open {path}")

    def published(self, name: str) -> Stat:
        """Return the stat of a file or directory if clients may see it under this name.

        A link that leads out of the tree is "notfound".
        """
        self._reject_private("/".join(segments(name)))
        return self.stat(name)

    def _reject_private(self, name: str) -> None:
        if self.private.is_private(name):
            raise IoError("notfound", f"{name} is private")

    def version(self, name: str) -> Hashable:
        """Return the version that a `Stat` of this name would have; None if clients may see no such file."""
        try:
            return self.published(name).version
        except IoError:
            return None

    def read_published(self, name: str, limit_bytes: int) -> tuple[Stat, bytes]:
        """Read at most `limit_bytes` of a file that clients may see; return its stat and content."""
        with self.open_published(name) as file:
            return self.published(name), file.read(limit_bytes)

    def open_published(self, name: str) -> IO[bytes]:
        """Open a file that clients may see."""
        self.published(name)
        return self.open(name)

    def read(self, name: str) -> bytes:
        """Read a whole file."""
        with self.open(name) as file:
            return file.read()

    def mkdir(self, name: str) -> None:
        """Create a directory."""
        raise IoError("noaccess", f"{name}: read-only")

    def rmdir(self, name: str) -> None:
        """Remove an empty directory."""
        raise IoError("noaccess", f"{name}: read-only")

    def remove(self, name: str) -> None:
        """Remove a file."""
        raise IoError("noaccess", f"{name}: read-only")

    def rename(self, old: str, new: str) -> None:
        """Rename a file or directory; replaces an existing file of the new name."""
        raise IoError("noaccess", f"{old}: read-only")

    def realpath(self, name: str = "") -> str:
        """Return the path of a file in the operating system."""
        raise IoError("noimplementation", f"{name} has no path")


# ---- Files that are generated when they are read: the io objects "vm" of applications


class VirtualIo(Io):
    """A read-only tree of generated files.

    Args:
        files: functions that generate the content, by name. A function may raise OSError.
        prefix: the folder in it that is the root.
        changed_s: the time of all files, in seconds since 1970. With it, the content is constant, and a
            `ResourceReader` can serve the files.
    """

    kind = "vm"

    def __init__(
        self, files: Mapping[str, Callable[[], bytes]], prefix: str = "", changed_s: int | None = None
    ) -> None:
        self._files = files
        self._prefix = prefix
        self._changed_s = changed_s
        self._created_s = int(time.time()) if changed_s is None else changed_s

    def open(self, name: str, mode: str = "r") -> IO[bytes]:
        """See `Io.open`."""
        if mode.replace("b", "") != "r":
            raise IoError("noaccess", f"{name}: read-only")
        return io.BytesIO(self._content(self._path(name)))

    def stat(self, name: str) -> Stat:
        """See `Io.stat`."""
        path = self._path(name)
        own = path.rpartition("/")[2]
        if path in self._files:
            return Stat(own, len(self._content(path)), self._created_s, False, self._changed_s)
        if not any(self._names_below(path)):
            raise IoError("notfound", name)
        return Stat(own, 0, self._created_s, True)

    def files(self, path: str = "") -> Iterator[Stat]:
        """See `Io.files`."""
        folder = self._path(path)
        children = sorted({rest.partition("/")[0] for rest in self._names_below(folder)})
        if not children:
            raise IoError("notfound", path)
        return (self.stat(f"{path}/{child}") for child in children)

    def sub(self, path: str) -> Io:
        """See `Io.sub`."""
        if not self.stat(path).isdir:
            raise IoError("notfound", f"{path} is not a folder")
        return VirtualIo(self._files, self._path(path), self._changed_s)

    def realpath(self, name: str = "") -> str:
        """See `Io.realpath`. Generated files have no path, so the result only names the io."""
        return f"vm:/{self._path(name)}"

    def _path(self, name: str) -> str:
        parts = segments(name)
        return "/".join([self._prefix, *parts] if self._prefix else parts)

    def _names_below(self, path: str) -> Iterator[str]:
        start = path + "/" if path else ""
        return (name[len(start) :] for name in self._files if name.startswith(start))

    def _content(self, path: str) -> bytes:
        generate = self._files.get(path)
        if generate is None:
            raise IoError("notfound", path)
        try:
            return generate()
        except OSError as error:
            raise IoError.of(error, path) from None


def server_io() -> VirtualIo:
    """Return the files that every server has: a self-signed certificate for tests of TLS (spec: bas-api §10)."""

    def certificate(part: int) -> bytes:
        return Path(self_signed_pair("localhost")[part]).read_bytes()

    return VirtualIo(
        {".certificate/MakoServer.pem": lambda: certificate(0), ".certificate/MakoServer.key": lambda: certificate(1)}
    )

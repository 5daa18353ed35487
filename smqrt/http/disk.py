"""Folders of the disk as resources, with the ZIP archives in them (spec: bas-api §6)."""

from __future__ import annotations

import os
import stat as mode_bits
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import IO

from smqrt.http.private import disguised
from smqrt.http.resources import Io, IoError, Stat, segments
from smqrt.http.zips import ZipIo

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

"""Folders and ZIP archives as resources (spec: bas-api §6)."""

from __future__ import annotations

import io
import os
import re
import stat as mode_bits
import time
import zipfile
import zlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, cast
from weakref import WeakValueDictionary

from smqrt.http.access import disguised
from smqrt.http.open_files import PipeFile, disks, is_special
from smqrt.http.resources import Io, IoError, Stat, segments

_PATH_MAX = 4096  # bytes, on Linux
_MODES = {"r": "rb", "w": "wb", "a": "ab", "r+": "r+b", "w+": "w+b", "a+": "a+b"}
MAX_ENTRY_BYTES = 64 << 20
MAX_RATIO = 200  # unpacked to packed size; text has 5 to 20, a higher ratio indicates a ZIP bomb
_HARMLESS_BYTES = 1 << 20  # unpacked; below this size any ratio is accepted
_ENCRYPTED = 1  # flag bits of an entry
_UTF8 = 1 << 11
_DRIVE = re.compile(r"[A-Za-z]:(/|$)")


class DiskIo(Io):
    """A folder of the disk.

    Args:
        root: the folder.

    Raises:
        IoError: "notfound", it is not a folder.
    """

    kind = "disk"

    def __init__(self, root: str | Path) -> None:
        self._root = os.path.realpath(root)
        self._prefix = self._root if self._root.endswith("/") else self._root + "/"
        try:
            if not mode_bits.S_ISDIR(os.stat(self._root).st_mode):
                raise IoError("notfound", f"{root} is not a folder")
        except OSError as error:
            raise IoError.of(error, str(root)) from None

    def open(self, name: str, mode: str = "r") -> IO[bytes]:
        """See `Io.open`. A special file becomes a `PipeFile`, whose opening does not wait for the other end."""
        kind = _MODES.get(mode.replace("b", ""))
        if kind is None:
            raise IoError("invalidname", f"unknown mode {mode!r}; use one of {', '.join(_MODES)}")
        path = self.realpath(name)
        try:
            if is_special(path):
                return cast(IO[bytes], PipeFile(path, kind))
            return open(path, kind)
        except OSError as error:
            raise IoError.of(error, name) from None

    def open_now(self, name: str) -> int | None:
        """See `Io.open_now`."""
        path = self.realpath(name)
        if not disks.is_local(path):
            return None
        try:
            if not mode_bits.S_ISREG(os.lstat(path).st_mode):  # a link may lead to another disk, and a pipe may block
                return None
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise IoError.of(error, name) from None

    def stat_now(self, name: str) -> Stat | None:
        """See `Io.stat_now`. Returns None also for a link, because it may lead to another disk."""
        path = self.realpath(name)
        if not disks.is_local(path):
            return None
        try:
            info = os.lstat(path)
        except OSError as error:
            raise IoError.of(error, name) from None
        return None if mode_bits.S_ISLNK(info.st_mode) else _stat_of(os.path.basename(path), info)

    def disk_path(self, name: str = "") -> str:
        """See `Io.disk_path`."""
        return self.realpath(name)

    def is_local(self, name: str = "") -> bool:
        """See `Io.is_local`."""
        return disks.is_local_tree(self._root)

    def stat(self, name: str) -> Stat:
        """See `Io.stat`."""
        path = self.realpath(name)
        try:
            return _stat_of(os.path.basename(path), os.stat(path))
        except OSError as error:
            raise IoError.of(error, name) from None

    def files(self, path: str = "") -> Iterator[Stat]:
        """See `Io.files`. Entries that are removed meanwhile are skipped."""
        folder = self.realpath(path)
        try:
            names = os.listdir(folder)  # not scandir, whose entries take four times the memory
        except OSError as error:
            raise IoError.of(error, path) from None
        return _stats(folder, names)

    def sub(self, path: str) -> Io:
        """See `Io.sub`."""
        real = self.realpath(path)
        below: Io
        if os.path.isfile(real):
            below = ZipIo(real)
        else:
            below = DiskIo(real)
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
                raise IoError("notfound", f"{name} is not a regular file")
            return open(fd, "rb")
        except OSError as error:
            raise IoError.of(error, name) from None

    def read_published(self, name: str, limit_bytes: int) -> tuple[Stat, bytes]:
        """See `Io.read_published`."""
        with self.open_published(name) as file:
            return _stat_of(name.rpartition("/")[2], os.fstat(file.fileno())), file.read(limit_bytes)

    def version(self, name: str) -> Hashable:
        """Return the version that a `Stat` of the name would have, with one system call; None if it does not exist.

        It follows links, so it only shows whether a file that was `published` before has changed.
        """
        try:
            return _version(os.stat(self.realpath(name) if ".." in name else self._prefix + name))
        except (OSError, ValueError, IoError):
            return None

    def mkdir(self, name: str) -> None:
        """See `Io.mkdir`."""
        self._call(os.mkdir, name)

    def rmdir(self, name: str) -> None:
        """See `Io.rmdir`."""
        self._call(os.rmdir, name)

    def remove(self, name: str) -> None:
        """See `Io.remove`."""
        self._call(os.remove, name)

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

    def _call(self, operation: Callable[[str], None], name: str) -> None:
        try:
            operation(self.realpath(name))
        except OSError as error:
            raise IoError.of(error, name) from None

    def _published_path(self, name: str) -> str:
        requested = self.realpath(name)
        if len(requested) > _PATH_MAX:  # checked first: looking for links in client input of any length is expensive
            raise IoError("notfound", f"the path is longer than {_PATH_MAX} bytes")
        self._reject_private(requested)
        try:
            os.lstat(requested)  # one system call for a missing file; `realpath` makes one per folder
            path = os.path.realpath(requested, strict=True)
        except OSError as error:
            raise IoError.of(error, name) from None
        if path == requested or path == self._root:
            return path
        self._reject_private(path)
        if not path.startswith(self._prefix):
            raise IoError("notfound", f"{name} is a link that leads out of the folder")
        if disguised(name, path[len(self._prefix) :]):
            raise IoError("notfound", f"{name} is a link to a hidden file")
        return path


def _version(info: os.stat_result) -> Hashable:
    return info.st_mtime_ns, info.st_size, info.st_ino, info.st_dev


def _stat_of(name: str, info: os.stat_result) -> Stat:
    return Stat(name, info.st_size, int(info.st_mtime), mode_bits.S_ISDIR(info.st_mode), _version(info))


def _stats(folder: str, names: list[str]) -> Iterator[Stat]:
    for name in names:
        try:
            yield _stat_of(name, os.stat(f"{folder}/{name}"))
        except OSError:
            continue


_DAMAGED = (OSError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, NotImplementedError)
"""Errors of `zipfile` for a damaged or forged entry; ValueError for an offset before the start of the archive."""


class ZipIo(Io):
    """A ZIP archive.

    Args:
        path: path of the archive; its directory is read again when the file has changed.
        prefix: the folder in it that is the root.
        data: content of an archive in memory; `path` is then only a name.

    Raises:
        IoError: "notfound"; or "ziperror", it is not an archive, is damaged or has an entry outside of its root.
    """

    kind = "zip"

    def __init__(self, path: str | Path, prefix: str = "", data: bytes | None = None) -> None:
        self._path = str(path)
        self._prefix = prefix
        self._data = data
        self._archive = _Archive(self._path, data)
        if prefix and not self._archive.get(prefix).isdir:
            raise IoError("notfound", f"{path}: {prefix} is not a directory")

    def open(self, name: str, mode: str = "r") -> IO[bytes]:
        """See `Io.open`."""
        if mode.replace("b", "") != "r":
            raise IoError("noaccess", f"{name}: a ZIP archive is read-only")
        return self._archive.open(self._full(name))

    def read_published(self, name: str, limit_bytes: int) -> tuple[Stat, bytes]:
        """See `Io.read_published`. Unpacks at most `limit_bytes`."""
        stat = self.published(name)
        return stat, self._archive.read(self._full(name), limit_bytes)

    def stat(self, name: str) -> Stat:
        """See `Io.stat`."""
        return self._fresh().get(self._full(name))

    def files(self, path: str = "") -> Iterator[Stat]:
        """See `Io.files`."""
        return iter(self._fresh().list(self._full(path)))

    def sub(self, path: str) -> Io:
        """See `Io.sub`."""
        below = ZipIo(self._path, self._full(path), self._data)
        below.private = self.private
        return below

    def disk_path(self, name: str = "") -> str:
        """See `Io.disk_path`."""
        return self._path if self._data is None else ""

    def is_local(self, name: str = "") -> bool:
        """See `Io.is_local`."""
        return disks.is_local_tree(os.path.dirname(self._path))

    def realpath(self, name: str = "") -> str:
        """See `Io.realpath`. Returns the path of the archive, followed by the name."""
        return "/".join(filter(None, (self._path, self._full(name))))

    def _full(self, name: str) -> str:
        inside = "/".join(segments(name))
        return f"{self._prefix}/{inside}".strip("/") if inside else self._prefix

    def _fresh(self) -> _Archive:
        if self._archive.outdated():
            try:
                self._archive = _Archive(self._path, self._data)
            except IoError:
                pass  # the file is being replaced; the old content remains until the new archive is complete
        return self._archive


class _Content:
    """An unpacked entry, shared by all readers at the same time."""

    __slots__ = ("__weakref__", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data


class _Reader(io.BytesIO):
    def __init__(self, content: _Content) -> None:
        super().__init__(content.data)  # without a copy
        self.content = content


class _Archive:
    """The directory of an archive, read from one version of the file."""

    def __init__(self, path: str, data: bytes | None = None) -> None:
        self._path, self._data = path, data
        self._version = self._file_version()
        try:
            self._zip = zipfile.ZipFile(path if data is None else io.BytesIO(data))
        except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise IoError("ziperror", f"{path} is not a readable ZIP archive: {error}") from None
        self._entries: dict[str, zipfile.ZipInfo] = {}
        self._contents: WeakValueDictionary[str, _Content] = WeakValueDictionary()
        self._stats: dict[str, Stat] = {"": Stat("", 0, 0, True)}
        self._children: dict[str, list[Stat]] = {"": []}
        for info in self._zip.infolist():
            self._add(info)

    def outdated(self) -> bool:
        try:
            return self._file_version() != self._version
        except IoError:
            return False

    def get(self, name: str) -> Stat:
        stat = self._stats.get(name)
        if stat is None:
            raise IoError("notfound", f"{self._path}: {name}")
        return stat

    def list(self, name: str) -> list[Stat]:
        children = self._children.get(name)
        if children is None:
            raise IoError("notfound", f"{self._path}: {name} is not a directory")
        return list(children)

    def open(self, name: str) -> _Reader:
        content = self._contents.get(name)
        if content is None:
            content = self._contents[name] = _Content(self.read(name, MAX_ENTRY_BYTES + 1))
        return _Reader(content)

    def read(self, name: str, limit_bytes: int) -> bytes:
        if self.get(name).isdir:
            raise IoError("noaccess", f"{self._path}: {name} is a directory")
        try:
            with self._zip.open(self._entries[name]) as file:
                data = file.read(min(limit_bytes, MAX_ENTRY_BYTES + 1))
        except _DAMAGED as error:
            raise IoError("ziperror", f"{self._path}: {name}: {error}") from None
        if len(data) > MAX_ENTRY_BYTES:
            raise IoError("ziperror", f"{self._path}: {name} is larger than its recorded size")
        return data

    def _file_version(self) -> Hashable:
        if self._data is not None:
            return id(self._data)
        try:
            info = os.stat(self._path)
        except OSError as error:
            raise IoError.of(error, self._path) from None
        return info.st_mtime_ns, info.st_size, info.st_ino

    def _add(self, info: zipfile.ZipInfo) -> None:
        given = info.orig_filename  # decoded as UTF-8 with the flag for it, otherwise as code page 437
        if not info.flag_bits & _UTF8:
            with suppress(UnicodeError):  # many programs write UTF-8 without the flag
                given = given.encode("cp437").decode("utf-8")
        where = f"{self._path}: entry {given!r}"
        path = given.replace("\\", "/")
        parts = path.split("/")
        if "\0" in path or path.startswith("/") or ".." in parts or _DRIVE.match(path):
            raise IoError(
                "ziperror",
                f"{where} leads out of the archive. Names are relative to the top, without '..', a leading '/', a "
                "drive or a NUL. Create the archive inside of the application's folder",
            )
        name = "/".join(part for part in parts if part not in ("", "."))
        if not name:
            return
        if info.flag_bits & _ENCRYPTED:
            raise IoError("ziperror", f"{where} is encrypted")
        # The sizes in the directory of an archive may be forged; `read` limits the actual size too.
        is_too_dense = info.file_size > _HARMLESS_BYTES and info.file_size > MAX_RATIO * max(info.compress_size, 1)
        if info.file_size > MAX_ENTRY_BYTES or is_too_dense:
            raise IoError(
                "ziperror",
                f"{where} is too large unpacked: at most {MAX_ENTRY_BYTES} bytes and {MAX_RATIO} times its packed size",
            )
        if given.endswith(("/", "\\")):
            self._add_stat(name, Stat(name.rpartition("/")[2], 0, _mtime(info), True))
        elif mode_bits.S_ISLNK(info.external_attr >> 16):
            return  # the content of a link is a path
        else:
            self._entries[name] = info
            version = (info.CRC, info.file_size, info.header_offset, self._version)
            self._add_stat(name, Stat(name.rpartition("/")[2], info.file_size, _mtime(info), False, version))

    def _add_stat(self, name: str, stat: Stat) -> None:
        if name in self._stats:
            if self._stats[name].isdir and stat.isdir:
                return  # added before, as the parent of another entry
            raise IoError("ziperror", f"{self._path}: duplicate entry {name!r}")
        parent = name.rpartition("/")[0]
        if parent not in self._stats:
            self._add_stat(parent, Stat(parent.rpartition("/")[2], 0, stat.mtime, True))
        elif not self._stats[parent].isdir:
            raise IoError("ziperror", f"{self._path}: {parent!r} is both a file and a directory")
        self._stats[name] = stat
        self._children[parent].append(stat)
        if stat.isdir:
            self._children.setdefault(name, [])


def _mtime(info: zipfile.ZipInfo) -> int:
    try:
        return int(time.mktime((*info.date_time, 0, 0, -1)))
    except (OverflowError, ValueError):
        return 0

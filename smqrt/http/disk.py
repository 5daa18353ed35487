"""Folders of the disk as resources, with the ZIP archives in them (spec: bas-api §6)."""

from __future__ import annotations

import io
import os
import re
import stat as mode_bits
import time
import zipfile
import zlib
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import IO, cast
from weakref import WeakValueDictionary

from smqrt.http.access import disguised
from smqrt.http.blocking_io import disks
from smqrt.http.open_files import PipeFile, is_special
from smqrt.http.resources import Io, IoError, Stat, segments

_PATH_MAX = 4096  # of Linux
_MODES = {"r": "rb", "w": "wb", "a": "ab", "r+": "r+b", "w+": "w+b", "a+": "a+b"}
MAX_ENTRY_BYTES = 64 << 20
MAX_RATIO = 200  # text packs at 5 to 20; beyond lie bombs
_SMALL = 1 << 20  # below this size a high ratio does no harm
_ENCRYPTED = 1
_UTF8 = 1 << 11  # the flag of an entry
_DRIVE = re.compile(r"[A-Za-z]:(/|$)")


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
        """See `Io.open`; what is no regular file becomes a `PipeFile`, and nobody waits for its other end here."""
        kind = _MODES.get(mode.replace("b", ""))
        if kind is None:
            raise IoError("invalidname", f"mode {mode!r} is none of {', '.join(_MODES)}")
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
        if not disks.is_near(path):
            return None
        try:
            if not mode_bits.S_ISREG(os.lstat(path).st_mode):
                return None
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise IoError.of(error, name) from None

    def stat_now(self, name: str) -> Stat | None:
        """See `Io.stat_now`; a link may lead to another disk."""
        path = self.realpath(name)
        if not disks.is_near(path):
            return None
        try:
            info = os.lstat(path)
        except OSError as error:
            raise IoError.of(error, name) from None
        return None if mode_bits.S_ISLNK(info.st_mode) else _stat_of(os.path.basename(path), info)

    def place(self, name: str = "") -> str:
        """See `Io.place`."""
        return self.realpath(name)

    def is_near(self, name: str = "") -> bool:
        """See `Io.is_near`."""
        return disks.is_near_tree(self._root)

    def stat(self, name: str) -> Stat:
        """See `Io.stat`."""
        path = self.realpath(name)
        try:
            return _stat_of(os.path.basename(path), os.stat(path))
        except OSError as error:
            raise IoError.of(error, name) from None

    def files(self, path: str = "") -> Iterator[Stat]:
        """See `Io.files`; entries that vanish meanwhile are left out."""
        folder = self.realpath(path)
        try:
            names = os.listdir(folder)  # not scandir: an entry of it takes four times the memory while somebody lists
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
                raise IoError("notfound", f"{name} is no file")
            return open(fd, "rb")
        except OSError as error:
            raise IoError.of(error, name) from None

    def read_published(self, name: str, limit_bytes: int) -> tuple[Stat, bytes]:
        """See `Io.read_published`."""
        with self.open_published(name) as file:
            return _stat_of(name.rpartition("/")[2], os.fstat(file.fileno())), file.read(limit_bytes)

    def version(self, name: str) -> Hashable:
        """Return the version a `Stat` of the name would have, with one cheap call; None when there is nothing.

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


def _stats(folder: str, names: list[str]) -> Iterator[Stat]:
    for name in names:
        try:
            yield _stat_of(name, os.stat(f"{folder}/{name}"))
        except OSError:
            continue


_DAMAGED = (OSError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, NotImplementedError)
"""What `zipfile` raises for an entry that lies; ValueError for one before the beginning of the archive."""


class ZipIo(Io):
    """A ZIP archive.

    Args:
        path: the file; read again when it has changed.
        prefix: the folder in it that is the root.
        data: its content, when it lies on no disk; `path` is just a name then.

    Raises:
        IoError: "notfound", or "ziperror" when it is no archive, is damaged or has an entry that could leave the root.
    """

    kind = "zip"

    def __init__(self, path: str | Path, prefix: str = "", data: bytes | None = None) -> None:
        self._path = str(path)
        self._prefix = prefix
        self._data = data
        self._archive = _Archive(self._path, data)
        if prefix and not self._archive.get(prefix).isdir:
            raise IoError("notfound", f"{path}: {prefix} is no directory")

    def open(self, name: str, mode: str = "r") -> IO[bytes]:
        """See `Io.open`."""
        if mode.replace("b", "") != "r":
            raise IoError("noaccess", f"{name}: a ZIP archive is read only")
        return self._archive.open(self._full(name))

    def read_published(self, name: str, limit_bytes: int) -> tuple[Stat, bytes]:
        """See `Io.read_published`; unpacks no more than is asked for."""
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

    def place(self, name: str = "") -> str:
        """See `Io.place`."""
        return self._path if self._data is None else ""

    def is_near(self, name: str = "") -> bool:
        """See `Io.is_near`."""
        return disks.is_near_tree(os.path.dirname(self._path))

    def realpath(self, name: str = "") -> str:
        """See `Io.realpath`: the path of the archive with the name behind it."""
        return "/".join(filter(None, (self._path, self._full(name))))

    def _full(self, name: str) -> str:
        inside = "/".join(segments(name))
        return f"{self._prefix}/{inside}".strip("/") if inside else self._prefix

    def _fresh(self) -> _Archive:
        if self._archive.outdated():
            try:
                self._archive = _Archive(self._path, self._data)
            except IoError:
                pass  # being replaced right now: the old content stays until the new one is whole
        return self._archive


class _Content:
    """An entry, unpacked; all who read it at the same time share one."""

    __slots__ = ("__weakref__", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data


class _Reader(io.BytesIO):
    def __init__(self, content: _Content) -> None:
        super().__init__(content.data)  # shares the bytes
        self.content = content


class _Archive:
    """One state of the file on disk, with its directory as a dict."""

    def __init__(self, path: str, data: bytes | None = None) -> None:
        self._path, self._data = path, data
        self._mark = self._file_mark()
        try:
            self._zip = zipfile.ZipFile(path if data is None else io.BytesIO(data))
        except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise IoError("ziperror", f"{path} is no readable ZIP archive: {error}") from None
        self._infos: dict[str, zipfile.ZipInfo] = {}
        self._contents: WeakValueDictionary[str, _Content] = WeakValueDictionary()
        self._stats: dict[str, Stat] = {"": Stat("", 0, 0, True)}
        self._children: dict[str, list[Stat]] = {"": []}
        for info in self._zip.infolist():
            self._add(info)

    def outdated(self) -> bool:
        try:
            return self._file_mark() != self._mark
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
            raise IoError("notfound", f"{self._path}: {name} is no directory")
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
            with self._zip.open(self._infos[name]) as file:
                data = file.read(min(limit_bytes, MAX_ENTRY_BYTES + 1))
        except _DAMAGED as error:
            raise IoError("ziperror", f"{self._path}: {name}: {error}") from None
        if len(data) > MAX_ENTRY_BYTES:
            raise IoError("ziperror", f"{self._path}: {name} is larger than it says")
        return data

    def _file_mark(self) -> Hashable:
        if self._data is not None:
            return id(self._data)
        try:
            info = os.stat(self._path)
        except OSError as error:
            raise IoError.of(error, self._path) from None
        return info.st_mtime_ns, info.st_size, info.st_ino

    def _add(self, info: zipfile.ZipInfo) -> None:
        given = _given_name(info)
        name = self._inner_name(given)
        if not name:
            return
        self._check(info, f"{self._path}: entry {given!r}")
        if given.endswith(("/", "\\")):
            self._enter(name, Stat(name.rpartition("/")[2], 0, _mtime(info), True))
        elif mode_bits.S_ISLNK(info.external_attr >> 16):
            return  # a link's text is no content
        else:
            self._infos[name] = info
            version = (info.CRC, info.file_size, info.header_offset, self._mark)
            self._enter(name, Stat(name.rpartition("/")[2], info.file_size, _mtime(info), False, version))

    def _inner_name(self, given: str) -> str:
        """Return the name of an entry from the top of the archive; empty for the top itself.

        Raises:
            IoError: it leads out of the archive.
        """
        path = given.replace("\\", "/")
        parts = path.split("/")
        if "\0" in path or path.startswith("/") or ".." in parts or _DRIVE.match(path):
            raise IoError(
                "ziperror",
                f"{self._path}: entry {given!r} has a name that leads out of the archive; names start at its top, "
                "without '..', a '/' in front, a drive or a NUL. Pack it again inside of the application's folder",
            )
        return "/".join(part for part in parts if part not in ("", "."))

    def _check(self, info: zipfile.ZipInfo, where: str) -> None:
        if info.flag_bits & _ENCRYPTED:
            raise IoError("ziperror", f"{where} is encrypted")
        too_dense = info.file_size > _SMALL and info.file_size > MAX_RATIO * max(info.compress_size, 1)
        if info.file_size > MAX_ENTRY_BYTES or too_dense:
            raise IoError(
                "ziperror",
                f"{where} is too large unpacked: at most {MAX_ENTRY_BYTES} bytes and {MAX_RATIO} times its packed size",
            )

    def _enter(self, name: str, stat: Stat) -> None:
        if name in self._stats:
            if self._stats[name].isdir and stat.isdir:
                return  # made already, for something inside it
            raise IoError("ziperror", f"{self._path}: entry {name!r} is there twice")
        parent = name.rpartition("/")[0]
        if parent not in self._stats:
            self._enter(parent, Stat(parent.rpartition("/")[2], 0, stat.mtime, True))
        elif not self._stats[parent].isdir:
            raise IoError("ziperror", f"{self._path}: {parent!r} is both a file and a directory")
        self._stats[name] = stat
        self._children[parent].append(stat)
        if stat.isdir:
            self._children.setdefault(name, [])


def _given_name(info: zipfile.ZipInfo) -> str:
    """Return the name of an entry as it was written: UTF-8 also without the flag, else code page 437."""
    if info.flag_bits & _UTF8:
        return info.orig_filename
    try:
        return info.orig_filename.encode("cp437").decode("utf-8")
    except UnicodeError:
        return info.orig_filename


def _mtime(info: zipfile.ZipInfo) -> int:
    try:
        return int(time.mktime((*info.date_time, 0, 0, -1)))
    except (OverflowError, ValueError):
        return 0

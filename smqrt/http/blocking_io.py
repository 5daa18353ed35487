"""File operations that may block, called from greenlets through threads."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

from smqrt.http.resources import Io, IoError
from smqrt.loop.threads import DiskThreads

# ---- Local disks: the loop itself may stat and open files on a file system of this machine's kernel. All other file
# systems (network, FUSE) may block for long, so threads use them.

_LOCAL = """
aufs bcachefs btrfs devtmpfs erofs exfat ext2 ext3 ext4 f2fs iso9660 jfs nilfs2 ntfs3 overlay ramfs rootfs squashfs
tmpfs udf vfat xfs zfs"""
LOCAL_TYPES = frozenset(_LOCAL.split())
"""File systems that need neither a network nor a program. All others are slow, including `proc` and `sysfs`, where
reading a file may wait for an event. On systems without a table of mounts, every file system is slow."""
CACHED_S = 5.0
"""How long the mount of a folder is cached. A new mount over it takes effect after this time."""
MAX_FOLDERS = 4096
_MOUNT_TABLE = "/proc/self/mountinfo"
_OCTAL_ESCAPE = re.compile(r"\\([0-7]{3})")

T = TypeVar("T")


def read_mounts() -> dict[str, bool]:
    """Return the mount points, each with whether it is local; empty when the system has no mount table."""
    try:
        with open(_MOUNT_TABLE, "rb") as table:
            lines = os.fsdecode(table.read()).splitlines()
    except OSError:
        return {}
    mounts = {}
    for line in lines:  # id parent device root place options… - type source options
        fields, _, rest = line.partition(" - ")
        place = _OCTAL_ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields.split(" ")[4])
        mounts[place] = rest.partition(" ")[0] in LOCAL_TYPES
    return mounts


def mount_of(path: str, mounts: dict[str, bool]) -> str:
    """Return the mount point of an absolute path without links."""
    while path not in mounts and path not in ("", "/"):
        path = path.rpartition("/")[0]
    return path or "/"


class Disks:
    """Cache of the mounts of recently used folders, with the threads of each disk.

    Args:
        mounts: returns the mount table, as `read_mounts` does.
    """

    def __init__(self, mounts: Callable[[], dict[str, bool]] = read_mounts) -> None:
        self._mounts = mounts
        self._folders: dict[str, tuple[float, str, bool]] = {}  # expiry, mount, whether it is local
        self._trees: dict[str, tuple[float, bool]] = {}  # expiry, whether all of it is local
        self._threads: dict[str, DiskThreads] = {}

    def is_local(self, path: str) -> bool:
        """Return whether the folder of `path` is known to be local, so that `lstat` does not block.

        The name itself may be a link to another disk.
        """
        known = self._folders.get(path[: path.rfind("/")])
        return known is not None and known[2] and monotonic() < known[0]

    def is_local_tree(self, root: str) -> bool:
        """Return whether everything below the folder `root`, a path without links, is local."""
        known = self._trees.get(root)
        if known is None or monotonic() > known[0]:
            mounts = self._mounts()
            below = root.rstrip("/") + "/"
            is_local = mounts.get(mount_of(root, mounts), False)
            is_local = is_local and all(local for place, local in mounts.items() if place.startswith(below))
            _clear_if_full(self._trees)
            known = self._trees[root] = monotonic() + CACHED_S, is_local
        return known[1]

    def find_mount(self, path: str) -> None:
        """Cache the mount of the folder of `path`; blocks as long as the disk does."""
        folder = path[: path.rfind("/")]
        mounts = self._mounts()
        mount = mount_of(os.path.realpath(folder or "/"), mounts)
        _clear_if_full(self._folders)
        self._folders[folder] = monotonic() + CACHED_S, mount, mounts.get(mount, False)

    def threads(self, path: str) -> DiskThreads:
        """Return the threads for operations on `path`. Folders whose mount is unknown share threads of their own."""
        known = self._folders.get(path[: path.rfind("/")])
        mount = known[1] if known is not None else "?"
        found = self._threads.get(mount)
        if found is None:
            name = mount if known is not None else "of new folders"
            found = self._threads[mount] = DiskThreads(name)
        return found

    def doing(self, path: str, function: Callable[..., T]) -> Callable[..., T]:
        """Return `function`, or one that finds the mount of `path` first where it is unknown. To be called in a
        thread."""
        known = self._folders.get(path[: path.rfind("/")])
        if known is not None and monotonic() < known[0]:
            return function

        def call(*args: object) -> T:
            self.find_mount(path)
            return function(*args)

        return call

    def call(self, path: str, function: Callable[..., T], *args: object) -> T:
        """Call a function that blocks on the disk of `path` in a thread of that disk; blocks this greenlet.

        Returns:
            what the function returns.

        Raises:
            TimeoutError: the disk did not respond in time.
            Exception: any that the function raises.
        """
        return self.threads(path).call(self.doing(path, function), *args)


def _clear_if_full(known: dict[str, T]) -> None:
    if len(known) >= MAX_FOLDERS:
        known.clear()


disks = Disks()
"""The disks of this process."""


def call_blocking(io: Io, name: str, function: Callable[..., T], *args: object) -> T:
    """Call `function(*args)`, which uses the file `name` of `io` and may block, in a thread; blocks this greenlet.

    The functions of an io with `in_loop` are called directly.

    Returns:
        what the function returns.

    Raises:
        IoError: "ioerror", the disk did not respond in time.
        Exception: any that the function raises.
    """
    if io.in_loop:
        return function(*args)
    try:
        return disks.call(io.place(name), function, *args)
    except TimeoutError as error:
        raise IoError.of(error, name) from None


def call_blocking_unless_local(io: Io, name: str, function: Callable[..., T], *args: object) -> T:
    """Call like `call_blocking`, but directly when the file is on a local disk. For functions that are quick there."""
    if io.in_loop or io.is_local(name):
        return function(*args)
    return call_blocking(io, name, function, *args)

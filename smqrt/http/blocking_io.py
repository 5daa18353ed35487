"""The way to an io from a greenlet of the loop: what may take time is done where it holds nobody else."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

from smqrt.http.resources import Io, IoError
from smqrt.loop.threads import DiskThreads

# ---- Disks that answer at once: what lies on a file system of this machine's kernel may be looked at by the loop
# itself,
# all other file systems (of a network, of a FUSE program) are for threads.

_LOCAL = """
aufs bcachefs btrfs devtmpfs erofs exfat ext2 ext3 ext4 f2fs iso9660 jfs nilfs2 ntfs3 overlay ramfs rootfs squashfs
tmpfs udf vfat xfs zfs"""
LOCAL_TYPES = frozenset(_LOCAL.split())
"""File systems that need neither a network nor a program. What isn't here is slow, `proc` and `sysfs` among it, where
reading a file may wait for an event. On systems without a table of mounts everything is."""
FRESH_S = 5.0
"""How long is relied on what a folder was: mounting something over it takes effect so late."""
MAX_FOLDERS = 4096
_MOUNTS = "/proc/self/mountinfo"
_OCTAL = re.compile(r"\\([0-7]{3})")

T = TypeVar("T")


def read_mounts() -> dict[str, bool]:
    """Return where something is mounted, and whether that is local; empty when the system has no such table."""
    try:
        with open(_MOUNTS, "rb") as table:
            lines = os.fsdecode(table.read()).splitlines()
    except OSError:
        return {}
    mounts = {}
    for line in lines:  # id parent device root place options… - type source options
        fields, _, rest = line.partition(" - ")
        place = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields.split(" ")[4])
        mounts[place] = rest.partition(" ")[0] in LOCAL_TYPES
    return mounts


def mount_of(path: str, mounts: dict[str, bool]) -> str:
    """Return the mount that an absolute path without links leads to."""
    while path not in mounts and path not in ("", "/"):
        path = path.rpartition("/")[0]
    return path or "/"


class Disks:
    """What is known of the folders that were used lately, and the threads of each disk.

    Args:
        mounts: gives the table of mounts.
    """

    def __init__(self, mounts: Callable[[], dict[str, bool]] = read_mounts) -> None:
        self._mounts = mounts
        self._folders: dict[str, tuple[float, str, bool]] = {}  # until when, mount, whether it is local
        self._trees: dict[str, tuple[float, bool]] = {}
        self._threads: dict[str, DiskThreads] = {}

    def is_near(self, path: str) -> bool:
        """Return whether the folder of `path` is known to be local, so that looking at the name in it takes no time.
        The name itself may be a link that leads elsewhere."""
        known = self._folders.get(path[: path.rfind("/")])
        return known is not None and known[2] and monotonic() < known[0]

    def is_near_tree(self, root: str) -> bool:
        """Return whether everything below a folder is local; `root` has no links in it."""
        known = self._trees.get(root)
        if known is None or monotonic() > known[0]:
            mounts = self._mounts()
            below = root.rstrip("/") + "/"
            is_near = mounts.get(mount_of(root, mounts), False)
            is_near = is_near and all(local for place, local in mounts.items() if place.startswith(below))
            _make_room(self._trees)
            known = self._trees[root] = monotonic() + FRESH_S, is_near
        return known[1]

    def learn(self, path: str) -> None:
        """Find out where the folder of `path` lies; may take as long as the disk takes."""
        folder = path[: path.rfind("/")]
        mounts = self._mounts()
        mount = mount_of(os.path.realpath(folder or "/"), mounts)
        _make_room(self._folders)
        self._folders[folder] = monotonic() + FRESH_S, mount, mounts.get(mount, False)

    def threads(self, path: str) -> DiskThreads:
        """Return the threads for operations on `path`; those of folders that are not known are their own."""
        known = self._folders.get(path[: path.rfind("/")])
        mount = known[1] if known is not None else "?"
        found = self._threads.get(mount)
        if found is None:
            name = mount if known is not None else "of folders that are new"
            found = self._threads[mount] = DiskThreads(name)
        return found

    def doing(self, path: str, function: Callable[..., T]) -> Callable[..., T]:
        """Return `function` so that it learns where `path` lies first, if that is not known; for a thread."""
        known = self._folders.get(path[: path.rfind("/")])
        if known is not None and monotonic() < known[0]:
            return function

        def call(*args: object) -> T:
            self.learn(path)
            return function(*args)

        return call

    def call(self, path: str, function: Callable[..., T], *args: object) -> T:
        """Return what a function gives that waits for the disk where `path` lies: it is called in a thread, and this
        greenlet waits. Raises what it raises, and TimeoutError."""
        return self.threads(path).call(self.doing(path, function), *args)


def _make_room(known: dict[str, T]) -> None:
    if len(known) >= MAX_FOLDERS:
        known.clear()


disks = Disks()
"""Those of this process."""


def reach(io: Io, name: str, function: Callable[..., T], *args: object) -> T:
    """Return what `function(*args)` gives, which does something with the file `name` of `io` and may take long: in a
    thread, and this greenlet waits; an io of the loop blocks the greenlet itself.

    Raises:
        IoError: "ioerror", the disk did not answer in time.
        what the function raises.
    """
    if io.in_loop:
        return function(*args)
    try:
        return disks.call(io.place(name), function, *args)
    except TimeoutError as error:
        raise IoError.of(error, name) from None


def reach_near(io: Io, name: str, function: Callable[..., T], *args: object) -> T:
    """The same for what is soon done on a disk of this machine: there it needs no thread. Raises as `reach`."""
    if io.in_loop or io.is_near(name):
        return function(*args)
    return reach(io, name, function, *args)

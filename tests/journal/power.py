"""Disks that lose what was not synced: in this process by noting what was, and an ext4 that is shut down."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
_WITHOUT_LOG = 2


class SyncedDisk:
    """What a folder has after a power failure, when the disk has kept nothing but what it was told to.

    Args:
        monkeypatch: for `os.fsync` and `os.fdatasync`.
        root: what is there now, the disk has.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self._held: dict[int, int] = {}  # so that no inode comes again
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        monkeypatch.setattr(os, "fsync", self._sync)
        monkeypatch.setattr(os, "fdatasync", self._sync)
        self.begin(root)

    def begin(self, root: Path) -> None:
        """From now on it is about another folder."""
        self.close()
        self.root = root
        for path in [root, *root.rglob("*")]:
            fd = os.open(path, os.O_RDONLY)
            self._sync(fd)
            os.close(fd)

    def _sync(self, fd: int) -> None:
        found = os.fstat(fd)
        if found.st_ino not in self._held:
            self._held[found.st_ino] = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        if stat.S_ISDIR(found.st_mode):
            with os.scandir(fd) as entries:
                self._names[found.st_ino] = {entry.name: entry.inode() for entry in entries}
        else:
            with os.fdopen(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY), "rb") as file:
                self._contents[found.st_ino] = file.read()

    def fail(self, to: Path) -> None:
        """Makes a folder with what there is after a power failure."""
        folders = {path.stat().st_ino for path in [self.root, *self.root.rglob("*")] if path.is_dir()}
        self._restore(self.root.stat().st_ino, to, folders)

    def _restore(self, inode: int, to: Path, folders: set[int]) -> None:
        to.mkdir()
        for name, child in dict(self._names.get(inode, {})).items():
            if child in folders:
                self._restore(child, to / name, folders)
            else:
                (to / name).write_bytes(self._contents.get(child, b""))

    def close(self) -> None:
        for fd in self._held.values():
            os.close(fd)
        self._held, self._contents, self._names = {}, {}, {}


class Ext4:
    """A file system of its own, which takes root to mount."""

    def __init__(self, folder: Path) -> None:
        self.at, self._image = folder / "journal", folder / "image"
        self.at.mkdir()
        with self._image.open("wb") as file:
            file.truncate(32 << 20)
        _run("mkfs.ext4", "-q", "-F", self._image)
        self.mount()

    def mount(self) -> None:
        _run("mount", "-o", "loop,errors=remount-ro", self._image, self.at)

    def abort(self) -> None:
        """It ends at this moment, like after an error in its log: what is not on the disk is lost."""
        fd = os.open(self.at, os.O_RDONLY)
        fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _WITHOUT_LOG))
        os.close(fd)

    def unmount(self) -> None:
        _run("umount", self.at)


def _run(*words: str | Path) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words[0]} takes root and loop devices: {done.stderr}"


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Ext4]:
    disk = Ext4(tmp_path)
    yield disk
    subprocess.run(["umount", "-l", disk.at], check=False, capture_output=True)

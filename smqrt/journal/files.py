"""Files of a journal: readable by their owner only, since payloads may be secrets; written whole; and their checksums.

Checksums are CRC-32, as zlib has it. The pages of Parquet files have their own; what says where they are has none. So
the manifest keeps the CRC-32 of the whole file, for `journal verify`, and of its footer, for every reader.
"""

from __future__ import annotations

import errno
import os
import secrets
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

JsonObject = dict[str, Any]
"""An object of a JSON text; its values are of any kind until whoever reads it has looked."""
FILE_MODE, FOLDER_MODE = 0o600, 0o700
_FUTURE_S = 60.0
"""Clocks of two machines that share a disk may differ by less."""


def make_folder(path: Path) -> None:
    """Makes a folder and those above it that are missing; what is there keeps its mode.

    Raises:
        OSError: it can't be made.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(FOLDER_MODE, exist_ok=True)
    path.mkdir(exist_ok=True)  # raises when it is a file


@contextmanager
def there(folder: Path) -> Iterator[None]:
    """Makes sure that a folder is there before and after something in it is looked at: what is listed while it is being
    moved looks as if there were nothing.

    Raises:
        FileNotFoundError: it isn't.
        OSError: it can't be looked at.
    """
    before = folder.stat()
    yield
    after = folder.stat()
    if (before.st_dev, before.st_ino) != (after.st_dev, after.st_ino):
        raise FileNotFoundError(errno.ENOENT, "another folder is in its place", str(folder))


def is_journal(folder: Path) -> bool:
    """Says whether there is a journal in a folder: one that is empty is what remains when a volume is unmounted."""
    return any((folder / name).exists() for name in ("wal", "manifest.json"))


def touch(path: Path) -> None:
    """Makes a file that only its owner can read, for those who open it by name; one that is there stays as it is.

    Raises:
        OSError: it can't be made.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))


def age_s(path: Path) -> float:
    """Returns how long ago a file was changed, seconds. One that was changed in the future, by a clock that was wrong,
    counts from now on.

    Raises:
        FileNotFoundError: it is gone.
    """
    found_s = time.time() - path.stat().st_mtime
    if found_s >= -_FUTURE_S:
        return found_s
    with suppress(PermissionError):
        os.utime(path)
    return 0.0


def sync_folder(folder: Path) -> None:
    """Has the disk keep the names in a folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_beside(path: Path, content: bytes, sync: bool = True) -> Path:
    """Writes a file beside the one that is meant, and returns its path: to be linked or renamed when it is whole.

    Args:
        path: the file that is meant.
        content: all of it.
        sync: the disk has it when this returns.

    Raises:
        OSError: the disk is full or broken; nothing is left behind.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        touch(beside)
        with beside.open("wb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    return beside


def write_whole(path: Path, content: bytes, sync: bool = True) -> None:
    """Writes a file that is whole or as before, whatever happens. Arguments and errors as for `write_beside`."""
    beside = write_beside(path, content, sync)
    try:
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


try:
    from zlib_ng.zlib_ng import crc32 as crc32  # 13 times as fast: zlib's was an eighth of what recording cost the hub
except ImportError:  # on a cluster that was sent smqrt's own files only
    from zlib import crc32 as crc32

MAGIC = b"PAR1"
_END = struct.Struct("<I4s")
"""Behind the footer: its length, and `MAGIC`."""
_PIECE_BYTES = 1 << 20


def crc32_of_file(path: Path) -> int:
    """Returns the CRC-32 of a file.

    Raises:
        OSError: it can't be read.
    """
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            crc = crc32(piece, crc)
    return crc


def crc32_of_footer(path: Path) -> int:
    """Returns the CRC-32 of a Parquet file's footer, with what stands behind it. Raises as `footer`."""
    with path.open("rb") as file:
        return crc32(footer(file))


def footer(file: IO[bytes]) -> bytes:
    """Returns the footer of a Parquet file, with what stands behind it.

    Raises:
        ValueError: there is none.
        OSError: it can't be read.
    """
    size = file.seek(0, os.SEEK_END)
    if size < len(MAGIC) + _END.size:
        raise ValueError(f"it has {size} bytes")
    file.seek(size - _END.size)
    length, magic = _END.unpack(file.read(_END.size))
    if magic != MAGIC or length > size - _END.size - len(MAGIC):
        raise ValueError("no footer is at its end")
    file.seek(size - _END.size - length)
    return file.read(length + _END.size)


def check_footer(file: IO[bytes], known: int | None) -> None:
    """Compares the footer of a Parquet file with its checksum, where that is known.

    Raises:
        ValueError: it's damaged.
        OSError: it can't be read.
    """
    if known is not None and crc32(footer(file)) != known:
        raise ValueError("the checksum of its footer is wrong")
    file.seek(0)

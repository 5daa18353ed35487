"""Checksums: CRC-32, as zlib has it.

The pages of Parquet files have their own; what says where they are has none. So the manifest keeps the CRC-32 of the
whole file, for `journal verify`, and of its footer, for every reader.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import IO

try:
    from zlib_ng.zlib_ng import crc32 as crc32  # 13 times as fast: zlib's was an eighth of what recording cost the hub
except ImportError:  # on a cluster that was sent smqrt's own files only
    from zlib import crc32 as crc32

MAGIC = b"PAR1"
_END = struct.Struct("<I4s")
"""Behind the footer: its length, and `MAGIC`."""
_PIECE_BYTES = 1 << 20


def of_file(path: Path) -> int:
    """Returns the CRC-32 of a file.

    Raises:
        OSError: it can't be read.
    """
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            crc = crc32(piece, crc)
    return crc


def of_footer(path: Path) -> int:
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

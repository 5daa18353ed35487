"""Source lines around the error of an application."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from smqrt.http.disk import ZipIo
from smqrt.http.open_files import disks
from smqrt.http.resources import IoError
from smqrt.operations.api_pages import Snapshot
from smqrt.printable import printable

_CONTEXT_LINES = 4
"""Lines shown before and after the line of the error."""
_MAX_FILE_BYTES = 1 << 20
_MAX_LINE_CHARS = 200
_LOCATION = re.compile(r"([^\s:][^:\n]{0,300}):(\d{1,7}):")


def source_lines(application: Path, error: str) -> Snapshot | None:
    """Return the source lines around the error of an application.

    Args:
        application: its folder or ZIP file.
        error: the text of its error, which starts with file and line: `led/.preload:3: ...`.

    Returns:
        `file`, `line` and `lines`, pairs of number and text; None when the error names no readable file of the
        application.
    """
    location = _LOCATION.match(error)
    if location is None:
        return None

    def read(name: PurePosixPath) -> bytes:
        if application.is_dir():
            path = application / name
            if not os.path.realpath(path).startswith(os.path.realpath(application) + os.sep):
                raise FileNotFoundError(path)  # a symbolic link out of the folder
            with path.open("rb") as file:
                return file.read(_MAX_FILE_BYTES)
        with ZipIo(application).open(str(name)) as member:
            return member.read(_MAX_FILE_BYTES)

    label, line = location[1], int(location[2])
    name = _name_within(application, PurePosixPath(label))
    if name is None:
        return None
    try:
        data = disks.call(str(application), read, name)
    except (OSError, IoError, TimeoutError):
        return None
    lines = data.decode("utf-8", "replace").splitlines()
    if not 1 <= line <= len(lines):
        return None
    first = max(line - _CONTEXT_LINES, 1)
    shown = lines[first - 1 : line + _CONTEXT_LINES]
    return {
        "file": printable(label),
        "line": line,
        "lines": [[first + at, printable(text[:_MAX_LINE_CHARS])] for at, text in enumerate(shown)],
    }


def _name_within(application: Path, file: PurePosixPath) -> PurePosixPath | None:
    """Return the path of a file relative to its application. Errors name it with the folder: "led/.preload"."""
    if file.is_absolute():
        folder = application.resolve()
        return file.relative_to(folder) if file.is_relative_to(folder) else None
    name = PurePosixPath(*file.parts[1:])
    return name if name.parts and ".." not in name.parts else None

"""The lines of an application's file around the one at which it failed."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from smqrt.http.disk import ZipIo
from smqrt.http.local_disks import disks
from smqrt.http.resources import IoError
from smqrt.operations.snapshots import Snapshot
from smqrt.printable import printable

AROUND = 4
"""Lines shown before and behind it."""
_FILE_BYTES = 1 << 20
_LINE_CHARACTERS = 200
_PLACE = re.compile(r"([^\s:][^:\n]{0,300}):(\d{1,7}):")


def place_of(error: str) -> tuple[str, int] | None:
    """Returns file and line with which the text of an error begins: `led/.preload:3: ...`; None when it has none."""
    found = _PLACE.match(error)
    return (found[1], int(found[2])) if found else None


def around(application: Path, error: str) -> Snapshot | None:
    """Returns the lines at which an application failed.

    Args:
        application: its folder or ZIP file.
        error: the text of its error.

    Returns:
        `file`, `line` and `lines`, pairs of number and text; None when the error names no file of the application, or
        that can't be read.
    """
    place = place_of(error)
    if place is None:
        return None
    label, line = place
    name = _within(application, PurePosixPath(label))
    if name is None:
        return None
    try:
        data = disks.call(str(application), _read, application, name)
    except (OSError, IoError, TimeoutError):
        return None
    lines = data.decode("utf-8", "replace").splitlines()
    if not 1 <= line <= len(lines):
        return None
    first = max(line - AROUND, 1)
    shown = lines[first - 1 : line + AROUND]
    return {
        "file": printable(label),
        "line": line,
        "lines": [[first + at, printable(text[:_LINE_CHARACTERS])] for at, text in enumerate(shown)],
    }


def _within(application: Path, file: PurePosixPath) -> PurePosixPath | None:
    """The name of a file in its application; an error says "led/.preload", with the folder's name first."""
    if file.is_absolute():
        folder = application.resolve()
        return file.relative_to(folder) if file.is_relative_to(folder) else None
    name = PurePosixPath(*file.parts[1:])
    return name if name.parts and ".." not in name.parts else None


def _read(application: Path, name: PurePosixPath) -> bytes:
    if application.is_dir():
        path = application / name
        if not os.path.realpath(path).startswith(os.path.realpath(application) + os.sep):
            raise FileNotFoundError(path)  # a link out of the folder
        with path.open("rb") as file:
            return file.read(_FILE_BYTES)
    with ZipIo(application).open(str(name)) as member:
        return member.read(_FILE_BYTES)

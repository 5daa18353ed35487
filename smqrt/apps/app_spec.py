"""An application that the server is to load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class AppSpec:
    """An application to load.

    Attributes:
        name: the path segment of its mount; empty for the root.
        path: a folder or a ZIP file.
        priority: -127 to 127; directories with a higher priority get a request first.
        inner: the folder inside the ZIP file; empty for its top.
        entry: its number in the table `apps` of mako.conf; None if it is not from there.
    """

    name: str
    path: Path
    priority: int = 0
    inner: str = ""
    entry: int | None = None

"""An application to load, as the command line names it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class AppSpec:
    """One application to load.

    Attributes:
        name: the path segment it is mounted under; empty for the root.
        path: a folder or a ZIP file.
        priority: -127 to 127, higher is asked first.
        inner: the folder inside the ZIP file; empty for its top.
        entry: its number in the table `apps` of mako.conf; None when that does not name it.
    """

    name: str
    path: Path
    priority: int = 0
    inner: str = ""
    entry: int | None = None

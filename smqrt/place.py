"""Which application's own code is running: what a relative default such as `journal=True` is relative to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

application_folder: ContextVar[Path | None] = ContextVar("application_folder", default=None)
"""The folder of the application whose `.preload`, `.preload.py` or `onunload` this greenlet runs, absolute; None for an
application in a ZIP file and everywhere else. Greenlets and Lua activities started from there have none of it."""


def folder() -> Path:
    """Returns the folder of the running application, the current folder when there is none."""
    return application_folder.get() or Path.cwd()


@contextmanager
def inside(path: Path) -> Iterator[None]:
    """Marks this greenlet as running the code of the application at `path`, a folder or a ZIP file."""
    token = application_folder.set(path.resolve() if path.is_dir() else None)
    try:
        yield
    finally:
        application_folder.reset(token)

"""The application whose own code is running: the folder that a relative default such as `journal=True` starts at, and
what ends with it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any, Protocol
from weakref import WeakSet

log = logging.getLogger("smqrt")


class Closable(Protocol):
    """What ends with the application that made it."""

    def close(self) -> object:
        """End it; may block. A second call does nothing. `_end_with_app` is called instead, if it has that."""


class AppScope:
    """What a running application has made.

    Args:
        folder: the application's, absolute; None when it is a ZIP file.
        name: by which its hubs are found again, in the next process too.

    Attributes:
        when_loaded: called once its code has run without a mistake.
        hubs_made: how many hubs without a name it has made.
        package: the name of the package its Python modules are in, empty without any.
        names: what `smqrt.app` gives its code: `app`, `dir`, `io`.
        kept: what the server keeps in memory for it.
        is_internal: it is part of the server: operators are not shown its hubs.
        is_unloading: its `onunload` is being run, or has been.
    """

    def __init__(self, folder: Path | None, name: str = "") -> None:
        self.folder = folder
        self.name = name
        self.hubs_made = 0
        self.when_loaded: list[Callable[[], None]] = []
        self.package = ""
        self.names: dict[str, object] = {}
        self.kept: dict[object, object] = {}
        self.is_internal = self.is_unloading = False
        self._path_before = set(sys.path)
        self._things: WeakSet[Closable] = WeakSet()
        self._packages_before = _packages()

    def close(self) -> None:
        """Close all of it, in no order, and forget the modules it imported from its folder, so that it finds their
        present state when it starts again; may block. Errors are logged.
        """
        for thing in list(self._things):
            try:
                getattr(thing, "_end_with_app", thing.close)()
            except Exception:
                log.exception("closing %r failed", thing)
        self._things.clear()
        self.kept.clear()
        sys.path[:] = [one for one in sys.path if one in self._path_before or not _lies_in(self.folder, one)]
        for name, module in list(sys.modules.items()):
            ours = name.partition(".")[0] not in self._packages_before
            if ours and _lies_in(self.folder, getattr(module, "__file__", None)):
                del sys.modules[name]

    def is_on_path(self) -> bool:
        """Whether it has put its own folder on `sys.path`: then its modules are those of the process."""
        folder = str(self.folder)
        return folder in sys.path and folder not in self._path_before

    def has_file(self, file: str) -> bool:
        """Whether a module's file is one of its own."""
        return _lies_in(self.folder, file)

    def add(self, thing: Closable) -> None:
        """Have `close` close `thing`, unless nobody refers to it any more."""
        self._things.add(thing)


current_app: ContextVar[AppScope | None] = ContextVar("current", default=None)
"""The application whose code this greenlet runs: `.preload`, `.preload.py`, `onunload`, a page, a directory function;
None everywhere else. Greenlets and Lua activities started from there have none."""


def base_folder() -> Path:
    """Returns the folder of the running application, the current folder when there is none."""
    return application_folder() or Path.cwd()


def application_folder() -> Path | None:
    """Returns the folder of the running application; None for one in a ZIP file and outside of applications."""
    app = current_app.get()
    return app.folder if app else None


def close_with_app(thing: Closable) -> None:
    """Let `thing` end with the running application, if there is one. What a module from outside of its folder makes
    while it is imported does not: such a module outlives the application.
    """
    app = current_app.get()
    if app and not _importing_from_elsewhere(app):
        app.add(thing)


def _importing_from_elsewhere(app: AppScope) -> bool:
    frame: FrameType | None = sys._getframe()
    while frame:
        spec: Any = frame.f_globals.get("__spec__")
        if getattr(spec, "_initializing", False) and not _is_own(app, spec):
            return True
        frame = frame.f_back
    return False


def _is_own(app: AppScope, spec: Any) -> bool:
    return spec.name.partition(".")[0] == app.package or _lies_in(app.folder, spec.origin)


def _lies_in(home: Path | None, file: str | None) -> bool:
    """Whether a module's file is an application's own; what was installed into an environment in its folder is not."""
    if home is None or file is None or not Path(file).is_relative_to(home):
        return False
    return not any(part == "site-packages" or part.startswith(".") for part in Path(file).relative_to(home).parts)


def _packages() -> set[str]:
    return {name.partition(".")[0] for name in list(sys.modules)}


@contextmanager
def running_app(app: AppScope) -> Iterator[None]:
    """Marks this greenlet as running the code of an application."""
    token = current_app.set(app)
    try:
        yield
    finally:
        current_app.reset(token)

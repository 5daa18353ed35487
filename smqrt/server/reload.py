"""Changes of the code of applications, found by looking at their files: works on every mount, needs no thread.

Pages are read anew at every change by themselves; what needs a restart is `.preload` and the modules.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import gevent

from smqrt.apps.lua.vm import Vm
from smqrt.errors import SmqrtError

log = logging.getLogger("smqrt")

POLL_S = 0.25
PIPELINES = "pipelines"
_NO_CODE = ("__pycache__", ".git", "node_modules", ".venv", ".journal", ".pipelines")
K = TypeVar("K")
Signature = dict[str, tuple[int, int, int]]


def signature(path: Path) -> Signature:
    """Returns size, time and inode of every file of code in a folder, or of the ZIP file."""
    if not path.is_dir():
        return _look([str(path)])
    files = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if name not in _NO_CODE]
        suits = _is_pipeline if PIPELINES in Path(folder).relative_to(path).parts[:1] else is_code
        files += [os.path.join(folder, name) for name in names if suits(name)]
    return _look(files)


def is_code(name: str) -> bool:
    """Whether a change of this file restarts its application."""
    return name == ".preload" or name.endswith((".lua", ".py"))


def _is_pipeline(name: str) -> bool:
    return name.endswith((".py", ".sql"))


def split_pipelines(files: list[str], folder: Path) -> tuple[list[str], list[str]]:
    """Returns which of the files are the application's own code, and which are its pipelines'.

    Args:
        files: what changed.
        folder: the application's.
    """
    beginning = str(folder / PIPELINES) + os.sep
    pipelines = [file for file in files if file.startswith(beginning)]
    return [file for file in files if file not in pipelines], pipelines


def _look(files: list[str]) -> Signature:
    seen = {}
    for file in files:
        try:
            info = os.stat(file)
        except OSError:
            continue
        seen[file] = (info.st_mtime_ns, info.st_size, info.st_ino)
    return seen


class FolderWatch:
    """One watched folder or ZIP file.

    A change counts when the files look the same at two polls in a row, so that a half-written file is not loaded.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loaded = self._last = signature(path)

    def poll(self) -> list[str]:
        """Returns the files that changed since the last time they were returned; usually none."""
        now = signature(self._path)
        settled, self._last = now == self._last, now
        if not settled or now == self._loaded:
            return []
        changed = [file for file in now.keys() | self._loaded.keys() if now.get(file) != self._loaded.get(file)]
        self._loaded = now
        return sorted(changed)


def watch(watches: dict[K, FolderWatch], on_change: Callable[[K, list[str]], None]) -> gevent.Greenlet[..., None]:
    """Starts the greenlet that polls; kill it to stop.

    Args:
        watches: by whatever the caller knows the application by.
        on_change: called in that greenlet with that key and the changed files.
    """

    def run() -> None:
        while True:
            gevent.sleep(POLL_S)
            for key, one in watches.items():
                if files := one.poll():
                    on_change(key, files)

    return gevent.spawn(run)


def syntax_error(files: list[str], folder: Path, vm: Vm) -> str | None:
    """Returns why one of the files would not compile, with its line; None when all would.

    Args:
        files: what changed; files that are gone, and what is neither Lua nor Python, do not count.
        folder: the application's; messages name files from it on.
        vm: the Lua runtime.
    """
    for file in files:
        name = os.path.relpath(file, folder.parent)
        try:
            source = Path(file).read_bytes()
            if file.endswith(".py"):
                compile(source, name, "exec")
            elif is_code(os.path.basename(file)):
                vm.free(vm.compile(source, f"@{name}"))
        except (SyntaxError, SmqrtError, ValueError) as error:
            if isinstance(error, SyntaxError):
                return f"{name}:{error.lineno}: {error.msg}"
            return str(error).splitlines()[0]
        except OSError:
            continue
    return None

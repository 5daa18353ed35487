"""This process: environment, running application and child processes.

`FOLDER` and `COMMAND` are read when this module is imported, before applications can change the working folder or the
environment. Processes that replace this one start with them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pwd
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol
from weakref import WeakSet


def start_folder() -> str:
    """Return $PWD when it names the working folder, else the working folder itself.

    Releases are often deployed behind a symbolic link, such as `current`. The kernel knows only the folder behind the
    link. $PWD has the path that was used, so a new process follows a link that was switched in between.
    """
    actual, used = os.getcwd(), os.environ.get("PWD", "")
    try:
        return used if os.path.isabs(used) and os.path.samefile(used, actual) else actual
    except OSError:
        return actual


def _start_executable(folder: str) -> str:
    """Return the path of Python below `folder`. Python has resolved a relative path, and with it the symbolic link."""
    actual, path = os.getcwd(), sys.executable
    return folder + path.removeprefix(actual) if path.startswith(f"{actual}/") else path


FOLDER = start_folder()
"""The working folder."""
COMMAND = [_start_executable(FOLDER), *sys.orig_argv[1:]]
"""The program and its arguments, as a new process starts with them."""


# ---- CPU cores

_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def cores(quota: Path = _CGROUP_CPU_MAX) -> int:
    """Return the number of cores that this process may use, at least 1; in a container with 1.5 cores it is 1.

    Args:
        quota: the file with the quota of the control group: "<microseconds> <period in microseconds>", or "max …".
    """
    usable = len(os.sched_getaffinity(0))
    try:
        quota_us, period_us = quota.read_text().split()
        usable = min(usable, int(quota_us) // int(period_us))
    except (OSError, ValueError):  # no such file, or "max"
        pass
    return max(usable, 1)


# ---- User folders (XDG Base Directory Specification)


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/smqrt`, else `~/.cache/smqrt`. Raises FileNotFoundError as `home_folder`."""
    return _user_folder("XDG_CACHE_HOME", ".cache")


def config_folder() -> Path:
    """Return `$XDG_CONFIG_HOME/smqrt`, else `~/.config/smqrt`. Raises FileNotFoundError as `home_folder`."""
    return _user_folder("XDG_CONFIG_HOME", ".config")


def state_folder() -> Path:
    """Return `$XDG_STATE_HOME/smqrt`, else `~/.local/state/smqrt`. Raises FileNotFoundError as `home_folder`."""
    return _user_folder("XDG_STATE_HOME", ".local/state")


def _user_folder(variable: str, default: str) -> Path:
    base = os.environ.get(variable)
    return (Path(base) if base else home_folder() / default) / "smqrt"


def home_folder() -> Path:
    """Return the user's home folder: `$HOME`, else the entry in the system's user database.

    Raises:
        FileNotFoundError: neither exists, as in a container that runs under a user id without a name.
    """
    if home := os.environ.get("HOME"):
        return Path(home)
    try:
        return Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:
        raise FileNotFoundError(
            2, f"user {os.geteuid()} has no home folder, and HOME is not set; set HOME to a folder of this user"
        ) from None


# ---- Current application

log = logging.getLogger("smqrt")


class Closable(Protocol):
    """An object that is closed with the application that created it."""

    def close(self) -> object:
        """Close it; may block. A second call does nothing. A method `_end_with_app` takes precedence."""


class AppScope:
    """The objects that a running application has created, and its modules.

    Args:
        folder: the application's folder, absolute; None when the application is a ZIP file.
        name: identifies its hubs, also in the next process after a hot restart.

    Attributes:
        when_loaded: functions to call once the application's code has run without an error.
        hubs_made: the number of hubs without a name that it has created.
        package: the name of the package of its Python modules; empty without such modules.
        names: the names that `smqrt.app` offers to its code: `app`, `dir`, `io`.
        kept: objects that the server keeps in memory for it.
        is_internal: it is part of the server, and its hubs are not shown to operators.
        is_unloading: its `onunload` runs, or has run.
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
        self._packages_before = {name.partition(".")[0] for name in list(sys.modules)}
        self._closables: WeakSet[Closable] = WeakSet()

    def close(self) -> None:
        """Close all objects, in any order, and unload the modules that the application imported from its folder.

        At its next start, the application imports the changed modules. May block. Errors are logged.
        """
        for closable in list(self._closables):
            try:
                getattr(closable, "_end_with_app", closable.close)()
            except Exception:
                log.exception("closing %r failed", closable)
        self._closables.clear()
        self.kept.clear()
        sys.path[:] = [entry for entry in sys.path if entry in self._path_before or not self.has_file(entry)]
        for name, module in list(sys.modules.items()):
            is_new = name.partition(".")[0] not in self._packages_before
            if is_new and self.has_file(getattr(module, "__file__", None)):
                del sys.modules[name]

    def is_on_path(self) -> bool:
        """Whether it has added its folder to `sys.path`. Its modules are then imported under their own names."""
        folder = str(self.folder)
        return folder in sys.path and folder not in self._path_before

    def has_file(self, file: str | None) -> bool:
        """Whether a module's file belongs to it. Packages of an environment in its folder do not."""
        if self.folder is None or file is None or not Path(file).is_relative_to(self.folder):
            return False
        parts = Path(file).relative_to(self.folder).parts
        return not any(part == "site-packages" or part.startswith(".") for part in parts)

    def add(self, closable: Closable) -> None:
        """Add an object that `close` closes, unless it is garbage-collected before."""
        self._closables.add(closable)


current_app: ContextVar[AppScope | None] = ContextVar("current", default=None)
"""The application whose code this greenlet runs: `.preload`, `.preload.py`, `onunload`, a page, a directory function.
It is None in all other code, and in greenlets and Lua activities that such code starts."""


def base_folder() -> Path:
    """Return the folder of the running application; the working folder outside of applications."""
    return application_folder() or Path.cwd()


def application_folder() -> Path | None:
    """Return the folder of the running application; None for a ZIP file and outside of applications."""
    app = current_app.get()
    return app.folder if app else None


def close_with_app(closable: Closable) -> None:
    """Close an object with the running application; do nothing outside of applications.

    Objects are excluded that a module outside of the application's folder creates during its import, because such a
    module is not unloaded with the application.
    """
    app = current_app.get()
    if app and not _is_importing_foreign_module(app):
        app.add(closable)


def _is_importing_foreign_module(app: AppScope) -> bool:
    frame: FrameType | None = sys._getframe()
    while frame:
        spec: Any = frame.f_globals.get("__spec__")
        if getattr(spec, "_initializing", False):  # CPython sets it while a module's own code runs
            is_own = spec.name.partition(".")[0] == app.package or app.has_file(spec.origin)
            if not is_own:
                return True
        frame = frame.f_back
    return False


@contextmanager
def running_app(app: AppScope) -> Iterator[None]:
    """Mark this greenlet as running the code of an application."""
    token = current_app.set(app)
    try:
        yield
    finally:
        current_app.reset(token)


# ---- Child processes

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None)  # loaded here: between fork and exec, loading a library can deadlock


@dataclass(frozen=True)
class RestartDelays:
    """Delays for restarting and stopping a child process, in seconds.

    Attributes:
        first_s, longest_s: the delay before a failed process starts again; it doubles each time.
        steady_s: after this run time, the delay is `first_s` again.
        stop_s: from SIGTERM to SIGKILL.
    """

    first_s: float = 1.0
    longest_s: float = 60.0
    steady_s: float = 60.0
    stop_s: float = 10.0


def failure(code: int) -> str | None:
    """Return the failure of a process as text, from its return code; None for success."""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code else None


def terminate_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent dies. Call it between fork and exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def outlive_parent() -> None:
    """Undo `terminate_with_parent`, once the process detects the exit of its parent in another way."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0)

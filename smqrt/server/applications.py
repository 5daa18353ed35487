"""The applications of a server: loading, reload of their code, and their pipelines.

Pages need no restart: the server reads a changed page at the next request. A change of `.preload` or of a module
restarts the application. Polling finds such changes: it works on every mount and needs no thread.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import gevent

from smqrt.apps.app_spec import AppSpec
from smqrt.apps.lua.applications import Application, Applications
from smqrt.apps.lua.vm import Vm
from smqrt.errors import SmqrtError
from smqrt.server.file_reload import FileState, file_state
from smqrt.server.side_processes import Pipelines

log = logging.getLogger("smqrt")

POLL_S = 0.25
PIPELINES = "pipelines"
_NOT_CODE = ("__pycache__", ".git", "node_modules", ".venv", ".journal", ".pipelines")
CodeState = dict[str, FileState]


class ServerApplications:
    """The applications of a server.

    Args:
        loader: loads them.
        pipelines: runs their pipelines; None to run none.
        report: takes each line for the terminal.
        on_restarted: called after an application has been restarted.
        watches_code: restart an application when its code changes.
    """

    def __init__(
        self,
        loader: Applications,
        pipelines: Pipelines | None,
        report: Callable[[str], None],
        on_restarted: Callable[[], object],
        watches_code: bool,
    ) -> None:
        self._loader, self._pipelines = loader, pipelines
        self._report, self._on_restarted = report, on_restarted
        self._watches_code = watches_code
        self._watches: dict[Application, FolderWatch] = {}
        self._watcher: gevent.Greenlet[..., None] | None = None
        self.all = loader.all

    def load(self, specs: Iterable[AppSpec]) -> None:
        """Load applications one after the other and report each. One that fails does not stop the others."""
        self._loader.configure()
        for spec in specs:
            # Before the code is read: a change while it loads counts.
            watch = FolderWatch(spec.path) if self._watches_code else None
            application = self._loader.load(spec.name, spec.path, spec.priority, spec.inner, spec.entry)
            if watch:
                self._watches[application] = watch
            self._report_outcome(application)

    def restart(self, application: Application) -> None:
        """Restart an application and report the outcome."""
        application.reload()
        self._on_restarted()
        self._report_outcome(application)

    def _report_outcome(self, application: Application) -> None:
        error = application.error
        outcome = "ok" if error is None else f"failed: {error.splitlines()[0]}"
        self._report(f"app {shown_name(application)} at {application.uri}: {outcome}")

    def failed(self) -> list[Application]:
        """Return the applications that do not run because of an error."""
        return [one for one in self.all if one.error is not None]

    # ---- code that changes

    def watch_code(self) -> None:
        """Start to restart applications whose code changes, if the settings ask for it."""
        if self._watches_code:
            for application in self.all:
                if application not in self._watches:
                    self._watches[application] = FolderWatch(application.path)
            self._watcher = gevent.spawn(self._poll)

    def stop_watching(self) -> None:
        """Stop watching the code."""
        if self._watcher:
            self._watcher.kill()

    def _poll(self) -> None:
        while True:
            gevent.sleep(POLL_S)
            for application, watch in self._watches.items():
                if files := watch.poll():
                    self._apply_change(application, files)

    def _apply_change(self, application: Application, files: list[str]) -> None:
        folder = str(application.path / PIPELINES) + os.sep
        own = [file for file in files if not file.startswith(folder)]
        try:
            if own and (application.running or application.error):  # else an operator has stopped it
                if fault := syntax_error(own, application.path, self._loader.vm):
                    self._report(f"app {shown_name(application)} at {application.uri}: not restarted: {fault}")
                else:
                    self.restart(application)
            if len(own) < len(files) and self._pipelines:
                self._pipelines.restart(application.path.resolve())
            self._start_pipelines(application)
        except Exception:
            log.exception("reloading %s failed", application.uri)

    # ---- pipelines

    def start_pipelines(self) -> None:
        """Start the pipelines of all applications that run."""
        for application in self.all:
            self._start_pipelines(application)

    def _start_pipelines(self, application: Application) -> None:
        if self._pipelines and application.error is None:
            self._pipelines.start(shown_name(application), application.path.resolve())

    def stop_pipelines(self) -> None:
        """Stop all pipelines; blocks this greenlet until their processes have ended."""
        if self._pipelines:
            self._pipelines.stop()

    def pipeline_states(self) -> list[tuple[Path, str]]:
        """Return the folder and the state of each pipeline process."""
        return self._pipelines.states() if self._pipelines else []


def shown_name(application: Application) -> str:
    """Return the name of an application; for the one at `/` that of its folder."""
    return application.name or application.path.resolve().stem


class FolderWatch:
    """A folder or ZIP file with the code of an application.

    A change counts when two polls in a row see the same files, so that a half-written file is not loaded.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loaded = self._last = code_state(path)

    def poll(self) -> list[str]:
        """Return the files that changed since they were last returned, sorted."""
        now = code_state(self._path)
        settled, self._last = now == self._last, now
        if not settled or now == self._loaded:
            return []
        changed = [file for file in now.keys() | self._loaded.keys() if now.get(file) != self._loaded.get(file)]
        self._loaded = now
        return sorted(changed)


def code_state(path: Path) -> CodeState:
    """Return the state of each code file in a folder, or of the ZIP file."""
    if not path.is_dir():
        files = [str(path)]
    else:
        files = []
        for folder, folders, names in os.walk(path):
            folders[:] = [name for name in folders if name not in _NOT_CODE]
            is_pipeline = PIPELINES in Path(folder).relative_to(path).parts[:1]
            files += [
                os.path.join(folder, name)
                for name in names
                if (name.endswith((".py", ".sql")) if is_pipeline else is_code(name))
            ]
    return {file: state for file in files if (state := file_state(file)) is not None}


def is_code(name: str) -> bool:
    """Whether a change of a file of this name restarts its application."""
    return name == ".preload" or name.endswith((".lua", ".py"))


def syntax_error(files: list[str], folder: Path, vm: Vm) -> str | None:
    """Return the first syntax error of the files with its line, None when all compile.

    Args:
        files: the changed files. Missing files, and files that are neither Lua nor Python, are skipped.
        folder: the folder of the application. Errors name files relative to its parent.
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
        except SyntaxError as error:
            return f"{name}:{error.lineno}: {error.msg}"
        except (SmqrtError, ValueError) as error:
            return str(error).splitlines()[0]
        except OSError:
            continue
    return None

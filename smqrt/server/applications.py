"""Applications of a server, their reload, and their child processes.

Pages need no restart: the server reads a changed page at the next request. A change of `.preload` or of a module
restarts the application. Such changes are found by polling, which works on every file system and needs no thread.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import IO, Any

import gevent
from gevent import subprocess
from gevent.event import Event

from smqrt.apps.app_spec import AppSpec
from smqrt.apps.lua.applications import Application, Applications
from smqrt.apps.lua.vm import Vm
from smqrt.errors import SmqrtError
from smqrt.journal.compact import arguments
from smqrt.journal.writer import JournalWriter
from smqrt.process.current_process import RestartDelays, failure, terminate_with_parent
from smqrt.server.configuration import FileState, file_state

# ---- Child processes: pipelines and compaction
#
# start ──▶ running ──exit code 0──▶ ended
#             │  ▲
#      failed │  │ 1 s, 2 s, 4 s … 60 s later
#             ▼  │
#           waiting            stop: SIGTERM, ten seconds later SIGKILL

_MAX_LINE_BYTES = 16 << 10
_LAST_OUTPUT_S = 1.0  # to read the output that a process wrote before its exit
_GROUP_EXIT_S = 3.0  # a JVM exits up to 3 s after the process that started it
_GROUP_KILL_S = 1.0
_GROUP_POLL_S = 0.05
_JOURNALS_POLL_S = 1.0
_PIPELINES_STOP_S = 40.0  # the 30 s of `smqrt.pipeline.query.FINISH_S`, and the exit of Spark


class SupervisedProcess:
    """A child process that is restarted when it fails. Stopping it also stops its descendants.

    Args:
        name: the prefix of its lines.
        command: the program and its arguments.
        report: called with each line of its output, and with lines about starts and failures.
        delays: before restarts, and between SIGTERM and SIGKILL.

    Attributes:
        state: "stopped", "running", "waiting" (for the next start) or "ended" (by itself, successfully).
    """

    def __init__(
        self, name: str, command: Sequence[str], report: Callable[[str], None], delays: RestartDelays | None = None
    ) -> None:
        self.state = "stopped"
        self._name = name
        self._command = list(command)
        self._report = report
        self._delays = delays or RestartDelays()
        self._stopping = Event()
        self._greenlet: gevent.Greenlet[..., None] | None = None

    def start(self) -> None:
        """Start the process, unless it runs or a restart is scheduled; never blocks."""
        if self.state not in ("running", "waiting"):
            self.state = "running"
            self._stopping.clear()
            self._greenlet = gevent.spawn(self._keep_running)

    def stop(self) -> None:
        """Stop the process; blocks this greenlet until the process and its descendants have ended."""
        self._stopping.set()
        if self._greenlet is not None:
            self._greenlet.join()
        self.state = "stopped"

    def restart(self) -> None:
        """Stop the process and start it again; blocks until the old one has ended."""
        self.stop()
        self.start()

    def _keep_running(self) -> None:
        wait_s = self._delays.first_s
        while not self._stopping.is_set():
            self.state, began_s = "running", monotonic()
            fault = self._run()
            if fault is None or self._stopping.is_set():
                break
            if monotonic() - began_s >= self._delays.steady_s:
                wait_s = self._delays.first_s
            self.state = "waiting"
            self._report(f"{self._name}: {fault}; starting again in {wait_s:g} s")
            self._stopping.wait(wait_s)
            wait_s = min(wait_s * 2, self._delays.longest_s)
        self.state = "ended"

    def _run(self) -> str | None:
        """Run the process until it ends. Return the failure, None for success."""

        def report_output(output: IO[bytes]) -> None:
            with output:
                while line := output.readline(_MAX_LINE_BYTES):
                    if text := line.decode("utf-8", "replace").rstrip():
                        self._report(f"{self._name} | {text}")

        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                preexec_fn=terminate_with_parent,
            )
        except OSError as error:
            return f"{self._command[0]} can't be started: {error.strerror}"
        self._report(f"{self._name}: started, process {process.pid}")
        assert process.stdout is not None  # a pipe
        reader, waiter = gevent.spawn(report_output, process.stdout), gevent.spawn(process.wait)
        either: list[Any] = [waiter, self._stopping]
        gevent.wait(either, count=1)
        if not waiter.ready():
            process.terminate()
            waiter.join(self._delays.stop_s)
        _end_group(process.pid, _GROUP_EXIT_S if waiter.ready() else 0)
        code: int = waiter.get()
        reader.join(_LAST_OUTPUT_S)
        reader.kill()
        return failure(code)


def _end_group(leader: int, grace_s: float) -> None:
    """Wait until all processes of a group have ended; kill them after `grace_s` seconds."""
    with suppress(ProcessLookupError, PermissionError):
        for number, wait_s in ((0, grace_s), (signal.SIGKILL, _GROUP_KILL_S)):  # signal 0 checks for existence
            end_s = monotonic() + wait_s
            os.killpg(leader, number)
            while monotonic() < end_s:
                gevent.sleep(_GROUP_POLL_S)
                os.killpg(leader, 0)


class Pipelines:
    """The pipelines of the applications, one process for each application with pipelines.

    Args:
        command: runs the pipelines of an application, whose folder is appended.
        report: called with each line of output.
    """

    def __init__(self, command: Sequence[str], report: Callable[[str], None]) -> None:
        self._command = command
        self._report = report
        self._running: dict[Path, SupervisedProcess] = {}

    def start(self, name: str, folder: Path) -> None:
        """Start the pipelines of the application in `folder`, unless it has none or they run; never blocks."""
        if folder not in self._running and (folder / "pipelines").is_dir():
            command = [*self._command, str(folder)]
            delays = RestartDelays(stop_s=_PIPELINES_STOP_S)
            self._running[folder] = SupervisedProcess(f"pipelines of {name}", command, self._report, delays)
        if folder in self._running:
            self._running[folder].start()

    def restart(self, folder: Path) -> None:
        """Restart the pipelines of the application in `folder`; blocks this greenlet until the old ones have ended."""
        if folder in self._running:
            self._running[folder].restart()

    def stop(self) -> None:
        """Stop all processes; blocks this greenlet until they have ended."""
        gevent.joinall([gevent.spawn(one.stop) for one in self._running.values()])

    def states(self) -> list[tuple[Path, str]]:
        """Return the folder and the state of each process; see `SupervisedProcess.state`."""
        return [(folder, one.state) for folder, one in self._running.items()]


class Compactions:
    """The compaction of journals, one process for each open journal with compaction.

    Args:
        opened: the journals by name, checked every second.
        report: called with each line of output.
    """

    def __init__(self, opened: Mapping[str, JournalWriter], report: Callable[[str], None]) -> None:
        self._opened = opened
        self._report = report
        self._running: dict[Path, SupervisedProcess] = {}
        self._poller: gevent.Greenlet[..., None] | None = None
        self._has_warned = False

    def start(self) -> None:
        """Start checking the journals; never blocks."""
        self._poller = gevent.spawn(self._poll)

    def _poll(self) -> None:
        while True:
            wanted = {journal.path: journal.settings for journal in self._opened.values() if journal.settings.compact}
            for path in self._running.keys() - wanted.keys():
                self._running.pop(path).stop()
            if wanted and find_spec("pyarrow") is None:
                if not self._has_warned:
                    self._report("compaction: off, because pyarrow is not installed: pip install 'smqrt[spark]'")
                self._has_warned = True
            else:
                for path in wanted.keys() - self._running.keys():
                    command = [sys.executable, "-m", "smqrt", *arguments(wanted[path])]
                    self._running[path] = SupervisedProcess(f"compaction of {wanted[path].name}", command, self._report)
                    self._running[path].start()
            gevent.sleep(_JOURNALS_POLL_S)

    def stop(self) -> None:
        """Stop all processes; blocks this greenlet until they have ended."""
        if self._poller is not None:
            self._poller.kill()
        gevent.joinall([gevent.spawn(one.stop) for one in self._running.values()])
        self._running.clear()


log = logging.getLogger("smqrt")

POLL_S = 0.25
PIPELINES = "pipelines"
_NOT_CODE = ("__pycache__", ".git", "node_modules", ".venv", ".journal", ".pipelines")
CodeState = dict[str, FileState]


class ServerApplications:
    """The applications of a server.

    Args:
        loader: loads the code.
        pipelines: runs the pipelines; None to run none.
        report: called with each line for the terminal.
        on_restarted: called after the restart of an application.
        watches_code: whether changed code restarts an application.

    Attributes:
        all: the loaded applications, including failed ones.
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
        """Load applications one after the other and report each. A failed application does not stop the others."""
        self._loader.configure()
        for spec in specs:
            # Before the code is read: a change during the load restarts the application.
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

    # ---- changes of code

    def watch_code(self) -> None:
        """Start watching the code of all applications, if the settings enable it."""
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
                files = watch.poll()
                if not files:
                    continue
                folder = str(application.path / PIPELINES) + os.sep
                code = [file for file in files if not file.startswith(folder)]
                try:
                    if code and (application.running or application.error):  # else an operator has stopped it
                        if fault := syntax_error(code, application.path, self._loader.vm):
                            # A running application continues with its old code.
                            self._report(f"app {shown_name(application)} at {application.uri}: not restarted: {fault}")
                        else:
                            self.restart(application)
                    if len(code) < len(files) and self._pipelines:
                        self._pipelines.restart(application.path.resolve())
                    self._start_pipelines(application)
                except Exception:
                    log.exception("reloading %s failed", application.uri)

    # ---- pipelines

    def start_pipelines(self) -> None:
        """Start the pipelines of all applications without an error."""
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
    """Return the name of an application; the name of its folder for the application at `/`."""
    return application.name or application.path.resolve().stem


class FolderWatch:
    """The changes of a folder or ZIP file with the code of an application.

    A change is reported once two consecutive polls find the same states, so that a half-written file is not loaded.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loaded = self._last = code_state(path)

    def poll(self) -> list[str]:
        """Return the files that changed since the last reported change, sorted."""
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

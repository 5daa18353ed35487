"""Child processes of the server: pipelines and compaction, restarted when they fail.

start ──▶ running ──exit code 0──▶ ended
            │  ▲
  it failed │  │ 1 s, 2 s, 4 s … 60 s later
            ▼  │
          waiting            stop: SIGTERM, ten seconds later SIGKILL
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import IO, Any

import gevent
from gevent import subprocess
from gevent.event import Event

from smqrt.journal.compact import arguments
from smqrt.journal.writer import JournalWriter
from smqrt.process.children import Patience, end_with_parent, failure

_LINE_BYTES = 16 << 10
_LAST_OUTPUT_S = 1.0  # to read the output that a process wrote before its exit
_GROUP_EXIT_S = 3.0  # a JVM needs so long to exit after the process that started it
_GROUP_KILL_S = 1.0
_GROUP_POLL_S = 0.05
_JOURNALS_POLL_S = 1.0
_PIPELINES_STOP_S = 40.0  # the 30 s of `smqrt.pipeline.query.FINISH_S`, and the exit of Spark


class Supervised:
    """A process that is restarted when it fails, with all the processes that it starts.

    Args:
        name: the prefix of its lines.
        command: the program and its arguments.
        report: takes each line of its output, and of its starts and failures.
        patience: the waits before restarts, and for its exit.

    Attributes:
        state: "stopped", "running", "waiting" (to start again) or "ended" (by itself, successfully).
    """

    def __init__(
        self, name: str, command: Sequence[str], report: Callable[[str], None], patience: Patience | None = None
    ) -> None:
        self.state = "stopped"
        self._name = name
        self._command = list(command)
        self._report = report
        self._patience = patience or Patience()
        self._stopping = Event()
        self._keeper: gevent.Greenlet[..., None] | None = None

    def start(self) -> None:
        """Start the process, unless it runs or waits to start again; never blocks."""
        if self.state not in ("running", "waiting"):
            self.state = "running"
            self._stopping.clear()
            self._keeper = gevent.spawn(self._keep)

    def stop(self) -> None:
        """Stop the process; blocks this greenlet until it, and all processes that it started, have ended."""
        self._stopping.set()
        if self._keeper is not None:
            self._keeper.join()
        self.state = "stopped"

    def restart(self) -> None:
        """Stop the process and start it again; blocks as `stop`."""
        self.stop()
        self.start()

    def _keep(self) -> None:
        wait_s = self._patience.first_s
        while not self._stopping.is_set():
            self.state, began_s = "running", monotonic()
            failure = self._run()
            if failure is None or self._stopping.is_set():
                break
            if monotonic() - began_s >= self._patience.steady_s:
                wait_s = self._patience.first_s
            self.state = "waiting"
            self._report(f"{self._name}: {failure}; starting again in {wait_s:g} s")
            self._stopping.wait(wait_s)
            wait_s = min(wait_s * 2, self._patience.longest_s)
        self.state = "ended"

    def _run(self) -> str | None:
        """Run the process until it ends. Return how it failed, None for success."""
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        except OSError as error:
            return f"{self._command[0]} can't be started: {error.strerror}"
        self._report(f"{self._name}: started, process {process.pid}")
        reader, waiter = gevent.spawn(self._report_output, process.stdout), gevent.spawn(process.wait)
        either: list[Any] = [waiter, self._stopping]
        gevent.wait(either, count=1)
        if not waiter.ready():
            process.terminate()
            waiter.join(self._patience.stop_s)
        _end_group(process.pid, _GROUP_EXIT_S if waiter.ready() else 0)
        code: int = waiter.get()
        reader.join(_LAST_OUTPUT_S)
        reader.kill()
        return failure(code)

    def _report_output(self, output: IO[bytes] | None) -> None:
        assert output is not None  # a pipe
        with output:
            while line := output.readline(_LINE_BYTES):
                if text := line.decode("utf-8", "replace").rstrip():
                    self._report(f"{self._name} | {text}")


def _end_group(leader: int, patience_s: float) -> None:
    """Wait until all processes of a group have ended; kill them after `patience_s` seconds."""
    with suppress(ProcessLookupError, PermissionError):
        for number, wait_s in ((0, patience_s), (signal.SIGKILL, _GROUP_KILL_S)):  # signal 0 only asks for the group
            end_s = monotonic() + wait_s
            os.killpg(leader, number)
            while monotonic() < end_s:
                gevent.sleep(_GROUP_POLL_S)
                os.killpg(leader, 0)


class Pipelines:
    """The pipelines of the applications, one process for each application that has any.

    Args:
        command: runs the pipelines of the application whose folder is appended.
        report: takes each line of output.
    """

    def __init__(self, command: Sequence[str], report: Callable[[str], None]) -> None:
        self._command = command
        self._report = report
        self._running: dict[Path, Supervised] = {}

    def start(self, name: str, folder: Path) -> None:
        """Start the pipelines of the application in `folder`, if it has some and they don't run; never blocks."""
        if folder not in self._running and (folder / "pipelines").is_dir():
            command = [*self._command, str(folder)]
            patience = Patience(stop_s=_PIPELINES_STOP_S)
            self._running[folder] = Supervised(f"pipelines of {name}", command, self._report, patience)
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
        """Return the folder and the state of each process, see `Supervised`."""
        return [(folder, one.state) for folder, one in self._running.items()]


class Compactions:
    """The compaction of journals, one process for each open journal whose settings ask for it.

    Args:
        opened: the journals by name, checked every second.
        report: takes each line of output.
    """

    def __init__(self, opened: Mapping[str, JournalWriter], report: Callable[[str], None]) -> None:
        self._opened = opened
        self._report = report
        self._running: dict[Path, Supervised] = {}
        self._poller: gevent.Greenlet[..., None] | None = None
        self._has_warned = False

    def start(self) -> None:
        """Start to check the journals; never blocks."""
        self._poller = gevent.spawn(self._poll)

    def _poll(self) -> None:
        while True:
            wanted = {journal.path: journal.settings for journal in self._opened.values() if journal.settings.compact}
            for path in self._running.keys() - wanted.keys():
                self._running.pop(path).stop()
            if wanted and find_spec("pyarrow") is None:
                if not self._has_warned:
                    self._report("compaction: none, it needs pyarrow: pip install 'smqrt[spark]'")
                self._has_warned = True
            else:
                for path in wanted.keys() - self._running.keys():
                    command = [sys.executable, "-m", "smqrt", *arguments(wanted[path])]
                    self._running[path] = Supervised(f"compaction of {wanted[path].name}", command, self._report)
                    self._running[path].start()
            gevent.sleep(_JOURNALS_POLL_S)

    def stop(self) -> None:
        """Stop all processes; blocks this greenlet until they have ended."""
        if self._poller is not None:
            self._poller.kill()
        gevent.joinall([gevent.spawn(one.stop) for one in self._running.values()])
        self._running.clear()

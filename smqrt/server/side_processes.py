"""Processes beside the server: started again when they fail, and ended with it.

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
from typing import Any

import gevent
from gevent import subprocess
from gevent.event import Event

from smqrt.journal.compact import arguments
from smqrt.journal.writer import JournalWriter
from smqrt.process.children import Patience, end_with_parent, failure

_LINE_BYTES = 16 << 10
_LAST_WORDS_S = 1.0
_LEFT_BEHIND_S = 3.0  # what a JVM takes to tidy up behind the process that started it
_POLL_S = 0.05
_LOOK_S = 1.0
_PIPELINES_STOP_S = 40.0  # the 30 s of `smqrt.pipeline.query.FINISH_S`, and the end of Spark


class Supervised:
    """A process that is kept running, with all the processes that it starts.

    Args:
        name: stands in front of its lines.
        command: the program and its arguments.
        report: takes each line of its output, and what becomes of it.
        patience: see there.

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
        """Starts it, unless it runs or waits to start again; returns at once."""
        if self.state not in ("running", "waiting"):
            self.state = "running"
            self._stopping.clear()
            self._keeper = gevent.spawn(self._keep)

    def stop(self) -> None:
        """Ends it; blocks the greenlet until it and all it started are gone."""
        self._stopping.set()
        if self._keeper is not None:
            self._keeper.join()
        self.state = "stopped"

    def restart(self) -> None:
        """Stops it and starts it anew; blocks as `stop`."""
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
        """Runs the process until it ends; returns how it failed, None when it did not."""
        try:
            process = self._open()
        except OSError as error:
            return f"{self._command[0]} can't be started: {error.strerror}"
        self._report(f"{self._name}: started, process {process.pid}")
        reader, waiter = gevent.spawn(self._pass_on, process.stdout), gevent.spawn(process.wait)
        either: list[Any] = [waiter, self._stopping]
        gevent.wait(either, count=1)
        if not waiter.ready():
            process.terminate()
            waiter.join(self._patience.stop_s)
        _end_group(process.pid, _LEFT_BEHIND_S if waiter.ready() else 0)
        code: int = waiter.get()
        reader.join(_LAST_WORDS_S)
        reader.kill()
        return failure(code)

    def _open(self) -> Any:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )

    def _pass_on(self, output: Any) -> None:
        with output:
            while line := output.readline(_LINE_BYTES):
                if text := line.decode("utf-8", "replace").rstrip():
                    self._report(f"{self._name} | {text}")


def _end_group(leader: int, patience_s: float) -> None:
    """Waits until all processes that a process had started are gone, and ends them after `patience_s` seconds."""
    with suppress(ProcessLookupError, PermissionError):
        for number, wait_s in ((0, patience_s), (signal.SIGKILL, _LAST_WORDS_S)):
            end_s = monotonic() + wait_s
            os.killpg(leader, number)
            while monotonic() < end_s:
                gevent.sleep(_POLL_S)
                os.killpg(leader, 0)


class Pipelines:
    """The pipelines of the applications, a process for each application that has any.

    Args:
        command: what runs the pipelines of the application whose folder is put behind it.
        report: takes each line of output.
    """

    def __init__(self, command: Sequence[str], report: Callable[[str], None]) -> None:
        self._command = command
        self._report = report
        self._running: dict[Path, Supervised] = {}

    def start(self, name: str, folder: Path) -> None:
        """Starts those of the application in `folder`, if it has some and they don't run; returns at once."""
        if folder not in self._running and (folder / "pipelines").is_dir():
            command = [*self._command, str(folder)]
            patience = Patience(stop_s=_PIPELINES_STOP_S)
            self._running[folder] = Supervised(f"pipelines of {name}", command, self._report, patience)
        if folder in self._running:
            self._running[folder].start()

    def restart(self, folder: Path) -> None:
        """Starts those of the application in `folder` anew; blocks the greenlet until the old ones are gone."""
        if folder in self._running:
            self._running[folder].restart()

    def stop(self) -> None:
        """Ends all; blocks the greenlet until they are gone."""
        gevent.joinall([gevent.spawn(one.stop) for one in self._running.values()])

    def states(self) -> list[tuple[Path, str]]:
        """The folder and the state of each, see `Supervised`."""
        return [(folder, one.state) for folder, one in self._running.items()]


class Compactions:
    """The compaction of the open journals whose settings ask for it, a process for each.

    Args:
        opened: the journals by name, looked at every second.
        report: takes each line of output.
    """

    def __init__(self, opened: Mapping[str, JournalWriter], report: Callable[[str], None]) -> None:
        self._opened = opened
        self._report = report
        self._running: dict[Path, Supervised] = {}
        self._looking: gevent.Greenlet[..., None] | None = None
        self._told = False

    def start(self) -> None:
        """Begins to look; returns at once."""
        self._looking = gevent.spawn(self._look)

    def _look(self) -> None:
        while True:
            self._refresh()
            gevent.sleep(_LOOK_S)

    def _refresh(self) -> None:
        wanted = {journal.path: journal.settings for journal in self._opened.values() if journal.settings.compact}
        for path in self._running.keys() - wanted.keys():
            self._running.pop(path).stop()
        if wanted and find_spec("pyarrow") is None:
            self._tell_once("compaction: none, it needs pyarrow: pip install 'smqrt[spark]'")
            return
        for path in wanted.keys() - self._running.keys():
            command = [sys.executable, "-m", "smqrt", *arguments(wanted[path])]
            self._running[path] = Supervised(f"compaction of {wanted[path].name}", command, self._report)
            self._running[path].start()

    def _tell_once(self, line: str) -> None:
        if not self._told:
            self._report(line)
        self._told = True

    def stop(self) -> None:
        """Ends all; blocks the greenlet until they are gone."""
        if self._looking is not None:
            self._looking.kill()
        gevent.joinall([gevent.spawn(one.stop) for one in self._running.values()])
        self._running.clear()

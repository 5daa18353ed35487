"""The supervisor of workers: opens the ports, starts the workers, starts those that die again, and ends them.

It loads no application. Worker 0 is started first and alone, so that what applications make when they are loaded for
the first time is made once; then all others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Protocol

import gevent
from gevent.event import Event

from smqrt.errors import StartError
from smqrt.process.children import Patience
from smqrt.server.mako_conf import MakoConf
from smqrt.server.ports import ADMIN, PortSockets, open_for_workers
from smqrt.server.restart.control_socket import RestartDoor
from smqrt.server.shutdown import Signals
from smqrt.server.systemd import Notifier
from smqrt.server.worker_process import WorkerProcess
from smqrt.settings.settings import Settings
from smqrt.settings.tree import Path as SettingPath
from smqrt.settings.tree import value_at, with_values
from smqrt.transport.balance import BalanceSockets
from smqrt.workers.fd_channel import ChannelError, FdChannel, Message
from smqrt.workers.worker_identity import WorkerPlace, anew

# ---- What each worker has of the limits that are meant for the whole server.

SHARED: tuple[SettingPath, ...] = (
    ("max_connections",),
    ("connections_per_address",),
    ("bodies_mib",),
    ("limits", "connections_per_user"),
    ("limits", "connect_rate"),
    ("limits", "connect_rate_per_address"),
    ("limits", "handshakes_per_address"),
    ("limits", "total_queue_bytes"),
)
"""Settings of the whole server; `max_connections` of listeners is one, too. Connections are spread evenly."""


def shared(settings: Settings, place: WorkerPlace) -> Settings:
    """Returns the settings of a worker: each of these limits is divided by the number of workers, and rounded up."""
    if place.count == 1:
        return settings
    values = {path: _share(value_at(settings, path), place) for path in SHARED}
    listeners = {
        name: replace(one, max_connections=place.share(one.max_connections)) for name, one in settings.listener.items()
    }
    return replace(with_values(settings, values), listener=listeners)


def _share(value: object, place: WorkerPlace) -> object:
    if isinstance(value, float):
        return value / place.count
    return place.share(value) if isinstance(value, int) else value


# ---- Hot restart of a server with workers: one worker after the other is replaced by a new process.

log = logging.getLogger("smqrt")

MOVE_S = 60.0
"""What a hand-over may take beyond loading the applications."""


class Rolled(Protocol):
    """The supervisor, as far as hot restarts need it."""

    settings: Settings
    count: int
    workers: dict[int, WorkerProcess]
    report: Callable[[str], None]

    def start(self, number: int, take_over: int | None = None) -> WorkerProcess:
        """Start the process of a worker. Raises OSError."""

    def replace(self, number: int, worker: WorkerProcess) -> None:
        """Let another process be the worker."""


class Rolling:
    """The hot restarts of a server with workers.

    Args:
        supervisor: whose workers.

    Attributes:
        starting: the processes that are about to take a worker's place.
    """

    def __init__(self, supervisor: Rolled) -> None:
        self._supervisor = supervisor
        self.starting: list[WorkerProcess] = []
        self._is_under_way = False
        self._door = RestartDoor(supervisor.settings.restart.socket, self._answer)

    def open(self) -> None:
        """Listen at `restart.socket`, if there is one. Raises StartError."""
        self._door.open()

    def close(self) -> None:
        """Listen no more."""
        self._door.close()

    def ask(self) -> None:
        """Replace all workers, soon; never blocks."""
        gevent.spawn(self._run)

    def _answer(self, channel: FdChannel, message: Message) -> None:
        gevent.spawn(self._tell, channel, message["do"] == "restart")

    def _tell(self, channel: FdChannel, is_command: bool) -> None:
        answer: Message = {"do": "abort", "why": "a server with workers is restarted by `smqrt restart`"}
        if is_command:
            fault, clients = self._run()
            answer = {"do": "failed", "why": fault}
            if fault is None:
                answer = {"do": "done", "pid": os.getpid(), "clients": clients, "workers": self._supervisor.count}
        with contextlib.suppress(ChannelError):
            channel.send(answer)
        channel.close()

    def _run(self) -> tuple[str | None, int]:
        """Why it failed, and how many clients the new processes have."""
        fault: str | None = "one is under way already"
        clients = 0
        if not self._is_under_way:
            self._is_under_way = True
            try:
                fault, clients = self._replace_all()
            finally:
                self._is_under_way = False
        if fault is not None:
            self._supervisor.report(f"restart: stopped, the others go on: {fault}")
            return fault, clients
        self._supervisor.report(f"restart: {self._supervisor.count} new workers serve, with {clients} clients")
        return None, clients

    def _replace_all(self) -> tuple[str | None, int]:
        moved = 0
        for number in range(self._supervisor.count):
            fault, clients = self._replace(number)
            if fault is not None:
                return f"w{number}: {fault}", moved
            moved += clients
        return None, moved

    def _replace(self, number: int) -> tuple[str | None, int]:
        old = self._supervisor.workers[number]
        if not old.accepts:
            return "it does not serve at the moment", 0
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        with ours, theirs:
            try:
                new = self._supervisor.start(number, theirs.fileno())
            except OSError as error:
                return f"a new process can't be started: {error.strerror}", 0
            old.say({"do": "hand_over"}, [ours.fileno()])
        self.starting.append(new)
        fault, clients = old.await_hand_over(self._supervisor.settings.restart.load_s + MOVE_S)
        self.starting.remove(new)
        if fault is not None:
            new.signal(signal.SIGKILL)
            return new.fault or fault, 0
        self._supervisor.replace(number, new)
        new.settled.wait()
        return (None, clients) if new.is_ready else (f"the new process {new.ending}", clients)


Report = Callable[[str], None]

PATIENCE = Patience(first_s=0.25, longest_s=30.0, steady_s=60.0)
MAX_FAILED_STARTS = 5
"""A worker that fails so often before it serves, while none of the others serves, ends the server."""
SILENT_S = 3.0
"""A worker that says nothing for so long is held by something: others accept its connections meanwhile."""
LOOK_S = 1.0
RELOAD_S = 30.0
KILL_AFTER_S = 5.0
"""Beyond `drain.timeout_s`, which the workers watch themselves."""
MAX_DIRECTORY_CHARS = 78
"""The path of a Unix socket has 107 at most, and those of links between workers take 28 of them."""
DIRECTORY = "smqrt-workers-"
MEMORY = "/dev/shm"
MEMORY_BYTES = 48 << 20
"""That has to be free there, for the sessions of workers; containers have 64 MiB."""
SECRET_BYTES = 32
LINES_OF_A_START = 1000


class Supervisor:
    """The workers of a server. Its ports are open from the beginning.

    Args:
        settings: of the server.
        count: how many workers.
        conf: what mako.conf says.
        report: takes each line meant for the person at the terminal.
        reload: reads the settings of this process again, at SIGHUP.

    Raises:
        StartError: an address can't be bound; one sentence.
    """

    def __init__(
        self, settings: Settings, count: int, conf: MakoConf | None, report: Report, reload: Callable[[], object]
    ) -> None:
        self.settings, self.count, self.report = settings, count, report
        self._reload = reload
        self._ports = open_for_workers(settings, conf, count)
        self._balance = _balance_sockets(count)
        self._directory = _private_directory()
        secret = os.urandom(SECRET_BYTES)
        self._places = [WorkerPlace(number, count, secret, self._directory) for number in range(count)]
        self.workers: dict[int, WorkerProcess] = {}
        self._leaving: set[WorkerProcess] = set()
        self._is_up = False
        self.over = Event()
        self._exit_code = 0
        self._failure: StartError | None = None
        self._systemd = Notifier()
        self._lines_of_the_start: set[str] = set()
        self._rolling = Rolling(self)

    # ---- the whole

    def run(self) -> int:
        """Serve until SIGTERM, SIGINT or the `exit` of an application; returns the exit code.

        Raises:
            StartError: the workers can't start; one sentence.
        """
        signals = Signals(
            {
                signal.SIGTERM: self._on_stop,
                signal.SIGINT: self._on_stop,
                signal.SIGUSR1: lambda: self._signal(signal.SIGUSR1),
            },
            {signal.SIGHUP: lambda: gevent.spawn(self._renew), signal.SIGUSR2: self._rolling.ask},
        )
        try:
            self._rolling.open()
            greenlets: list[gevent.Greenlet[..., None]] = [
                gevent.spawn(self._begin, signals),
                gevent.spawn(self._watch),
            ]
            self.over.wait()
            self._end()
            gevent.killall(greenlets)
        finally:
            self._rolling.close()
            self._systemd.close()
            for sockets in self._ports.values():
                sockets.close()
            self._balance.close()
            shutil.rmtree(self._directory, ignore_errors=True)
        if self._failure:
            raise self._failure
        return self._exit_code

    def _on_stop(self) -> None:
        if self.over.is_set():  # asked twice: somebody is in a hurry
            self._signal(signal.SIGKILL)
            shutil.rmtree(self._directory, ignore_errors=True)
            os._exit(1)
        self.over.set()

    def _begin(self, signals: Signals) -> None:
        gevent.spawn(self._keep, 0)
        gevent.sleep(0)
        self._wait_ready([0])
        for number in range(1, self.count):
            gevent.spawn(self._keep, number)
        gevent.sleep(0)
        self._wait_ready(range(self.count))
        self._is_up = True
        processes = ", ".join(str(self.workers[number].pid) for number in range(self.count))
        self.report(f"{self.count} workers: processes {processes}")
        lines = self.workers[0].lines
        for line in lines:
            self.report(line)
        self._systemd.ready(f"{self.count} workers, {', '.join(lines)}")
        signals.ready()

    def _wait_ready(self, numbers: range | list[int]) -> None:
        for number in numbers:
            while number not in self.workers or not self.workers[number].is_ready:
                gevent.sleep(0.02)

    # ---- one worker

    def start(self, number: int, take_over: int | None = None) -> WorkerProcess:
        """Start the process of a worker. Raises OSError."""
        fds = self._balance.filenos()
        worker = WorkerProcess(self._places[number], self._ports_of(number), fds, self._heard, take_over)
        self._places[number] = anew(self._places[number])
        return worker

    def replace(self, number: int, worker: WorkerProcess) -> None:
        """Let another process be the worker from now on; the one before is about to end by itself."""
        self._leaving.add(self.workers[number])
        self.workers[number] = worker
        self.spread()

    def _ports_of(self, number: int) -> dict[str, PortSockets]:
        return {name: sockets for name, sockets in self._ports.items() if name != ADMIN or number == 0}

    def _keep(self, number: int) -> None:
        wait_s, failed = PATIENCE.first_s, 0
        while not self.over.is_set():
            try:
                self.workers[number] = self.start(number)
            except OSError as error:
                self._fail(f"A worker can't be started: {error.strerror}.")
                return
            worker = self._ended(number)
            self.spread()
            if self.over.is_set():
                return
            if monotonic() - worker.began_s >= PATIENCE.steady_s:
                wait_s = PATIENCE.first_s
            failed = 0 if worker.is_ready else failed + 1
            if self._is_hopeless(worker, failed):
                return
            log.error("%s (process %d) %s; a new one starts in %g s", worker.name, worker.pid, worker.ending, wait_s)
            self.over.wait(wait_s)
            wait_s = min(wait_s * 2, PATIENCE.longest_s)

    def _ended(self, number: int) -> WorkerProcess:
        """The worker's last process, once it has ended."""
        while True:
            worker = self.workers[number]
            worker.ended.wait()
            self._leaving.discard(worker)
            if self.workers[number] is worker:
                return worker

    def _is_hopeless(self, worker: WorkerProcess, failed: int) -> bool:
        if worker.fault is not None and not self._is_up:
            self._fail(worker.fault)
        elif failed >= MAX_FAILED_STARTS and not any(one.accepts for one in self.workers.values()):
            self._fail(f"Worker {worker.name} failed {failed} times before it served; at last it {worker.ending}.")
        return self.over.is_set()

    def _fail(self, why: str) -> None:
        self._failure = self._failure or StartError(why)
        self.over.set()

    def _heard(self, worker: WorkerProcess, message: Message) -> None:
        match message["do"]:
            case "report":
                self._report(worker, str(message["line"]))
            case "exit":
                self._exit_code = int(message["code"])
                self.over.set()
            case "ready":
                if self._is_up:
                    self.report(f"{worker.name}: process {worker.pid} serves")
                self.spread()
            case "left" | "handed_over":
                self.spread()

    def _report(self, worker: WorkerProcess, line: str) -> None:
        """What all workers say alike while they start is said once."""
        if worker.is_ready:
            self.report(f"{worker.name}: {line}")
        elif worker.place.is_first and not self._is_up and len(self._lines_of_the_start) < LINES_OF_A_START:
            self._lines_of_the_start.add(line)
            self.report(line)
        elif line not in self._lines_of_the_start:
            self.report(f"{worker.name}: {line}")

    # ---- all workers

    def spread(self) -> None:
        """Have the connections of workers that don't accept any accepted by others."""
        accepting = [number for number in range(self.count) if number in self.workers and self.workers[number].accepts]
        self._balance.accepting(accepting)
        covers: dict[int, list[int]] = {number: [] for number in accepting}
        for number in range(self.count):
            if number not in covers and accepting:
                covers[next((one for one in accepting if one > number), accepting[0])].append(number)
        for number, others in covers.items():
            self.workers[number].cover(others)

    def _watch(self) -> None:
        """Look after workers that are held: by an application, or by SIGSTOP."""
        looked_s = monotonic()
        while True:
            gevent.sleep(LOOK_S)
            now_s = monotonic()
            was_held = now_s - looked_s > 2 * LOOK_S  # this process was, and has not heard the others
            looked_s = now_s
            for worker in list(self.workers.values()):
                if was_held:
                    worker.heard_s = now_s
                self._look_after(worker, now_s - worker.heard_s)

    def _look_after(self, worker: WorkerProcess, silent_s: float) -> None:
        is_held = silent_s > SILENT_S
        if not worker.is_ready or worker.ended.is_set() or is_held == worker.is_held:
            self._kill_unresponsive(worker, silent_s)
            return
        worker.is_held = is_held
        if is_held:
            log.warning("%s (process %d) is held; others accept its connections", worker.name, worker.pid)
        self.spread()

    def _kill_unresponsive(self, worker: WorkerProcess, silent_s: float) -> None:
        most_s = self._systemd.watchdog_s
        if worker.is_held and most_s and silent_s > most_s:
            log.error("%s (process %d) was held for %.0f s, and is killed", worker.name, worker.pid, silent_s)
            worker.signal(signal.SIGABRT)

    def _renew(self) -> None:
        self._systemd.reloading()
        self._reload()
        asked = [one for one in self.workers.values() if one.is_ready]
        for worker in asked:
            worker.reloaded.clear()
            worker.say({"do": "reload"})
        gevent.wait([one.reloaded for one in asked], timeout=RELOAD_S)
        self._systemd.reloaded()

    def _signal(self, number: int) -> None:
        for worker in (*self.workers.values(), *self._leaving):
            worker.signal(number)

    def _end(self) -> None:
        most_s = self.settings.drain.timeout_s
        self._systemd.stopping(most_s)
        everybody = [*self.workers.values(), *self._leaving, *self._rolling.starting]
        for worker in everybody:
            worker.stop()
        ended = gevent.wait([one.ended for one in everybody], timeout=most_s + KILL_AFTER_S if most_s else None)
        if len(ended) < len(everybody):
            self._signal(signal.SIGKILL)
            self._exit_code = self._exit_code or 1
        elif not self._exit_code and any(one.exit_code for one in everybody if one.is_ready):
            self._exit_code = 1


def _balance_sockets(count: int) -> BalanceSockets:
    try:
        return BalanceSockets(count)
    except OSError as error:
        raise StartError(f"What workers share can't be opened: {error.strerror}; raise ulimit -n.") from None


def _private_directory() -> Path:
    """A folder for Unix sockets and what workers share, of this user only: in TMPDIR, else in memory where no disk is
    slow, else where temporary files are."""
    try:
        if "TMPDIR" not in os.environ and _has_room(MEMORY):
            return Path(tempfile.mkdtemp(prefix=DIRECTORY, dir=MEMORY))
        folder = Path(tempfile.mkdtemp(prefix=DIRECTORY))
        if len(str(folder)) > MAX_DIRECTORY_CHARS:
            folder.rmdir()
            folder = Path(tempfile.mkdtemp(prefix=DIRECTORY, dir="/tmp"))
    except OSError as error:
        raise StartError(f"No folder for the sockets of workers can be made: {error}; set TMPDIR.") from None
    return folder


def _has_room(folder: str) -> bool:
    try:
        free = os.statvfs(folder)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK) and free.f_bavail * free.f_frsize >= MEMORY_BYTES

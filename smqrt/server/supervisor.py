"""Supervisor of workers: opens the ports, then starts, restarts and stops the workers.

It loads no application. Worker 0 starts first, alone, so that files that applications create at their first start are
created once.
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
from smqrt.process.current_process import RestartDelays
from smqrt.server.listeners import ADMIN, open_for_workers
from smqrt.server.mako_conf import MakoConf
from smqrt.server.restart.control_socket import ControlSocket
from smqrt.server.shutdown import Signals
from smqrt.server.systemd import Notifier
from smqrt.server.worker import WorkerProcess
from smqrt.settings.option_types import Path as SettingPath
from smqrt.settings.option_types import value_at, with_values
from smqrt.settings.server_settings import Settings
from smqrt.transport.admission import BalanceSockets
from smqrt.workers.worker_rpc import ChannelError, FdChannel, Message, WorkerPlace, next_place

# ---- limits of the whole server, divided among the workers

DIVIDED_LIMITS: tuple[SettingPath, ...] = (
    ("max_connections",),
    ("connections_per_address",),
    ("bodies_mib",),
    ("limits", "connections_per_user"),
    ("limits", "connect_rate"),
    ("limits", "connect_rate_per_address"),
    ("limits", "handshakes_per_address"),
    ("limits", "total_queue_bytes"),
)
"""Limits of the whole server, in addition to `max_connections` of listeners. Connections are distributed evenly."""


def worker_settings(settings: Settings, place: WorkerPlace) -> Settings:
    """Return the settings of a worker. Limits of the server are divided by the number of workers, and rounded up."""
    if place.count == 1:
        return settings
    values: dict[SettingPath, object] = {}
    for path in DIVIDED_LIMITS:
        value = value_at(settings, path)
        if isinstance(value, float):
            value /= place.count
        elif isinstance(value, int):  # None means no limit
            value = place.share(value)
        values[path] = value
    listeners = {
        name: replace(one, max_connections=place.share(one.max_connections)) for name, one in settings.listener.items()
    }
    return replace(with_values(settings, values), listener=listeners)


# ---- hot restart: a new process replaces each worker, one after the other

log = logging.getLogger("smqrt")

HAND_OVER_S = 60.0
"""The time limit of a hand-over, in addition to that for loading the applications."""


class WorkerOwner(Protocol):
    """The part of the supervisor that a rolling restart uses."""

    settings: Settings
    count: int
    workers: dict[int, WorkerProcess]
    report: Callable[[str], None]

    def start(self, number: int, take_over: int | None = None) -> WorkerProcess:
        """Start the process of a worker. Raises OSError."""

    def replace(self, number: int, worker: WorkerProcess) -> None:
        """Make another process the worker of this number."""


class RollingRestart:
    """The hot restarts of a server with workers.

    Args:
        supervisor: has the workers.

    Attributes:
        starting: the new processes that have not replaced a worker yet.
    """

    def __init__(self, supervisor: WorkerOwner) -> None:
        self._supervisor = supervisor
        self.starting: list[WorkerProcess] = []
        self._is_under_way = False
        self._socket = ControlSocket(
            supervisor.settings.restart.socket,
            lambda channel, message: gevent.spawn(self._answer, channel, message["do"] == "restart"),
        )

    def open(self) -> None:
        """Listen at `restart.socket`, if there is one. Raises StartError."""
        self._socket.open()

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    def ask(self) -> None:
        """Start to replace all workers; never blocks."""
        gevent.spawn(self._run)

    def _answer(self, channel: FdChannel, is_command: bool) -> None:
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
        """Replace all workers. Return the error, None for success; and the number of clients of the new processes."""
        if self._is_under_way:
            self._supervisor.report("restart: another restart is under way")
            return "another restart is under way", 0
        self._is_under_way, clients = True, 0
        try:
            for number in range(self._supervisor.count):
                fault, migrated = self._replace(number)
                if fault is not None:
                    fault = f"w{number}: {fault}"
                    self._supervisor.report(f"restart: stopped, the other workers continue: {fault}")
                    return fault, clients
                clients += migrated
        finally:
            self._is_under_way = False
        self._supervisor.report(f"restart: {self._supervisor.count} new workers serve, with {clients} clients")
        return None, clients

    def _replace(self, number: int) -> tuple[str | None, int]:
        """Replace a worker. Return the error, None for success; and the number of migrated clients."""
        old = self._supervisor.workers[number]
        if not old.accepts:
            return "the worker is not serving; try again", 0
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        with ours, theirs:
            try:
                new = self._supervisor.start(number, theirs.fileno())
            except OSError as error:
                return f"a new process can't be started: {error.strerror}", 0
            old.send({"do": "hand_over"}, [ours.fileno()])
        self.starting.append(new)
        fault, clients = old.await_hand_over(self._supervisor.settings.restart.load_s + HAND_OVER_S)
        self.starting.remove(new)
        if fault is not None:
            new.signal(signal.SIGKILL)
            return new.fault or fault, 0
        self._supervisor.replace(number, new)
        new.settled.wait()
        return (None, clients) if new.is_ready else (f"the new process {new.exit_text}", clients)


# ---- the workers

Report = Callable[[str], None]

RESTART_DELAYS = RestartDelays(first_s=0.25, longest_s=5.0, steady_s=60.0)
"""With longer delays, a worker would be back after its MQTT clients have given up; see `cluster.session_wait_s`."""
MAX_FAILED_STARTS = 5
"""The server stops when a worker fails this often before it serves, and no other worker serves."""
UNRESPONSIVE_S = 3.0
"""A worker that is silent for this time is unresponsive: other workers accept its connections meanwhile."""
POLL_S = 1.0
RELOAD_S = 30.0
"""The time limit for all workers to reload; then systemd gets the message that the reload is done."""
KILL_AFTER_S = 5.0
"""The additional wait after `drain.timeout_s`, which the workers apply themselves."""
MAX_DIRECTORY_CHARS = 78
"""The path of a Unix socket has at most 107 characters; links between workers add 28 to the folder."""
DIRECTORY_PREFIX = "smqrt-workers-"
MEMORY_FOLDER = "/dev/shm"
MIN_FREE_BYTES = 48 << 20
"""The free space in `MEMORY_FOLDER` that the sessions of workers need; it has 64 MiB in containers."""
SECRET_BYTES = 32
MAX_START_LINES = 1000


class Supervisor:
    """The workers of a server. The constructor opens the ports.

    Args:
        settings: all settings of the server.
        count: the number of workers.
        conf: the mako.conf.
        report: called with each line for the terminal.
        reload: reloads the settings of this process, at SIGHUP.

    Attributes:
        stopping: set when the server must stop.

    Raises:
        StartError: an address can't be bound; one sentence.
    """

    def __init__(
        self, settings: Settings, count: int, conf: MakoConf | None, report: Report, reload: Callable[[], object]
    ) -> None:
        self.settings, self.count, self.report = settings, count, report
        self._reload = reload
        self._ports = open_for_workers(settings, conf, count)
        try:
            self._balance = BalanceSockets(count)
        except OSError as error:
            raise StartError(f"Cannot open the sockets of workers: {error.strerror}; raise ulimit -n.") from None
        self._directory = _private_directory()
        secret = os.urandom(SECRET_BYTES)
        self._places = [WorkerPlace(number, count, secret, self._directory) for number in range(count)]
        self.workers: dict[int, WorkerProcess] = {}
        self._leaving: set[WorkerProcess] = set()
        self._has_started = False
        self.stopping = Event()
        self._exit_code = 0
        self._failure: StartError | None = None
        self._systemd = Notifier()
        self._start_lines: set[str] = set()
        self._rolling = RollingRestart(self)

    # ---- the server

    def run(self) -> int:
        """Serve until SIGTERM, SIGINT or the `exit` of an application; return the exit code.

        Raises:
            StartError: the workers can't start; one sentence.
        """
        signals = Signals(
            {
                signal.SIGTERM: self._on_stop,
                signal.SIGINT: self._on_stop,
                signal.SIGUSR1: lambda: self._signal(signal.SIGUSR1),
            },
            {signal.SIGHUP: lambda: gevent.spawn(self._reload_all), signal.SIGUSR2: self._rolling.ask},
        )
        try:
            self._rolling.open()
            greenlets: list[gevent.Greenlet[..., None]] = [
                gevent.spawn(self._start_all, signals),
                gevent.spawn(self._watch),
            ]
            self.stopping.wait()
            self._stop_all()
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
        if self.stopping.is_set():  # second signal: exit at once
            self._signal(signal.SIGKILL)
            shutil.rmtree(self._directory, ignore_errors=True)
            os._exit(1)
        self.stopping.set()

    def _start_all(self, signals: Signals) -> None:
        for numbers in (range(1), range(1, self.count)):  # worker 0 alone; see the module
            for number in numbers:
                gevent.spawn(self._keep_running, number)
            gevent.sleep(0)  # so that the greenlets start
            for number in range(numbers.stop):  # again with worker 0, which may have died meanwhile
                while number not in self.workers or not self.workers[number].is_ready:
                    gevent.sleep(0.02)
        self._has_started = True
        processes = ", ".join(str(self.workers[number].pid) for number in range(self.count))
        self.report(f"{self.count} workers: processes {processes}")
        lines = self.workers[0].lines
        for line in lines:
            self.report(line)
        self._systemd.ready(f"{self.count} workers, {', '.join(lines)}")
        signals.ready()

    # ---- one worker

    def start(self, number: int, take_over: int | None = None) -> WorkerProcess:
        """Start the process of a worker. Raises OSError."""
        ports = {name: sockets for name, sockets in self._ports.items() if name != ADMIN or number == 0}
        worker = WorkerProcess(self._places[number], ports, self._balance.filenos(), self._on_message, take_over)
        self._places[number] = next_place(self._places[number])
        return worker

    def replace(self, number: int, worker: WorkerProcess) -> None:
        """Make another process the worker of this number. The old process exits by itself."""
        self._leaving.add(self.workers[number])
        self.workers[number] = worker
        self._reassign_sockets()

    def _keep_running(self, number: int) -> None:
        """Start a worker, and restart it when it dies."""
        wait_s, failed = RESTART_DELAYS.first_s, 0
        while not self.stopping.is_set():
            try:
                self.workers[number] = self.start(number)
            except OSError as error:
                self._fail(f"A worker can't be started: {error.strerror}.")
                return
            while True:  # also through hot restarts: a replaced process exits before the new one
                worker = self.workers[number]
                worker.ended.wait()
                self._leaving.discard(worker)
                if self.workers[number] is worker:
                    break
            self._reassign_sockets()
            if self.stopping.is_set():
                return
            if monotonic() - worker.began_s >= RESTART_DELAYS.steady_s:
                wait_s = RESTART_DELAYS.first_s
            failed = 0 if worker.is_ready else failed + 1
            if worker.fault is not None and not self._has_started:
                self._fail(worker.fault)
                return
            if failed >= MAX_FAILED_STARTS and not any(one.accepts for one in self.workers.values()):
                self._fail(f"Worker {worker.name} failed {failed} times before it served; it {worker.exit_text}.")
                return
            log.error("%s (process %d) %s; a new one starts in %g s", worker.name, worker.pid, worker.exit_text, wait_s)
            self.stopping.wait(wait_s)
            wait_s = min(wait_s * 2, RESTART_DELAYS.longest_s)

    def _fail(self, why: str) -> None:
        self._failure = self._failure or StartError(why)
        self.stopping.set()

    def _on_message(self, worker: WorkerProcess, message: Message) -> None:
        match message["do"]:
            case "report":
                line = str(message["line"])
                is_starting = not self._has_started and len(self._start_lines) < MAX_START_LINES
                if worker.place.is_first and not worker.is_ready and is_starting:
                    self._start_lines.add(line)
                    self.report(line)
                elif worker.is_ready or line not in self._start_lines:  # all workers print the same lines at the start
                    self.report(f"{worker.name}: {line}")
            case "exit":
                self._exit_code = int(message["code"])
                self.stopping.set()
            case "ready":
                if self._has_started:
                    self.report(f"{worker.name}: process {worker.pid} serves")
                self._reassign_sockets()
            case "left" | "handed_over":
                self._reassign_sockets()

    # ---- all workers

    def _reassign_sockets(self) -> None:
        """Let other workers accept the connections of workers that accept none."""
        accepting = [number for number in range(self.count) if number in self.workers and self.workers[number].accepts]
        self._balance.accepting(accepting)
        covers: dict[int, list[int]] = {number: [] for number in accepting}
        for number in range(self.count):
            if number not in covers and accepting:
                # The next accepting worker, by number: a change of one worker reassigns few sockets.
                covers[next((one for one in accepting if one > number), accepting[0])].append(number)
        for number, covered in covers.items():
            self.workers[number].cover(covered)

    def _watch(self) -> None:
        """Find workers that an application, or SIGSTOP, has made unresponsive."""
        polled_s, watchdog_s = monotonic(), self._systemd.watchdog_s
        while True:
            gevent.sleep(POLL_S)
            now_s = monotonic()
            # When this process itself was stopped, the messages of the workers are still unread.
            was_stopped = now_s - polled_s > 2 * POLL_S
            polled_s = now_s
            for worker in list(self.workers.values()):
                if was_stopped:
                    worker.heard_s = now_s
                silent_s = now_s - worker.heard_s
                is_unresponsive = silent_s > UNRESPONSIVE_S
                name = f"{worker.name} (process {worker.pid})"
                if worker.is_ready and not worker.ended.is_set() and is_unresponsive != worker.is_unresponsive:
                    worker.is_unresponsive = is_unresponsive
                    if is_unresponsive:
                        log.warning("%s is unresponsive; other workers accept its connections", name)
                    self._reassign_sockets()
                elif worker.is_unresponsive and watchdog_s and silent_s > watchdog_s:
                    log.error("%s was unresponsive for %.0f s: killed", name, silent_s)
                    worker.signal(signal.SIGABRT)  # as systemd does: a core file shows where the process hangs

    def _reload_all(self) -> None:
        self._systemd.reloading()
        self._reload()
        ready = [one for one in self.workers.values() if one.is_ready]
        for worker in ready:
            worker.reloaded.clear()
            worker.send({"do": "reload"})
        gevent.wait([one.reloaded for one in ready], timeout=RELOAD_S)
        self._systemd.reloaded()

    def _signal(self, number: int) -> None:
        for worker in (*self.workers.values(), *self._leaving):
            worker.signal(number)

    def _stop_all(self) -> None:
        timeout_s = self.settings.drain.timeout_s
        self._systemd.stopping(timeout_s)
        processes = [*self.workers.values(), *self._leaving, *self._rolling.starting]
        for worker in processes:
            worker.stop()
        ended = gevent.wait([one.ended for one in processes], timeout=timeout_s + KILL_AFTER_S if timeout_s else None)
        if len(ended) < len(processes):
            self._signal(signal.SIGKILL)
            # A killed worker may have lost messages.
            self._exit_code = self._exit_code or 1
        elif not self._exit_code and any(one.exit_code for one in processes if one.is_ready):
            self._exit_code = 1


def _private_directory() -> Path:
    """Create a folder for Unix sockets and shared files that only this user can open.

    It is in TMPDIR when that is set; else in memory, which is never slow; else in the default temporary folder.
    """
    has_room = False
    with contextlib.suppress(OSError):
        free = os.statvfs(MEMORY_FOLDER)
        has_room = os.access(MEMORY_FOLDER, os.W_OK | os.X_OK) and free.f_bavail * free.f_frsize >= MIN_FREE_BYTES
    try:
        if "TMPDIR" not in os.environ and has_room:
            return Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir=MEMORY_FOLDER))
        folder = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX))
        if len(str(folder)) > MAX_DIRECTORY_CHARS:
            folder.rmdir()
            folder = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir="/tmp"))
    except OSError as error:
        raise StartError(f"Cannot create a folder for the sockets of workers: {error}; set TMPDIR.") from None
    return folder

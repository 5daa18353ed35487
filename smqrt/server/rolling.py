"""Hot restart of a server with workers: one worker after the other is replaced by a new process."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from typing import Protocol

import gevent

from smqrt.server.restart.control_socket import RestartDoor
from smqrt.server.worker_process import WorkerProcess
from smqrt.settings.settings import Settings
from smqrt.workers.fd_channel import ChannelError, FdChannel, Message

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

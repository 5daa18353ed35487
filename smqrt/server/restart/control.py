"""Requests for a hot restart: by SIGUSR2, or at its Unix socket, by a new process or `smqrt restart`."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable

import gevent
from gevent import subprocess

from smqrt.process import early_signals
from smqrt.process import environment as launch
from smqrt.server.restart.control_socket import ENVIRONMENT, ControlSocket
from smqrt.server.restart.old_process import HandOver, OldServer
from smqrt.settings.settings import RestartSettings
from smqrt.workers.fd_channel import ChannelError, FdChannel, Message

log = logging.getLogger("smqrt")

CALL_OFF_S, _LOOK_S = 2.0, 0.01
"""What a hand-over may take to end when it is called off."""
_NOT_INHERITED = (ENVIRONMENT, "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID")
"""Of the environment: they name this very process."""


class Restarts:
    """The hot restarts of a server.

    Args:
        server: what is handed over.
        settings: the table `restart`.
        report: takes each line meant for the person at the terminal.
        done: called with its pid when a new process serves; this one is to end then.
    """

    def __init__(
        self,
        server: OldServer,
        settings: RestartSettings,
        report: Callable[[str], None],
        done: Callable[[int], None],
    ) -> None:
        self._server, self._settings = server, settings
        self._report, self._done = report, done
        self._under_way: HandOver | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._finished: HandOver | None = None
        self._door = ControlSocket(settings.socket, self._answer)

    # ---- asked

    def ask(self) -> None:
        """Start a new process that takes this one's place, soon; never blocks. What SIGUSR2 does."""
        gevent.spawn(self._start_new)

    def _start_new(self) -> str | None:
        """Returns why it failed, None when a new process serves."""
        if self._under_way or self._finished:
            self._report("restart: one is under way already")
            return "one is under way already"
        if os.getpid() == 1:
            why = "process 1 of a container can't be replaced; start a new container, with --take-over if it shares"
            self._report(f"restart: {why} restart.socket")
            return why
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        environment[ENVIRONMENT] = str(theirs.fileno())
        try:
            child = subprocess.Popen(
                launch.COMMAND,
                env=environment,
                cwd=launch.FOLDER,
                pass_fds=[theirs.fileno()],
                preexec_fn=early_signals.block,
            )
        except OSError as error:
            ours.close()
            self._report(f"restart: a new process can't be started: {error}")
            return str(error)
        finally:
            theirs.close()
        self._report(f"restart: process {child.pid} starts")
        fault = self._hand_over(FdChannel(ours), child)
        if fault is not None:
            _end(child)
        return fault

    def _hand_over(self, channel: FdChannel, child: subprocess.Popen[bytes] | None = None) -> str | None:
        """Returns why it failed, None when the other process serves."""
        if self._under_way or self._finished:
            with contextlib.suppress(ChannelError):
                channel.send({"do": "abort", "why": "another restart is under way"})
            channel.close()
            return "another restart is under way"
        attempt = self._under_way = HandOver(self._server, channel, self._settings.load_s)
        self._child = child
        try:
            fault = _run(attempt)
            if fault is not None and child is not None:
                _end(child)  # first of all: after the next restart this process ends, and nobody would
        finally:
            self._under_way = self._child = None
        if fault is not None:
            self._report(f"restart: failed, this process goes on: {fault}")
            return fault
        self._finished = attempt
        longest_ms = round(attempt.longest_s * 1000)
        self._report(
            f"restart: process {attempt.pid} serves, with {attempt.moved} clients of this one"
            f" (at most {longest_ms} ms of silence); this one ends"
        )
        self._done(attempt.pid)
        return None

    def hand_over(self, channel: FdChannel) -> tuple[str | None, int]:
        """Let the process at the other end take this one's place; blocks.

        Returns:
            Why it failed, None when it did not; and how many clients the other process has.
        """
        fault = self._hand_over(channel)
        return fault, self._finished.moved if self._finished else 0

    @property
    def is_handed_over(self) -> bool:
        """Whether another process has the sockets."""
        return self._finished is not None

    def finish(self) -> None:
        """The applications have ended: let go of the new process."""
        if self._finished:
            self._finished.finish()

    # ---- the socket

    def open(self) -> None:
        """Listen on the socket of the settings, if there is one.

        Raises:
            StartError: it can't be made, or another server has it.
        """
        self._door.open(is_successor=self._server.is_successor)

    def close(self) -> None:
        """Listen no more; take the socket's file away unless it is the new process's. A hand-over that is under way is
        called off: the server is to end, and the new process would take its place.
        """
        self._call_off()
        self._door.close(leaves_file=self.is_handed_over)

    def _call_off(self) -> None:
        attempt = self._under_way
        if attempt is None:
            return
        if self._child is not None:
            self._child.kill()
        else:
            attempt.abort("the server is being stopped")
        until_s = time.monotonic() + CALL_OFF_S
        while self._under_way is attempt and time.monotonic() < until_s:
            gevent.sleep(_LOOK_S)

    def _answer(self, channel: FdChannel, message: Message) -> None:
        if message["do"] == "restart":
            gevent.spawn(self._answer_command, channel)
        else:
            channel.put_back(message)
            gevent.spawn(self._hand_over, channel)

    def _answer_command(self, channel: FdChannel) -> None:
        why = self._start_new()
        answer: Message = {"do": "failed", "why": why}
        if why is None and self._finished:
            answer = {"do": "done", "pid": self._finished.pid, "clients": self._finished.moved}
        with contextlib.suppress(ChannelError):
            channel.send(answer)
        channel.close()


def _run(attempt: HandOver) -> str | None:
    """Returns why it failed."""
    try:
        attempt.run()
    except ChannelError as error:
        return str(error)
    except Exception as error:
        log.exception("restart: an error of this process")
        return repr(error)
    return None


def _end(child: subprocess.Popen[bytes]) -> None:
    """A new process that could not take over has said so by now, or never will."""
    try:
        child.wait(timeout=1)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()

"""Hot restarts of one process, at SIGUSR2 or by its control socket."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from functools import partial

import gevent
from gevent import subprocess

from smqrt.process import early_signals
from smqrt.process import environment as launch
from smqrt.server.restart.control_socket import ENVIRONMENT, ControlSocket
from smqrt.server.restart.old_process import HandOver, OldServer
from smqrt.settings.settings import RestartSettings
from smqrt.workers.fd_channel import ChannelError, FdChannel, Message

log = logging.getLogger("smqrt")

CANCEL_S, _CANCEL_POLL_S = 2.0, 0.01
"""The time limit of a cancelled hand-over to end."""
NEW_PROCESS_EXIT_S = 1.0
_NOT_INHERITED = (ENVIRONMENT, "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID")
"""Environment variables that are only for this process."""


class Restarts:
    """The hot restarts of a server.

    Args:
        server: the server of this process.
        settings: the table `restart`.
        report: takes each line for the terminal.
        done: called with the pid of the new process when that serves. It has to stop this process.
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
        self._socket = ControlSocket(settings.socket, partial(gevent.spawn, self._answer))

    def ask(self) -> None:
        """Start a new process that replaces this one, soon; never blocks. SIGUSR2 calls this."""
        gevent.spawn(self._start_new)

    def _start_new(self) -> str | None:
        """Start a new process and hand over to it. Return why it failed, None when the new process serves."""
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
            _reap(child)
        return fault

    def _hand_over(self, channel: FdChannel, child: subprocess.Popen[bytes] | None = None) -> str | None:
        """Hand over to the process at the other end. Return why it failed, None when that process serves."""
        if self._under_way or self._finished:
            with contextlib.suppress(ChannelError):
                channel.send({"do": "abort", "why": "another restart is under way"})
            channel.close()
            return "another restart is under way"
        attempt = self._under_way = HandOver(self._server, channel, self._settings.load_s)
        self._child = child
        fault = None
        try:
            attempt.run()
        except ChannelError as error:
            fault = str(error)
        except Exception as error:
            log.exception("restart: an error of this process")
            fault = repr(error)
        finally:
            # Before a next restart can begin: after that this process exits, and would leave the child unreaped.
            if fault is not None and child is not None:
                _reap(child)
            self._under_way = self._child = None
        if fault is not None:
            self._report(f"restart: failed, this process goes on: {fault}")
            return fault
        self._finished = attempt
        longest_ms = round(attempt.longest_s * 1000)
        self._report(
            f"restart: process {attempt.pid} serves, with {attempt.migrated} clients of this one"
            f" (at most {longest_ms} ms of silence); this one ends"
        )
        self._done(attempt.pid)
        return None

    def hand_over(self, channel: FdChannel) -> tuple[str | None, int]:
        """Let the process at the other end replace this one; blocks.

        Returns:
            Why it failed, None for success; and the number of migrated clients.
        """
        fault = self._hand_over(channel)
        return fault, self._finished.migrated if self._finished else 0

    @property
    def is_handed_over(self) -> bool:
        """Whether a new process has taken over the sockets."""
        return self._finished is not None

    def finish(self) -> None:
        """Close the channel to the new process, after the applications of this one have ended."""
        if self._finished:
            self._finished.finish()

    # ---- the control socket

    def open(self) -> None:
        """Listen on the socket of the settings, if there is one.

        Raises:
            StartError: the socket can't be made, or another server uses it.
        """
        self._socket.open(is_successor=self._server.is_successor)

    def close(self) -> None:
        """Stop listening, and cancel a hand-over that is under way: the whole server stops.

        The socket file is removed unless the new process has replaced it.
        """
        attempt = self._under_way
        if attempt is not None:
            if self._child is not None:
                self._child.kill()
            else:
                attempt.abort("the server is being stopped")
            until_s = time.monotonic() + CANCEL_S
            while self._under_way is attempt and time.monotonic() < until_s:
                gevent.sleep(_CANCEL_POLL_S)
        self._socket.close(leaves_file=self.is_handed_over)

    def _answer(self, channel: FdChannel, message: Message) -> None:
        if message["do"] != "restart":  # the hello of a new process
            channel.put_back(message)
            self._hand_over(channel)
            return
        why = self._start_new()
        answer: Message = {"do": "failed", "why": why}
        if why is None and self._finished:
            answer = {"do": "done", "pid": self._finished.pid, "clients": self._finished.migrated}
        with contextlib.suppress(ChannelError):
            channel.send(answer)
        channel.close()


def _reap(child: subprocess.Popen[bytes]) -> None:
    """Wait for the exit of a new process that could not take over; kill it when that takes too long."""
    try:
        child.wait(timeout=NEW_PROCESS_EXIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()

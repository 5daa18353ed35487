"""Requests for a hot restart: by SIGUSR2, or at its Unix socket, by a new process or `smqrt restart`."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gevent
from gevent import socket as gsocket
from gevent import subprocess

from smqrt.errors import StartError
from smqrt.limits import LineLimit
from smqrt.net.fd_channel import ChannelError, FdChannel, Message
from smqrt.restart.giving import HandOver, OldServer
from smqrt.restart.protocol import ENVIRONMENT, HELLO_S
from smqrt.settings import RestartSettings

log = logging.getLogger("smqrt")

STRANGER_BYTES = 4096
"""What a process may say before it is known what it wants."""
BACKLOG = 16
CALL_OFF_S, _LOOK_S = 2.0, 0.01
"""What a hand-over may take to end when it is called off."""
_FOLDER = os.getcwd()  # where this process was started: applications may change to another one
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
        self._socket: gsocket.socket | None = None
        self._accepting: gevent.Greenlet[..., None] | None = None
        self._strangers, self._nonsense = LineLimit(), LineLimit()

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
        command = [sys.executable, *sys.orig_argv[1:]]
        try:
            child = subprocess.Popen(command, env=environment, cwd=_FOLDER, pass_fds=[theirs.fileno()])
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
        path = self._settings.socket
        if not path:
            return
        sock = gsocket.socket(socket.AF_UNIX)
        beside = f"{path}.{os.getpid()}"
        before = os.umask(0o177)
        try:
            if not self._server.is_successor and _answers(path):
                raise StartError(
                    f"restart.socket: another server listens at {path}; start this one with --take-over, or give each "
                    "server a socket of its own."
                )
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside)
            sock.bind(beside)
            sock.listen(BACKLOG)
            _check_replaceable(path)
            os.rename(beside, path)  # nobody finds none there
        except OSError as error:
            sock.close()
            raise StartError(f"restart.socket: {path}: {error.strerror}; give a path in a folder of its own.") from None
        finally:
            os.umask(before)
        self._socket = sock
        self._accepting = gevent.spawn(self._accept, sock)

    def close(self) -> None:
        """Listen no more; take the socket's file away unless it is the new process's. A hand-over that is under way is
        called off: the server is to end, and the new process would take its place.
        """
        self._call_off()
        if self._accepting is not None:
            self._accepting.kill()
        if self._socket is not None:
            self._socket.close()
            if not self.is_handed_over:
                with contextlib.suppress(OSError):
                    os.unlink(self._settings.socket)
            self._socket = None

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

    def _accept(self, sock: gsocket.socket) -> None:
        while True:
            try:
                client, _ = sock.accept()
            except OSError as error:
                log.error("restart.socket: %s", error)
                gevent.sleep(1)
                continue
            self._serve(FdChannel(client, STRANGER_BYTES))

    def _serve(self, channel: FdChannel) -> None:
        """One after the other: who says nothing holds the others for `HELLO_S` at most, and is of this user."""
        pid, uid = channel.peer()
        if not channel.is_of_this_user():
            self._strangers.warn(f"refused: a process of user {uid} (pid {pid}) at restart.socket")
            channel.close()
            return
        try:
            message, fds = channel.receive(HELLO_S)
        except ChannelError as error:
            self._nonsense.warn(f"refused: process {pid} at restart.socket: {error}")
            channel.close()
            return
        for fd in fds:
            os.close(fd)
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


def _answers(path: str) -> bool:
    """Whether a server listens there."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


def _check_replaceable(path: str) -> None:
    """Raises FileExistsError when something else than a socket is there."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(Path(path).lstat().st_mode):
            raise FileExistsError(17, "there is a file that is no socket")


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

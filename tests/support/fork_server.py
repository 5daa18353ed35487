"""Processes of `smqrt` without the cost of its imports.

Most of the CPU time of a short-lived server is the import of its modules, and the tests start a thousand servers. The
fork server is a process that has imported them and does nothing else; each `smqrt` of a test is a fork of it. After the
fork such a process is like any other: it has its own arguments, environment, folder, files and signals.

Run as a module, this file is the fork server itself.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).parent.parent.parent
REQUEST_BYTES = 256 * 1024
NUMBER = struct.Struct("!i")
IMPORT_TIME_VARIABLES = ("LD_", "PYTHON", "GEVENT", "SMQRT_KERNELS", "JAVA", "SPARK")
"""Variables that a process reads while it is loaded, or that its libraries copy: a fork would ignore a new value."""


class ForkServerError(Exception):
    """The fork server ended, and with it the exit codes of its forks."""


class ForkedProcess:
    """A process of `smqrt`, with the methods of `subprocess.Popen` that tests use.

    Attributes:
        pid: its number.
        returncode: as of `Popen`; None while it runs.
        stdout: standard output and errors, as text.
    """

    def __init__(self, arguments: Sequence[str], cwd: Path | None, env: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        output, writer = os.pipe()
        self._status, status_writer = os.pipe()
        self.stdout: IO[str] = open(output)  # noqa: SIM115  # closed by its reader
        request = json.dumps([list(arguments), str(cwd or os.getcwd()), dict(env)]).encode()
        try:
            socket.send_fds(_fork_server(), [request], [writer, status_writer])
        finally:
            os.close(writer)
            os.close(status_writer)
        self.pid = self._read_number()

    def _read_number(self) -> int:
        data = os.read(self._status, NUMBER.size)
        if not data:
            raise ForkServerError("the fork server ended")
        return int(NUMBER.unpack(data)[0])

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code when the process has ended.

        Raises:
            subprocess.TimeoutExpired: after `timeout` seconds.
        """
        if self.returncode is None:
            ready = select.poll()  # `select` fails in a process with a thousand files
            ready.register(self._status, select.POLLIN)
            if not ready.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("smqrt", timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(self._read_number())
            os.close(self._status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def is_possible(env: Mapping[str, str]) -> bool:
    """Return whether a fork can have this environment."""
    return all(os.environ.get(name) == value for name, value in env.items() if name.startswith(IMPORT_TIME_VARIABLES))


@functools.cache
def _fork_server() -> socket.socket:
    """Start the fork server of this process; it ends when this process ends."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES)
    command = [sys.executable, "-m", __name__, str(its.fileno())]
    subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, pass_fds=[its.fileno()])
    its.close()
    return ours


# ---- In the fork server


def serve_forks(requests: socket.socket) -> tuple[list[str], str, dict[str, str], list[int]] | None:
    """Fork for each request until the socket is closed.

    Returns:
        In a fork: the request. In the fork server itself, at its end: None.
    """
    import posix  # gevent has patched the functions of `os`

    from gevent.monkey import get_original

    poll = get_original("select", "poll")()
    poll.register(requests, select.POLLIN)
    running: dict[int, tuple[int, int]] = {}  # by pidfd: process, status pipe
    while True:
        for fd, _ in poll.poll():
            if fd in running:
                poll.unregister(fd)
                pid, status = running.pop(fd)
                with contextlib.suppress(BrokenPipeError):  # the test did not wait for it
                    os.write(status, NUMBER.pack(posix.waitpid(pid, 0)[1]))
                os.close(status)
                os.close(fd)
                continue
            data, fds, _, _ = socket.recv_fds(requests, REQUEST_BYTES, 2)
            if not data:
                return None
            arguments, cwd, env = json.loads(data)
            if not (pid := posix.fork()):
                requests.close()  # before its number belongs to another file
                return arguments, cwd, env, fds
            os.close(fds[0])
            running[pidfd := os.pidfd_open(pid)] = pid, fds[1]
            poll.register(pidfd, select.POLLIN)
            os.write(fds[1], NUMBER.pack(pid))


def become(arguments: list[str], cwd: str, env: dict[str, str], fds: list[int]) -> None:
    """Give a fork what a new process gets from its parent."""
    from smqrt.process import current_process

    os.dup2(fds[0], 1)
    os.dup2(fds[0], 2)
    os.closerange(3, 1 << 20)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    sys.argv = ["smqrt", *arguments]
    sys.orig_argv = [sys.executable, "-m", "smqrt", *arguments]
    sys.path[0] = cwd
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]  # as PYTHONUNBUFFERED does
    current_process.FOLDER = current_process.start_folder()
    current_process.COMMAND = list(sys.orig_argv)


def main(fd: int) -> None:
    from gevent import monkey

    monkey.patch_all()  # first, as `smqrt serve` does
    import gc

    gc.disable()
    import smqrt.apps.lua.applications
    import smqrt.cli.serve
    import smqrt.server.runtime  # noqa: F401

    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Not a socket of gevent: its hub must be made after the fork.
    request: Any = serve_forks(monkey.get_original("socket", "socket")(fileno=fd))
    if request:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        become(*request)
        runpy.run_module("smqrt", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""Shell commands as child processes, like `popen` and `system` of C.

`posix_spawn` starts the child (decision 0019): no Python code runs between fork and exec. The child leads its own
session and process group. It inherits standard output and standard error, but no other descriptor of the server. Its
standard input is a pipe or `/dev/null`, because a background process group cannot read from a terminal.
"""

from __future__ import annotations

import os
import resource
import signal
from contextlib import suppress
from typing import Any

from gevent import get_hub, monkey
from gevent.lock import BoundedSemaphore

from smqrt.errors import StreamError
from smqrt.loop.readiness import READ, WRITE, Ready, Signal, block
from smqrt.loop.scheduling import share

MAX_READ_BYTES = 64 << 10
"""The most that one read returns."""
TERMINATE_S = 2.0
"""From SIGTERM to SIGKILL."""

_SHELL = "/bin/sh"
_FILES = 1024  # the usual soft limit; the server has raised its own
_spawn = monkey.get_original("os", "posix_spawn")
_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


def has_shell() -> bool:
    """Return whether the system has a shell."""
    return os.access(_SHELL, os.X_OK)


def inheritable_descriptors() -> list[int]:
    """Return the descriptors over 2 that a child would inherit: files opened by Lua's own `io`.

    Takes some milliseconds with thousands of connections: call it in a thread.
    """
    found = []
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # closed meanwhile
            if int(name) > 2 and os.get_inheritable(int(name)):
                found.append(int(name))
    return found


class ShellChild:
    """A shell command. Create it in the main thread.

    Attributes:
        pid: the shell's process ID, also the ID of its group.
        status: the exit status, or the negative number of the signal that ended it; None while it runs.

    Args:
        command: for the shell; without NUL characters.
        mode: "r" to read its standard output, "w" to write its standard input, empty for neither.
        inherited: the current result of `inheritable_descriptors`; the child gets none of them.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: bytes, mode: str, inherited: list[int]) -> None:
        self.status: int | None = None
        self._exit = Signal()
        self._write_lock = BoundedSemaphore(1)
        self._kill_timer: Any = None
        self._is_ending = False
        loop: Any = get_hub().loop
        loop.install_sigchld()  # first: the child may exit before `posix_spawn` returns
        self._fd = child_fd = -1
        if mode:
            reading, writing = os.pipe()
            self._fd, child_fd = (reading, writing) if mode == "r" else (writing, reading)
            os.set_blocking(self._fd, False)
        try:
            self.pid = _spawn_shell(command, mode, child_fd, inherited)
        except BaseException:
            if self._fd >= 0:
                os.close(self._fd)
            raise
        finally:
            if child_fd >= 0:
                os.close(child_fd)
        # Register before other greenlets run: the loop reaps every child and notifies only registered watchers.
        self._child = loop.child(self.pid)
        self._child.start(self._exited)
        self._ready = Ready(self._fd, READ if mode == "r" else WRITE) if self._fd >= 0 else None

    def read_now(self) -> bytes | None:
        """Return available output, empty at the end; None when there is none yet.

        Raises:
            StreamError: "closed" when the pipe was closed.
        """
        if self._fd < 0:
            raise StreamError("closed")
        try:
            return os.read(self._fd, MAX_READ_BYTES)
        except BlockingIOError:
            return None

    def read(self) -> bytes:
        """Return the next output, empty at the end; blocks this greenlet. Raises as `read_now`."""
        while (data := self.read_now()) is None:
            self._wait_for_pipe()
        return data

    def write_now(self, data: bytes) -> int:
        """Write input without waiting; return the number of bytes written.

        Raises:
            StreamError: "closed" when the pipe was closed.
            OSError: the child has closed its input.
        """
        if self._fd < 0:
            raise StreamError("closed")
        if self._write_lock.locked():  # a blocked `write` goes first
            return 0
        with suppress(BlockingIOError):
            return os.write(self._fd, data)
        return 0

    def write(self, data: bytes) -> None:
        """Write all of `data`; blocks this greenlet while the pipe is full. Raises as `write_now`."""
        turns = share()
        with self._write_lock:
            rest = memoryview(data)
            while rest:
                if turns.spent():
                    turns.wait()
                if self._fd < 0:
                    raise StreamError("closed")
                try:
                    rest = rest[os.write(self._fd, rest) :]
                except BlockingIOError:
                    self._wait_for_pipe()

    def _wait_for_pipe(self) -> None:
        assert self._ready is not None
        block(self._ready.wait())

    def close_pipe(self) -> None:
        """Close this end of the pipe: the child reads the end of its input, or cannot write any more.

        Waiting calls raise StreamError "closed". A second call does nothing.
        """
        if self._fd < 0:
            return
        assert self._ready is not None
        self._ready.close(StreamError("closed"))
        fd, self._fd = self._fd, -1
        os.close(fd)

    def wait(self) -> int:
        """Wait for the exit and return the status; blocks this greenlet."""
        if self.status is None:
            block(self._exit.wait())
        assert self.status is not None
        return self.status

    def close(self) -> None:
        """Close the pipe and send SIGTERM to the group, and SIGKILL when the shell still runs after `TERMINATE_S`.

        Does not block; a second call does nothing.
        """
        self.close_pipe()
        if self._is_ending or self.status is not None:
            return
        self._is_ending = True
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # a stopped process handles SIGTERM only after SIGCONT
        self._kill_timer = get_hub().loop.timer(TERMINATE_S)
        self._kill_timer.start(self._signal, signal.SIGKILL)

    def _signal(self, number: int) -> None:
        """Signal the group while the shell runs: afterwards the system may reuse its number."""
        if self.status is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _exited(self) -> None:
        if self._is_ending:
            with suppress(ProcessLookupError, PermissionError):  # processes that the shell left in its group
                os.killpg(self.pid, signal.SIGKILL)
        self.status = os.waitstatus_to_exitcode(self._child.rstatus)
        self._child.close()
        if self._kill_timer is not None:
            self._kill_timer.stop()
            self._kill_timer.close()
        self._exit.fire()


def _spawn_shell(command: bytes, mode: str, child_fd: int, inherited: list[int]) -> int:
    actions: list[tuple[Any, ...]] = []
    if mode == "w":
        actions.append((os.POSIX_SPAWN_DUP2, child_fd, 0))
    else:
        actions.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
    if mode == "r":
        actions.append((os.POSIX_SPAWN_DUP2, child_fd, 1))
    actions += [(os.POSIX_SPAWN_CLOSE, fd) for fd in inherited]
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    files = _FILES if soft == resource.RLIM_INFINITY else min(_FILES, soft)
    script = f'ulimit -S -n {files}; exec {_SHELL} -c -- "$1"'
    return int(
        _spawn(
            _SHELL,
            ["sh", "-c", script, "sh", command],
            os.environ,
            file_actions=actions,
            setsid=True,
            setsigmask=[],
            setsigdef=_SIGNALS,  # otherwise signals that the server ignores stay ignored
        )
    )

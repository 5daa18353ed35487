"""Commands of the shell as child processes without a terminal, for gevent: what `popen` and `system` are in C.

The child is started by `posix_spawn`, as those on a terminal are (decision 0019): no Python runs between fork and exec.
It leads a session and a process group of its own, and inherits standard output and standard error, but no other
descriptor of the server. Its standard input is a pipe or `/dev/null`: a group in the background can't read a terminal.
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
"""Of one read."""
TERMINATE_S = 2.0
"""For a child to end when it is asked to; then it is killed."""

_SHELL = "/bin/sh"
_FILES = 1024  # what programs expect; the server has raised its own limit
_spawn = monkey.get_original("os", "posix_spawn")
_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


def has_shell() -> bool:
    """Whether there is a shell that runs commands."""
    return os.access(_SHELL, os.X_OK)


def inheritable_descriptors() -> list[int]:
    """The descriptors of this process that a child would inherit, beside the first three: files that Lua's own `io` has
    opened. Takes some milliseconds with thousands of connections: for a thread."""
    found = []
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # closed meanwhile
            if int(name) > 2 and os.get_inheritable(int(name)):
                found.append(int(name))
    return found


class ShellChild:
    """A command that the shell runs. Made in the main thread.

    Attributes:
        pid: the shell's process, and its group.
        status: the exit status, below 0 the number of the signal that ended it; None while it runs.

    Args:
        command: for the shell; without NUL characters.
        mode: "r" to read its standard output, "w" to write its standard input, empty for neither.
        inherited: what `inheritable_descriptors` gave just before.

    Raises:
        OSError: it can't be started.
    """

    def __init__(self, command: bytes, mode: str, inherited: list[int]) -> None:
        self.status: int | None = None
        self._exit = Signal()
        self._writing = BoundedSemaphore(1)
        self._killer: Any = None
        self._is_ending = False
        loop: Any = get_hub().loop
        loop.install_sigchld()  # a command may have ended when `posix_spawn` returns
        self._fd, theirs = _pipe(mode)
        try:
            self.pid = _started(command, mode, theirs, inherited)
        except BaseException:
            if self._fd >= 0:
                os.close(self._fd)
            raise
        finally:
            if theirs >= 0:
                os.close(theirs)
        # Before anybody else runs: the loop collects every child, and tells those that are registered by then.
        self._child = loop.child(self.pid)
        self._child.start(self._exited)
        self._ready = Ready(self._fd, READ if mode == "r" else WRITE) if self._fd >= 0 else None

    def read_now(self) -> bytes | None:
        """What there is next of its output, empty at the end; None when that would have to be waited for.

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
        """The same; blocks this greenlet until there is something."""
        while (data := self.read_now()) is None:
            self._wait_for_pipe()
        return data

    def write_now(self, data: bytes) -> int:
        """Give it input, as much as it takes at once; returns the number of bytes.

        Raises:
            StreamError: "closed" when the pipe was closed.
            OSError: it takes no more.
        """
        if self._fd < 0:
            raise StreamError("closed")
        if self._writing.locked():  # what others write has its turn first
            return 0
        with suppress(BlockingIOError):
            return os.write(self._fd, data)
        return 0

    def write(self, data: bytes) -> None:
        """Give it all of `data`; blocks this greenlet while it takes none. Raises as `write_now`."""
        turns = share()
        with self._writing:
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
        """Close this end of the pipe: it reads the end of its input, or can't write any more. Whoever waits gets
        StreamError "closed". A second call does nothing."""
        if self._fd < 0:
            return
        assert self._ready is not None
        self._ready.close(StreamError("closed"))
        fd, self._fd = self._fd, -1
        os.close(fd)

    def wait(self) -> int:
        """Wait until it has ended; blocks this greenlet. Returns the status."""
        if self.status is None:
            block(self._exit.wait())
        assert self.status is not None
        return self.status

    def close(self) -> None:
        """Close the pipe and end the process group: by SIGTERM, and killed when the shell is still there two seconds
        later. Does not block; a second call does nothing."""
        self.close_pipe()
        if self._is_ending or self.status is not None:
            return
        self._is_ending = True
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # one that is stopped would not hear it
        self._killer = get_hub().loop.timer(TERMINATE_S)
        self._killer.start(self._signal, signal.SIGKILL)

    def _signal(self, number: int) -> None:
        """For the whole group, as long as the child leads it: then its number is nobody else's."""
        if self.status is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _exited(self) -> None:
        if self._is_ending:
            with suppress(ProcessLookupError, PermissionError):  # what it has left behind in its group
                os.killpg(self.pid, signal.SIGKILL)
        self.status = os.waitstatus_to_exitcode(self._child.rstatus)
        self._child.close()
        if self._killer is not None:
            self._killer.stop()
            self._killer.close()
        self._exit.fire()


def _pipe(mode: str) -> tuple[int, int]:
    """This end, which does not block, and that of the child; -1 where there is none."""
    if not mode:
        return -1, -1
    reading, writing = os.pipe()
    ours, theirs = (reading, writing) if mode == "r" else (writing, reading)
    os.set_blocking(ours, False)
    return ours, theirs


def _started(command: bytes, mode: str, theirs: int, inherited: list[int]) -> int:
    actions: list[tuple[Any, ...]] = []
    if mode == "w":
        actions.append((os.POSIX_SPAWN_DUP2, theirs, 0))
    else:
        actions.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
    if mode == "r":
        actions.append((os.POSIX_SPAWN_DUP2, theirs, 1))
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
            setsigdef=_SIGNALS,  # what the server ignores would stay ignored
        )
    )

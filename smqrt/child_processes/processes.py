"""Child processes: pseudo terminals and shell commands (spec: bas-api §7, §17).

`posix_spawn` starts the child: no Python code runs between fork and exec, where locks of other threads would stay
locked. The loop watches the terminal and the process. The child leads a new session and process group, and inherits no
descriptor of the server. Closing the `Pty` sends SIGHUP to the group, and SIGKILL when the child does not exit.
"""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import signal
import struct
import sys
import termios
import tty
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gevent import get_hub, monkey
from gevent.lock import BoundedSemaphore

from smqrt.errors import ArgumentError, StreamError
from smqrt.loop.scheduling import READ, WRITE, Ready, Signal, TimedDeferred, block, share

MAX_BUFFERED_BYTES = 64 << 10
"""Limit of unread output; when it is reached, the child blocks in its next write."""
WRITE_S = 30.0
"""Time limit of a write while the child does not read its input."""
NATURAL_S, HANG_UP_S, KILL_S = 1.0, 2.0, 2.0
"""Time to wait for the child to exit: by itself, after SIGHUP, and after SIGKILL."""
LATE_OUTPUT_S = 0.1
"""Time for output to arrive after the child has exited."""
ROWS, COLUMNS = 24, 80

_LAUNCHER = Path(__file__).with_name("pty_launcher.py")
_spawn = monkey.get_original("os", "posix_spawn")
# The kernel rejects a default action for SIGKILL and SIGSTOP.
_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})

_INPUT, _OUTPUT, _LOCAL = 0, 1, 3  # indices in the list that tcgetattr returns
_FLAGS: Mapping[str, tuple[int, int]] = {
    "brkint": (_INPUT, termios.BRKINT),
    "icrnl": (_INPUT, termios.ICRNL),
    "inlcr": (_INPUT, termios.INLCR),
    "igncr": (_INPUT, termios.IGNCR),
    "ixon": (_INPUT, termios.IXON),
    "ixoff": (_INPUT, termios.IXOFF),
    "opost": (_OUTPUT, termios.OPOST),
    "onlcr": (_OUTPUT, termios.ONLCR),
    "ocrnl": (_OUTPUT, termios.OCRNL),
    "isig": (_LOCAL, termios.ISIG),
    "icanon": (_LOCAL, termios.ICANON),
    "echo": (_LOCAL, termios.ECHO),
    "echoe": (_LOCAL, termios.ECHOE),
    "echok": (_LOCAL, termios.ECHOK),
    "echonl": (_LOCAL, termios.ECHONL),
    "noflsh": (_LOCAL, termios.NOFLSH),
    "tostop": (_LOCAL, termios.TOSTOP),
}
"""Terminal flags by their names in stty(1)."""


@dataclass(frozen=True)
class PtyCommand:
    """A command to run.

    Attributes:
        words: the command and its arguments.
        name: argv[0]; the command by default.
        environment: variables in addition to those of the server; the value None removes a variable.
        stty: the terminal's mode: None for raw; otherwise words of stty(1), such as "-echo", that change the default
            mode. The default mode converts LF to CR LF.
        separate_stderr: whether standard error is a separate pipe.
    """

    words: Sequence[str]
    name: str | None = None
    environment: Mapping[str, str | None] = field(default_factory=dict)
    stty: Sequence[str] | None = None
    separate_stderr: bool = False

    def variables(self) -> dict[str, str]:
        """Return the complete environment of the child."""
        merged = {"TERM": "xterm", **os.environ, **self.environment}
        return {name: value for name, value in merged.items() if value is not None}


Output = tuple[bytes, bool] | None | Literal[False]
"""The data and whether it came from standard error; None at the end, False after the timeout."""


class _OutputBuffer:
    """Output of the child: the loop reads a descriptor until the buffer is full."""

    def __init__(self, fd: int, arrived: Callable[[], object]) -> None:
        os.set_blocking(fd, False)
        self.fd, self.ended, self.paused, self.discards = fd, False, False, False
        self.buffer = bytearray()
        self.first_arrival = 0  # number of the first arrival in the buffer; 0 when empty
        self._arrived = arrived
        self._watcher: Any = get_hub().loop.io(fd, READ)
        self._watcher.start(self._ready)

    def _ready(self) -> None:
        self.receive()
        self._arrived()

    def receive(self) -> bool:
        """Read available output. Return False when there is none yet."""
        try:
            data = os.read(self.fd, MAX_BUFFERED_BYTES - len(self.buffer))
        except BlockingIOError:
            return False
        except OSError:  # EIO: all processes have closed the terminal
            data = b""
        if not self.discards:
            self.buffer += data
        if not data:
            self.end()
        self._watch()
        return True

    @property
    def full(self) -> bool:
        return len(self.buffer) >= MAX_BUFFERED_BYTES

    def take(self) -> bytes:
        data = bytes(self.buffer)
        self.buffer.clear()
        self.first_arrival = 0
        self._watch()
        return data

    def pause(self, paused: bool) -> None:
        self.paused = paused
        self._watch()

    def discard(self) -> None:
        """Drop the buffer and all later output."""
        self.discards = True
        self.buffer.clear()
        self.pause(False)

    def _watch(self) -> None:
        if self.ended:
            return
        if self.paused or self.full:
            self._watcher.stop()
        elif not self._watcher.active:
            self._watcher.start(self._ready)

    def end(self) -> None:
        """Mark the output as complete."""
        self.ended = True
        self._watcher.stop()

    def close(self) -> None:
        """Close the watcher; the owner closes the descriptor."""
        if not self.ended:
            self.end()
        self._watcher.close()


class PtyRead(TimedDeferred[Output]):
    """A read that waits for output; resolved in the loop greenlet."""

    __slots__ = ()

    def _expired(self) -> None:
        self.resolve(False)


class Pty:
    """A child process on a pseudo terminal. Create it in the main thread.

    Attributes:
        pid: the child's process ID, also the ID of its group.
        status: the exit status, or 128 plus the number of the signal that ended the child; None while it runs.
        on_output: called in the loop greenlet when output or its end has arrived.
        arrivals: number of these calls.
        progress: arrivals plus reads that returned output.
        end_reported: whether a read has returned the end.

    Args:
        command: the command to run.

    Raises:
        ArgumentError: an unknown word in `stty`, or a NUL character.
        StreamError: "notfound", "noaccess" or "failed": the command cannot be run.
    """

    def __init__(self, command: PtyCommand) -> None:
        texts = [*command.words, command.name or "", *command.environment, *filter(None, command.environment.values())]
        if any("\0" in text for text in texts):
            raise ArgumentError("forkpty: a NUL character in an argument or a variable")
        if any(not name or "=" in name for name in command.environment):
            raise ArgumentError("forkpty: the name of a variable is empty or has a '='")
        path = command.variables().get("PATH", os.defpath)
        if shutil.which(command.words[0], path=path) is None:  # here: the launcher could only report an exit status
            exists = "/" in command.words[0] and os.path.exists(command.words[0])
            raise StreamError("noaccess" if exists else "notfound", f"{command.words[0]} cannot be run")
        self.status: int | None = None
        self.on_output: Callable[[], object] = lambda: None
        self.arrivals, self._output_reads, self.end_reported = 0, 0, False
        self._closed = False
        self._exit = Signal()
        self._reads: deque[PtyRead] = deque()
        self._late_timer: Any = None
        self._kill_timer: Any = None
        self._write_lock = BoundedSemaphore(1)
        self._launch(command)
        self._out = _OutputBuffer(self._master, self._arrived)
        self._err = _OutputBuffer(self._errors, self._arrived) if command.separate_stderr else None
        self._sources = [self._out, *([self._err] if self._err else [])]
        self._writable = Ready(self._master, WRITE)

    def _launch(self, command: PtyCommand) -> None:
        """Open the terminal and start the child."""
        loop: Any = get_hub().loop
        loop.install_sigchld()  # first: the child may exit before `_spawn` returns
        self._master, slave = os.openpty()
        self._errors, errors = os.pipe() if command.separate_stderr else (-1, slave)
        try:
            _set_mode(slave, command.stty)
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))  # the pixels are 0
            words = [command.words[0], command.name or command.words[0], *command.words[1:]]
            self.pid = int(
                _spawn(
                    sys.executable,
                    [sys.executable, "-I", "-S", str(_LAUNCHER), *words],
                    command.variables(),
                    file_actions=[
                        (os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate((slave, slave, errors))
                    ],
                    setsid=True,
                    setsigmask=[],
                    setsigdef=_SIGNALS,  # otherwise signals that the server ignores stay ignored
                )
            )
        except BaseException as error:
            self._close_descriptors()
            if isinstance(error, OSError):
                raise StreamError("failed", error.strerror or "") from None
            raise
        finally:
            for fd in {slave, errors}:
                os.close(fd)
        # Register before other greenlets run: the loop reaps every child and notifies only registered watchers.
        self._child = loop.child(self.pid, ref=False)
        self._child.start(self._exited)

    def _close_descriptors(self) -> None:
        os.close(self._master)
        if self._errors >= 0:
            os.close(self._errors)

    # ---- output

    @property
    def ended(self) -> bool:
        """Whether the output is complete."""
        return self._closed or all(source.ended for source in self._sources)

    @property
    def unread(self) -> bool:
        """Whether there is unread output, or an end that no read has returned."""
        return any(source.buffer for source in self._sources) or (self.ended and not self.end_reported)

    @property
    def progress(self) -> int:
        """Arrivals plus reads that returned output."""
        return self.arrivals + self._output_reads

    def read(self, timeout_s: float | None = None) -> PtyRead:
        """Read all buffered output of the stream with the older output.

        Args:
            timeout_s: seconds that the returned read waits for output; None for no limit.
        """
        read = PtyRead(timeout_s)
        self._reads = deque(one for one in self._reads if not one.done)  # without expired reads
        self._reads.append(read)
        self._serve()
        return read

    def _serve(self) -> None:
        """Resolve waiting reads, in their order, while there is output or its end."""
        while self._reads:
            if self._reads[0].done:  # it has expired, or its greenlet has ended
                self._reads.popleft()
            elif filled := [source for source in self._sources if source.buffer]:
                self._output_reads += 1
                oldest = min(filled, key=lambda one: one.first_arrival)
                self._reads.popleft().resolve((oldest.take(), oldest is self._err))
            elif self.ended:
                self.end_reported = True
                self._reads.popleft().resolve(None)
            else:
                return

    def _arrived(self) -> None:
        self.arrivals += 1
        for source in self._sources:
            if source.buffer and not source.first_arrival:
                source.first_arrival = self.arrivals
        self._serve()
        self.on_output()

    def pause(self, paused: bool) -> None:
        """Stop reading output, so that the child blocks when it writes; False resumes."""
        if not self._closed:
            for source in self._sources:
                source.pause(paused)

    # ---- input

    def write(self, data: bytes) -> None:
        """Write to the child's input; blocks while the input buffer is full.

        Raises:
            StreamError: "timeout" after `WRITE_S`, "terminated" when the child has exited.
        """
        with self._write_lock:
            view = memoryview(data)
            while view:
                if self._closed or self.status is not None:
                    raise StreamError("terminated")
                try:
                    view = view[os.write(self._master, view) :]
                except BlockingIOError:
                    block(self._writable.wait(WRITE_S))
                except OSError:
                    raise StreamError("terminated") from None

    def window_size(self) -> tuple[int, int]:
        """Return rows and columns of the terminal. Raises StreamError "terminated" when it is closed."""
        if self._closed:
            raise StreamError("terminated")
        rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(self._master, termios.TIOCGWINSZ, bytes(8)))
        return rows, columns

    def set_window_size(self, rows: int, columns: int) -> None:
        """Change rows and columns; the child gets SIGWINCH. Raises StreamError "terminated" when it is closed."""
        if not (0 < rows < 1 << 16 and 0 < columns < 1 << 16):
            raise ArgumentError("winsize: rows and columns must be 1 to 65,535")
        if self._closed:
            raise StreamError("terminated")
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    # ---- closing

    def close(self) -> None:
        """Close the terminal and send SIGHUP to the child; send SIGKILL if it still runs after `HANG_UP_S`.

        Does not block; a second call does nothing.
        """
        if self._closed:
            return
        self._closed = True  # first: the calls below resume waiting greenlets
        self._writable.close(StreamError("terminated"))
        for source in self._sources:
            source.close()
        self._close_descriptors()
        if self._late_timer is not None:
            self._late_timer.stop()
            self._late_timer.close()
            self._late_timer = None
        if self.status is None:
            self._signal(signal.SIGHUP)
            self._signal(signal.SIGCONT)  # a stopped process handles SIGHUP only after SIGCONT
            self._kill_timer = get_hub().loop.timer(HANG_UP_S)
            self._kill_timer.start(self._signal, signal.SIGKILL)
        get_hub().loop.run_callback(self._serve)  # resolves waiting reads, in the loop greenlet

    def close_and_wait(self) -> int | None:
        """Wait `NATURAL_S` for the child to exit, then close as `close`. Drops output; blocks the greenlet.

        Returns:
            The exit status; None when SIGKILL did not end the child in time.
        """
        for source in () if self._closed else self._sources:
            source.discard()
        self._wait(NATURAL_S)
        self.close()
        return self._wait(HANG_UP_S + KILL_S)

    def terminate(self) -> int | None:
        """Send SIGTERM, close as `close`, and wait for the exit. Blocks and returns as `close_and_wait`."""
        self._signal(signal.SIGTERM)
        self.close()
        return self._wait(HANG_UP_S + KILL_S)

    def _wait(self, timeout_s: float) -> int | None:
        if self.status is None:
            with suppress(StreamError):
                block(self._exit.wait(timeout_s))
        return self.status

    def _signal(self, number: int) -> None:
        """Signal the group while the child runs: afterwards the system may reuse the group's number."""
        if self.status is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _exited(self) -> None:
        """Callback of the loop: the child has exited."""
        if self._closed:
            with suppress(ProcessLookupError, PermissionError):  # processes that the child left in its group
                os.killpg(self.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(self._child.rstatus)
        self.status = code if code >= 0 else 128 - code
        self._child.close()
        if self._kill_timer is not None:
            self._kill_timer.stop()
            self._kill_timer.close()
        if not self._closed:
            self._writable.fail(StreamError("terminated"))
            self._late_timer = get_hub().loop.timer(LATE_OUTPUT_S, LATE_OUTPUT_S)
            self._late_timer.start(self._read_late_output)
        self._exit.fire()

    def _read_late_output(self) -> None:
        """End the output, although other processes that the child started may still have the terminal open."""
        waiting = [source for source in self._sources if not (source.ended or source.full or source.paused)]
        for source in waiting:
            if not source.receive():
                source.end()
        if self.ended:
            self._late_timer.stop()
        if waiting:
            self._arrived()


def _set_mode(fd: int, stty: Sequence[str] | None) -> None:
    """Set the mode of a terminal; see `PtyCommand`."""
    if stty is None or "raw" in stty:
        tty.setraw(fd)
    mode = termios.tcgetattr(fd)
    for word in stty or ():
        name = word.removeprefix("-")
        if name in ("raw", "sane", "cooked"):
            continue
        if name not in _FLAGS:
            raise ArgumentError(f"forkpty: unknown stty word '{word}'; possible are {', '.join(_FLAGS)}, raw and sane")
        place, bit = _FLAGS[name]
        mode[place] = mode[place] & ~bit if word.startswith("-") else mode[place] | bit
    termios.tcsetattr(fd, termios.TCSANOW, mode)


# ---- Shell commands, like `popen` and `system` of C
#
# `posix_spawn` starts the child (decision 0019): no Python code runs between fork and exec. The child leads a new
# session and process group. It inherits standard output and standard error, but no other descriptor of the server. Its
# standard input is a pipe or `/dev/null`, because a background process group cannot read from a terminal.

MAX_READ_BYTES = 64 << 10
"""Maximum size of one read."""
TERMINATE_S = 2.0
"""Time from SIGTERM to SIGKILL."""

_SHELL = "/bin/sh"
_FILES = 1024  # the usual soft limit; the server has raised its own


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
        status: the exit status, or the negative number of the signal that ended the shell; None while it runs.

    Args:
        command: command line for the shell; without NUL characters.
        mode: "r" to read its standard output, "w" to write its standard input, empty for neither.
        inherited: the current result of `inheritable_descriptors`; the child gets none of them.

    Raises:
        OSError: the shell cannot be started.
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
        """Return available output, empty at the end of the output; None when no output is available yet.

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
        if self._write_lock.locked():  # a blocked `write` comes first
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
        """Close this end of the pipe: the child reads the end of its input, or can no longer write.

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
        """Close the pipe and send SIGTERM to the group; send SIGKILL if the shell still runs after `TERMINATE_S`.

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
        """Signal the group while the shell runs: afterwards the system may reuse the group's number."""
        if self.status is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _exited(self) -> None:
        """Callback of the loop: the shell has exited."""
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
    """Start a shell and return its process ID."""
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
    # The first shell lowers the limit of open files, the second one runs the command.
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

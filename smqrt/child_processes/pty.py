"""Child processes on a pseudo terminal, for gevent (spec: bas-api §7, §17: forkpty).

The child is started by `posix_spawn`: no Python runs between fork and exec, where the locks of other threads would stay
locked. The loop watches its terminal and its end. It leads a session and a process group of its own, inherits no
descriptor of the server, and is gone with its group when the `Pty` is closed: hung up, and killed when it does not go.
"""

from __future__ import annotations

import fcntl
import os
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
from smqrt.loop.readiness import READ, WRITE, Ready, Signal, TimedDeferred, block

MAX_BUFFERED_BYTES = 64 << 10
"""Of output that nobody has read; then the child waits."""
WRITE_S = 30.0
"""For a child to take its input."""
NATURAL_S, HANG_UP_S, KILL_S = 1.0, 2.0, 2.0
"""For a child to end by itself when somebody waits for it, after a hang-up, and after it was killed."""
LATE_OUTPUT_S = 0.1
"""For output that is still on its way when the child has ended."""
ROWS, COLUMNS = 24, 80

_LAUNCHER = Path(__file__).with_name("pty_launcher.py")
_spawn = monkey.get_original("os", "posix_spawn")
_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})

_INPUT, _OUTPUT, _LOCAL = 0, 1, 3  # places in the list of termios
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
"""What `stty` calls the flags of a terminal."""


@dataclass(frozen=True)
class PtyCommand:
    """A command to run.

    Attributes:
        words: the command and its arguments.
        name: its argv[0]; the command by default.
        environment: variables beside those of the server; None takes one away.
        stty: the terminal's mode: None for raw; else words of stty(1), such as "-echo", that change the usual mode of
            a terminal, which makes CR LF of every LF.
        apart: whether standard error is a pipe of its own.
    """

    words: Sequence[str]
    name: str | None = None
    environment: Mapping[str, str | None] = field(default_factory=dict)
    stty: Sequence[str] | None = None
    apart: bool = False

    def variables(self) -> dict[str, str]:
        """The whole environment of the child."""
        merged = {"TERM": "xterm", **os.environ, **self.environment}
        return {name: value for name, value in merged.items() if value is not None}


Output = tuple[bytes, bool] | None | Literal[False]
"""What was read, and whether it came from standard error; None at the end, False when the time was over."""


class _Source:
    """A descriptor from which the loop reads into a buffer, as long as that is not full."""

    def __init__(self, fd: int, arrived: Callable[[], object]) -> None:
        os.set_blocking(fd, False)
        self.fd, self.ended, self.paused, self.discards = fd, False, False, False
        self.buffer = bytearray()
        self.began = 0  # the number of the arrival that filled the empty buffer
        self._arrived = arrived
        self._watcher: Any = get_hub().loop.io(fd, READ)
        self._watcher.start(self._ready)

    def _ready(self) -> None:
        self.receive()
        self._arrived()

    def receive(self) -> bool:
        """Take what there is; whether there was something, or the end."""
        try:
            data = os.read(self.fd, MAX_BUFFERED_BYTES - len(self.buffer))
        except BlockingIOError:
            return False
        except OSError:  # EIO: nobody has the terminal open any more
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
        self.began = 0
        self._watch()
        return data

    def pause(self, paused: bool) -> None:
        self.paused = paused
        self._watch()

    def discard(self) -> None:
        """Take no notice any more of what comes."""
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
        """Nothing more will come."""
        self.ended = True
        self._watcher.stop()

    def close(self) -> None:
        """Give the watcher back. The descriptor is closed by whoever opened it."""
        if not self.ended:
            self.end()
        self._watcher.close()


class PtyRead(TimedDeferred[Output]):
    """A read that waits; resolved in the Hub greenlet."""

    __slots__ = ()

    def _expired(self) -> None:
        self.resolve(False)


class Pty:
    """A child process on a pseudo terminal. Made in the main thread.

    Attributes:
        pid: the child's process, and its group.
        status: the exit status, 128 and the signal's number when a signal ended it; None while it runs.
        on_output: called in the Hub greenlet whenever output came, or its end.
        arrivals: counts that.
        progress: counts arrivals, and the reads that got some of them.
        told_end: whether a read has told that it is over.

    Args:
        command: what to run.

    Raises:
        ArgumentError: a word of `stty` or a NUL character.
        StreamError: "notfound", "noaccess" or "failed": it can't be run.
    """

    def __init__(self, command: PtyCommand) -> None:
        _check(command)
        self.status: int | None = None
        self.on_output: Callable[[], object] = lambda: None
        self.arrivals, self._taken, self.told_end = 0, 0, False
        self._closed = self._ending = False
        self._exit = Signal()
        self._reads: deque[PtyRead] = deque()
        self._late: Any = None
        self._killer: Any = None
        self._writing = BoundedSemaphore(1)
        self._launch(command)
        self._out = _Source(self._master, self._arrived)
        self._err = _Source(self._errors, self._arrived) if command.apart else None
        self._sources = [self._out, *([self._err] if self._err else [])]
        self._writable = Ready(self._master, WRITE)

    def _launch(self, command: PtyCommand) -> None:
        loop: Any = get_hub().loop
        loop.install_sigchld()  # first: the child may end before `_started` returns
        self._master, slave = os.openpty()
        self._errors, errors = os.pipe() if command.apart else (-1, slave)
        try:
            _set_mode(slave, command.stty)
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
            self.pid = _started(command, slave, errors)
        except BaseException as error:
            self._close_descriptors()
            if isinstance(error, OSError):
                raise StreamError("failed", error.strerror or "") from None
            raise
        finally:
            for fd in {slave, errors}:
                os.close(fd)
        # Before anybody else runs: the loop collects every child, and tells those that are registered by then.
        self._child = loop.child(self.pid, ref=False)
        self._child.start(self._exited)

    def _close_descriptors(self) -> None:
        os.close(self._master)
        if self._errors >= 0:
            os.close(self._errors)

    # ---- output

    @property
    def ended(self) -> bool:
        """Whether no more output will come."""
        return self._closed or all(source.ended for source in self._sources)

    @property
    def unread(self) -> bool:
        """Whether there is output that nobody has read, or an end that nobody knows of."""
        return any(source.buffer for source in self._sources) or (self.ended and not self.told_end)

    @property
    def progress(self) -> int:
        return self.arrivals + self._taken

    def read(self, timeout_s: float | None = None) -> PtyRead:
        """Read what there is of one of the streams, that which has waited longer; the `Deferred` waits when there is
        nothing, for `timeout_s` at most."""
        read = PtyRead(timeout_s)
        self._reads = deque(one for one in self._reads if not one.done)  # without those whose time was over
        self._reads.append(read)
        self._serve()
        return read

    def _serve(self) -> None:
        while self._reads:
            if self._reads[0].done:  # its activity was ended, or its time is over
                self._reads.popleft()
            elif self.unread or self.ended:
                self._reads.popleft().resolve(self._take())
            else:
                return

    def _take(self) -> Output:
        filled = [source for source in self._sources if source.buffer]
        if not filled:
            self.told_end = True
            return None
        self._taken += 1
        source = min(filled, key=lambda one: one.began)
        return source.take(), source is self._err

    def _arrived(self) -> None:
        self.arrivals += 1
        for source in self._sources:
            if source.buffer and not source.began:
                source.began = self.arrivals
        self._serve()
        self.on_output()

    def pause(self, paused: bool) -> None:
        """Take no output for now, so that the child waits when it writes; False goes on."""
        if not self._closed:
            for source in self._sources:
                source.pause(paused)

    # ---- input

    def write(self, data: bytes) -> None:
        """Give the child input; blocks while it takes none.

        Raises:
            StreamError: "timeout" after 30 s, "terminated" when it has ended.
        """
        with self._writing:
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
        """Rows and columns of the terminal. Raises StreamError "terminated" when it was closed."""
        if self._closed:
            raise StreamError("terminated")
        rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(self._master, termios.TIOCGWINSZ, bytes(8)))
        return rows, columns

    def set_window_size(self, rows: int, columns: int) -> None:
        """Change them; the child is told. Raises StreamError "terminated" when it was closed."""
        if not (0 < rows < 1 << 16 and 0 < columns < 1 << 16):
            raise ArgumentError("winsize: rows and columns must be 1 to 65,535")
        if self._closed:
            raise StreamError("terminated")
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    # ---- the end

    def close(self) -> None:
        """Close the terminal: the child is hung up, and killed when it is still there two seconds later. Does not
        block; a second call does nothing.
        """
        if self._closed:
            return
        self._closed = self._ending = True
        self._writable.close(StreamError("terminated"))
        for source in self._sources:
            source.close()
        self._close_descriptors()
        if self._late is not None:
            self._late.stop()
            self._late.close()
            self._late = None
        if self.status is None:
            self._signal(signal.SIGHUP)
            self._signal(signal.SIGCONT)  # one that is stopped would not hear it
            self._killer = get_hub().loop.timer(HANG_UP_S)
            self._killer.start(self._signal, signal.SIGKILL)
        get_hub().loop.run_callback(self._serve)

    def close_and_wait(self) -> int | None:
        """Wait until the child has ended, for a second by itself, then as `close`; its output is lost. Blocks.

        Returns:
            The exit status; None when even killing did not end it.
        """
        for source in () if self._closed else self._sources:
            source.discard()
        self._wait(NATURAL_S)
        self.close()
        return self._wait(HANG_UP_S + KILL_S)

    def terminate(self) -> int | None:
        """End the child by SIGTERM, then as `close`, and wait until it has ended. Blocks. Returns as above."""
        self._signal(signal.SIGTERM)
        self.close()
        return self._wait(HANG_UP_S + KILL_S)

    def _wait(self, timeout_s: float) -> int | None:
        if self.status is None:
            with suppress(StreamError):
                block(self._exit.wait(timeout_s))
        return self.status

    def _signal(self, number: int) -> None:
        """For the whole group, as long as the child leads it: then its number is nobody else's."""
        if self.status is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _exited(self) -> None:
        if self._ending:
            with suppress(ProcessLookupError, PermissionError):  # what it has left behind in its group
                os.killpg(self.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(self._child.rstatus)
        self.status = code if code >= 0 else 128 - code
        self._child.close()
        if self._killer is not None:
            self._killer.stop()
            self._killer.close()
        if not self._closed:
            self._writable.fail(StreamError("terminated"))
            self._late = get_hub().loop.timer(LATE_OUTPUT_S, LATE_OUTPUT_S)
            self._late.start(self._take_late)
        self._exit.fire()

    def _take_late(self) -> None:
        """The end of output when others, whom the child has left behind, still have the terminal open."""
        waiting = [source for source in self._sources if not (source.ended or source.full or source.paused)]
        for source in waiting:
            if not source.receive():
                source.end()
        if self.ended:
            self._late.stop()
        if waiting:
            self._arrived()


def _started(command: PtyCommand, terminal: int, errors: int) -> int:
    words = [command.words[0], command.name or command.words[0], *command.words[1:]]
    streams = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate((terminal, terminal, errors))]
    return int(
        _spawn(
            sys.executable,
            [sys.executable, "-I", "-S", str(_LAUNCHER), *words],
            command.variables(),
            file_actions=streams,
            setsid=True,
            setsigmask=[],
            setsigdef=_SIGNALS,  # what the server ignores would stay ignored
        )
    )


def _check(command: PtyCommand) -> None:
    texts = [*command.words, command.name or "", *command.environment, *filter(None, command.environment.values())]
    if any("\0" in text for text in texts):
        raise ArgumentError("forkpty: a NUL character in an argument or a variable")
    if any(not name or "=" in name for name in command.environment):
        raise ArgumentError("forkpty: the name of a variable is empty or has a '='")
    path = command.variables().get("PATH", os.defpath)
    if shutil.which(command.words[0], path=path) is None:
        exists = "/" in command.words[0] and os.path.exists(command.words[0])
        raise StreamError("noaccess" if exists else "notfound", f"{command.words[0]} can't be run")


def _set_mode(fd: int, stty: Sequence[str] | None) -> None:
    if stty is None or "raw" in stty:
        tty.setraw(fd)
    mode = termios.tcgetattr(fd)
    for word in stty or ():
        name = word.removeprefix("-")
        if name in ("raw", "sane", "cooked"):
            continue
        if name not in _FLAGS:
            raise ArgumentError(f"forkpty: stty knows no '{word}'; possible are {', '.join(_FLAGS)}, raw and sane")
        place, bit = _FLAGS[name]
        mode[place] = mode[place] & ~bit if word.startswith("-") else mode[place] | bit
    termios.tcsetattr(fd, termios.TCSANOW, mode)

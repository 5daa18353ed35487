"""A worker's process, as its supervisor sees it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from time import monotonic

import gevent
from gevent import subprocess
from gevent.event import AsyncResult, Event

from smqrt.process import early_signals
from smqrt.process import environment as launch
from smqrt.process.children import end_with_parent, failure
from smqrt.server.ports import PortSockets
from smqrt.server.restart.control_socket import ENVIRONMENT as TAKE_OVER
from smqrt.server.worker import VERSION
from smqrt.workers.fd_channel import ChannelError, ChannelSilent, FdChannel, Message
from smqrt.workers.worker_identity import ENVIRONMENT, WorkerPlace

SEND_S = 2.0
LAST_WORDS_S = 1.0
_OF_THE_SUPERVISOR = (
    TAKE_OVER,
    ENVIRONMENT,
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
)
"""Of the environment: the service manager talks to the supervisor only."""

Heard = Callable[["WorkerProcess", Message], None]


class WorkerProcess:
    """A worker that runs with the same command line as this process.

    Args:
        place: which worker it is.
        ports: the sockets it gets.
        balance: the descriptors with which workers spread connections.
        heard: called with what it says.
        take_over: a descriptor that it inherits, to take another process's place; None for a new start.

    Attributes:
        settled: set when it serves, or has ended before it came to that.
        is_ready: whether it ever served.
        lines: where it serves, for the person at the terminal.
        is_held: whether it said nothing for a while.
        heard_s: when it said something last, by the monotonic clock.
        fault: why it could not start, as it says.
        reloaded: set when it has read its files again.
        ended: set when the process is gone.

    Raises:
        OSError: it can't be started.
    """

    def __init__(
        self,
        place: WorkerPlace,
        ports: Mapping[str, PortSockets],
        balance: Iterable[list[int]],
        heard: Heard,
        take_over: int | None = None,
    ) -> None:
        self.place = place
        self.fault: str | None = None
        self.lines: list[str] = []
        self.is_ready = self.is_held = self._is_accepting = False
        self.heard_s = self.began_s = monotonic()
        self.settled, self.ended, self.reloaded = Event(), Event(), Event()
        self._handed_over: AsyncResult[tuple[str | None, int]] = AsyncResult()
        self._heard = heard
        self._covers: list[int] = []
        self._process = self._open(take_over)
        self._say_place(ports)
        for fds in balance:
            self.say({"do": "balance"}, fds)
        gevent.spawn(self._wait, gevent.spawn(self._listen))

    def _open(self, take_over: int | None) -> subprocess.Popen[bytes]:
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        environment = {name: value for name, value in os.environ.items() if name not in _OF_THE_SUPERVISOR}
        environment[ENVIRONMENT] = str(theirs.fileno())
        inherited = [theirs.fileno()]
        if take_over is not None:
            environment[TAKE_OVER] = str(take_over)
            inherited.append(take_over)
        try:
            process = subprocess.Popen(
                launch.COMMAND,
                env=environment,
                cwd=launch.FOLDER,
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                preexec_fn=_prepare,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._channel = FdChannel(ours)
        return process

    def _say_place(self, ports: Mapping[str, PortSockets]) -> None:
        place = self.place
        said: Message = {"do": "place", "version": VERSION, "number": place.number, "count": place.count}
        said |= {"secret": place.secret, "directory": str(place.directory), "start": place.start, "ports": len(ports)}
        self.say(said)
        for name, port in ports.items():
            counts = [len(sockets) for sockets in port.workers]
            flags = {"one_for_all": port.is_one_for_all, "kept": port.is_kept}
            self.say({"do": "port", "name": name, "counts": counts, **flags}, [one.fileno() for one in port.all()])

    @property
    def name(self) -> str:
        """Such as "w1"."""
        return self.place.label

    @property
    def accepts(self) -> bool:
        """Whether it accepts connections."""
        return self._is_accepting and not self.is_held

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def say(self, message: Message, fds: list[int] | None = None) -> None:
        """Tell it; nothing happens when it is gone. One that does not listen is killed."""
        try:
            self._channel.send(message, fds or [], timeout_s=SEND_S)
        except ChannelSilent:
            self.signal(signal.SIGKILL)
        except ChannelError:
            pass  # it is gone

    def cover(self, workers: list[int]) -> None:
        """Have it accept the connections of these workers, too."""
        if workers != self._covers:
            self._covers = workers
            self.say({"do": "cover", "workers": workers})

    def stop(self) -> None:
        """Have it end; who has no applications yet ends at once."""
        if self.is_ready:
            self.say({"do": "stop"})
        else:
            self.signal(signal.SIGTERM)

    def await_hand_over(self, timeout_s: float) -> tuple[str | None, int]:
        """Wait until its hot restart is done; blocks.

        Returns:
            Why it failed, None when it did not; and how many clients the next process has.
        """
        with suppress(gevent.Timeout):
            said = self._handed_over.get(timeout=timeout_s) or ("nothing was said", 0)
            if said[0] is not None:
                self._handed_over = AsyncResult()
            return said
        return f"the hand-over took more than {timeout_s:g} s", 0

    def signal(self, number: int) -> None:
        """Send it a signal, while it is there."""
        if not self.ended.is_set():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    @property
    def exit_code(self) -> int:
        """Of the process that has ended; negative for a signal."""
        code = self._process.returncode
        assert code is not None
        return code

    @property
    def ending(self) -> str:
        """How it ended."""
        return self.fault or failure(self.exit_code) or "ended"

    def _listen(self) -> None:
        with suppress(ChannelError):
            while True:
                message, fds = self._channel.receive(None)
                for fd in fds:
                    os.close(fd)
                self.heard_s = monotonic()
                self._take(message)
                self._heard(self, message)

    def _take(self, message: Message) -> None:
        match message["do"]:
            case "ready":
                self.is_ready = self._is_accepting = True
                self.lines = message["lines"]
                self.settled.set()
            case "left":
                self._is_accepting = False
            case "failed":
                self.fault = str(message["why"])
            case "handed_over":
                self._is_accepting = message["fault"] is not None
                self._handed_over.set((message["fault"], message["clients"]))
            case "reloaded":
                self.reloaded.set()

    def _wait(self, listening: gevent.Greenlet[..., None]) -> None:
        self._process.wait()
        listening.join(LAST_WORDS_S)
        listening.kill()
        self._channel.close()
        self._is_accepting = False
        for event in (self.settled, self.reloaded, self.ended):
            event.set()
        if not self._handed_over.ready():
            self._handed_over.set((f"the process {self.ending}", 0))


def _prepare() -> None:
    """In the new process, before its program: Ctrl-C is for the supervisor, which ends the workers in order."""
    end_with_parent()
    early_signals.block()
    signal.signal(signal.SIGINT, signal.SIG_IGN)

"""Supervisor side of the channel to a worker, with the worker's process."""

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
LAST_MESSAGES_S = 1.0
_NOT_FOR_WORKERS = (
    TAKE_OVER,
    ENVIRONMENT,
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
)
"""Environment variables of the supervisor: only it talks to the service manager."""

OnMessage = Callable[["WorkerProcess", Message], None]


class WorkerProcess:
    """A worker process, started with the command line of this process.

    Args:
        place: number and secrets of the worker.
        ports: the sockets that it gets.
        balance: the descriptors with which workers spread connections.
        on_message: called with each message of the worker.
        take_over: the descriptor with which it replaces another process; None for a new start.

    Attributes:
        settled: set when it serves, or has ended without serving.
        is_ready: whether it has ever served.
        lines: its addresses, for the terminal.
        is_unresponsive: whether it has sent nothing for a while.
        heard_s: the time of its last message, on the monotonic clock.
        fault: its own message why it could not start.
        reloaded: set when it has reloaded its files.
        ended: set when the process has ended.

    Raises:
        OSError: the process can't be started.
    """

    def __init__(
        self,
        place: WorkerPlace,
        ports: Mapping[str, PortSockets],
        balance: Iterable[list[int]],
        on_message: OnMessage,
        take_over: int | None = None,
    ) -> None:
        self.place = place
        self.fault: str | None = None
        self.lines: list[str] = []
        self.is_ready = self.is_unresponsive = self._is_accepting = False
        self.heard_s = self.began_s = monotonic()
        self.settled, self.ended, self.reloaded = Event(), Event(), Event()
        self._handed_over: AsyncResult[tuple[str | None, int]] = AsyncResult()
        self._on_message = on_message
        self._covered: list[int] = []
        self._process = self._open(take_over)
        self.send(
            {
                "do": "place",
                "version": VERSION,
                "number": place.number,
                "count": place.count,
                "secret": place.secret,
                "directory": str(place.directory),
                "start": place.start,
                "ports": len(ports),
            }
        )
        for name, port in ports.items():
            counts = [len(sockets) for sockets in port.workers]
            flags = {"one_for_all": port.is_one_for_all, "kept": port.is_kept}
            self.send({"do": "port", "name": name, "counts": counts, **flags}, [one.fileno() for one in port.all()])
        for fds in balance:
            self.send({"do": "balance"}, fds)
        gevent.spawn(self._wait, gevent.spawn(self._receive_all))

    def _open(self, take_over: int | None) -> subprocess.Popen[bytes]:
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_WORKERS}
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

    @property
    def name(self) -> str:
        """The name in log lines, such as "w1"."""
        return self.place.label

    @property
    def accepts(self) -> bool:
        """Whether it accepts connections."""
        return self._is_accepting and not self.is_unresponsive

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def send(self, message: Message, fds: list[int] | None = None) -> None:
        """Send a message. A worker that does not read it is killed; one that has ended is ignored."""
        try:
            self._channel.send(message, fds or [], timeout_s=SEND_S)
        except ChannelSilent:
            self.signal(signal.SIGKILL)
        except ChannelError:
            pass  # it has ended

    def cover(self, workers: list[int]) -> None:
        """Let it accept the connections of these workers, too."""
        if workers != self._covered:
            self._covered = workers
            self.send({"do": "cover", "workers": workers})

    def stop(self) -> None:
        """Ask it to stop. While it loads its applications, it stops at once."""
        if self.is_ready:
            self.send({"do": "stop"})
        else:
            self.signal(signal.SIGTERM)

    def await_hand_over(self, timeout_s: float) -> tuple[str | None, int]:
        """Wait until its hot restart is done; blocks.

        Returns:
            Why it failed, None for success; and the number of migrated clients.
        """
        with suppress(gevent.Timeout):
            outcome = self._handed_over.get(timeout=timeout_s) or ("no outcome was sent", 0)
            if outcome[0] is not None:
                self._handed_over = AsyncResult()
            return outcome
        return f"the hand-over took more than {timeout_s:g} s", 0

    def signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        if not self.ended.is_set():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    @property
    def exit_code(self) -> int:
        """The exit code of the process that has ended; negative for a signal."""
        code = self._process.returncode
        assert code is not None
        return code

    @property
    def ending(self) -> str:
        """How the process ended, for the log."""
        return self.fault or failure(self.exit_code) or "ended"

    def _receive_all(self) -> None:
        with suppress(ChannelError):
            while True:
                message, fds = self._channel.receive(None)
                for fd in fds:
                    os.close(fd)
                self.heard_s = monotonic()
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
                self._on_message(self, message)

    def _wait(self, receiver: gevent.Greenlet[..., None]) -> None:
        self._process.wait()
        receiver.join(LAST_MESSAGES_S)
        receiver.kill()
        self._channel.close()
        self._is_accepting = False
        for event in (self.settled, self.reloaded, self.ended):
            event.set()
        if not self._handed_over.ready():
            self._handed_over.set((f"the process {self.ending}", 0))


def _prepare() -> None:
    """Prepare the new process before its program starts."""
    end_with_parent()
    early_signals.block()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the supervisor, which stops the workers in order

"""Channel between supervisor and worker: both ends.

    supervisor                                   worker
    place {version, number, …, ports}       ──▶
    port {name, counts, …} and its sockets  ──▶  one for each port
    balance, with descriptors               ──▶  twice
                                                 (loads the applications)
                                            ◀──  report {line}: for the terminal
                                            ◀──  failed {why}, or ready {lines}
                                            ◀──  alive, every second
    cover {workers}                         ──▶  also accepts connections of these workers
    reload                                  ──▶
                                            ◀──  reloaded
    hand_over, with a socket                ──▶  a new process at its other end replaces this one
                                            ◀──  handed_over {fault, clients}
                                            ◀──  exit {code}: an application stops the server
    stop                                    ──▶  the server stops
                                            ◀──  left: accepts no more connections

A worker stops when the channel is closed, because the supervisor has died then.
"""

from __future__ import annotations

import _socket
import contextlib
import logging
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Protocol

import gevent
from gevent import subprocess
from gevent.event import AsyncResult, Event
from gevent.queue import Full, Queue

from smqrt.errors import StartError
from smqrt.process import current_process, early_signals
from smqrt.process.current_process import failure, outlive_parent, terminate_with_parent
from smqrt.server.listeners import PortSockets
from smqrt.server.restart.control_socket import ENVIRONMENT as TAKE_OVER
from smqrt.transport.admission import Balance
from smqrt.workers.worker_rpc import (
    ENVIRONMENT,
    ChannelError,
    ChannelSilent,
    FdChannel,
    Message,
    WorkerPlace,
    take_place,
)

log = logging.getLogger("smqrt")

VERSION = 2
PLACE_S = 10.0
"""The time limit of each message that a worker needs for its start."""
ALIVE_S = 1.0
MAX_QUEUED = 1000
"""The limit of messages queued for a supervisor that does not read; further messages are dropped."""
CLOSE_S = 1.0


class WorkerServer(Protocol):
    """The methods of a worker's server that messages of the supervisor call."""

    def end(self, exit_code: int = 0) -> None:
        """Stop this process, as at SIGTERM."""

    def end_without_successor(self) -> None:
        """Stop this process when no other process takes over its sockets."""

    def reload(self) -> None:
        """Reload settings and files, then call `WorkerEnd.reloaded`."""

    def accept_for(self, workers: Sequence[int]) -> None:
        """Also accept the connections of these workers."""

    def hand_over(self, channel: FdChannel) -> tuple[str | None, int]:
        """Let the process at the other end replace this one; blocks.

        Returns:
            The error, None for success; and the number of migrated clients.
        """


class WorkerEnd:
    """The worker's end of the channel.

    Args:
        channel: to the supervisor.

    Attributes:
        place: number and secrets of this worker.
        ports: the listening sockets by listener.
        balance: distributes connections over the workers.

    Raises:
        StartError: a message of the supervisor is invalid or has another version.
    """

    def __init__(self, channel: FdChannel) -> None:
        self._channel = channel
        self._queue: Queue[Message] = Queue(MAX_QUEUED)
        self._greenlets: list[gevent.Greenlet[..., None]] = []
        self._is_orphaned = False
        self.ports: dict[str, PortSockets] = {}
        try:
            message, _ = channel.receive(PLACE_S)
            if message.get("version") != VERSION:
                raise StartError("The supervisor runs another version of smqrt; restart the whole server.")
            directory = Path(message["directory"])
            self.place = WorkerPlace(
                message["number"], message["count"], message["secret"], directory, message["start"]
            )
            for _ in range(message["ports"]):
                port, fds = channel.receive(PLACE_S)
                sockets = iter([_socket.socket(fileno=fd) for fd in fds])
                if port["one_for_all"]:
                    workers = [list(sockets)] * self.place.count
                else:
                    workers = [[next(sockets) for _ in range(count)] for count in port["counts"]]
                for one in workers[0] + workers[self.place.number]:
                    one.setblocking(False)
                self.ports[port["name"]] = PortSockets(workers, self.place.number, port["one_for_all"], port["kept"])
            self.balance = Balance(self.place.number, channel.receive(PLACE_S)[1], channel.receive(PLACE_S)[1])
        except (ChannelError, KeyError, TypeError, ValueError) as error:
            raise StartError(f"Invalid message from the supervisor: {error}.") from None
        take_place(self.place)

    @classmethod
    def inherited(cls) -> WorkerEnd | None:
        """Return the channel that this process inherited; None when no supervisor started it."""
        number = os.environ.pop(ENVIRONMENT, None)
        if number is None:
            return None
        os.set_inheritable(int(number), False)  # not for child processes of applications
        return cls(FdChannel(socket.socket(fileno=int(number))))

    # ---- messages to the supervisor

    def report(self, line: str) -> None:
        """Send a line for the terminal."""
        self._send("report", line=line)

    def ready(self, lines: Sequence[str]) -> None:
        """Report that this worker serves.

        Args:
            lines: its addresses, for the terminal.
        """
        self._send("ready", lines=list(lines))

    def failed(self, why: str) -> None:
        """Report that this worker can't start. The message is sent at once, also before `start`."""
        with contextlib.suppress(ChannelError):
            self._channel.send({"do": "failed", "why": why}, timeout_s=CLOSE_S)

    def exit(self, code: int) -> None:
        """Request that the whole server stops with this exit code."""
        self._send("exit", code=code)

    def left(self) -> None:
        """Report that this worker accepts no more connections."""
        self._send("left")

    def reloaded(self) -> None:
        """Report that a reload is done."""
        self._send("reloaded")

    def _send(self, kind: str, **more: object) -> None:
        with contextlib.suppress(Full):
            self._queue.put_nowait({"do": kind, **more})

    # ---- messages of the supervisor

    def start(self, server: WorkerServer) -> None:
        """Start handling messages of the supervisor, and sending queued ones."""

        def send_queued() -> None:
            with contextlib.suppress(ChannelError):  # `_receive_all` handles it
                while True:
                    self._channel.send(self._queue.peek())
                    self._queue.get()  # after the send, because `close` waits until the queue is empty

        def send_alive() -> None:
            while True:
                self._send("alive")
                gevent.sleep(ALIVE_S)

        self._greenlets = [
            gevent.spawn(self._receive_all, server),
            gevent.spawn(send_queued),
            gevent.spawn(send_alive),
        ]
        outlive_parent()  # from now on `_receive_all` stops this worker when the supervisor dies

    def _receive_all(self, server: WorkerServer) -> None:
        def hand_over(fds: list[int]) -> None:
            fault, clients = server.hand_over(FdChannel(socket.socket(fileno=fds[0])))
            self._send("handed_over", fault=fault, clients=clients)

        handlers: dict[str, Callable[[Message, list[int]], object]] = {
            "stop": lambda message, fds: server.end_without_successor(),
            "reload": lambda message, fds: server.reload(),
            "cover": lambda message, fds: server.accept_for(message["workers"]),
            "hand_over": lambda message, fds: gevent.spawn(hand_over, fds),
        }
        try:
            while True:
                message, fds = self._channel.receive(None)
                handlers[message["do"]](message, fds)
        except ChannelError as error:
            log.error("this worker stops, because the supervisor has died: %s", error)
            self._is_orphaned = True
            server.end(1)

    def close(self) -> None:
        """Send the queued messages and close the channel; blocks for `CLOSE_S` at most.

        When the supervisor has died, this removes the shared folder in its place.
        """
        until_s = monotonic() + CLOSE_S
        while not self._queue.empty() and not self._is_orphaned and monotonic() < until_s:
            gevent.sleep(0.001)
        for one in self._greenlets:
            one.kill(block=False)
        self._channel.close()
        if self._is_orphaned and self.place.directory is not None:
            shutil.rmtree(self.place.directory, ignore_errors=True)


# ---- the supervisor's end

SEND_S = 2.0
LAST_MESSAGES_S = 1.0  # to read the messages that a process sent before its exit
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
"""Environment variables that only the supervisor uses, for hot restarts and for systemd."""

OnMessage = Callable[["WorkerProcess", Message], None]


class WorkerProcess:
    """A worker process, started with the command line of this process.

    Args:
        place: number and secrets of the worker.
        ports: the listening sockets that it uses.
        balance: the descriptors with which workers distribute connections.
        on_message: called with each message of the worker.
        take_over: the descriptor with which it replaces another process; None for a new start.

    Attributes:
        settled: set when the worker serves, or its process has ended.
        is_ready: whether it has ever served.
        lines: its addresses, for the terminal.
        is_unresponsive: set by the supervisor when the worker has been silent for too long.
        heard_s: the time of its last message, on the monotonic clock.
        fault: the error of its start, as it was reported.
        reloaded: set when it has reloaded its files, or has ended.
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
        """Start the process and connect the channel."""

        def prepare() -> None:  # in the new process, before its program starts
            terminate_with_parent()
            early_signals.block()
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # at Ctrl-C the supervisor stops the workers

        ours, theirs = socket.socketpair(socket.AF_UNIX)
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_WORKERS}
        environment[ENVIRONMENT] = str(theirs.fileno())
        inherited = [theirs.fileno()]
        if take_over is not None:
            environment[TAKE_OVER] = str(take_over)
            inherited.append(take_over)
        try:
            process = subprocess.Popen(
                current_process.COMMAND,
                env=environment,
                cwd=current_process.FOLDER,
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                preexec_fn=prepare,
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
        """Send a message. A worker that does not read it within `SEND_S` is killed. An ended worker is ignored."""
        try:
            self._channel.send(message, fds or [], timeout_s=SEND_S)
        except ChannelSilent:
            self.signal(signal.SIGKILL)
        except ChannelError:
            pass  # it has ended

    def cover(self, workers: list[int]) -> None:
        """Request that it also accepts the connections of these workers."""
        if workers != self._covered:
            self._covered = workers
            self.send({"do": "cover", "workers": workers})

    def stop(self) -> None:
        """Stop the worker: by a message when it serves, else by SIGTERM."""
        if self.is_ready:
            self.send({"do": "stop"})
        else:
            self.signal(signal.SIGTERM)

    def await_hand_over(self, timeout_s: float) -> tuple[str | None, int]:
        """Wait until its hot restart is done; blocks.

        Returns:
            The error, None for success; and the number of migrated clients.
        """
        with suppress(gevent.Timeout):
            outcome = self._handed_over.get(timeout=timeout_s) or ("no outcome was sent", 0)
            if outcome[0] is not None:
                self._handed_over = AsyncResult()  # for the next attempt
            return outcome
        return f"the hand-over took more than {timeout_s:g} s", 0

    def signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        if not self.ended.is_set():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    @property
    def exit_code(self) -> int:
        """The exit code of an ended process; negative for a signal."""
        code = self._process.returncode
        assert code is not None
        return code

    @property
    def exit_text(self) -> str:
        """The reason why the process ended, for the log."""
        return self.fault or failure(self.exit_code) or "ended"

    def _receive_all(self) -> None:
        with suppress(ChannelError):
            while True:
                message, fds = self._channel.receive(None)
                # A worker sends no descriptors.
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
            self._handed_over.set((f"the process {self.exit_text}", 0))

"""Worker side of the channel between supervisor and worker.

    supervisor                                   worker
    place {version, number, …, ports}       ──▶
    port {name, counts, …} and its sockets  ──▶  one for each port
    balance, with descriptors               ──▶  twice
                                                 (loads the applications)
                                            ◀──  report {line}: for the terminal
                                            ◀──  failed {why}, or ready {lines}
                                            ◀──  alive, every second
    cover {workers}                         ──▶  accept for these, too
    reload                                  ──▶
                                            ◀──  reloaded
    hand_over, with a socket                ──▶  a new process at its other end replaces this one
                                            ◀──  handed_over {fault, clients}
                                            ◀──  exit {code}: an application stops the server
    stop                                    ──▶  the server stops
                                            ◀──  left: accepts no more

A worker stops when the channel is closed: the supervisor has died.
"""

from __future__ import annotations

import _socket
import contextlib
import logging
import os
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Protocol

import gevent
from gevent.queue import Full, Queue

from smqrt.errors import StartError
from smqrt.process.children import outlive_parent
from smqrt.server.ports import PortSockets
from smqrt.transport.balance import Balance
from smqrt.workers.fd_channel import ChannelError, FdChannel, Message
from smqrt.workers.worker_identity import ENVIRONMENT, WorkerPlace, take_place

log = logging.getLogger("smqrt")

VERSION = 2
PLACE_S = 10.0
"""The time limit of each message that a worker needs to start."""
ALIVE_S = 1.0
MAX_QUEUED = 1000
"""Messages queued for a supervisor that does not read; further ones are dropped."""
CLOSE_S = 1.0


class WorkingServer(Protocol):
    """What a supervisor may ask of the server in this process."""

    def end(self, exit_code: int = 0) -> None:
        """Stop this process, as at SIGTERM."""

    def end_for_good(self) -> None:
        """Stop; no other process takes over the sockets of this one."""

    def reload(self) -> None:
        """Reload settings and files, then call `WorkerEnd.reloaded`."""

    def accept_for(self, workers: Sequence[int]) -> None:
        """Accept the connections of these workers too."""

    def hand_over(self, channel: FdChannel) -> tuple[str | None, int]:
        """Let the process at the other end replace this one; blocks.

        Returns:
            Why it failed, None for success; and the number of migrated clients.
        """


class WorkerEnd:
    """The worker's end of the channel.

    Args:
        channel: to the supervisor.

    Attributes:
        place: number and secrets of this worker.
        ports: the listening sockets by listener.
        balance: spreads connections over the workers.

    Raises:
        StartError: a message of the supervisor is invalid, or it has another version.
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
                raise StartError("The supervisor is another version of smqrt; restart the whole server.")
            directory = Path(message["directory"])
            self.place = WorkerPlace(
                message["number"], message["count"], message["secret"], directory, message["start"]
            )
            for _ in range(message["ports"]):
                self._add_port(*channel.receive(PLACE_S))
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
        os.set_inheritable(int(number), False)
        return cls(FdChannel(socket.socket(fileno=int(number))))

    def _add_port(self, message: Message, fds: list[int]) -> None:
        sockets = iter([_socket.socket(fileno=fd) for fd in fds])
        if message["one_for_all"]:
            workers = [list(sockets)] * self.place.count
        else:
            workers = [[next(sockets) for _ in range(count)] for count in message["counts"]]
        for one in workers[0] + workers[self.place.number]:
            one.setblocking(False)
        self.ports[message["name"]] = PortSockets(workers, self.place.number, message["one_for_all"], message["kept"])

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
        """Report that this worker can't start."""
        with contextlib.suppress(ChannelError):
            self._channel.send({"do": "failed", "why": why}, timeout_s=CLOSE_S)

    def exit(self, code: int) -> None:
        """Ask for the stop of the whole server with this exit code."""
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

    def start(self, server: WorkingServer) -> None:
        """Start to handle messages of the supervisor, and to send queued ones."""
        self._greenlets = [
            gevent.spawn(self._receive_all, server),
            gevent.spawn(self._send_queued),
            gevent.spawn(self._send_alive),
        ]
        outlive_parent()

    def _receive_all(self, server: WorkingServer) -> None:
        orders: dict[str, Callable[[Message, list[int]], object]] = {
            "stop": lambda message, fds: server.end_for_good(),
            "reload": lambda message, fds: server.reload(),
            "cover": lambda message, fds: server.accept_for(message["workers"]),
            "hand_over": lambda message, fds: gevent.spawn(self._hand_over, server, fds),
        }
        try:
            while True:
                message, fds = self._channel.receive(None)
                orders[message["do"]](message, fds)
        except ChannelError as error:
            log.error("this worker stops, because the supervisor has died: %s", error)
            self._is_orphaned = True
            server.end(1)

    def _hand_over(self, server: WorkingServer, fds: list[int]) -> None:
        fault, clients = server.hand_over(FdChannel(socket.socket(fileno=fds[0])))
        self._send("handed_over", fault=fault, clients=clients)

    def _send_queued(self) -> None:
        with contextlib.suppress(ChannelError):  # `_receive_all` handles it
            while True:
                self._channel.send(self._queue.peek())
                self._queue.get()  # only now: `close` waits until the queue is empty

    def _send_alive(self) -> None:
        while True:
            self._send("alive")
            gevent.sleep(ALIVE_S)

    def close(self) -> None:
        """Send the queued messages and close the channel; blocks for `CLOSE_S` at most.

        When the supervisor has died, the shared folder is removed here.
        """
        until_s = monotonic() + CLOSE_S
        while not self._queue.empty() and not self._is_orphaned and monotonic() < until_s:
            gevent.sleep(0.001)
        for one in self._greenlets:
            one.kill(block=False)
        self._channel.close()
        if self._is_orphaned and self.place.directory is not None:
            shutil.rmtree(self.place.directory, ignore_errors=True)

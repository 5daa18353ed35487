"""A worker's side of the channel to its supervisor: `smqrt serve --workers 4`.

    supervisor                                   worker
    place {version, number, …, ports}       ──▶
    port {name, counts, …} and its sockets  ──▶  one for each port
    balance, with descriptors               ──▶  twice
                                                 (loads the applications)
                                            ◀──  report {line}: for the person at the terminal
                                            ◀──  failed {why}, or ready {lines}
                                            ◀──  alive, every second
    cover {workers}                         ──▶  accept for these, too
    reload                                  ──▶
                                            ◀──  reloaded
    hand_over, with a socket                ──▶  a new process at its other end takes this one's place
                                            ◀──  handed_over {fault, clients}
                                            ◀──  exit {code}: an application ends the server
    stop                                    ──▶  the server ends
                                            ◀──  left: accepts no more

A channel that ends means that the supervisor is gone; the worker ends then.
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
"""What the supervisor may take to tell a worker its place."""
ALIVE_S = 1.0
QUEUED = 1000
"""Messages that may wait for a supervisor that does not read; further ones are dropped."""
LAST_WORDS_S = 1.0


class WorkingServer(Protocol):
    """What a supervisor may ask of the server in this process."""

    def end(self, exit_code: int = 0) -> None:
        """End this process, as at SIGTERM."""

    def end_for_good(self) -> None:
        """End, and nobody takes the place of this process."""

    def reload(self) -> None:
        """Read the settings and files again; `WorkerEnd.reloaded` is called after that."""

    def accept_for(self, workers: Sequence[int]) -> None:
        """Accept the connections of these workers too."""

    def hand_over(self, channel: FdChannel) -> tuple[str | None, int]:
        """Let the process at the other end take the place of this one; blocks. Why it failed, and how many clients."""


class WorkerEnd:
    """The worker's end of the channel.

    Args:
        channel: to the supervisor.

    Attributes:
        place: which worker this is.
        ports: the listening sockets by listener.
        balance: spreads connections over the workers.

    Raises:
        StartError: the supervisor says what it should not, or is of another version.
    """

    def __init__(self, channel: FdChannel) -> None:
        self._channel = channel
        self._queue: Queue[Message] = Queue(QUEUED)
        self._greenlets: list[gevent.Greenlet[..., None]] = []
        self._is_orphaned = False
        self.ports: dict[str, PortSockets] = {}
        try:
            said, _ = channel.receive(PLACE_S)
            if said.get("version") != VERSION:
                raise StartError("The supervisor is another version of smqrt; restart the whole server.")
            directory = Path(said["directory"])
            self.place = WorkerPlace(said["number"], said["count"], said["secret"], directory, said["start"])
            for _ in range(said["ports"]):
                self._take_port(*channel.receive(PLACE_S))
            self.balance = Balance(self.place.number, channel.receive(PLACE_S)[1], channel.receive(PLACE_S)[1])
        except (ChannelError, KeyError, TypeError, ValueError) as error:
            raise StartError(f"The supervisor does not say what this worker is to do: {error}.") from None
        take_place(self.place)

    @classmethod
    def inherited(cls) -> WorkerEnd | None:
        """That of this process; None when no supervisor started it."""
        number = os.environ.pop(ENVIRONMENT, None)
        if number is None:
            return None
        os.set_inheritable(int(number), False)
        return cls(FdChannel(socket.socket(fileno=int(number))))

    def _take_port(self, said: Message, fds: list[int]) -> None:
        sockets = iter([_socket.socket(fileno=fd) for fd in fds])
        if said["one_for_all"]:
            workers = [list(sockets)] * self.place.count
        else:
            workers = [[next(sockets) for _ in range(count)] for count in said["counts"]]
        for one in workers[0] + workers[self.place.number]:
            one.setblocking(False)
        self.ports[said["name"]] = PortSockets(workers, self.place.number, said["one_for_all"], said["kept"])

    # ---- what the supervisor is told

    def report(self, line: str) -> None:
        """A line for the person at the terminal."""
        self._say("report", line=line)

    def ready(self, lines: Sequence[str]) -> None:
        """This worker serves; `lines` tell where."""
        self._say("ready", lines=list(lines))

    def failed(self, why: str) -> None:
        """This worker can't start."""
        with contextlib.suppress(ChannelError):
            self._channel.send({"do": "failed", "why": why}, timeout_s=LAST_WORDS_S)

    def exit(self, code: int) -> None:
        """An application wants the whole server to end with that exit code."""
        self._say("exit", code=code)

    def left(self) -> None:
        """This worker accepts no more connections."""
        self._say("left")

    def reloaded(self) -> None:
        """What was to be read again has been read."""
        self._say("reloaded")

    def _say(self, kind: str, **more: object) -> None:
        with contextlib.suppress(Full):
            self._queue.put_nowait({"do": kind, **more})

    # ---- what it asks for

    def start(self, server: WorkingServer) -> None:
        """Do what the supervisor asks for, from now on, and tell it what waits to be told."""
        self._greenlets = [
            gevent.spawn(self._listen, server),
            gevent.spawn(self._talk),
            gevent.spawn(self._live),
        ]
        outlive_parent()

    def _listen(self, server: WorkingServer) -> None:
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
            log.error("the supervisor is gone, and this worker ends: %s", error)
            self._is_orphaned = True
            server.end(1)

    def _hand_over(self, server: WorkingServer, fds: list[int]) -> None:
        fault, clients = server.hand_over(FdChannel(socket.socket(fileno=fds[0])))
        self._say("handed_over", fault=fault, clients=clients)

    def _talk(self) -> None:
        with contextlib.suppress(ChannelError):  # `_listen` hears of it
            while True:
                self._channel.send(self._queue.peek())
                self._queue.get()

    def _live(self) -> None:
        while True:
            self._say("alive")
            gevent.sleep(ALIVE_S)

    def close(self) -> None:
        """Say the last words; blocks for `LAST_WORDS_S` at most. What others need no more goes with the last one."""
        until_s = monotonic() + LAST_WORDS_S
        while not self._queue.empty() and not self._is_orphaned and monotonic() < until_s:
            gevent.sleep(0.001)
        for one in self._greenlets:
            one.kill(block=False)
        self._channel.close()
        if self._is_orphaned and self.place.directory is not None:
            shutil.rmtree(self.place.directory, ignore_errors=True)

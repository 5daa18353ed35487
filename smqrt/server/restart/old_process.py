"""The old process's side of a hot restart: it lets a new process take its place, hub by hub, or goes on as if nothing
had been.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

import gevent

from smqrt.broker.session import Session
from smqrt.broker.snapshot import names_of, values_of
from smqrt.cluster.engines.mesh import open_meshes
from smqrt.http.server import HttpServer
from smqrt.server.restart.control_socket import BYTES_AT_ONCE, FDS_AT_ONCE, STEP_S, VERSION, expect
from smqrt.server.restart.kept_clients import KeptClients, late
from smqrt.smq.hub_registry import SucceedingBroker, succession
from smqrt.smq.session_migration import (
    OTHERS_TURN_S,
    FrozenHub,
    MovingClient,
    SentAhead,
    address_of,
    is_at_rest,
    pause_others,
)
from smqrt.transport.listener import Acceptor, Listener, open_acceptors, open_listeners
from smqrt.workers.fd_channel import ChannelError, ChannelSilent, FdChannel, Message

log = logging.getLogger("smqrt")

AHEAD_AT_ONCE = 50
"""Clients whose records are taken down in a turn: 1 to 2 ms."""
LATE_S = 0.02
"""So often what the applications of the old process still publish is passed on."""


class OldServer(Protocol):
    """What is handed over.

    Attributes:
        http: its HTTP connections.
    """

    http: HttpServer

    @property
    def is_successor(self) -> bool:
        """Whether it has taken another process's place."""

    def failed_applications(self) -> Sequence[str]:
        """The names of applications that do not run."""

    def stop_pipelines(self) -> None:
        """End the pipelines; blocks."""

    def start_pipelines(self) -> None:
        """Start them again."""


class HandOver:
    """One attempt.

    Args:
        server: this process's.
        channel: to the new process, whose user was checked.
        load_s: what it may take to load the applications.

    Attributes:
        pid: of the new process, as it says itself; 0 before.
        moved: how many clients the new process has.
        longest_s: the longest time that a hub stood still.
    """

    def __init__(self, server: OldServer, channel: FdChannel, load_s: float) -> None:
        self._server, self._channel, self._load_s = server, channel, load_s
        self.pid = self.moved = 0
        self.longest_s = 0.0
        self._numbers = itertools.count(1)
        self._ahead: dict[Session, SentAhead] = {}
        self._given: list[FrozenHub] = []
        self._runs: list[tuple[SucceedingBroker, tuple[int, int, bytes]]] = []
        self._late: gevent.Greenlet[..., None] | None = None
        self._staying: KeptClients | None = None
        self._succeeds = False

    def run(self) -> None:
        """Hand everything over; blocks. When that fails, this process goes on.

        Raises:
            ChannelError: why it failed.
        """
        self._greet()
        known = self._known_hubs()
        try:
            for broker in self._hubs(known):
                self._send_ahead(broker)
        except BaseException as error:
            self.abort(str(error))
            raise
        self._server.stop_pipelines()
        listeners = list(open_listeners)
        for listener in listeners:
            listener.stop()
        try:
            for broker in self._hubs(known):
                self._give(broker)
            self._give_http()
            self._channel.send({"do": "done"})
            expect(self._channel, "serving", STEP_S)
        except BaseException as error:
            self.abort(str(error))
            self._take_back()
            self._server.http.draining = False
            for listener in listeners:
                listener.start()
            self._server.start_pipelines()
            raise
        for listener in listeners:
            listener.close()
        self._late = gevent.spawn(self._pass_on_late)

    def _leave_clusters(self) -> None:
        """Fixed numbers are the new process's from now on: two with one number would end each other's links."""
        for mesh in [one for one in open_meshes if one.node.is_fixed]:
            try:
                mesh.close()
            except Exception:
                log.exception("a cluster was not left in order")
        with contextlib.suppress(ChannelError):
            self._channel.send({"do": "left"})

    def _greet(self) -> None:
        hello = expect(self._channel, "hello", self._load_s)
        if hello.get("version") != VERSION:
            why = f"the new process speaks version {hello.get('version')} of the hand-over, this one {VERSION}"
            self._channel.send({"do": "abort", "why": why})
            raise ChannelError(why)
        pid = hello.get("pid")
        if type(pid) is not int or pid <= 0:
            raise ChannelError("the new process does not say its number")
        self.pid = pid
        self._channel.most_bytes = 1 << 20
        listeners: list[Listener | Acceptor] = [*open_listeners, *open_acceptors]
        self._channel.send(
            {
                "do": "welcome",
                "version": VERSION,
                "pid": os.getpid(),
                "listeners": [[*one.asked_for, len(one.filenos())] for one in listeners],
                "hubs": {one.key: names_of(one) for one in succession.hubs()},
                "nodes": [[one.node.id, one.node.epoch] for one in open_meshes],
                "failed": list(self._server.failed_applications()),
            },
            [fd for one in listeners for fd in one.filenos()],
        )

    def _known_hubs(self) -> list[str]:
        """The keys of the hubs that the new process has made, once it has loaded its applications."""
        ready = expect(self._channel, "ready", self._load_s)
        hubs = ready.get("hubs")
        if not isinstance(hubs, list):
            raise ChannelError("the new process does not say which hubs it has")
        if ready.get("relays") is True:  # older ones do not say it
            self._staying = KeptClients(self._channel)
        self._succeeds = ready.get("succeeds") is True
        return [key for key in hubs if isinstance(key, str)]

    @staticmethod
    def _hubs(known: Sequence[str]) -> list[SucceedingBroker]:
        return [one for one in succession.hubs() if one.key in known]

    # ---- one hub

    def _send_ahead(self, broker: SucceedingBroker) -> None:
        """Send the clients that are at rest while all are served on."""
        sessions = [one for one in broker.sessions.values() if isinstance(one, Session)]
        for at in range(0, len(sessions), AHEAD_AT_ONCE):
            resting = [one for one in sessions[at : at + AHEAD_AT_ONCE] if is_at_rest(one)]
            portion = [SentAhead(next(self._numbers), one) for one in resting]
            self._ahead.update(zip(resting, portion, strict=True))
            self._send_records(broker.key, portion)
            gevent.sleep(OTHERS_TURN_S)

    def _send_records(self, key: str, portion: Sequence[SentAhead]) -> None:
        # Duplicates: when this has to wait a client may end, and its descriptor be another one's.
        fds = [os.dup(one.connection.transport.fileno()) for one in portion]
        try:
            clients = [[one.number, one.record, address_of(one.connection)] for one in portion]
            self._channel.send({"do": "ahead", "key": key, "clients": clients}, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _give(self, broker: SucceedingBroker) -> None:
        more: Message = {}
        if broker.cluster is not None and self._succeeds:
            more = pause_others(broker)
        began_s = time.monotonic()
        hub = FrozenHub(broker, ahead=self._ahead)
        try:
            hub.settle()
            broker.close_files()
            if broker.cluster is not None:
                broker.cluster.suspend()
            record = hub.take()
            unchanged = [one.ahead.number for one in hub.clients if one.ahead and one.is_unchanged]
            if self._staying:
                more["staying"] = self._staying.keep(hub)
            self._channel.send({"do": "hub", "key": broker.key, "record": record, "unchanged": unchanged, **more})
            for portion in values_of(broker):
                self._channel.send({"do": "values", **portion})
            for clients in _portions([one for one in hub.clients if one.ahead and not one.is_unchanged]):
                changed = [[one.ahead.number, one.record] for one in clients if one.ahead]
                self._channel.send({"do": "changed", "clients": changed})
            for clients in _portions([one for one in hub.clients if not one.ahead]):
                self._send_clients(clients)
            self._channel.send({"do": "end"})
            expect(self._channel, "have", STEP_S)
            self._channel.send({"do": "go"})
        except BaseException:
            broker.open_files()
            hub.go_on()
            if broker.cluster is not None:
                broker.cluster.stay()
            raise
        self.longest_s = max(self.longest_s, time.monotonic() - began_s)
        self.moved += len(hub.clients)
        hub.let_go(partial(self._forward, broker))
        if self._staying:
            self._staying.begin(broker)
        self._given.append(hub)

    def _send_clients(self, clients: Sequence[MovingClient]) -> None:
        self._channel.send(
            {"do": "clients", "clients": [[one.record, address_of(one.connection)] for one in clients]},
            [one.connection.transport.fileno() for one in clients],
        )

    def abort(self, why: str) -> None:
        """End it, also from another greenlet, where `run` fails then. A process that can't be told is killed: it would
        take this one for dead, and the clients for its own.
        """
        if self._staying is not None:
            self._staying.end()
        try:
            self._channel.send({"do": "abort", "why": why}, timeout_s=1)
        except ChannelSilent:
            pid = self.pid or self._channel.peer()[0]  # of a pair of sockets the kernel knows only who made it
            log.error("restart: process %d does not listen, and is killed", pid)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        except ChannelError:
            pass  # it is gone
        self._channel.close()

    def _take_back(self) -> None:
        """The new process has failed: the hubs it had begin anew, and their clients come back."""
        for hub in self._given:
            try:
                hub.broker.open_files()
            except Exception:
                log.exception("a hub goes on without its files")
            hub.begin_anew()
            if hub.broker.cluster is not None:
                hub.broker.cluster.stay()
        self._given.clear()

    # ---- the rest

    def _give_http(self) -> None:
        """Connections that wait for a request, or for the rest of one's head, lose nothing."""
        idle = list(self._server.http.release_idle())
        try:
            for at in range(0, len(idle), FDS_AT_ONCE):
                portion = idle[at : at + FDS_AT_ONCE]
                self._channel.send(
                    {"do": "http", "connections": [[list(peer), data] for _, peer, data in portion]},
                    [transport.fileno() for transport, _, _ in portion],
                )
        finally:
            for transport, _, _ in idle:
                transport.close()

    def _pass_on_late(self) -> None:
        self._leave_clusters()
        while True:
            gevent.sleep(LATE_S)
            self._pass_on()

    def _forward(self, broker: SucceedingBroker, run: bytes, tid: int, ptid: int) -> None:
        """A client that could not go along has published."""
        self._runs.append((broker, (tid, ptid, run)))

    def _pass_on(self) -> None:
        for hub in self._given:
            frames = hub.broker.server.take_publishes()
            if frames:
                self._channel.send(late(hub.broker, frames))
        runs, self._runs = self._runs, []
        for broker, run in runs:
            self._channel.send(late(broker, [run]))

    def finish(self) -> None:
        """The applications of this process have ended: pass on what they published last, and let go."""
        if self._late is not None:
            self._late.kill()
            with contextlib.suppress(ChannelError):
                self._pass_on()
        if self._staying is not None:
            self._staying.end()
        self._channel.close()


def _portions(clients: Sequence[MovingClient]) -> Iterator[list[MovingClient]]:
    portion: list[MovingClient] = []
    size = 0
    for one in clients:
        portion.append(one)
        size += sum(map(len, one.record["connection"]["queue"]))
        if len(portion) >= FDS_AT_ONCE or size >= BYTES_AT_ONCE:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion

"""Old process of a hot restart, and the control of hot restarts."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import gevent
from gevent import subprocess

from smqrt.broker.sessions import Session, names_of, values_of
from smqrt.cluster.engines.mesh import open_meshes
from smqrt.http.server import HttpServer
from smqrt.process import current_process, early_signals
from smqrt.server.restart.control_socket import (
    BYTES_AT_ONCE,
    ENVIRONMENT,
    FDS_AT_ONCE,
    STEP_S,
    VERSION,
    ControlSocket,
    expect,
)
from smqrt.server.restart.kept_clients import KeptClients, late_message
from smqrt.settings.server_settings import RestartSettings
from smqrt.smq.hub_registry import RegisteredBroker, hub_registry
from smqrt.smq.session_migration import (
    YIELD_S,
    FrozenHub,
    MovingClient,
    PrecopiedClient,
    address_of,
    is_at_rest,
    pause_other_clients,
)
from smqrt.transport.listener import Acceptor, Listener, open_acceptors, open_listeners
from smqrt.workers.worker_rpc import ChannelError, ChannelSilent, FdChannel, Message

log = logging.getLogger("smqrt")

PRECOPIED_AT_ONCE = 50
"""The number of clients whose records are made in one turn of the loop: 1 to 2 ms."""
RESTORED_PER_S = 5000
"""Clients, sessions and retained messages that the new process restores in a second, on a slow or busy machine. About
50,000 were measured, without the time for their records."""
LATE_S = 0.02
"""The interval at which late messages of the applications of the old process are forwarded."""
MAX_MESSAGE_BYTES = 1 << 20
"""The limit of a message of the new process once its hello has been received."""


def restore_time_s(broker: RegisteredBroker) -> float:
    """Return the time limit for the new process to restore a hub, in seconds; it answers nothing meanwhile."""
    devices = broker.devices
    kept = 0 if devices is None else len(devices.sessions) + len(devices.retained.by_name)
    return STEP_S + (len(broker.sessions) + kept) / RESTORED_PER_S


class OldServer(Protocol):
    """The part of the server of the old process that a hot restart uses.

    Attributes:
        http: its HTTP connections.
    """

    http: HttpServer

    @property
    def is_successor(self) -> bool:
        """Whether this process replaced another one."""

    def failed_applications(self) -> Sequence[str]:
        """Return the name and the error of each failed application."""

    def stop_pipelines(self) -> None:
        """Stop the pipelines; blocks."""

    def start_pipelines(self) -> None:
        """Start the pipelines again."""


class HandOver:
    """One attempt to hand over to a new process.

    Args:
        server: the server of this process.
        channel: to the new process; the user of that process has been checked.
        load_s: the time limit of the new process for loading the applications.

    Attributes:
        pid: the id of the new process, from its hello message; 0 before.
        migrated: the number of clients that the new process has taken over.
        longest_s: the longest time that a hub was frozen.
    """

    def __init__(self, server: OldServer, channel: FdChannel, load_s: float) -> None:
        self._server, self._channel, self._load_s = server, channel, load_s
        self.pid = self.migrated = 0
        self.longest_s = 0.0
        self._numbers = itertools.count(1)
        self._precopied: dict[Session, PrecopiedClient] = {}
        self._handed_over: list[FrozenHub] = []
        self._late_batches: list[tuple[RegisteredBroker, tuple[int, int, bytes]]] = []
        self._late_sender: gevent.Greenlet[..., None] | None = None
        self._kept: KeptClients | None = None
        self._knows_succession = self._takes_mqtt = self._unpacks = False

    def run(self) -> None:
        """Hand over all hubs, clients and sockets; blocks. After a failure, this process continues to serve.

        Raises:
            ChannelError: the hand-over failed.
        """
        known = self._negotiate()
        # First phase: a failure changes nothing, because all clients are still served here.
        try:
            for broker in self._hubs(known):
                self._precopy(broker)
        except BaseException as error:
            self.abort(str(error))
            raise
        # Second phase: a failure is rolled back. Pipelines stop first, because they must not run in both processes.
        self._server.stop_pipelines()
        listeners = list(open_listeners)
        for listener in listeners:
            listener.stop()
        try:
            for broker in self._hubs(known):
                self._hand_over_hub(broker)
            self._hand_over_http()
            self._channel.send({"do": "done"})
            expect(self._channel, "serving", STEP_S)
        except BaseException as error:
            self.abort(str(error))
            self._restore_hubs()
            self._server.http.draining = False
            for listener in listeners:
                listener.start()
            self._server.start_pipelines()
            raise
        for listener in listeners:
            listener.keeps_file = True  # it belongs to the new process
            listener.close()
        self._late_sender = gevent.spawn(self._send_late)

    def _negotiate(self) -> list[str]:
        """Exchange the first messages, and wait until the new process has loaded its applications.

        Returns:
            The keys of its hubs.
        """
        hello = expect(self._channel, "hello", self._load_s)
        if hello.get("version") != VERSION:
            why = f"the new process uses version {hello.get('version')} of the hand-over, this one {VERSION}"
            self._channel.send({"do": "abort", "why": why})
            raise ChannelError(why)
        pid = hello.get("pid")
        if type(pid) is not int or pid <= 0:
            raise ChannelError("the hello of the new process has no pid")
        self.pid = pid
        self._channel.max_bytes = MAX_MESSAGE_BYTES
        listeners: list[Listener | Acceptor] = [*open_listeners, *open_acceptors]
        self._channel.send(
            {
                "do": "welcome",
                "version": VERSION,
                "pid": os.getpid(),
                "listeners": [[*one.requested, len(one.filenos())] for one in listeners],
                "kept_files": [one.requested[0] for one in open_listeners if one.has_foreign_file],
                "hubs": {one.key: names_of(one) for one in hub_registry.hubs()},
                "nodes": [[one.node.id, one.node.epoch] for one in open_meshes],
                "failed": list(self._server.failed_applications()),
            },
            [fd for one in listeners for fd in one.filenos()],
        )
        ready = expect(self._channel, "ready", self._load_s)
        hubs = ready.get("hubs")
        if not isinstance(hubs, list):
            raise ChannelError("the ready message of the new process has no list of hubs")
        if ready.get("relays") is True:  # older versions have no relays
            self._kept = KeptClients(self._channel)
        self._knows_succession = ready.get("succeeds") is True
        self._takes_mqtt, self._unpacks = ready.get("mqtt") is True, ready.get("unpacks") is True
        return [key for key in hubs if isinstance(key, str)]

    @staticmethod
    def _hubs(known: Sequence[str]) -> list[RegisteredBroker]:
        return [one for one in hub_registry.hubs() if one.key in known]

    # ---- one hub

    def _precopy(self, broker: RegisteredBroker) -> None:
        """Send the idle clients of a hub, while all clients are served."""
        sessions = [one for one in broker.sessions.values() if isinstance(one, Session)]
        for at in range(0, len(sessions), PRECOPIED_AT_ONCE):
            resting = [one for one in sessions[at : at + PRECOPIED_AT_ONCE] if is_at_rest(one)]
            batch = [PrecopiedClient(next(self._numbers), one) for one in resting]
            self._precopied.update(zip(resting, batch, strict=True))
            clients = [[one.number, one.record, address_of(one.connection)] for one in batch]
            # Duplicates, because a client may be closed while `send` waits, and its descriptor be reused.
            fds = [os.dup(one.connection.transport.fileno()) for one in batch]
            try:
                self._channel.send({"do": "ahead", "key": broker.key, "clients": clients}, fds)
            finally:
                for fd in fds:
                    os.close(fd)
            gevent.sleep(YIELD_S)  # serve clients between two batches

    def _hand_over_hub(self, broker: RegisteredBroker) -> None:
        """Freeze a hub, send its state and its clients, and transfer it to the new process."""
        more: Message = {}
        if broker.cluster is not None and self._knows_succession:
            more = pause_other_clients(broker)
        began_s = time.monotonic()
        hub = FrozenHub(broker, ahead=self._precopied, with_mqtt=self._takes_mqtt, is_packed=self._unpacks)
        try:
            hub.settle()
            broker.close_files()
            if broker.cluster is not None:
                broker.cluster.suspend()
            record = hub.take()
            unchanged = [one.ahead.number for one in hub.clients if one.ahead and one.is_unchanged]
            if self._kept:
                more["staying"] = self._kept.keep(hub)
            self._channel.send({"do": "hub", "key": broker.key, "record": record, "unchanged": unchanged, **more})
            for values in values_of(broker):
                self._channel.send({"do": "values", **values})
            for clients in _batches([one for one in hub.clients if one.ahead and not one.is_unchanged]):
                changed = [[one.ahead.number, one.record] for one in clients if one.ahead]
                self._channel.send({"do": "changed", "clients": changed})
            for clients in _batches([one for one in hub.clients if not one.ahead]):
                self._channel.send(
                    {"do": "clients", "clients": [[one.record, address_of(one.connection)] for one in clients]},
                    [one.connection.transport.fileno() for one in clients],
                )
            self._channel.send({"do": "end"})
            expect(self._channel, "have", restore_time_s(broker))
            self._channel.send({"do": "go"})
        except BaseException:
            broker.open_files()
            hub.roll_back()
            if broker.cluster is not None:
                broker.cluster.stay()
            raise
        self.longest_s = max(self.longest_s, time.monotonic() - began_s)
        self.migrated += len(hub.clients)
        # Clients that stay here may still publish.
        hub.release(lambda batch, tid, ptid: self._late_batches.append((broker, (tid, ptid, batch))))
        if self._kept:
            self._kept.begin(broker)
        self._handed_over.append(hub)

    def abort(self, why: str) -> None:
        """End the hand-over; a `run` in another greenlet then fails.

        A new process that does not read the message is killed: it would serve the clients of this process.
        """
        if self._kept is not None:
            self._kept.close()
        try:
            self._channel.send({"do": "abort", "why": why}, timeout_s=1)
        except ChannelSilent:
            pid = self.pid or self._channel.peer()[0]  # of a socket pair, peer() is the process that created it
            log.error("restart: process %d does not answer: killed", pid)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        except ChannelError:
            pass  # it has died
        self._channel.close()

    def _restore_hubs(self) -> None:
        """Serve again the hubs that the new process had taken over. Their clients reconnect."""
        for hub in self._handed_over:
            try:
                hub.broker.open_files()
            except Exception:
                log.exception("restart: a hub continues without its files")
            hub.serve_again()
            if hub.broker.cluster is not None:
                hub.broker.cluster.stay()
        self._handed_over.clear()

    # ---- HTTP connections, and late messages

    def _hand_over_http(self) -> None:
        """Send the HTTP connections without a request, or with an incomplete request head."""
        idle = list(self._server.http.release_idle())
        try:
            for at in range(0, len(idle), FDS_AT_ONCE):
                batch = idle[at : at + FDS_AT_ONCE]
                self._channel.send(
                    {"do": "http", "connections": [[list(peer), data] for _, peer, data in batch]},
                    [transport.fileno() for transport, _, _ in batch],
                )
        finally:
            for transport, _, _ in idle:
                transport.close()

    def _send_late(self) -> None:
        """Leave the clusters with a fixed node number, then forward late messages.

        Such a number now belongs to the new process: two nodes with one number would close each other's links.
        """
        for mesh in [one for one in open_meshes if one.node.is_fixed]:
            try:
                mesh.close()
            except Exception:
                log.exception("restart: error on leaving a cluster")
        with contextlib.suppress(ChannelError):
            self._channel.send({"do": "left"})
        while True:
            gevent.sleep(LATE_S)
            self._forward_late()

    def _forward_late(self) -> None:
        """Forward messages that applications and clients of this process have published since the last call."""
        for hub in self._handed_over:
            published = hub.broker.server.take_publishes()
            if published:
                self._channel.send(late_message(hub.broker, published))
        batches, self._late_batches = self._late_batches, []
        for broker, batch in batches:
            self._channel.send(late_message(broker, [batch]))

    def finish(self) -> None:
        """Forward the last messages of the ended applications, and close the channel."""
        if self._late_sender is not None:
            self._late_sender.kill()
            with contextlib.suppress(ChannelError):
                self._forward_late()
        if self._kept is not None:
            self._kept.close()
        self._channel.close()


def _batches(clients: Sequence[MovingClient]) -> Iterator[list[MovingClient]]:
    """Yield the clients in batches that fit a message."""
    batch: list[MovingClient] = []
    queued_bytes = 0
    for one in clients:
        batch.append(one)
        queued_bytes += sum(map(len, one.record["connection"]["queue"]))
        if len(batch) >= FDS_AT_ONCE or queued_bytes >= BYTES_AT_ONCE:
            yield batch
            batch, queued_bytes = [], 0
    if batch:
        yield batch


# ---- Control of hot restarts: SIGUSR2 and the control socket


CANCEL_S, _CANCEL_POLL_S = 2.0, 0.01
"""The time limit for a cancelled hand-over to end."""
NEW_PROCESS_EXIT_S = 1.0
_NOT_INHERITED = (ENVIRONMENT, "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID")
"""Environment variables that only this process uses."""


class Restarts:
    """The hot restarts of a server.

    Args:
        server: the server of this process.
        settings: the table `restart`.
        report: called with each line for the terminal.
        done: called with the pid of the new process once that serves. It must stop this process.
    """

    def __init__(
        self,
        server: OldServer,
        settings: RestartSettings,
        report: Callable[[str], None],
        done: Callable[[int], None],
    ) -> None:
        self._server, self._settings = server, settings
        self._report, self._done = report, done
        self._current: HandOver | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._finished: HandOver | None = None
        self._socket = ControlSocket(settings.socket, partial(gevent.spawn, self._answer))

    def ask(self) -> None:
        """Start a hot restart; never blocks. SIGUSR2 calls this."""
        gevent.spawn(self._start_new)

    def _start_new(self) -> str | None:
        """Start a new process and hand over to it. Return the error, None when the new process serves."""
        if self._current or self._finished:
            self._report("restart: another restart is under way")
            return "another restart is under way"
        if os.getpid() == 1:
            why = "process 1 of a container can't be replaced; start a new container"
            why += ", with --take-over if it shares restart.socket"
            self._report(f"restart: {why}")
            return why
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        environment[ENVIRONMENT] = str(theirs.fileno())
        try:
            child = subprocess.Popen(
                current_process.COMMAND,
                env=environment,
                cwd=current_process.FOLDER,
                pass_fds=[theirs.fileno()],
                preexec_fn=early_signals.block,
            )
        except OSError as error:
            ours.close()
            self._report(f"restart: a new process can't be started: {error}")
            return str(error)
        finally:
            theirs.close()
        self._report(f"restart: process {child.pid} starts")
        fault = self._hand_over(FdChannel(ours), child)
        if fault is not None:
            _reap(child)
        return fault

    def _hand_over(self, channel: FdChannel, child: subprocess.Popen[bytes] | None = None) -> str | None:
        """Hand over to the process at the other end. Return the error, None when that process serves."""
        if self._current or self._finished:
            with contextlib.suppress(ChannelError):
                channel.send({"do": "abort", "why": "another restart is under way"})
            channel.close()
            return "another restart is under way"
        attempt = self._current = HandOver(self._server, channel, self._settings.load_s)
        self._child = child
        fault = None
        try:
            attempt.run()
        except ChannelError as error:
            fault = str(error)
        except Exception as error:
            log.exception("restart: unexpected error")
            fault = repr(error)
        finally:
            # Before the next restart can begin: this process exits after it, and would leave the child unreaped.
            if fault is not None and child is not None:
                _reap(child)
            self._current = self._child = None
        if fault is not None:
            channel.close()  # ends the reads of a new process that hangs, and closes descriptors that it has not read
            self._report(f"restart: failed, this process continues: {fault}")
            return fault
        self._finished = attempt
        longest_ms = round(attempt.longest_s * 1000)
        self._report(
            f"restart: process {attempt.pid} serves, with {attempt.migrated} clients of this one"
            f" (at most {longest_ms} ms without service); this process exits"
        )
        self._done(attempt.pid)
        return None

    def hand_over(self, channel: FdChannel) -> tuple[str | None, int]:
        """Let the process at the other end replace this one; blocks.

        Returns:
            The error, None for success; and the number of migrated clients.
        """
        fault = self._hand_over(channel)
        return fault, self._finished.migrated if self._finished else 0

    @property
    def is_handed_over(self) -> bool:
        """Whether a new process has taken over the sockets."""
        return self._finished is not None

    def finish(self) -> None:
        """Close the channel to the new process, after the applications of this process have ended."""
        if self._finished:
            self._finished.finish()

    # ---- the control socket

    def open(self) -> None:
        """Listen at `restart.socket`, unless it is empty.

        Raises:
            StartError: the socket can't be created, or another server uses it.
        """
        self._socket.open(is_successor=self._server.is_successor)

    def close(self) -> None:
        """Stop listening, and cancel a hand-over that is under way, because the whole server stops.

        The socket file is removed unless the new process has replaced it.
        """
        attempt = self._current
        if attempt is not None:
            if self._child is not None:
                self._child.kill()
            else:
                attempt.abort("the server is being stopped")
            until_s = time.monotonic() + CANCEL_S
            while self._current is attempt and time.monotonic() < until_s:
                gevent.sleep(_CANCEL_POLL_S)
        self._socket.close(leaves_file=self.is_handed_over)

    def _answer(self, channel: FdChannel, message: Message) -> None:
        if message["do"] != "restart":  # then it is the hello of a new process
            channel.put_back(message)
            self._hand_over(channel)
            return
        why = self._start_new()
        answer: Message = {"do": "failed", "why": why}
        if why is None and self._finished:
            answer = {"do": "done", "pid": self._finished.pid, "clients": self._finished.migrated}
        with contextlib.suppress(ChannelError):
            channel.send(answer)
        channel.close()


def _reap(child: subprocess.Popen[bytes]) -> None:
    """Wait for the exit of a new process that could not take over; kill it after `NEW_PROCESS_EXIT_S`."""
    try:
        child.wait(timeout=NEW_PROCESS_EXIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()

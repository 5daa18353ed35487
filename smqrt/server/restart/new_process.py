"""New process of a hot restart: takes over sockets and sessions from the old process."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Sequence

from smqrt.broker.sessions import Record, adopt_values, send_restored_values, topics_with_values
from smqrt.errors import ArgumentError, SmqrtError, StartError
from smqrt.http.server import HttpServer
from smqrt.server.restart.control_socket import ENVIRONMENT, HELLO_S, VERSION, Refused, check_socket_path
from smqrt.server.restart.kept_clients import Relays, with_local_ids
from smqrt.smq.hub_registry import hub_registry
from smqrt.smq.session_migration import RestoredHub
from smqrt.transport.admission import open_connections
from smqrt.transport.listener import inherited
from smqrt.workers.worker_rpc import ChannelError, FdChannel, Message

log = logging.getLogger("smqrt")


class TakeOver:
    """One hot restart, from the side of the new process.

    Args:
        channel: to the old process.

    Raises:
        StartError: the old process refuses, or has died.

    Attributes:
        pid: the id of the old process.
        migrated: the number of clients that have been taken over.
    """

    def __init__(self, channel: FdChannel) -> None:
        self._channel = channel
        self.migrated = 0
        self._prepared: dict[str, RestoredHub] = {}  # by key
        self._arriving: RestoredHub | None = None
        self._has_all = False  # all clients of the arriving hub have been received
        self._topics_with_values: set[int] = set()  # of the arriving hub, before it was restored
        self._place_in_cluster: Record = {}
        self._relays: Relays | None = None
        try:
            if not channel.is_of_this_user():
                raise ChannelError("it belongs to another user")
            channel.send({"do": "hello", "version": VERSION, "pid": os.getpid()})
            welcome, fds = channel.receive(HELLO_S)
            if welcome["do"] != "welcome":
                _close_all(fds)
                raise Refused(str(welcome.get("why", welcome["do"])))
        except ChannelError as error:
            channel.close()
            raise StartError(f"Cannot replace the other process: {error}.") from None
        try:
            pid, failed, hubs = welcome["pid"], welcome["failed"], welcome["hubs"]
            listeners = list(_listeners(welcome["listeners"], fds))
            self._failed_before = {str(one).partition(":")[0] for one in failed}
            nodes = welcome.get("nodes", ())  # older versions send none
            kept_files = {str(one) for one in welcome.get("kept_files", ())}  # the same
            nodes = [(bytes(node_id), int(epoch)) for node_id, epoch in nodes]
            if type(pid) is not int or pid <= 0 or not isinstance(hubs, dict):
                raise TypeError("pid or hubs")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            _close_all(fds)
            self.report_failure("invalid welcome message")
            raise StartError(f"Cannot replace the other process: invalid welcome message: {error}.") from None
        self.pid = pid
        inherited.kept_files = kept_files
        for requested, sockets in listeners:
            inherited.add(requested, sockets)
        hub_registry.expect(hubs, nodes)

    @classmethod
    def inherited(cls) -> TakeOver | None:
        """Return the hot restart of the old process that started this one; None when no server started it."""
        number = os.environ.pop(ENVIRONMENT, None)
        if number is None:
            return None
        return cls(FdChannel(socket.socket(fileno=int(number))))

    @classmethod
    def of(cls, path: str) -> TakeOver:
        """Request a hot restart at a control socket.

        Raises:
            StartError: no server listens there, or it refuses.
        """
        check_socket_path("restart.socket", path)
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(path)
        except OSError as error:
            sock.close()
            raise StartError(f"No server answers at {path}: {error.strerror}; start one without --take-over.") from None
        return cls(FdChannel(sock))

    def report_failure(self, why: str) -> None:
        """Report to the old process that this one has failed, and close the channel."""
        with contextlib.suppress(ChannelError):
            self._channel.send({"do": "failed", "why": why})
        self._channel.close()

    # ---- clients and connections

    def take(self, http: HttpServer, failed: Sequence[str]) -> None:
        """Take over the clients; blocks. When the old process dies meanwhile, this one serves the received clients.

        Args:
            http: handles the HTTP connections without a complete request head.
            failed: the applications that do not run here, with their errors.

        Raises:
            StartError: the old process continues to serve, and this one has to exit.
        """
        newly_failed = [one for one in failed if one.partition(":")[0] not in self._failed_before]
        if newly_failed:
            self.report_failure(f"application {newly_failed[0]}")
            raise StartError(f"The other process continues: application {newly_failed[0]}")
        try:
            keys = [one.key for one in hub_registry.hubs()]
            self._send("ready", hubs=keys, relays=True, succeeds=True, mqtt=True, unpacks=True)
            while not self._step(http):
                pass
        except Refused as error:
            self._close_relays()
            for arriving in [*self._prepared.values(), *([self._arriving] if self._arriving else [])]:
                arriving.discard()
            raise StartError(f"The other process continues: {error}.") from None
        except ChannelError as error:
            if self._arriving and not self._has_all:  # the other clients are lost with the old process
                self._has_all = True
            log.warning("restart: %s; this process continues with %d clients", error, self.migrated)
            if self._has_all:
                self._begin()
        for arriving in self._prepared.values():  # of hubs that were closed meanwhile, or were not received
            arriving.discard()
        hub_registry.end()
        for cluster in (one.cluster for one in hub_registry.hubs()):
            if cluster is not None and cluster.awaits_clients:  # of hubs that were not received
                cluster.resync()
        inherited.close()  # of ports that are not in the settings of this process

    def _step(self, http: HttpServer) -> bool:
        """Handle the next message. Return whether it was the last one."""
        message, fds = self._channel.receive(None)
        kind = message["do"]
        if kind == "abort":
            raise Refused(str(message.get("why")))
        if kind == "ahead":
            broker = hub_registry.find(message["key"])
            if broker is None:  # `_begin_hub` reports it
                _close_all(fds)
                return False
            arriving = self._prepared.setdefault(message["key"], RestoredHub(broker))
            for fd, (number, record, address) in zip(fds, message["clients"], strict=True):
                arriving.prepare(number, record, open_connections.adopt(fd, address))
        elif kind == "relay":
            self._relays = Relays(*fds)
        elif kind == "hub":
            self._begin_hub(message)
        elif kind == "values":
            assert self._arriving
            adopt_values(self._arriving.broker, message)
        elif kind == "clients":
            assert self._arriving
            for fd, (record, address) in zip(fds, message["clients"], strict=True):
                self._arriving.place(record, open_connections.adopt(fd, address))
        elif kind == "changed":
            assert self._arriving
            for number, record in message["clients"]:
                self._arriving.place_changed(number, record)
        elif kind == "end":
            self._has_all = True
            self._send("have")
        elif kind == "go":
            self._begin()
        elif kind == "http":
            for fd, (peer, data) in zip(fds, message["connections"], strict=True):
                http.accepted(open_connections.adopt(fd, peer[0]), (peer[0], peer[1]), data=data)
        elif kind == "done":
            self._send("serving")
            return True
        return False

    def _send(self, kind: str, **more: object) -> None:
        # Failures are ignored: the next `receive` finds the reason, an `abort` of the old process or its death.
        with contextlib.suppress(ChannelError):
            self._channel.send({"do": kind, **more})

    def _begin_hub(self, message: Message) -> None:
        """Restore the state of a hub. Its `clients` messages follow; then `_begin` puts it into service."""
        broker = hub_registry.find(message["key"])
        try:
            if broker is None:
                raise ArgumentError(f"the hub {message['key']} was closed meanwhile")
            self._topics_with_values = topics_with_values(broker)
            broker.open_files()
            self._arriving = self._prepared.pop(message["key"], None) or RestoredHub(broker)
            self._arriving.adopt(message["record"])
            self._arriving.place_prepared(message["unchanged"])
            self._place_in_cluster = {one: message[one] for one in ("node", "others") if one in message}
            if self._relays is not None:
                self._relays.place(self._arriving.broker, message.get("staying"))
        except SmqrtError as error:
            self.report_failure(str(error))
            raise Refused(str(error)) from None

    def _begin(self) -> None:
        assert self._arriving
        arriving, self._arriving, self._has_all = self._arriving, None, False
        send_restored_values(arriving.broker, self._topics_with_values)
        arriving.begin(self._place_in_cluster)
        if self._relays is not None:
            self._relays.begin(arriving.broker)
        self.migrated += arriving.clients

    def publish_late(self) -> bool:
        """Publish late messages of the old process, and join the clusters that it leaves; blocks until it exits.

        Returns:
            False when the old process has aborted the restart after a timeout. Then this process has to exit.
        """
        try:
            while True:
                message, fds = self._channel.receive(None)
                _close_all(fds)
                if message["do"] == "abort":
                    log.error("restart: the other process continues, and this one exits: %s", message.get("why"))
                    return False
                if message["do"] == "left":
                    hub_registry.left()
                broker = hub_registry.find(message["key"]) if message["do"] == "late" else None
                if broker is not None:
                    for tid, ptid, frame in with_local_ids(broker, message):
                        broker.server.publish(tid, ptid, frame)
        except ChannelError:
            hub_registry.left()
            hub_registry.old_process_ended.set()
            return True
        finally:
            self._close_relays()
            self._channel.close()

    def _close_relays(self) -> None:
        if self._relays is not None:
            self._relays.close()


def _listeners(
    listeners: Sequence[tuple[str, int, int]], fds: Sequence[int]
) -> Iterator[tuple[tuple[str, int], list[int]]]:
    """Yield each port as written in the settings, with its descriptors.

    Raises:
        ValueError: the counts do not match the descriptors.
    """
    rest = list(fds)
    for host, port, count in listeners:
        if not 0 < int(count) <= len(rest):
            raise ValueError(f"{count} sockets of {host}:{port}")
        yield (str(host), int(port)), rest[: int(count)]
        del rest[: int(count)]
    if rest:
        raise ValueError(f"{len(rest)} sockets without a listener")


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)

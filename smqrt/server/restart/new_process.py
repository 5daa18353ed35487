"""The new process's side of a hot restart: it takes the place of an old one."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Sequence

from smqrt.broker.snapshot import Record, adopt_values, greet_application, valued_topics
from smqrt.errors import ArgumentError, SmqrtError, StartError
from smqrt.http.server import HttpServer
from smqrt.server.restart.control_socket import ENVIRONMENT, HELLO_S, VERSION, Refused, check_socket_path
from smqrt.server.restart.kept_clients import Relays, numbered_here
from smqrt.smq.hub_registry import succession
from smqrt.smq.session_migration import RestoredHub
from smqrt.transport.admission import open_connections
from smqrt.transport.listener import inherited
from smqrt.workers.fd_channel import ChannelError, FdChannel, Message

log = logging.getLogger("smqrt")


class TakeOver:
    """The place of another process, as it is taken over.

    Args:
        channel: to the old process.

    Raises:
        StartError: the old process does not want to, or is gone.

    Attributes:
        pid: of the old process.
        moved: how many clients were taken over.
    """

    def __init__(self, channel: FdChannel) -> None:
        self._channel = channel
        self.moved = 0
        self._prepared: dict[str, RestoredHub] = {}  # by key
        self._arriving: RestoredHub | None = None
        self._has_all = False
        self._greeted: set[int] = set()
        self._place_in_cluster: Record = {}
        self._relays: Relays | None = None
        try:
            if not channel.is_of_this_user():
                raise ChannelError("it belongs to another user")
            channel.send({"do": "hello", "version": VERSION, "pid": os.getpid()})
            welcome, fds = self._welcome()
        except ChannelError as error:
            channel.close()
            raise StartError(f"The place of the other process can't be taken: {error}.") from None
        try:
            pid, failed, hubs = welcome["pid"], welcome["failed"], welcome["hubs"]
            listeners = list(_listeners(welcome["listeners"], fds))
            self._failed_before = {str(one).partition(":")[0] for one in failed}
            nodes = [(bytes(node_id), int(epoch)) for node_id, epoch in welcome.get("nodes", ())]  # older ones say none
            if type(pid) is not int or pid <= 0 or not isinstance(hubs, dict):
                raise TypeError("pid or hubs")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            _close_all(fds)
            self.give_up("the welcome can't be understood")
            raise StartError(f"The place of the other process can't be taken: its welcome is none: {error}.") from None
        self.pid = pid
        for asked_for, sockets in listeners:
            inherited.add(asked_for, sockets)
        succession.expect(hubs, nodes)

    def _welcome(self) -> tuple[Message, list[int]]:
        message, fds = self._channel.receive(HELLO_S)
        if message["do"] != "welcome":
            _close_all(fds)
            raise Refused(str(message.get("why", message["do"])))
        return message, fds

    @classmethod
    def inherited(cls) -> TakeOver | None:
        """What an old process that started this one hands over; None when none did."""
        number = os.environ.pop(ENVIRONMENT, None)
        if number is None:
            return None
        return cls(FdChannel(socket.socket(fileno=int(number))))

    @classmethod
    def of(cls, path: str) -> TakeOver:
        """What the process with this socket hands over.

        Raises:
            StartError: there is none, or it does not want to.
        """
        check_socket_path("restart.socket", path)
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(path)
        except OSError as error:
            sock.close()
            raise StartError(f"No server answers at {path}: {error.strerror}; start one without --take-over.") from None
        return cls(FdChannel(sock))

    def give_up(self, why: str) -> None:
        """Tell the old process that it has to go on."""
        with contextlib.suppress(ChannelError):
            self._channel.send({"do": "failed", "why": why})
        self._channel.close()

    # ---- the move

    def take(self, http: HttpServer, failed: Sequence[str]) -> None:
        """Take the clients over; blocks. When the old process is gone meanwhile, this one goes on with those it has.

        Args:
            http: takes the connections that wait for a request.
            failed: the applications that do not run here, and why.

        Raises:
            StartError: the old process goes on, and this one has to end.
        """
        worse = [one for one in failed if one.partition(":")[0] not in self._failed_before]
        if worse:
            self.give_up(f"application {worse[0]}")
            raise StartError(f"The other process goes on: application {worse[0]}")
        try:
            self._say("ready", hubs=[one.key for one in succession.hubs()], relays=True, succeeds=True)
            while not self._step(http):
                pass
        except Refused as error:
            self._end_relays()
            for arriving in [*self._prepared.values(), *([self._arriving] if self._arriving else [])]:
                arriving.discard()
            raise StartError(f"The other process goes on: {error}.") from None
        except ChannelError as error:
            if self._arriving and not self._has_all:  # the rest went with the old process
                self._has_all = True
            log.warning("restart: %s; this process goes on with %d clients", error, self.moved)
            if self._has_all:
                self._begin()
        for arriving in self._prepared.values():  # of hubs that were closed meanwhile, or went with the old process
            arriving.discard()
        succession.end()
        for cluster in (one.cluster for one in succession.hubs()):
            if cluster is not None and cluster.awaits_clients:  # of hubs that did not come
                cluster.resync()
        inherited.close()

    def _step(self, http: HttpServer) -> bool:
        """Do what the next message says; true for the last one."""
        message, fds = self._channel.receive(None)
        kind = message["do"]
        if kind == "abort":
            raise Refused(str(message.get("why")))
        if kind == "ahead":
            self._prepare(message, fds)
        elif kind == "relay":
            self._relays = Relays(*fds)
        elif kind == "hub":
            self._begin_hub(message)
        elif kind == "values":
            assert self._arriving
            adopt_values(self._arriving.broker, message)
        elif kind == "clients":
            self._place(message, fds)
        elif kind == "changed":
            assert self._arriving
            for number, record in message["clients"]:
                self._arriving.place_changed(number, record)
        elif kind == "end":
            self._has_all = True
            self._say("have")
        elif kind == "go":
            self._begin()
        elif kind == "http":
            for fd, (peer, data) in zip(fds, message["connections"], strict=True):
                http.accepted(open_connections.adopt(fd, peer[0]), (peer[0], peer[1]), data=data)
        elif kind == "done":
            self._say("serving")
            return True
        return False

    def _say(self, kind: str, **more: object) -> None:
        """Tell the old process; when it listens no more, the next message tells why: it has changed its mind, or it is
        gone.
        """
        with contextlib.suppress(ChannelError):
            self._channel.send({"do": kind, **more})

    def _prepare(self, message: Message, fds: Sequence[int]) -> None:
        key = message["key"]
        broker = succession.find(key)
        if broker is None:  # `hub` says so
            _close_all(fds)
            return
        arriving = self._prepared.setdefault(key, RestoredHub(broker))
        for fd, (number, record, address) in zip(fds, message["clients"], strict=True):
            arriving.prepare(number, record, open_connections.adopt(fd, address))

    def _begin_hub(self, message: Message) -> None:
        broker = succession.find(message["key"])
        try:
            if broker is None:
                raise ArgumentError(f"the hub {message['key']} was closed meanwhile")
            self._greeted = valued_topics(broker)
            broker.open_files()
            self._arriving = self._prepared.pop(message["key"], None) or RestoredHub(broker)
            self._arriving.adopt(message["record"])
            self._arriving.place_prepared(message["unchanged"])
            self._place_in_cluster = {one: message[one] for one in ("node", "others") if one in message}
            if self._relays is not None:
                self._relays.place(self._arriving.broker, message.get("staying"))
        except SmqrtError as error:
            self.give_up(str(error))
            raise Refused(str(error)) from None

    def _place(self, message: Message, fds: Sequence[int]) -> None:
        assert self._arriving
        for fd, (record, address) in zip(fds, message["clients"], strict=True):
            self._arriving.place(record, open_connections.adopt(fd, address))

    def _begin(self) -> None:
        assert self._arriving
        arriving, self._arriving, self._has_all = self._arriving, None, False
        greet_application(arriving.broker, self._greeted)
        arriving.begin(self._place_in_cluster)
        if self._relays is not None:
            self._relays.begin(arriving.broker)
        self.moved += arriving.clients

    def take_late(self) -> bool:
        """Publish what the applications of the old process still publish, until it ends; and join the clusters that it
        leaves. Blocks. False when it has changed its mind, because it did not hear from this one in time: then this one
        has to end.
        """
        try:
            while True:
                message, fds = self._channel.receive(None)
                _close_all(fds)
                if message["do"] == "abort":
                    log.error("restart: the other process goes on, and this one ends: %s", message.get("why"))
                    return False
                if message["do"] == "left":
                    succession.left()
                broker = succession.find(message["key"]) if message["do"] == "late" else None
                if broker is not None:
                    for tid, ptid, frame in numbered_here(broker, message):
                        broker.server.publish(tid, ptid, frame)
        except ChannelError:
            succession.left()
            return True
        finally:
            self._end_relays()
            self._channel.close()

    def _end_relays(self) -> None:
        if self._relays is not None:
            self._relays.end()


def _listeners(said: Sequence[tuple[str, int, int]], fds: Sequence[int]) -> Iterator[tuple[tuple[str, int], list[int]]]:
    """Each port as it was asked for, and the descriptors of its sockets. Raises ValueError when these are not all."""
    rest = list(fds)
    for host, port, count in said:
        if not 0 < int(count) <= len(rest):
            raise ValueError(f"{count} sockets of {host}:{port}")
        yield (str(host), int(port)), rest[: int(count)]
        del rest[: int(count)]
    if rest:
        raise ValueError(f"{len(rest)} sockets of nobody")


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)

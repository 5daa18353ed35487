"""The listening sockets of ports: those that systemd has opened, and those that workers share.

A port has as many sockets for each worker, and the kernel spreads connections over all of them (SO_REUSEPORT). Every
process has all of them open, so that none is ever closed while the server runs, whoever dies; which ones a worker
accepts at is said by the supervisor. A socket of systemd's is one for all.
"""

from __future__ import annotations

import _socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from smqrt.errors import StartError
from smqrt.server.mako_conf import MakoConf
from smqrt.server.ports import ADMIN, ADMIN_PORT, OTHER_PORTS, Port, ports
from smqrt.server.systemd import passed_sockets
from smqrt.settings.settings import Settings
from smqrt.transport.listener import listening_sockets, sockets_for_storms


@dataclass
class PortSockets:
    """The sockets of a port, of all workers.

    Attributes:
        workers: the sockets of each worker.
        number: of the worker that this process is.
        is_one_for_all: there is one socket, at which all workers accept.
        is_kept: somebody else keeps it: who waits at the end is served by the next server.
    """

    workers: list[list[_socket.socket]]
    number: int = 0
    is_one_for_all: bool = False
    is_kept: bool = False

    @property
    def own(self) -> list[_socket.socket]:
        """Those of this worker."""
        return self.workers[self.number]

    def of(self, workers: Iterable[int]) -> list[_socket.socket]:
        """Those of other workers, which don't accept themselves."""
        return [] if self.is_one_for_all else [one for number in workers for one in self.workers[number]]

    def all(self) -> Iterator[_socket.socket]:
        """Each once."""
        return iter(self.workers[0] if self.is_one_for_all else [one for sockets in self.workers for one in sockets])

    def close(self) -> None:
        """Close them in this process."""
        for one in self.all():
            one.close()


def passed_ports(asked: Sequence[Port]) -> dict[str, PortSockets]:
    """Take the sockets that systemd passes, by listener. Raises StartError as `passed_sockets`."""
    passed = passed_sockets([port.name for port in asked])
    return {name: PortSockets([[sock]], is_kept=True) for name, sock in passed.items()}


def open_for_workers(settings: Settings, conf: MakoConf | None, count: int) -> dict[str, PortSockets]:
    """Open the ports that the settings ask for, and the one of operators, for so many workers.

    Raises:
        StartError: an address can't be bound; one sentence.
    """
    asked = ports(settings, conf)
    opened: dict[str, PortSockets] = {}
    passed = passed_ports(asked)
    try:
        for port in asked:
            given = passed.get(port.name)
            opened[port.name] = _for_all(given, count) if given else _opened(port, count)
        if settings.admin.enabled:
            opened[ADMIN] = _opened_admin(settings, count)
    except BaseException:
        for sockets in (*opened.values(), *passed.values()):
            sockets.close()
        raise
    return opened


def _for_all(given: PortSockets, count: int) -> PortSockets:
    return PortSockets(given.workers * count, is_one_for_all=True, is_kept=True)


def _opened(port: Port, count: int) -> PortSockets:
    each = -(-sockets_for_storms() // count)
    failures: list[StartError] = []
    for number in (port.port, *port.others):
        try:
            sockets = listening_sockets(port.host, number, each * count)
        except StartError as error:
            failures.append(StartError(f"listener.{port.name}: {error}") if port.name not in OTHER_PORTS else error)
        else:
            return PortSockets([sockets[at::count] for at in range(count)])
    raise failures[0]


def _opened_admin(settings: Settings, count: int) -> PortSockets:
    """Only worker 0 accepts there."""
    host, port = settings.admin.host, settings.admin.port
    try:
        found = listening_sockets(host, ADMIN_PORT if port is None else port)
    except StartError:
        if port is not None:
            raise
        found = listening_sockets(host, 0)
    return PortSockets([found, *([] for _ in range(count - 1))])

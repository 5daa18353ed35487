"""The ports that the settings ask for, and their listening sockets."""

from __future__ import annotations

import _socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from smqrt.errors import StartError
from smqrt.server.mako_conf import MakoConf
from smqrt.server.systemd import passed_sockets
from smqrt.settings.settings import ListenerSettings, Settings
from smqrt.transport.listener import listening_sockets, sockets_for_storms
from smqrt.transport.server_tls import TlsFiles

OTHER_PORTS = {"http": range(9357, 9371), "https": range(9443, 9461)}  # spec: runtime §1.2
_MAX_ALPN_BYTES = 255  # ALPN has one byte for the length of a name
ADMIN = "admin"
ADMIN_PORT = 9356
"""The default. When another process has it, any free port is used."""
_FLAT_PORTS = {"http": "port", "https": "tls_port"}


@dataclass(frozen=True)
class Port:
    """The complete settings of a listener.

    Attributes:
        name: of its table; `http` and `https` for the flat settings.
        tls: None for no TLS.
        max_connections: 0 for no limit of its own.
        others: ports to try when `port` is taken.
    """

    name: str
    host: str
    port: int
    tls: TlsFiles | None
    max_connections: int = 0
    others: range = range(0)


def ports(settings: Settings, conf: MakoConf | None = None) -> list[Port]:
    """Return the listeners that the settings ask for, `http` and `https` first.

    Raises:
        StartError: a table contradicts itself or lacks a setting; one sentence that names it.
    """
    flat = ["http"] if settings.tls_port is None or conf is None or conf.plain_http else []
    flat += ["https"] if settings.tls_port is not None else []
    tables = settings.listener
    asked = [name for name in dict.fromkeys([*flat, *tables]) if name not in tables or tables[name].enabled]
    if not asked:
        raise StartError("no listener is enabled; leave one of them on.")
    if ADMIN in asked:
        raise StartError(f"listener.{ADMIN}: the listener of operators has this name, see [{ADMIN}]; choose another.")
    return [_port(name, settings, conf) for name in asked]


def lacks_certificate(settings: Settings) -> bool:
    """Whether a listener with TLS has no certificate."""
    if settings.cert:
        return False
    https = settings.listener.get("https", ListenerSettings())
    tables = {**settings.listener, **({"https": https} if settings.tls_port is not None else {})}
    return any(one.enabled and _is_secure(name, one) and not _own_pairs(one) for name, one in tables.items())


def _port(name: str, settings: Settings, conf: MakoConf | None) -> Port:
    table = settings.listener.get(name, ListenerSettings())
    flat = {"http": settings.port, "https": settings.tls_port}.get(name)
    port = flat if table.port is None else table.port
    if port is None:
        raise StartError(f"listener.{name} has no port; give it one (0 picks a free one).")
    mako_host = conf.tls_host if conf and name == "https" else None
    files = _files(name, table, settings) if _is_secure(name, table) else None
    if files is None and (_own_pairs(table) or table.client_ca or table.client_crl or table.client_certificate):
        raise StartError(f"listener.{name} has settings of TLS, but tls is off; set tls = true, or leave them out.")
    if table.proxy_protocol and not settings.proxy.trusted:
        raise StartError(f"listener.{name} has proxy_protocol, and proxy.trusted names no proxy; give its address.")
    of_mako = conf is not None and conf.settings.get(_FLAT_PORTS.get(name, "")) == port
    others = OTHER_PORTS[name] if of_mako else range(0)
    return Port(name, table.host or mako_host or settings.host, port, files, table.max_connections, others)


def _is_secure(name: str, table: ListenerSettings) -> bool:
    return (name == "https" or bool(_own_pairs(table))) if table.tls is None else table.tls


def _own_pairs(table: ListenerSettings) -> tuple[tuple[str, str], ...]:
    own = ((table.cert or "", table.key or ""),) if table.cert or table.key else ()
    return own + table.certificates


def _files(name: str, table: ListenerSettings, settings: Settings) -> TlsFiles:
    what = f"listener.{name}" if name in settings.listener else ""
    if bool(table.cert) != bool(table.key):
        given, missing = ("cert", "key") if table.cert else ("key", "cert")
        raise StartError(f"{what}.{given} needs {missing} too; a certificate and its private key belong together.")
    flat = ((settings.cert, settings.key),) if settings.cert and settings.key else ()
    pairs = ((*flat, *table.certificates) if name == "https" and not table.cert else _own_pairs(table)) or flat
    if not pairs:
        raise StartError(f"{what or name} has no certificate; give cert and key.")
    tls = settings.tls
    alpn = tls.alpn if table.alpn is None else table.alpn
    for protocol in alpn:
        if not protocol.isascii() or len(protocol) > _MAX_ALPN_BYTES:
            raise StartError(f"{what or 'tls'}.alpn: {protocol!r} is no name of ALPN: 1 to 255 ASCII characters.")
    return TlsFiles(
        pairs,
        table.client_ca or settings.client_ca,
        table.client_crl or tls.client_crl,
        table.client_certificate or tls.client_certificate,
        table.minimum_version or tls.minimum_version,
        alpn,
        what,
        tls.key_password,
    )


def admin_files(settings: Settings) -> TlsFiles | None:
    """Return the files of the admin listener's TLS; None without TLS.

    Raises:
        StartError: the settings contradict one another.
    """
    admin, tls = settings.admin, settings.tls
    if bool(admin.cert) != bool(admin.key):
        given, missing = ("cert", "key") if admin.cert else ("key", "cert")
        raise StartError(f"admin.{given} needs {missing} too; a certificate and its private key belong together.")
    if not (bool(admin.cert) if admin.tls is None else admin.tls):
        if admin.cert or admin.client_ca:
            raise StartError(
                "admin has settings of TLS, but admin.tls is off; set admin.tls = true, or leave them out."
            )
        return None
    cert, key = (admin.cert, admin.key) if admin.cert else (settings.cert, settings.key)
    if not cert or not key:
        raise StartError("admin.tls is on and there is no certificate; give admin.cert and admin.key, or cert and key.")
    crl, mode = (tls.client_crl, "required") if admin.client_ca else (None, "none")
    version, password = tls.minimum_version, tls.key_password
    return TlsFiles(((cert, key),), admin.client_ca, crl, mode, version, ("http/1.1",), ADMIN, password)


# ---- listening sockets
#
# A port has the same number of sockets for each worker, and the kernel spreads connections over all of them
# (SO_REUSEPORT). Every process has all of them open, so that the death of a worker closes none, with the connections in
# its queue. The supervisor decides at which sockets a worker accepts. systemd passes only one socket.


@dataclass
class PortSockets:
    """The listening sockets of a port.

    Attributes:
        workers: the sockets of each worker.
        number: the number of the worker that this process is.
        is_one_for_all: all workers accept at one socket.
        is_kept: systemd keeps the socket open, so that the next server accepts what is in its queue.
    """

    workers: list[list[_socket.socket]]
    number: int = 0
    is_one_for_all: bool = False
    is_kept: bool = False

    @property
    def own(self) -> list[_socket.socket]:
        """The sockets of this worker."""
        return self.workers[self.number]

    def of(self, workers: Iterable[int]) -> list[_socket.socket]:
        """Return the sockets of other workers, for which this one accepts; none when there is one for all."""
        return [] if self.is_one_for_all else [one for number in workers for one in self.workers[number]]

    def all(self) -> Iterator[_socket.socket]:
        """Iterate over all sockets, each once."""
        return iter(self.workers[0] if self.is_one_for_all else [one for sockets in self.workers for one in sockets])

    def close(self) -> None:
        """Close the sockets in this process."""
        for one in self.all():
            one.close()


def passed_ports(asked: Sequence[Port]) -> dict[str, PortSockets]:
    """Return the sockets that systemd passes, by listener. Raises StartError as `passed_sockets`."""
    passed = passed_sockets([port.name for port in asked])
    return {name: PortSockets([[sock]], is_kept=True) for name, sock in passed.items()}


def open_for_workers(settings: Settings, conf: MakoConf | None, count: int) -> dict[str, PortSockets]:
    """Open the ports that the settings ask for, and the admin listener's, for `count` workers.

    Raises:
        StartError: an address can't be bound; one sentence.
    """
    asked = ports(settings, conf)
    opened: dict[str, PortSockets] = {}
    passed = passed_ports(asked)
    try:
        for port in asked:
            if given := passed.get(port.name):
                opened[port.name] = PortSockets(given.workers * count, is_one_for_all=True, is_kept=True)
            else:
                opened[port.name] = _opened(port, count)
        if settings.admin.enabled:
            admin = _opened_admin(settings)
            opened[ADMIN] = PortSockets([admin, *([] for _ in range(count - 1))])  # only worker 0 accepts there
    except BaseException:
        for sockets in (*opened.values(), *passed.values()):
            sockets.close()
        raise
    return opened


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


def _opened_admin(settings: Settings) -> list[_socket.socket]:
    host, port = settings.admin.host, settings.admin.port
    try:
        return listening_sockets(host, ADMIN_PORT if port is None else port)
    except StartError:
        if port is not None:
            raise
        return listening_sockets(host, 0)

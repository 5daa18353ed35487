"""Open ports of a server, plain or with TLS."""

from __future__ import annotations

import _socket
import logging
import os
import ssl
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import gevent

from smqrt.errors import StartError
from smqrt.http.server import HttpServer
from smqrt.server.mako_conf import MakoConf
from smqrt.server.systemd import passed_sockets
from smqrt.settings.server_settings import ListenerSettings, Settings
from smqrt.transport.admission import Balance, open_connections
from smqrt.transport.listener import MAX_BACKLOG, Listener, listening_sockets, sockets_per_port
from smqrt.transport.server_tls import ListenerTls, TlsFiles
from smqrt.transport.unix_sockets import (
    DEFAULT_MODE,
    UNIX_HOST,
    SocketFile,
    check_path,
    is_unix_path,
    listening_socket,
)

# ---- Ports of the settings

OTHER_PORTS = {"http": range(9357, 9371), "https": range(9443, 9461)}  # spec: runtime §1.2
_MAX_ALPN_BYTES = 255  # ALPN has one byte for the length of a name
ADMIN = "admin"
ADMIN_PORT = 9356
"""The default. When another process uses it, any free port is opened."""
_FLAT_PORTS = {"http": "port", "https": "tls_port"}
"""The settings outside of the tables `listener` that name the port of a listener."""


@dataclass(frozen=True)
class Port:
    """The complete settings of a listener.

    Attributes:
        name: the name of its table; `http` and `https` for the settings without a table.
        tls: None for no TLS.
        host: address, or the path of a Unix socket, whose port is 0.
        max_connections: the limit of this listener, 0 for none.
        others: ports to try when `port` is in use.
        mode: permissions of the file of a Unix socket.
    """

    name: str
    host: str
    port: int
    tls: TlsFiles | None
    max_connections: int = 0
    others: range = range(0)
    mode: str = DEFAULT_MODE

    @property
    def is_unix(self) -> bool:
        """Whether it is a Unix socket."""
        return is_unix_path(self.host)


def ports(settings: Settings, conf: MakoConf | None = None) -> list[Port]:
    """Return the enabled listeners of the settings, `http` and `https` first.

    Raises:
        StartError: a table contradicts itself or lacks a setting; one sentence that names it.
    """
    flat = ["http"] if settings.tls_port is None or conf is None or conf.plain_http else []
    flat += ["https"] if settings.tls_port is not None else []
    tables = settings.listener
    enabled = [name for name in dict.fromkeys([*flat, *tables]) if name not in tables or tables[name].enabled]
    if not enabled:
        raise StartError("no listener is enabled; enable at least one.")
    if ADMIN in enabled:
        raise StartError(f"listener.{ADMIN}: this name is reserved for the admin listener ([{ADMIN}]); choose another.")
    for what, host in (("host", settings.host), (f"{ADMIN}.host", settings.admin.host)):
        if is_unix_path(host):
            raise StartError(f"{what}: {host} is the path of a Unix socket; set it as host of a table [listener.NAME].")
    found = [_port(name, settings, conf) for name in enabled]
    paths = [port.host for port in found if port.is_unix]
    for path in paths:
        if paths.count(path) > 1:
            raise StartError(f"two listeners have the host {path}; each Unix socket needs its own path.")
    return found


def lacks_certificate(settings: Settings) -> bool:
    """Whether a listener with TLS has no certificate."""
    if settings.cert:
        return False
    https = settings.listener.get("https", ListenerSettings())
    tables = {**settings.listener, **({"https": https} if settings.tls_port is not None else {})}
    return any(one.enabled and _is_secure(name, one) and not _own_pairs(one) for name, one in tables.items())


def _port(name: str, settings: Settings, conf: MakoConf | None) -> Port:
    table = settings.listener.get(name, ListenerSettings())
    if is_unix_path(table.host or ""):
        return _unix_port(name, table, settings)
    if table.mode is not None:
        raise StartError(f"listener.{name}.mode is for Unix sockets only; set host to a path, or remove mode.")
    flat = {"http": settings.port, "https": settings.tls_port}.get(name)
    port = flat if table.port is None else table.port
    if port is None:
        raise StartError(f"listener.{name} has no port; set it (0 for any free port).")
    mako_host = conf.tls_host if conf and name == "https" else None
    files = _files(name, table, settings) if _is_secure(name, table) else None
    if files is None:
        _check_without_tls(name, table)
    if table.proxy_protocol and not settings.proxy.trusted:
        raise StartError(f"listener.{name} has proxy_protocol, but proxy.trusted names no proxy; add its address.")
    is_from_conf = conf is not None and conf.settings.get(_FLAT_PORTS.get(name, "")) == port
    others = OTHER_PORTS[name] if is_from_conf else range(0)  # only Mako tries other ports
    return Port(name, table.host or mako_host or settings.host, port, files, table.max_connections, others)


def _unix_port(name: str, table: ListenerSettings, settings: Settings) -> Port:
    path = table.host or ""
    what = f"listener.{name}: the Unix socket {path}"
    if table.port is not None:
        raise StartError(f"{what} has no port; remove port, or set host to an address.")
    files = _files(name, table, settings) if _is_secure(name, table) else None
    if files is None:
        _check_without_tls(name, table)
    if table.proxy_protocol and UNIX_HOST not in settings.proxy.trusted:
        raise StartError(f"listener.{name} has proxy_protocol; add {UNIX_HOST} to proxy.trusted.")
    check_path(path, what)
    return Port(name, path, 0, files, table.max_connections, mode=table.mode or DEFAULT_MODE)


def _check_without_tls(name: str, table: ListenerSettings) -> None:
    if _own_pairs(table) or table.client_ca or table.client_crl or table.client_certificate:
        raise StartError(f"listener.{name} has TLS settings, but tls is off; set tls = true, or remove them.")


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
        raise StartError(f"{what or name} has no certificate; set cert and key.")
    tls = settings.tls
    alpn = tls.alpn if table.alpn is None else table.alpn
    for protocol in alpn:
        if not protocol.isascii() or len(protocol) > _MAX_ALPN_BYTES:
            raise StartError(f"{what or 'tls'}.alpn: {protocol!r} is not an ALPN name: 1 to 255 ASCII characters.")
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
            raise StartError("admin has TLS settings, but admin.tls is off; set admin.tls = true, or remove them.")
        return None
    cert, key = (admin.cert, admin.key) if admin.cert else (settings.cert, settings.key)
    if not cert or not key:
        raise StartError("admin.tls is on, but there is no certificate; set admin.cert and admin.key, or cert and key.")
    crl, mode = (tls.client_crl, "required") if admin.client_ca else (None, "none")
    version, password = tls.minimum_version, tls.key_password
    return TlsFiles(((cert, key),), admin.client_ca, crl, mode, version, ("http/1.1",), ADMIN, password)


# ---- Listening sockets
#
# A port has the same number of sockets for each worker, and the kernel distributes connections over all of them
# (SO_REUSEPORT). Every process keeps all of them open, so that the death of a worker closes no socket: the kernel would
# reset the connections in its queue. The supervisor decides at which sockets a worker accepts. systemd passes only one
# socket.


@dataclass
class PortSockets:
    """The listening sockets of a port.

    Attributes:
        workers: the sockets of each worker.
        number: the number of this worker.
        is_one_for_all: all workers accept at one socket.
        is_kept: systemd keeps the socket open, so that the next server accepts the connections in its queue.
        file: the file of a Unix socket, which `close` removes; None in workers.
    """

    workers: list[list[_socket.socket]]
    number: int = 0
    is_one_for_all: bool = False
    is_kept: bool = False
    file: SocketFile | None = None

    @property
    def own(self) -> list[_socket.socket]:
        """The sockets of this worker."""
        return self.workers[self.number]

    def of(self, workers: Iterable[int]) -> list[_socket.socket]:
        """Return the sockets of other workers, at which this one also accepts; none when there is one for all."""
        return [] if self.is_one_for_all else [one for number in workers for one in self.workers[number]]

    def all(self) -> Iterator[_socket.socket]:
        """Iterate over all sockets, each once."""
        return iter(self.workers[0] if self.is_one_for_all else [one for sockets in self.workers for one in sockets])

    def close(self) -> None:
        """Close the sockets in this process."""
        if self.file is not None:
            self.file.remove()
        for one in self.all():
            one.close()


def passed_ports(enabled: Sequence[Port]) -> dict[str, PortSockets]:
    """Return the sockets that systemd passes, by listener.

    Raises:
        StartError: as `passed_sockets`; or a listener has another kind of socket, or another path.
    """
    passed = passed_sockets([port.name for port in enabled], [port.name for port in enabled if port.is_unix])
    for port in enabled:
        sock = passed.get(port.name)
        path = os.fsdecode(sock.getsockname()) if sock is not None and sock.family == _socket.AF_UNIX else ""
        if sock is not None and path != (port.host if port.is_unix else ""):
            kind = f"the Unix socket {path}" if path else "a TCP socket"
            rule = f"listener.{port.name}.host is {port.host}"
            raise StartError(f"systemd passes {kind} as {port.name!r}, but {rule}; set ListenStream= to the same.")
    return {name: PortSockets([[sock]], is_kept=True) for name, sock in passed.items()}


def open_for_workers(settings: Settings, conf: MakoConf | None, count: int) -> dict[str, PortSockets]:
    """Open the enabled ports, with that of the admin listener, for `count` workers.

    Raises:
        StartError: an address can't be bound; one sentence.
    """
    enabled = ports(settings, conf)
    opened: dict[str, PortSockets] = {}
    passed = passed_ports(enabled)
    try:
        for port in enabled:
            if from_systemd := passed.get(port.name):
                opened[port.name] = PortSockets(from_systemd.workers * count, is_one_for_all=True, is_kept=True)
            else:
                opened[port.name] = _opened(port, count)
        if settings.admin.enabled:
            host, number = settings.admin.host, settings.admin.port
            try:
                admin = listening_sockets(host, ADMIN_PORT if number is None else number)
            except StartError:
                if number is not None:
                    raise
                admin = listening_sockets(host, 0)
            opened[ADMIN] = PortSockets([admin, *([] for _ in range(count - 1))])  # only worker 0 accepts there
    except BaseException:
        for sockets in (*opened.values(), *passed.values()):
            sockets.close()
        raise
    return opened


def _opened(port: Port, count: int) -> PortSockets:
    if port.is_unix:  # it has no SO_REUSEPORT
        try:
            sock = listening_socket(port.host, port.mode, MAX_BACKLOG)
        except StartError as error:
            raise StartError(f"listener.{port.name}: {error}") from None
        return PortSockets([[sock]] * count, is_one_for_all=True, file=SocketFile(port.host))
    each = -(-sockets_per_port() // count)  # rounded up
    failures: list[StartError] = []
    for number in (port.port, *port.others):
        try:
            sockets = listening_sockets(port.host, number, each * count)
        except StartError as error:
            failures.append(StartError(f"listener.{port.name}: {error}") if port.name not in OTHER_PORTS else error)
        else:
            return PortSockets([sockets[at::count] for at in range(count)])
    raise failures[0]


log = logging.getLogger("smqrt")

EXPIRY_CHECK_S = 60.0
_LOCAL_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Listeners(Mapping[str, Listener]):
    """The open ports of a server by name. The constructor binds them.

    Args:
        settings: all settings of the server.
        http: handles the connections.
        conf: the mako.conf.
        given: the sockets of each port, which a worker receives from its supervisor; None to open them here.
        balance: distributes connections over the workers; None without workers.

    Raises:
        StartError: an address can't be bound, or a certificate is wrong; one sentence.
    """

    def __init__(
        self,
        settings: Settings,
        http: HttpServer,
        conf: MakoConf | None = None,
        given: Mapping[str, PortSockets] | None = None,
        balance: Balance | None = None,
    ) -> None:
        self._http, self._handshake_s, self._conf = http, settings.tls.handshake_s, conf
        self._settings, self._balance = settings, balance
        self._given: Mapping[str, PortSockets] = given or {}
        self._is_closed = self._has_no_successor = False
        self._listeners: dict[str, Listener] = {}
        self._tls: dict[str, ListenerTls] = {}
        self._admin: Listener | None = None  # not in the mapping; only its certificates are reloaded here
        self._expiry_checks: gevent.Greenlet[..., None] | None = None
        try:
            enabled = ports(settings, conf)
            if given is None:
                self._given = passed_ports(enabled)
            for port in enabled:
                if given is None or port.name in given:
                    self._open(port)
                else:  # it was added to the settings after the supervisor opened the ports
                    log.warning("listener %s is opened at the next start of the server", port.name)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Listener:
        return self._listeners[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._listeners)

    def __len__(self) -> int:
        return len(self._listeners)

    def _open(self, port: Port) -> None:
        tls = ListenerTls(port.tls) if port.tls else None
        failures: list[StartError] = []
        for number in (port.port, *port.others):
            try:
                sockets = self._given.get(port.name)
                given = sockets.own if sockets else ()
                make = partial(Listener, port.host, number, given=given, sockets=sockets_per_port(), mode=port.mode)
                if tls is None:
                    listener = make(self._http.accepted)
                else:
                    listener = make(self._http.accepted_secure, tls.context, handshake_s=self._handshake_s)
                listener.accepts_one_at_a_time = sockets is not None and sockets.is_one_for_all
                break
            except StartError as error:
                named = port.name not in OTHER_PORTS or port.is_unix
                failures.append(StartError(f"listener.{port.name}: {error}") if named else error)
        else:
            raise failures[0]
        self._listeners[port.name] = listener
        listener.name, listener.max_connections = port.name, port.max_connections
        if self._balance is not None:
            listener.balance = self._balance
            self._balance.add(listener.name, listener.take)
        if self._settings.listener.get(port.name, ListenerSettings()).proxy_protocol:
            listener.expect_proxy_headers(lambda: open_connections.proxies, self._settings.proxy.header_s)
        if tls is not None:
            self._tls[port.name] = tls

    def accept_for(self, workers: Sequence[int]) -> None:
        """Also accept the connections of these workers. After `close` this does nothing."""
        if self._is_closed:
            return
        for name, listener in self._listeners.items():
            listener.accept_for(self._given[name].of(workers))
        if self._balance is not None:
            self._balance.receive_for(workers)

    def expect_no_successor(self) -> None:
        """Prepare for a shutdown after which no process of this server serves the ports."""
        self._has_no_successor = True
        for name, listener in self._listeners.items():
            listener.leaves_queue = self._given[name].is_kept if name in self._given else False

    def start(self) -> None:
        """Start accepting."""
        for listener in self._listeners.values():
            listener.start()
        if self._tls and self._expiry_checks is None:
            self._expiry_checks = gevent.spawn(self._check_expiries)

    def keep_files(self) -> None:
        """Keep the files of Unix sockets, because another process serves there."""
        for listener in self._listeners.values():
            listener.keeps_file = True

    def reject_queued(self) -> None:
        """Stop accepting, and reject queued connections with a response that the server is stopping."""
        if self._balance is not None:
            self._balance.leave()
        for listener in self._listeners.values():
            listener.reject_queued()
        if self._balance is not None and self._has_no_successor:
            self._balance.reject_queued(lambda name, fd: self._listeners[name].reject_busy(fd))

    def close(self) -> None:
        """Stop accepting and close the ports."""
        self._is_closed = True
        if self._expiry_checks is not None:
            self._expiry_checks.kill(block=False)
        for listener in self._listeners.values():
            listener.close()
        for sockets in self._given.values():
            sockets.close()
        if self._balance is not None:
            self._balance.close()

    # ---- addresses

    def scheme(self, name: str) -> str:
        """Return "http" or "https"; "unix" for a Unix socket."""
        if self._listeners[name].is_unix:
            return "unix"
        return "https" if name in self._tls else "http"

    def url(self, name: str) -> str:
        """Return the URL of a listener; `unix:` and the path for a Unix socket."""
        host, port = self._listeners[name].address
        return self._url(name, host, port)

    def local_url(self) -> str:
        """Return the URL of the first listener for processes of this machine; a port, if one is open."""
        name, listener = min(self._listeners.items(), key=lambda item: item[1].is_unix)
        host, port = listener.address
        return self._url(name, _LOCAL_HOSTS.get(host, host), port)

    def _url(self, name: str, host: str, port: int) -> str:
        if self._listeners[name].is_unix:
            return f"unix:{host}"
        return f"{self.scheme(name)}://{f'[{host}]' if ':' in host else host}:{port}"

    def port_of(self, scheme: str) -> int:
        """Return the port of the first listener of a scheme, 0 when there is none."""
        return next((one.address[1] for name, one in self.items() if self.scheme(name) == scheme), 0)

    # ---- certificates

    @property
    def has_http(self) -> bool:
        """Whether a port without TLS is open."""
        return any(self.scheme(name) == "http" for name in self._listeners)

    @property
    def has_certificates(self) -> bool:
        """Whether a port has TLS, the admin listener included."""
        return bool(self._tls)

    def add_admin(self, listener: Listener, tls: ListenerTls) -> None:
        """Reload the certificates of the admin listener together with those of the ports."""
        self._admin, self._tls[ADMIN] = listener, tls

    def files(self) -> list[str]:
        """Return the files of the certificates."""
        return [path for tls in self._tls.values() for path in tls.files]

    def reload(self, in_thread: bool = True) -> str | None:
        """Read the certificates again, for new handshakes.

        Args:
            in_thread: block only this greenlet.

        Returns:
            The errors of listeners that keep their old certificates; None for success.
        """
        faults = [tls.reload(in_thread) for tls in self._tls.values()]
        self._apply_contexts()
        return "; ".join(filter(None, faults)) or None

    def change(self, settings: Settings) -> None:
        """Apply changed TLS settings and limits of listeners; blocks this greenlet.

        Raises:
            StartError: a setting is invalid; listeners with an error keep their settings.
        """
        handshake_s = settings.tls.handshake_s
        faults = []
        for port in ports(settings, self._conf):
            try:
                listener, tls = self._listeners[port.name], self._tls.get(port.name)
                if (port.tls is None) != (tls is None):
                    raise StartError(f"listener.{port.name}: turning TLS on or off needs a restart")
                if tls is not None and port.tls is not None:
                    listener.handshake_s = handshake_s
                    tls.change(port.tls)
                listener.max_connections = port.max_connections
            except StartError as error:
                faults.append(str(error))
        try:
            files, tls = admin_files(settings) if settings.admin.enabled else None, self._tls.get(ADMIN)
            if (files is None) != (tls is None):
                raise StartError(f"{ADMIN}: turning TLS on or off needs a restart")
            if tls is not None and files is not None and self._admin is not None:
                self._admin.handshake_s = handshake_s
                tls.change(files)
        except StartError as error:
            faults.append(str(error))
        self._apply_contexts()
        if faults:
            raise StartError("; ".join(faults))

    def _apply_contexts(self) -> None:
        for name, tls in self._tls.items():
            listener = self._admin if name == ADMIN and self._admin is not None else self._listeners[name]
            listener.renew(tls.context)

    def _check_expiries(self) -> None:
        while True:
            gevent.sleep(EXPIRY_CHECK_S)
            for tls in self._tls.values():
                tls.check_expiry()
            self._apply_contexts()

    def answer_challenges(self, contexts: Mapping[str, ssl.SSLContext]) -> None:
        """Answer handshakes by which a certificate authority verifies names; see `ListenerTls.answer_challenges`."""
        for tls in self._tls.values():
            tls.answer_challenges(contexts)

    def expiries(self) -> dict[str, float]:
        """Return the earliest expiry of the certificates of each listener, in Unix seconds."""
        return {name: min(one.not_after.timestamp() for one in tls.certificates) for name, tls in self._tls.items()}

    def tls_snapshot(self, name: str) -> dict[str, object] | None:
        """Return the TLS state of a listener as JSON for operators; None without TLS."""
        return self._tls[name].snapshot() | self._listeners[name].handshake_counts if name in self._tls else None

    def reload_failures(self) -> dict[str, tuple[int, bool]]:
        """Return the number of failed reloads of each listener with TLS, and whether the last reload failed."""
        return {name: (tls.failures, tls.fault is not None) for name, tls in self._tls.items()}

"""The ports of a server, made of its settings: plain or with TLS, all with the same server behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import gevent

from smqrt.errors import StartError
from smqrt.http.server import HttpServer
from smqrt.mako_conf import MakoConf
from smqrt.net.admission import open_connections
from smqrt.net.listener import Listener, sockets_for_storms
from smqrt.net.listener_tls import ListenerTls
from smqrt.net.server_tls import TlsFiles
from smqrt.server.systemd import passed_sockets
from smqrt.settings import ListenerSettings, Settings

OTHER_PORTS = {"http": range(9357, 9371), "https": range(9443, 9461)}  # spec: runtime §1.2
CLOCK_S = 60.0
_LONGEST_PROTOCOL = 255
ADMIN = "admin"
_FLAT_PORTS = {"http": "port", "https": "tls_port"}


@dataclass(frozen=True)
class Port:
    """A listener as the settings have it, with nothing left out.

    Attributes:
        name: of its table, or `http` and `https` for the flat settings.
        tls: None for a plain one.
        max_connections: 0 for no limit of its own.
        others: ports to try when `port` is not to be had.
    """

    name: str
    host: str
    port: int
    tls: TlsFiles | None
    max_connections: int = 0
    others: range = range(0)


def ports(settings: Settings, conf: MakoConf | None = None) -> list[Port]:
    """Returns the listeners that the settings ask for, `http` and `https` first.

    Raises:
        StartError: a table makes no sense; one sentence that names it.
    """
    asked = [name for name in dict.fromkeys([*_flat(settings, conf), *settings.listener]) if _enabled(name, settings)]
    if not asked:
        raise StartError("no listener is enabled; leave one of them on.")
    if ADMIN in asked:
        raise StartError(f"listener.{ADMIN}: the listener of operators has this name, see [{ADMIN}]; choose another.")
    return [_port(name, settings, conf) for name in asked]


def _enabled(name: str, settings: Settings) -> bool:
    return name not in settings.listener or settings.listener[name].enabled


def lacks_certificate(settings: Settings) -> bool:
    """Whether a listener with TLS is asked for and no certificate is given for it."""
    if settings.cert:
        return False
    https = settings.listener.get("https", ListenerSettings())
    tables = {**settings.listener, **({"https": https} if settings.tls_port is not None else {})}
    return any(one.enabled and _is_secure(name, one) and not _own_pairs(one) for name, one in tables.items())


def _flat(settings: Settings, conf: MakoConf | None) -> list[str]:
    """The listeners that need no table."""
    secure = ["https"] if settings.tls_port is not None else []
    return secure if secure and conf and not conf.plain_http else ["http", *secure]


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
        if not protocol.isascii() or len(protocol) > _LONGEST_PROTOCOL:
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
    """Returns the files of the admin listener's TLS; None when it speaks none.

    Raises:
        StartError: the settings make no sense.
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


class Listeners(Mapping[str, Listener]):
    """The ports of a server by name; bound from the beginning.

    Args:
        settings: what the listeners are to be.
        http: gets the connections.
        conf: what mako.conf says.

    Raises:
        StartError: an address can't be bound, or a certificate is wrong; one sentence.
    """

    def __init__(self, settings: Settings, http: HttpServer, conf: MakoConf | None = None) -> None:
        self._http, self._handshake_s, self._conf = http, settings.tls.handshake_s, conf
        self._settings = settings
        self._listeners: dict[str, Listener] = {}
        self._tls: dict[str, ListenerTls] = {}
        self._beside: dict[str, Listener] = {}  # not a port of the server, but its certificates are looked after here
        self._clock: gevent.Greenlet[..., None] | None = None
        try:
            asked = ports(settings, conf)
            self._passed = passed_sockets([port.name for port in asked])
            for port in asked:
                self._open(port)
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
                self._listeners[port.name] = self._bound(replace(port, port=number), tls)
            except StartError as error:
                named = port.name not in OTHER_PORTS
                failures.append(StartError(f"listener.{port.name}: {error}") if named else error)
            else:
                break
        else:
            raise failures[0]
        listener = self._listeners[port.name]
        listener.name, listener.max_connections = port.name, port.max_connections
        if self._settings.listener.get(port.name, ListenerSettings()).proxy_protocol:
            listener.expect_proxy_headers(lambda: open_connections.proxies, self._settings.proxy.header_s)
        if tls is not None:
            self._tls[port.name] = tls

    def _bound(self, port: Port, tls: ListenerTls | None) -> Listener:
        sock = self._passed.pop(port.name, None)
        if tls is None:
            return Listener(port.host, port.port, self._http.accepted, sockets=sockets_for_storms(), sock=sock)
        return Listener(
            port.host,
            port.port,
            self._http.accepted_secure,
            tls.context,
            sockets=sockets_for_storms(),
            handshake_s=self._handshake_s,
            sock=sock,
        )

    def look_after(self, listener: Listener, tls: ListenerTls) -> None:
        """Renew the certificates of the admin listener as those of the ports."""
        self._beside[ADMIN], self._tls[ADMIN] = listener, tls

    def start(self) -> None:
        """Begin to accept."""
        for listener in self._listeners.values():
            listener.start()
        if self._tls and self._clock is None:
            self._clock = gevent.spawn(self._look_at_the_clock)

    def turn_away(self) -> None:
        """Accept no more, and tell those who wait that the server stops."""
        for listener in self._listeners.values():
            listener.turn_away()

    def close(self) -> None:
        """Accept no more."""
        if self._clock is not None:
            self._clock.kill(block=False)
        for listener in self._listeners.values():
            listener.close()

    def scheme(self, name: str) -> str:
        """Returns "http" or "https"."""
        return "https" if name in self._tls else "http"

    def port_of(self, scheme: str) -> int:
        """Returns the port of the first listener of a scheme, 0 when there is none."""
        return next((one.address[1] for name, one in self.items() if self.scheme(name) == scheme), 0)

    # ---- certificates

    @property
    def has_certificates(self) -> bool:
        """Whether there is TLS."""
        return bool(self._tls)

    def files(self) -> list[str]:
        """Returns the files of the certificates."""
        return [path for tls in self._tls.values() for path in tls.files]

    def reload(self, in_thread: bool = True) -> str | None:
        """Read the certificates again, for the handshakes from now on.

        Args:
            in_thread: blocks this greenlet, and holds nobody else.

        Returns:
            Why a listener kept its old ones; None when all have taken theirs.
        """
        faults = [tls.reload(in_thread) for tls in self._tls.values()]
        self._renew()
        return "; ".join(filter(None, faults)) or None

    def change(self, settings: Settings) -> None:
        """Bring other settings of TLS, and limits of listeners, into force; blocks this greenlet.

        Raises:
            StartError: some are wrong; those listeners go on as before.
        """
        faults = []
        for port in ports(settings, self._conf):
            try:
                self._change(port, settings.tls.handshake_s)
            except StartError as error:
                faults.append(str(error))
        try:
            self._change_admin(settings)
        except StartError as error:
            faults.append(str(error))
        self._renew()
        if faults:
            raise StartError("; ".join(faults))

    def _change(self, port: Port, handshake_s: float) -> None:
        listener, tls = self._listeners[port.name], self._tls.get(port.name)
        if (port.tls is None) != (tls is None):
            raise StartError(f"listener.{port.name}: TLS on or off needs a restart")
        if tls is not None and port.tls is not None:
            listener.handshake_s = handshake_s
            tls.change(port.tls)
        listener.max_connections = port.max_connections

    def _change_admin(self, settings: Settings) -> None:
        files, tls = admin_files(settings) if settings.admin.enabled else None, self._tls.get(ADMIN)
        if (files is None) != (tls is None):
            raise StartError(f"{ADMIN}: TLS on or off needs a restart")
        if tls is not None and files is not None:
            self._beside[ADMIN].handshake_s = settings.tls.handshake_s
            tls.change(files)

    def _renew(self) -> None:
        for name, tls in self._tls.items():
            (self._beside.get(name) or self._listeners[name]).renew(tls.context)

    def _look_at_the_clock(self) -> None:
        while True:
            gevent.sleep(CLOCK_S)
            for tls in self._tls.values():
                tls.look_at_the_clock()
            self._renew()

    def expiries(self) -> dict[str, float]:
        """Returns when the first certificate of each listener expires, in Unix seconds."""
        return {name: min(one.not_after.timestamp() for one in tls.certificates) for name, tls in self._tls.items()}

    def tls_snapshot(self, name: str) -> dict[str, object] | None:
        """Returns what an operator asks of the TLS of a listener, as JSON has it; None when it has none."""
        return self._tls[name].snapshot() | self._listeners[name].handshake_counts if name in self._tls else None

    def reload_failures(self) -> dict[str, tuple[int, bool]]:
        """Returns for each listener with TLS how often its files could not be read again, and whether the last time."""
        return {name: (tls.failures, tls.fault is not None) for name, tls in self._tls.items()}

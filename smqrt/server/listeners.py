"""The open ports of a server, plain or with TLS, all in front of one HTTP server."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import gevent

from smqrt.errors import StartError
from smqrt.http.server import HttpServer
from smqrt.server.mako_conf import MakoConf
from smqrt.server.ports import ADMIN, OTHER_PORTS, Port, PortSockets, admin_files, passed_ports, ports
from smqrt.settings.settings import ListenerSettings, Settings
from smqrt.transport.admission import open_connections
from smqrt.transport.balance import Balance
from smqrt.transport.listener import Listener, sockets_for_storms
from smqrt.transport.server_tls import ListenerTls

log = logging.getLogger("smqrt")

EXPIRY_CHECK_S = 60.0
_LOCAL_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Listeners(Mapping[str, Listener]):
    """The ports of a server by name. They are bound when this is made.

    Args:
        settings: of the server.
        http: gets the connections.
        conf: the mako.conf.
        given: the sockets of each port, which a worker gets from its supervisor; None to open them here.
        balance: spreads connections over the workers; None without workers.

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
        self._admin: Listener | None = None  # no port of the mapping; only its certificates are renewed here
        self._expiry_checks: gevent.Greenlet[..., None] | None = None
        try:
            asked = ports(settings, conf)
            if given is None:
                self._given = passed_ports(asked)
            for port in asked:
                if given is None or port.name in given:
                    self._open(port)
                else:  # a reload added it; the supervisor has opened its ports before
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
                listener = self._bound(replace(port, port=number), tls)
                break
            except StartError as error:
                named = port.name not in OTHER_PORTS
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

    def _bound(self, port: Port, tls: ListenerTls | None) -> Listener:
        sockets = self._given.get(port.name)
        given = sockets.own if sockets else ()
        make = partial(Listener, port.host, port.port, given=given, sockets=sockets_for_storms())
        if tls is None:
            listener = make(self._http.accepted)
        else:
            listener = make(self._http.accepted_secure, tls.context, handshake_s=self._handshake_s)
        listener.takes_turns = sockets is not None and sockets.is_one_for_all
        return listener

    def accept_for(self, workers: Sequence[int]) -> None:
        """Accept the connections of these workers, too. After `close` this does nothing."""
        if self._is_closed:
            return
        for name, listener in self._listeners.items():
            listener.accept_for(self._given[name].of(workers))
        if self._balance is not None:
            self._balance.take_for(workers)

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

    def turn_away(self) -> None:
        """Stop accepting, and answer queued connections that the server stops."""
        if self._balance is not None:
            self._balance.leave()
        for listener in self._listeners.values():
            listener.turn_away()
        if self._balance is not None and self._has_no_successor:
            self._balance.turn_away(lambda name, fd: self._listeners[name].say_busy(fd))

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
        """Return "http" or "https"."""
        return "https" if name in self._tls else "http"

    def url(self, name: str) -> str:
        """Return the URL of a listener."""
        host, port = self._listeners[name].address
        return self._url(name, host, port)

    def local_url(self) -> str:
        """Return the URL of the first listener for processes of this machine."""
        name, listener = next(iter(self._listeners.items()))
        host, port = listener.address
        return self._url(name, _LOCAL_HOSTS.get(host, host), port)

    def _url(self, name: str, host: str, port: int) -> str:
        return f"{self.scheme(name)}://{f'[{host}]' if ':' in host else host}:{port}"

    def port_of(self, scheme: str) -> int:
        """Return the port of the first listener of a scheme, 0 when there is none."""
        return next((one.address[1] for name, one in self.items() if self.scheme(name) == scheme), 0)

    # ---- certificates

    @property
    def has_http(self) -> bool:
        """Whether a port without TLS is open."""
        return any(name not in self._tls for name in self._listeners)

    @property
    def has_certificates(self) -> bool:
        """Whether a port has TLS, the admin listener included."""
        return bool(self._tls)

    def add_admin(self, listener: Listener, tls: ListenerTls) -> None:
        """Renew the certificates of the admin listener with those of the ports."""
        self._admin, self._tls[ADMIN] = listener, tls

    def files(self) -> list[str]:
        """Return the files of the certificates."""
        return [path for tls in self._tls.values() for path in tls.files]

    def reload(self, in_thread: bool = True) -> str | None:
        """Read the certificates again, for new handshakes.

        Args:
            in_thread: block only this greenlet.

        Returns:
            Why a listener kept its old certificates; None when all have the new ones.
        """
        faults = [tls.reload(in_thread) for tls in self._tls.values()]
        self._apply_contexts()
        return "; ".join(filter(None, faults)) or None

    def change(self, settings: Settings) -> None:
        """Apply other settings of TLS, and limits of listeners; blocks this greenlet.

        Raises:
            StartError: some are wrong; those listeners keep their settings.
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
        self._apply_contexts()
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
        if tls is not None and files is not None and self._admin is not None:
            self._admin.handshake_s = settings.tls.handshake_s
            tls.change(files)

    def _apply_contexts(self) -> None:
        for name, tls in self._tls.items():
            listener = self._admin if name == ADMIN and self._admin is not None else self._listeners[name]
            listener.renew(tls.context)

    def _check_expiries(self) -> None:
        while True:
            gevent.sleep(EXPIRY_CHECK_S)
            for tls in self._tls.values():
                tls.look_at_the_clock()
            self._apply_contexts()

    def answer_challenges(self, contexts: Mapping[str, ssl.SSLContext]) -> None:
        """Let a certificate authority verify names by handshakes; see `ListenerTls.answer_challenges`."""
        for tls in self._tls.values():
            tls.answer_challenges(contexts)

    def expiries(self) -> dict[str, float]:
        """Return when the first certificate of each listener expires, in Unix seconds."""
        return {name: min(one.not_after.timestamp() for one in tls.certificates) for name, tls in self._tls.items()}

    def tls_snapshot(self, name: str) -> dict[str, object] | None:
        """Return the state of the TLS of a listener as JSON for operators; None when it has no TLS."""
        return self._tls[name].snapshot() | self._listeners[name].handshake_counts if name in self._tls else None

    def reload_failures(self) -> dict[str, tuple[int, bool]]:
        """Return the failed reloads of each listener with TLS, and whether the last reload failed."""
        return {name: (tls.failures, tls.fault is not None) for name, tls in self._tls.items()}

"""The ports of a server, made of its settings: plain or with TLS, all with the same server behind them."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

CLOCK_S = 60.0


def _known(asked: Iterable[Port], given: Mapping[str, PortSockets]) -> Iterator[Port]:
    for port in asked:
        if port.name in given:
            yield port
        else:
            log.warning("listener %s is opened at the next start of the server", port.name)


class Listeners(Mapping[str, Listener]):
    """The ports of a server by name; bound from the beginning.

    Args:
        settings: what the listeners are to be.
        http: gets the connections.
        conf: what mako.conf says.
        given: the sockets of each port, of a worker; it opens none itself.
        balance: spreads connections over the workers; None where there are no others.

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
        self._is_closed = self._is_last = False
        self._listeners: dict[str, Listener] = {}
        self._tls: dict[str, ListenerTls] = {}
        self._beside: dict[str, Listener] = {}  # not a port of the server, but its certificates are looked after here
        self._clock: gevent.Greenlet[..., None] | None = None
        try:
            asked = ports(settings, conf)
            if given is None:
                self._given = passed_ports(asked)
            for port in asked if given is None else _known(asked, given):
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
        made = partial(Listener, port.host, port.port, given=given, sockets=sockets_for_storms())
        if tls is None:
            listener = made(self._http.accepted)
        else:
            listener = made(self._http.accepted_secure, tls.context, handshake_s=self._handshake_s)
        listener.takes_turns = sockets is not None and sockets.is_one_for_all
        return listener

    def accept_for(self, workers: Sequence[int]) -> None:
        """Accept the connections that are meant for these workers, too, unless none are accepted any more."""
        if self._is_closed:
            return
        for name, listener in self._listeners.items():
            listener.accept_for(self._given[name].of(workers))
        if self._balance is not None:
            self._balance.take_for(workers)

    def leave_nobody(self) -> None:
        """The server ends: nobody serves these ports next."""
        self._is_last = True
        for name, listener in self._listeners.items():
            listener.leaves_queue = self._given[name].is_kept if name in self._given else False

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
        if self._balance is not None:
            self._balance.leave()
        for listener in self._listeners.values():
            listener.turn_away()
        if self._balance is not None and self._is_last:
            self._balance.turn_away(lambda name, fd: self._listeners[name].say_busy(fd))

    def close(self) -> None:
        """Accept no more."""
        self._is_closed = True
        if self._clock is not None:
            self._clock.kill(block=False)
        for listener in self._listeners.values():
            listener.close()
        for sockets in self._given.values():
            sockets.close()
        if self._balance is not None:
            self._balance.close()

    def scheme(self, name: str) -> str:
        """Returns "http" or "https"."""
        return "https" if name in self._tls else "http"

    def port_of(self, scheme: str) -> int:
        """Returns the port of the first listener of a scheme, 0 when there is none."""
        return next((one.address[1] for name, one in self.items() if self.scheme(name) == scheme), 0)

    # ---- certificates

    @property
    def has_http(self) -> bool:
        """Whether a port without TLS is open."""
        return any(name not in self._tls for name in self._listeners)

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

    def answer_challenges(self, contexts: Mapping[str, ssl.SSLContext]) -> None:
        """Let a certificate authority verify names by handshakes; see `ListenerTls.answer_challenges`."""
        for tls in self._tls.values():
            tls.answer_challenges(contexts)

    def expiries(self) -> dict[str, float]:
        """Returns when the first certificate of each listener expires, in Unix seconds."""
        return {name: min(one.not_after.timestamp() for one in tls.certificates) for name, tls in self._tls.items()}

    def tls_snapshot(self, name: str) -> dict[str, object] | None:
        """Returns what an operator asks of the TLS of a listener, as JSON has it; None when it has none."""
        return self._tls[name].snapshot() | self._listeners[name].handshake_counts if name in self._tls else None

    def reload_failures(self) -> dict[str, tuple[int, bool]]:
        """Returns for each listener with TLS how often its files could not be read again, and whether the last time."""
        return {name: (tls.failures, tls.fault is not None) for name, tls in self._tls.items()}

"""Servers of a NATS cluster, and when a client tries which of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from ipaddress import ip_address

from smqrt.errors import ArgumentError
from smqrt.wire.url import split_url

PORT = 4222
MAX_SERVERS = 200
"""Further servers that a server announces are ignored."""
LAME_DUCK_S = 60.0
"""How long a server that is shutting down is not tried, if there is another."""
_SCHEMES = {"nats": False, "tls": True}
_MAX_DOUBLINGS = 20


@dataclass(frozen=True)
class NatsAddress:
    """The address of a server, and the credentials for it.

    Attributes:
        host: name or IP address, IPv6 without brackets.
        port: the TCP port.
        secure: whether TLS is required.
        tls_hostname: a name that its certificate may have instead of the host; None for none.
        user, password: for this server; a user alone is a token. None: those of the options.
    """

    host: str
    port: int = PORT
    secure: bool = False
    tls_hostname: str | None = None
    user: str | None = None
    password: str | None = None

    @property
    def key(self) -> tuple[str, int]:
        """What identifies the server."""
        return self.host, self.port

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.secure else 'nats'}://{host}:{self.port}"


def parse_servers(servers: str | Iterable[str]) -> list[NatsAddress]:
    """Return the addresses in "nats://one,tls://user:password@two:4222", or in a list of such texts.

    Raises:
        ArgumentError: one of them is invalid, or there is none.
    """
    texts = servers.split(",") if isinstance(servers, str) else servers
    found = [parse_server(text.strip()) for text in texts if text.strip()]
    if not found:
        raise ArgumentError("servers is empty; give at least one, such as nats://127.0.0.1:4222")
    return list({address.key: address for address in found}.values())


def parse_server(text: str) -> NatsAddress:
    """Return the address in `nats://user:password@host:port`, `nats://token@host`, `tls://host`, `host:port` or `host`.

    Raises:
        ArgumentError: it is invalid; the text has no password in it.
    """
    scheme, mark, rest = text.rpartition("://")
    shown = f"{scheme}{mark}{rest.rpartition('@')[2]}"
    try:
        parts = split_url(text if mark else f"//{text}")
    except ValueError as error:
        raise ArgumentError(f"servers: {shown!r} is no address: {error}") from None
    if parts.scheme in ("ws", "wss"):
        raise ArgumentError(f"servers: {shown!r}: NATS over WebSocket is not supported; use nats:// or tls://")
    if not parts.host or parts.path.strip("/") or parts.query or (mark and parts.scheme not in _SCHEMES):
        raise ArgumentError(f"servers: {shown!r} must be nats://host:port, tls://host:port, or host:port")
    secure = _SCHEMES.get(parts.scheme, False)
    return NatsAddress(parts.host, parts.port or PORT, secure, None, parts.user, parts.password)


@dataclass
class _Known:
    """A server and its failures."""

    address: NatsAddress
    is_learned: bool = False
    failures: int = 0
    not_before_s: float = 0.0


class ServerPool:
    """The servers, both those given and those that a server has announced.

    After a failure a server is not tried for some time. The time doubles with each failure in a row. Half of it is
    random, so that the clients of a server that was shut down do not return all at once.

    Args:
        servers: those given, in the order in which they are tried.
        first_s, longest_s: the delay after the first failure, and the longest one.
        draw: returns a random number from 0 to 1.
    """

    def __init__(
        self, servers: Iterable[NatsAddress], first_s: float, longest_s: float, draw: Callable[[], float]
    ) -> None:
        self._known = {address.key: _Known(address) for address in servers}
        self._first_s, self._longest_s, self._draw = first_s, longest_s, draw

    def __len__(self) -> int:
        return len(self._known)

    @property
    def addresses(self) -> list[NatsAddress]:
        """The addresses of all servers."""
        return [one.address for one in self._known.values()]

    def next(self) -> tuple[NatsAddress, float]:
        """Return the server to try next, and when, by the clock of the times that `failed` gets."""
        # In the order in which they were given, if several may be tried now.
        soonest = min(self._known.values(), key=lambda one: one.not_before_s)
        return soonest.address, soonest.not_before_s

    def failed(self, address: NatsAddress, now_s: float, at_least_s: float = 0.0) -> None:
        """Schedule a server after a failed or lost connection.

        Args:
            address: the server.
            now_s: now, in monotonic seconds.
            at_least_s: the minimum delay in seconds, for failures that take longer to repair.
        """
        one = self._known.get(address.key)
        if one is not None:
            delay_s = max(min(self._first_s * 2.0**one.failures, self._longest_s), at_least_s)
            one.failures = min(one.failures + 1, _MAX_DOUBLINGS)
            one.not_before_s = now_s + delay_s * (1 + self._draw()) / 2

    def broke(self, address: NatsAddress, now_s: float) -> None:
        """Schedule a server whose steady connection was lost for now; `failed` sets delays if that fails."""
        one = self._known.get(address.key)
        if one is not None:
            one.failures, one.not_before_s = 0, now_s

    def leave_alone(self, address: NatsAddress, until_s: float) -> None:
        """Try a server only when there is no other one, until `until_s`."""
        one = self._known.get(address.key)
        if one is not None:
            one.not_before_s = until_s

    def worked(self, address: NatsAddress) -> None:
        """Forget the failures of a server, since a connection to it has lasted."""
        one = self._known.get(address.key)
        if one is not None:
            one.failures = 0

    def learn(self, source: NatsAddress, urls: Iterable[str]) -> list[NatsAddress]:
        """Replace the learned servers by those that `source` announces; return the new ones.

        They are connected to like `source`: with TLS, by its name if they have none, and with its credentials.
        """
        announced = {address.key: address for address in _announced(source, urls)}
        for key in [key for key, one in self._known.items() if one.is_learned and key not in announced]:
            if key != source.key:  # some servers do not announce themselves
                del self._known[key]
        new = [address for key, address in announced.items() if key not in self._known]
        new = new[: max(MAX_SERVERS - len(self._known), 0)]
        self._known.update({address.key: _Known(address, is_learned=True) for address in new})
        return new


def _announced(source: NatsAddress, urls: Iterable[str]) -> Iterable[NatsAddress]:
    name = source.tls_hostname or (None if _is_ip(source.host) else source.host)
    for url in urls:
        try:
            address = parse_server(url)
        except ArgumentError:
            continue  # of an unsupported kind, such as WebSocket
        yield replace(
            source,
            host=address.host,
            port=address.port,
            tls_hostname=name if _is_ip(address.host) else source.tls_hostname,
        )


def _is_ip(host: str) -> bool:
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True

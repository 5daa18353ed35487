"""The servers of a NATS cluster that a client knows, and which of them it tries when."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from ipaddress import ip_address

from smqrt.errors import ArgumentError
from smqrt.wire.url import split_url

PORT = 4222
MAX_SERVERS = 200
"""More that a server tells of are not kept."""
LAME_DUCK_S = 60.0
"""A server that will end is not tried for so long, when there is another."""
_SCHEMES = {"nats": False, "tls": True}
_MAX_DOUBLINGS = 20


@dataclass(frozen=True)
class NatsAddress:
    """Where a server is, and who one is there.

    Attributes:
        host: name or IP address, IPv6 without brackets.
        secure: whether TLS is to be spoken in any case.
        tls_hostname: the name that its certificate may have instead of the host; None for no other.
        user, password: of this server; a user alone is a token. None: those of the options.
    """

    host: str
    port: int = PORT
    secure: bool = False
    tls_hostname: str | None = None
    user: str | None = None
    password: str | None = None

    @property
    def key(self) -> tuple[str, int]:
        """What tells it from other servers."""
        return self.host, self.port

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.secure else 'nats'}://{host}:{self.port}"


def parse_servers(servers: str | Iterable[str]) -> list[NatsAddress]:
    """The addresses in "nats://one,tls://user:password@two:4222", or in a list of such texts.

    Raises:
        ArgumentError: one of them is none, or there is none at all.
    """
    texts = servers.split(",") if isinstance(servers, str) else servers
    found = [parse_server(text.strip()) for text in texts if text.strip()]
    if not found:
        raise ArgumentError("servers is empty; give at least one, such as nats://127.0.0.1:4222")
    return list({address.key: address for address in found}.values())


def parse_server(text: str) -> NatsAddress:
    """The address in `nats://user:password@host:port`, `nats://token@host`, `tls://host`, `host:port` or `host`.

    Raises:
        ArgumentError: it is none; the sentence has no password in it.
    """
    scheme, mark, rest = text.rpartition("://")
    shown = f"{scheme}{mark}{rest.rpartition('@')[2]}"
    try:
        parts = split_url(text if mark else f"//{text}")
    except ValueError as error:
        raise ArgumentError(f"servers: {shown!r} is none: {error}") from None
    if parts.scheme in ("ws", "wss"):
        raise ArgumentError(f"servers: {shown!r}: NATS over WebSocket is not spoken here; use nats:// or tls://")
    if not parts.host or parts.path.strip("/") or parts.query or (mark and parts.scheme not in _SCHEMES):
        raise ArgumentError(f"servers: {shown!r} must be nats://host:port, tls://host:port, or host:port")
    secure = _SCHEMES.get(parts.scheme, False)
    return NatsAddress(parts.host, parts.port or PORT, secure, None, parts.user, parts.password)


@dataclass
class _Known:
    """A server, and how it went with it."""

    address: NatsAddress
    is_learned: bool = False
    failures: int = 0
    not_before_s: float = 0.0


class ServerPool:
    """The servers, those given and those that a server has told of.

    Each has its own time before which it is not tried again; it doubles with each failure in a row, and is drawn
    between half of that and all of it, so that the clients of a server that ended do not come back all at once.

    Args:
        servers: those given, in the order in which they are tried.
        first_s, longest_s: what is waited after the first failure, and at most.
        draw: a random number from 0 to 1.
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
        """Of all of them."""
        return [one.address for one in self._known.values()]

    def next(self) -> tuple[NatsAddress, float]:
        """The server to be tried next, and when: on the clock of the times that `failed` was given."""
        soonest = min(self._known.values(), key=lambda one: one.not_before_s)
        return soonest.address, soonest.not_before_s

    def failed(self, address: NatsAddress, now_s: float, at_least_s: float = 0.0) -> None:
        """There is no connection to it, or it was lost.

        Args:
            at_least_s: seconds to leave it alone, when time alone will not mend it.
        """
        one = self._known.get(address.key)
        if one is not None:
            delay_s = max(min(self._first_s * 2.0**one.failures, self._longest_s), at_least_s)
            one.failures = min(one.failures + 1, _MAX_DOUBLINGS)
            one.not_before_s = now_s + delay_s * (1 + self._draw()) / 2

    def broke(self, address: NatsAddress, now_s: float) -> None:
        """A connection to it that had lasted for a while was lost: it is tried again at once, and only when that fails
        after the times of `failed`.
        """
        one = self._known.get(address.key)
        if one is not None:
            one.failures, one.not_before_s = 0, now_s

    def leave_alone(self, address: NatsAddress, until_s: float) -> None:
        """Try it when there is no other one."""
        one = self._known.get(address.key)
        if one is not None:
            one.not_before_s = until_s

    def worked(self, address: NatsAddress) -> None:
        """A connection to it has lasted: what was before is forgotten."""
        one = self._known.get(address.key)
        if one is not None:
            one.failures = 0

    def learn(self, source: NatsAddress, urls: Iterable[str]) -> list[NatsAddress]:
        """Take the servers that `source` told of instead of those that were learned before; gives the new ones.

        They are spoken to as `source` is: with TLS, by its name when they have none, and with its credentials.
        """
        told = {address.key: address for address in _told(source, urls)}
        for key in [key for key, one in self._known.items() if one.is_learned and key not in told]:
            if key != source.key:
                del self._known[key]
        new = [address for key, address in told.items() if key not in self._known]
        new = new[: max(MAX_SERVERS - len(self._known), 0)]
        self._known.update({address.key: _Known(address, is_learned=True) for address in new})
        return new


def _told(source: NatsAddress, urls: Iterable[str]) -> Iterable[NatsAddress]:
    name = source.tls_hostname or (None if _is_ip(source.host) else source.host)
    for url in urls:
        try:
            address = parse_server(url)
        except ArgumentError:
            continue  # of a kind that is not ours to reach
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

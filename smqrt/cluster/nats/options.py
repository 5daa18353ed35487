"""Options, credentials and server lists of NATS clients."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from smqrt.errors import ArgumentError
from smqrt.settings.option_types import instance, number, option, optional, path, switch, text, whole
from smqrt.transport.tls_contexts import ClientTls
from smqrt.wire.url import split_url

# ---- Credentials
#
# An nkey is a pair of Ed25519 keys, in base32 with a prefix and a checksum (docs.nats.io, "NKeys"). The server sends a
# nonce and the client signs it; the seed is not sent.

_SEED_PREFIX, _USER_PREFIX = 18 << 3, 20 << 3  # the letters S and U in base32: 5 bits, at the top of a byte
_SEED_BYTES = 32
_MAX_FILE_BYTES = 1 << 20
_BLOCK = re.compile(r"-{3,}\s*BEGIN ([A-Z ]+?)\s*-{3,}\s*([\w.+/=-]+)\s*-{3,}\s*END [A-Z ]+?\s*-{3,}")


class UserKey:
    """The nkey of a user.

    Args:
        seed: the seed as text, "SU..."; white space around it is ignored.

    Raises:
        ArgumentError: the seed is invalid.
    """

    def __init__(self, seed: str) -> None:
        text = seed.strip()
        try:
            raw = base64.b32decode(text + "=" * (-len(text) % 8))
        except (binascii.Error, ValueError):
            raw = b""
        raw, checksum = raw[:-2], raw[-2:]
        if len(raw) < 2 or binascii.crc_hqx(raw, 0).to_bytes(2, "little") != checksum:
            raise ArgumentError("this is not an nkey: it is damaged, or another text")
        if raw[0] & 0xF8 != _SEED_PREFIX or len(raw) != _SEED_BYTES + 2:
            raise ArgumentError("an nkey seed begins with SU; this is another key, possibly a public one")
        if ((raw[0] & 7) << 5 | raw[1] >> 3) != _USER_PREFIX:
            raise ArgumentError(
                "an nkey seed of a user begins with SU; this is that of an account, an operator or a server"
            )
        self._key = Ed25519PrivateKey.from_private_bytes(raw[2:])

    @property
    def public(self) -> str:
        """The public key, "U...", for the server's configuration."""
        raw = bytes((_USER_PREFIX,)) + self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        return base64.b32encode(raw + binascii.crc_hqx(raw, 0).to_bytes(2, "little")).decode().rstrip("=")

    def sign(self, nonce: str) -> str:
        """Return the signature of the server's nonce, in the encoding of CONNECT."""
        return base64.urlsafe_b64encode(self._key.sign(nonce.encode())).decode().rstrip("=")


def nkey_fields(path: str, nonce: str) -> dict[str, object]:
    """Return the fields of CONNECT for the seed in a file. It reads the file, so call it in a thread.

    Raises:
        ArgumentError: the file cannot be read, or has no seed.
    """
    try:
        key = UserKey(_content(path, "nkey_file"))
    except ArgumentError as error:
        raise ArgumentError(f"nkey_file {path}: {error}") from None
    return {"nkey": key.public, "sig": key.sign(nonce)}


def jwt_fields(path: str, nonce: str) -> dict[str, object]:
    """Return the fields of CONNECT for a credentials file of `nsc`: a JWT and a seed. Raises as `nkey_fields`."""
    blocks = dict(_BLOCK.findall(_content(path, "credentials_file")))
    jwt, seed = blocks.get("NATS USER JWT"), blocks.get("USER NKEY SEED")
    if jwt is None or seed is None:
        raise ArgumentError(f"credentials_file {path}: it needs a NATS USER JWT and a USER NKEY SEED; make it with nsc")
    try:
        return {"jwt": jwt, "sig": UserKey(seed).sign(nonce)}
    except ArgumentError as error:
        raise ArgumentError(f"credentials_file {path}: {error}") from None


def _content(path: str, what: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return file.read(_MAX_FILE_BYTES).decode()
    except OSError as error:
        raise ArgumentError(f"{what}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ArgumentError(f"{what}: {path} is not text") from None


_MAX_S = 86_400.0
_TEXT = optional(text())
_FILE = optional(path())
_WHOLE = 1 << 53


@dataclass(kw_only=True)
class NatsOptions:
    """The options of a client."""

    name: str = option("smqrt", text(), "the name in the server's lists of connections")
    user: str | None = option(None, _TEXT, "user for servers whose address has none")
    password: str | None = option(None, _TEXT, "its password", secret=True)
    token: str | None = option(None, _TEXT, "token for servers whose address has none", secret=True)
    nkey_file: str | None = option(None, _FILE, "file with the seed of a user's nkey; read for each connection")
    credentials_file: str | None = option(
        None, _FILE, "file with a user's JWT and seed, as `nsc` makes it; read for each connection"
    )
    tls: ClientTls | None = option(
        None, optional(instance("a ClientTls", ClientTls)), "TLS configuration, instead of the files below"
    )
    tls_ca: str | None = option(None, _FILE, "PEM file with trusted certificates, instead of those of this machine")
    tls_cert: str | None = option(None, _FILE, "PEM file with the client's certificate")
    tls_key: str | None = option(None, _FILE, "PEM file with its key, if that is in another file")
    tls_hostname: str | None = option(None, _TEXT, "the name in the servers' certificates, if that is not their host")
    tls_first: bool = option(False, switch(), "start TLS before INFO, for servers with `handshake_first`")
    echo: bool = option(True, switch(), "receive messages of this client on its own subscriptions")
    shuffle: bool = option(True, switch(), "try the servers in random order, so that clients spread over them")
    queue_bytes: int = option(
        8 << 20,
        whole(0, _WHOLE, "bytes"),
        "the size of the queue for a slow server; further messages are refused",
        shown="8 MiB",
    )
    reconnect_queue_bytes: int = option(
        8 << 20,
        whole(0, _WHOLE, "bytes"),
        "the size of the queue while there is no connection; 0: messages are refused",
        shown="8 MiB",
    )
    connect_timeout_s: float = option(
        5.0,
        number(0, _MAX_S, "seconds", above=True),
        "the maximum time of a connection attempt, with name lookup and TLS",
    )
    ping_s: float = option(
        10.0,
        number(0, _MAX_S, "seconds", above=True),
        "the server is pinged after this time without data",
    )
    pong_s: float = option(
        5.0,
        number(0, _MAX_S, "seconds", above=True),
        "the maximum time for its answer, and the maximum time in which it reads nothing",
    )
    reconnect_s: float = option(
        0.1, number(0, _MAX_S, "seconds", above=True), "the delay before a server is tried again; doubles each time"
    )
    longest_reconnect_s: float = option(5.0, number(0, _MAX_S, "seconds", above=True), "the maximum of that delay")
    refused_s: float = option(
        30.0,
        number(0, _MAX_S, "seconds", above=True),
        "the delay before a server that rejects the client is tried again",
    )

    def __post_init__(self) -> None:
        credentials = ("user", "token", "nkey_file", "credentials_file")
        given = [name for name in credentials if getattr(self, name) is not None]
        if len(given) > 1:
            raise ArgumentError(f"{' and '.join(given)}: give only one of them")
        if self.tls is not None and (self.tls_ca or self.tls_cert):
            raise ArgumentError("tls: give a ClientTls or files, not both")

    @property
    def wants_tls(self) -> bool:
        """Whether TLS is required for all servers, also those with `nats://`."""
        return self.tls is not None or self.tls_first or bool(self.tls_ca or self.tls_cert)


# ---- Server list

PORT = 4222
MAX_SERVERS = 200
"""The maximum number of servers; further announced ones are ignored."""
LAME_DUCK_S = 60.0
"""A server that shuts down is not tried for this time, if there is another one."""
_SCHEMES = {"nats": False, "tls": True}
_MAX_DOUBLINGS = 20  # of the delay, so that the power of two stays finite


@dataclass(frozen=True)
class NatsAddress:
    """The address of a server, and the credentials for it.

    Attributes:
        host: name or IP address, IPv6 without brackets.
        port: the TCP port.
        secure: whether TLS is required.
        tls_hostname: a name that its certificate may have instead of the host; None for none.
        user, password: the credentials for this server; a user without a password is a token. None: use the options.
    """

    host: str
    port: int = PORT
    secure: bool = False
    tls_hostname: str | None = None
    user: str | None = None
    password: str | None = None

    @property
    def key(self) -> tuple[str, int]:
        """Host and port, which identify the server."""
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
        ArgumentError: it is invalid; the error text does not contain the password.
    """
    scheme, mark, rest = text.rpartition("://")
    shown = f"{scheme}{mark}{rest.rpartition('@')[2]}"
    try:
        parts = split_url(text if mark else f"//{text}")
    except ValueError as error:
        raise ArgumentError(f"servers: {shown!r} is not an address: {error}") from None
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
    """The configured servers, and those that a server has announced.

    After a failure a server is not tried for some time, which doubles with each failure in a row. Half of it is random,
    so that the clients of a restarted server do not all return at the same time.

    Args:
        servers: the configured servers, in the order in which they are tried.
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
        """Return the server to try next, and the time for that, in monotonic seconds."""
        # If several may be tried now, `min` returns the first one.
        soonest = min(self._known.values(), key=lambda one: one.not_before_s)
        return soonest.address, soonest.not_before_s

    def failed(self, address: NatsAddress, now_s: float, at_least_s: float = 0.0) -> None:
        """Schedule a server after a failed or lost connection.

        Args:
            address: the server.
            now_s: the present time, in monotonic seconds.
            at_least_s: the minimum delay in seconds, for failures that need a repair.
        """
        one = self._known.get(address.key)
        if one is not None:
            delay_s = max(min(self._first_s * 2.0**one.failures, self._longest_s), at_least_s)
            one.failures = min(one.failures + 1, _MAX_DOUBLINGS)
            one.not_before_s = now_s + delay_s * (1 + self._draw()) / 2

    def retry_at_once(self, address: NatsAddress, now_s: float) -> None:
        """Schedule a server without a delay, and forget its failures."""
        one = self._known.get(address.key)
        if one is not None:
            one.failures, one.not_before_s = 0, now_s

    def postpone(self, address: NatsAddress, until_s: float) -> None:
        """Try a server not before `until_s`, unless there is no other one."""
        one = self._known.get(address.key)
        if one is not None:
            one.not_before_s = until_s

    def forget_failures(self, address: NatsAddress) -> None:
        """Reset the delay of a server."""
        one = self._known.get(address.key)
        if one is not None:
            one.failures = 0

    def learn(self, source: NatsAddress, urls: Iterable[str]) -> list[NatsAddress]:
        """Replace the learned servers by those that `source` announces; return the new ones.

        They get the TLS setting and the credentials of `source`. Certificates of servers that are announced by an IP
        address may have the name of `source`.
        """
        name = source.tls_hostname or (None if _is_ip(source.host) else source.host)
        announced: dict[tuple[str, int], NatsAddress] = {}
        for url in urls:
            try:
                address = parse_server(url)
            except ArgumentError:
                continue  # of an unsupported kind, such as WebSocket
            tls_hostname = name if _is_ip(address.host) else source.tls_hostname
            announced[address.key] = replace(source, host=address.host, port=address.port, tls_hostname=tls_hostname)
        for key in [key for key, one in self._known.items() if one.is_learned and key not in announced]:
            if key != source.key:  # some servers do not announce themselves
                del self._known[key]
        new = [address for key, address in announced.items() if key not in self._known]
        new = new[: max(MAX_SERVERS - len(self._known), 0)]
        self._known.update({address.key: _Known(address, is_learned=True) for address in new})
        return new


def _is_ip(host: str) -> bool:
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True

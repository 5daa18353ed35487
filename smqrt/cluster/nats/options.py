"""The options of a NATS client, with their defaults."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from smqrt.errors import ArgumentError
from smqrt.settings.options import instance, number, option, optional, path, switch, text, whole
from smqrt.transport.tls_contexts import ClientTls

# ---- Who a client is to a NATS server: user and password, a token, an nkey, or a credentials file with a JWT.
#
# An nkey is a pair of Ed25519 keys; its texts are base32 with a prefix and a check sum (docs.nats.io, "NKeys"). The
# server sends a number, and the client its signature: the seed never leaves the process.

_SEED_PREFIX, _USER_PREFIX = 18 << 3, 20 << 3
_SEED_BYTES = 32
_MOST_FILE_BYTES = 1 << 20
_BLOCK = re.compile(r"-{3,}\s*BEGIN ([A-Z ]+?)\s*-{3,}\s*([\w.+/=-]+)\s*-{3,}\s*END [A-Z ]+?\s*-{3,}")


class UserKey:
    """The nkey of a user.

    Args:
        seed: its text, "SU..."; a file with it may have line ends around.

    Raises:
        ArgumentError: it is none.
    """

    def __init__(self, seed: str) -> None:
        raw = _decoded(seed.strip())
        if raw[0] & 0xF8 != _SEED_PREFIX or len(raw) != _SEED_BYTES + 2:
            raise ArgumentError("an nkey seed begins with SU; this is another key, maybe a public one")
        if ((raw[0] & 7) << 5 | raw[1] >> 3) != _USER_PREFIX:
            raise ArgumentError(
                "an nkey seed of a user begins with SU; this is an account's, an operator's or a server's"
            )
        self._key = Ed25519PrivateKey.from_private_bytes(raw[2:])

    @property
    def public(self) -> str:
        """The public key, "U...", which the server's configuration has."""
        return _encoded(bytes((_USER_PREFIX,)) + self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))

    def sign(self, nonce: str) -> str:
        """The signature of what the server sent, as it is sent."""
        return base64.urlsafe_b64encode(self._key.sign(nonce.encode())).decode().rstrip("=")


def _decoded(text: str) -> bytes:
    try:
        raw = base64.b32decode(text + "=" * (-len(text) % 8))
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) < 4 or binascii.crc_hqx(raw[:-2], 0).to_bytes(2, "little") != raw[-2:]:
        raise ArgumentError("this is no nkey: it is damaged, or something else")
    return raw[:-2]


def _encoded(raw: bytes) -> str:
    return base64.b32encode(raw + binascii.crc_hqx(raw, 0).to_bytes(2, "little")).decode().rstrip("=")


def nkey_fields(path: str, nonce: str) -> dict[str, object]:
    """The fields of CONNECT for the seed in a file. Reads the file: not for the loop's thread.

    Raises:
        ArgumentError: it can't be read, or has none.
    """
    try:
        key = UserKey(_content(path, "nkey_file"))
    except ArgumentError as error:
        raise ArgumentError(f"nkey_file {path}: {error}") from None
    return {"nkey": key.public, "sig": key.sign(nonce)}


def jwt_fields(path: str, nonce: str) -> dict[str, object]:
    """The fields of CONNECT for a credentials file, as `nsc` makes it: a JWT and a seed. Raises as `nkey_fields`."""
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
            return file.read(_MOST_FILE_BYTES).decode()
    except OSError as error:
        raise ArgumentError(f"{what}: can't read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ArgumentError(f"{what}: {path} is no text") from None


_MAX_S = 86_400.0
_TEXT = optional(text())
_FILE = optional(path())
_WHOLE = 1 << 53


@dataclass(kw_only=True)
class NatsOptions:
    """What a client can be told."""

    name: str = option("smqrt", text(), "what the server's lists of connections show")
    user: str | None = option(None, _TEXT, "for servers whose address names none")
    password: str | None = option(None, _TEXT, "the same", secret=True)
    token: str | None = option(None, _TEXT, "the same, for servers that want a token", secret=True)
    nkey_file: str | None = option(None, _FILE, "file with the seed of a user's nkey; read for each connection")
    credentials_file: str | None = option(
        None, _FILE, "file with a user's JWT and seed, as `nsc` makes it; read for each connection"
    )
    tls: ClientTls | None = option(
        None, optional(instance("a ClientTls", ClientTls)), "whom to trust and who one is, instead of the files below"
    )
    tls_ca: str | None = option(None, _FILE, "PEM file with certificates to trust instead of those of this machine")
    tls_cert: str | None = option(None, _FILE, "PEM file with one's own certificate")
    tls_key: str | None = option(None, _FILE, "PEM file with its key, when it is not in the same file")
    tls_hostname: str | None = option(None, _TEXT, "the name in the servers' certificates, when it is not their host")
    tls_first: bool = option(
        False, switch(), "TLS before the server says anything, as its `handshake_first` wants it; else behind INFO"
    )
    echo: bool = option(True, switch(), "get what one publishes oneself and subscribes to")
    shuffle: bool = option(True, switch(), "try the servers in any order, so that clients spread over them")
    queue_bytes: int = option(
        8 << 20, whole(0, _WHOLE, "bytes"), "what may wait for a server that is slow; more is refused", shown="8 MiB"
    )
    reconnect_queue_bytes: int = option(
        8 << 20, whole(0, _WHOLE, "bytes"), "what may wait while there is no connection; 0: nothing", shown="8 MiB"
    )
    connect_timeout_s: float = option(
        5.0, number(0, _MAX_S, "seconds", above=True), "in so long one server has to accept, name and TLS included"
    )
    ping_s: float = option(
        10.0,
        number(0, _MAX_S, "seconds", above=True),
        "after so long in silence the server is asked whether it is there",
    )
    pong_s: float = option(
        5.0, number(0, _MAX_S, "seconds", above=True), "so long it may take to answer, or to take any byte of ours"
    )
    reconnect_s: float = option(
        0.1, number(0, _MAX_S, "seconds", above=True), "before a server is tried again; doubles each time"
    )
    longest_reconnect_s: float = option(5.0, number(0, _MAX_S, "seconds", above=True), "the most of that")
    refused_s: float = option(
        30.0, number(0, _MAX_S, "seconds", above=True), "before a server is tried again that does not let us in"
    )

    def __post_init__(self) -> None:
        ways = ("user", "token", "nkey_file", "credentials_file")
        given = [name for name in ways if getattr(self, name) is not None]
        if len(given) > 1:
            raise ArgumentError(f"{' and '.join(given)}: give one of them, a server takes one")
        if self.tls is not None and (self.tls_ca or self.tls_cert):
            raise ArgumentError("tls: give a ClientTls or files, not both")

    @property
    def wants_tls(self) -> bool:
        """Whether servers are spoken to with TLS only, whatever their address says."""
        return self.tls is not None or self.tls_first or bool(self.tls_ca or self.tls_cert)

"""Options and credentials of a NATS client."""

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

# ---- Credentials: user and password, a token, an nkey, or a credentials file with a JWT.
#
# An nkey is a pair of Ed25519 keys; its texts are base32 with a prefix and a checksum (docs.nats.io, "NKeys"). The
# server sends a nonce, and the client its signature: the seed never leaves the process.

_SEED_PREFIX, _USER_PREFIX = 18 << 3, 20 << 3
_SEED_BYTES = 32
_MAX_FILE_BYTES = 1 << 20
_BLOCK = re.compile(r"-{3,}\s*BEGIN ([A-Z ]+?)\s*-{3,}\s*([\w.+/=-]+)\s*-{3,}\s*END [A-Z ]+?\s*-{3,}")


class UserKey:
    """The nkey of a user.

    Args:
        seed: its text, "SU..."; white space around it is ignored.

    Raises:
        ArgumentError: it is invalid.
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
        """The public key, "U...", for the server's configuration."""
        return _encoded(bytes((_USER_PREFIX,)) + self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))

    def sign(self, nonce: str) -> str:
        """Return the signature of the server's nonce, in the encoding of CONNECT."""
        return base64.urlsafe_b64encode(self._key.sign(nonce.encode())).decode().rstrip("=")


def _decoded(text: str) -> bytes:
    try:
        raw = base64.b32decode(text + "=" * (-len(text) % 8))
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) < 4 or binascii.crc_hqx(raw[:-2], 0).to_bytes(2, "little") != raw[-2:]:
        raise ArgumentError("this is no nkey: it is damaged, or another text")
    return raw[:-2]


def _encoded(raw: bytes) -> str:
    return base64.b32encode(raw + binascii.crc_hqx(raw, 0).to_bytes(2, "little")).decode().rstrip("=")


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
        raise ArgumentError(f"{what}: {path} is no text") from None


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
        8 << 20, whole(0, _WHOLE, "bytes"), "what may be queued for a slow server; more is refused", shown="8 MiB"
    )
    reconnect_queue_bytes: int = option(
        8 << 20, whole(0, _WHOLE, "bytes"), "what may be queued while there is no connection; 0: nothing", shown="8 MiB"
    )
    connect_timeout_s: float = option(
        5.0,
        number(0, _MAX_S, "seconds", above=True),
        "the maximum time of a connection attempt, with name lookup and TLS",
    )
    ping_s: float = option(
        10.0,
        number(0, _MAX_S, "seconds", above=True),
        "the server is pinged after this time without any data",
    )
    pong_s: float = option(
        5.0, number(0, _MAX_S, "seconds", above=True), "the maximum time for its answer, and for it to read anything"
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
            raise ArgumentError(f"{' and '.join(given)}: give one of them, a server takes one")
        if self.tls is not None and (self.tls_ca or self.tls_cert):
            raise ArgumentError("tls: give a ClientTls or files, not both")

    @property
    def wants_tls(self) -> bool:
        """Whether TLS is required for all servers, whatever their addresses say."""
        return self.tls is not None or self.tls_first or bool(self.tls_ca or self.tls_cert)

"""Who a client is to a NATS server: user and password, a token, an nkey, or a credentials file with a JWT.

An nkey is a pair of Ed25519 keys; its texts are base32 with a prefix and a check sum (docs.nats.io, "NKeys"). The
server sends a number, and the client its signature: the seed never leaves the process.
"""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from smqrt.errors import ArgumentError

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

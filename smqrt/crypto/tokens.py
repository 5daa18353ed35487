"""JSON Web Tokens (RFC 7519), signed with a shared secret or a key, on PyJWT (spec: bas-api §12).

The algorithm is never taken from the token: a key accepts those of its kind, so that a public key is no HMAC secret,
and "none" is nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from cryptography.hazmat.primitives.asymmetric import rsa
from jwt import PyJWS
from jwt.algorithms import HMACAlgorithm
from jwt.exceptions import PyJWTError

from smqrt.crypto import keys
from smqrt.errors import ArgumentError, CryptoError

MAX_TOKEN_BYTES = 64 << 10

SHARED = ("HS256", "HS384", "HS512")
RSA = ("RS256", "RS384", "RS512")
OF_CURVES = {256: "ES256", 384: "ES384", 521: "ES512"}
ALGORITHMS = (*SHARED, *RSA, *OF_CURVES.values())

Secret = bytes | keys.Key
"""A shared secret, or a key."""


class _Shared(HMACAlgorithm):
    """HMAC with a secret of any length, as applications of old have them: PyJWT would warn at each token."""

    def check_key_length(self, key: bytes) -> str | None:
        """Nothing to say."""
        return None


_jws = PyJWS(ALGORITHMS)
for _name in SHARED:
    _jws.unregister_algorithm(_name)
    _jws.register_algorithm(_name, _Shared(getattr(_Shared, "SHA" + _name[2:])))


def algorithms_for(secret: Secret) -> tuple[str, ...]:
    """The algorithms that a secret or key is for, the usual one first."""
    if isinstance(secret, bytes):
        return SHARED
    if isinstance(secret, rsa.RSAPrivateKey | rsa.RSAPublicKey):
        return RSA
    return (OF_CURVES[keys.key_bits(secret)],) if keys.key_bits(secret) in OF_CURVES else ()


def sign(payload: bytes, secret: Secret, algorithm: str | None = None, header: Mapping[str, object] = {}) -> bytes:
    """Make a token.

    Args:
        payload: JSON text.
        secret: a shared secret or a private key.
        algorithm: HS256 and so on; the usual one of the secret by default.
        header: further fields of the header, such as "kid".

    Raises:
        ArgumentError: the algorithm is unknown, or not for such a secret.
        CryptoError: "sslcryptoerr": a public key, or fields that a header can't have.
    """
    possible = algorithms_for(secret)
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise ArgumentError(f"jwt: unknown algorithm '{algorithm}': use one of {', '.join(ALGORITHMS)}")
    if not possible or algorithm not in (None, *possible):
        raise ArgumentError(f"jwt: {algorithm} is not for such a key; it takes {', '.join(possible) or 'none'}")
    if isinstance(secret, keys.PublicKey):
        raise CryptoError("sslcryptoerr", "signing takes the private key")
    fields = {name: value for name, value in header.items() if name not in ("alg", "b64", "crit")}
    try:
        return _jws.encode(payload, secret, algorithm or possible[0], fields).encode()
    except (PyJWTError, TypeError, ValueError) as error:
        raise CryptoError("sslcryptoerr", str(error)) from None


def header_of(token: bytes) -> dict[str, object]:
    """The header of a token that nobody has verified yet: to find the key by its "kid".

    Raises:
        CryptoError: "failed": it is no token.
    """
    _check_size(token)
    try:
        header: dict[str, object] = _jws.get_unverified_header(token)
    except (PyJWTError, ValueError, RecursionError) as error:
        raise CryptoError("failed", f"no token: {error}") from None
    return header


def verify(token: bytes, secret: Secret) -> tuple[dict[str, object], bytes]:
    """Verify a token's signature; its times are the caller's matter.

    Args:
        token: what `sign` gives.
        secret: the shared secret, or the key, of which the public half is enough.

    Returns:
        The header and the payload, JSON text in general.

    Raises:
        CryptoError: "failed": the signature is wrong, the algorithm is not one of the secret, or it is no token.
    """
    _check_size(token)
    key = secret if isinstance(secret, bytes) else keys.public(secret)
    try:
        found = _jws.decode_complete(token, key, list(algorithms_for(secret)))
    except (PyJWTError, TypeError, ValueError, RecursionError) as error:
        raise CryptoError("failed", str(error)) from None
    return found["header"], found["payload"]


def _check_size(token: bytes) -> None:
    if len(token) > MAX_TOKEN_BYTES:
        raise CryptoError("failed", "a token of more than 64 KiB")

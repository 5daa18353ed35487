"""JSON Web Tokens (RFC 7519) and the keys that verify them, based on PyJWT (spec: bas-api §12).

The key determines the valid algorithms, never the token: a public key cannot serve as an HMAC secret, and "none" is
rejected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, cast

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from jwt import PyJWK, PyJWS, PyJWT
from jwt.algorithms import HMACAlgorithm
from jwt.exceptions import ExpiredSignatureError, InvalidSignatureError, PyJWTError

from smqrt.crypto import keys
from smqrt.errors import ArgumentError, CryptoError

MAX_TOKEN_BYTES = 64 << 10

SHARED = ("HS256", "HS384", "HS512")
RSA = ("RS256", "RS384", "RS512")
ECDSA = {256: "ES256", 384: "ES384", 521: "ES512"}
ALGORITHMS = (*SHARED, *RSA, *ECDSA.values())

Secret = bytes | keys.Key
"""A shared secret, or a key."""


class _AnyLengthHmac(HMACAlgorithm):
    """HMAC with a secret of any length: existing applications use short ones, and PyJWT would warn for each token."""

    def check_key_length(self, key: bytes) -> str | None:
        """Accept every length."""
        return None


_jws = PyJWS(ALGORITHMS)  # without "none" and other algorithms
for _name in SHARED:
    _jws.unregister_algorithm(_name)
    _jws.register_algorithm(_name, _AnyLengthHmac(getattr(_AnyLengthHmac, "SHA" + _name[2:])))


def algorithms_for(secret: Secret) -> tuple[str, ...]:
    """Return the algorithms for a secret or key, the default first."""
    if isinstance(secret, bytes):
        return SHARED
    if isinstance(secret, rsa.RSAPrivateKey | rsa.RSAPublicKey):
        return RSA
    return (ECDSA[keys.key_bits(secret)],) if keys.key_bits(secret) in ECDSA else ()


def sign(payload: bytes, secret: Secret, algorithm: str | None = None, header: Mapping[str, object] = {}) -> bytes:
    """Create a token.

    Args:
        payload: JSON text.
        secret: a shared secret or a private key.
        algorithm: such as HS256; by default the first of `algorithms_for`.
        header: additional header fields, such as "kid".

    Raises:
        ArgumentError: the algorithm is unknown, or does not match the secret.
        CryptoError: "sslcryptoerr": a public key, or invalid header fields.
    """
    possible = algorithms_for(secret)
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise ArgumentError(f"jwt: unknown algorithm '{algorithm}': use one of {', '.join(ALGORITHMS)}")
    if not possible or algorithm not in (None, *possible):
        remedy = f"use {' or '.join(possible)}" if possible else f"use RSA or a curve: {', '.join(keys.CURVES)}"
        raise ArgumentError(f"jwt: this key does not support {algorithm or 'tokens'}: {remedy}")
    if isinstance(secret, keys.PublicKey):
        raise CryptoError("sslcryptoerr", "signing needs the private key")
    # PyJWT sets "alg"; "b64" and "crit" would change the format of the token.
    fields = {name: value for name, value in header.items() if name not in ("alg", "b64", "crit")}
    try:
        return _jws.encode(payload, secret, algorithm or possible[0], fields).encode()
    except (PyJWTError, TypeError, ValueError) as error:
        raise CryptoError("sslcryptoerr", str(error)) from None


def header_of(token: bytes) -> dict[str, object]:
    """Return the unverified header of a token, for finding the key by its "kid".

    Raises:
        CryptoError: "failed": not a token.
    """
    _check_size(token)
    try:
        header: dict[str, object] = _jws.get_unverified_header(token)
    except (PyJWTError, ValueError, RecursionError) as error:
        raise CryptoError("failed", f"not a token: {error}") from None
    return header


def verify(token: bytes, secret: Secret) -> tuple[dict[str, object], bytes]:
    """Verify the signature of a token, but not its times.

    Args:
        token: the token.
        secret: the shared secret, or a private or public key.

    Returns:
        the header, and the payload, usually JSON text.

    Raises:
        CryptoError: "failed": not a token, a wrong signature, or an algorithm that does not match the secret.
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
        raise CryptoError("failed", "the token has more than 64 KiB")


# ---- Keys that verify tokens of other issuers, and the claims of such tokens (RFC 7517, 7519, 8725).

PSS = ("PS256", "PS384", "PS512")
EDWARDS = ("EdDSA",)
VERIFIABLE = (*RSA, *PSS, *ECDSA.values(), *EDWARDS, *SHARED)
"""Algorithms of tokens that can be verified."""
MIN_RSA_BITS, MAX_RSA_BITS = 2048, 8192
MAX_KEYS = 100
# Bounded repetitions: a hostile file must not make the search slow.
_PEM = re.compile(rb"-----BEGIN ([A-Z ]{1,40})-----[^-]{1,65536}-----END \1-----")
_jwt = PyJWT()


@dataclass(frozen=True, slots=True)
class VerifyKey:
    """A key that verifies signatures.

    Attributes:
        name: the "kid" by which tokens refer to the key; None for a key without one.
        algorithms: only the algorithms of this kind of key, so that a public key cannot serve as a shared secret.
        proof: a fingerprint of the key.
        key: an object of `cryptography`, or a shared secret.
    """

    name: str | None
    algorithms: tuple[str, ...]
    proof: str
    key: object = field(repr=False)


def shared_key(secret: bytes) -> VerifyKey:
    """Return the key of a shared secret, for the algorithms that its length allows (RFC 7518 §3.2)."""
    algorithms = tuple(name for name in SHARED if len(secret) * 8 >= int(name[2:]))
    return VerifyKey(None, algorithms, sha256(b"secret:" + secret).hexdigest(), secret)


def verify_keys(data: bytes) -> list[VerifyKey]:
    """Return the keys of a file: public keys or certificates in PEM, or a set in JSON (JWKS).

    Raises:
        CryptoError: "failed": no key, or an invalid one; one sentence.
    """
    if data.lstrip().startswith(b"{"):
        return keys_of_set(data)
    blocks = list(_PEM.finditer(data))
    if not blocks:
        raise CryptoError("failed", "it has no public key, neither in PEM nor as a JWKS")
    if len(blocks) > MAX_KEYS:
        raise CryptoError("failed", f"it has more than {MAX_KEYS} keys")
    found = []
    for block in blocks:
        text, kind = block[0], block[1]
        if b"PRIVATE" in kind:
            raise CryptoError("failed", "it has a private key; use the public key to verify tokens")
        try:
            if kind == b"CERTIFICATE":
                key: object = x509.load_pem_x509_certificate(text).public_key()
            else:
                key = serialization.load_pem_public_key(text)
        except (ValueError, UnsupportedAlgorithm):
            raise CryptoError("failed", "it has an unreadable public key") from None
        found.append(_verify_key(key, None, None))
    return found


def keys_of_set(data: bytes) -> list[VerifyKey]:
    """Return the keys of a set in JSON (JWKS).

    Skips keys for encryption, keys of an unknown kind, and shared secrets, which must not be in a public document.

    Raises:
        CryptoError: "failed": not a JWKS, or it has no other keys.
    """
    try:
        document = json.loads(data)
        listed = document["keys"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise CryptoError("failed", 'it is not a JWKS: JSON with a list "keys"') from None
    if not isinstance(listed, list) or len(listed) > MAX_KEYS:
        raise CryptoError("failed", f"it is not a JWKS of at most {MAX_KEYS} keys")
    found = []
    for fields in listed:
        # "oct" is a shared secret, "d" a private key.
        if not isinstance(fields, dict) or fields.get("kty") == "oct" or "d" in fields:
            continue
        if fields.get("use") not in (None, "sig"):
            continue
        name = fields.get("kid")
        # The library raises many types for untrusted fields.
        with suppress(PyJWTError, CryptoError, ValueError, TypeError, KeyError, AttributeError):
            key = PyJWK(dict(fields)).key
            found.append(_verify_key(key, name if isinstance(name, str) else None, fields.get("alg")))
    if not found:
        raise CryptoError("failed", "it has no key that can verify signatures")
    return found


def _verify_key(key: object, name: str | None, wanted: object) -> VerifyKey:
    """Return a key with the algorithms of its kind, or only `wanted` unless None. Raises CryptoError."""
    algorithms: tuple[str, ...] = ()
    if isinstance(key, rsa.RSAPublicKey):
        if not MIN_RSA_BITS <= key.key_size <= MAX_RSA_BITS:
            fault = f"an RSA key must have {MIN_RSA_BITS} to {MAX_RSA_BITS} bits, not {key.key_size}"
            raise CryptoError("failed", fault)
        algorithms = (*RSA, *PSS)
    elif isinstance(key, ec.EllipticCurvePublicKey):
        if isinstance(key.curve, ec.SECP256R1 | ec.SECP384R1 | ec.SECP521R1):
            algorithms = (ECDSA[key.curve.key_size],)
    elif isinstance(key, ed25519.Ed25519PublicKey | ed448.Ed448PublicKey):
        algorithms = EDWARDS
    if wanted is not None:
        algorithms = tuple(one for one in algorithms if one == wanted)
    if not algorithms:
        raise CryptoError("failed", "it has a key of a kind that cannot sign tokens")
    public = cast(rsa.RSAPublicKey, key)
    der = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return VerifyKey(name, algorithms, sha256(der).hexdigest(), key)


def claims(
    token: bytes,
    key: VerifyKey,
    *,
    allowed: Sequence[str],
    issuer: str | None,
    audience: str | None,
    leeway_s: float,
    required: Sequence[str],
) -> dict[str, object]:
    """Verify a token's signature and times, and return its claims.

    Args:
        token: the token.
        key: verifies the signature, with one of its algorithms.
        allowed: the allowed algorithms.
        issuer, audience: the required values; None for any.
        leeway_s: tolerated difference of the clocks.
        required: names of claims that must be present.

    Raises:
        CryptoError: "failed": the token is invalid; the text is suitable for the sender of the token.
    """
    algorithms = [name for name in key.algorithms if name in allowed]
    options: Any = {"require": list(required), "verify_aud": audience is not None, "verify_iss": issuer is not None}
    try:
        found: dict[str, object] = _jwt.decode(
            token, cast(Any, key.key), algorithms, options, audience=audience, issuer=issuer, leeway=leeway_s
        )
    except ExpiredSignatureError:
        raise CryptoError("failed", "it has expired") from None
    except InvalidSignatureError:
        raise CryptoError("failed", "its signature is wrong") from None
    except PyJWTError as error:
        raise CryptoError("failed", str(error)[:200]) from None
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise CryptoError("failed", "it is malformed") from None
    return found

"""Keys that tokens of others are verified with, and what such a token claims (RFC 7517, 7519, 8725), on PyJWT."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, cast

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from jwt import PyJWK, PyJWT
from jwt.exceptions import ExpiredSignatureError, InvalidSignatureError, PyJWTError

from smqrt.crypto.tokens import OF_CURVES, RSA, SHARED
from smqrt.errors import CryptoError

PSS = ("PS256", "PS384", "PS512")
EDWARDS = ("EdDSA",)
VERIFIED = (*RSA, *PSS, *OF_CURVES.values(), *EDWARDS, *SHARED)
"""Algorithms of tokens that can be verified."""
MIN_RSA_BITS, MAX_RSA_BITS = 2048, 8192
MAX_KEYS = 100
_PEM = re.compile(rb"-----BEGIN ([A-Z ]{1,40})-----[^-]{1,65536}-----END \1-----")
_jwt = PyJWT()


@dataclass(frozen=True, slots=True)
class VerifyKey:
    """A key that signatures are verified with.

    Attributes:
        name: the "kid" by which tokens ask for it; None when it has none.
        algorithms: what it is for: never those of another kind, so that a public key is no shared secret.
        proof: tells this key from others.
        key: of `cryptography`, or a shared secret.
    """

    name: str | None
    algorithms: tuple[str, ...]
    proof: str
    key: object = field(repr=False)


def shared_key(secret: bytes) -> VerifyKey:
    """The key of a shared secret, for the algorithms that it is long enough for (RFC 7518 §3.2)."""
    algorithms = tuple(name for name in SHARED if len(secret) * 8 >= int(name[2:]))
    return VerifyKey(None, algorithms, sha256(b"secret:" + secret).hexdigest(), secret)


def verify_keys(data: bytes) -> list[VerifyKey]:
    """The keys of a file: public keys or certificates in PEM, or a set in JSON (JWKS).

    Raises:
        CryptoError: "failed": there is none, or one is not what it should be; one sentence.
    """
    if data.lstrip().startswith(b"{"):
        return keys_of_set(data)
    blocks = list(_PEM.finditer(data))
    if not blocks:
        raise CryptoError("failed", "there is no public key in it, neither in PEM nor as a JWKS")
    if len(blocks) > MAX_KEYS:
        raise CryptoError("failed", f"more than {MAX_KEYS} keys")
    return [_of_pem(block[1], block[0]) for block in blocks]


def _of_pem(kind: bytes, block: bytes) -> VerifyKey:
    if b"PRIVATE" in kind:
        raise CryptoError("failed", "it holds a private key; to verify tokens takes the public one")
    try:
        if kind == b"CERTIFICATE":
            key: object = x509.load_pem_x509_certificate(block).public_key()
        else:
            key = serialization.load_pem_public_key(block)
    except (ValueError, UnsupportedAlgorithm):
        raise CryptoError("failed", "a public key in it can't be read") from None
    return _verify_key(key, None, None)


def keys_of_set(data: bytes) -> list[VerifyKey]:
    """The keys of a set in JSON (JWKS). Those that are for encryption, of an unknown kind, or shared secrets, which
    have no place in a public document, are passed over.

    Raises:
        CryptoError: "failed": it is no such set, or no key is left.
    """
    try:
        document = json.loads(data)
        listed = document["keys"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise CryptoError("failed", 'it is no JWKS: JSON with a list "keys"') from None
    if not isinstance(listed, list) or len(listed) > MAX_KEYS:
        raise CryptoError("failed", f"it is no JWKS of at most {MAX_KEYS} keys")
    found = [key for one in listed if isinstance(one, dict) and (key := _of_jwk(one)) is not None]
    if not found:
        raise CryptoError("failed", "there is no key in it that signatures can be verified with")
    return found


def _of_jwk(fields: Mapping[str, Any]) -> VerifyKey | None:
    if fields.get("kty") == "oct" or fields.get("use") not in (None, "sig") or "d" in fields:
        return None
    name, algorithm = fields.get("kid"), fields.get("alg")
    try:
        key = PyJWK(dict(fields)).key
        return _verify_key(key, name if isinstance(name, str) else None, algorithm)
    except (PyJWTError, CryptoError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _verify_key(key: object, name: str | None, only: object) -> VerifyKey:
    algorithms = _algorithms(key)
    if only is not None:
        algorithms = tuple(one for one in algorithms if one == only)
    if not algorithms:
        raise CryptoError("failed", "a key in it is of no kind that signs tokens")
    public = cast(rsa.RSAPublicKey, key)
    der = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return VerifyKey(name, algorithms, sha256(der).hexdigest(), key)


def _algorithms(key: object) -> tuple[str, ...]:
    if isinstance(key, rsa.RSAPublicKey):
        if not MIN_RSA_BITS <= key.key_size <= MAX_RSA_BITS:
            raise CryptoError("failed", f"an RSA key has {MIN_RSA_BITS} to {MAX_RSA_BITS} bits, not {key.key_size}")
        return (*RSA, *PSS)
    if isinstance(key, ec.EllipticCurvePublicKey):
        is_nist = isinstance(key.curve, ec.SECP256R1 | ec.SECP384R1 | ec.SECP521R1)
        return (OF_CURVES[key.curve.key_size],) if is_nist else ()
    return EDWARDS if isinstance(key, ed25519.Ed25519PublicKey | ed448.Ed448PublicKey) else ()


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
    """What a token claims, once its signature and times are found right.

    Args:
        token: as its bearer gave it.
        key: that it is signed with; its algorithms, never the token's word, say how.
        allowed: of these algorithms only.
        issuer, audience: that it must name; None for any.
        leeway_s: by how much the clocks may differ.
        required: claims that must be there.

    Raises:
        CryptoError: "failed": it is no good; the text says why, for its bearer.
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

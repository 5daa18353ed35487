"""RSA and elliptic curve keys: load, generate, sign, encrypt (spec: bas-api §7).

A key is given as PEM text (private, public, or in a certificate) or as the numbers of a public key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa, utils

from smqrt.crypto.ciphers import digest_named
from smqrt.errors import ArgumentError, CryptoError

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey
PublicKey = rsa.RSAPublicKey | ec.EllipticCurvePublicKey
Key = PrivateKey | PublicKey

MAX_PEM_BYTES = 64 << 10  # a certificate chain, of which only the first is used
MIN_RSA_BITS, MAX_RSA_BITS = 1024, 8192  # larger ones take minutes to generate
DEFAULT_RSA_BITS = 2048

CURVES: Mapping[str, type[ec.EllipticCurve]] = {
    "SECP256R1": ec.SECP256R1,
    "SECP384R1": ec.SECP384R1,
    "SECP521R1": ec.SECP521R1,
}
_HASHES: Mapping[str, type[hashes.HashAlgorithm]] = {
    "md5": hashes.MD5,
    "sha1": hashes.SHA1,
    "sha256": hashes.SHA256,
    "sha384": hashes.SHA384,
    "sha512": hashes.SHA512,
}
_BY_SIZE = {hashlib.new(name).digest_size: name for name in _HASHES}

_CACHED_KEYS = 64


@lru_cache(maxsize=_CACHED_KEYS)
def load(pem: bytes) -> Key:
    """Load a key, or the public key of a certificate.

    Args:
        pem: PEM text.

    Raises:
        CryptoError: "sslcryptoerr": not a key, one with a password, or neither RSA nor of a known curve.
    """
    if len(pem) > MAX_PEM_BYTES:
        raise CryptoError("sslcryptoerr", "the key has more than 64 KiB")
    try:
        if b"PRIVATE KEY-----" in pem:
            # The library's validation tests primes: 0.3 s for 4096 bits, while it holds the interpreter lock.
            key: object = serialization.load_pem_private_key(pem, None, unsafe_skip_rsa_key_validation=True)
            if isinstance(key, rsa.RSAPrivateKey):
                _check_numbers(key.private_numbers())
        elif b"-----BEGIN CERTIFICATE-----" in pem:
            key = x509.load_pem_x509_certificate(pem).public_key()
        else:
            key = serialization.load_pem_public_key(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it has a password
        raise CryptoError("sslcryptoerr", "not a key in PEM format, or one with a password") from None
    if not isinstance(key, Key) or (isinstance(key, PublicKey) and key_bits(key) > 2 * MAX_RSA_BITS):
        raise CryptoError("sslcryptoerr", "the key is neither RSA nor of a known curve")
    return key


def _check_numbers(key: rsa.RSAPrivateNumbers) -> None:
    """Check that the numbers of an RSA key match, but not that p and q are primes. Raises ValueError."""
    p, q, n, e = key.p, key.q, key.public_numbers.n, key.public_numbers.e
    matches = min(p, q) > 2 and e > 2 and p * q == n and (key.iqmp * q) % p == 1
    if not matches or any(key.d * e % (prime - 1) != 1 for prime in (p, q)):
        raise ValueError("the numbers of the key do not match")
    if (key.dmp1, key.dmq1) != (key.d % (p - 1), key.d % (q - 1)):
        raise ValueError("the exponents of the key do not match")


def private(pem: bytes) -> PrivateKey:
    """Load a private key. Raises as `load`, also for a public key."""
    key = load(pem)
    if not isinstance(key, PrivateKey):
        raise CryptoError("sslcryptoerr", "a private key is needed")
    return key


def public(key: Key) -> PublicKey:
    """Return the public key of a key."""
    return key.public_key() if isinstance(key, PrivateKey) else key


def curve_key(x: bytes, y: bytes) -> PublicKey:
    """Return the public key with the point x, y, on the smallest curve that contains it. Ignores leading zeros.

    Raises:
        CryptoError: "sslcryptoerr": no known curve contains the point.
    """
    if max(len(x), len(y)) > MAX_PEM_BYTES:
        raise CryptoError("sslcryptoerr", "the point is too long")
    numbers = int.from_bytes(x), int.from_bytes(y)
    for kind in CURVES.values():
        if max(numbers).bit_length() <= kind().key_size:
            with suppress(ValueError):
                return ec.EllipticCurvePublicNumbers(*numbers, kind()).public_key()
    raise CryptoError("sslcryptoerr", f"the point is not on any of the curves {', '.join(CURVES)}")


def rsa_key(n: bytes, e: bytes) -> PublicKey:
    """Return the public key with modulus n and exponent e. Raises CryptoError "sslcryptoerr" for invalid numbers."""
    if len(n) > 2 * MAX_RSA_BITS // 8 or len(e) > 8:  # large numbers make each verification slow
        raise CryptoError("sslcryptoerr", "the modulus or the exponent is too long")
    try:
        return rsa.RSAPublicNumbers(int.from_bytes(e), int.from_bytes(n)).public_key()
    except ValueError as error:
        raise CryptoError("sslcryptoerr", f"not an RSA key: {error}") from None


def key_bits(key: Key) -> int:
    """Return the bits of the modulus, or of the curve."""
    return key.key_size


def key_size_bytes(key: Key) -> int:
    """Return the bytes of the modulus, or of a coordinate of the curve."""
    return (key_bits(key) + 7) // 8


def parameters(key: Key) -> tuple[bytes, bytes]:
    """Return the numbers of the public key: x and y for a curve, n and e for RSA."""
    half = public(key)
    if isinstance(half, rsa.RSAPublicKey):
        numbers = half.public_numbers()
        return numbers.n.to_bytes(key_size_bytes(half)), numbers.e.to_bytes((numbers.e.bit_length() + 7) // 8)
    point = half.public_numbers()
    return point.x.to_bytes(key_size_bytes(half)), point.y.to_bytes(key_size_bytes(half))


# ---- generating keys


def generate(kind: str = "ecc", bits: int = DEFAULT_RSA_BITS, curve: str = "SECP256R1") -> bytes:
    """Generate a private key; call it in a thread for RSA.

    Args:
        kind: "ecc" or "rsa".
        bits: for RSA: 1024 to 8192.
        curve: for curves: SECP256R1, SECP384R1 or SECP521R1.

    Returns:
        PEM text (PKCS #8).

    Raises:
        ArgumentError: an argument is invalid.
    """
    if kind == "rsa":
        if not MIN_RSA_BITS <= bits <= MAX_RSA_BITS:
            raise ArgumentError(f"key: {MIN_RSA_BITS} to {MAX_RSA_BITS} bits expected, not {bits}")
        return pem_of(rsa.generate_private_key(65537, bits))
    if kind != "ecc":
        raise ArgumentError(f"key: unknown kind '{kind}': use ecc or rsa")
    if curve.upper() not in CURVES:
        raise ArgumentError(f"key: unknown curve '{curve}': use one of {', '.join(CURVES)}")
    return pem_of(ec.generate_private_key(CURVES[curve.upper()]()))


def pem_of(key: PrivateKey) -> bytes:
    """Return a private key as PEM text."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


# ---- signatures


def _digested(data: bytes, digest: str | None) -> tuple[bytes, hashes.HashAlgorithm]:
    """Return the digest to sign: `data` itself when it has the length of a digest, otherwise its digest."""
    name = digest_named(digest) if digest else _BY_SIZE.get(len(data), "sha256")
    is_digest = len(data) == hashlib.new(name).digest_size
    return data if is_digest else hashlib.new(name, data).digest(), _HASHES[name]()


def _signature_padding(name: str, algorithm: hashes.HashAlgorithm) -> padding.AsymmetricPadding:
    if name == "pss":
        return padding.PSS(padding.MGF1(algorithm), padding.PSS.DIGEST_LENGTH)
    if name != "pkcs1":
        raise ArgumentError(f"unknown padding '{name}': use pkcs1 or pss")
    return padding.PKCS1v15()


def sign(data: bytes, key: PrivateKey, digest: str | None = None, padded: str = "pkcs1") -> bytes:
    """Sign data: ECDSA in DER form, or RSA.

    Args:
        data: a digest, recognized by its length (16, 20, 32, 48 or 64 bytes), or data to hash first.
        key: the private key.
        digest: the hash algorithm, for data that is not a digest; SHA-256 by default.
        padded: for RSA: "pkcs1" or "pss".

    Raises:
        ArgumentError: an unknown algorithm or padding.
        CryptoError: "sslcryptoerr": the key is too short for the digest.
    """
    hashed, algorithm = _digested(data, digest)
    scheme = utils.Prehashed(algorithm)
    try:
        if isinstance(key, ec.EllipticCurvePrivateKey):
            return key.sign(hashed, ec.ECDSA(scheme))
        return key.sign(hashed, _signature_padding(padded, algorithm), scheme)
    except (ValueError, UnsupportedAlgorithm) as error:
        if isinstance(error, ArgumentError):
            raise
        raise CryptoError("sslcryptoerr", str(error)) from None


def verify(data: bytes, signature: bytes, key: PublicKey, digest: str | None = None, padded: str = "pkcs1") -> bool:
    """Return whether `signature` is a signature of `data` by `key`. Arguments and ArgumentError as for `sign`.

    For a curve the signature may also be the numbers r and s, concatenated.
    """
    hashed, algorithm = _digested(data, digest)
    scheme = utils.Prehashed(algorithm)
    try:
        if isinstance(key, ec.EllipticCurvePublicKey):
            size = key_size_bytes(key)
            if len(signature) == 2 * size and not _is_der(signature):
                r, s = int.from_bytes(signature[:size]), int.from_bytes(signature[size:])
                signature = utils.encode_dss_signature(r, s)
            key.verify(signature, hashed, ec.ECDSA(scheme))
        else:
            key.verify(signature, hashed, _signature_padding(padded, algorithm), scheme)
    except ArgumentError:
        raise
    except (InvalidSignature, ValueError, UnsupportedAlgorithm):
        return False
    return True


def _is_der(signature: bytes) -> bool:
    try:
        utils.decode_dss_signature(signature)
    except ValueError:
        return False
    return True


def is_signature(text: bytes, key: PublicKey) -> bool:
    """Return whether `text` has the form of a signature by `key`."""
    if isinstance(key, ec.EllipticCurvePublicKey):
        return len(text) == 2 * key_size_bytes(key) or _is_der(text)
    return len(text) == key_size_bytes(key)


def signature_parameters(signature: bytes) -> tuple[bytes, bytes]:
    """Return the numbers r and s of an ECDSA signature in DER, both of the same length: 32, 48 or 66 bytes.

    Raises:
        CryptoError: "sslcryptoerr": not such a signature.
    """
    try:
        r, s = utils.decode_dss_signature(signature)
    except ValueError:
        raise CryptoError("sslcryptoerr", "not an ECDSA signature in DER form") from None
    needed = (max(r, s).bit_length() + 7) // 8
    size = next((size for size in (32, 48, 66) if size >= needed), None)  # of P-256, P-384, P-521
    if size is None or r < 0 or s < 0:
        raise CryptoError("sslcryptoerr", "not an ECDSA signature of a known curve")
    return r.to_bytes(size), s.to_bytes(size)


# ---- RSA encryption


def _encryption_padding(name: str, digest: str | None) -> padding.AsymmetricPadding:
    if name == "oaep":
        algorithm = _HASHES[digest_named(digest or "sha256")]()
        return padding.OAEP(padding.MGF1(algorithm), algorithm, None)
    if name != "pkcs1":
        raise ArgumentError(f"unknown padding '{name}': use pkcs1 or oaep")
    return padding.PKCS1v15()


def encrypt(data: bytes, key: PublicKey, padded: str = "pkcs1", digest: str | None = None) -> bytes:
    """Encrypt fewer bytes than the key has, with a public RSA key.

    Args:
        padded: "pkcs1" or "oaep".
        digest: the hash algorithm of OAEP, SHA-256 by default.

    Raises:
        ArgumentError: an unknown algorithm or padding.
        CryptoError: "sslcryptoerr": too many bytes, or not an RSA key.
    """
    if not isinstance(key, rsa.RSAPublicKey):
        raise CryptoError("sslcryptoerr", "only RSA keys encrypt")
    scheme = _encryption_padding(padded, digest)
    try:
        return key.encrypt(data, scheme)
    except ValueError:
        raise CryptoError("sslcryptoerr", f"{len(data)} bytes are too many for this key") from None


def decrypt(data: bytes, key: PrivateKey, padded: str = "pkcs1", digest: str | None = None) -> bytes:
    """Decrypt what `encrypt` returned. Raises as `encrypt`, and CryptoError "failed" for another key."""
    if not isinstance(key, rsa.RSAPrivateKey):
        raise CryptoError("sslcryptoerr", "only RSA keys decrypt")
    scheme = _encryption_padding(padded, digest)
    try:
        return key.decrypt(data, scheme)
    except ValueError:
        raise CryptoError("failed", "encrypted for another key, or with another padding") from None

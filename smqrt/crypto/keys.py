"""RSA and elliptic curve keys, signatures, and certificate requests (spec: bas-api §7, §10).

A key is PEM text (private, public, or in a certificate) or the numbers of a public key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from ipaddress import ip_address

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa, utils
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from smqrt.crypto.ciphers import digest_named
from smqrt.errors import ArgumentError, CryptoError

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey
PublicKey = rsa.RSAPublicKey | ec.EllipticCurvePublicKey
Key = PrivateKey | PublicKey

MAX_PEM_BYTES = 64 << 10  # enough for a certificate chain, of which only the first certificate is used
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

_CACHED_KEYS = 64  # applications pass the same PEM text for each signature


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
            # The library's validation tests primes: this takes 0.3 s for 4096 bits and holds the interpreter lock.
            key: object = serialization.load_pem_private_key(pem, None, unsafe_skip_rsa_key_validation=True)
            if isinstance(key, rsa.RSAPrivateKey):
                _check_numbers(key.private_numbers())
        elif b"-----BEGIN CERTIFICATE-----" in pem:
            key = x509.load_pem_x509_certificate(pem).public_key()
        else:
            key = serialization.load_pem_public_key(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: the key has a password
        raise CryptoError("sslcryptoerr", "not a key in PEM format, or one with a password") from None
    if not isinstance(key, Key) or (isinstance(key, PublicKey) and key_bits(key) > 2 * MAX_RSA_BITS):
        raise CryptoError("sslcryptoerr", "the key is neither RSA nor of a known curve")
    return key


def _check_numbers(key: rsa.RSAPrivateNumbers) -> None:
    """Check that the numbers of an RSA key match, without checking that p and q are primes. Raises ValueError."""
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
    """Return the public key with the point (x, y) on the smallest curve that contains it. Ignores leading zeros.

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
    """Return the number of bits of the modulus, or of the curve."""
    return key.key_size


def key_size_bytes(key: Key) -> int:
    """Return the number of bytes of the modulus, or of a coordinate of the curve."""
    return (key_bits(key) + 7) // 8


def parameters(key: Key) -> tuple[bytes, bytes]:
    """Return the numbers of the public key: x and y for a curve, n and e for RSA."""
    public_key = public(key)
    size_bytes = key_size_bytes(public_key)
    if isinstance(public_key, rsa.RSAPublicKey):
        numbers = public_key.public_numbers()
        return numbers.n.to_bytes(size_bytes), numbers.e.to_bytes((numbers.e.bit_length() + 7) // 8)
    point = public_key.public_numbers()
    return point.x.to_bytes(size_bytes), point.y.to_bytes(size_bytes)


# ---- Key generation


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
        return pem_of(rsa.generate_private_key(65537, bits))  # the usual public exponent
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


# ---- Signatures


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


def sign(data: bytes, key: PrivateKey, digest: str | None = None, padding_name: str = "pkcs1") -> bytes:
    """Sign data: ECDSA in DER form, or RSA.

    Args:
        data: a digest, recognized by its length (16, 20, 32, 48 or 64 bytes), or data to hash first.
        key: the private key.
        digest: the hash algorithm, for data that is not a digest; SHA-256 by default.
        padding_name: for RSA: "pkcs1" or "pss".

    Raises:
        ArgumentError: an unknown algorithm or padding.
        CryptoError: "sslcryptoerr": the key is too short for the digest.
    """
    hashed, algorithm = _digested(data, digest)
    scheme = utils.Prehashed(algorithm)
    try:
        if isinstance(key, ec.EllipticCurvePrivateKey):
            return key.sign(hashed, ec.ECDSA(scheme))
        return key.sign(hashed, _signature_padding(padding_name, algorithm), scheme)
    except (ValueError, UnsupportedAlgorithm) as error:
        if isinstance(error, ArgumentError):  # of `_signature_padding`; it is a ValueError too
            raise
        raise CryptoError("sslcryptoerr", str(error)) from None


def verify(
    data: bytes, signature: bytes, key: PublicKey, digest: str | None = None, padding_name: str = "pkcs1"
) -> bool:
    """Return whether `signature` is a signature of `data` by `key`. Arguments and ArgumentError as for `sign`.

    For a curve the signature may also be the numbers r and s, concatenated.
    """
    hashed, algorithm = _digested(data, digest)
    scheme = utils.Prehashed(algorithm)
    try:
        if isinstance(key, ec.EllipticCurvePublicKey):
            size = key_size_bytes(key)
            if len(signature) == 2 * size and not _is_der(signature):  # r and s; the library expects DER
                r, s = int.from_bytes(signature[:size]), int.from_bytes(signature[size:])
                signature = utils.encode_dss_signature(r, s)
            key.verify(signature, hashed, ec.ECDSA(scheme))
        else:
            key.verify(signature, hashed, _signature_padding(padding_name, algorithm), scheme)
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


def encrypt(data: bytes, key: PublicKey, padding_name: str = "pkcs1", digest: str | None = None) -> bytes:
    """Encrypt fewer bytes than the key has, with a public RSA key.

    Args:
        padding_name: "pkcs1" or "oaep".
        digest: the hash algorithm of OAEP, SHA-256 by default.

    Raises:
        ArgumentError: an unknown algorithm or padding.
        CryptoError: "sslcryptoerr": too many bytes, or not an RSA key.
    """
    if not isinstance(key, rsa.RSAPublicKey):
        raise CryptoError("sslcryptoerr", "encryption needs an RSA key")
    scheme = _encryption_padding(padding_name, digest)
    try:
        return key.encrypt(data, scheme)
    except ValueError:
        raise CryptoError("sslcryptoerr", f"{len(data)} bytes are too many for this key") from None


def decrypt(data: bytes, key: PrivateKey, padding_name: str = "pkcs1", digest: str | None = None) -> bytes:
    """Decrypt what `encrypt` returned. Raises as `encrypt`, and CryptoError "failed" for another key."""
    if not isinstance(key, rsa.RSAPrivateKey):
        raise CryptoError("sslcryptoerr", "decryption needs an RSA key")
    scheme = _encryption_padding(padding_name, digest)
    try:
        return key.decrypt(data, scheme)
    except ValueError:
        # One text for both faults: an attacker must not learn which one it was.
        raise CryptoError("failed", "encrypted for another key, or with another padding") from None


# ---- Certificate requests and issued certificates (spec: bas-api §10)

DEFAULT_DAYS = 397  # browsers may reject certificates that are valid for more than 398 days
MAX_NAMES = 100
_CLOCK_SKEW = timedelta(hours=1)  # devices may have clocks that are behind

NAME_PARTS: Mapping[str, ObjectIdentifier] = {
    "commonname": NameOID.COMMON_NAME,
    "country": NameOID.COUNTRY_NAME,
    "province": NameOID.STATE_OR_PROVINCE_NAME,
    "locality": NameOID.LOCALITY_NAME,
    "organization": NameOID.ORGANIZATION_NAME,
    "unit": NameOID.ORGANIZATIONAL_UNIT_NAME,
    "emailaddress": NameOID.EMAIL_ADDRESS,
}
"""The parts of a distinguished name."""
_OTHER_NAMES = {
    "cn": "commonname",
    "c": "country",
    "countryname": "country",
    "st": "province",
    "state": "province",
    "l": "locality",
    "o": "organization",
    "ou": "unit",
    "organizationalunit": "unit",
    "email": "emailaddress",
}
"""Other names of these parts, in lower case, from X.500 and applications."""

USES: Mapping[str, ObjectIdentifier] = {
    "SSL_CLIENT": ExtendedKeyUsageOID.CLIENT_AUTH,
    "SSL_SERVER": ExtendedKeyUsageOID.SERVER_AUTH,
    "S_MIME": ExtendedKeyUsageOID.EMAIL_PROTECTION,
    "EMAIL": ExtendedKeyUsageOID.EMAIL_PROTECTION,
    "OBJECT_SIGNING": ExtendedKeyUsageOID.CODE_SIGNING,
}
"""Extended key usages by their names in requests."""
AUTHORITY_USES = ("SSL_CA", "S_MIME_CA", "EMAIL_CA", "OBJECT_SIGNING_CA")
"""Uses that make the certificate an authority."""

KEY_USES = {
    "DIGITAL_SIGNATURE": "digital_signature",
    "NON_REPUDIATION": "content_commitment",
    "KEY_ENCIPHERMENT": "key_encipherment",
    "DATA_ENCIPHERMENT": "data_encipherment",
    "KEY_AGREEMENT": "key_agreement",
    "KEY_CERT_SIGN": "key_cert_sign",
    "CRL_SIGN": "crl_sign",
    "ENCIPHER_ONLY": "encipher_only",
    "DECIPHER_ONLY": "decipher_only",
}
"""Key usages by their names in requests."""


@dataclass(frozen=True)
class RequestedUses:
    """Requested uses and names of a certificate.

    Attributes:
        uses: names of `USES` and `AUTHORITY_USES`.
        key_uses: names of `KEY_USES`.
        names: host names, IP addresses and mail addresses of the certificate.
    """

    uses: Sequence[str] = ()
    key_uses: Sequence[str] = ()
    names: Sequence[str] = ()


def requested_uses(words: Sequence[str]) -> RequestedUses:
    """Sort words into uses, key uses and names. Raises ArgumentError for too many."""
    plain = [word.strip() for word in words if word.strip()]
    if len(plain) > MAX_NAMES:
        raise ArgumentError(f"csr: more than {MAX_NAMES} names and uses")
    uses = [word for word in plain if word in USES or word in AUTHORITY_USES]
    key_uses = [word for word in plain if word in KEY_USES]
    return RequestedUses(uses, key_uses, [word for word in plain if word not in uses and word not in key_uses])


def request(key: PrivateKey, name: Mapping[str, str], requested: RequestedUses | None = None) -> bytes:
    """Create a certificate signing request.

    Args:
        key: the private key that signs it; the certificate gets its public key.
        name: the distinguished name by its parts, see `NAME_PARTS`.
        requested: uses and names of the certificate.

    Returns:
        PEM text.

    Raises:
        ArgumentError: an unknown part or an invalid value.
    """
    requested = requested or RequestedUses()
    if not name:
        raise ArgumentError("csr: the name has no parts; pass at least commonname")
    attributes = []
    for given, value in name.items():
        part = _OTHER_NAMES.get(given.lower(), given.lower())
        if part not in NAME_PARTS:
            raise ArgumentError(f"csr: unknown part of a name '{given}': use one of {', '.join(NAME_PARTS)}")
        try:
            attributes.append(x509.NameAttribute(NAME_PARTS[part], value))
        except ValueError as error:
            raise ArgumentError(f"csr: {part} cannot be '{value}': {error}") from None
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name(attributes))
    if any(use in AUTHORITY_USES for use in requested.uses):
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    extended = dict.fromkeys(USES[use] for use in requested.uses if use in USES)
    if extended:
        builder = builder.add_extension(x509.ExtendedKeyUsage(list(extended)), critical=False)
    if requested.key_uses:
        chosen = {KEY_USES[use] for use in requested.key_uses}
        if chosen & {"encipher_only", "decipher_only"}:
            chosen.add("key_agreement")  # without it the two have no meaning (RFC 5280)
        usage = x509.KeyUsage(**{use: use in chosen for use in KEY_USES.values()})
        builder = builder.add_extension(usage, critical=True)
    if requested.names:
        names = x509.SubjectAlternativeName([_general_name(one) for one in requested.names])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _general_name(name: str) -> x509.GeneralName:
    """Return a name of a certificate: an IP address, a mail address or a host name."""
    kind, _, rest = name.partition(":")
    if kind.upper() in ("DNS", "IP", "EMAIL") and rest:  # the spelling of OpenSSL
        name = rest
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        pass
    try:
        return x509.RFC822Name(name) if "@" in name else x509.DNSName(name)
    except ValueError:
        raise ArgumentError(f"csr: '{name}' is not a host name, an address or a use; names must be ASCII") from None


def certificate(
    request_pem: bytes,
    key: PrivateKey,
    issuer_pem: bytes | None = None,
    valid_from_s: float | None = None,
    valid_to_s: float | None = None,
    serial: int | None = None,
) -> bytes:
    """Issue a certificate for a signing request, with the requested extensions.

    Args:
        request_pem: the request; its signature is checked.
        key: the private key that signs: that of the request for a self-signed certificate, otherwise the issuer's.
        issuer_pem: the certificate of the issuer; None for a self-signed one.
        valid_from_s: Unix time; an hour ago by default.
        valid_to_s: Unix time; 397 days later by default.
        serial: number above 0 of at most 159 bits; random by default.

    Returns:
        PEM text.

    Raises:
        ArgumentError: invalid times or an invalid serial number.
        CryptoError: "sslcryptoerr": not a valid request, or key and issuer do not match.
    """
    csr = _request(request_pem)
    issuer = None
    if issuer_pem:
        if parameters(load(issuer_pem)) != parameters(key):
            raise CryptoError("sslcryptoerr", "the issuer's certificate and the key do not match")
        issuer = x509.load_pem_x509_certificate(issuer_pem)
    else:
        public_key = csr.public_key()
        if not isinstance(public_key, PublicKey):
            raise CryptoError("sslcryptoerr", "the key is neither RSA nor of a known curve")
        if parameters(key) != parameters(public_key):
            raise CryptoError("sslcryptoerr", "key and request do not match; pass the issuer's certificate too")
    start = datetime.now(UTC) - _CLOCK_SKEW if valid_from_s is None else _time(valid_from_s)
    end = start + timedelta(days=DEFAULT_DAYS) if valid_to_s is None else _time(valid_to_s)
    if end <= start:
        raise ArgumentError("certificate: the end of its validity must be after the start")
    number = x509.random_serial_number() if serial is None else serial
    if not 0 < number < 1 << 159:  # 20 octets without the sign bit (RFC 5280 §4.1.2.2)
        raise ArgumentError("certificate: the serial number must be above 0 and have at most 159 bits")
    builder = (
        x509.CertificateBuilder()
        .subject_name(csr.subject)
        .issuer_name(issuer.subject if issuer else csr.subject)
        .public_key(csr.public_key())
        .serial_number(number)
        .not_valid_before(start)
        .not_valid_after(end)
    )
    for extension in csr.extensions:
        # The issuer sets the identifiers itself: a request may contain wrong ones.
        if not isinstance(extension.value, x509.SubjectKeyIdentifier | x509.AuthorityKeyIdentifier):
            builder = builder.add_extension(extension.value, extension.critical)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(csr.public_key()), False)
    builder = builder.add_extension(_authority_identifier(issuer, key), False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _request(pem: bytes) -> x509.CertificateSigningRequest:
    """Return a certificate signing request after verifying its signature. Raises CryptoError."""
    try:
        csr = x509.load_pem_x509_csr(pem)
        valid = csr.is_signature_valid and csr.subject is not None and csr.extensions is not None
    except Exception as error:  # the library parses parts of untrusted data late and raises many types
        raise CryptoError("sslcryptoerr", f"not a certificate signing request: {error}") from None
    if not valid:
        raise CryptoError("sslcryptoerr", "the signature of the request is wrong")
    return csr


def _authority_identifier(issuer: x509.Certificate | None, key: PrivateKey) -> x509.AuthorityKeyIdentifier:
    """Return the identifier of the issuer's key; strict clients compare it (RFC 5280 §4.2.1.1)."""
    try:
        if issuer is not None:
            own = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
            return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)
    except (x509.ExtensionNotFound, ValueError):
        pass
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def _time(seconds: float) -> datetime:
    try:
        time = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        raise ArgumentError("certificate: the time is out of range") from None
    if time.year < 1951:  # X.509 times begin with 1950; a time zone may subtract some hours
        raise ArgumentError("certificate: the time is before 1951")
    return time

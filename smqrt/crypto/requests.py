"""Certificate signing requests, and certificates issued for them (spec: bas-api §10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from smqrt.crypto import keys
from smqrt.errors import ArgumentError, CryptoError

DEFAULT_DAYS = 397  # the longest lifetime that browsers accept
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
    """Uses and names that a request asks for.

    Attributes:
        uses: names of `USES` and `AUTHORITY_USES`.
        key_uses: names of `KEY_USES`.
        names: host names, IP addresses and mail addresses of the certificate.
    """

    uses: Sequence[str] = ()
    key_uses: Sequence[str] = ()
    names: Sequence[str] = ()


def wishes_of(words: Sequence[str]) -> RequestedUses:
    """Sort words into uses, key uses and names. Raises ArgumentError for too many."""
    plain = [word.strip() for word in words if word.strip()]
    if len(plain) > MAX_NAMES:
        raise ArgumentError(f"csr: more than {MAX_NAMES} names and uses")
    uses = [word for word in plain if word in USES or word in AUTHORITY_USES]
    key_uses = [word for word in plain if word in KEY_USES]
    return RequestedUses(uses, key_uses, [word for word in plain if word not in uses and word not in key_uses])


def request(key: keys.PrivateKey, name: Mapping[str, str], wishes: RequestedUses | None = None) -> bytes:
    """Create a certificate signing request.

    Args:
        key: the private key that signs it; the certificate gets its public key.
        name: the distinguished name by its parts, see `NAME_PARTS`.
        wishes: uses and names of the certificate.

    Returns:
        PEM text.

    Raises:
        ArgumentError: an unknown part or an invalid value.
    """
    wishes = wishes or RequestedUses()
    builder = x509.CertificateSigningRequestBuilder().subject_name(_name(name))
    if any(use in AUTHORITY_USES for use in wishes.uses):
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    extended = dict.fromkeys(USES[use] for use in wishes.uses if use in USES)
    if extended:
        builder = builder.add_extension(x509.ExtendedKeyUsage(list(extended)), critical=False)
    if wishes.key_uses:
        chosen = {KEY_USES[use] for use in wishes.key_uses}
        if chosen & {"encipher_only", "decipher_only"}:
            chosen.add("key_agreement")  # without it the two have no meaning (RFC 5280)
        usage = x509.KeyUsage(**{use: use in chosen for use in KEY_USES.values()})
        builder = builder.add_extension(usage, critical=True)
    if wishes.names:
        names = x509.SubjectAlternativeName([_general_name(name) for name in wishes.names])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _name(parts: Mapping[str, str]) -> x509.Name:
    if not parts:
        raise ArgumentError("csr: the name has no parts; give commonname at least")
    attributes = []
    for given, value in parts.items():
        part = _OTHER_NAMES.get(given.lower(), given.lower())
        if part not in NAME_PARTS:
            raise ArgumentError(f"csr: unknown part of a name '{given}': use one of {', '.join(NAME_PARTS)}")
        try:
            attributes.append(x509.NameAttribute(NAME_PARTS[part], value))
        except ValueError as error:
            raise ArgumentError(f"csr: {part} cannot be '{value}': {error}") from None
    return x509.Name(attributes)


def _general_name(name: str) -> x509.GeneralName:
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
    key: keys.PrivateKey,
    issuer_pem: bytes | None = None,
    valid_from_s: float | None = None,
    valid_to_s: float | None = None,
    serial: int | None = None,
) -> bytes:
    """Issue a certificate for a signing request, with the extensions that it asks for.

    Args:
        request_pem: the request; its signature is checked.
        key: the private key that signs: the request's own for a self-signed certificate, otherwise the issuer's.
        issuer_pem: the certificate of the issuer; None for a self-signed one.
        valid_from_s: Unix time; an hour ago by default.
        valid_to_s: Unix time; 397 days later by default.
        serial: number above 0 of up to 159 bits; a random one by default.

    Returns:
        PEM text.

    Raises:
        ArgumentError: invalid times or an invalid serial number.
        CryptoError: "sslcryptoerr": not a valid request, or key and issuer do not match.
    """
    asked = _request(request_pem)
    issuer = None
    if issuer_pem:
        if keys.parameters(keys.load(issuer_pem)) != keys.parameters(key):
            raise CryptoError("sslcryptoerr", "the issuer's certificate and the key do not match")
        issuer = x509.load_pem_x509_certificate(issuer_pem)
    else:
        public_key = asked.public_key()
        if not isinstance(public_key, keys.PublicKey):
            raise CryptoError("sslcryptoerr", "the key is neither RSA nor of a known curve")
        if keys.parameters(key) != keys.parameters(public_key):
            raise CryptoError("sslcryptoerr", "key and request do not match; give the issuer's certificate too")
    start = datetime.now(UTC) - _CLOCK_SKEW if valid_from_s is None else _time(valid_from_s)
    end = start + timedelta(days=DEFAULT_DAYS) if valid_to_s is None else _time(valid_to_s)
    if end <= start:
        raise ArgumentError("certificate: it must end after it begins")
    number = x509.random_serial_number() if serial is None else serial
    if not 0 < number < 1 << 159:  # 20 octets without the sign bit (RFC 5280 §4.1.2.2)
        raise ArgumentError("certificate: the serial number must be above 0 and have at most 159 bits")
    builder = (
        x509.CertificateBuilder()
        .subject_name(asked.subject)
        .issuer_name(issuer.subject if issuer else asked.subject)
        .public_key(asked.public_key())
        .serial_number(number)
        .not_valid_before(start)
        .not_valid_after(end)
    )
    for extension in asked.extensions:
        # The issuer sets the identifiers itself: a request may contain wrong ones.
        if not isinstance(extension.value, x509.SubjectKeyIdentifier | x509.AuthorityKeyIdentifier):
            builder = builder.add_extension(extension.value, extension.critical)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(asked.public_key()), False)
    builder = builder.add_extension(_authority_identifier(issuer, key), False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _request(pem: bytes) -> x509.CertificateSigningRequest:
    try:
        asked = x509.load_pem_x509_csr(pem)
        valid = asked.is_signature_valid and asked.subject is not None and asked.extensions is not None
    except Exception as error:  # the library parses parts of untrusted data late and raises many types
        raise CryptoError("sslcryptoerr", f"not a certificate signing request: {error}") from None
    if not valid:
        raise CryptoError("sslcryptoerr", "the signature of the request is wrong")
    return asked


def _authority_identifier(issuer: x509.Certificate | None, key: keys.PrivateKey) -> x509.AuthorityKeyIdentifier:
    """Return the issuer's own key identifier, which strict clients compare (RFC 5280 §4.2.1.1)."""
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
        raise ArgumentError("certificate: a time before 1951")
    return time

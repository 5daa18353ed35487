"""X.509 certificates: description (spec: bas-api §8.2), host names, self-signed pairs."""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from smqrt.process.environment import cache_folder

_PARTS = {
    NameOID.COMMON_NAME: "commonname",
    NameOID.COUNTRY_NAME: "country",
    NameOID.STATE_OR_PROVINCE_NAME: "province",
    NameOID.LOCALITY_NAME: "locality",
    NameOID.ORGANIZATION_NAME: "organization",
    NameOID.ORGANIZATIONAL_UNIT_NAME: "unit",
    NameOID.EMAIL_ADDRESS: "email",
}


def describe(data: bytes | None) -> dict[str, object] | None:
    """Return the fields of a certificate; None when `data` is not a certificate.

    Keys: subject and issuer (dicts of commonname, country, ...), commonname of the subject, subjectaltnames (a list),
    tzfrom and tzto (ISO 8601), serial (hexadecimal).

    Args:
        data: DER or PEM.
    """
    if not data:
        return None
    try:
        load = x509.load_pem_x509_certificate if b"-----BEGIN" in data else x509.load_der_x509_certificate
        certificate = load(data)
        subject, names = _parts(certificate.subject), _alternative_names(certificate)
        alternatives: list[str] = []
        if names is not None:
            alternatives += names.get_values_for_type(x509.DNSName)
            alternatives += map(str, names.get_values_for_type(x509.IPAddress))
        fields: dict[str, object] = {
            "subject": subject,
            "issuer": _parts(certificate.issuer),
            "subjectaltnames": alternatives,
            "tzfrom": certificate.not_valid_before_utc.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "tzto": certificate.not_valid_after_utc.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "serial": f"{certificate.serial_number:X}",
        }
    except ValueError:
        return None
    if "commonname" in subject:
        fields["commonname"] = subject["commonname"]
    return fields


def _parts(name: x509.Name) -> dict[str, str]:
    return {_PARTS[part.oid]: str(part.value) for part in name if part.oid in _PARTS}


# ---- host names and purposes of a certificate (RFC 6125, RFC 5280)


def matches(der: bytes, name: str) -> bool:
    """Return whether the certificate is valid for a host: a DNS name or an IP address."""
    try:
        certificate = x509.load_der_x509_certificate(der)
        names = _alternative_names(certificate)
    except ValueError:  # damaged, or an invalid encoding
        return False
    try:
        address = ip_address(name)
    except ValueError:  # a host name
        try:
            name = name.encode("idna").decode()
        except UnicodeError:
            pass  # compare it as it is
        name = name.lower().rstrip(".")
        return any(_covers(pattern, name) for pattern in _names_of_hosts(certificate, names))
    return names is not None and address in names.get_values_for_type(x509.IPAddress)


def is_for_servers(der: bytes) -> bool:
    """Return whether the certificate may be a server's: its extended key usage allows this, or there is none."""
    try:
        usage = x509.load_der_x509_certificate(der).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return True
    except ValueError:
        return False
    return ExtendedKeyUsageOID.SERVER_AUTH in usage or ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE in usage


def _alternative_names(certificate: x509.Certificate) -> x509.SubjectAlternativeName | None:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None


def host_names(certificate: x509.Certificate) -> list[str]:
    """Return the DNS names of a certificate, in lower case; `*.example.com` is for all names one level below.

    Raises:
        ValueError: an extension is damaged.
    """
    return [name.lower().rstrip(".") for name in _names_of_hosts(certificate, _alternative_names(certificate))]


def key_kind(certificate: x509.Certificate) -> str:
    """Return the kind of a certificate's key: "RSA", "EC", or the class name of another.

    Raises:
        ValueError: an unsupported kind.
    """
    try:
        key = certificate.public_key()
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from None
    if isinstance(key, rsa.RSAPublicKey):
        return "RSA"
    return "EC" if isinstance(key, ec.EllipticCurvePublicKey) else type(key).__name__.removesuffix("PublicKey")


def _names_of_hosts(certificate: x509.Certificate, names: x509.SubjectAlternativeName | None) -> list[str]:
    """Return the alternative DNS names, or the common name when there are none, as in old devices."""
    found = names.get_values_for_type(x509.DNSName) if names is not None else []
    if found:
        return found
    return [str(attribute.value) for attribute in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]


def _covers(pattern: str, name: str) -> bool:
    pattern = pattern.lower().rstrip(".")
    if not pattern.startswith("*."):
        return pattern == name
    _, dot, parent = name.partition(".")  # a wildcard replaces one label, and not below a top-level domain
    return bool(dot) and "." in parent and parent == pattern[2:]


# ---- a self-signed certificate for tests, created at first use and stored for the user

VALID_DAYS = 397  # the longest lifetime that browsers accept


def self_signed_pair(host: str, folder: Path | None = None) -> tuple[str, str]:
    """Return the paths of a certificate and its key, which are created unless valid for `host`.

    Args:
        host: the address of the listener; the certificate is also for localhost and the name of this machine.
        folder: where the pair is stored; the user's cache folder by default.

    Raises:
        OSError: the folder cannot be written, or there is no home folder.
    """
    folder = folder or cache_folder()
    cert, key = folder / "certificate.pem", folder / "key.pem"
    if not (key.is_file() and _is_valid(cert, host)):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        cert_pem, key_pem = _create_pair(host)
        _write_private(key, key_pem)
        _write_private(cert, cert_pem)
    return str(cert), str(key)


def _self_signed_names(host: str) -> list[x509.GeneralName]:
    names = ["localhost", "127.0.0.1", "::1", socket.gethostname()]
    if host not in ("0.0.0.0", "::", ""):
        names.append(host)
    found: list[x509.GeneralName] = []
    for name in dict.fromkeys(names):
        try:
            found.append(x509.IPAddress(ip_address(name)))
        except ValueError:
            found.append(x509.DNSName(name))
    return found


def _is_valid(cert: Path, host: str) -> bool:
    try:
        loaded = x509.load_pem_x509_certificate(cert.read_bytes())
        names = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return False
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    return loaded.not_valid_after_utc > tomorrow and set(_self_signed_names(host)) <= set(names)


def _create_pair(host: str) -> tuple[bytes, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "smqrt self-signed")])
    now = datetime.now(UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clients may have clocks that are behind
        .not_valid_after(now + timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName(_self_signed_names(host)), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return cert.public_bytes(serialization.Encoding.PEM), key_pem


def _write_private(path: Path, data: bytes) -> None:
    """Replace a file atomically by one that only its owner can read."""
    fresh = path.with_suffix(f".{os.getpid()}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    fresh.replace(path)

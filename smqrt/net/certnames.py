"""For whom a certificate was made: host names, addresses and purpose (RFC 6125, RFC 5280)."""

from __future__ import annotations

from ipaddress import ip_address

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


def matches(der: bytes, name: str) -> bool:
    """Whether the certificate is for host `name`, a DNS name or an IP address."""
    try:
        certificate = x509.load_der_x509_certificate(der)
        names = _alternative_names(certificate)
    except ValueError:  # damaged, or an encoding nobody should use
        return False
    try:
        address = ip_address(name)
    except ValueError:
        return any(_covers(pattern, _ascii(name)) for pattern in _host_names(certificate, names))
    return names is not None and address in names.get_values_for_type(x509.IPAddress)


def is_for_servers(der: bytes) -> bool:
    """Whether the certificate may stand for a server: most say so, and one that says nothing may."""
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


def _host_names(certificate: x509.Certificate, names: x509.SubjectAlternativeName | None) -> list[str]:
    """The alternative names; without any, as old devices have it, the common name."""
    found = names.get_values_for_type(x509.DNSName) if names is not None else []
    if found:
        return found
    return [str(attribute.value) for attribute in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]


def _covers(pattern: str, name: str) -> bool:
    pattern = pattern.lower().rstrip(".")
    if not pattern.startswith("*."):
        return pattern == name
    _, dot, parent = name.partition(".")
    return bool(dot) and "." in parent and parent == pattern[2:]


def _ascii(name: str) -> str:
    try:
        return name.encode("idna").decode().lower().rstrip(".")
    except UnicodeError:
        return name.lower().rstrip(".")

"""What applications are told of a certificate, in Lua and in Python (spec: bas-api §8.2)."""

from __future__ import annotations

from typing import Any

from cryptography import x509
from cryptography.x509.oid import NameOID

_PARTS = {
    NameOID.COMMON_NAME: "commonname",
    NameOID.COUNTRY_NAME: "country",
    NameOID.STATE_OR_PROVINCE_NAME: "province",
    NameOID.LOCALITY_NAME: "locality",
    NameOID.ORGANIZATION_NAME: "organization",
    NameOID.ORGANIZATIONAL_UNIT_NAME: "unit",
    NameOID.EMAIL_ADDRESS: "email",
}


def describe(data: bytes | None) -> dict[str, Any] | None:
    """Returns what a certificate says; None when it is none.

    Keys: subject and issuer (dicts of commonname, country, ...), commonname of the subject, subjectaltnames (a list),
    tzfrom and tzto (ISO 8601), serial (hexadecimal).

    Args:
        data: DER or PEM.
    """
    if not data:
        return None
    try:
        load = x509.load_pem_x509_certificate if b"-----BEGIN" in data else x509.load_der_x509_certificate
        return _fields(load(data))
    except ValueError:
        return None


def _fields(certificate: x509.Certificate) -> dict[str, Any]:
    subject = _name(certificate.subject)
    fields = {
        "subject": subject,
        "issuer": _name(certificate.issuer),
        "subjectaltnames": _alternative_names(certificate),
        "tzfrom": certificate.not_valid_before_utc.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "tzto": certificate.not_valid_after_utc.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "serial": f"{certificate.serial_number:X}",
    }
    if "commonname" in subject:
        fields["commonname"] = subject["commonname"]
    return fields


def _name(name: x509.Name) -> dict[str, str]:
    return {_PARTS[part.oid]: str(part.value) for part in name if part.oid in _PARTS}


def _alternative_names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = map(str, names.get_values_for_type(x509.IPAddress))
    return [*names.get_values_for_type(x509.DNSName), *addresses]

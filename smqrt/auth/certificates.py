"""Logins with client certificates: user name by a template, and revocation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from smqrt.auth.identity import MAX_GROUPS, Identity, Method, name_fault
from smqrt.auth.users import read_file
from smqrt.errors import ArgumentError, SmqrtError

_FIELD = re.compile(r"\{(\w*)\}")
_SUBJECT = {
    "cn": NameOID.COMMON_NAME,
    "ou": NameOID.ORGANIZATIONAL_UNIT_NAME,
    "o": NameOID.ORGANIZATION_NAME,
    "c": NameOID.COUNTRY_NAME,
    "uid": NameOID.USER_ID,
    "serialnumber": NameOID.SERIAL_NUMBER,
}
_ALTERNATIVE: Mapping[str, Callable[[x509.SubjectAlternativeName], Iterable[object]]] = {
    "dns": lambda names: names.get_values_for_type(x509.DNSName),
    "email": lambda names: names.get_values_for_type(x509.RFC822Name),
    "uri": lambda names: names.get_values_for_type(x509.UniformResourceIdentifier),
    "ip": lambda names: names.get_values_for_type(x509.IPAddress),
}
FIELDS = (*_SUBJECT, *_ALTERNATIVE, "fingerprint")
"""The fields that a template may use."""


class CertificateError(SmqrtError):
    """A certificate was rejected; the client receives the text."""


class RevocationLists:
    """Revocation lists by their issuer.

    Args:
        lists: of the authorities of client certificates.
    """

    def __init__(self, lists: Iterable[x509.CertificateRevocationList] = ()) -> None:
        self._lists = {_hash_of_name(found.issuer): found for found in lists}

    def has(self, proof: str) -> bool:
        """Return whether the certificate with this `Identity.proof` is revoked."""
        issuer, _, serial = proof.partition(":")
        found = self._lists.get(issuer)
        return found is not None and found.get_revoked_certificate_by_serial_number(int(serial, 16)) is not None


def load_lists(paths: Iterable[str]) -> RevocationLists:
    """Read files with revocation lists (PEM); blocks.

    Raises:
        ArgumentError: a file can't be read or is not valid.
    """
    end = "-----END X509 CRL-----"
    found = []
    for path in paths:
        try:
            parts = read_file(Path(path)).split(end)[:-1]
            found += [x509.load_pem_x509_crl((part + end).encode()) for part in parts]
        except ValueError:
            raise ArgumentError(f"{path}: not a revocation list") from None
    return RevocationLists(found)


def check_template(setting: str, template: str | None) -> None:
    """Check a template of a user or of groups.

    Raises:
        ArgumentError: an unknown field, or no field.
    """
    for name in _FIELD.findall(template or ""):
        if name not in FIELDS:
            raise ArgumentError(f"{setting}: unknown field {{{name}}}; use one of {', '.join(FIELDS)}")
    if template is not None and not _FIELD.search(template):
        raise ArgumentError(f"{setting} must have a field of the certificate, such as {{cn}}, not {template!r}")


def identity_of_certificate(der: bytes, user: str, groups: str | None) -> Identity:
    """Return the identity of a certificate that the TLS handshake has verified.

    Args:
        der: the certificate.
        user: template of the user name, such as `{cn}`.
        groups: template of the groups, with commas between; None for none.

    Raises:
        CertificateError: a field of the template is missing, or not valid as a user name.
    """
    try:
        certificate = x509.load_der_x509_certificate(der)
        name = _filled(user, certificate)
        listed = _filled(groups, certificate).split(",") if groups else []
    except ValueError:
        raise CertificateError("it is malformed") from None
    if fault := name_fault(name):
        raise CertificateError(fault)
    found = dict.fromkeys(group for group in map(str.strip, listed) if name_fault(group) is None)
    return Identity(
        name,
        tuple(found)[:MAX_GROUPS],
        Method.CERTIFICATE,
        expires_s=certificate.not_valid_after_utc.timestamp(),
        proof=f"{_hash_of_name(certificate.issuer)}:{certificate.serial_number:x}",
    )


def _filled(template: str, certificate: x509.Certificate) -> str:
    # fields are replaced once, so that a value of the certificate is never used as a template
    return _FIELD.sub(lambda match: _value(match[1], certificate), template)


def _value(name: str, certificate: x509.Certificate) -> str:
    values: list[object] = []
    if name == "fingerprint":
        return sha256(certificate.public_bytes(Encoding.DER)).hexdigest()
    if name in _SUBJECT:
        values = [attribute.value for attribute in certificate.subject.get_attributes_for_oid(_SUBJECT[name])]
    else:
        try:
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            values = list(_ALTERNATIVE[name](names))
        except x509.ExtensionNotFound:
            values = []
    if len(values) != 1:
        raise CertificateError(f"it has {'more than one' if values else 'no'} {name}")
    return str(values[0])


def _hash_of_name(name: x509.Name) -> str:
    return sha256(name.public_bytes()).hexdigest()

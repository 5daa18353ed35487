"""Client certificates as logins: the user that a template makes of one, and whether it has been revoked since."""

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
"""What a template may name."""


class CertificateError(SmqrtError):
    """A certificate that lets nobody in; the text is for its owner."""


class RevocationLists:
    """The revocation lists in force.

    Args:
        lists: of the authorities of client certificates.
    """

    def __init__(self, lists: Iterable[x509.CertificateRevocationList] = ()) -> None:
        self._lists = {_issuer(one.issuer): one for one in lists}

    def has(self, proof: str) -> bool:
        """Whether the certificate with this `Identity.proof` has been revoked."""
        issuer, _, serial = proof.partition(":")
        found = self._lists.get(issuer)
        return found is not None and found.get_revoked_certificate_by_serial_number(int(serial, 16)) is not None


def load_lists(paths: Iterable[str]) -> RevocationLists:
    """Read files with revocation lists (PEM); blocks.

    Raises:
        ArgumentError: one can't be read, or is none.
    """
    end = "-----END X509 CRL-----"
    found = []
    for path in paths:
        try:
            parts = read_file(Path(path)).split(end)[:-1]
            found += [x509.load_pem_x509_crl((part + end).encode()) for part in parts]
        except ValueError:
            raise ArgumentError(f"{path} has something that is no revocation list") from None
    return RevocationLists(found)


def check_template(setting: str, template: str | None) -> None:
    """Look at a template of a user or of groups.

    Raises:
        ArgumentError: it names something that certificates do not have.
    """
    for name in _FIELD.findall(template or ""):
        if name not in FIELDS:
            known = ", ".join(FIELDS)
            raise ArgumentError(f"{setting}: {{{name}}} is nothing that a certificate has; there are {known}")
    if template is not None and not _FIELD.search(template):
        raise ArgumentError(f"{setting} must name something of the certificate, such as {{cn}}, not {template!r}")


def identity_of(der: bytes, user: str, groups: str | None) -> Identity:
    """Who a certificate stands for that was verified in the TLS handshake.

    Args:
        der: the certificate.
        user: template of the user's name: `{cn}`.
        groups: template of the groups, with commas between; None for none.

    Raises:
        CertificateError: it lacks what the template names, or that can't be the name of a user.
    """
    try:
        certificate = x509.load_der_x509_certificate(der)
        name = _filled(user, certificate)
        listed = _filled(groups, certificate).split(",") if groups else []
    except ValueError:
        raise CertificateError("it can't be read") from None
    if fault := name_fault(name):
        raise CertificateError(fault)
    found = dict.fromkeys(group for group in map(str.strip, listed) if name_fault(group) is None)
    return Identity(
        name,
        tuple(found)[:MAX_GROUPS],
        Method.CERTIFICATE,
        expires_s=certificate.not_valid_after_utc.timestamp(),
        proof=f"{_issuer(certificate.issuer)}:{certificate.serial_number:x}",
    )


def _filled(template: str, certificate: x509.Certificate) -> str:
    """Each field is put in once, as it is: what a certificate says is never read as a template."""
    return _FIELD.sub(lambda match: _value(match[1], certificate), template)


def _value(name: str, certificate: x509.Certificate) -> str:
    values: list[object] = []
    if name == "fingerprint":
        return sha256(certificate.public_bytes(Encoding.DER)).hexdigest()
    if name in _SUBJECT:
        values = [one.value for one in certificate.subject.get_attributes_for_oid(_SUBJECT[name])]
    else:
        try:
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            values = list(_ALTERNATIVE[name](names))
        except x509.ExtensionNotFound:
            values = []
    if len(values) != 1:
        says = "has no" if not values else "has more than one"
        raise CertificateError(f"it {says} {name}")
    return str(values[0])


def _issuer(name: x509.Name) -> str:
    return sha256(name.public_bytes()).hexdigest()

"""Certificates, TLS contexts and verification of peers.

The handshake of a client accepts every server. Afterwards the application gets a verdict and decides (spec: bas-api
§8.2). OpenSSL verifies the peer's chain, by the same rules as in other TLS clients.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import cache
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from OpenSSL.crypto import (
    FILETYPE_ASN1,
    X509,
    X509Store,
    X509StoreContext,
    X509StoreContextError,
    X509StoreFlags,
    load_certificate,
)
from OpenSSL.crypto import Error as OpenSslError

from smqrt.errors import ArgumentError
from smqrt.process.current_process import cache_folder

# ---- Certificates (spec: bas-api §8.2)

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


# ---- Host names and purposes of a certificate (RFC 6125, RFC 5280)


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
    """Return the alternative DNS names, or the common name without such names, as in old devices."""
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


# ---- Self-signed certificate for tests, stored for the user

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
    is_valid = False
    with suppress(OSError, ValueError, x509.ExtensionNotFound):  # there is none, or it is damaged
        loaded = x509.load_pem_x509_certificate(cert.read_bytes())
        names = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        tomorrow = datetime.now(UTC) + timedelta(days=1)
        is_valid = loaded.not_valid_after_utc > tomorrow and set(_self_signed_names(host)) <= set(names)
    if not (is_valid and key.is_file()):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        private_key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "smqrt self-signed")])
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(private_key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))  # clients may have clocks that are behind
            .not_valid_after(now + timedelta(days=VALID_DAYS))
            .add_extension(x509.SubjectAlternativeName(_self_signed_names(host)), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(private_key, hashes.SHA256())
        )
        key_pem = private_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        # The key first: if this is interrupted, the old certificate is still not valid, and both are written again.
        _write_private(key, key_pem)
        _write_private(cert, certificate.public_bytes(serialization.Encoding.PEM))
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


def _write_private(path: Path, data: bytes) -> None:
    """Replace a file atomically by one that only its owner can read."""
    fresh = path.with_suffix(f".{os.getpid()}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    fresh.replace(path)


_DER = Encoding.DER
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME; pyOpenSSL has no name for it
_BEGIN = b"-----BEGIN CERTIFICATE-----"
NO_PAIR = "not a certificate and its key"
"""The beginning of the error about a certificate and a key that do not match."""


class Trust(Enum):
    """The verdict on a peer. Applications compare the value (spec: bas-api §8.2)."""

    TRUSTED = "trusted"
    """A valid certificate from a trusted authority, for the right name."""
    CERTCN = "certcn"
    """From a trusted authority and for the right name, but expired or not yet valid."""
    CERT = "cert"
    """From a trusted authority, for another name."""
    CN = "cn"
    """For the right name, from an unknown authority."""
    NONE = "none"
    """Neither, or no certificate."""


class CertStore:
    """Trusted certificates: authorities, and certificates of single servers."""

    def __init__(self) -> None:
        self._store, self._timeless_store = _new_store(), _new_store(_NO_CHECK_TIME)
        self._added: list[bytes] = []

    @staticmethod
    @cache
    def system() -> CertStore:
        """Return the store of the system's authorities; always the same object."""
        store = CertStore()
        store.load_system()
        return store

    @property
    def pem(self) -> str:
        """The added certificates as PEM text, without those of the system."""
        return "".join(map(ssl.DER_cert_to_PEM_cert, self._added))

    def add(self, data: bytes) -> int:
        """Trust the certificates in the content of a PEM or DER file; return their number.

        Raises:
            ArgumentError: the content has no certificate, or a damaged one.
        """
        try:
            found = x509.load_pem_x509_certificates(data) if _BEGIN in data else [x509.load_der_x509_certificate(data)]
        except ValueError as error:
            raise ArgumentError(f"not a certificate: {error}; give a PEM or DER file") from None
        for certificate in found:
            for store in (self._store, self._timeless_store):
                store.add_cert(X509.from_cryptography(certificate))
            self._added.append(certificate.public_bytes(_DER))
        return len(found)

    def load_system(self) -> None:
        """Trust the system's authorities too."""
        paths = ssl.get_default_verify_paths()
        if paths.cafile or paths.capath:  # a container may have no authorities
            for store in (self._store, self._timeless_store):
                store.load_locations(paths.cafile, paths.capath)

    def judge(self, chain: Sequence[bytes], name: str) -> Trust:
        """Return the verdict on a peer.

        Args:
            chain: the certificates that the peer sent, in DER, its own first.
            name: the host name or IP address that the client connected to.
        """
        if not chain:
            return Trust.NONE
        named = matches(chain[0], name)
        if _verifies(self._store, chain):
            return Trust.TRUSTED if named else Trust.CERT
        if not named:
            return Trust.NONE
        return Trust.CERTCN if _verifies(self._timeless_store, chain) else Trust.CN


def _new_store(flags: int = 0) -> X509Store:
    store = X509Store()
    store.set_flags(X509StoreFlags.PARTIAL_CHAIN | flags)  # trusts certificates of single servers, see `CertStore`
    return store


def _verifies(store: X509Store, chain: Sequence[bytes]) -> bool:
    if not is_for_servers(chain[0]):
        return False
    try:
        leaf, *others = (load_certificate(FILETYPE_ASN1, der) for der in chain)
        X509StoreContext(store, leaf, others).verify_certificate()
    except (X509StoreContextError, OpenSslError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate chain and its private key, both PEM.

    Attributes:
        password: the password of the key; None when it is not encrypted.

    Raises:
        ArgumentError: the two do not match, or one is damaged.
    """

    certificate: bytes
    key: bytes = field(repr=False)
    password: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def load_into(self, context: ssl.SSLContext) -> None:
        """Add this certificate to a context.

        Raises:
            ArgumentError: the two do not match, or one is damaged.
        """
        fd = os.memfd_create("identity")  # `ssl` reads only files; this one is in memory
        try:
            os.write(fd, self.certificate.rstrip() + b"\n" + self.key)
            context.load_cert_chain(f"/proc/self/fd/{fd}", password=self.password or _no_password)
        except (ssl.SSLError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise ArgumentError(f"{NO_PAIR}: {reason}; give PEM data that match") from None
        finally:
            os.close(fd)


def _no_password() -> str:
    raise ValueError("the key is encrypted")


@dataclass(slots=True)
class ClientTls:
    """Options of a TLS client.

    Attributes:
        store: trusted certificates. The handshake accepts every server; call `store.judge(chain, name)` afterwards.
        identities: the client's certificates, for servers that request one.
    """

    store: CertStore = field(default_factory=CertStore.system)
    identities: list[Identity] = field(default_factory=list)
    _contexts: dict[tuple[str, ...], ssl.SSLContext] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def from_files(
        cls, cafile: str | None = None, certfile: str | None = None, keyfile: str | None = None
    ) -> ClientTls:
        """Read PEM files.

        Args:
            cafile: authorities to trust in place of the system's.
            certfile: the client's certificate with its chain.
            keyfile: the private key, when it is not in the same file.

        Raises:
            ArgumentError: a file cannot be read or is wrong.
        """
        tls = cls()
        if cafile:
            tls.store = CertStore()
            tls.store.add(_content(cafile, "cafile"))
        if certfile:
            tls.add_identity(Identity(_content(certfile, "certfile"), _content(keyfile or certfile, "keyfile")))
        return tls

    def add_identity(self, identity: Identity) -> None:
        """Send `identity` in later connections to servers that request a certificate."""
        self.identities.append(identity)
        self._contexts.clear()  # open connections keep the old contexts

    def context(self, alpn: Sequence[str] = ()) -> ssl.SSLContext:
        """Return the context for a connection that offers these protocols (TLS 1.2 and later)."""
        context = self._contexts.get(tuple(alpn))
        if context is None:
            context = self._contexts[tuple(alpn)] = _prepared(
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), self.identities, alpn
            )
        return context


@dataclass(slots=True)
class ServerTls:
    """Options of a TLS server.

    Attributes:
        store: if given, the server requests client certificates, and those sent must come from its authorities.
        identities: at least one; OpenSSL chooses among kinds of keys (RSA, EC).
    """

    store: CertStore | None = None
    identities: list[Identity] = field(default_factory=list)
    _contexts: dict[tuple[str, ...], ssl.SSLContext] = field(default_factory=dict, init=False, repr=False)

    def add_identity(self, identity: Identity) -> None:
        """Also use `identity`, in later connections."""
        self.identities.append(identity)
        self._contexts.clear()

    def context(self, alpn: Sequence[str] = ()) -> ssl.SSLContext:
        """Return the context for a listener with these protocols (TLS 1.2 and later)."""
        context = self._contexts.get(tuple(alpn))
        if context is None:
            context = self._contexts[tuple(alpn)] = _prepared(
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.identities, alpn
            )
            if self.store is not None and self.store.pem:
                context.load_verify_locations(cadata=self.store.pem)
                context.verify_mode = ssl.CERT_OPTIONAL
        return context


def _prepared(context: ssl.SSLContext, identities: Sequence[Identity], alpn: Sequence[str]) -> ssl.SSLContext:
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for identity in identities:
        identity.load_into(context)
    if alpn:
        context.set_alpn_protocols(list(alpn))
    return context


def _content(path: str, what: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ArgumentError(f"{what}: cannot read {path}: {error.strerror}") from None

"""TLS contexts of clients and servers, and the verification of peers.

The handshake of a client accepts every server. Afterwards the application asks for a verdict and decides (spec: bas-api
§8.2). OpenSSL verifies the peer's chain, by the same rules as in other TLS clients.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
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
from smqrt.transport import certificates

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
    """Trusted certificates: authorities, and single servers by their own certificate."""

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
            ArgumentError: there are none, or one is damaged.
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
        if paths.cafile or paths.capath:
            for store in (self._store, self._timeless_store):
                store.load_locations(paths.cafile, paths.capath)

    def judge(self, chain: Sequence[bytes], name: str) -> Trust:
        """Return the verdict on a peer.

        Args:
            chain: the certificates that it sent, in DER, its own first.
            name: the host name or IP address that the client connected to.
        """
        if not chain:
            return Trust.NONE
        named = certificates.matches(chain[0], name)
        if _verifies(self._store, chain):
            return Trust.TRUSTED if named else Trust.CERT
        if not named:
            return Trust.NONE
        return Trust.CERTCN if _verifies(self._timeless_store, chain) else Trust.CN


def _new_store(flags: int = 0) -> X509Store:
    store = X509Store()
    store.set_flags(X509StoreFlags.PARTIAL_CHAIN | flags)
    return store


def _verifies(store: X509Store, chain: Sequence[bytes]) -> bool:
    if not certificates.is_for_servers(chain[0]):
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
            keyfile: its key, when it is not in the same file.

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
        """Send `identity` to servers that request a certificate, from the next connection on."""
        self.identities.append(identity)
        self._contexts.clear()

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
        """Add `identity`, from the next connection on."""
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

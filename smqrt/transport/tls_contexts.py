"""TLS contexts: one's own certificates, what to speak (ALPN), and whether the other side may be trusted.

A client of smqrt shakes hands with anybody and then asks: the application decides (spec: bas-api §8.2).
The chain that was presented is verified by OpenSSL itself, by the rules that every other TLS client follows.
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
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME, of which pyOpenSSL has no name
_BEGIN = b"-----BEGIN CERTIFICATE-----"


class Trust(Enum):
    """What is to be thought of a peer. The value is the word applications test (spec: bas-api §8.2)."""

    TRUSTED = "trusted"
    """A valid certificate from a trusted authority, for the right name."""
    CERTCN = "certcn"
    """The same, but outside its time."""
    CERT = "cert"
    """From a trusted authority, for another name."""
    CN = "cn"
    """For the right name, from somebody unknown."""
    NONE = "none"
    """Neither; or no certificate at all."""


class CertStore:
    """Certificates to trust: authorities, and single servers by their own certificate."""

    def __init__(self) -> None:
        self._store, self._timeless = _new_store(), _new_store(_NO_CHECK_TIME)
        self._added: list[bytes] = []

    @staticmethod
    def system() -> CertStore:
        """The authorities that this machine trusts; always the same object."""
        return _system_store()

    @property
    def pem(self) -> str:
        """All certificates that were added, as PEM text; those of the system are not in it."""
        return "".join(map(ssl.DER_cert_to_PEM_cert, self._added))

    def add(self, data: bytes) -> int:
        """Trust the certificates in a PEM or DER file; returns how many there are.

        Raises:
            ArgumentError: there is none, or one is damaged.
        """
        try:
            found = x509.load_pem_x509_certificates(data) if _BEGIN in data else [x509.load_der_x509_certificate(data)]
        except ValueError as error:
            raise ArgumentError(f"no certificates: {error}; give a PEM or DER file") from None
        for certificate in found:
            for store in (self._store, self._timeless):
                store.add_cert(X509.from_cryptography(certificate))
            self._added.append(certificate.public_bytes(_DER))
        return len(found)

    def load_system(self) -> None:
        """Trust the authorities that this machine trusts as well."""
        paths = ssl.get_default_verify_paths()
        if paths.cafile or paths.capath:
            for store in (self._store, self._timeless):
                store.load_locations(paths.cafile, paths.capath)

    def judge(self, chain: Sequence[bytes], name: str) -> Trust:
        """What to think of a peer.

        Args:
            chain: the certificates it presented in DER form, its own first.
            name: the host name or IP address that was asked for.
        """
        if not chain:
            return Trust.NONE
        named = certificates.matches(chain[0], name)
        if _verifies(self._store, chain):
            return Trust.TRUSTED if named else Trust.CERT
        if not named:
            return Trust.NONE
        return Trust.CERTCN if _verifies(self._timeless, chain) else Trust.CN


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


@cache
def _system_store() -> CertStore:
    store = CertStore()
    store.load_system()
    return store


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate with its chain and its private key, both PEM.

    Attributes:
        password: of the key, None when it has none.
    """

    certificate: bytes
    key: bytes = field(repr=False)
    password: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def load_into(self, context: ssl.SSLContext) -> None:
        """Let `context` present this certificate.

        Raises:
            ArgumentError: the two do not belong together, or one is damaged.
        """
        fd = os.memfd_create("identity")  # ssl reads files only; this one is on no disk
        try:
            os.write(fd, self.certificate.rstrip() + b"\n" + self.key)
            context.load_cert_chain(f"/proc/self/fd/{fd}", password=self.password or _no_password)
        except (ssl.SSLError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise ArgumentError(f"no certificate with its key: {reason}; give PEM data that belong together") from None
        finally:
            os.close(fd)


def _no_password() -> str:
    raise ValueError("the key is protected by a password")


@dataclass(slots=True)
class ClientTls:
    """How to be a TLS client.

    Attributes:
        store: whom to trust; ask `store.judge(chain, name)` after the handshake, which accepts anybody.
        identities: one's own certificates, for servers that ask.
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
            cafile: whom to trust, instead of the system's authorities.
            certfile: one's own certificate with its chain.
            keyfile: its key, when it is not in the same file.

        Raises:
            ArgumentError: a file can't be read or is wrong.
        """
        tls = cls()
        if cafile:
            tls.store = CertStore()
            tls.store.add(_content(cafile, "cafile"))
        if certfile:
            tls.add_identity(Identity(_content(certfile, "certfile"), _content(keyfile or certfile, "keyfile")))
        return tls

    def add_identity(self, identity: Identity) -> None:
        """Present `identity` to servers that ask, from the next connection on."""
        self.identities.append(identity)
        self._contexts.clear()

    def context(self, alpn: Sequence[str] = ()) -> ssl.SSLContext:
        """The context for a connection that offers these protocols (TLS 1.2 and later)."""
        context = self._contexts.get(tuple(alpn))
        if context is None:
            context = self._contexts[tuple(alpn)] = _prepared(
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), self.identities, alpn
            )
        return context


@dataclass(slots=True)
class ServerTls:
    """How to be a TLS server.

    Attributes:
        store: with one, clients are asked for a certificate, and one that they send has to come from it.
        identities: at least one; OpenSSL chooses between kinds of keys (RSA, EC).
    """

    store: CertStore | None = None
    identities: list[Identity] = field(default_factory=list)
    _contexts: dict[tuple[str, ...], ssl.SSLContext] = field(default_factory=dict, init=False, repr=False)

    def add_identity(self, identity: Identity) -> None:
        """Present `identity`, from the next connection on."""
        self.identities.append(identity)
        self._contexts.clear()

    def context(self, alpn: Sequence[str] = ()) -> ssl.SSLContext:
        """The context for a listener that speaks these protocols (TLS 1.2 and later)."""
        context = self._contexts.get(tuple(alpn))
        if context is None:
            context = self._contexts[tuple(alpn)] = _prepared(
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.identities, alpn
            )
            self._ask_clients(context)
        return context

    def _ask_clients(self, context: ssl.SSLContext) -> None:
        if self.store is not None and self.store.pem:
            context.load_verify_locations(cadata=self.store.pem)
            context.verify_mode = ssl.CERT_OPTIONAL


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
        raise ArgumentError(f"{what}: can't read {path}: {error.strerror}") from None

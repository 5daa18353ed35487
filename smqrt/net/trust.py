"""Whether the other side of a TLS connection may be trusted, decided after the handshake.

A client of smqrt shakes hands with anybody and then asks: spec bas-api §8.2 leaves the decision to the application.
The chain that was presented is verified by OpenSSL itself, by the rules that every other TLS client follows.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from enum import Enum
from functools import cache

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
from smqrt.net import certnames

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
        named = certnames.matches(chain[0], name)
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
    if not certnames.is_for_servers(chain[0]):
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

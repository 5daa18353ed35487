"""Certificates for the tests of TLS, made by trustme."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import gevent.ssl
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from smqrt.transport.server_tls import TlsFiles, load
from smqrt.transport.tls_contexts import CertStore, ClientTls, Identity, ServerTls


def store_of(*authorities: trustme.CA) -> CertStore:
    store = CertStore()
    for authority in authorities:
        store.add(authority.cert_pem.bytes())
    return store


def identity_of(leaf: trustme.LeafCert) -> Identity:
    chain = b"".join(blob.bytes() for blob in leaf.cert_chain_pems)
    return Identity(chain, leaf.private_key_pem.bytes())


def server_of(leaf: trustme.LeafCert, *client_authorities: trustme.CA) -> ServerTls:
    return ServerTls(store_of(*client_authorities) if client_authorities else None, [identity_of(leaf)])


def client_of(*authorities: trustme.CA) -> ClientTls:
    return ClientTls(store_of(*authorities))


def expired(authority: trustme.CA, *names: str) -> trustme.LeafCert:
    now = datetime.now(UTC)
    return authority.issue_cert(*names, not_before=now - timedelta(days=9), not_after=now - timedelta(days=2))


def gevent_context(leaf: trustme.LeafCert, *client_authorities: trustme.CA) -> ssl.SSLContext:
    """A server's context for sockets of gevent."""
    context = gevent.ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    identity_of(leaf).load_into(context)
    for authority in client_authorities:
        context.load_verify_locations(cadata=authority.cert_pem.bytes().decode())
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def server_context(cert: str | Path, key: str | Path, client_ca: str | Path | None = None) -> ssl.SSLContext:
    """The context of a listener with these files."""
    files = TlsFiles(((str(cert), str(key)),), str(client_ca) if client_ca else None)
    return load(files, datetime.now(UTC)).default


def der_of(authority: trustme.CA) -> bytes:
    """The certificate of an authority, as devices store it."""
    return x509.load_pem_x509_certificate(authority.cert_pem.bytes()).public_bytes(serialization.Encoding.DER)


class Authority:
    """An authority, and files with the certificates that it has signed.

    Attributes:
        path: its own certificate.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._ca = folder, trustme.CA()
        self.path = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(str(self.path))

    def pair(self, name: str, host: str = "127.0.0.1", **arguments: Any) -> tuple[Path, Path]:
        """The files of a new certificate and its key."""
        issued = self._ca.issue_cert(host, common_name=name, **arguments)
        cert, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(key))
        key.chmod(0o600)
        return cert, key

    def revocation_list(self, path: Path, *revoked: Path, days: float = 30) -> Path:
        """A file with the list of what was revoked, the certificates in these files; it ends after so many days."""
        now = datetime.now(UTC)
        authority = x509.load_pem_x509_certificate(self._ca.cert_pem.bytes())
        builder = x509.CertificateRevocationListBuilder().issuer_name(authority.subject)
        builder = builder.last_update(now - timedelta(days=2)).next_update(now + timedelta(days=days))
        for cert in revoked:
            serial = x509.load_pem_x509_certificate(cert.read_bytes()).serial_number
            one = (
                x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now - timedelta(days=2)).build()
            )
            builder = builder.add_revoked_certificate(one)
        key = serialization.load_pem_private_key(self._ca.private_key_pem.bytes(), None)
        path.write_bytes(builder.sign(cast(Any, key), hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        return path

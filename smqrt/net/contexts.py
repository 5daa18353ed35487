"""TLS contexts made from what is in memory: one's own certificate, whom to trust, what to speak (ALPN)."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from smqrt.errors import ArgumentError
from smqrt.net.trust import CertStore


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

"""Handshakes by which an authority verifies a name (TLS-ALPN-01), beside those of clients."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from gevent import socket
from gevent.ssl import SSLContext

from smqrt.acme.files import self_signed
from smqrt.transport.listener import Listener
from smqrt.transport.server_tls import ListenerTls, TlsFiles
from smqrt.transport.tls import TlsTransport
from smqrt.transport.tls_contexts import Identity
from tests.support.factory import Factory
from tests.support.pki import Authority
from tests.support.waiting import wait_until

CHALLENGE = "challenge"


class Port:
    """A listener with certificates for the names `a.example` and `b.example`.

    Attributes:
        accepted: connections that were given to the application.
    """

    def __init__(self, files: TlsFiles) -> None:
        self.tls = ListenerTls(files)
        self.accepted: list[TlsTransport] = []
        self.listener = Listener("127.0.0.1", 0, self._take, self.tls.context)
        self.listener.start()

    def _take(self, transport: TlsTransport, address: object) -> None:
        self.accepted.append(transport)

    def shown(self, name: str | None, *alpn: str) -> tuple[str, str | None]:
        """The common name of the certificate that a client sees, and the protocol that was chosen."""
        context = SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if alpn:
            context.set_alpn_protocols(list(alpn))
        client = context.wrap_socket(socket.create_connection(self.listener.address, 10), server_hostname=name)
        certificate = x509.load_der_x509_certificate(client.getpeercert(binary_form=True))
        chosen = client.selected_alpn_protocol()
        if "acme-tls/1" in alpn and chosen == "acme-tls/1":
            assert client.recv(1) == b"", "nothing follows such a handshake"
        client.close()
        (subject,) = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        return str(subject.value), chosen

    def close(self) -> None:
        for transport in self.accepted:
            transport.close()
        self.listener.close()


@pytest.fixture
def port(tmp_path: Path) -> Iterator[Callable[..., Port]]:
    made = Authority(tmp_path)
    pairs = [made.pair(name, name) for name in ("a.example", "b.example")]

    def open_port(**changes: Any) -> Port:
        return Port(TlsFiles(tuple((str(cert), str(key)) for cert, key in pairs), alpn=("http/1.1",), **changes))

    with Factory(open_port) as factory:
        yield factory


def challenge(*names: str) -> dict[str, ssl.SSLContext]:
    found = {}
    for name in names:
        chain, key = self_signed([name], CHALLENGE, timedelta(days=1))
        found[name] = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        Identity(chain, key).load_into(found[name])
        found[name].set_alpn_protocols(["acme-tls/1"])
    return found


@pytest.mark.parametrize("minimum", ["1.2", "1.3"])
def test_only_those_that_ask_for_it_see_the_challenge(port: Callable[..., Port], minimum: str) -> None:
    opened = port(minimum=minimum)
    opened.tls.answer_challenges(challenge("b.example"))
    assert opened.shown("b.example", "acme-tls/1") == (CHALLENGE, "acme-tls/1")
    assert opened.shown("B.Example", "acme-tls/1") == (CHALLENGE, "acme-tls/1")
    assert opened.shown("a.example", "acme-tls/1") == ("a.example", None)
    assert opened.shown(None, "acme-tls/1") == ("a.example", None)
    assert opened.shown("b.example", "http/1.1") == ("b.example", "http/1.1")
    assert opened.shown("b.example") == ("b.example", None)
    wait_until(lambda: len(opened.accepted) == 4)
    opened.tls.answer_challenges({})
    assert opened.shown("b.example", "acme-tls/1") == ("b.example", None)


def test_new_certificates_do_not_end_a_challenge(port: Callable[..., Port]) -> None:
    opened = port()
    opened.tls.answer_challenges(challenge("a.example"))
    assert opened.tls.reload() is None
    opened.listener.renew(opened.tls.context)
    assert opened.shown("a.example", "acme-tls/1") == (CHALLENGE, "acme-tls/1")
    assert opened.shown("b.example", "http/1.1") == ("b.example", "http/1.1")


def test_the_protocol_name_elsewhere_has_no_effect(port: Callable[..., Port]) -> None:
    opened = port()
    opened.tls.answer_challenges(challenge("a.example"))
    assert opened.shown("acme-tls-1.example", "x\nacme-tls/1") == ("a.example", None)


def test_a_port_that_requires_certificates_cannot_be_verified(port: Callable[..., Port], tmp_path: Path) -> None:
    """As the manual says: OpenSSL asks for what the first context asks for."""
    opened = port(client_ca=str(tmp_path / "ca.pem"), client_certificate="required", minimum="1.2")
    opened.tls.answer_challenges(challenge("a.example"))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        opened.shown("a.example", "acme-tls/1")

"""`tls.acme`: a server that orders its own certificate, with a certificate authority that looks at its ports."""

from __future__ import annotations

import json
import socket
import ssl
import stat
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acme_authority import AcmeAuthority
from tests.conftest import Served, free_port

NAMES = "example.com", "www.example.com"
REQUEST = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
Serve = Callable[..., Served]


@pytest.fixture
def authority(tmp_path: Path) -> Iterator[AcmeAuthority]:
    made = AcmeAuthority(tmp_path)
    yield made
    made.close()


class Site:
    """A server with `tls.acme`, at ports that the authority knows.

    Attributes:
        state: the folder of the state.
    """

    def __init__(self, serve: Serve, authority: AcmeAuthority, folder: Path) -> None:
        self._serve, self.authority, self.state = serve, authority, folder / "state"
        self._app = folder / "app"
        self._app.mkdir()
        (self._app / "index.html").write_text("hello")
        self.http_port, self.tls_port = free_port(), free_port()
        authority.looks_at(self.http_port, self.tls_port)

    def start(self, *arguments: object) -> Served:
        own: list[object] = ["--port", self.http_port, "--tls-port", self.tls_port, "--tls-acme", ",".join(NAMES)]
        own += ["--tls-acme-directory", self.authority.url, "--tls-acme-folder", self.state]
        own += ["--tls-acme-contact", "root@example.com", *arguments]
        self.served: Served = self._serve(self._app, *map(str, own))
        return self.served

    def trusted(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.authority.path)

    def connect(self, name: str = NAMES[0]) -> ssl.SSLSocket:
        """A connection that trusts the authority only."""
        sock = socket.create_connection(("127.0.0.1", self.tls_port), 10)
        return self.trusted().wrap_socket(sock, server_hostname=name)

    def is_trusted(self) -> bool:
        try:
            self.connect().close()
        except ssl.SSLCertVerificationError:
            return False
        return True

    def serial(self) -> str:
        with self.connect() as client:
            return str((client.getpeercert() or {})["serialNumber"])

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.served.admin_url}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    def told(self) -> Any:
        with urllib.request.urlopen(f"{self.served.admin_url}/api/v1/server", timeout=10) as answer:
            return json.load(answer)["acme"]

    def files(self) -> list[Path]:
        return [path for path in self.state.rglob("*") if path.is_file()]


@pytest.fixture
def site(serve: Serve, authority: AcmeAuthority, tmp_path: Path) -> Site:
    return Site(serve, authority, tmp_path)


def answer(client: ssl.SSLSocket) -> None:
    client.sendall(REQUEST)
    got = b""
    while b"hello" not in got:
        more = client.recv(1000)
        assert more, f"the connection ended behind {got!r}"
        got += more


@pytest.mark.parametrize("kind", ["http-01", "tls-alpn-01"])
def test_the_first_certificate(site: Site, authority: AcmeAuthority, kind: str) -> None:
    authority.may_verify.clear()
    served = site.start("--tls-acme-challenge", kind)
    served.wait_for("^listening on https")
    assert not site.is_trusted()  # it serves with a self-signed certificate meanwhile
    authority.may_verify.set()
    served.wait_for(rf"^certificate of example.com, www.example.com: ordered by ACME \({kind}\); the next one from 20")
    for name in NAMES:
        with site.connect(name) as client:
            answer(client)
    assert authority.counts[f"{kind} verified"] == len(NAMES)
    assert list(authority.contacts.values()) == [["mailto:root@example.com"]]
    assert 'smqrt_acme_orders_total{outcome="ordered"} 1.0' in site.metrics()
    assert "smqrt_acme_failing 0.0" in site.metrics()
    assert {stat.S_IMODE(path.stat().st_mode) for path in site.files()} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in site.state.rglob("*") if path.is_dir()} == {0o700}

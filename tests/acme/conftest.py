"""Fixtures of the tests of ACME: an authority, and a server with `tls.acme` that it looks at."""

from __future__ import annotations

import json
import socket
import ssl
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smqrt.acme.files import AcmeFiles
from tests.conftest import Served, free_port
from tests.support.acme_authority import AcmeAuthority

NAMES = "example.com", "www.example.com"
REQUEST = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.fixture
def authority(tmp_path: Path) -> Iterator[AcmeAuthority]:
    made = AcmeAuthority(tmp_path)
    yield made
    made.close()


class Site:
    """A server with `tls.acme`, at ports that the authority knows.

    Attributes:
        files: the folder of the state, and what is in it.
        root: whom clients trust.
        served: the server that was started last.
    """

    def __init__(self, serve: Callable[..., Served], authority: AcmeAuthority, folder: Path) -> None:
        self._serve, self.authority, self.state = serve, authority, folder / "state"
        self.files = AcmeFiles(self.state, authority.url, NAMES)
        self.app = folder / "app"
        self.app.mkdir()
        (self.app / "index.html").write_text("hello")
        self.http_port, self.tls_port = free_port(), free_port()
        self.root = authority.path
        authority.looks_at(self.http_port, self.tls_port)

    def start(self, *arguments: object) -> Served:
        own: list[object] = ["--port", self.http_port, "--tls-port", self.tls_port, "--tls-acme", ",".join(NAMES)]
        own += ["--tls-acme-directory", self.authority.url, "--tls-acme-folder", self.state]
        own += ["--tls-acme-contact", "root@example.com", *arguments]
        self.served: Served = self._serve(self.app, *map(str, own))
        return self.served

    def wait_ordered(self, times: int = 1) -> None:
        self.served.wait_for("(?s)" + "ordered by ACME .*" * times)

    def connect(self, name: str = NAMES[0]) -> ssl.SSLSocket:
        """A connection that trusts the authority only."""
        context = ssl.create_default_context(cafile=self.root)
        sock = socket.create_connection(("127.0.0.1", self.tls_port), 10)
        return context.wrap_socket(sock, server_hostname=name)

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
        return self._got("/metrics")

    def told(self) -> Any:
        return json.loads(self._got("/api/v1/server"))["acme"]

    def open(self, path: str) -> Any:
        return urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", timeout=10)

    def _got(self, path: str) -> str:
        with urllib.request.urlopen(self.served.admin_url + path, timeout=10) as answer:
            return str(answer.read().decode())


@pytest.fixture
def site(serve: Callable[..., Served], authority: AcmeAuthority, tmp_path: Path) -> Site:
    return Site(serve, authority, tmp_path)


def answer(client: ssl.SSLSocket) -> None:
    """Ask for the page, and get it."""
    client.sendall(REQUEST)
    got = b""
    while b"hello" not in got:
        more = client.recv(1000)
        assert more, f"the connection ended behind {got!r}"
        got += more

"""Certificates that change under clients: nobody is disconnected, and each next handshake sees the new ones.

The long form: `python -m tests.server.test_certificate_rotation 50 500` (rotations and clients).
"""

from __future__ import annotations

import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.conftest import Served
from tests.support.pki import Authority
from tests.support.waiting import wait_until

Serve = Callable[..., Served]
REQUEST = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
SHORT = 5, 50
WAIT_S = 20.0
BROKEN = (b"", b"rubbish", b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n")


class Rotation:
    """A server that asks clients for a certificate, and both authorities of the moment.

    Attributes:
        broken: how often broken files were put in its way.
        slowest_s: the longest that a new certificate took from its files to a handshake.
    """

    def __init__(self, serve: Serve, folder: Path) -> None:
        self._folder = folder
        self._files = {name: folder / f"{name}.pem" for name in ("cert", "key", "ca", "crl")}
        self.broken, self.slowest_s = 0, 0.0
        self._number = 0
        self.write()
        app = folder / "app"
        app.mkdir()
        (app / "index.html").write_text("hello")
        arguments = ["--tls-port", "0", "--cert", self._files["cert"], "--key", self._files["key"]]
        arguments += ["--client-ca", self._files["ca"], "--tls-client-crl", self._files["crl"]]
        self.served = serve(app, *arguments, "--tls-client-certificate", "required")
        self.address = "127.0.0.1", self.served.tls_port

    def write(self) -> None:
        """Make a new authority, with all that comes from it, and put it in place."""
        self._number += 1
        folder = self._folder / f"{self._number}"
        folder.mkdir()
        self.authority = Authority(folder)
        self.client = self.authority.pair("client")
        cert, key = self.authority.pair("server")
        made = {"cert": cert, "key": key, "ca": self.authority.path}
        made["crl"] = self.authority.revocation_list(folder / "crl.pem")
        for name, path in made.items():
            self._files[name].write_bytes(path.read_bytes())

    def spoil(self) -> None:
        """Put something broken in place, one file after the other."""
        name = list(self._files)[self.broken % len(self._files)]
        kept = self._files[name].read_bytes()
        self._files[name].write_bytes(BROKEN[self.broken % len(BROKEN)])
        self.broken += 1
        wait_until(lambda: self.served.output.count("certificates not reloaded") == self.broken, self.served.lines)
        self.connect().close()
        self._files[name].write_bytes(kept)

    def connect(self) -> ssl.SSLSocket:
        """A connection that trusts the newest authority only, and is trusted by it; it has got an answer."""
        context = ssl.create_default_context(cafile=self.authority.path)
        context.load_cert_chain(*self.client)
        client = context.wrap_socket(socket.create_connection(self.address, WAIT_S), server_hostname="127.0.0.1")
        answer(client)
        return client

    def connect_when_renewed(self) -> ssl.SSLSocket:
        began = time.monotonic()
        while True:
            try:
                client = self.connect()
            except (ssl.SSLError, ConnectionError):
                assert time.monotonic() - began < WAIT_S, self.served.output
                time.sleep(0.02)
            else:
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                return client


def answer(client: ssl.SSLSocket) -> None:
    client.sendall(REQUEST)
    got = b""
    while b"hello" not in got:
        more = client.recv(1000)
        assert more, f"the connection ended behind {got!r}"
        got += more


def rotate(rotation: Rotation, rotations: int, clients: int) -> list[ssl.SSLSocket]:
    """Changes everything so many times, while clients come; gives them, all still connected."""
    open_clients: list[ssl.SSLSocket] = []
    for number in range(rotations):
        open_clients += [rotation.connect() for _ in range(clients // rotations)]
        if number % 2:
            rotation.spoil()
            rotation.write()  # the server sees it by itself
        else:
            rotation.write()
            rotation.served.process.send_signal(signal.SIGHUP)
        open_clients.append(rotation.connect_when_renewed())
        for client in open_clients:
            answer(client)
    return open_clients


def test_new_certificates_disconnect_no_client(serve: Serve, tmp_path: Path) -> None:
    """Certificates change under traffic."""
    rotation = Rotation(serve, tmp_path)
    clients = rotate(rotation, *SHORT)
    assert len(clients) >= SHORT[1]
    assert rotation.served.stop() == 0
    for client in clients:
        client.close()


def main(rotations: int, clients: int) -> None:
    """The long form."""
    import tempfile

    started: list[Served] = []

    def serve(*arguments: str | Path) -> Served:
        started.append(Served(*arguments))
        return started[-1]

    with tempfile.TemporaryDirectory() as folder:
        rotation = Rotation(serve, Path(folder))
        began = time.monotonic()
        kept = rotate(rotation, rotations, clients)
        print(f"{rotations} rotations, {rotation.broken} times broken files, {len(kept)} clients, none disconnected;")
        print(f"a new certificate took {rotation.slowest_s:.2f} s at most; {time.monotonic() - began:.0f} s in all")
        print(f"the server ended with {started[0].stop()}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

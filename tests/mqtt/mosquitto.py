"""A real mosquitto as a process, and certificates for it."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

import trustme

from tests.conftest import free_port

START_S = 30
COMMON = "allow_anonymous true\nmax_queued_messages 0\npersistence false\nlog_dest none\nuser root\n"


class Mosquitto:
    """A broker on a free port of 127.0.0.1.

    Args:
        folder: for its configuration.
        settings: lines of the configuration behind those of its listener; `common` come first.
        port: to start one again where another was.
    """

    def __init__(self, folder: Path, settings: str = "", common: str = COMMON, port: int = 0) -> None:
        self.port = port or free_port()
        config = folder / f"mosquitto-{self.port}.conf"
        config.write_text(f"{common}listener {self.port} 127.0.0.1\n{settings}")
        self.process = subprocess.Popen(["mosquitto", "-c", config], stderr=subprocess.DEVNULL)
        self._wait_until_it_listens()

    def _wait_until_it_listens(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, "mosquitto ended: is its configuration right?"
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, "mosquitto does not listen"
                time.sleep(0.02)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(5)


class Certificates:
    """An authority, and files with certificates for TLS listeners and clients."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.authority = trustme.CA()
        self.authority_file = folder / "ca.pem"
        self.authority.cert_pem.write_to_path(str(self.authority_file))

    def issue(self, name: str, host: str = "127.0.0.1", **arguments: object) -> tuple[Path, Path]:
        """The files of a new certificate and its key."""
        issued = self.authority.issue_cert(host, **arguments)  # type: ignore[arg-type]
        cert, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(key))
        return cert, key

    def listener(self, name: str = "server", host: str = "127.0.0.1", **arguments: object) -> str:
        """The lines of a mosquitto configuration that make a listener speak TLS."""
        cert, key = self.issue(name, host, **arguments)
        return f"cafile {self.authority_file}\ncertfile {cert}\nkeyfile {key}\n"

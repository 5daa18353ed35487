"""`tls.acme` against Pebble, the test server of Let's Encrypt, which is stricter than other authorities."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acme.conftest import Site
from tests.conftest import free_port
from tests.support.pki import Authority
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers  # scripts/test installs pebble for these


class Pebble:
    """Runs until it is closed.

    Attributes:
        url: of its directory.
        ca: the file with the authority of its own certificate.
        management: where it tells what it has issued.
    """

    def __init__(self, folder: Path, http_port: int, tls_port: int) -> None:
        own = Authority(folder)
        self.ca = own.path
        cert, key = own.pair("pebble")
        port, management = free_port(), free_port()
        self.url, self.management = f"https://127.0.0.1:{port}/dir", f"https://127.0.0.1:{management}"
        about = {
            "listenAddress": f"127.0.0.1:{port}",
            "managementListenAddress": f"127.0.0.1:{management}",
            "certificate": str(cert),
            "privateKey": str(key),
            "httpPort": http_port,
            "tlsPort": tls_port,
            "ocspResponderURL": "",
        }
        config = folder / "pebble.json"
        config.write_text(json.dumps({"pebble": about}))
        # It would reject some nonces by chance, two in a row among them.
        environment = os.environ | {"PEBBLE_VA_NOSLEEP": "1", "PEBBLE_WFE_NONCEREJECT": "0"}
        dns = f"127.0.0.1:{free_port()}"  # every name is at this machine
        self._processes: list[subprocess.Popen[bytes]] = []
        nothing = ["-http01", "", "-https01", "", "-tlsalpn01", "", "-defaultIPv6", ""]
        names = ["pebble-challtestsrv", "-dns01", dns, "-management", f"127.0.0.1:{free_port()}", *nothing]
        for command in (names, ["pebble", "-config", str(config), "-dnsserver", dns]):
            with open(folder / f"{command[0]}.log", "w") as log:
                process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            self._processes.append(process)
        self.root = folder / "acme-root.pem"
        wait_until(self._keep_root, "Pebble")

    def _keep_root(self) -> bool:
        context = ssl.create_default_context(cafile=self.ca)
        try:
            with urllib.request.urlopen(f"{self.management}/roots/0", context=context, timeout=5) as found:
                self.root.write_bytes(found.read())
        except OSError:
            return False
        return True

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.wait(10)


@pytest.fixture
def pebble(site: Site, tmp_path: Path) -> Iterator[Pebble]:
    folder = tmp_path / "pebble"
    folder.mkdir()
    made = Pebble(folder, site.http_port, site.tls_port)
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["http-01", "tls-alpn-01"])
def test_an_order_at_pebble(site: Site, pebble: Pebble, kind: str) -> None:
    arguments = ["--tls-acme-directory", pebble.url, "--tls-acme-ca", pebble.ca]
    served = site.start("--tls-acme-challenge", kind, *arguments)
    served.wait_for(rf"^certificate of .*: ordered by ACME \({kind}\)|ACME order failed.*")
    assert "ACME order failed" not in served.output
    site.root = pebble.root
    site.connect().close()

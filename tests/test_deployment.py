"""The configurations of help/deployment.md in real proxies: nginx, HAProxy and Caddy, in front of a real server."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import requests

from tests.conftest import Served, free_port
from tests.support.applications import SMQ_PAGE, application
from tests.support.device import WS_HEADERS
from tests.support.pki import Authority

pytestmark = pytest.mark.servers

PAGE = Path(__file__).parent.parent / "smqrt" / "help" / "deployment.md"
HUB = """
smq = require"smq.hub".create{onconnect = function(etid, info) trace("connected", info) end}
"""
TELL = """<?lsp
request:session(true)
print(request:peername(), request:issecure(), request:url(), request:header"host")
?>"""


def block(language: str) -> str:
    """The block of the manual in that language."""
    found = re.search(rf"^```{language}\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


class Proxied:
    """A server behind three proxies; ports by what they are in the manual."""

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self.ports = {name: free_port() for name in ("nginx", "haproxy", "caddy", "9360", "9361", "9362")}
        authority = Authority(folder)
        cert, key = authority.pair("site", "localhost")
        self.ca = str(authority.path)
        (folder / "both.pem").write_text(cert.read_text() + key.read_text())
        app = application(folder / "app", HUB, smq=SMQ_PAGE, tell=TELL)
        (app / "folder").mkdir()
        (app / "folder" / "index.lsp").write_text("in it")
        toml = re.search(r"^```toml\n# smqrt.toml\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
        assert toml
        passed = f'\n[listener.passed]\nport = 0\nproxy_protocol = true\ncert = "{cert}"\nkey = "{key}"\n'
        (folder / "smqrt.toml").write_text(toml[1].replace("9358", "0") + passed)
        try:
            self.server = Served(app, "--config", folder / "smqrt.toml", "--hosts", "*", cwd=folder)
            self._stack.callback(self.server.stop)
            self._start(folder, cert, key)
        except BaseException:
            self.close()
            raise

    def _start(self, folder: Path, cert: Path, key: Path) -> None:
        listening = rb"^listening on https?://127\.0\.0\.1:(\d+) \(listener %s\)$".decode()
        devices, passed = (self.server.wait_for(listening % name)[1] for name in ("devices", "passed"))
        admin = self.server.admin_url.rpartition(":")[2]
        own = {"127.0.0.1:9357": f"127.0.0.1:{self.server.port}", "9356": admin, "9358": devices, "9359": passed}
        files = {
            "/etc/ssl/site-and-key.pem": f"{folder}/both.pem",
            "/etc/ssl/site.pem": str(cert),
            "/etc/ssl/site.key": str(key),
        }
        taken = {f":{port}": f"127.0.0.1:{self.ports[port]}" for port in ("9360", "9361", "9362")}
        nginx = _replaced(block("nginx"), own | files | {"listen 443": f"listen 127.0.0.1:{self.ports['nginx']}"})
        frame = "daemon off; pid nginx.pid; error_log stderr; events {} http { access_log off; %s }"
        (folder / "nginx.conf").write_text(frame % nginx)
        self._run(folder, "nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"))
        haproxy = _replaced(
            block("haproxy"), files | taken | own | {"bind :443": f"bind 127.0.0.1:{self.ports['haproxy']}"}
        )
        (folder / "haproxy.cfg").write_text(haproxy)
        self._run(folder, "haproxy", "-q", "-db", "-f", str(folder / "haproxy.cfg"))
        site = f"https://localhost:{self.ports['caddy']}"
        caddy = _replaced(block("caddyfile"), own | {"example.com {": f"{site} {{\ntls {cert} {key}"})
        (folder / "Caddyfile").write_text("{\nadmin off\nauto_https disable_redirects\n}\n" + caddy)
        self._run(folder, "caddy", "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile")
        for port in self.ports.values():
            _wait_for(port, folder)

    def _run(self, folder: Path, *command: str) -> None:
        assert shutil.which(command[0]), f"this test needs {command[0]}; scripts/test installs it"
        with (folder / f"{command[0]}.log").open("w") as log:
            process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        self._stack.callback(process.wait, 20)
        self._stack.callback(process.terminate)

    def close(self) -> None:
        self._stack.close()


def _replaced(text: str, words: dict[str, str]) -> str:
    """All words at once, so that what stands in for one is not looked at again."""
    longest_first = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    return re.sub(rf"(?:{longest_first})(?!\d)", lambda match: words[match[0]], text)


def _wait_for(port: int, folder: Path) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            said = "\n".join(log.read_text() for log in folder.glob("*.log"))
            assert time.monotonic() < deadline, f"nobody listens on {port}:\n{said}"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    with closing(Proxied(tmp_path_factory.mktemp("proxied"))) as made:
        yield made


CLIENT = "127.0.0.9"
"""Another address than the proxies', who are trusted."""


def browser(proxied: Proxied) -> requests.Session:
    """A client of HTTP at that address."""
    session = requests.Session()
    session.trust_env, session.verify = False, proxied.ca
    adapter = requests.adapters.HTTPAdapter()
    adapter.init_poolmanager(1, 1, source_address=(CLIENT, 0))
    session.mount("https://", adapter)
    return session


def client_of(proxied: Proxied, port: int, secure: bool) -> socket.socket:
    """A connection from that address."""
    sock = socket.create_connection(("127.0.0.1", port), 20, (CLIENT, 0))
    if secure:
        return ssl.create_default_context(cafile=proxied.ca).wrap_socket(sock, server_hostname="localhost")
    return sock


SPOOFED = {
    "X-Forwarded-For": "6.6.6.6",
    "X-Forwarded-Proto": "http",
    "X-Forwarded-Host": "evil.example",
    "X-Forwarded-Port": "1",
    "X-Forwarded-Prefix": "/evil",
    "Forwarded": "for=6.6.6.6;host=evil.example",
}


@pytest.mark.parametrize("proxy", ["nginx", "haproxy", "caddy"])
def test_pages_see_the_client(proxied: Proxied, proxy: str) -> None:
    base = f"https://localhost:{proxied.ports[proxy]}"
    for headers in ({}, SPOOFED):
        page = browser(proxied).get(f"{base}/tell.lsp", headers=headers, timeout=20)
        host = base.removeprefix("https://")
        assert page.text.split() == [CLIENT, "true", f"{base}/tell.lsp", host], page.text
        assert "; Secure" in page.headers["set-cookie"]
    redirect = browser(proxied).get(f"{base}/folder", timeout=20, allow_redirects=False)
    assert redirect.headers["location"] == f"{base}/folder/"


def test_without_a_trusted_proxy_headers_are_ignored(proxied: Proxied) -> None:
    url = f"http://127.0.0.1:{proxied.server.port}/tell.lsp"
    # From an address of this machine that is not in proxy.trusted.
    with socket.create_connection(("127.0.0.1", proxied.server.port), 20, ("127.0.0.5", 0)) as sock:
        fields = "".join(f"{name}: {value}\r\n" for name, value in SPOOFED.items())
        sock.sendall(f"GET /tell.lsp HTTP/1.0\r\nHost: shop.example\r\n{fields}\r\n".encode())
        answer = b"".join(iter(lambda: sock.recv(4096), b"")).decode()
    assert answer.rpartition("\r\n\r\n")[2].split() == [
        "127.0.0.5", "false", "http://shop.example/tell.lsp", "shop.example",
    ]  # fmt: skip
    assert "Secure" not in answer
    conflict = requests.get(url, headers=SPOOFED | {"X-Forwarded-For": "7.7.7.7"}, timeout=20)
    assert conflict.status_code == 400
    assert "proxy.headers" in conflict.text


def test_a_path_in_front(proxied: Proxied) -> None:
    base = f"https://localhost:{proxied.ports['nginx']}"
    page = browser(proxied).get(f"{base}/iot/tell.lsp", timeout=20)
    assert page.text.split()[2] == f"{base}/iot/tell.lsp"
    redirect = browser(proxied).get(f"{base}/iot/folder", timeout=20, allow_redirects=False)
    assert redirect.headers["location"] == f"{base}/iot/folder/"


@pytest.mark.parametrize("proxy", ["nginx", "haproxy", "caddy"])
def test_websockets(proxied: Proxied, proxy: str) -> None:
    port = proxied.ports[proxy]
    with client_of(proxied, port, secure=True) as sock:
        head = (
            f"GET /smq.lsp HTTP/1.1\r\nHost: localhost:{port}\r\nOrigin: https://localhost:{port}\r\n{WS_HEADERS}\r\n"
        )
        sock.sendall(head.encode())
        answer = b""
        while b"127.0.0" not in answer.partition(b"\r\n\r\n")[2]:
            assert (data := sock.recv(4096)), answer
            answer += data
    assert answer.startswith(b"HTTP/1.1 101 ")
    init = answer.partition(b"\r\n\r\n")[2][2:]
    assert (init[:2], init[6:]) == (b"\1\1", CLIENT.encode())


@pytest.mark.parametrize(("port", "secure"), [("9360", False), ("9361", True), ("9362", True)])
def test_raw_smq_through_tcp(proxied: Proxied, port: str, secure: bool) -> None:
    with client_of(proxied, proxied.ports[port], secure) as sock:
        sock.sendall(b"GET /smq.lsp HTTP/1.1\r\nHost: localhost\r\nSimpleMQ: 1\r\n\r\n")
        init = b""
        while len(init) < 2 or len(init) < init[1]:
            assert (data := sock.recv(4096)), init
            init += data
    assert (init[2:4], init[8:]) == (b"\1\1", CLIENT.encode())


def test_the_port_for_proxies_is_for_proxies_only(proxied: Proxied) -> None:
    devices = int(proxied.server.wait_for(r"^listening on http://.*:(\d+) \(listener devices\)$")[1])
    with socket.create_connection(("127.0.0.1", devices), 20, ("127.0.0.5", 0)) as sock:
        sock.sendall(b"PROXY TCP4 1.2.3.4 1.2.3.4 1 1\r\nGET / HTTP/1.0\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 403 ")
    proxied.server.wait_for("refused: a connection of 127.0.0.5: .*see the setting proxy.trusted")

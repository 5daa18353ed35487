"""TLS of the admin listener: handshakes, logins, commands, renewal and contradictory settings."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from gevent import get_hub

from smqrt.errors import StartError
from smqrt.operations.server import AdminServer
from smqrt.server.listeners import admin_files, ports
from smqrt.settings.server_settings import AdminSettings, ListenerSettings, Settings
from smqrt.transport.server_tls import ListenerTls
from tests.conftest import Served
from tests.support.factory import Factory
from tests.support.pki import Authority

PASSWORD = "correct horse"
HANDSHAKE_S = 1.0


class Operated:
    """A server whose admin listener others reach, with a login and TLS."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.cert, self.key = self.authority.pair("admin")
        users = folder / "users.txt"
        for name, group in (("ada", "admin"), ("vera", "viewer"), ("guest", "others")):
            command = [sys.executable, "-m", "smqrt", "passwd", str(users), name, "--stdin", "--groups", group]
            subprocess.run(command, input=PASSWORD, text=True, check=True, timeout=60)
        (folder / "app").mkdir()
        (folder / "app" / ".preload").write_text('require"smq.hub".create()')
        self.environment = {
            "SMQRT_ADMIN__HOST": "0.0.0.0",
            "SMQRT_ADMIN__CERT": str(self.cert),
            "SMQRT_ADMIN__KEY": str(self.key),
            "XDG_RUNTIME_DIR": str(folder),
        }
        options = ("--auth-users", users, "--tls-handshake-s", f"{HANDSHAKE_S:g}")
        self.served = Served(folder / "app", *options, env=self.environment)
        self.port = int(self.served.wait_for(r"^admin at https://0\.0\.0\.0:(\d+)/$")[1])
        self.url = f"https://127.0.0.1:{self.port}"

    def get(self, path: str, **options: Any) -> requests.Response:
        return requests.get(self.url + path, verify=str(self.authority.path), timeout=10, **options)

    def handshake(self) -> ssl.SSLSocket:
        """A connection that has got an answer."""
        context = ssl.create_default_context(cafile=self.authority.path)
        client = context.wrap_socket(
            socket.create_connection(("127.0.0.1", self.port), 10), server_hostname="127.0.0.1"
        )
        ask(client)
        return client

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "smqrt", *words]
        env = os.environ | self.environment | {"SMQRT_ADMIN_PASSWORD": PASSWORD} | environment
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def ask(client: socket.socket) -> bytes:
    client.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    answer = client.recv(1000)
    assert b"200 OK" in answer
    return answer


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    with Factory(Operated, lambda one: one.served.stop()) as start:
        yield start(tmp_path_factory.mktemp("operated"))


def test_only_probes_need_no_login(operated: Operated) -> None:
    assert operated.get("/healthz").text == "ok\n"
    assert operated.get("/api/v1/server").status_code == 401
    assert operated.get("/api/v1/server", auth=("ada", PASSWORD)).json()["pid"] == operated.served.process.pid
    assert "clear text" not in operated.served.output


def test_denied_login_gets_a_reason_as_json(operated: Operated) -> None:
    for name, method, sentence in (("vera", "POST", "is read-only"), ("guest", "GET", "has no access")):
        answer = requests.request(
            method,
            operated.url + "/api/v1/apps/main/restart",
            auth=(name, PASSWORD),
            verify=str(operated.authority.path),
            timeout=10,
        )
        assert (answer.status_code, answer.headers["Content-Type"]) == (403, "application/json; charset=utf-8")
        assert sentence in answer.json()["error"]


def test_commands_of_this_machine_trust_its_own_certificate(operated: Operated) -> None:
    ran = operated.run("top", "--user", "ada", "--count", "1", "--json")
    assert '"server"' in ran.stdout, ran
    assert operated.run("health", SMQRT_ADMIN__PORT=str(operated.port)).stdout == "ok\n"


def test_remote_commands_need_a_trusted_certificate(operated: Operated) -> None:
    words = ("peers", "--user", "ada", "--url", operated.url)
    refused = operated.run(*words)
    assert refused.returncode == 1
    assert "CERTIFICATE_VERIFY_FAILED" in refused.stderr
    assert "Trust its certificate with --ca." in refused.stderr
    for trusted in (operated.authority.path, operated.cert):
        assert operated.run(*words, "--ca", str(trusted)).returncode == 0
        assert operated.run("health", "--url", operated.url, "--ca", str(trusted)).stdout == "ok\n"
    assert operated.run("health", "--url", operated.url).returncode == 1


def test_client_without_tls_blocks_no_others(operated: Operated) -> None:
    silent = [socket.create_connection(("127.0.0.1", operated.port), 10) for _ in range(20)]
    with socket.create_connection(("127.0.0.1", operated.port), 10) as plain:
        plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert b"200" not in plain.recv(1000)
    assert operated.get("/healthz").text == "ok\n"
    for one in silent:
        assert one.recv(100) in (b"", b"\x15\x03\x01\x00\x02\x02\x28")  # after HANDSHAKE_S
        one.close()


def test_new_certificate_disconnects_no_clients(operated: Operated) -> None:
    client = operated.handshake()
    before = client.getpeercert(binary_form=True)
    name = 'smqrt_certificate_expiry_timestamp_seconds{listener="admin"}'
    assert name in operated.get("/metrics", auth=("ada", PASSWORD)).text
    cert, key = operated.authority.pair("renewed")
    operated.cert.write_bytes(cert.read_bytes())
    operated.key.write_bytes(key.read_bytes())
    operated.served.process.send_signal(signal.SIGHUP)
    operated.served.wait_for("certificates reloaded")
    ask(client)
    with operated.handshake() as other:
        assert other.getpeercert(binary_form=True) != before
    client.close()


def test_clients_without_a_certificate_are_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = map(str, authority.pair("admin"))
    settings = Settings(admin=AdminSettings(cert=cert, key=key, client_ca=str(authority.path)))
    files = admin_files(settings)
    assert files is not None
    admin = AdminServer(port=0, tls=ListenerTls(files))
    admin.listener.start()
    url = f"{admin.url}nothing"
    shown = {"cert": tuple(map(str, authority.pair("operator")))}

    def status(**options: Any) -> int:
        return requests.get(url, verify=str(authority.path), timeout=10, **options).status_code

    def in_thread(**options: Any) -> int:
        """The loop, on which the listener lives, turns meanwhile."""
        found: int = get_hub().threadpool.apply(status, kwds=options)
        return found

    assert in_thread(**shown) == 404
    with pytest.raises(requests.ConnectionError):
        in_thread()
    admin.close()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (Settings(admin=AdminSettings(cert="a.pem")), "admin.cert needs key too"),
        (Settings(admin=AdminSettings(key="a.key")), "admin.key needs cert too"),
        (Settings(admin=AdminSettings(tls=True)), "set admin.cert and admin.key"),
        (Settings(admin=AdminSettings(client_ca="ca.pem")), "admin.tls is off"),
        (Settings(admin=AdminSettings(tls=False, cert="a", key="b")), "admin.tls is off"),
    ],
)
def test_settings_that_make_no_sense(settings: Settings, sentence: str) -> None:
    with pytest.raises(StartError, match=sentence):
        admin_files(settings)


def test_no_other_listener_has_its_name() -> None:
    with pytest.raises(StartError, match="listener.admin: this name is reserved for the admin listener"):
        ports(Settings(listener={"admin": ListenerSettings(port=0)}))


def test_the_certificate_of_the_server_serves_too(tmp_path: Path) -> None:
    cert, key = map(str, Authority(tmp_path).pair("server"))
    files = admin_files(Settings(cert=cert, key=key, admin=AdminSettings(tls=True)))
    assert files is not None
    assert files.pairs == ((cert, key),)
    assert admin_files(Settings(cert=cert, key=key)) is None  # not without being asked

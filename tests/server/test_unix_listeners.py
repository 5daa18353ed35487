"""Listeners on Unix sockets in the settings: every protocol, workers, a hot restart, errors."""

from __future__ import annotations

import _socket
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from gevent import socket, ssl, subprocess

from smqrt.errors import StartError
from smqrt.http.access import Access
from smqrt.http.forwarded import Proxies
from smqrt.http.server import HttpServer
from smqrt.server import listeners
from smqrt.server.listeners import Listeners, open_for_workers
from smqrt.server.mqtt import take_mqtt
from smqrt.settings.server_settings import Settings
from smqrt.settings.sources import Sources
from smqrt.smq import close_log
from smqrt.transport.admission import TrustedNetworks
from smqrt.transport.listener import inherited
from tests.server.restart.hot import HotServed, application
from tests.support.device import RAW_HEADERS, WS_HEADERS, Site, request
from tests.support.factory import Factory
from tests.support.pki import Authority
from tests.support.sites import authority, make_site
from tests.support.waiting import wait_until

__all__ = ["authority", "make_site"]


def settings(folder: Path, text: str) -> Settings:
    config = folder / "smqrt.toml"
    config.write_text(text)
    return Sources(file=config).read().settings


class Local:
    """A site that also listens on a Unix socket."""

    def __init__(self, site: Site, path: Path, more: str = "") -> None:
        self.site, self.path = site, path
        site.server.take_mqtt = take_mqtt
        table = f"[listener.http]\nenabled = false\n[listener.local]\nhost = '{path}'\n{more}"
        self.listeners = Listeners(settings(path.parent, table), site.server)
        self.listeners.start()

    def close(self) -> None:
        self.listeners.close()

    def mosquitto(self, tool: str, *words: str) -> Any:
        command = [f"mosquitto_{tool}", "--unix", str(self.path), *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def answer(self, asked: bytes, end: bytes) -> bytes:
        """Return what the server says to this, up to `end`."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(15)
            sock.connect(str(self.path))
            sock.sendall(asked)
            got = b""
            while end not in got:
                more = sock.recv(4096)
                assert more, got
                got += more
            return got


@pytest.fixture
def local(make_site: Callable[..., Site], tmp_path: Path) -> Iterator[Local]:
    with Factory(Local) as make:
        yield make(make_site(mqtt=True), tmp_path / "mqtt.sock")


@pytest.mark.servers
@pytest.mark.parametrize("version", ["mqttv311", "mqttv5"])
def test_mosquitto(local: Local, version: str) -> None:
    sub = local.mosquitto("sub", "-V", version, "-i", "lamp", "-q", "1", "-t", "a/#", "-v", "-C", "1", "-W", "20")
    wait_until(lambda: local.site.state.devices.filters.by_text, "a subscription")
    [session] = local.site.state.sessions.values()
    assert close_log.address_of(session.outbox) == "unix"
    assert close_log.transferred(session.outbox) == (None, None)
    pub = local.mosquitto("pub", "-V", version, "-q", "1", "-t", "a/b", "-m", "on")
    assert pub.wait() == 0, pub.stdout.read()
    assert sub.wait() == 0
    assert sub.stdout.read() == "a/b on\n"


def test_smq_and_websockets(local: Local) -> None:
    assert local.answer(request(RAW_HEADERS), b"unix").startswith(b"HTTP/1.1 200"), "Init contains the address"
    assert local.answer(request(WS_HEADERS), b"unix").startswith(b"HTTP/1.1 101")


@pytest.fixture
def secure(make_site: Callable[..., Site], tmp_path: Path, authority: Authority) -> Iterator[Local]:
    """A site whose Unix socket has TLS."""
    cert, key = authority.pair("server")
    with Factory(Local) as make:
        yield make(make_site(mqtt=True), tmp_path / "tls.sock", f"cert = '{cert}'\nkey = '{key}'\n")


@pytest.mark.servers
def test_mosquitto_over_tls(secure: Local, authority: Authority) -> None:
    secure.site.smq.setkeepalive(60, 10)  # must not be set on a Unix socket
    trust = ["--cafile", str(authority.path), "--insecure"]
    sub = secure.mosquitto("sub", *trust, "-i", "lamp", "-q", "1", "-t", "a/#", "-v", "-C", "1", "-W", "20")
    wait_until(lambda: secure.site.state.devices.filters.by_text, "a subscription")
    [session] = secure.site.state.sessions.values()
    assert close_log.transport_of(session.outbox) == "mqtt+tls"
    assert close_log.address_of(session.outbox) == "unix"
    pub = secure.mosquitto("pub", *trust, "-q", "1", "-t", "a/b", "-m", "on")
    assert pub.wait() == 0, pub.stdout.read()
    assert sub.wait() == 0
    assert sub.stdout.read() == "a/b on\n"


def test_pages_and_smq_over_tls(secure: Local, authority: Authority) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(str(authority.path))
    for asked, end in ((request(RAW_HEADERS), b"unix"), (request(WS_HEADERS), b"unix"), (request(""), b"404")):
        with socket.socket(socket.AF_UNIX) as plain:
            plain.settimeout(15)
            plain.connect(str(secure.path))
            sock = context.wrap_socket(plain)
            sock.sendall(asked)
            got = b""
            while end not in got:
                more = sock.recv(4096)
                assert more, got
                got += more
            sock.close()
    assert secure.site.requests[-1].secure
    assert secure.listeners.scheme("local") == "unix"


def test_keep_alive_of_tcp_is_not_set(local: Local) -> None:
    local.site.smq.setkeepalive(60, 10)
    assert b"unix" in local.answer(request(RAW_HEADERS), b"unix")


def test_proxies_can_connect(local: Local) -> None:
    local.site.server.proxies = Proxies(TrustedNetworks(["unix"]), "auto")
    local.answer(request("X-Forwarded-For: 192.0.2.7\r\n"), b"404")
    assert local.site.requests[-1].peer == ("192.0.2.7", 0)
    local.site.server.proxies = Proxies(TrustedNetworks(["127.0.0.1"]), "auto")
    local.answer(request("X-Forwarded-For: 192.0.2.7\r\n"), b"404")
    assert local.site.requests[-1].peer == local.site.requests[-1].local == ("unix", 0)


def test_host_names_of_other_machines_are_accepted(local: Local) -> None:
    """A page of another machine cannot reach the socket, unlike a port on loopback."""
    asked = request("").replace(b"Host: test", b"Host: example.com")
    local.site.server.access = Access(loopback=True)
    local.answer(asked, b"404")
    with socket.create_connection(local.site.address(), timeout=15) as sock:
        sock.sendall(asked)
        assert sock.recv(100).startswith(b"HTTP/1.1 403")
    local.answer(b"GET /smq HTTP/1.0\r\n\r\n", b"404")
    assert local.site.requests[-1].authority == "localhost"


def test_workers_share_one_socket(tmp_path: Path) -> None:
    path = tmp_path / "mqtt.sock"
    table = (
        f"[listener.http]\nenabled = false\n[listener.local]\nhost = '{path}'\nmode = '0600'\n[admin]\nenabled = false"
    )
    given = settings(tmp_path, table)
    opened = open_for_workers(given, None, 2)
    port = opened["local"]
    assert port.is_one_for_all
    assert port.workers[0] == port.workers[1]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    http: Any = HttpServer(lambda request: None)  # type: ignore[arg-type]
    worker = Listeners(given, http, given={"local": type(port)(port.workers, 1, True)})
    assert worker["local"].accepts_one_at_a_time
    worker._given = {}  # the sockets are those of the supervisor: in a worker they are other descriptors
    assert worker.url("local") == f"unix:{path}"
    worker.start()
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(15)
        client.connect(str(path))
        client.sendall(b"GET\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 400")
    worker.close()
    assert path.exists()
    port.close()
    assert not path.exists()


def listening(path: Path) -> Any:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.listen()
    return sock


def pass_by_systemd(monkeypatch: pytest.MonkeyPatch, sock: Any, name: str) -> None:
    monkeypatch.setattr(
        listeners, "passed_sockets", lambda names, unix: {name: _socket.socket(fileno=os.dup(sock.fileno()))}
    )


def test_a_socket_of_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mqtt.sock"
    given = settings(tmp_path, f"[listener.http]\nenabled = false\n[listener.local]\nhost = '{path}'\n")
    http: Any = HttpServer(lambda request: None)  # type: ignore[arg-type]
    with listening(path) as sock:
        pass_by_systemd(monkeypatch, sock, "local")
        served = Listeners(given, http)
        assert served["local"].has_foreign_file
        served.start()
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(15)
            client.connect(str(path))
            client.sendall(b"GET\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 400")
        served.close()
        assert path.exists(), "the file belongs to systemd"
        inherited.kept_files = {str(path)}  # the process of a hot restart
        inherited.add((str(path), 0), [os.dup(sock.fileno())])
        monkeypatch.setattr(listeners, "passed_sockets", lambda names, unix: {})
        later = Listeners(given, http)
        later.start()
        later.close()
        inherited.kept_files = set()
        assert path.exists()


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("/tmp/none/other.sock", "but listener.local.host is /tmp/none/other.sock; set ListenStream= to the same."),
        ("127.0.0.1", "but listener.local.host is 127.0.0.1; set ListenStream= to the same."),
    ],
)
def test_a_socket_of_systemd_with_another_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, says: str
) -> None:
    path = tmp_path / "mqtt.sock"
    port = "" if host.startswith("/") else "port = 0\n"
    given = settings(tmp_path, f"[listener.http]\nenabled = false\n[listener.local]\nhost = '{host}'\n{port}")
    http: Any = HttpServer(lambda request: None)  # type: ignore[arg-type]
    with listening(path) as sock:
        pass_by_systemd(monkeypatch, sock, "local")
        with pytest.raises(StartError, match=f"^systemd passes the Unix socket {path} as 'local', {says}"):
            Listeners(given, http)


LOCAL = "[listener.local]\nhost = '/tmp/none/mqtt.sock'\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (LOCAL + "port = 1883", "listener.local: the Unix socket /tmp/none/mqtt.sock has no port; remove port"),
        (LOCAL + "tls = true", "listener.local has no certificate; set cert and key."),
        (LOCAL + "cert = 'a'", "listener.local.cert needs key too;"),
        (LOCAL + "client_ca = 'a'", "listener.local has TLS settings, but tls is off; set tls = true, or remove them."),
        (LOCAL + "proxy_protocol = true", "listener.local has proxy_protocol; add unix to proxy.trusted."),
        (LOCAL + "[listener.two]\nhost = '/tmp/none/mqtt.sock'", "two listeners have the host /tmp/none/mqtt.sock;"),
        (LOCAL, "listener.local: cannot listen on unix:/tmp/none/mqtt.sock: its folder does not exist"),
        (f"[listener.local]\nhost = '/{'x' * 107}'", "the path is longer than 107 bytes"),
        ("[listener.main]\nport = 0\nmode = '0600'", "listener.main.mode is for Unix sockets only"),
        ("[listener.local]\nmode = 'rw-rw----'", "listener.local.mode must be a string of octal digits such as"),
        ("host = '/tmp/mqtt.sock'", "host: /tmp/mqtt.sock is the path of a Unix socket; set it as host of a table"),
        ("[admin]\nhost = '/tmp/mqtt.sock'", "admin.host: /tmp/mqtt.sock is the path of a Unix socket"),
    ],
)
def test_one_sentence_when_settings_are_wrong(tmp_path: Path, text: str, says: str) -> None:
    http: Any = HttpServer(lambda request: None)  # type: ignore[arg-type]
    with pytest.raises(StartError) as raised:
        Listeners(settings(tmp_path, ("" if text.startswith("host") else "port = 0\n") + text), http)
    assert says in str(raised.value)


def api(served: HotServed, what: str) -> Any:
    return requests.get(f"{served.admin_url}/api/v1/{what}", timeout=20).json()


@pytest.mark.servers
def test_a_server_with_a_hot_restart(tmp_path: Path) -> None:
    path, config = tmp_path / "mqtt.sock", tmp_path / "smqrt.toml"
    config.write_text(f"[listener.local]\nhost = '{path}'\n")
    with Factory(HotServed, HotServed.end) as start:
        served = start("--mqtt", application(tmp_path / "app", page="<?lsp print(request:peername()) ?>"), cwd=tmp_path)
        served.wait_for(f"listening on unix:{path} \\(listener local\\)")
        words = ["curl", "-sS", "--max-time", "15", "--unix-socket", str(path), "http://localhost/page.lsp"]
        assert subprocess.check_output(words, timeout=20).split()[:2] == [b"unix", b"0"]
        command = ["mosquitto_sub", "--unix", str(path), "-t", "a", "-q", "1", "-C", "1", "-W", "30"]
        sub = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        wait_until(lambda: [one["subscriptions"] for one in api(served, "peers")["items"]] == [1], "a subscription")
        assert api(served, "peers")["items"][0]["address"] == "unix"
        served.restart()
        assert "with 1 clients of this one" in served.output
        [local] = [one for one in api(served, "listeners") if one["name"] == "local"]
        assert (local["host"], local["port"], local["loopback"]) == (str(path), 0, True)
        pub = ["mosquitto_pub", "--unix", str(path), "-t", "a", "-q", "1", "-m", "moved"]
        assert subprocess.call(pub, timeout=20) == 0
        assert sub.communicate(timeout=40)[0] == "moved\n"
    assert not path.exists()

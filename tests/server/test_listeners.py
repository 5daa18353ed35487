"""Ports in tables of smqrt.toml: one server behind all, certificates by name, all of it read again while it runs."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from tests.conftest import Served
from tests.support.pki import Authority
from tests.support.waiting import wait_until

Serve = Callable[..., Served]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def application(folder: Path) -> Path:
    folder.mkdir()
    (folder / "index.lsp").write_text("<?lsp print(request:issecure(), request:certificate() ~= nil) ?>")
    (folder / "again.lsp").write_text("<?lsp print(mako.loadcerts()) ?>")
    (folder / "ports.lsp").write_text("<?lsp print(mako.port, mako.sslport) ?>")
    return folder


def shown(port: int, name: str) -> str:
    """The names in the certificate that a client of `openssl s_client` gets for this name."""
    asked = ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", "-servername", name]
    session = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
    told = ["openssl", "x509", "-noout", "-ext", "subjectAltName"]
    return subprocess.run(told, input=session.stdout, capture_output=True, timeout=20).stdout.decode()


@pytest.mark.filterwarnings("ignore:Unverified HTTPS")
def test_listeners_in_tables(serve: Serve, authority: Authority, tmp_path: Path) -> None:
    """From the first start to the last reload, with one server: a start takes longer than all of this."""
    default, site = authority.pair("default", "a.example"), authority.pair("site", "b.example")
    client = authority.pair("client")
    crl = authority.revocation_list(tmp_path / "crl.pem")
    config = tmp_path / "smqrt.toml"
    config.write_text(f"""
[listener.http]
enabled = false
[listener.local]
port = 0
[listener.main]
port = 0
certificates = [["{default[0]}", "{default[1]}"], {{cert = "{site[0]}", key = "{site[1]}"}}]
[listener.devices]
cert = "{default[0]}"
key = "{default[1]}"
client_ca = "{authority.path}"
client_crl = "{crl}"
client_certificate = "required"
minimum_version = "1.3"
""")
    served = serve(
        application(tmp_path / "app"), "--config", config, env={"SMQRT_LISTENER__DEVICES__PORT": "0"}, cwd=tmp_path
    )
    ports = {name: int(served.wait_for(rf"https?://.*:(\d+) \(listener {name}\)$")[1]) for name in ("local", "main")}
    ports["devices"] = int(served.wait_for(r"https://.*:(\d+) \(listener devices\)$")[1])
    assert not [line for line in served.lines if line.endswith(":9357")]
    trusting = {"verify": False, "timeout": 20}
    assert requests.get(f"http://127.0.0.1:{ports['local']}", timeout=20).text == "false\tfalse\n"
    assert requests.get(f"https://127.0.0.1:{ports['main']}", **trusting).text == "true\tfalse\n"
    ours = requests.get(f"https://127.0.0.1:{ports['main']}/ports.lsp", **trusting).text
    assert ours == f"{ports['local']}\t{ports['main']}\n"
    with pytest.raises(requests.exceptions.RequestException):
        requests.get(f"https://127.0.0.1:{ports['devices']}", **trusting)
    served.wait_for("no client certificate")
    mutual = requests.Session()
    mutual.cert = tuple(map(str, client))
    assert mutual.get(f"https://127.0.0.1:{ports['devices']}", **trusting).text == "true\ttrue\n"
    assert "DNS:a.example" in shown(ports["main"], "elsewhere.example")
    assert "DNS:b.example" in shown(ports["main"], "b.example")

    for path, new in zip(site, authority.pair("new", "b.example"), strict=True):
        path.write_bytes(new.read_bytes())
    served.wait_for("certificates reloaded")  # without a word of ours: within two seconds
    authority.revocation_list(crl, client[0])
    served.process.send_signal(signal.SIGHUP)
    wait_until(lambda: served.output.count("certificates reloaded") == 2, served.lines)
    assert mutual.get(f"https://127.0.0.1:{ports['devices']}", **trusting).text == "true\ttrue\n", "who is there stays"
    with pytest.raises(requests.exceptions.RequestException):
        requests.get(f"https://127.0.0.1:{ports['devices']}", cert=mutual.cert, **trusting)
    served.wait_for("certificate revoked")
    site[0].write_text("rubbish")
    served.wait_for("certificates not reloaded: listener.main: .* are not a certificate and its key")
    assert "DNS:b.example" in shown(ports["main"], "b.example")
    admin = served.wait_for(r"^admin at (http://.*/)$")[1]
    facts = {one["name"]: one["tls"] for one in requests.get(f"{admin}api/v1/listeners", timeout=20).json()}
    assert "not a certificate and its key" in facts["main"]["fault"]
    assert [one["names"] for one in facts["main"]["certificates"]] == [["a.example"], ["b.example"]]
    assert facts["devices"]["fault"] is facts["local"] is None
    assert facts["devices"]["handshake_failures"]["no client certificate"] == 1
    metrics = requests.get(f"{admin}metrics", timeout=20).text
    assert 'smqrt_certificate_files_broken{listener="main"} 1.0' in metrics
    assert 'smqrt_certificate_files_broken{listener="devices"} 0.0' in metrics
    said = requests.get(f"http://127.0.0.1:{ports['local']}/again.lsp", timeout=20).text
    assert said.startswith("nil\tlistener.main: ")
    assert len([line for line in served.lines if "not reloaded" in line]) == 1

    text = (
        config.read_text()
        .replace('"required"', '"optional"')
        .replace("port = 0\n[listener.main]", "port = 1\n[listener.main]")
    )
    config.write_text(text)
    site[0].write_bytes(default[0].read_bytes())
    site[1].write_bytes(default[1].read_bytes())
    served.process.send_signal(signal.SIGHUP)
    served.wait_for("settings changed: listener.devices")
    served.wait_for("settings that need a restart to change: listener.local")
    served.wait_for("(?s)settings changed.*certificates reloaded")
    assert requests.get(f"https://127.0.0.1:{ports['devices']}", **trusting).text == "true\tfalse\n"
    assert served.stop() == 0
    assert not [line for line in served.lines if "Traceback" in line]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("[listener.main]\ncert = 'x.pem'\nkey = 'x.key'", "listener.main has no port"),
        ("[listener.main]\nport = 0\ncert = 'x.pem'", "listener.main.cert needs key too"),
        (
            "[listener.main]\nport = 0\ntls = false\ncert = 'x.pem'\nkey = 'x.key'",
            "listener.main has TLS settings, but tls is off",
        ),
        ("[listener.main]\nport = 0\ncert = 'x.pem'\nkey = 'x.key'", "listener.main: cannot read x.pem: No such file"),
        ("[listener.main]\nport = 0\ncertificates = ['x.pem']", "listener.main.certificates must be a list of pairs"),
        ("[listener.main]\nport = 0\nminimum_version = '1.1'", "listener.main.minimum_version must be one of '1.2'"),
        ("[listener.main]\nprot = 0", "did you mean listener.NAME.port"),
        ("[listener.http]\nenabled = false", "no listener is enabled"),
        ("[listener.main]\nport = 0\nclient_ca = 'ca.pem'", "listener.main has TLS settings, but tls is off"),
        (
            "[listener.main]\nport = 0\ncert = 'a'\nkey = 'b'\nalpn = ['h\u00e9']",
            "listener.main.alpn: 'h\u00e9' is not an ALPN name",
        ),
        ("[listener.main]\nport = 0\nhost = '192.0.2.1'", "listener.main: cannot listen on 192.0.2.1:0"),
    ],
)
def test_what_is_wrong_names_its_table(tmp_path: Path, table: str, says: str) -> None:
    from smqrt.errors import StartError
    from smqrt.http.server import HttpServer
    from smqrt.server.listeners import Listeners
    from smqrt.settings.sources import Sources

    config = tmp_path / "smqrt.toml"
    config.write_text(f"port = 0\n{table}\n")
    with pytest.raises(StartError) as raised:
        Listeners(Sources(file=config).read().settings, HttpServer(lambda request: None))  # type: ignore[arg-type]
    assert says in str(raised.value)


def test_an_environment_text_is_a_list_of_certificates() -> None:
    from smqrt.settings.sources import Sources

    variables = {"SMQRT_LISTENER__MAIN__CERTIFICATES": "a.pem:a.key, b.pem:b.key", "SMQRT_LISTENER__MAIN__PORT": "9"}
    table = Sources(environment=variables).read().settings.listener["main"]
    assert table.certificates == (("a.pem", "a.key"), ("b.pem", "b.key"))


def test_the_example_of_the_manual(tmp_path: Path) -> None:
    from importlib import resources

    from smqrt.server.listeners import ports
    from smqrt.settings.sources import Sources

    page = (resources.files("smqrt") / "help" / "tls-server.md").read_text("utf-8")
    config = tmp_path / "smqrt.toml"
    [example] = [one for one in page.split("```") if one.startswith("toml\n") and "devices" in one]
    config.write_text(example.removeprefix("toml\n"))
    asked = {port.name: port for port in ports(Sources(file=config).read().settings)}
    assert asked.keys() == {"main", "devices"}
    assert [Path(cert).name for cert, _ in asked["main"].tls.pairs] == ["example.com.pem", "devices.example.com.pem"]
    devices = asked["devices"].tls
    assert (devices.mode.name, devices.minimum, asked["devices"].max_connections) == ("CERT_REQUIRED", "1.3", 5000)
    assert devices.pairs[0][0].endswith("fullchain.pem")


def test_sessions_resume(serve: Serve, tmp_path: Path) -> None:
    """By tickets and by numbers, with OpenSSL's own client, also across a reload."""
    served = serve(application(tmp_path / "app"), "--tls-port", "0", env={"XDG_CACHE_HOME": str(tmp_path)})
    where = ["openssl", "s_client", "-connect", f"127.0.0.1:{served.tls_port}"]

    def reused(*arguments: str) -> list[str]:
        request = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
        said = subprocess.run([*where, *arguments], input=request, capture_output=True, timeout=20).stdout.decode()
        return [line.split(",")[0] for line in said.splitlines() if line.startswith(("New,", "Reused,"))]

    for version in (["-tls1_2"], ["-tls1_2", "-no_ticket"]):
        assert reused(*version, "-reconnect") == ["New"] + 5 * ["Reused"], version
    files = {"-tls1_2": str(tmp_path / "old"), "-tls1_3": str(tmp_path / "new")}
    assert [reused(version, "-ign_eof", "-sess_out", kept)[0] for version, kept in files.items()] == ["New", "New"]
    served.process.send_signal(signal.SIGHUP)
    served.wait_for("certificates reloaded")
    again = [reused(version, "-ign_eof", "-sess_in", kept)[0] for version, kept in files.items()]
    assert again == ["Reused", "Reused"]

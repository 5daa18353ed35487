"""HTTP clients in Lua and TLS: whom they trust, what they show."""

from __future__ import annotations

import pytest
import trustme
from gevent.server import StreamServer

from tests.apps.lua.app_server import AppServer
from tests.support.pki import expired, gevent_context, identity_of
from tests.support.scripted_http import ScriptedHttp, answer

TRUSTING = """
    local home = ba.openio"home"
    local store = ba.create.certstore()
    assert(store:addcert(home, "ca.pem"))
    shark = ba.create.sharkssl(store)
    http = require"httpc".create{shark = shark}
"""
ASK = """
    print(http:request{url = "{url}", trusted = {trusted}, user = "me", password = "secret"})
    if http:status() then print(http:status(), http:trusted()) end
"""


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


def run(server: AppServer, ca: trustme.CA, code: str) -> list[str]:
    ca.cert_pem.write_to_path(server.folder / "ca.pem")
    reply = server.page(f"<?lsp {code} ?>")
    assert reply.status == 200, reply.text
    return reply.text.splitlines()


def ask(server: AppServer, ca: trustme.CA, port: int, host: str = "localhost", trusted: bool = False) -> list[str]:
    code = TRUSTING + ASK.replace("{url}", f"https://{host}:{port}").replace("{trusted}", str(trusted).lower())
    return run(server, ca, code)


@pytest.mark.parametrize("make", ["good", "expired", "foreign", "misnamed", "nothing"])
def test_trust_settings(server: AppServer, ca: trustme.CA, make: str) -> None:
    leaf, word = {
        "good": (ca.issue_cert("localhost"), None),
        "expired": (expired(ca, "localhost"), "certcn"),
        "foreign": (trustme.CA().issue_cert("localhost"), "cn"),
        "misnamed": (ca.issue_cert("elsewhere.example"), "cert"),
        "nothing": (trustme.CA().issue_cert("elsewhere.example"), "none"),
    }[make]
    with ScriptedHttp([answer(b"x")], context=gevent_context(leaf)) as scripted:
        trusted = "true" if word is None else f"nil\t{word}"
        assert ask(server, ca, scripted.port) == ["true", f"200\t{trusted}"]
        heads = len(scripted.heads)
        assert heads == 1
        if word is None:
            assert ask(server, ca, scripted.port, trusted=True) == ["true", "200\ttrue"]
        else:
            assert ask(server, ca, scripted.port, trusted=True) == [f"nil\tsslnottrusted\t{word}"]
            assert len(scripted.heads) == heads, "a request went to somebody who is not trusted"


@pytest.mark.parametrize("trusted", [True, False])
def test_a_redirect_that_leaves_tls(server: AppServer, ca: trustme.CA, trusted: bool) -> None:
    context = gevent_context(ca.issue_cert("localhost"))
    with ScriptedHttp([answer(b"plain")]) as plain:
        away = answer(b"", "302 Found", f"Location: {plain.url}/")
        with ScriptedHttp([away], context=context) as scripted:
            code = (
                TRUSTING.replace("httpc", "http")
                + """
                http:request{url = "{url}", trusted = {trusted}}
                print(http:status())
            """.replace("{url}", f"https://localhost:{scripted.port}").replace("{trusted}", str(trusted).lower())
            )
            lines = run(server, ca, code)
        assert lines[0].startswith("nil\tsslnotenabled\t" if trusted else "200")
        assert plain.connections == (0 if trusted else 1)


def test_trusted_and_an_address_without_tls(server: AppServer, ca: trustme.CA) -> None:
    with ScriptedHttp([answer(b"plain")]) as plain:
        code = f"""print(require"httpc".create():request{{url = "{plain.url}", trusted = true}})"""
        assert run(server, ca, code)[0].startswith("nil\tsslnotenabled\thttp://127.0.0.1")
        assert plain.connections == 0


def test_the_default_client_uses_the_system_trust_store(server: AppServer, ca: trustme.CA) -> None:
    with ScriptedHttp([answer(b"x")], context=gevent_context(ca.issue_cert("localhost"))) as scripted:
        code = """
            for _, op in ipairs{{}, {shark = ba.sharkclient()}} do
                local http = require"httpc".create(op)
                print(http:request{url = "{url}"}, http:status(), http:trusted())
            end
        """
        lines = run(server, ca, code.replace("{url}", f"https://localhost:{scripted.port}"))
    assert lines == ["true\t200\tnil\tcn"] * 2


def test_names_and_addresses(server: AppServer, ca: trustme.CA) -> None:
    with ScriptedHttp([answer(b"x")], context=gevent_context(ca.issue_cert("127.0.0.1", "device.example"))) as scripted:
        assert ask(server, ca, scripted.port, "127.0.0.1") == ["true", "200\ttrue"]
        assert ask(server, ca, scripted.port, "localhost") == ["true", "200\tnil\tcert"]
        code = (
            TRUSTING
            + """
            http = require"httpc".create{shark = shark, host = "device.example"}
            print(http:request{url = "{url}", trusted = true}, http:status())
        """
        )
        assert run(server, ca, code.replace("{url}", f"https://127.0.0.1:{scripted.port}")) == ["true\t200"]
    assert "Host: device.example" in scripted.heads[-1]


def test_certificate_and_cipher(server: AppServer, ca: trustme.CA) -> None:
    with ScriptedHttp([answer(b"x")], context=gevent_context(ca.issue_cert("localhost"))) as scripted:
        code = (
            TRUSTING
            + ASK
            + """
            local cert = http:certificate()
            print(cert.subjectaltnames[1], cert.issuer.organization, cert.tzto > cert.tzfrom, #cert.serial > 0)
            print(select(2, http:cipher()))
        """
        )
        code = code.replace("{url}", f"https://localhost:{scripted.port}").replace("{trusted}", "false")
        lines = run(server, ca, code)
    assert lines[2].startswith("localhost\ttrustme v")
    assert lines[2].endswith("true\ttrue")
    assert lines[3] == "TLSv1.3"


def test_client_certificates(server: AppServer, ca: trustme.CA) -> None:
    devices = trustme.CA()
    device = identity_of(devices.issue_cert("device-1"))
    (server.folder / "device.pem").write_bytes(device.certificate)
    (server.folder / "device.key").write_bytes(device.key)
    show = """
        shark:addcert(assert(ba.create.sharkcert(home, "device.pem", "device.key")))
    """
    context = gevent_context(ca.issue_cert("localhost"), devices)
    with ScriptedHttp([answer(b"x")], context=context) as scripted:
        asking = ASK.replace("{url}", f"https://localhost:{scripted.port}").replace("{trusted}", "true")
        assert run(server, ca, TRUSTING + show + asking) == ["true", "200\ttrue"]
        url = f"https://localhost:{scripted.port}"
        without = run(server, ca, TRUSTING + f'print(http:request{{url = "{url}"}}) print(http:status())')
    assert without[-1].split("\t")[:2] == ["nil", "sslalertrecv"]  # TLS 1.3 tells it behind the handshake


def test_a_client_without_tls(server: AppServer, ca: trustme.CA) -> None:
    mail = StreamServer(("127.0.0.1", 0), lambda client, _address: client.sendall(b"220 mail.example ESMTP"))
    mail.start()
    code = f"""print(require"httpc".create():request{{url = "https://localhost:{mail.server_port}"}})"""
    assert run(server, ca, code)[0].split("\t")[:2] == ["nil", "sslhandshake"]
    mail.stop(0)

"""TLS objects for Lua, and the certificate that every server has."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme

from smqrt.transport.tls_contexts import ClientTls, ServerTls
from tests.apps.lua.app_server import AppServer
from tests.support.pki import identity_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(server: AppServer, code: str) -> str:
    answer = server.page(f"<?lsp {code} ?>")
    assert answer.status == 200, answer.text
    return answer.text


def write_pair(server: AppServer, leaf: trustme.LeafCert) -> None:
    identity = identity_of(leaf)
    (server.folder / "cert.pem").write_bytes(identity.certificate)
    (server.folder / "cert.key").write_bytes(identity.key)


def test_the_certificate_that_is_always_there(server: AppServer) -> None:
    code = """
        local vm = ba.openio"vm"
        local pem, key = ".certificate/MakoServer.pem", ".certificate/MakoServer.key"
        local cert = assert(ba.create.sharkcert(vm, pem, key, "sharkssl"))
        local tls = ba.create.sharkssl(nil, {server = true})
        assert(tls:addcert(cert))
        print(type(cert), type(tls), tostring(vm:stat(".certificate").isdir), vm:resourcetype())
        for name in vm:files(".certificate") do print(name) end
        print(vm:open(".certificate/none"))
        print(vm:open(".certificate/MakoServer.pem", "w"))
        local parsed = ba.parsecert(vm:open(".certificate/MakoServer.pem"):read"a")
        print(parsed.commonname, parsed.subject.commonname, parsed.issuer.commonname, parsed.subjectaltnames[1])
        keep = tls
    """
    lines = run(server, code).splitlines()
    assert lines[0] == "userdata\tuserdata\ttrue\tvm\tlinux"
    assert lines[1:3] == ["MakoServer.key", "MakoServer.pem"]
    assert lines[3:5] == ["nil\tnotfound", "nil\tnoaccess"]
    assert lines[5] == "\t".join(["smqrt self-signed"] * 3 + ["localhost"])


def test_what_python_gets(server: AppServer) -> None:
    write_pair(server, trustme.CA().issue_cert("a.example"))
    code = """
        local home = ba.openio"home"
        local store = ba.create.certstore()
        print(store:addcert(home, "cert.pem"))
        local cert = ba.create.sharkcert(home, "cert.pem", "cert.key")
        kept = {ba.sharkclient(), ba.create.sharkssl(store), ba.create.sharkssl(store, {server = true})}
        kept[2]:addcert(cert) kept[3]:addcert(cert)
        _G.kept = kept
        print(ba.sharkclient() == kept[1])
    """
    assert run(server, code) == "1\ntrue\n"
    tls = list(server.services.tls.values())
    assert [type(one) for one in tls] == [ClientTls, ClientTls, ServerTls]
    assert tls[2].context().verify_mode is ssl.CERT_OPTIONAL
    assert len(tls[1].identities) == 1
    server.vm.eval("_G.kept = nil collectgarbage() collectgarbage()")
    assert len(server.services.tls) == 1  # the default client stays


def test_failures(server: AppServer) -> None:
    write_pair(server, trustme.CA().issue_cert("a.example"))
    (server.folder / "rubbish.pem").write_text("rubbish")
    code = """
        local home = ba.openio"home"
        print(ba.create.sharkcert(home, "none.pem", "cert.key"))
        print(ba.create.sharkcert(home, "cert.pem", "none.key"))
        print(ba.create.sharkcert(home, "rubbish.pem", "cert.key"))
        print(ba.create.certstore():addcert(home, "rubbish.pem"))
        print(ba.create.certstore():addcert(home, "none.pem"))
        print(ba.parsecert("rubbish"))
        print(pcall(ba.create.sharkssl, "store"))
        print(pcall(ba.create.sharkssl().addcert, ba.create.sharkssl(), home))
    """
    lines = run(server, code).splitlines()
    assert lines[:2] == ["nil\tnotfound", "nil\tnotfound"]
    assert lines[2].startswith("nil\tfailed\tnot a certificate and its key")
    assert lines[3].startswith("nil\tfailed\tnot a certificate")
    assert lines[4:6] == ["nil\tnotfound", "nil"]
    assert "bad argument #1 to 'sharkssl' (certstore expected, got string)" in lines[6]
    assert "bad argument #2 to 'addcert' (sharkcert expected, got userdata)" in lines[7]

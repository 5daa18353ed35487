"""ba.create.servcon: an application opens ports of its own."""

from __future__ import annotations

import socket as plain_socket
from pathlib import Path

import pytest

from tests.apps.lua.app_server import AppServer

OPEN = """
    local vm = ba.openio"vm"
    local cert = ba.create.sharkcert(vm, ".certificate/MakoServer.pem", ".certificate/MakoServer.key")
    local tls = ba.create.sharkssl(nil, {server = true})
    tls:addcert(cert)
    local function get(url)
        local http = require"httpc".create()
        local ok, err = http:request{url = url}
        if not ok then return err end
        return http:status(), http:read"a"
    end
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(server: AppServer, code: str) -> list[str]:
    server.write("", {"secure.lsp": "<?lsp print(request:issecure()) ?>"})
    reply = server.page(f"<?lsp {OPEN} {code} ?>")
    assert reply.status == 200, reply.text
    return reply.text.splitlines()


def test_plain_then_tls_on_the_same_port(server: AppServer) -> None:
    code = """
        local con = ba.create.servcon(0, {intf = "127.0.0.1"})
        local port = con:port()
        print(type(con), get("http://127.0.0.1:" .. port .. "/secure.lsp"))
        local safe = ba.create.servcon(con, {intf = "127.0.0.1", shark = tls})
        print(safe:port() == port, con:port(), get("https://127.0.0.1:" .. port .. "/secure.lsp"))
        print(safe:close(), safe:close(), get("https://127.0.0.1:" .. port .. "/secure.lsp"))
        print(pcall(ba.create.servcon, con))
    """
    lines = [line for line in run(server, code) if line]
    assert lines[:2] == ["userdata\t200\tfalse", "true\tnil\t200\ttrue"]
    assert lines[2] == "true\tfalse\tcannotconnect"
    assert "the port was closed" in lines[3]


def test_failures(server: AppServer) -> None:
    with plain_socket.create_server(("127.0.0.1", 0)) as taken:
        code = f"""
            print(ba.create.servcon({taken.getsockname()[1]}, {{intf = "127.0.0.1"}}))
            print(pcall(ba.create.servcon, 0, {{shark = ba.sharkclient()}}))
            print(pcall(ba.create.servcon, "http"))
        """
        lines = run(server, code)
    assert lines[0].startswith("nil\tbind\t")
    assert "TLS server expected" in lines[1]
    assert "number expected, got string" in lines[2]


def test_a_port_that_is_forgotten_closes(server: AppServer) -> None:
    port = int(run(server, 'con = ba.create.servcon(0, {intf = "127.0.0.1"}) print(con:port())')[0])
    run(server, "con = nil collectgarbage() collectgarbage()")
    with pytest.raises(ConnectionRefusedError):
        plain_socket.create_connection(("127.0.0.1", port))

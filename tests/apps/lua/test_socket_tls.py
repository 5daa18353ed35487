"""TLS on the sockets of Lua: from the start, by upgrade, as a server; whom to trust."""

from __future__ import annotations

import ssl
from typing import Any

import gevent
import gevent.ssl
import pytest
import trustme
from gevent import socket

from smqrt.apps.lua.vm import Services, Vm
from tests.apps.lua.recorder import Recorder
from tests.support.pki import client_of, expired, gevent_context, server_of
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def services(authority: trustme.CA) -> Services:
    services = Services()
    services.tls[1001] = client_of(authority)
    services.tls[1002] = server_of(authority.issue_cert("localhost", "127.0.0.1"), authority)
    return services


PRELUDE = """
local function object(number, side)
  local made = ba.create.sharkssl(nil, side == "server" and {server = true} or nil)
  made.handle = number
  return made
end
client, server = object(1001, "client"), object(1002, "server")
"""


@pytest.fixture
def objects(vm: Vm) -> None:
    vm.eval(PRELUDE)


class Echo:
    """A TLS server that echoes once what comes before and behind the handshake."""

    def __init__(self, leaf: trustme.LeafCert, start: bool = False, *authorities: trustme.CA) -> None:
        self.sock = socket.socket()
        self.sock.bind(("127.0.0.1", 0))
        self.sock.listen(5)
        self.port: int = self.sock.getsockname()[1]
        self.context = gevent_context(leaf, *authorities)
        self.context.set_alpn_protocols(["smqrt"])
        self.client_name: Any = None
        self.serving = gevent.spawn(self._serve, start)

    def _serve(self, is_upgrade: bool) -> None:
        peer, _ = self.sock.accept()
        if is_upgrade:
            peer.sendall(peer.recv(100) + b" ok")
        try:
            secure = self.context.wrap_socket(peer, server_side=True)
        except OSError:
            return
        self.client_name = secure.getpeercert()
        while data := secure.recv(65536):
            secure.sendall(data)
        secure.close()


def test_connect_with_tls(vm: Vm, objects: None, authority: trustme.CA) -> None:
    server = Echo(authority.issue_cert("localhost", "127.0.0.1"))
    vm.eval(
        """
        local s <close> = assert(ba.socket.connect("localhost", ..., {shark = client, alpn = {"other", "smqrt"}}))
        assert(s:write("secret") and s:read() == "secret")
        assert(s:trusted() == true and s:trusted("127.0.0.1") == true)
        assert(select(2, s:trusted("other.example")) == "cert")
        local cipher, version = s:cipher()
        assert(#cipher > 5 and version == "TLSv1.3" and s:alpn() == "smqrt" and s:isresumed() == false)
        assert(s:certificate().issuer ~= nil)
        local big = ("0123456789"):rep(200000)
        ba.thread.run(function() s:write(big) end)
        local got, size = {}, 0
        while size < #big do
          local data = assert(s:read(5000))
          got[#got + 1], size = data, size + #data
        end
        assert(table.concat(got) == big)
        """,
        "=t",
        server.port,
    )


@pytest.mark.parametrize(
    ("make", "name", "word"),
    [
        (lambda ca: expired(ca, "localhost"), "localhost", b"certcn"),
        (lambda ca: ca.issue_cert("other.example"), "localhost", b"cert"),
        (lambda ca: trustme.CA().issue_cert("localhost"), "localhost", b"cn"),
        (lambda ca: trustme.CA().issue_cert("other.example"), "localhost", b"none"),
    ],
)
def test_trusted_says_what_is_wrong(
    vm: Vm, objects: None, authority: trustme.CA, make: Any, name: str, word: bytes
) -> None:
    server = Echo(make(authority))
    source = 'local s <close> = assert(ba.socket.connect("localhost", ..., {shark = client})) return s:trusted()'
    assert vm.eval(source, "=t", server.port) == (None, word)


@pytest.mark.parametrize("as_cosocket", [False, True])
def test_upgrade(vm: Vm, objects: None, authority: trustme.CA, recorder: Recorder, as_cosocket: bool) -> None:
    server = Echo(authority.issue_cert("localhost"), True)
    vm.eval(
        """
        local port, as_cosocket = ...
        local function talk(s)
          s:write("STARTTLS")
          assert(s:read() == "STARTTLS ok")
          assert(not pcall(s.upgrade, s, client, {{}}) and s:upgrade(client, "smqrt") == true and s:alpn() == "smqrt")
          assert(select(2, s:upgrade(client)) == "incorrectuse")
          s:write("secret")
          assert(s:read() == "secret" and s:trusted("localhost") == true)
          test.record("done")
        end
        local s = ba.socket.connect("localhost", port)
        if as_cosocket then s:event(talk, "s") else talk(s) s:close() end
        """,
        "=t",
        server.port,
        as_cosocket,
    )
    wait_until(lambda: recorder.seen)


def test_failed_handshakes_are_words_and_close(vm: Vm, objects: None) -> None:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(5)

    def answer_nonsense() -> None:
        peer, _ = sock.accept()
        peer.sendall(b"220 no TLS here\r\n")

    gevent.spawn(answer_nonsense)
    result = vm.eval(
        """
        local s = ba.socket.connect("127.0.0.1", ...)
        local ok, word, reason = s:upgrade(client)
        return ok, word, type(reason), s:write("x")
        """,
        "=t",
        sock.getsockname()[1],
    )
    assert result == (None, b"sslhandshake", b"string", None, b"socketclosed")


def test_a_tls_server(vm: Vm, objects: None, authority: trustme.CA, recorder: Recorder) -> None:
    port = vm.eval(
        """
        local l = ba.socket.bind(0, {shark = server, intf = "127.0.0.1"})
        l:event(function()
          while true do
            local s = l:accept()
            if not s then break end
            s:event(function(me)
              test.record(me:trusted())
              local data = me:read()
              me:write(data .. "!")
              test.record(me:read())
            end, "s")
          end
        end)
        return select(2, l:sockname())
        """
    )[0]
    silent = socket.create_connection(("127.0.0.1", port))
    context = gevent.ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=authority.cert_pem.bytes().decode())
    secure = context.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname="localhost")
    secure.sendall(b"hi")
    assert secure.recv(100) == b"hi!"
    secure.unwrap()
    secure.close()
    silent.close()
    wait_until(lambda: len(recorder.seen) >= 2)
    assert recorder.seen == [(None, b"none"), (None, b"sslclosenotify")]


def test_arguments(vm: Vm, objects: None) -> None:
    for source in (
        "ba.socket.connect('localhost', 1, {shark = server})",
        "ba.socket.bind(0, {shark = client})",
        "ba.socket.connect('localhost', 1, {shark = {}})",
    ):
        assert vm.eval(f"return pcall(function() return {source} end)")[0] is False

"""ba.tpm on the key file: keys that stay, certificates, tokens, and encrypted user databases."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from gevent import socket, ssl

from smqrt.apps.lua import api
from smqrt.apps.lua.vm import Services, Vm
from smqrt.crypto.keyfile import MAX_KEYS, KeyFile, default_path
from smqrt.errors import CryptoError
from tests.apps.lua.app_server import AppServer


@pytest.fixture
def services(tmp_path: Path) -> Services:
    return Services(key_file=tmp_path / "own" / "tpm.key")


def again(services: Services) -> Vm:
    """Another runtime, as after a restart."""
    machine = Vm()
    api.install(machine, Services(key_file=services.key_file))
    return machine


def test_derived_keys_stay_and_differ(vm: Vm, services: Services) -> None:
    source = """local t = ba.tpm
    return t.uniquekey("a", 32), t.uniquekey("a", 16), t.uniquekey("b", 32), t.globalkey("a", 32)"""
    first = vm.eval(source)
    assert [len(key) for key in first if isinstance(key, bytes)] == [32, 16, 32, 32]
    assert len({key[:16] for key in first if isinstance(key, bytes)}) == 3
    assert again(services).eval(source) == first
    assert services.key_file
    assert services.key_file.stat().st_mode & 0o777 == 0o600
    assert services.key_file.parent.stat().st_mode & 0o777 == 0o700


def test_globalkey_is_that_of_machines_with_the_same_secret(vm: Vm, services: Services, tmp_path: Path) -> None:
    source = 'return ba.tpm.globalkey("a", 32), ba.tpm.uniquekey("a", 32)'
    shared, unique = vm.eval(source)
    assert services.key_file
    other = KeyFile(tmp_path / "other.json")
    other.load()
    content = json.loads(other.path.read_text())
    content["global"] = json.loads(services.key_file.read_text())["global"]
    other.path.write_text(json.dumps(content))
    machine = Vm()
    api.install(machine, Services(key_file=other.path))
    theirs = machine.eval(source)
    assert theirs[0] == shared
    assert theirs[1] != unique


def test_named_keys(vm: Vm, services: Services) -> None:
    vm.eval("""
    local t = ba.tpm
    assert(t.haskey "k" == false)
    assert(select(2, t.sign("k", "x")) == "notfound" and select(2, t.keyparams "k") == "notfound")
    assert(select(2, t.createcsr("k", {commonname = "x"})) == "notfound")
    assert(select(2, t.jwtsign("k", {})) == "notfound")
    assert(t.createkey "k" == true and t.haskey "k" == true)
    assert(select(2, t.createkey "k") == "exist")
    local x, y = t.keyparams "k"
    for _, signature in ipairs {t.sign("k", "text"), t.sign("text", "k")} do
      assert(ba.crypto.verify("text", signature, {x = x, y = y}))
    end
    for _, token in ipairs {t.jwtsign("k", {sub = "me"}, {kid = "1"}), t.jwtsign({sub = "me"}, "k", {kid = "1"})} do
      local header, payload = require "jwt".verify(token, {x = x, y = y})
      assert(header.alg == "ES256" and header.kid == "1" and payload.sub == "me")
    end
    assert(t.createkey("r", {key = "rsa", bits = 1024}) and #t.keyparams "r" == 128)
    """)
    assert again(services).eval('return ba.tpm.haskey "k", ba.tpm.haskey "r", ba.tpm.haskey "z"') == (True, True, False)


def test_certificates_for_keys(vm: Vm) -> None:
    vm.eval("""
    local t = ba.tpm
    t.createkey "device"
    local csr = assert(t.createcsr("device", {commonname = "device 7"}, {"SSL_CLIENT"}, {}, "d.local"))
    local ca = ba.create.key()
    local root = ba.create.certificate(ba.create.csr(ca, {commonname = "root"}, {"SSL_CA"}), ca)
    local certificate = assert(ba.create.certificate(csr, root, ca))
    assert(ba.parsecert(certificate).commonname == "device 7")
    assert(ba.crypto.keyparams(certificate) == t.keyparams "device")
    local cert = assert(t.sharkcert("device", certificate))
    assert(ba.create.sharkssl(nil, {server = true}):addcert(cert))
    assert(select(2, t.sharkcert("device", root)) == "failed")     -- not of this key
    assert(ba.create.sharkcert(root, ca) and not ba.create.sharkcert(certificate, ca))
    assert(select(2, t.sharkcert("none", root)) == "notfound")
    """)


WRONG = """
for call in ([[uniquekey() | uniquekey('a') | uniquekey('a', 0) | uniquekey('a', 9000) | globalkey({}, 1) | haskey() |
    createkey() | createkey('a', 'rsa') | createkey('a', {bits = 1}) | createkey('') | jsonuser() | jsonuser('a', 1) |
    jsonuser('a').setuser() | jsonuser('a').setuser('b', 1 == 1) | jsonuser('a').setdb()]]):gmatch "[^|]+" do
  local ok, message = pcall(load("local _ = ba.tpm." .. call, "=call"))
  assert(not ok and (message:find "bad argument" or message:find "1 to " or message:find "1024 to"), call)
end"""


def test_users_in_an_encrypted_database(vm: Vm, services: Services, server: AppServer) -> None:
    server.services.key_file = services.key_file
    server.app({".preload": "users = ba.tpm.jsonuser('db', false)"}, "one")
    page = """<?lsp
    local t = ba.tpm.jsonuser("db", false)
    assert(#t.users() == 0)
    local db = t.setuser("anna", "secret")
    assert(type(db) == "string" and not db:find "[^%w_-]")
    db = t.setuser("bert", {pwd = "other", roles = {"admin"}})
    assert(table.concat(t.users(), " ") == "anna bert")
    assert(t.getauth():getpwd "anna" == "secret" and t.getauth():getpwd "bert" == "other")
    local other = ba.tpm.jsonuser("db", false)
    assert(other.setdb(db) == true and other.getauth():getpwd "anna" == "secret")
    assert(other.setuser "anna" and table.concat(other.users(), " ") == "bert")
    assert(not other.getauth():getpwd "anna")
    for _, wrong in ipairs {"", "x", db:sub(1, -5), "A" .. db:sub(2), ba.b64urlencode(("x"):rep(100))} do
      local ok, word = other.setdb(wrong)
      assert(ok == nil and word == "failed" and other.users()[1] == "bert")
    end
    assert(select(2, ba.tpm.jsonuser("db", true).setdb(db)) == "failed")   -- another key
    assert(select(2, ba.tpm.jsonuser("other").setdb(db)) == "failed")
    assert(type(ba.create.authenticator(t.getauth(), {type = "basic"})) == "userdata")
    assert(t.setuser("anna", {pwd = true}) == nil and t.getauth():getpwd "anna" == "secret")
    WRONG
    print "done" ?>"""
    answer = server.page(page.replace("WRONG", WRONG))
    assert answer.text == "done\n", answer.text


def test_a_key_file_that_can_not_be_used(vm: Vm, services: Services) -> None:
    assert services.key_file
    services.key_file.parent.mkdir()
    for text, mode, word in (
        ("{}", 0o600, b"ioerror"),
        ("junk", 0o600, b"ioerror"),
        ('{"unique": "", "global": "", "keys": {}}', 0o600, b"ioerror"),
        ("{}", 0o644, b"noaccess"),
    ):
        services.key_file.write_text(text)
        services.key_file.chmod(mode)
        for call in ('uniquekey("a", 16)', 'haskey "a"', 'createkey "a"', 'sign("a", "b")', 'jsonuser "a"'):
            answer = vm.eval(f"return ba.tpm.{call}")
            assert answer[:2] == (None, word)
            assert str(services.key_file).encode() in (answer[2] or b"")  # type: ignore[operator]
        assert services.key_file.read_text() == text  # never written over
    services.key_file.unlink()
    assert vm.eval('return ba.tpm.haskey "a"') == (False,)


def test_concurrent_changes_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tpm.key"
    KeyFile(path).load()

    def add(first: int) -> None:
        for number in range(first, first + 10):
            KeyFile(path).add(f"key{number}", b"PEM")

    threads = [threading.Thread(target=add, args=(first,)) for first in (0, 10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    file = KeyFile(path)
    assert all(file.has(f"key{number}") for number in range(30))


def test_limits_and_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert KeyFile().path == default_path() == tmp_path / "smqrt" / "tpm.key"
    file = KeyFile()
    file.load()
    content = json.loads(file.path.read_text())
    content["keys"] = {str(number): "PEM" for number in range(MAX_KEYS)}
    file.path.write_text(json.dumps(content))
    with pytest.raises(CryptoError) as caught:
        file.add("one more", b"PEM")
    assert caught.value.word == "nospace"
    assert sorted(os.listdir(file.path.parent)) == [".tpm.key.lock", "tpm.key"]


def test_the_file_is_never_served(server: AppServer, tmp_path: Path) -> None:
    """Not even where somebody puts it among what is served."""
    server.services.key_file = server.write("", {"page.lsp": "<?lsp ba.tpm.createkey 'a' print 'made' ?>"}) / "tpm.key"
    server.app({})
    assert server.ask("/page.lsp").text == "made\n"
    assert server.services.key_file.exists()
    for name in os.listdir(server.services.key_file.parent):
        assert server.ask(f"/{name}").status == (200 if name == "page.lsp" else 404), name


def test_a_server_with_a_key_of_the_key_file(server: AppServer, services: Services, tmp_path: Path) -> None:
    """Its certificate and that of the authority are made in Lua; a client of Python's own checks them."""
    server.services.key_file = services.key_file
    page = """<?lsp
    local ca = ba.create.key()
    local root = ba.create.certificate(ba.create.csr(ca, {CN = "root"}, {"SSL_CA"}, {"KEY_CERT_SIGN"}), ca)
    ba.tpm.createkey "server"
    local csr = ba.tpm.createcsr("server", {CN = "gate"}, {"SSL_SERVER"}, {"DIGITAL_SIGNATURE"}, "localhost 127.0.0.1")
    local tls = ba.create.sharkssl(nil, {server = true})
    tls:addcert(assert(ba.tpm.sharkcert("server", assert(ba.create.certificate(csr, root, ca)))))
    connection = ba.create.servcon(0, {intf = "127.0.0.1", shark = tls})
    app.connection = connection
    response:json{root = root, port = connection:port()} ?>"""
    made = json.loads(server.page(page).body)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on
    context.load_verify_locations(cadata=made["root"])
    with (
        socket.create_connection(("127.0.0.1", made["port"]), timeout=5) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as client,
    ):
        client.sendall(b"GET /none.html HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 404")

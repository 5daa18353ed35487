"""`require "acme/engine"` against a scripted authority that really looks at the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from smqrt.apps.lua.api import crypto
from tests.apps.lua.app_server import AppServer
from tests.support.acme_authority import AcmeAuthority, Problem
from tests.support.waiting import wait_until

PRELOAD = """
acme, told = require "acme/engine", {}
account = {email = "root@example.com", directory = "DIRECTORY"}
function order(name, op)
  return acme.cert(account, name, function(key, cert) told[#told + 1] = {key or "", cert} end, op)
end
"""


class Lua:
    """An application with `order(name, op)`, and what its callbacks were told."""

    def __init__(self, server: AppServer, authority: AcmeAuthority) -> None:
        self.server, self.authority = server, authority
        authority.looks_at(server.port, 0)
        application = server.app({".preload": PRELOAD.replace("DIRECTORY", authority.url)})
        assert application.error is None, application.error

    def run(self, source: str) -> str:
        self.server.write("", {"run.lsp": f"<?lsp {source} ?>"})
        return self.server.ask("/run.lsp").text

    def told(self, count: int) -> list[tuple[bytes, bytes]]:
        """What the callbacks got, behind so many calls."""
        page = "<?lsp response:write(#app.told) ?>"
        self.server.write("", {"count.lsp": page})
        wait_until(lambda: int(self.server.ask("/count.lsp").text) >= count, "the callbacks")
        source = "for _, one in ipairs(app.told) do response:write(one[1], '|', one[2], '\\0') end"
        self.server.write("", {"told.lsp": f"<?lsp {source} ?>"})
        rows = self.server.ask("/told.lsp").body.split(b"\0")[:-1]
        return [(row.partition(b"|")[0], row.partition(b"|")[2]) for row in rows]


@pytest.fixture
def authority(tmp_path: Path) -> Iterator[AcmeAuthority]:
    made = AcmeAuthority(tmp_path)
    yield made
    made.close()


@pytest.fixture
def lua(server: AppServer, authority: AcmeAuthority) -> Lua:
    return Lua(server, authority)


def names_of(chain: bytes) -> list[str]:
    extensions = x509.load_pem_x509_certificates(chain)[0].extensions
    return extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)


def test_a_certificate_is_ordered(lua: Lua) -> None:
    assert lua.run("response:write(tostring(app.order'example.com'), app.acme.jobs())") == "true1"
    [(key, chain)] = lua.told(1)
    assert names_of(chain) == ["example.com"]
    public = load_pem_private_key(key, None).public_key()
    assert x509.load_pem_x509_certificates(chain)[0].public_key() == public
    assert lua.authority.counts["http-01 verified"] == 1
    assert lua.run("response:write(app.acme.jobs(), app.account.id, app.account.key)").startswith(
        f"0{lua.authority.base}"
    )


def test_orders_wait_for_one_another_and_share_the_account(lua: Lua) -> None:
    lua.run("for _, name in ipairs{'a.example', 'b.example', 'c.example'} do app.order(name) end")
    assert [names_of(chain) for _, chain in lua.told(3)] == [["a.example"], ["b.example"], ["c.example"]]
    assert len(lua.authority.contacts) == 1


def test_a_kept_account_and_an_own_key(lua: Lua) -> None:
    lua.run("app.order'a.example'")
    lua.told(1)
    lua.run("app.key = ba.create.key() app.order('b.example', {privkey = app.key})")
    key, chain = lua.told(2)[1]
    assert names_of(chain) == ["b.example"]
    assert key.decode() == lua.run("response:write(app.key)")
    assert lua.authority.counts["newAccount"] == 1


def test_a_refusal_is_reported(lua: Lua) -> None:
    lua.authority.refusals["newOrder"] = [Problem("rejectedIdentifier", "not this one")]
    lua.run("app.order'example.com'")
    [(key, message)] = lua.told(1)
    assert key == b""
    assert b"rejectedIdentifier: not this one" in message


def test_a_failing_callback_does_not_block_orders(lua: Lua, caplog: pytest.LogCaptureFixture) -> None:
    lua.run("app.acme.cert(app.account, 'a.example', function() error'on purpose' end) app.order'b.example'")
    assert names_of(lua.told(1)[0][1]) == ["b.example"]
    assert "the callback of acme.cert failed: run.lsp:1: on purpose" in caplog.text


def test_what_was_answered_before_is_answered_still(lua: Lua) -> None:
    """The setting tls.acme of the same server."""
    lua.server.server.challenge_answer = lambda path: b"of the setting" if path.endswith("/theirs") else None
    lua.run("app.order'example.com'")
    lua.told(1)
    assert lua.server.ask("/.well-known/acme-challenge/theirs").text == "of the setting"
    assert lua.server.ask("/.well-known/acme-challenge/nobodys").status == 404


def test_where_no_server_could_answer(lua: Lua, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lua.server.services, "http_server", None)
    lua.run("app.order'example.com'")
    assert lua.told(1) == [(b"", b"no HTTP server is running, so the authority can't check the host name")]


def test_a_hundred_orders_may_wait(lua: Lua, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lua.server.services, "http_server", None)
    text = lua.run(
        "for n = 1, 100 do app.order'a.example' end response:write(select(2, pcall(app.order, 'b.example')))"
    )
    assert text.endswith("acme.cert: limit reached: 100 queued orders")
    assert len(lua.told(100)) == 100
    assert lua.run("response:write(app.acme.jobs())") == "0"


def test_an_authority_that_never_ends(lua: Lua, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crypto, "GIVE_UP_S", 0.1)
    lua.authority.may_verify.clear()
    lua.run("app.order'example.com'")
    assert lua.told(1) == [(b"", b"the order did not finish within 0.1 s")]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("cert()", "bad argument #1 to 'cert' (table expected, got no value)"),
        ("cert({email = true}, 'x', print)", "bad argument #1.email to 'cert' (string expected, got boolean)"),
        ("cert({}, nil, print)", "bad argument #2 to 'cert' (string expected, got no value)"),
        ("cert({}, 'x')", "bad argument #3 to 'cert' (function expected, got no value)"),
        ("cert({}, 'x', print, {privkey = {}})", "bad argument #4.privkey to 'cert' (string expected, got table)"),
        ("cert({}, 'x', print, {ch = {}})", "bad argument #4.ch to 'cert' (names are verified by HTTP-01 only)"),
    ],
)
def test_wrong_arguments(lua: Lua, call: str, message: str) -> None:
    assert message in lua.run(f"response:write(select(2, pcall(function() app.acme.{call} end)))")

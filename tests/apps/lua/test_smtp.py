"""`require "socket.smtp"`: LuaSocket's way to send mail, against a real server and ones that refuse, hang and lie."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smqrt.apps.lua.vm import Vm
from tests.apps.lua.app_server import AppServer
from tests.support.mail_server import Mailbox, ScriptedSmtp

PRELUDE = """
local port = ...
local smtp, mime, ltn12 = require "socket.smtp", require "mime", require "ltn12"
local function send(mail)
  mail.from, mail.rcpt = mail.from or "<ann@example.com>", mail.rcpt or "<bob@example.com>"
  mail.server, mail.port = "127.0.0.1", port
  mail.source = mail.source or smtp.message{headers = {subject = "hello"}, body = "text\\r\\n"}
  return smtp.send(mail)
end
"""


@pytest.fixture(scope="module")
def lua(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vm]:
    folder: Path = tmp_path_factory.mktemp("smtp")
    server = AppServer(folder)
    yield server.vm
    server.close()


def run(lua: Vm, port: int, source: str) -> Any:
    return lua.eval(PRELUDE + source, "=x", port)


def test_a_message_with_parts(lua: Vm) -> None:
    source = r"""
    local steps = 0
    local ok, err = send{
      rcpt = {"<bob@example.com>", "<cy@example.com>"}, domain = "desk.example.com",
      step = function(...) steps = steps + 1 return ltn12.pump.step(...) end,
      source = smtp.message{
        headers = {from = "Ann <ann@example.com>", To = "bob@example.com", subject = "parts", ["x-mine"] = "a\r\n b"},
        body = {
          preamble = "no MIME?",
          {body = ".dot\r\n..two\r\n"},
          {headers = {["content-type"] = 'text/html; charset="utf-8"'}, body = "<b>ü</b>"},
          {headers = {["content-type"] = "image/png", ["content-transfer-encoding"] = "base64",
             ["content-disposition"] = 'attachment; filename="a.png"'},
           body = ltn12.source.chain(ltn12.source.string(("\0\1\2"):rep(30000)),
             ltn12.filter.chain(mime.encode "base64", mime.wrap()))},
          {headers = {["content-type"] = "multipart/alternative"}, body = {{body = "one"}, {body = "two"}}},
          epilogue = "over",
        },
      },
    }
    assert(ok == 1 and err == nil, err)
    assert(steps > 10 and socket.smtp == smtp)"""
    with Mailbox() as server:
        run(lua, server.port, source)
        (envelope,), (mail,) = server.envelopes, server.mails
    assert envelope.mail_from == "ann@example.com"
    assert envelope.rcpt_tos == ["bob@example.com", "cy@example.com"]
    assert (mail["Subject"], mail["X-Mine"], mail["MIME-Version"]) == ("parts", "a b", "1.0")
    assert mail["Date"].datetime
    assert mail.get_content_type() == "multipart/mixed"
    text, html, image, inner = mail.iter_parts()
    assert text.get_content().replace("\r\n", "\n") == ".dot\n..two\n"
    assert html.get_content() == "<b>ü</b>"
    assert image.get_content() == b"\0\1\2" * 30000
    assert image.get_filename() == "a.png"
    assert [part.get_content() for part in inner.iter_parts()] == ["one", "two"]  # type: ignore[attr-defined]
    assert (mail.preamble or "").strip() == "no MIME?"


@pytest.mark.parametrize("mechanism", ["PLAIN", "LOGIN"])
def test_logins(lua: Vm, mechanism: str) -> None:
    with Mailbox(users={"ann": "secret"}, mechanisms=[mechanism]) as server:
        assert run(lua, server.port, "return send{user = 'ann', password = 'secret'}") == (1, None)
        value, word = run(lua, server.port, "return send{user = 'ann', password = 'wrong'}")
        assert value is None
        assert word.startswith(b"535")
        assert len(server.mails) == 1
        assert server.logins[0] == mechanism


def test_a_socket_of_ones_own(lua: Vm) -> None:
    source = """
    local made
    local ok = send{create = function()
      made = socket.tcp()
      return made
    end}
    assert(ok == 1 and made)
    return send{create = function() return nil, "no socket" end}"""
    with Mailbox() as server:
        assert run(lua, server.port, source) == (None, b"no socket")
        assert server.mails[0].get_content_type() == "text/plain"


@pytest.mark.parametrize(
    ("answers", "word"),
    [
        ({"rcpt": b"550 nobody"}, b"550 nobody"),
        ({"mail": b"451-later\r\n451 please"}, b"451 please"),
        ({"greeting": b"554 go"}, b"554 go"),
        ({"ehlo": b"502 what"}, b"502 what"),
        ({"data": b"554 no"}, b"554 no"),
        ({"end": b"552 too large"}, b"552 too large"),
        ({"greeting": b"hello"}, b"invalid server reply"),
        ({"ehlo": b"\r\n".join([b"250-x"] * 200)}, b"invalid server reply"),
        ({"ehlo": None}, b"timeout"),
    ],
)
def test_servers_that_refuse_and_hang(lua: Vm, answers: Any, word: bytes) -> None:
    source = "smtp.TIMEOUT = 0.1 local a, b = send{} smtp.TIMEOUT = 60 return a, b"
    with ScriptedSmtp(**answers) as server:
        assert run(lua, server.port, source) == (None, word)


def test_what_goes_wrong_elsewhere(lua: Vm) -> None:
    with ScriptedSmtp() as server:
        broken = "return send{source = function() return nil, 'broken' end}"
        assert run(lua, server.port, broken) == (None, b"broken")
        assert b"." not in server.lines
        assert run(lua, server.port, "return send{user = 'a', password = 'b'}") == (
            None,
            b"authentication not supported",
        )
    assert run(lua, server.port, "return send{}") == (None, b"connection refused")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "send{from = '<a>\\r\\nRCPT TO:<eve>'}",
            "bad argument #from to 'send' (a string without control characters expected",
        ),
        (
            "send{rcpt = {'<a>', '<b>\\n'}}",
            "bad argument #rcpt to 'send' (a string without control characters expected",
        ),
        ("send{rcpt = {}}", "1 to 100 recipients expected"),
        ("send{domain = 'a\\nb'}", "bad argument #domain"),
        ("smtp.send{from = 'a', rcpt = 'b'}", "bad argument #source to 'send' (function expected"),
        ("smtp.send()", "bad argument #1 to 'send'"),
        ("smtp.message{headers = {subject = 'a\\r\\nBcc: eve'}, body = ''}", "line end in the header 'subject'"),
        ("smtp.message{headers = {['a b'] = 'x'}, body = ''}", "'a b' is not a valid header name"),
        ("smtp.message{body = {{body = true}}}", "bad argument #body to 'message' (string expected, got boolean)"),
        ("local t = {} t.body = {t} smtp.message(t)", "parts are nested deeper than 20"),
    ],
)
def test_wrong_arguments(lua: Vm, call: str, message: str) -> None:
    source = f"local ok, text = pcall(function() {call} end) assert(not ok) return text"
    (text,) = run(lua, 1, source)
    assert message in text.decode()

"""`socket.mail` (spec: bas-api §12), against a real server, and against ones that refuse, hang and lie."""

from __future__ import annotations

import base64
import hmac
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest
import trustme

from smqrt.apps.lua.vm import Vm
from smqrt.mail import smtp
from tests.apps.lua.app_server import AppServer
from tests.support import pki
from tests.support.mail_server import Mailbox, ScriptedSmtp
from tests.support.waiting import wait_until

CA, OTHERS_CA = trustme.CA(), trustme.CA()
SEND = """
local op, mail, ca = ...
local function table_of(text) return assert(load("return " .. text))() end
op, mail = table_of(op), table_of(mail)
if ca then
  local store = ba.create.certstore()
  assert(store:addcert(ba.openio"home", ca))
  op.shark = ba.create.sharkssl(store)
end
return socket.mail(op):send(mail)
"""
MAIL = '{from = "Ann <ann@example.com>", to = "bob@example.com", subject = "hello", txtbody = "text"}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mail")
    (folder / "ca.pem").write_bytes(CA.cert_pem.bytes())
    (folder / "report.csv").write_bytes(b"a,b\r\n1,2\r\n")
    return folder


@pytest.fixture(scope="module")
def lua(folder: Path) -> Iterator[Vm]:
    server = AppServer(folder)
    yield server.vm
    server.close()


def send(lua: Vm, port: int, mail: str = MAIL, op: str = "", ca: bytes | None = None) -> Any:
    return lua.eval(SEND, "=x", f"{{server = '127.0.0.1', port = {port}, {op}}}".encode(), mail.encode(), ca)


def unix(text: str) -> str:
    return text.replace("\r\n", "\n")


# ---- what arrives


def test_a_mail_of_all_kinds_of_parts(lua: Vm) -> None:
    mail = r"""{
      from = "Änn <ann@example.com>", to = {"bob@example.com", "Cy <cy@example.com>, dan@example.com"},
      bcc = "eve@example.com", cc = "fay@example.com", replyto = "desk@example.com", subject = "Größe: 5 µm",
      txtbody = "first\n.dot\n..two\n" .. ("long "):rep(300),
      htmlbody = "<b>bold</b> <img src='cid:logo'>",
      htmlimg = {id = "logo", name = "logo", content = "image/png", source = "\x89PNG", description = "it"},
      attach = {
        {io = ba.openio"home", name = "report.csv"}, {name = "a ü.txt", data = "text", type = "text/plain"},
        {name = "fn.bin", source = require"ltn12".source.string(("\0\1\2"):rep(50000))},
        {path = "report.csv", name = "r.txt"}, {name = "r.json", content = "application/x-report", data = "{}"},
        {name = "f", source = ba.openio"home":open"report.csv"},
      }}"""
    with Mailbox() as server:
        assert send(lua, server.port, mail) == (True,)
        (envelope,), (got,) = server.envelopes, server.mails
    assert envelope.mail_from == "ann@example.com"
    assert envelope.rcpt_tos == [f"{name}@example.com" for name in ("bob", "cy", "dan", "fay", "eve")]
    assert "eve@" not in got.as_string()
    assert got["Subject"] == "Größe: 5 µm"
    assert got["From"] == "Änn <ann@example.com>"
    assert got["To"] == "bob@example.com, Cy <cy@example.com>, dan@example.com"
    assert (got["Cc"], got["Reply-To"]) == ("fay@example.com", "desk@example.com")
    assert got["Message-ID"].endswith("@example.com>")
    assert got["Date"].datetime
    text, html = got.get_body(("plain",)), got.get_body(("html",))
    assert text is not None
    assert html is not None
    assert unix(text.get_content()).startswith("first\n.dot\n..two\nlong long ")
    assert html.get_content().startswith("<b>bold</b>")
    related = next(part for part in got.walk() if part.get_content_type() == "multipart/related")
    image = list(related.iter_parts())[1]
    assert (image["Content-ID"], image.get_content_type(), image["Content-Description"]) == (
        "<logo>",
        "image/png",
        "it",
    )
    assert image.get_content() == b"\x89PNG"
    attached = {part.get_filename(): part for part in got.iter_attachments()}
    assert attached["report.csv"].get_content_type() == "text/csv"
    assert attached["a ü.txt"].get_content() == "text"
    assert attached["fn.bin"].get_content() == b"\0\1\2" * 50000
    assert attached["r.txt"].get_content().splitlines() == ["a,b", "1,2"]
    assert attached["r.json"].get_content_type() == "application/x-report"
    assert attached["f"].get_content() == b"a,b\r\n1,2\r\n"


@pytest.mark.parametrize(
    ("fields", "content_type", "encoding", "text"),
    [
        ('body = "plain"', "text/plain", "7bit", "plain\n"),
        ('htmlbody = "<i>x</i>"', "text/html", "7bit", "<i>x</i>\n"),
        ('txtbody = "gr\\xFC\\xDFe", charset = "iso-8859-1"', "text/plain", "quoted-printable", "grüße\n"),
        ('txtbody = "x", encoding = "base64"', "text/plain", "base64", "x\n"),
        ('txtbody = ("ä\\n"):rep(40000)', "text/plain", "base64", "ä\n" * 40000 + "\n"),
        ("txtbody = nil", "text/plain", "7bit", "\n"),
    ],
)
def test_one_text(lua: Vm, fields: str, content_type: str, encoding: str, text: str) -> None:
    with Mailbox() as server:
        assert send(lua, server.port, f'{{from = "a@b.c", to = "d@e.f", {fields}}}') == (True,)
        (got,) = server.mails
    assert got.get_content_type() == content_type
    assert got["Content-Transfer-Encoding"] == encoding
    assert unix(got.get_content()) == text


# ---- TLS, logins


def test_tls_from_the_start_and_later_with_logins(lua: Vm) -> None:
    context = pki.identity_of(CA.issue_cert("127.0.0.1"))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_into(tls)
    users = {"ann": "secret"}
    login = "user = 'ann', password = 'secret'"
    with Mailbox(tls=tls, users=users) as server:
        assert send(lua, server.port, op=login, ca=b"ca.pem") == (True,)
        assert server.logins == ["PLAIN"]
    with Mailbox(starttls=tls, users=users, mechanisms=["LOGIN"]) as server:
        assert send(lua, server.port, op=f"starttls = true, {login}", ca=b"ca.pem") == (True,)
        assert server.was_secure == [True]
        assert server.logins == ["LOGIN"]
        assert send(lua, server.port, op=login)[:2] == (None, b"auth")  # in clear text it offers none
        wrong = send(lua, server.port, op="starttls = true, user = 'ann', password = 'x'", ca=b"ca.pem")
        assert wrong[:2] == (None, b"auth")
        assert b"535" in wrong[2]
        assert send(lua, server.port, op="starttls = true")[:2] == (None, b"sslnottrusted")  # the system's authorities
        no_store = "starttls = true, shark = ba.create.sharkssl(), " + login
        assert send(lua, server.port, op=no_store) == (True,)  # only encrypted
        assert len(server.envelopes) == 2


def test_a_wrong_certificate_gets_nothing(lua: Vm) -> None:
    for authority, names in ((OTHERS_CA, ["127.0.0.1"]), (CA, ["other.example"])):
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        pki.identity_of(authority.issue_cert(*names)).load_into(tls)
        with Mailbox(tls=tls) as server:
            assert send(lua, server.port, ca=b"ca.pem")[:2] == (None, b"sslnottrusted")
            assert server.envelopes == []


def test_cram_md5(lua: Vm) -> None:
    challenge = b"<1896.697170952@example>"
    answers = {"ehlo": b"250-x\r\n250 AUTH CRAM-MD5 PLAIN", "auth": b"334 " + base64.b64encode(challenge)}
    digest = hmac.new(b"secret", challenge, "md5").hexdigest()
    answer = base64.b64encode(f"ann {digest}".encode())
    with ScriptedSmtp(**answers, **{answer.decode().lower(): b"235 welcome"}) as server:
        assert send(lua, server.port, op="user = 'ann', password = 'secret'") == (True,)
        assert answer in server.lines


def test_logins_that_make_no_sense(lua: Vm) -> None:
    login = "user = 'ann', password = 'secret'"
    with ScriptedSmtp(ehlo=b"250-x\r\n250 AUTH CRAM-MD5", auth=b"334 abcde") as server:
        assert send(lua, server.port, op=login)[:2] == (None, b"invalidresponse")
    with ScriptedSmtp(ehlo=b"250-x\r\n250 AUTH GSSAPI") as server:
        assert send(lua, server.port, op=login)[:2] in [(None, b"auth"), (None, b"failed")]
        assert send(lua, server.port, op="user = 'änn', password = 'x'")[:2] == (None, b"auth")
    with ScriptedSmtp() as server:
        assert send(lua, server.port, op=login)[:2] == (None, b"auth")


def test_no_starttls_no_mail(lua: Vm) -> None:
    with ScriptedSmtp() as server:
        assert send(lua, server.port, op="starttls = true, user = 'a', password = 'b'")[:2] == (None, b"sslnotenabled")
        assert [line.split()[0] for line in server.lines] == [b"ehlo"]
    with ScriptedSmtp(ehlo=b"250-x\r\n250 STARTTLS", starttls=b"220 go\r\n250 injected") as server:
        assert send(lua, server.port, op="starttls = true, timeout = 500")[1] in (b"sslhandshake", b"timeout")


# ---- servers that refuse, hang and lie


def test_some_or_all_recipients_refused(lua: Vm) -> None:
    with Mailbox(refused=["bob@example.com"]) as server:
        both = MAIL.replace('"bob@example.com"', '{"bob@example.com", "cy@example.com"}')
        assert send(lua, server.port, both) == (True, b"bob@example.com: 550 5.1.1 nobody of that name")
        assert send(lua, server.port)[:2] == (None, b"failed")
        assert len(server.envelopes) == 1


@pytest.mark.parametrize(
    ("answers", "word", "said"),
    [
        ({"greeting": b"554 go away"}, b"failed", b"554 go away"),
        ({"greeting": b"HTTP/1.1 400 Bad Request"}, b"invalidresponse", b"not an SMTP server"),
        ({"mail": b"451 later\x00\xff"}, b"failed", b"451 later"),
        ({"data": b"550 no"}, b"failed", b"550 no"),
        ({"end": b"552 too large"}, b"failed", b"552 too large"),
        ({"greeting": None}, b"timeout", b"0.2 s"),
        ({"end": None}, b"timeout", b"0.2 s"),
        ({"ehlo": b"250-" + b"x" * 9000 + b"\r\n250 y"}, b"failed", b"500"),
        ({"greeting": b"220-x\r\n" * 20000 + b"220 x"}, b"invalidresponse", b"65536 bytes"),
    ],
)
def test_refusing_hanging_and_broken_servers(lua: Vm, answers: dict[str, Any], word: bytes, said: bytes) -> None:
    with ScriptedSmtp(**answers) as server:
        op = "timeout = 200" if word == b"timeout" else ""
        value, found, reason = send(lua, server.port, op=op)
        assert (value, found) == (None, word)
        assert said in reason
    assert send(lua, server.port)[:2] == (None, b"cannotconnect")


def test_a_server_that_does_not_reply_to_quit(lua: Vm) -> None:
    with ScriptedSmtp(quit=None) as server:
        began_s = time.monotonic()
        assert send(lua, server.port) == (True,)
        assert time.monotonic() - began_s < 5
        wait_until(lambda: server.lines[-1] == b"QUIT")


def test_a_hanging_server_does_not_delay_others(lua: Vm) -> None:
    with ScriptedSmtp(greeting=None) as hanging, Mailbox() as server:
        jobs = [gevent.spawn(send, lua, hanging.port, MAIL, "timeout = 400") for _ in range(4)]
        gevent.sleep(0.05)
        began_s = time.monotonic()
        assert send(lua, server.port) == (True,)
        assert not any(job.ready() for job in jobs) or time.monotonic() - began_s > 0.3
        gevent.joinall(jobs, timeout=5)
        assert {job.value[1] for job in jobs} == {b"timeout"}


def test_mails_that_wait_are_bounded(lua: Vm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smtp, "MAX_UNSENT_BYTES", 1000)
    large = MAIL.replace('"text"', '("x"):rep(300)')
    with ScriptedSmtp(greeting=None) as hanging:
        jobs = [gevent.spawn(send, lua, hanging.port, large, "timeout = 200") for _ in range(4)]
        gevent.joinall(jobs, timeout=10)
        assert sorted(job.value[1] for job in jobs) == [b"failed", b"timeout", b"timeout", b"timeout"]


# ---- what strangers type


@pytest.mark.parametrize(
    "fields",
    [
        'subject = "x\\r\\nBcc: eve@example.com"',
        'subject = "x\\nX: y"',
        'from = "a@b.c\\r\\nRCPT TO:<eve@example.com>"',
        'to = "a@b.c>\\r\\nRCPT TO:<eve@example.com"',
        'to = "not an address"',
        'to = "a b@c.d"',
        "to = {}",
        'replyto = "a\\0@b.c"',
        'attach = {name = "a\\r\\nX: y", data = "x"}',
        'attach = {name = "a", type = "text/x\\r\\nX: y", data = "x"}',
        'attach = {name = "a", content = "text/x\\r\\nX: y", data = "x"}',
        'htmlbody = "x", htmlimg = {id = "a>\\r\\nX: y", name = "a.png", data = "x"}',
        'charset = "x\\r\\nX: y"',
        'charset = "nonsense"',
        'encoding = "zip"',
        'subject = ("x"):rep(5000)',
        'to = {("x@y.z, "):rep(500)}',
        'attach = {name = "missing.txt"}',
        'attach = {name = "x", source = ("x"):rep(26 << 20)}',
        'attach = {name = "x", source = function() return nil, "broken" end}',
    ],
)
def test_what_is_no_mail_is_not_sent(lua: Vm, fields: str) -> None:
    with ScriptedSmtp() as server:
        mail = f"(function() local mail = {MAIL} for k, v in pairs{{{fields}}} do mail[k] = v end return mail end)()"
        value, word, *_ = send(lua, server.port, mail)
        assert value is None
        assert word in (b"failed", b"toomuchdata", b"notfound", b"broken")
        assert not any(b"eve@" in line for line in server.lines)
        assert not any(line.startswith(b"DATA") for line in server.lines)


def test_wrong_arguments_raise(lua: Vm) -> None:
    lua.eval("""
    local mail = socket.mail{server = "127.0.0.1"}
    for _, call in ipairs{
      function() socket.mail() end, function() socket.mail{} end, function() socket.mail{server = {}} end,
      function() socket.mail{server = "x", port = "a"} end, function() socket.mail{server = "x", shark = 5} end,
      function() socket.mail{server = "x", starttls = 1} end, function() mail:send() end,
      function() mail:send{to = "a"} end,
      function() mail.send{} end, function() mail:send{from = "a", to = 5, subject = {}} end,
      function() mail:send{from = "a", to = "b", attach = "x"} end, function() mail:send{from = "a", to = {{}}} end,
      function() mail:send{from = "a", to = "b", attach = {{name = "x", data = true}}} end,
      function() mail:send{from = "a", to = "b", attach = {source = {}}} end,
    } do local ok, message = pcall(call) assert(not ok and message:find"^x:%d+: bad argument", message) end
    assert(require"socket.mail" == socket.mail and type(mail) == "userdata")
    """, "=x")  # fmt: skip

"""The application in examples/report: mail, the e-mail log of mako.conf, and a named pipe, from outside."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import gevent
import pytest

from smqrt.apps.lua.bridge import LuaError
from tests.apps.lua.app_server import AppServer
from tests.support.mail_server import Mailbox, ScriptedSmtp
from tests.support.waiting import wait_until

APP = Path(__file__).parent.parent / "examples" / "report"
CONF = """log = {{
  smtp = {{server = "127.0.0.1", port = {port}, from = "desk@example.com", to = "owner@example.com", subject = "From the desk", {smtp}}},
  signature = "the desk", {more}
}}"""  # noqa: E501


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    with Mailbox(refused=["nobody@example.com"]) as running:
        yield running


def configure(server: AppServer, port: int, more: str = "", smtp: str = "") -> None:
    server.services.conf = server.folder / "mako.conf"
    server.services.conf.write_text(CONF.format(port=port, more=more, smtp=smtp))


def start(server: AppServer, port: int, more: str = "") -> Any:
    configure(server, port, more)
    application = server.applications.load("", APP)
    assert application.error is None, application.error
    return application


def ask(server: AppServer, page: str, **data: str) -> Any:
    return json.loads(server.ask(f"/{page}.lsp?{urlencode(data)}").body)


def text_of(mail: Any) -> str:
    return str(mail.get_body(("plain",)).get_content()).replace("\r\n", "\n")


@pytest.mark.servers
def test_a_server_of_its_own(tmp_path: Path, mailbox: Mailbox, serve: Any) -> None:
    """As somebody starts it: the server reads mako.conf, and mails the log when it ends."""
    (tmp_path / "mako.conf").write_text(CONF.format(port=mailbox.port, more="", smtp=""))
    served = serve(APP, cwd=tmp_path)
    url = f"http://127.0.0.1:{served.port}"
    with urlopen(f"{url}/note.lsp?text=noted") as answer:
        assert json.loads(answer.read()) == {"logged": True}
    with urlopen(f"{url}/report.lsp?to=ann@example.com&subject=s&text=t") as answer:
        assert json.loads(answer.read()) == {"ok": True}
    assert len(mailbox.envelopes) == 1
    assert served.stop() == 0
    assert "the desk closes" in text_of(mailbox.mails[1])
    assert " noted\n" in text_of(mailbox.mails[1])


def test_reports_to_visitors(server: AppServer, mailbox: Mailbox) -> None:
    start(server, mailbox.port)
    assert ask(server, "report", to="Ann <ann@example.com>", subject="Zürich", text="hello") == {"ok": True}
    (mail,) = mailbox.mails
    assert (mail["To"], mail["From"], mail["Subject"]) == ("Ann <ann@example.com>", "desk@example.com", "Zürich")
    assert text_of(mail) == "hello\n"
    assert next(mail.iter_attachments()).get_content().startswith("from ")
    forged = ask(server, "report", to="ann@example.com", subject="x\r\nBcc: eve@example.com", text="")
    assert (forged["ok"], forged["err"]) == (False, "failed")
    nobody = ask(server, "report", to="nobody@example.com", subject="", text="")
    assert (nobody["err"], "550" in nobody["reason"]) == ("failed", True)
    assert len(mailbox.envelopes) == 1


def test_the_log_is_sent_on_request_and_at_shutdown(server: AppServer, mailbox: Mailbox) -> None:
    application = start(server, mailbox.port, "logerr = true")
    assert ask(server, "note", text="first") == {"logged": True}
    assert server.ask("/broken.lsp").status == 500
    assert mailbox.envelopes == []
    assert ask(server, "note", text="second", flush="1", subject="Urgent") == {"logged": True}
    wait_until(lambda: mailbox.envelopes)
    (mail,) = mailbox.mails
    assert (mail["Subject"], mail["To"]) == ("Urgent", "owner@example.com")
    body = text_of(mail)
    assert body.index(" first\n") < body.index("broken.lsp:1:") < body.index(" second\n") < body.index("\n\nthe desk")
    assert ask(server, "direct", text="now") == {"ok": True}
    assert mailbox.mails[1]["Subject"] == "direct"
    assert text_of(mailbox.mails[1]) == "now\n\nthe desk\n"
    application.unload()
    server.applications.send_mail_log()
    assert text_of(mailbox.mails[2]).startswith("the desk closes\n")
    assert mailbox.mails[2]["Subject"] == "From the desk"
    server.applications.send_mail_log()
    assert len(mailbox.envelopes) == 3


def test_a_full_log_makes_one_mail_and_no_flood(server: AppServer, mailbox: Mailbox) -> None:
    start(server, mailbox.port, "maxsize = 100")
    more = "for i = 1, 300 do assert(mako.log(('x'):rep(20) .. i)) end"
    server.vm.eval(more)
    wait_until(lambda: mailbox.envelopes)
    server.vm.eval(more)
    server.applications.send_mail_log()
    assert len(mailbox.envelopes) == 2
    last = text_of(mailbox.mails[1])
    assert "x300\n" in last
    assert "older entries were left out" in last
    assert len(last) < 1200


def test_a_log_that_cannot_be_sent_is_kept(server: AppServer, mailbox: Mailbox, caplog: Any) -> None:
    with ScriptedSmtp(greeting=b"554 no") as refusing:
        start(server, refusing.port)
        with caplog.at_level("INFO", "smqrt.trace"):
            ask(server, "note", text="kept", flush="1")
            wait_until(lambda: "mako.log: mail not sent: failed 554 no" in caplog.text)
    configure(server, mailbox.port)
    server.vm.eval("assert(require'loadconf'.load())")
    server.applications.send_mail_log()
    assert " kept\n" in text_of(mailbox.mails[0])


def test_without_a_configuration_and_with_a_wrong_one(server: AppServer) -> None:
    assert server.vm.eval("return mako.log('x'), require'log'.sendmail{subject = 'x'}")[:3] == (False, None, b"failed")
    for call in ("mako.log()", "mako.log('x', 5)", "mako.log('x', {flush = 1})", "require'log'.sendmail()"):
        with pytest.raises(LuaError, match="eval:1: bad argument"):
            server.vm.eval(f"local value = {call}")
    configure(server, 1, smtp='consec = "ssl"')
    server.vm.eval("assert(require'loadconf'.load())")
    with pytest.raises(LuaError, match="consec must be"):
        server.vm.eval("require'log'.sendmail'x'")


def test_orders_through_a_pipe(server: AppServer, mailbox: Mailbox) -> None:
    application = start(server, mailbox.port)
    path = server.folder / "orders.fifo"
    assert path.is_fifo()
    assert path.stat().st_mode & 0o777 == 0o600
    assert ask(server, "order", text="by page\n") == {"ok": True}
    for data in (b"by process\n", b"and another\n"):
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        os.write(fd, data)
        os.close(fd)
    wait_until(lambda: "".join(ask(server, "orders")["orders"]) == "by page\nby process\nand another\n")
    application.unload()
    server.vm.eval("collectgarbage() collectgarbage()")
    wait_until(lambda: _is_free(path))


def _is_free(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return True  # nobody reads it
    return False


def test_a_pipe_ends_with_its_application(server: AppServer) -> None:
    source = """
    assert(ba.pipe.mkfifo(io:realpath"own.fifo"))
    pipe = assert(ba.pipe.open(io:realpath"own.fifo"))
    ba.thread.create():run(function() _G.waited = {pipe:read()} end)
    """
    before = len(os.listdir("/proc/self/fd"))
    application = server.app({".preload": source}, "piper")
    assert application.error is None, application.error
    gevent.sleep(0.02)
    assert server.vm.eval("return waited") == (None,)
    application.unload()
    wait_until(lambda: server.vm.eval("return waited ~= nil")[0])
    assert server.vm.eval("return waited[1], waited[2]") == (None, b"ioerror")
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_what_is_no_pipe(server: AppServer) -> None:
    server.vm.eval("""
    local path = ba.openio"home":realpath"plain"
    ba.openio"home":open("plain", "w"):close()
    local pipe, word = ba.pipe.open(path) assert(pipe == nil and word == "invalidname")
    pipe, word = ba.pipe.open"missing" assert(pipe == nil and word == "notfound")
    local ok ok, word = ba.pipe.mkfifo"no/such/folder" assert(ok == nil and word == "notfound")
    ok, word = ba.pipe.mkfifo"../outside" assert(ok == nil and word == "invalidname")
    for _, call in ipairs{
      function() ba.pipe.open() end, function() ba.pipe.open("x", "z") end, function() ba.pipe.mkfifo("x", 9999) end,
      function() ba.pipe.mkfifo({}) end,
    } do ok, word = pcall(call) assert(not ok and word:find"bad argument", word) end
    assert(ba.pipe.mkfifo("own.fifo", 432))
    local both = assert(ba.pipe.open("own.fifo", "rw"))
    assert(both:write"to myself" and both:read(2) == "to" and both:read() == " myself" and both:close())
    """)
    assert (server.folder / "own.fifo").stat().st_mode & 0o700 == 0o600

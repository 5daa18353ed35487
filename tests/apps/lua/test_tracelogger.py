"""The trace logger: its protocol, its single viewer, its bounds, and its end."""

from __future__ import annotations

import logging
from typing import Any

import gevent
import pytest

from smqrt.apps.lua.api import dirs as binding
from smqrt.http import tracelogger as module
from tests.apps.lua.app_server import AppServer
from tests.apps.lua.websocket_client import Client
from tests.support.waiting import wait_until

PATH = "/app/tracelogger.service/"
XHR = {"X-Requested-With": "XMLHttpRequest"}
PRELOAD = "tl = ba.create.tracelogger() dir:insert(tl, true)"


@pytest.fixture
def app(server: AppServer, caplog: pytest.LogCaptureFixture) -> AppServer:
    caplog.set_level(logging.INFO, "smqrt.trace")
    pages = {"say.lsp": "<?lsp trace(request:data'text' or 'nothing') ?>", "fail.lsp": "<?lsp\nerror'oh' ?>"}
    assert server.app({".preload": PRELOAD, **pages}, "app").error is None
    return server


def text_of(client: Client, until: bytes) -> bytes:
    """The text frames up to the one with `until`."""
    text = b""
    while until not in text:
        message = client.receive()
        assert message
        assert not message.is_text
        assert message.data[:1] == b"\x02"
        text += message.data[1:]
    return text


def greeted(app: AppServer) -> Client:
    client = Client(app.port, PATH)
    message = client.receive()
    assert message
    assert message.data[:1] == b"\x01"
    return client


def test_what_is_traced_is_shown(app: AppServer) -> None:
    assert app.ask(PATH, headers=XHR).status == 204
    app.ask("/app/say.lsp?text=before")
    client = greeted(app)
    assert app.ask(PATH, headers=XHR).status == 503
    app.ask("/app/say.lsp?text=now")
    app.ask("/app/fail.lsp")
    text = text_of(client, b"fail.lsp:2: oh")
    assert text.index(b"say.lsp 1: before\n") < text.index(b"say.lsp 1: now\n")
    client.sock.close()
    wait_until(lambda: app.ask(PATH, headers=XHR).status == 204)


def test_another_viewer_takes_over(app: AppServer) -> None:
    first = greeted(app)
    second = greeted(app)
    message = first.receive()
    assert message
    assert message.data == b"\x03"
    assert first.closed() == 1000
    app.ask("/app/say.lsp?text=x")
    assert text_of(second, b"say.lsp 1: x\n")
    assert app.ask(PATH, headers=XHR).status == 503


def test_the_page_and_what_is_refused(app: AppServer) -> None:
    page = app.ask(PATH)
    assert f'data-service="{PATH}"' in page.text
    assert page.headers["X-Frame-Options"] == "DENY"
    assert app.ask(PATH, "POST", b"x").status == 405
    assert app.ask(PATH + "more.x").status == 404
    with pytest.raises(AssertionError, match="403"):
        Client(app.port, PATH, "Origin: http://evil.example\r\n")


def test_requests_are_shown_when_asked_for(app: AppServer) -> None:
    client = greeted(app)
    app.page("<?lsp mako.getapps().app.app.tl:configure{request=true} ?>")
    app.ask("/app/say.lsp?text=one", headers={"X-Mine": "1"})
    text = text_of(client, b"GET /app/say.lsp?text=one 200 OK\n")
    assert b"X-Mine" not in text
    app.page(
        """<?lsp local tl = mako.getapps().app.app.tl
        assert(tl:configure{requestheaders=true, responseheaders=true, requestbody=true, other=1})
        assert(not pcall(tl.configure, tl, {request=1}) and not pcall(tl.configure, tl)) ?>"""
    )
    headers = {"Cookie": "session=0123456789", "Content-Type": "application/x-www-form-urlencoded"}
    app.ask("/app/say.lsp", "POST", b"ba_password=se.cret&text=two&rest=" + b"x" * 9000, headers)
    text = text_of(client, b"POST /app/say.lsp 200 OK\n")
    assert b"< Content-Type: text/html; charset=utf-8\n" in text
    assert b"> Cookie: session=\xe2\x80\xa6\n" in text
    assert b"\n> ba_password=...&text=two&rest=xxx" in text
    assert text.count(b"x") < 5000
    app.ask(PATH, headers=XHR)
    app.page("<?lsp mako.getapps().app.app.tl:configure{request=false, requestheaders=false} ?>")
    app.page("<?lsp mako.getapps().app.app.tl:configure{responseheaders=false, requestbody=false} trace'end' ?>")
    assert b"tracelogger.service" not in text_of(client, b"end\n")
    assert app.server.observers == ()


def test_a_slow_viewer_loses_lines_that_are_counted(app: AppServer, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "QUEUE_BYTES", 4096)
    monkeypatch.setattr(module, "WAITING_BYTES", 16384)
    client = greeted(app)
    client.sock.setsockopt(1, 8, 4096)  # SO_RCVBUF
    line = "y" * 1000
    app.page(f"<?lsp for i = 1, 100 do trace('{line}') end trace'last' ?>")
    text = text_of(client, b": last\n")
    assert b" lines were dropped: this viewer is too slow\n" in text
    assert len(text) < 30_000


def test_everything_ends_with_the_application(app: AppServer) -> None:
    logger = logging.getLogger("smqrt")
    handlers = len(logger.handlers)
    client = greeted(app)
    app.page("<?lsp mako.getapps().app.app.tl:configure{request=true} assert(mako.stopapp'app') ?>")
    message: Any = b""
    while message is not None:
        message = client.receive()
    assert client.codec.close_code == 1001
    assert app.ask(PATH).status == 404
    assert app.server.observers == ()
    assert len(logger.handlers) < handlers
    app.page("<?lsp assert(mako.startapp'app') ?>")
    assert app.ask(PATH, headers=XHR).status == 204


def test_another_name_and_the_methods_of_directories(server: AppServer) -> None:
    server.app({"index.lsp": "x"})
    answer = server.page(
        """<?lsp
        local tl = ba.create.tracelogger("watch", 5)
        app.tl = tl
        tl:setfunc(function(_ENV, path) if path == "mine" then print "mine" return end return false end)
        print(type(tl), tl:name(), tl:insert(), tl:baseuri())
        for _, wrong in ipairs{{"x", 128}, {{}, 1}} do
           assert(not pcall(ba.create.tracelogger, table.unpack(wrong)))
        end ?>"""
    )
    assert answer.text == "userdata\twatch\ttrue\t/watch/\n"
    assert server.ask("/watch/mine").text == "mine\n"
    assert server.ask("/watch/", headers=XHR).status == 204
    server.page("<?lsp assert(app.tl:unlink()) app.tl = nil collectgarbage() collectgarbage() ?>")
    assert server.ask("/watch/").status == 404


def test_other_threads_may_log(app: AppServer) -> None:
    client = greeted(app)
    gevent.get_hub().threadpool.apply(logging.getLogger("smqrt.other").warning, ("from afar",))
    assert text_of(client, b"from afar\n")


def test_a_viewer_that_takes_nothing_is_disconnected(app: AppServer, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "VIEWER_TIMEOUT_S", 0.05)
    client = greeted(app)
    page = f"<?lsp for i = 1, 60 do trace('{'z' * 4000}') end ?>"

    def is_free() -> bool:
        app.page(page)
        return app.ask(PATH, headers=XHR).status == 204

    wait_until(is_free)
    client.sock.close()


ONTRACE = """
tl = ba.create.tracelogger() dir:insert(tl, true)
heard = {}
function listen() return tl:ontrace(function(text) heard[#heard + 1] = text end) end
"""


def heard(app: AppServer) -> str:
    return app.page("<?lsp print(table.concat(mako.getapps().app.app.heard, '|')) ?>").text


def test_a_callback_gets_what_is_traced(server: AppServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "smqrt.trace")
    pages = {"say.lsp": "<?lsp trace(request:data'text') ?>", "fail.lsp": "<?lsp\nerror'oh' ?>"}
    assert server.app({".preload": ONTRACE, **pages}, "app").error is None
    server.ask("/app/say.lsp?text=before")
    server.page("<?lsp assert(mako.getapps().app.app.listen() == true) ?>")
    server.ask("/app/say.lsp?text=now")
    server.ask("/app/fail.lsp")
    wait_until(lambda: "fail.lsp:2: oh" in heard(server))
    text = heard(server)
    assert "say.lsp 1: now\n" in text
    assert "before" not in text
    server.page("<?lsp assert(mako.getapps().app.app.tl:ontrace(nil)) trace'ended' ?>")
    gevent.sleep(0.1)
    assert "ended" not in heard(server)


def test_a_tracing_callback_is_not_called_recursively(server: AppServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "smqrt.trace")
    preload = """tl = ba.create.tracelogger() dir:insert(tl, true) calls, heard = 0, {}
    tl:ontrace(function(text)
        calls = calls + 1 heard[#heard + 1] = text
        ba.sleep(20) trace "mine" tracep(0, "mine too")
    end)"""
    assert server.app({".preload": preload}, "app").error is None
    server.page("<?lsp trace'one' ?>")
    wait_until(lambda: "one" in heard(server))
    gevent.sleep(0.15)
    server.page("<?lsp trace'two' assert(mako.getapps().app.app.calls < 4) ?>")
    wait_until(lambda: "two" in heard(server))
    assert "mine" not in heard(server)
    assert sum("mine" in record.getMessage() for record in caplog.records) >= 2


def test_a_callback_that_fails_ends(server: AppServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "smqrt.trace")
    preload = """tl = ba.create.tracelogger() dir:insert(tl, true) calls = 0
    tl:ontrace(function() calls = calls + 1 error "not so" end)"""
    assert server.app({".preload": preload}, "app").error is None
    server.page("<?lsp trace'one' ?>")
    wait_until(lambda: "ontrace: the callback failed and was removed" in caplog.text)
    assert "not so" in caplog.text
    server.page("<?lsp trace'two' ?>")
    gevent.sleep(0.1)
    text = """<?lsp local app = mako.getapps().app.app
    assert(app.calls == 1 and not pcall(app.tl.ontrace, app.tl, 1) and not pcall(app.tl.ontrace)) print "all" ?>"""
    assert server.page(text).text == "all\n"


def test_lines_missed_by_a_slow_callback_are_counted(
    server: AppServer, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(binding, "WAITING_BYTES", 4096)
    caplog.set_level(logging.INFO, "smqrt.trace")
    assert server.app({".preload": ONTRACE + "listen()"}, "app").error is None
    line = "y" * 1000
    server.page(f"<?lsp for i = 1, 100 do trace('{line}') end trace'last' ?>")
    wait_until(lambda: "last" in heard(server))
    assert " lines were dropped: the callback is too slow\n" in heard(server)
    assert len(heard(server)) < 10_000

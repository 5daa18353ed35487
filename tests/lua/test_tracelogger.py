"""The trace logger: its protocol, its single viewer, its bounds, and its end."""

from __future__ import annotations

import logging
from typing import Any

import gevent
import pytest

from smqrt.http import tracelogger as module
from tests.lua.app_server import AppServer
from tests.lua.websocket_client import Client
from tests.waiting import wait_until

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
    assert b" lines were left out: this viewer is too slow\n" in text
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
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    client = greeted(app)
    page = f"<?lsp for i = 1, 60 do trace('{'z' * 4000}') end ?>"

    def is_free() -> bool:
        app.page(page)
        return app.ask(PATH, headers=XHR).status == 204

    wait_until(is_free)
    client.sock.close()

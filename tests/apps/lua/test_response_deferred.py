"""Deferred responses (spec: bas-api §2.2)."""

from __future__ import annotations

from http.client import BadStatusLine, IncompleteRead

import gevent
import pytest

from tests.apps.lua.app_server import AppServer
from tests.support.waiting import wait_until


def test_a_timer_answers_after_the_page_has_returned(server: AppServer):
    answer = server.page(
        """dropped<?lsp
        local d = response:deferred()
        print"ignored"
        _G.timer = ba.timer(function()
          assert(d:valid())
          d:setstatus(201) d:setheader("X-A", "1") d:write("late ", 1) d:write" answer"
          _G.closed = {d:close(), d:close(), d:valid(), pcall(d.write, d, "x")}
        end)
        _G.timer:set(10)
        ?>"""
    )
    assert (answer.status, answer.text, answer.headers["X-A"]) == (201, "late 1 answer", "1")
    assert answer.headers["Content-Length"] == "13"
    assert server.vm.eval("return closed[1], closed[2], closed[3], closed[4]") == (True, False, False, False)


def test_a_thread_streams(server: AppServer):
    answer = server.page(
        """<?lsp
        local d = response:deferred()
        ba.thread.run(function()
          for i = 1, 3 do d:send("piece " .. i .. "\\n", i == 1 and 24 or nil) ba.sleep(2) end
          d:close(true)
        end)
        ?>"""
    )
    assert answer.text == "piece 1\npiece 2\npiece 3\n"
    assert answer.headers["Content-Length"] == "24"


@pytest.mark.parametrize(
    "code", ["local d = response:deferred() ba.thread.run(function() d:abort() end)", "response:deferred()"]
)
def test_an_abandoned_response_ends_the_connection(server: AppServer, code):
    server.page(f"<?lsp if request:data'go' then {code} end ?>")
    asking = gevent.spawn(server.ask, "/page.lsp?go")
    with gevent.Timeout(20):
        while not asking.ready():
            server.vm.eval("collectgarbage() collectgarbage()")
            gevent.sleep(0.01)
    with pytest.raises((BadStatusLine, IncompleteRead, ConnectionError)):
        asking.get()


def test_an_error_of_the_page_is_reported_at_once(server: AppServer, caplog: pytest.LogCaptureFixture):
    server.app(
        {
            ".preload": "ba.seterrh(function(message, env) told = {message, env.mark} end)",
            "page.lsp": "<?lsp mark = 7 app.late = response:deferred() app.late:send'a' error'broken' ?>",
            "told.lsp": "<?lsp print(app.told[1]:match'broken', app.told[2]) app.late:write'b' app.late:close() ?>",
        }
    )
    asking = gevent.spawn(server.ask, "/page.lsp")
    wait_until(lambda: "broken" in caplog.text)
    assert server.ask("/told.lsp").text == "broken\t7\n"
    assert asking.get(timeout=20).text == "ab"
    assert caplog.text.count("page.lsp:1: broken") == 1


def test_deferring_what_was_sent_raises(server: AppServer):
    assert "deferred: iscommitted" in server.page("x<?lsp response:flush() response:deferred() ?>").text

"""Sessions from Lua (spec: bas-api §2.1, §5)."""

from __future__ import annotations

import gevent
import pytest

from smqrt.http import sessions
from smqrt.http.sessions import HttpSessions
from tests.apps.lua.app_server import AppServer
from tests.support.waiting import wait_until


def test_a_session_begins_when_asked_for_and_stays(server: AppServer):
    server.page(
        """<?lsp
        local s = request:session(request:data"new" ~= nil)
        if not s then print(s) return end
        s.count = (s.count or 0) + 1
        print(s.count, type(s), s == request:session(), #s:id(true), math.type(s:id()), s:usecounter())
        ?>"""
    )
    assert server.ask("/page.lsp").text == "false\n"
    answer = server.ask("/page.lsp?new")
    assert answer.text == "1\tuserdata\ttrue\t24\tinteger\t0\n"
    cookie = answer.headers["Set-Cookie"]
    assert "; Path=/; HttpOnly" in cookie
    headers = {"Cookie": cookie.partition(";")[0]}
    assert server.ask("/page.lsp", headers=headers).text == "2\tuserdata\ttrue\t24\tinteger\t1\n"
    again = server.ask("/page.lsp?new", headers=headers)
    assert again.text.startswith("3\t")
    assert "Set-Cookie" not in again.headers
    assert server.ask("/page.lsp", headers={"Cookie": "smqrt_session=" + "x" * 24}).text == "false\n"


def test_session_attributes(server: AppServer):
    source = """<?lsp
      local s = request:session(true)
      s.a, s.b = 1, "x"
      local all = s:attributes()
      print(all.a, all.b, s:maxinactiveinterval(), s:maxinactiveinterval(60), s:peername())
      print(os.time() - s:creationtime() < 2, s:lastaccessedtime(true) >= s:creationtime(), s:lock(), s:release())
      print(ba.session(s:id()) == s, ba.session(0), #ba.sessions(), ba.sessions()[1] == s:id())
      local found, rest = ba.session(request, s:id(true) .. "/sub/file")
      print(found == s, rest, ba.session(request, "sub/file"))
      print(pcall(function() s.id = 1 end))
    ?>"""
    assert server.page(source).text.split("\n") == [
        "1\tx\t1200\t60\t127.0.0.1",
        "true\ttrue\ttrue\ttrue",
        "true\tnil\t1\ttrue",
        "true\tsub/file\tnil",
        "false\tpage.lsp:10: 'id' is a method of sessions; choose another name",
        "",
    ]


def test_a_session_of_a_url_becomes_the_requests(server: AppServer):
    source = """<?lsp
      local id = request:data "id"
      if not id then response:write(request:session(true):id(true)) return end
      local found, rest = ba.session(request, id .. "/x/y")
      print(found:id(), rest, request:session())
      local ours = ba.session(request, id .. "/x/y", true)
      print(ours == found, request:session() == found, ba.session(request, "x/y", true))
      print(pcall(ba.session, request, "x", 1))
    ?>"""
    ours = server.page(source).text
    wrong = "page.lsp:8: bad argument #3 to 'session' (boolean expected, got number)"
    assert server.ask(f"/page.lsp?id={ours}").text == f"1\tx/y\tfalse\ntrue\ttrue\tnil\nfalse\t{wrong}\n"


def test_terminate_calls_onterminate_and_invalidates_the_object(server: AppServer):
    source = """<?lsp
      local s = request:session(true)
      s.name = "ann"
      s.onterminate = function(session) _G.gone = session.name end
      print(s:terminate(), s:terminate(), pcall(s.creationtime, s))
      print(request:session())
    ?>"""
    assert server.page(source).text == "true\tfalse\tfalse\tpage.lsp:5: the session has ended\nfalse\n"
    assert server.vm.eval("return gone") == (b"ann",)


def test_an_unused_session_ends_by_itself(server: AppServer):
    server.page("<?lsp request:session(true).onterminate = function() ba.sleep(1) _G.gone = true end ?>")
    server.ask("/page.lsp")
    for session in [
        server.applications.sessions.by_number(number) for number in server.applications.sessions.numbers()
    ]:
        session.accessed_s -= 3600
    server.applications.sessions.expire()
    wait_until(lambda: server.vm.eval("return gone") == (True,))
    assert len(server.applications.sessions) == 0


def test_a_session_after_commit_raises(server: AppServer):
    assert "session: iscommitted" in server.page("x<?lsp response:flush() request:session(true) ?>").text


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[HttpSessions]:
    """Sessions are looked through every 0.1 s; gives whose they were, look by look."""
    looks: list[HttpSessions] = []
    expire = HttpSessions.expire
    monkeypatch.setattr(sessions, "EXPIRE_EVERY_S", 0.1)
    monkeypatch.setattr(HttpSessions, "expire", lambda self, *args: (looks.append(self), expire(self, *args))[1])
    return looks


def test_sessions_are_looked_through_now_and_then_only(looks: list[HttpSessions], server: AppServer):
    server.page("<?lsp request:session(true) ?>")
    assert "Set-Cookie" in server.ask("/page.lsp").headers
    gevent.sleep(0.5)
    own = [one for one in looks if one is server.applications.sessions]
    assert 3 <= len(own) <= 5, "and not without pause"

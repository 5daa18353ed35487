"""Pages as a server runs them: environments, errors, includes and forwards (spec: bas-api §1, §2.2, runtime §3, §4)."""

from __future__ import annotations

import json

import gevent
import pytest
from gevent import socket

from tests.apps.lua.app_server import AppServer
from tests.apps.lua.versions import by_version
from tests.support.waiting import wait_until


def test_globals_of_a_page_live_in_its_request(server: AppServer):
    server.app(
        {
            "a.lsp": "<?lsp seen = (seen or 0) + 1 response:include'b.lsp' ?>",
            "b.lsp": "<?lsp seen = seen + 1 print(seen, _G.seen, _ENV == request:env(), request == response) ?>",
        }
    )
    for _ in range(2):
        assert server.ask("/a.lsp").text == "2\tnil\ttrue\ttrue\n"


def test_the_five_values_of_a_page(server: AppServer):
    server.app(
        {
            ".preload": "name = 'mine'",
            "sub/p.lsp": "<?lsp= pathname ?> <?lsp= type(io) ?> <?lsp= app.name ?> <?lsp= type(page) ?> <?lsp= dir ?>",
        }
    )
    assert server.ask("/sub/p.lsp").text == "sub/p.lsp userdata mine table nil"


def test_the_page_table_stays_until_the_filter_changes(server: AppServer):
    server.app(
        {
            "n.lsp": "<?lsp page.n = (page.n or 0) + 1 print(page.n) ?>",
            "m.lsp": "<?lsp print(page.n) ?>",
            "reset.lsp": "<?lsp app.dir:lspfilter(app) ?>",
        }
    )
    assert [server.ask("/n.lsp").text for _ in range(3)] == ["1\n", "2\n", "3\n"]
    server.write("", {"n.lsp": "<?lsp page.n = (page.n or 0) + 10 print(page.n) ?>"})
    assert server.ask("/n.lsp").text == "13\n"
    assert server.ask("/m.lsp").text == "nil\n"
    server.ask("/reset.lsp")
    assert server.ask("/n.lsp").text == "10\n"


def test_a_changed_page_is_compiled_again(server: AppServer):
    assert server.page("one").text == "one"
    assert server.page("another").text == "another"
    assert server.page("<?lsp x x ?>").status == 500
    assert server.page("well").text == "well"


def test_a_page_that_writes_nothing_still_ends(server: AppServer):
    answer = server.page("<?lsp local a = 1 ?>")
    assert (answer.status, answer.body, answer.headers["Content-Length"]) == (200, b"", "0")


def test_a_large_page_is_chunked_and_whole(server: AppServer):
    answer = server.page("<?lsp for i = 1, 20000 do print(i) end ?>")
    assert answer.headers["Transfer-Encoding"] == "chunked"
    assert "Content-Length" not in answer.headers
    assert answer.text.split() == [str(number) for number in range(1, 20001)]


def test_output_across_a_c_boundary_is_kept(server: AppServer):
    source = "<?lsp ('x'):rep(3000):gsub('x', function() print('0123456789') end) ?>"
    assert server.page(source).text == "0123456789\n" * 3000


def test_print_writes_words(server: AppServer):
    assert (
        server.page("<?lsp print() print(nil, 1, 2.0, true, 'x') print({} ~= nil) ?>").text
        == "\nnil\t1\t2.0\ttrue\tx\ntrue\n"
    )


def test_emit_may_be_overridden(server: AppServer):
    source = "<?lsp local old = _emit function _emit(s) old(s:upper()) end ?>loud <?lsp= 'yes' ?>"
    assert server.page(source).text == "LOUD YES"


def test_functions_of_the_application_do_not_see_the_request(server: AppServer):
    server.app({".preload": "function f() return request end", "p.lsp": "<?lsp= tostring(app.f()) ?>"})
    assert server.ask("/p.lsp").text == "nil"


def test_pages_of_an_application_without_preload_get_its_table(server: AppServer):
    assert server.page("<?lsp= type(app) ?>").text == "table"


# ---- errors


def test_an_error_replaces_written_output_by_the_traceback(server: AppServer, caplog):
    answer = server.page("dropped\n<?lsp\nlocal function inner() error'no luck' end\ninner()\n?>")
    assert answer.status == 500
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert answer.text.startswith("Lua error: page.lsp:3: no luck\nstack traceback:\n")
    assert "page.lsp:4: in" in answer.text
    assert "dropped" not in answer.text
    assert "smqrt/apps/lua" not in answer.text
    told = server.page("<?lsp\nlocal function inner() request:header({}) end\ninner() ?>").text
    assert told == (
        "Lua error: page.lsp:2: bad argument #1 to 'header' (string expected, got table)\nstack traceback:\n"
        "\tpage.lsp:2: in local 'inner'\n\tpage.lsp:3: in main chunk\n"
    )
    assert "page.lsp:3: no luck" in caplog.text


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("\n<?lsp if ?>", "page.lsp:2: "),
        ("a\nb<?lsp x()", "page.lsp: start tag without end tag at line# 2"),
        ("<?lsp error{code=1} ?>", "(error object is a table value)"),
        ("<?lsp error() ?>", by_version("nil", "<no error object>")),
        ("<?lsp local a = nil + 1 ?>", "page.lsp:1: attempt to perform arithmetic on a nil value"),
        (
            "<?lsp response:write({}) ?>",
            "page.lsp:1: bad argument #1 to 'write' (string or number expected, got table)",
        ),
        (
            "<?lsp response:setstatus('x') ?>",
            "page.lsp:1: bad argument #1 to 'setstatus' (number expected, got string)",
        ),
    ],
)
def test_failures_are_reported(server: AppServer, source, error):
    answer = server.page(source)
    assert answer.status == 500
    assert error in answer.text
    assert "Lua error" in answer.text


def test_a_script_gets_the_error_as_json(server: AppServer):
    answer = server.page("<?lsp error'no luck' ?>", headers={"X-Requested-With": "XMLHttpRequest"})
    assert answer.headers["Content-Type"] == "application/json"
    told = json.loads(answer.text)
    assert told["error"] == "lua"
    assert told["emsg"].startswith("page.lsp:1: no luck")


def test_an_error_under_way_is_appended_as_html(server: AppServer):
    answer = server.page("<?lsp print('begun') response:flush() print('more') error'<b>no luck' ?>")
    assert answer.status == 200
    assert answer.text.startswith("begun\nmore\n")
    assert "Lua error: page.lsp:1: &lt;b&gt;no luck" in answer.text


def test_the_error_handler_gets_message_and_environment(server: AppServer):
    server.app(
        {
            ".preload": "ba.seterrh(function(message, env) _G.told = message .. env.request:uri() end)",
            "p.lsp": "<?lsp error'seen' ?>",
        }
    )
    assert server.ask("/p.lsp").status == 500
    assert server.vm.eval("return told")[0].startswith(b"p.lsp:1: seen")
    assert server.vm.eval("return told")[0].endswith(b"/p.lsp")


def test_a_failing_error_handler_changes_nothing(server: AppServer):
    server.app({".preload": "ba.seterrh(function() error'again' end)", "p.lsp": "<?lsp error'seen' ?>"})
    assert "seen" in server.ask("/p.lsp").text


def test_an_error_in_one_page_leaves_the_others_alone(server: AppServer):
    server.app({"bad.lsp": "<?lsp error'x' ?>", "good.lsp": "fine"})
    for _ in range(3):
        assert server.ask("/bad.lsp").status == 500
        assert server.ask("/good.lsp").text == "fine"


# ---- include, forward, redirect


def test_include_adds_pages_and_files_in_order(server: AppServer):
    server.app(
        {
            "p.lsp": "1<?lsp local function add(name) response:include(name) end add'part.lsp' ?>3"
            "<?lsp add'.head.html' ?>5<?lsp add'x.shtml' ?>7",
            "part.lsp": "2",
            ".head.html": "4",
            "x.shtml": "6",
        }
    )
    answer = server.ask("/p.lsp")
    assert (answer.status, answer.text) == (200, "1234567")
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"


def test_relative_paths_start_at_the_page(server: AppServer):
    server.app(
        {
            "sub/p.lsp": "<?lsp for n in ('q.lsp ../top.lsp /app/sub/q.lsp'):gmatch'%S+' do response:include(n) end ?>",
            "sub/q.lsp": "q",
            "top.lsp": "top<?lsp response:include'sub/q.lsp' ?>",
        },
        "app",
    )
    assert server.ask("/app/sub/p.lsp").text == "qtopqq"


def test_include_depth_is_tracked(server: AppServer):
    show = "<?lsp print(response:initial(), response:isinclude()) print(response:isforward()) ?>"
    server.app(
        {"p.lsp": show + "<?lsp response:include'i.lsp' response:forward'f.lsp' ?>", "i.lsp": show, "f.lsp": show}
    )
    server.write("", {"p.lsp": show + "<?lsp response:include'i.lsp' ?>", "f.lsp": "<?lsp response:forward'p.lsp' ?>"})
    assert server.ask("/p.lsp").text == "true\tfalse\t0\nfalse\t0\nfalse\ttrue\t1\nfalse\t0\n"
    assert server.ask("/f.lsp").text == "false\tfalse\t0\ntrue\t1\nfalse\ttrue\t1\ntrue\t1\n"


@pytest.mark.parametrize("call", ["include", "forward", "redirect"])
def test_a_missing_target_raises(server: AppServer, call):
    assert "page.lsp:1: pagenotfound" in server.page(f"<?lsp response:{call}'no.lsp' ?>").text


def test_endless_nesting_is_refused(server: AppServer):
    server.app({"i.lsp": "<?lsp response:include'i.lsp' ?>", "f.lsp": "<?lsp response:forward'f.lsp' ?>"})
    assert "toomanyincludes" in server.ask("/i.lsp").text
    assert "toomanyforwards" in server.ask("/f.lsp").text


def test_ten_includes_are_allowed(server: AppServer):
    server.app({"i.lsp": "<?lsp n = (n or 0) + 1 print(n) if n < 11 then response:include'i.lsp' end ?>"})
    assert server.ask("/i.lsp").text.split() == [str(number) for number in range(1, 12)]


@pytest.mark.parametrize("name", ["part.shtml", "PART.SHTML", "sub/part"])
def test_parts_of_pages_are_html(server: AppServer, name: str):
    server.app({"p.lsp": f"<?lsp response:forward'/{name}' ?>", name: "<p>ä</p>", "plain": "x"})
    for _ in range(3):
        answer = server.ask("/p.lsp")
        assert (answer.text, answer.headers["Content-Type"]) == ("<p>ä</p>", "text/html; charset=utf-8")
    assert server.ask("/plain").headers["Content-Type"] == "application/octet-stream"


def test_forward_ends_the_caller_and_drops_its_output(server: AppServer):
    server.app(
        {
            "p.lsp": "x<?lsp mark = 'from p' response:setheader('X-A', '1') response:forward't.lsp' _G.ran = 1 ?>",
            "t.lsp": "<?lsp= mark ?>",
            "c.lsp": "dropped<?lsp response:forward('t.txt', true) _G.went_on = true ?>",
            "t.txt": "text",
        }
    )
    answer = server.ask("/p.lsp")
    assert answer.text == "from p"
    assert answer.headers["X-A"] == "1"
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert server.ask("/c.lsp").text == "text"
    assert server.vm.eval("return ran, went_on") == (None, True)


def test_forward_to_a_hidden_page(server: AppServer):
    server.app({"p.lsp": "<?lsp response:forward'.login.lsp' ?>", ".login.lsp": "log in"})
    assert server.ask("/p.lsp").text == "log in"
    assert server.ask("/.login.lsp").status == 404


def test_forward_after_commit_raises(server: AppServer):
    server.app({"p.lsp": "x<?lsp response:flush() response:forward't.lsp' ?>", "t.lsp": "t"})
    assert "iscommitted" in server.ask("/p.lsp").text


def test_an_error_in_an_included_page_aborts_the_whole(server: AppServer):
    server.app({"p.lsp": "before<?lsp response:include'bad.lsp' _G.after = 1 ?>", "bad.lsp": "\n<?lsp error'inner' ?>"})
    answer = server.ask("/p.lsp")
    assert answer.status == 500
    assert answer.text.startswith("Lua error: bad.lsp:2: inner")
    assert server.vm.eval("return after") == (None,)


def test_a_syntax_error_in_an_included_page_names_it(server: AppServer):
    server.app({"p.lsp": "<?lsp response:include'bad.lsp' ?>", "bad.lsp": "\n<?lsp if ?>"})
    assert "bad.lsp:2: " in server.ask("/p.lsp").text


def test_abort_in_an_included_page_stops_the_outer_ones(server: AppServer):
    server.app({"p.lsp": "1<?lsp response:include'q.lsp' ?>3", "q.lsp": "2<?lsp response:abort() ?>never"})
    answer = server.ask("/p.lsp")
    assert (answer.status, answer.text) == (200, "12")


def test_pcall_does_not_hold_a_terminated_page(server: AppServer):
    source = """<?lsp
      local ok, e = pcall(response.abort, response)
      _G.caught = tostring(ok) .. tostring(e)
      pcall(print, 'never')
      print('never')
      _G.beyond = true
    ?>"""
    answer = server.page(source)
    assert (answer.status, answer.text) == (200, "")
    assert server.vm.eval("return caught, beyond") == (by_version(b"falsenil", b"false<no error object>"), None)


def test_abort_ends_a_page_from_inside_a_coroutine(server: AppServer):
    assert server.page("1<?lsp coroutine.wrap(function() response:abort() end)() ?>2").text == "1"
    assert server.page("1<?lsp coroutine.resume(coroutine.create(function() response:abort() end)) ?>2").text == "1"


def test_methods_raise_when_the_request_is_over(server: AppServer):
    server.app({"p.lsp": "<?lsp _G.old, _G.old_print, _G.old_emit = request, print, _emit ?>"})
    server.ask("/p.lsp")
    for call in (
        "old:uri()",
        "old:write'x'",
        "old:data()",
        "old_print(1)",
        "old_emit'x'",
        "old:header'a'",
        "old:env()",
    ):
        ok, message = server.vm.eval(f"return pcall(function() {call} end)")
        assert ok is False
        assert b"request/response expired" in message
    assert server.vm.eval("return old:valid()") == (False,)


def test_output_of_one_page_is_never_that_of_another(server: AppServer):
    server.app({"p.lsp": "first<?lsp _G.old = request ba.sleep(10) ?>", "q.lsp": "second<?lsp ba.sleep(10) ?>"})
    assert [server.ask(f"/{name}.lsp").text for name in "pqp"] == ["first", "second", "first"]
    assert server.vm.eval("return old.peek()") == (b"", 0)
    assert server.vm.eval("return old.take(), old.take(true)") == (None, None)
    assert server.ask("/q.lsp").text == "second"
    large = "<?lsp for i = 1, 3000 do print(i) end print(('x'):rep(100000)) ?>"
    assert len(server.page(large).body) == sum(len(str(i)) + 1 for i in range(1, 3001)) + 100001


def test_a_page_may_block(server: AppServer):
    assert server.page("a<?lsp ba.sleep(10) ?>b<?lsp ba.sleep(10) print(request:uri()) ?>").text == "ab/page.lsp\n"


def test_parselsp(server: AppServer):
    source = """<?lsp
      local f = assert(load(ba.parselsp("<b><?lsp= pathname ?></b>")))
      f(_ENV, "given", io, {}, app)
      print()
      print(ba.parselsp("x", true))
      print(ba.parselsp("<" .. "?lsp "))
    ?>"""
    assert server.page(source).text == '<b>given</b>\n _emit"x";\nnil\tstart tag without end tag at line# 1\n'


def test_pages_that_block_do_not_mix(server: AppServer):
    server.app(
        {"p.lsp": "<?lsp mine = request:data'n' for i = 1, 5 do print(mine) ba.sleep(1) end print(request:data'n') ?>"}
    )
    asked = {number: gevent.spawn(server.ask, f"/p.lsp?n={number}") for number in range(40)}
    for number, answer in asked.items():
        assert answer.get(timeout=10).text == f"{number}\n" * 6


def test_a_client_that_goes_away_ends_nothing_else(server: AppServer, caplog):
    server.app(
        {
            "p.lsp": """<?lsp
              local ok, e = true
              while ok do ok, e = response:write(("x"):rep(100000)) ba.sleep(1) end
              print"ignored"
              _G.told = tostring(ok) .. " " .. e
            ?>""",
            "q.lsp": "fine",
        }
    )
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall(b"GET /p.lsp HTTP/1.1\r\nHost: h\r\n\r\n")
    client.recv(1000)
    client.close()
    wait_until(lambda: server.vm.eval("return told")[0] is not None)
    assert server.vm.eval("return told") == (b"nil socketclosed",)
    assert server.ask("/q.lsp").text == "fine"
    assert not caplog.records


def test_an_unreadable_preload_is_reported(server: AppServer):
    server.write("app", {".preload/x": ""})
    assert (server.app({}, "app").error or "").startswith(".preload can't be read: ")

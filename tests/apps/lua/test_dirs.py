"""Virtual directories from Lua (spec: bas-api §4, runtime §5)."""

from __future__ import annotations

import pytest

from tests.apps.lua.app_server import AppServer


def preload(server: AppServer, text: str, **files: str):
    application = server.app({".preload": text} | {name.replace("_", "."): content for name, content in files.items()})
    assert application.error is None, application.error
    return application


def test_a_function_gets_environment_and_relative_path(server: AppServer):
    preload(
        server,
        """
        local d = ba.create.dir'api'
        d:setfunc(function(_ENV, rel) print(rel, request:uri(), type(response)) end) dir:insert(d)
        """,
    )
    assert server.ask("/api/").text == "\t/api/\tuserdata\n"
    assert server.ask("/api/users/5?x=1").text == "users/5\t/api/users/5\tuserdata\n"
    assert server.ask("/api/a/").text == "a/\t/api/a/\tuserdata\n"
    assert server.ask("/apis").status == 302
    assert server.ask("/api").headers["Location"].endswith("/api/")


@pytest.mark.parametrize(("value", "status"), [("false", 404), ("nil", 200), ("true", 200), ("0", 200), ("", 200)])
def test_exactly_false_means_not_handled(server: AppServer, value, status):
    preload(server, f"d = ba.create.dir'x' d:setfunc(function() return {value} end) dir:insert(d)")
    assert server.ask("/x/y.z").status == status


def test_handlers_of_one_request_share_its_environment(server: AppServer):
    preload(
        server,
        """
        first, second = ba.create.dir(5), ba.create.dir(-5)
        first:setfunc(function(_ENV) mark = "from first" response:setheader("X-First", "1") return false end)
        second:setfunc(function(_ENV) print(mark) end)
        first:insert() second:insert()
        """,
        a_lsp="<?lsp= mark ?>",
    )
    assert server.ask("/none.txt").text == "from first\n"
    assert server.ask("/a.lsp").text == "from first"
    assert server.ask("/a.lsp").headers["X-First"] == "1"


def test_unhandled_messages_leave_nothing_in_lua(server: AppServer):
    preload(
        server,
        """
        local envs = setmetatable({}, {__mode = 'k'})
        _G.envs = envs
        first = ba.create.dir(5) first:setfunc(function(_ENV) envs[_ENV] = 1 return false end) first:insert()
        """,
    )
    for _ in range(20):
        assert server.ask("/none.txt").status == 404
    server.vm.eval("collectgarbage() collectgarbage()")
    assert server.vm.eval("local n = 0 for _ in pairs(envs) do n = n + 1 end return n")[0] <= 2


def test_priorities_and_unnamed_children(server: AppServer):
    preload(
        server,
        """
        local function say(text) return function(_ENV, rel) print(text, rel) end end
        for _, spec in ipairs{{"low", -1}, {"high", 1}, {"middle", 0}} do
          local d = ba.create.dir("same", spec[2]) d:setfunc(say(spec[1])) dir:insert(d)
        end
        local fallback = ba.create.dir() fallback:setfunc(say"fallback") dir:insert(fallback, true)
        """,
        file_txt="static",
    )
    assert server.ask("/same/x").text == "high\tx\n"
    assert server.ask("/file.txt").text == "static"
    assert server.ask("/anything/else").text == "fallback\tanything/else\n"


def test_a_prologue_wins_over_files(server: AppServer):
    preload(
        server,
        """
        local d = ba.create.dir()
        d:setfunc(function(_ENV, rel) if rel ~= "file.txt" then return false end print"prologue" end)
        dir:insertprolog(d)
        """,
        file_txt="static",
        other_txt="other",
        p_lsp="<?lsp response:include'file.txt' ?>",
    )
    assert server.ask("/file.txt").text == "prologue\n"
    assert server.ask("/other.txt").text == "other"
    assert server.ask("/p.lsp").text == "static"


def test_the_function_of_a_reader_comes_before_its_files(server: AppServer):
    preload(
        server,
        "dir:setfunc(function(_ENV, rel) if rel == 'a.txt' then print'function' else return false end end)",
        a_txt="file a",
        b_txt="file b",
    )
    assert server.ask("/a.txt").text == "function\n"
    assert server.ask("/b.txt").text == "file b"


def test_a_function_sees_the_application_as_pages_do(server: AppServer):
    """Also one that uses nothing else of its application, below the root directory, and around another one's."""
    server.app(
        {
            ".preload": """
            name = "other"
            d = ba.create.dir"shared" d:setfunc(function(_ENV) print(app and app.name) return true end) d:insert()
            """
        },
        "other",
    )
    preload(
        server,
        """name = "first"
        local inner = ba.create.dir"inner" inner:setfunc(function(_ENV) response:write(app.name) end) dir:insert(inner)
        local d = ba.create.dir"x"
        d:setfunc(function(_ENV, rel)
          response:write(app.name, " ") response:include"/shared/" response:write(app.name, " ")
          response:include"/page.lsp"
        end)
        dir:insert(d)""",
    )
    server.write("", {"page.lsp": "<?lsp= app.name ?>"})
    assert server.ask("/inner/").text == "first"
    assert server.ask("/shared/").text == "other\n"
    assert server.ask("/x/").text == "first other\nfirst first"


def test_setfunc_is_taken_back(server: AppServer):
    preload(server, "d = ba.create.dir'x' dir:insert(d) d:setfunc(function() end) d:setfunc(nil)")
    assert server.ask("/x/").status == 404


def test_unlink_and_insert_again(server: AppServer):
    preload(
        server,
        """
        local d = ba.create.dir'x' d:setfunc(function(_ENV) print(d:baseuri()) end)
        assert(d:unlink() == false) dir:insert(d) assert(d:unlink() == true)
        local middle = ba.create.dir'deep' middle:insert(d) dir:insert(middle)
        """,
    )
    assert server.ask("/x/").status == 404
    assert server.ask("/deep/x/").text == "/deep/x/\n"


def test_inserting_twice_is_an_error(server: AppServer):
    error = server.app({".preload": "local d = ba.create.dir'x'\ndir:insert(d)\ndir:insert(d)"}, "app").error
    assert error is not None
    assert error.startswith("app/.preload:3: ")
    assert "alreadyinserted" in error


def test_a_root_directory_at_a_path(server: AppServer):
    preload(
        server, "local d = ba.create.dir'leaf' d:setfunc(function(_ENV) print(d:baseuri(), d:name()) end) d:insert'a/b'"
    )
    assert server.ask("/a/b/leaf/").text == "/a/b/leaf/\tleaf\n"


def test_children_live_with_their_parent(server: AppServer):
    preload(server, "do local d = ba.create.dir'x' d:setfunc(function(_ENV) print'alive' end) dir:insert(d) end")
    server.vm.eval("collectgarbage() collectgarbage()")
    assert server.ask("/x/").text == "alive\n"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("ba.create.dir('a', 128)", "priority must be an integer from -127 to 127"),
        ("ba.create.dir('a', 1.5)", "priority must be an integer"),
        ("ba.create.dir({}, 1)", "bad argument #1 to 'dir' (string expected, got table)"),
        ("ba.create.dir('a/b')", "has a slash"),
        ("dir:insert(true)", "bad argument #1 to 'insert' (directory expected, got boolean)"),
        ("dir:setfunc(5)", "bad argument #1 to 'setfunc' (function expected, got number)"),
        ("dir:header'x'", "bad argument #1 to 'header' (table expected, got string)"),
        ("dir:lspfilter'x'", "bad argument #1 to 'lspfilter' (table expected, got string)"),
        ("ba.create.resrdr('a', 0)", "io expected"),
        ("dir:service({}, 'x')", "bad argument #1 to 'service' (request expected"),
    ],
)
def test_wrong_arguments_name_the_line(server: AppServer, code, error):
    told = server.app({".preload": "\n" + code}, "app").error
    assert told is not None
    assert told.startswith("app/.preload:2: ")
    assert error in told


def test_a_table_with_dir_stands_for_a_directory(server: AppServer):
    preload(server, "local d = ba.create.dir'x' d:setfunc(function(_ENV) print'inner' end) dir:insert{dir = d}")
    assert server.ask("/x/").text == "inner\n"


def test_a_reader_of_its_own(server: AppServer):
    server.write("", {"assets/a.css": "css", "assets/p.lsp": "<?lsp= tostring(app) ?>", ".secret/s.txt": "s"})
    preload(
        server,
        """
        r = ba.create.resrdr("static", 3, ba.mkio(io, "assets"))
        r:header{["X-From"] = "reader"} r:maxage(60) r:insert()
        assert(type(r:io()) == "userdata" and r:io() == r:io() and r:getapp() == nil and dir:io() == io)
        """,
    )
    answer = server.ask("/static/a.css")
    assert (answer.text, answer.headers["X-From"], answer.headers["Cache-Control"]) == ("css", "reader", "max-age=60")
    assert server.ask("/static/p.lsp").status == 404


def test_headers_of_a_reader(server: AppServer):
    preload(server, "dir:header{A = 1}", p_lsp="<?lsp if request:data'x' then app.dir:header{} end ?>", f_txt="f")
    assert server.ask("/p.lsp").headers["A"] == "1"
    assert server.ask("/f.txt").headers["A"] == "1"
    server.ask("/p.lsp?x=1")
    assert "A" not in server.ask("/f.txt").headers


def test_service_asks_another_directory(server: AppServer):
    preload(
        server,
        """
        local hidden = ba.create.dir'hidden'
        hidden:setfunc(function(_ENV, rel) if rel == "no" then return false end print("hidden", rel) end)
        d = ba.create.dir'x'
        d:setfunc(function(_ENV, rel) response:write"before " print(hidden:service(request, rel)) end)
        dir:insert(d)
        """,
    )
    assert server.ask("/x/a").text == "before hidden\ta\ntrue\n"
    assert server.ask("/x/no").text == "before false\n"


def test_an_error_in_a_function_names_its_line(server: AppServer):
    preload(server, "local d = ba.create.dir'x'\nd:setfunc(function()\n error'inside'\nend)\ndir:insert(d)")
    answer = server.ask("/x/")
    assert answer.status == 500
    assert "root/.preload:3: inside" in answer.text


def test_relative_paths_of_a_function_start_at_its_directory(server: AppServer):
    server.write("", {"page.lsp": "page of <?lsp= request:uri() ?>"})
    preload(
        server,
        """
        local d = ba.create.dir()
        d:setfunc(function(_ENV, rel) if rel == "go" then response:forward"/page.lsp" end return false end)
        dir:insert(d)
        dir:setfunc(function(_ENV, rel)
          if rel ~= "in" then return false end
          response:include"page.lsp" print"!"
        end)
        """,
    )
    assert server.ask("/go").text == "page of /go"
    assert server.ask("/in").text == "page of /in!\n"


def test_a_function_that_forwards_to_its_own_reader(server: AppServer):
    preload(server, "dir:setfunc(function(_ENV, rel) response:forward'.main.lsp' end)", _main_lsp="main")
    assert server.ask("/whatever").text == "main"


def test_a_function_may_block(server: AppServer):
    preload(server, "d = ba.create.dir'x' d:setfunc(function(_ENV) ba.sleep(10) print'woke' end) dir:insert(d)")
    assert server.ask("/x/").text == "woke\n"

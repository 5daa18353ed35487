"""The life of an application (spec: runtime §2, §3)."""

from __future__ import annotations

import logging
import zipfile
from pathlib import Path

import pytest

from tests.apps.lua.app_server import AppServer

PAGE = "<?lsp= app and app.name or 'no app' ?>"


def test_an_application_serves_its_page_and_files(server: AppServer):
    application = server.app({".preload": "name = 'first'", "index.lsp": PAGE, "style.css": "b{}"})
    assert application.error is None
    assert application.uri == "/"
    answer = server.ask("/")
    assert (answer.status, answer.text) == (200, "first")
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert server.ask("/style.css").text == "b{}"


def test_applications_are_mounted_under_their_names(server: AppServer):
    for name in ("one", "two"):
        assert server.app({".preload": f"name = '{name}'", "index.lsp": PAGE}, name).uri == f"/{name}/"
    assert server.ask("/one/").text == "one"
    assert server.ask("/two/index.lsp").text == "two"
    assert server.ask("/one").status == 302
    assert server.ask("/three/").status == 404


def test_preload_has_its_table_as_environment(server: AppServer):
    application = server.app(
        {
            ".preload": """
              assert(app == _ENV and app.app == app)
              assert(type(io) == "userdata" and type(dir) == "userdata" and type(appreq) == "function")
              assert(io.open ~= _G.io.open and _G.type == type)
              own = 1
              assert(rawget(app, "own") == 1 and _G.own == nil)
              assert(dir:name() == "here" and dir:baseuri() == "/here/")
              return
            """
        },
        "here",
    )
    assert application.error is None, application.error


def test_preload_is_optional(server: AppServer):
    assert server.app({"index.lsp": PAGE}).error is None
    assert server.ask("/").text == "no app" or server.ask("/").status == 200


@pytest.mark.parametrize(
    ("preload", "error"),
    [
        ("local a = 1\nerror('no luck')", "bad/.preload:2: no luck"),
        ("\n\nlocal t = nil\nt.x = 1", "bad/.preload:4: attempt to index a nil value"),
        ("\nif then", "bad/.preload:2: unexpected symbol near 'then'"),
        ("error({})", "(error object is a table value)"),
        ("require'no.such'", "bad/.preload:1: module 'no.such' not found"),
        ("appreq'none'", "bad/.preload:1: appreq 'none': .lua/none.lua: notfound"),
    ],
)
def test_a_failed_preload_is_reported_and_others_continue(server: AppServer, caplog, preload, error):
    bad = server.app({".preload": preload, "index.lsp": "never", "a.txt": "never"}, "bad")
    good = server.app({"index.lsp": "fine"}, "good")
    assert bad.error is not None
    assert bad.error.startswith(error)
    assert error in caplog.text
    assert good.error is None
    assert server.ask("/bad/").status == 503
    assert server.ask("/bad/a.txt").status == 503
    assert server.ask("/good/").text == "fine"


def test_other_files_fail_without_affecting_applications(server: AppServer):
    (server.folder / "file").write_text("no zip")
    assert "ziperror" in (server.applications.load("a", server.folder / "file").error or "")
    assert "notfound" in (server.applications.load("b", server.folder / "missing").error or "")


def test_unload_runs_onunload_once_and_empties_the_table(server: AppServer):
    preload = """
      log, alive = _G.log or {}, true
      _G.log = log
      probe = function() return alive, ba end
      _G.probe = probe
      function onunload() log[#log + 1] = "bye" end
    """
    application = server.app({".preload": preload, "index.lsp": "here"}, "app")
    assert server.ask("/app/").text == "here"
    application.unload()
    application.unload()
    assert server.ask("/app/").status == 404
    assert server.vm.eval("return #log, log[1]") == (1, b"bye")
    assert server.vm.eval("return probe()") == (None, None)


def test_an_error_in_onunload_is_logged(server: AppServer, caplog):
    application = server.app({".preload": "function onunload()\n error('stuck') end"}, "app")
    application.unload()
    assert "app/.preload:2: stuck" in caplog.text


def test_reload_runs_the_new_preload_in_the_same_table(server: AppServer):
    application = server.app({".preload": "_G.first = app; version = 1", "index.lsp": "<?lsp= app.version ?>"})
    assert server.ask("/").text == "1"
    server.write("", {".preload": "same = _G.first == app; version = 2"})
    application.reload()
    assert application.error is None
    assert server.ask("/").text == "2"
    server.write("", {"index.lsp": "<?lsp= tostring(app.same) ?>"})
    assert server.ask("/").text == "true"


def test_reload_brings_back_an_application_that_had_failed(server: AppServer):
    application = server.app({".preload": "error'x'", "index.lsp": "works"})
    assert application.error
    server.write("", {".preload": ""})
    application.reload()
    assert application.error is None
    assert server.ask("/").text == "works"


def test_reload_leaves_no_directory_behind(server: AppServer):
    preload = """
      local d = ba.create.dir("hello", 5)
      d:setfunc(function(_ENV) response:write(number) end)
      d:insert()
      _G.number = "1"
    """
    application = server.app({".preload": preload}, "app")
    assert server.ask("/hello/").text == "1"
    server.write("app", {".preload": preload.replace('"1"', '"2"')})
    application.reload()
    assert server.ask("/hello/").text == "2"
    assert [child.name for child in server.root.children] == ["hello", "app"]
    application.unload()
    assert server.root.children == ()


def test_a_root_directory_of_preload_remains_without_a_reference(server: AppServer):
    server.app({".preload": "local d = ba.create.dir'x' d:setfunc(function(_ENV) response:write'kept' end) d:insert()"})
    server.vm.eval("collectgarbage() collectgarbage()")
    assert server.ask("/x/").text == "kept"


def test_an_unreferenced_directory_is_removed(server: AppServer):
    server.vm.eval("ba.create.dir'y':insert()")
    server.vm.eval("collectgarbage() collectgarbage()")
    assert server.root.children == ()


def test_the_application_can_be_code_only(server: AppServer):
    application = server.app({".preload": "dir:unlink()", "index.lsp": "never"}, "lib")
    assert application.error is None
    assert server.ask("/lib/").status == 404
    application.unload()


def test_preload_may_block(server: AppServer):
    application = server.app({".preload": "local t = ba.clock() ba.sleep(30) waited = ba.clock() - t"})
    assert application.error is None
    assert float(server.page("<?lsp= app.waited ?>").text) >= 29


def test_an_archive_works_like_a_folder(server: AppServer):
    path = server.folder / "shop.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(".preload", "mako.createloader(io) title = require'shop.names'.title helper = appreq'own'")
        archive.writestr(".lua/shop/names.lua", "return {title = 'Zipped'}")
        archive.writestr(".lua/own.lua", "return title")
        archive.writestr("index.lsp", "<?lsp= app.title ?> <?lsp= io:resourcetype() ?> <?lsp= app.helper ?>")
        archive.writestr("inner/index.html", "plain")
    application = server.applications.load("shop", path)
    assert application.error is None
    assert server.ask("/shop/").text == "Zipped zip Zipped"
    assert server.ask("/shop/inner/").text == "plain"
    assert server.ask("/shop/.preload").status == 404
    inner = server.applications.load("in", path, inner="inner")
    assert inner.error is None
    assert server.ask("/in/").text == "plain"


def test_an_error_in_an_archive_names_the_archive(server: AppServer):
    path = server.folder / "broken.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(".preload", "\nerror'inside'")
    assert (server.applications.load("z", path).error or "").startswith("broken.zip/.preload:2: inside")


def test_createloader_finds_modules_and_gives_them_the_globals(server: AppServer):
    server.app(
        {
            ".preload": "mako.createloader(io) secret = 1 a = require'sub.mod' b = require'sub/mod' top = require'top'",
            ".lua/sub/mod.lua": "return {name = ..., sees = secret}",
            ".lua/top.lua": "return 'top level'",
            "index.lsp": "<?lsp= app.a.name ?> <?lsp= app.a.sees ?> <?lsp= app.top ?>",
        }
    )
    assert server.ask("/").text == "sub.mod nil top level"
    assert server.ask("/.lua/top.lua").status == 404


def test_an_error_in_a_module_names_its_line(server: AppServer):
    application = server.app({".preload": "mako.createloader(io) require'm'", ".lua/m.lua": "\n\nx.y = 1"}, "app")
    assert (application.error or "").startswith("app/.lua/m.lua:3: ")
    application = server.app({".preload": "mako.createloader(io) require'syntax'", ".lua/syntax.lua": "\nx x"}, "app2")
    assert "app2/.lua/syntax.lua:2: " in (application.error or "")


def test_appreq_shares_the_environment_and_is_cached_per_start(server: AppServer):
    files = {
        ".preload": "count = 0 one = appreq'util.math' two = appreq'util/math'",
        ".lua/util/math.lua": "count = count + 1 return function() return count end",
        "index.lsp": "<?lsp= app.count ?> <?lsp= app.one() ?> <?lsp= tostring(app.one == app.appreq'util.math') ?>",
    }
    application = server.app(files)
    assert server.ask("/").text == "2 2 true"
    application.reload()
    assert server.ask("/").text == "2 2 true"


@pytest.mark.parametrize(
    "path",
    [
        "/.preload", "/.lua/secret.lua", "/.config", "/sub/.hidden", "/part.shtml", "/%2epreload", "/.%70reload",
        "/x/../.preload", "/sub/%2ehidden", "/./.preload", "//.preload", "/sub/..%2f.preload", "/index.lsp/",
        "/.git/config", "/..%2froot/.preload",
    ],
)  # fmt: skip
def test_hidden_names_are_never_shown(server: AppServer, path):
    names = (".preload", ".lua/secret.lua", ".config", "sub/.hidden", "part.shtml", ".git/config")
    server.app(dict.fromkeys(names, "-- SECRET") | {"index.lsp": "<?lsp local SECRET ?>page"})
    answer = server.ask(path)
    assert answer.status in (400, 404)
    assert "SECRET" not in answer.text


def test_page_source_is_never_shown(server: AppServer):
    server.app({"index.lsp": "<?lsp local SECRET ?>page", "Upper.LSP": "<?lsp local SECRET ?>upper"})
    for path in ("/index.lsp", "/", "/Upper.LSP", "/index.lsp?x=1", "/index.lsp%20", "/index.LSP"):
        assert "SECRET" not in server.ask(path).text


def test_mako_has_the_process(server: AppServer):
    text = server.page(
        """<?lsp
        assert(mako.argv[1] == "serve" and mako.argv[2] == "-x" and #mako.argv == 2)
        assert(mako.env.PATH and mako.version and mako.date and mako.cwd and mako.execpath)
        assert(mako.port == PORT and mako.sslport == nil and mako.daemon == false and mako.cfgfname == nil)
        assert(mako.dos2unix("/a/b") == "/a/b")
        assert(esp32 == nil and xedge == nil and bd == nil)
        ?>fine""".replace("PORT", str(server.port))
    ).text
    assert text == "fine"


def test_mako_exit_and_onexit(server: AppServer, caplog):
    server.app(
        {
            ".preload": """
              _G.order = ""
              local function gone() _G.order = _G.order .. "x" end
              mako.onexit(function() _G.order = _G.order .. "1" end, true)
              mako.onexit(gone, true)
              mako.onexit(function() error"in exit" end, true)
              mako.onexit(function() ba.sleep(1) _G.order = _G.order .. "2" end, true)
              mako.onexit(gone, false)
            """
        },
        "app",
    )
    server.page("<?lsp mako.exit(3) ?>")
    assert server.stops == [3]
    server.applications.run_exit_functions()
    assert server.vm.eval("return order") == (b"12",)
    assert "app/.preload:6: in exit" in caplog.text


def test_two_applications_share_globals_but_not_their_tables(server: AppServer):
    server.app({".preload": "x = 1 _G.shared = 7"}, "one")
    server.app({".preload": "assert(x == nil and shared == 7) x = 2"}, "two")
    assert all(child for child in server.root.children)
    assert server.vm.eval("return x") == (None,)


def test_logging_goes_to_the_lua_logger(server: AppServer, caplog):
    with caplog.at_level(logging.ERROR, "smqrt.lua"):
        server.app({".preload": "error'seen'"}, "app")
    assert any(record.name == "smqrt.lua" for record in caplog.records)


def test_pipelines_are_code_and_not_shown(server: AppServer):
    shown = {
        "pipelines/readme.txt": "r",
        "pipelines/devices.csv": "d",
        "pipelines/index.html": "i",
        "docs/pipelines.txt": "x",
    }
    closed = ["pipelines/x.py", "pipelines/x.sql", "pipelines/sub/x.py", "pipelines/X.PY", "pipelines/.state/x.json"]
    closed += ["docs/pipelines/x.sql", "tool.py", "names.db", "smqrt.toml", "records/token", "records/wal/n1/lock"]
    closed += ["records/hub.json", "records/manifest.json", "records/data/rows", "records/txn.n1.json"]
    closed += [".journal/token", ".journal/hub.json", ".journal/wal/n1/0.idx", ".pipelines/x/status.json"]
    server.app(shown | dict.fromkeys(closed, "secret"), "app")
    (server.folder / "app" / "link.txt").symlink_to(server.folder / "app" / "pipelines" / "x.py")
    (server.folder / "app" / "other").symlink_to(server.folder / "app" / "pipelines")
    server.write("", {})
    for name, content in shown.items():
        assert server.ask(f"/app/{name}").text == content
    tricks = [
        "pipelines//x.py",
        "pipelines/./x.py",
        "pipelines/%78.py",
        "a/../pipelines/x.py",
        "other/x.py",
        "link.txt",
    ]
    for name in [*closed, *tricks]:
        answer = server.ask(f"/app/{name}")
        assert answer.status in (302, 404), name
        assert "secret" not in answer.text


def test_pipelines_of_a_zip_file_are_not_shown_either(server: AppServer, tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        for name in ("in/pipelines/x.py", "in/pipelines/x.txt", "pipelines/y.py"):
            archive.writestr(name, name)
    server.applications.load("zip", tmp_path / "app.zip", 0, "in")
    assert server.ask("/zip/pipelines/x.txt").text == "in/pipelines/x.txt"
    assert server.ask("/zip/pipelines/x.py").status == 404


@pytest.mark.parametrize("where", ["kept", "deep/kept", "."])
def test_journals_are_not_shown_wherever_they_are(server: AppServer, where: str):
    places = [
        "token",
        "hub.json",
        "manifest.json",
        "manifest/n1-0-1a.json",
        "retired/n1-0-9.txt",
        "wal/n1/lock",
        "wal/n1/0.arrows",
        "data/date=1/x.parquet",
        "readers/q.json",
    ]
    files = {f"{where}/{name}": "secret" for name in places}
    shown = (
        {"data/x.csv": "d", "wal/x.txt": "w", "token.html": "t", "x/token": "t"} if where != "." else {"x.html": "x"}
    )
    readers = "dir:insert(ba.create.resrdr('sub', app.io)) " + (
        "dir:insert(ba.create.resrdr('io', ba.mkio(app.io, 'deep')))" if where == "deep/kept" else ""
    )
    application = server.app(shown | files | {".preload": readers}, "app")
    assert application.error is None
    (server.folder / "app" / "link.txt").symlink_to(server.folder / "app" / where / "token")
    for name, content in shown.items():
        assert server.ask(f"/app/{name}").text == content
    asked = [f"/app/{where}/{name}" for name in places] + [
        f"/app/sub/{where}/token",
        "/app/link.txt",
        "/app/io/kept/token",
    ]
    for path in asked:
        answer = server.ask(path.replace("/./", "/"))
        assert (answer.status in (302, 404), "secret" in answer.text) == (True, False), path  # 302: to path/, then 404

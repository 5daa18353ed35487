"""Management of applications by applications: mako.getapps, createapp, startapp, stopapp, reloadapp, removeapp."""

from __future__ import annotations

import zipfile

from tests.apps.lua.app_server import AppServer

OTHER = """
visits = (visits or 0) + 1
known = known or {}
assert(app == _ENV)
seen_by_others = app
function onunload() _G.unloaded = (_G.unloaded or 0) + 1 end
"""


def test_stop_and_start(server: AppServer) -> None:
    server.app({".preload": OTHER, "index.html": "here"}, "other")
    lines = server.page(
        """<?lsp
        local other = mako.getapps().other
        assert(other.running and other.path:find"/other$" and other.priority == 0 and other.error == nil)
        assert(type(other.io) == "userdata" and other.dir:baseuri() == "/other/" and other.app.visits == 1)
        local app = other.app
        assert(mako.stopapp"other")
        assert(next(app) == nil and getmetatable(app) == nil, "an emptied table")
        assert(unloaded == 1)
        print(mako.stopapp"other")
        print(mako.getapps().other.running, mako.getapps().other.io)
        assert(mako.startapp(app))
        assert(mako.getapps().other.app == app and app.visits == 1 and app.known and app.print, "filled again")
        print(mako.startapp"other")
        print(mako.reloadapp(app), unloaded)
        print(mako.startapp"nobody")
        for _, wrong in ipairs{true, print, {}, 0, 3, -1, 1.5, "9"} do assert(not pcall(mako.stopapp, wrong)) end
        print(select(2, pcall(mako.stopapp, 3)))
        print(select(2, pcall(mako.stopapp, {})))
        ?>"""
    ).text.splitlines()
    assert lines == ["nil\tstopped", "false\tnil", "nil\trunning", "true\t2", "nil\tnotfound"] + [
        "page.lsp:17: bad argument #1 to 'stopapp' (1 to 2 expected, got 3)",
        "page.lsp:18: bad argument #1 to 'stopapp' (table of an application expected, got table)",
    ]
    assert server.ask("/other/").text == "here"


def test_applications_by_their_place(server: AppServer) -> None:
    """The list is an array of paths; what is at a place is stopped and started by its number."""
    server.app({".preload": OTHER, "index.html": "here"}, "other")
    lines = server.page(
        """<?lsp
        local paths, where = mako.getapps()
        for place, path in pairs(paths) do
          assert(type(place) == "number")
          if path:find"/other$" then where = place end
        end
        print(#paths, mako.stopapp(where), mako.startapp(where), mako.getapps().other.running)
        print(mako.reloadapp(where), mako.removeapp(where), #mako.getapps())
        ?>"""
    ).text.splitlines()
    assert lines == ["2\ttrue\ttrue\ttrue", "true\ttrue\t1"]


def test_a_failing_onunload_is_reported(server: AppServer) -> None:
    """The application is stopped in any case."""
    server.app({".preload": "\nfunction onunload() error'no' end", "index.html": "here"}, "other")
    lines = server.page(
        """<?lsp
        print(mako.stopapp"other")
        print(mako.getapps().other.running, mako.startapp"other", mako.removeapp"other")
        ?>"""
    ).text.splitlines()
    assert lines[0].startswith("false\tother/.preload:2: no")
    assert "false\ttrue\tfalse\tother/.preload:2: no" in lines
    assert server.ask("/other/").status == 404


def test_a_failing_onunload_in_python_is_reported(server: AppServer) -> None:
    server.app({".preload.py": "def onunload():\n    raise ValueError('no')\n"}, "other")
    text = server.page("<?lsp print(mako.stopapp'other') ?>").text
    assert text.startswith("false\t")
    assert "ValueError: no" in text


def test_create_and_remove(server: AppServer) -> None:
    folder = server.write("made", {".preload": "x = 1", "index.lsp": "<?lsp= app.x ?>", "bad/.preload": "\nerror'no'"})
    with zipfile.ZipFile(server.folder / "packed.zip", "w") as archive:
        archive.writestr("index.html", "packed")
    answer = server.page(
        f"""<?lsp
        local home = ba.openio"home"
        local made, made_dir = mako.createapp("one", 3, ba.mkio(home, "made"))
        assert(made_dir == made.dir and made_dir:baseuri() == "/one/")
        print(made.x)
        print(mako.createapp("two", "made").x)
        print(mako.createapp("{folder}").x, (mako.createapp"packed.zip"))
        print(mako.createapp("one", io))
        print(select("#", mako.createapp("bad", "made/bad")), (select(2, mako.createapp("bad", "made/bad"))))
        print(mako.createapp("gone", "nowhere"))
        local later = mako.createapp("later", "made", false)
        print(mako.getapps().later.running, mako.startapp"later", mako.getapps().later.app.x)
        print(mako.removeapp"one", mako.getapps().one)
        print(mako.removeapp"one")
        for _, wrong in ipairs{{table.pack("n", 128, io), table.pack("n", 1, {{}}), {{}}}} do
          assert(not pcall(mako.createapp, table.unpack(wrong)))
        end
        ?>"""
    )
    lines = answer.text.splitlines()
    assert lines[:2] == ["1", "1"]
    assert lines[2].startswith("1\ttable: ")
    assert lines[3] == "nil\texist"
    assert lines[4].startswith("2\tbad/.preload:2: no")
    assert "nil\tnotfound" in lines
    assert lines[-3:] == ["false\ttrue\t1", "true\tnil", "nil\tnotfound"]
    assert server.ask("/two/").text == "1"
    assert server.ask("/packed/").text == "packed"
    assert server.ask("/one/").status == 404


def test_an_application_that_is_changing_is_locked(server: AppServer) -> None:
    preload = """
        word = select(2, mako.reloadapp"self")
        function onunload() _G.at_end = select(2, mako.startapp"self") end
        """
    application = server.app({".preload": preload}, "self")
    assert application.error is None
    page = "<?lsp print(mako.getapps().self.app.word) print(mako.stopapp'self', at_end) ?>"
    assert server.page(page).text == "locked\ntrue\tlocked\n"


def test_an_application_stops_itself_in_a_page(server: AppServer) -> None:
    server.app({"index.lsp": "<?lsp print(mako.stopapp(app), app.io) ?>"}, "self")
    assert server.ask("/self/").text == "true\tnil\n"
    assert server.ask("/self/").status == 404


def test_certificates_where_there_are_none(server: AppServer) -> None:
    assert server.page("<?lsp print(mako.loadcerts()) ?>").text == "nil\tthere are no certificates to read again\n"

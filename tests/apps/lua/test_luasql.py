"""`luasql` and `sqlutil`: what each call returns, says and raises (spec: bas-api §11, §17). The checks are in Lua."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import gevent
import pytest

from smqrt.apps.lua.api import luasql
from smqrt.loop import greenlets
from tests.apps.lua.app_server import AppServer
from tests.support.waiting import wait_until

PRELUDE = """<?lsp
local env = luasql.sqlite()
local function equal(found, wanted)
   if found ~= wanted then error(("found %s, wanted %s"):format(tostring(found), tostring(wanted)), 2) end
end
local function list(...)
   local words = table.pack(...)
   for at = 1, words.n do words[at] = tostring(words[at]) end
   return table.concat(words, " ")
end
local function raises(text, f, ...)
   local done, message = pcall(f, ...)
   message = tostring(message)
   if done or not message:find(text, 1, true) then error("wanted " .. text .. ", got " .. message, 2) end
end
"""


def check(server: AppServer, source: str) -> None:
    answer = server.page(f"{PRELUDE}{source}\nprint 'all of it' ?>")
    assert answer.text == "all of it\n"


def test_environment_and_connection(server: AppServer) -> None:
    check(
        server,
        """
        equal(type(env), "userdata")
        equal(require "luasql", luasql)
        equal(env.quotestr "it's", "'it''s'")
        equal(env:quotestr "it's", "'it''s'")
        equal(luasql.quotestr(7), "'7'")
        raises("bad argument #1 to 'quotestr'", env.quotestr)
        equal(type(env:version()), "string")
        raises("bad argument #1 to 'connect'", env.connect, env, {})
        equal(list(env:connect "no/such/folder/x.db"), "nil CANTOPEN unable to open database file")
        equal(list(env:connect("missing.db", {create = false})), "nil CANTOPEN unable to open database file")
        local conn = assert(env:connect "a.db")
        equal(type(conn), "userdata")
        equal(conn:execute "CREATE TABLE t(id INTEGER PRIMARY KEY, name VARCHAR(20) UNIQUE, value REAL, data BLOB)", 0)
        equal(conn:execute "INSERT INTO t(name, value) VALUES('x', 1), ('y', NULL), ('z', 1e20)", 3)
        equal(conn:execute "UPDATE t SET value = 2 WHERE name = 'x'", 1)
        equal(conn:execute "DELETE FROM t WHERE name = 'nobody'", 0)
        equal(conn:lastid(), 3)
        equal(math.type(conn:lastid()), "integer")
        equal(list(table.unpack(conn:tables())), "t")
        equal(list(conn:execute "INSERT INTO t(name) VALUES('x')"), "nil CONSTRAINT UNIQUE constraint failed: t.name")
        equal(list(conn:execute "SELEC"), 'nil ERROR near "SELEC": syntax error')
        equal((conn:execute "SELECT 1; SELECT 2"):fetch(), "1")
        equal((conn:execute "SELECT 1; -- nothing\\n"):fetch(), "1")
        equal(select("#", conn:execute ""), 1)
        raises("bad argument #1 to 'execute'", conn.execute, conn)
        raises("SQLite connection expected", conn.execute, env, "SELECT 1")
        local ro = assert(env:connect("a.db", {readonly = true}))
        equal(select(2, ro:execute "DELETE FROM t"), "READONLY")
        equal(ro:close(), true)
        equal(env:close(), false)
        equal(conn:close(), true)
        equal(conn:close(), false)
        for name in ("execute mexec commit rollback setautocommit setbusytimeout lastid tables prepare"):gmatch "%a+" do
           raises("the connection is closed", conn[name], conn, "x")
        end
        equal(env:close(), true)
        equal(env:close(), false)
        raises("the environment is closed", env.connect, env, "a.db")
        do local again <close> = luasql.sqlite() local other <close> = assert(again:connect "a.db") end
        """,
    )


def test_the_first_of_several_statements_runs(server: AppServer) -> None:
    check(
        server,
        """
        local conn = assert(luasql.sqlite():connect ":memory:")
        equal(conn:execute "CREATE TABLE t(a INTEGER); DROP TABLE t", 0)
        equal(conn:execute ";; INSERT INTO t VALUES(1), (2); DELETE FROM t", 2)
        equal(conn:execute [[CREATE TRIGGER x AFTER INSERT ON t BEGIN DELETE FROM t; SELECT ';'; END; DROP TABLE t]], 0)
        local cursor = conn:execute "-- one; two\\nSELECT a FROM t ORDER BY a; nonsense"
        equal(cursor:fetch(), "1")
        equal(list(table.unpack(cursor:getcoltypes())), "INTEGER")
        cursor:close()
        local stmt = assert(conn:prepare "SELECT ? + 1, ?; SELECT ?")
        equal(list(stmt:execute(1, "b"):fetch()), "2 b")
        equal(list(assert(conn:prepare "SELECT a FROM t WHERE a = 2; DELETE FROM t"):execute():fetch()), "2")
        equal(list(conn:execute "SELEC; SELECT 1"), 'nil ERROR near "SELEC": syntax error')
        equal(list(conn:execute "INSERT INTO nowhere VALUES(1); SELECT 1"), "nil ERROR no such table: nowhere")""",
    )


def test_cursor(server: AppServer) -> None:
    check(
        server,
        r"""
        local conn = assert(env:connect "a.db")
        conn:execute "CREATE TABLE t(id INTEGER PRIMARY KEY, name VARCHAR(20), value REAL, data BLOB)"
        conn:execute "INSERT INTO t VALUES(1, 'one', 1, x'00ff27'), (2, NULL, 1e20, NULL), (3, 'three', -0.1, '')"
        local cur = conn:execute "SELECT *, 1 + 1 AS sum FROM t"
        equal(type(cur), "userdata")
        equal(list(table.unpack(cur:getcolnames())), "id name value data sum")
        equal(list(table.unpack(cur:getcoltypes(), 1, 4)), "INTEGER VARCHAR(20) REAL BLOB")
        equal(list(cur:fetch()), "1 one 1.0 \0\xff' 2")
        local row = {name = "stays", [2] = "stays", other = 1}
        equal(cur:fetch(row, "a"), row)
        equal(list(row.id, row.name, row.value, row.data, row.sum, row[2], row.other), "2 nil 1.0e+20 nil 2 stays 1")
        equal(list(table.unpack(cur:fetch({}, "n"), 1, 5)), "3 three -0.1  2")
        equal(select("#", cur:fetch()), 1)
        equal(cur:fetch(), nil)
        equal(cur:fetch({}, "a"), nil)
        equal(cur:close(), true)
        equal(cur:close(), false)
        raises("the cursor is closed", cur.fetch, cur)
        raises("the cursor is closed", cur.getcolnames, cur)
        raises("the cursor is closed", cur.getcoltypes, cur)
        local both = conn:execute("SELECT id, name FROM t"):fetch({}, "an")
        equal(list(both.id, both[1], both.name, both[2]), "1 1 one one")
        equal(conn:execute("SELECT id FROM t"):fetch{}[1], "1")
        raises("bad argument #1 to 'fetch'", conn:execute("SELECT 1").fetch, conn:execute "SELECT 1", 5)
        equal(math.type(tonumber((conn:execute("SELECT 9223372036854775807"):fetch()))), "integer")
        equal((conn:execute("SELECT 9e999"):fetch()), "Inf")
        equal(conn:execute("PRAGMA user_version"):fetch(), "0")
        equal(conn:execute "PRAGMA foreign_keys = ON", 0)
        equal(conn:execute("INSERT INTO t(name) VALUES('r') RETURNING id"):fetch(), "4")

        -- many rows, more than one portion; a change meanwhile; an end before the end
        local numbers = "WITH RECURSIVE n(x) AS (SELECT 5 UNION ALL SELECT x + 1 FROM n WHERE x < 3000) "
        equal(conn:execute(numbers .. "INSERT INTO t(id) SELECT x FROM n"), 2996)
        local all, count = conn:execute "SELECT id FROM t", 0
        while all:fetch() do
           count = count + 1
           if count == 700 then equal(conn:execute "INSERT INTO t(name) VALUES('late')", 1) end
        end
        equal(count, 3001)
        local part = conn:execute "SELECT id FROM t"
        part:fetch()
        equal(part:close(), true)
        local wide = {}
        for at = 1, 100 do wide[at] = tostring(at) end
        equal(select(100, conn:execute("SELECT " .. table.concat(wide, ", ")):fetch()), "100")
        local big = conn:execute "SELECT zeroblob(3000000), 1"
        equal(#big:fetch(), 3000000)
        equal(select(2, conn:execute "SELECT zeroblob(30000000)"), "TOOBIG")
        equal(list(pcall(conn.execute, conn, "SELECT '" .. ("x"):rep(5000000) .. "'")):sub(1, 15), "true nil TOOBIG")

        -- bytes that are not text, and none at all
        equal((conn:execute("SELECT '\xe9\xff', length('\xe9')"):fetch()), "\xe9\xff")
        equal((conn:execute("SELECT " .. env.quotestr "a\0b"):fetch()), "a\0b")
        equal(select(2, conn:execute "SELECT \0"), "ERROR")

        -- what is left open
        local left = conn:execute "SELECT id FROM t"
        left:fetch()
        equal(conn:close(), true)
        raises("the connection is closed", function() while left:fetch() do end end)
        """,
    )


def test_transactions(server: AppServer) -> None:
    check(
        server,
        """
        local a, b = assert(env:connect "a.db"), assert(env:connect "a.db")
        a:setbusytimeout(0)
        b:setbusytimeout(0)
        local function rows() return (b:execute("SELECT count(*) FROM t"):fetch()) end
        a:execute "CREATE TABLE t(x UNIQUE)"
        equal(a:setautocommit(false), true)
        a:execute "INSERT INTO t VALUES(1)"
        equal(rows(), "0")
        equal(a:commit(), true)
        equal(rows(), "1")
        a:execute "INSERT INTO t VALUES(2)"
        equal(a:rollback(), true)
        equal(a:commit(), true)
        equal(rows(), "1")

        -- a failed statement leaves the transaction open
        a:execute "INSERT INTO t VALUES(2)"
        equal(select(2, a:execute "INSERT INTO t VALUES(2)"), "CONSTRAINT")
        equal(a:commit(), true)
        equal(rows(), "2")

        -- leaving manual mode rolls back
        a:execute "INSERT INTO t VALUES(3)"
        equal(a:setautocommit(true), true)
        equal(rows(), "2")
        equal(a:execute "INSERT INTO t VALUES(3)", 1)
        equal(rows(), "3")
        equal(list(a:commit()), "nil ERROR cannot commit - no transaction is active")
        equal(list(a:rollback()), "nil ERROR cannot rollback - no transaction is active")

        -- the kind, in either order; two writers
        for _, kinds in ipairs{{"IMMEDIATE"}, {false, "IMMEDIATE"}, {"immediate", false}, {nil, "EXCLUSIVE"}} do
           equal(a:setautocommit(table.unpack(kinds, 1, 2)), true)
           equal(select(2, b:execute "INSERT INTO t VALUES(9)"), "BUSY")
           equal(list(b:setautocommit(false, "IMMEDIATE")), "nil BUSY database is locked")
           equal(a:setautocommit(true), true)
        end
        raises("DEFERRED, IMMEDIATE or EXCLUSIVE expected, got 'x'", a.setautocommit, a, false, "x")
        raises("DEFERRED, IMMEDIATE or EXCLUSIVE expected, got 'x'", a.commit, a, "x")
        equal(a:setautocommit(false, "IMMEDIATE"), true)
        equal(a:commit "IMMEDIATE", true)
        equal(select(2, b:execute "INSERT INTO t VALUES(9)"), "BUSY")
        equal(a:rollback "DEFERRED", true)
        equal(b:execute "INSERT INTO t VALUES(9)", 1)

        -- a reader that is not done keeps a commit from its end, which can be tried again
        a:setautocommit(true)
        a:setautocommit(false)
        a:execute "INSERT INTO t VALUES(10)"
        b:execute "BEGIN"
        b:execute("SELECT * FROM t"):fetch()
        equal(list(a:commit()), "nil BUSY database is locked")
        b:execute "COMMIT"
        equal(a:commit(), true)

        -- explicit transactions
        equal(b:execute "BEGIN", 0)
        equal(b:execute "INSERT INTO t VALUES(11)", 1)
        equal(b:commit(), true)
        equal(select(2, b:commit()), "ERROR")
        equal(b:setbusytimeout(50), true)
        raises("number expected", b.setbusytimeout, b, "x")
        local began = ba.clock()
        a:setautocommit(true)
        a:setautocommit "IMMEDIATE"
        equal(select(2, b:execute "INSERT INTO t VALUES(12)"), "BUSY")
        assert(ba.clock() - began >= 50)
        a:close()
        equal(b:execute "INSERT INTO t VALUES(12)", 1)
        """,
    )


def test_statements(server: AppServer) -> None:
    check(
        server,
        r"""
        local conn = assert(env:connect ":memory:")
        equal(conn:mexec [[CREATE TABLE t(a, b); CREATE TABLE "u;"(a); -- ; a comment
           CREATE TRIGGER r AFTER INSERT ON t BEGIN INSERT INTO "u;" VALUES(';'); SELECT CASE 1 WHEN 1 THEN 2 END; END;
           INSERT INTO t VALUES(1, 'x;y') /* ; */ ]], true)
        equal(list(table.unpack(conn:tables())), "t u;")
        local some = "INSERT INTO t VALUES(2, 2); nonsense; INSERT INTO t VALUES(3, 3)"
        equal(list(conn:mexec(some)), 'nil ERROR near "nonsense": syntax error')
        equal((conn:execute("SELECT count(*) FROM t"):fetch()), "2")
        equal(conn:mexec "", true)
        equal(list(conn:prepare "INSERT INTO nowhere VALUES(?)"), "nil ERROR no such table: nowhere")
        local insert = assert(conn:prepare "INSERT INTO t VALUES(?, ?)")
        equal(type(insert), "userdata")
        equal(insert:bind(3, "three"), true)
        equal(insert:execute(), 1)
        equal(insert:execute(), 1)
        equal(insert:bind{{"INTEGER", "5"}, {"BLOB", "\0\xff"}}, true)
        equal(insert:execute(), 1)
        equal(insert:bind{nil, {"ZEROBLOB", 3}}, true)
        equal(insert:execute(), 1)
        equal(insert:execute(1.5, true), 1)
        equal(insert:execute{{"float", 2}, {"NULL"}}, 1)
        raises("{TYPE, value} expected", insert.bind, insert, {{"DATE", 1}})
        raises("bad argument #2 to 'bind'", insert.bind, insert, 1, print)
        raises("bad argument #1 to 'bind' (number expected", insert.bind, insert, {{"INTEGER", "x"}})
        local shown = {}
        local cur = conn:execute "SELECT typeof(a), typeof(b), b FROM t WHERE rowid > 2"
        local row = cur:fetch{}
        while row do
           shown[#shown + 1] = row[1] .. "/" .. row[2]
           row = cur:fetch(row)
        end
        equal(table.concat(shown, " "), "integer/text integer/text integer/blob null/blob real/integer real/null")
        local named = assert(conn:prepare "SELECT :x || $y AS z")
        equal(named:bind{x = "a", [":y"] = "b"}, true)
        equal((named:execute():fetch()), "ab")
        equal(select(1, assert(conn:prepare "SELECT 5"):execute():fetch()), "5")
        equal(assert(conn:prepare "SELECT ?"):execute():fetch(), nil)
        equal(insert:close(), true)
        equal(insert:close(), false)
        raises("the statement is closed", insert.execute, insert)
        raises("the statement is closed", insert.bind, insert, 1)
        conn:close()
        raises("the connection is closed", named.execute, named)
        """,
    )


def test_sqlutil(server: AppServer) -> None:
    check(
        server,
        """
        local su = require "sqlutil"
        equal(su.dir():sub(-6), "/data/")
        equal(su.exist "x", false)
        local env, conn = su.open "x"
        equal(type(env), "userdata")
        equal(su.exist "x", true)
        conn:mexec "CREATE TABLE t(a, b); INSERT INTO t VALUES(1, 'one'), (2, NULL), (3, 'three')"
        local function openf() return su.open "x" end
        for _, source in ipairs{conn, openf, function() return select(2, su.open(env, "x")) end} do
           equal(su.select(source, "a, b FROM t", function(cur) return cur:fetch() end), "1")
           equal(list(su.find(source, "SELECT a, b FROM t WHERE a = 1")), "1 one")
           equal(list(su.find(source, "a, b FROM t WHERE a = 3")), "3 three")
           equal(list(su.find(source, "a FROM t WHERE a = 9")), "nil")
           equal(su.findt(source, "* FROM t").b, "one")
           local row = {}
           equal(su.findt(source, "* FROM t", row), row)
           equal(su.findt(source, "* FROM t WHERE a = 9"), nil)
           local seen = {}
           for a, b in su.iter(source, "a, b FROM t") do seen[#seen + 1] = list(a, b) end
           equal(table.concat(seen, ","), "1 one,2 nil,3 three")
           for a in su.iter(source, "a FROM t") do break end
           local names = {}
           for r in su.iter(source, "b FROM t", true) do names[#names + 1] = r.b or "null" end
           equal(table.concat(names, ","), "one,null,three")
           equal(list(su.select(source, "z FROM t", print)), "nil ERROR no such column: z")
           equal(list(su.find(source, "z FROM t")), "nil ERROR no such column: z")
           raises("no such column: z", su.iter, source, "z FROM t")
           raises("stop", su.select, source, "a FROM t", function() error "stop" end)
        end
        raises("bad argument #3 to 'select'", su.select, conn, "a FROM t")
        raises("bad argument #1 to 'find'", su.find, "conn", "a FROM t")
        raises("the function did not return a connection", su.find, function() end, "a FROM t")
        raises("without '..' expected", su.open, "../x")
        raises("bad argument #1 to 'exist'", su.exist)
        raises("CANTOPEN", su.open, "no/such/folder")
        raises("NOTADB", su.iter, function()
           local file = ba.openio "home":open("data/bad.sqlite.db", "w")
           file:write(("no database "):rep(100))
           file:close()
           return su.open "bad"
        end, "* FROM t")
        equal(su.close(env, conn), true)
        equal(su.close(env, conn), true)
        equal(su.close(), true)
        local c = coroutine.wrap(function() for a in su.iter(openf, "a FROM t") do coroutine.yield(a) end end)
        equal(c() .. c() .. c(), "123")
        equal(su.dir(su.dir() .. "deeper"):sub(-13), "/data/deeper/")
        equal(su.exist "x", false)
        require "loadconf".dbdir = "elsewhere" -- as mako.conf would have it
        package.loaded.sqlutil = nil
        su = require "sqlutil"
        equal(su.dir(), "elsewhere/data/")
        su.close(su.open "y")
        equal(su.exist "y", true)
        assert(ba.openio "home":stat "elsewhere/data/y.sqlite.db")
        """,
    )


def test_other_requests_continue(server: AppServer) -> None:
    """Slow statements, waits for a lock, many readers, and a page whose activity is killed."""
    count = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT %d) SELECT count(*) FROM n"
    server.app(
        {
            ".preload": 'env = luasql.sqlite() conn = env:connect "a.db" conn:execute "CREATE TABLE t(a)"',
            "slow.lsp": f'<?lsp print(app.env:connect("a.db"):execute("{count % 300_000}"):fetch()) ?>',
            "fast.lsp": '<?lsp print((app.conn:execute("SELECT count(*) FROM t"):fetch())) ?>',
            "lock.lsp": '<?lsp app.locker = app.env:connect "a.db" print(app.locker:execute "BEGIN IMMEDIATE") ?>',
            "free.lsp": "<?lsp print(app.locker:close()) ?>",
            "write.lsp": """<?lsp local c = app.env:connect "a.db"
                c:setbusytimeout(20000)
                app.writes = (app.writes or 0) + 1
                print(c:execute "INSERT INTO t VALUES(1)") c:close() ?>""",
            "writes.lsp": "<?lsp print(app.writes) ?>",
        }
    )
    assert server.ask("/lock.lsp").text == "0\n"
    slow = [gevent.spawn(server.ask, "/slow.lsp") for _ in range(3)]
    writers = [gevent.spawn(server.ask, "/write.lsp") for _ in range(40)]  # more than there are threads
    turns = 0  # a longest turn would measure how busy the machine is
    while not all(job.ready() for job in slow):
        gevent.sleep(0.001)
        turns += 1
    assert turns > 50, "the loop stood still while threads computed"
    assert [job.get().text for job in slow] == ["300000\n"] * 3
    wait_until(lambda: server.ask("/writes.lsp").text == "40\n")
    readers = [gevent.spawn(server.ask, "/fast.lsp") for _ in range(40)]
    assert {job.get(timeout=20).text for job in readers} == {"0\n"}
    assert not any(job.ready() for job in writers)
    assert server.ask("/free.lsp").text == "true\n"
    assert {job.get(timeout=20).text for job in writers} == {"1\n"}
    assert server.ask("/fast.lsp").text == "40\n"


def test_limits_and_what_is_forgotten(server: AppServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(luasql, "MAX_CONNECTIONS", 5)
    monkeypatch.setattr("smqrt.apps.lua.sqlite.MAX_CURSORS", 100)
    check(
        server,
        """
        for number = 1, 40 do assert(env:connect "a.db") end -- forgotten ones are collected
        local kept = {}
        for number = 1, 5 do kept[number] = assert(env:connect "a.db") end
        equal(list(env:connect "a.db"), "nil CANTOPEN 5 connections are open; close those you don't need")
        kept[1]:close()
        local conn = assert(env:connect "a.db")
        conn:execute "CREATE TABLE n(x)"
        local numbers = "WITH RECURSIVE n(x) AS (SELECT 5 UNION ALL SELECT x + 1 FROM n WHERE x < 3000) "
        conn:execute(numbers .. "INSERT INTO n SELECT x FROM n")
        local cursors = {}
        for number = 1, 100 do cursors[number] = assert(conn:execute "SELECT * FROM n") end
        equal(select(2, conn:execute "SELECT 1"), "NOMEM")
        cursors[1]:close()
        assert(conn:execute "SELECT 1")
        equal(select(2, conn:execute "SELECT load_extension('x')"), "ERROR")
        """,
    )


def test_a_deadline_for_statements(server: AppServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smqrt.apps.lua.sqlite.STATEMENT_S", 0.1)
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
    check(server, f"""equal(list(env:connect("a.db"):execute "{endless}"), "nil INTERRUPT interrupted")""")


def test_a_killed_page_ends_its_statement_and_waiting_write(server: AppServer) -> None:
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
    with sqlite3.connect(server.folder / "a.db", isolation_level=None) as other:
        other.execute("CREATE TABLE t(a)")
        other.execute("BEGIN IMMEDIATE")
        server.vm.eval('env = luasql.sqlite() a, b = env:connect "a.db", env:connect "a.db" b:setbusytimeout(60000)')
        for source in (f'a:execute "{endless}"', 'b:execute "INSERT INTO t VALUES(1)"'):
            server.vm.start(server.vm.compile(source))
        wait_until(lambda: server.vm.activities.blocked == 2)
        server.vm.stop()
        wait_until(lambda: server.vm.activities.blocked == 0)
        server.vm.eval('b:execute "SELECT 1"')  # its last attempt is over
        other.execute("COMMIT")
        assert server.vm.eval('return assert(select(-1, a:execute "SELECT count(*) FROM t")):fetch()') == (b"0",)
        assert server.vm.eval('return b:execute "INSERT INTO t VALUES(1)"') == (1,)


def test_what_waits_for_a_lock_does_nothing_twice(server: AppServer) -> None:
    with sqlite3.connect(server.folder / "b.db", isolation_level=None) as other:
        other.execute("CREATE TABLE u(x)")
        other.execute("BEGIN IMMEDIATE")
        source = """
            conn = luasql.sqlite():connect "a.db"
            conn:setbusytimeout(20000)
            conn:mexec "CREATE TABLE t(x); ATTACH 'b.db' AS b"
            ran = conn:mexec "INSERT INTO t VALUES(1); INSERT INTO b.u VALUES(2); INSERT INTO t VALUES(3)" """
        source = source.replace("b.db", str(server.folder / "b.db"))
        server.vm.start(server.vm.compile(source))
        with sqlite3.connect(server.folder / "a.db", isolation_level=None) as reader:
            reader.row_factory = lambda _cursor, row: row[0]
            first = "SELECT count(*) FROM sqlite_master"
            wait_until(lambda: reader.execute(first).fetchone() and reader.execute("SELECT x FROM t").fetchall())
            gevent.sleep(0.02)  # it has tried again meanwhile
            other.execute("COMMIT")
            wait_until(lambda: server.vm.eval("return ran") == (True,))
            assert reader.execute("SELECT x FROM t").fetchall() == [1, 3]


def test_a_killed_page_closes_what_is_to_be_closed(server: AppServer, caplog: pytest.LogCaptureFixture) -> None:
    source = """
        local conn <close> = luasql.sqlite():connect "a.db"
        conn:execute "CREATE TABLE IF NOT EXISTS t(a)"
        conn:execute "BEGIN IMMEDIATE"
        ba.sleep(60000)"""
    server.vm.start(server.vm.compile(source))
    wait_until(lambda: any("sleep" in line for line in server.vm.waiting()))
    server.vm.stop()
    wait_until(lambda: server.vm.activities.blocked == 0)
    write = """
        local conn = luasql.sqlite():connect "a.db"
        conn:setbusytimeout(5000)
        return conn:execute "INSERT INTO t VALUES(1)" """
    assert server.vm.eval(write) == (1,)
    assert not caplog.records


def test_a_cancelled_wait_for_close_leaves_other_waits(tmp_path: Path) -> None:
    binding = luasql.SqlBinding(lambda: str(tmp_path), lambda _: None)
    (handle,) = greenlets.wait(binding.connect(b"a.db", b"", None))
    endless = b"WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
    busy = binding.execute(handle, endless, None)
    closed = binding._connections[handle].shut()
    binding.close(handle).cancel()
    assert not closed.done
    busy.cancel()
    greenlets.wait(closed)
    assert not binding._connections
    assert not binding._of_group

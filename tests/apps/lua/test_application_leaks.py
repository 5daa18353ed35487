"""300 faults of one application in databases, processes, mail, uploads, logins and file servers, while three others
serve: these lose nothing, and what the faulty one held is free when it has ended."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gevent
import greenlet
import pytest
from gevent import socket

from smqrt.loop import greenlets
from tests.apps.lua.app_server import AppServer
from tests.support.waiting import wait_until

FAULTS_IN_ALL = 300

GOOD = {
    ".preload": """
        local su = require"sqlutil"
        env = luasql.sqlite()
        conn = assert(env:connect(io:realpath"" .. "/good.sqlite.db"))
        assert(conn:execute"CREATE TABLE IF NOT EXISTS t(n)")
        conn:setautocommit(false)
        """,
    "index.lsp": """<?lsp
        local n = request:data"n"
        local s = request:session(true)
        s.last = n
        assert(app.conn:execute("INSERT INTO t VALUES(" .. n .. ")"))
        assert(app.conn:commit())
        local cur = assert(app.conn:execute"SELECT count(*) FROM t")
        local count = cur:fetch()
        cur:close()
        response:json{n = s.last, count = count}
        ?>""",
}

SETUP = """
users = ba.create.jsonuser()
users:set{ada = {pwd = "secret"}}
locked = ba.create.dir"locked"
locked:setfunc(function() error"in a directory that is locked" end)
locked:setauth(ba.create.authenticator(users, {type = "basic"}))
dir:insert(locked, true)
broken = ba.create.dir"broken"
broken:setfunc(function() end)
broken:setauth(ba.create.authenticator(ba.create.authuser(function() error"in authuser" end), {type = "basic"}))
dir:insert(broken, true)
require"wfs"
files = ba.create.wfs("files", io)
dir:insert(files, true)
luaio = ba.create.luaio{
  open = function() error"in luaio" end,
  stat = function() ba.sleep(1) error"in luaio" end,
  files = function() return {read = function() error"in luaio" end} end,
}
uploader = ba.create.upload(io)
silent = ba.socket.bind(0, {intf = "127.0.0.1"})
_, silent_port = silent:sockname()
kept = {}
function database(name) return assert(luasql.sqlite():connect(io:realpath"" .. "/" .. name .. ".sqlite.db")) end
"""

FAULTS = {
    "sql left open": "local c = app.database'a' app.kept[#app.kept + 1] = c error'x'",
    "sql in a transaction": "local c = app.database'a' c:setautocommit(false) c:execute'CREATE TABLE t(n)' error'x'",
    "sql wrong": "local c <close> = app.database'b' assert(c:execute'SELECT nothing FROM nowhere')",
    "sql cursor left": "local c = app.database'b' local cur = c:execute'SELECT 1 UNION SELECT 2' cur:fetch() error'x'",
    "sql closed cursor": "local c = app.database'b' local cur = c:execute'SELECT 1' c:close() cur:fetch()",
    "sql endless": "ba.thread.run(function() app.database'c':execute'WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL "
    "SELECT n + 1 FROM r) SELECT count(*) FROM r' end)",
    "sql locked": "local a, b = app.database'd', app.database'd' a:setautocommit(false, 'EXCLUSIVE') "
    "b:setbusytimeout(5) error(select(2, b:execute'CREATE TABLE x(y)'))",
    "pty left": "app.kept[#app.kept + 1] = ba.forkpty('/bin/sleep', '1000') error'x'",
    "pty forgotten": "ba.forkpty('/bin/sleep', '1000') error'x'",
    "pty floods": "local p = ba.forkpty('/bin/sh', '-c', 'yes') p:read() error'x'",
    "pty in a callback": "ba.forkpty({async = function(p) p:read() error'x' end}, '/bin/echo', 'x')",
    "popen left": "app.kept[#app.kept + 1] = _G.io.popen 'exec sleep 1000' error'x'",
    "popen floods": "local f = _G.io.popen 'exec yes' f:read() error'x'",
    "popen that takes nothing": "local f <close> = _G.io.popen('exec true', 'w') f:write'x' error'x'",
    "execute": "os.execute 'exit 3' error'x'",
    "pty that is none": "ba.forkpty('/no/such/program'):read() error'x'",
    "mail refused": "assert(socket.mail{server = '127.0.0.1', port = 1}:send{from = 'a@b.c', to = 'd@e.f', "
    "subject = 's', txtbody = 't'})",
    "mail to the silent": "ba.thread.run(function() socket.mail{server = '127.0.0.1', port = app.silent_port}:send{"
    "from = 'a@b.c', to = 'd@e.f', subject = 's', txtbody = 't'} end)",
    "upload that fails": "app.uploader(request, 'no/such/folder/x', function() error'start' end, "
    "function() error'done' end, function() error'error' end)",
    "luaio": "app.luaio:open'x'",
    "luaio that waits": "app.luaio:stat'x'",
    "luaio list": "for name in app.luaio:files'/' do end",
    "crypto": "ba.crypto.symmetric('GCM', 'short', 'iv')",
    "token": "require'jwt'.verify('a.b.c', {})",
    "deferred": "app.kept[#app.kept + 1] = response:deferred() ba.timer(function() error'x' end):set(1, true)",
    "session": "local s = request:session(true) s.onterminate = function() error'x' end s:terminate()",
    "file": "local f = io:open('f', 'w') f:write'x' app.kept[#app.kept + 1] = f error'x'",
    "pipe": "local f = ba.pipe.mkfifo and io:open'f' error'x'",
}
REQUESTS = {
    "wrong password": b"GET /bad/locked/ HTTP/1.1\r\nAuthorization: Basic YWRhOndyb25n\r\n",
    "right password": b"GET /bad/locked/ HTTP/1.1\r\nAuthorization: Basic YWRhOnNlY3JldA==\r\n",
    "broken users": b"GET /bad/broken/ HTTP/1.1\r\nAuthorization: Basic YWRhOnNlY3JldA==\r\n",
    "half an upload": b"PUT /bad/files/half HTTP/1.1\r\nContent-Length: 100000\r\n\r\nhalf",
    "no XML": b"PROPFIND /bad/files/ HTTP/1.1\r\nDepth: 1\r\nContent-Length: 5\r\n\r\n<a><b",
}


@dataclass
class Standing:
    """What the process holds."""

    greenlets: int
    threads: int
    files: int
    children: int
    lua_sockets: int
    lua_bytes: int

    @staticmethod
    def now(server: AppServer) -> Standing:
        server.vm.eval("collectgarbage() collectgarbage()")
        gevent.sleep(0)
        gc.collect()
        living = sum(isinstance(thing, greenlet.greenlet) and not _is_over(thing) for thing in gc.get_objects())
        (sockets, *_) = server.vm.eval("return ba.socket.stat()")
        assert isinstance(sockets, int)
        return Standing(
            living,
            len(os.listdir("/proc/self/task")),
            len(os.listdir("/proc/self/fd")),
            len(children()),
            sockets,
            server.vm.memory_bytes(),
        )

    def is_back_at(self, start: Standing) -> bool:
        """Whether nothing is left. Pools keep some threads, and Lua's tables shrink late."""
        return (
            self.greenlets <= start.greenlets + 2
            and self.threads <= start.threads + 2
            and self.files <= start.files + 2
            and self.children <= start.children
            and self.lua_sockets <= start.lua_sockets
            and self.lua_bytes < start.lua_bytes + 1_000_000
        )


def _is_over(task: greenlet.greenlet) -> bool:
    """Whether it is dead, or a worker without work, which waits in its loop."""
    frame = task.gr_frame
    return task.dead or (frame is not None and frame.f_code is greenlets._run_jobs.__code__)


def children() -> list[int]:
    """The processes that this one has started, the dead that nobody has waited for among them."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[1]) == os.getpid():
            found.append(int(pid))
    return found


class Visitor:
    """Asks one good application all the time; every answer must be right."""

    def __init__(self, server: AppServer, name: str) -> None:
        self.server, self.name, self.count, self.done = server, name, 0, False
        self.task = gevent.spawn(self.run)

    def run(self) -> None:
        cookie = ""
        while not self.done:
            n = str(self.count + 1)
            answer = self.server.ask(f"/{self.name}/index.lsp?n={n}", headers={"Cookie": cookie})
            assert answer.status == 200, answer.text
            assert json.loads(answer.text) == {"n": n, "count": n}
            cookie = (answer.headers["Set-Cookie"] or cookie).partition(";")[0]
            self.count += 1
            gevent.sleep(0.02)


@pytest.fixture
def visitors(server: AppServer) -> Iterator[list[Visitor]]:
    for name in ("one", "two", "three"):
        assert server.app(GOOD, name).error is None
    visitors = [Visitor(server, name) for name in ("one", "two", "three")]
    yield visitors
    for visitor in visitors:
        visitor.done = True
    for visitor in visitors:
        visitor.task.get(timeout=20)


def _send(port: int, head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=0.05) as wire:
        if b"\r\n\r\n" not in head:
            head += b"\r\n"
        wire.sendall(head.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"))
        try:
            while wire.recv(65536):
                pass
        except OSError:
            pass  # who leaves a response open gets no answer; this client leaves


@pytest.mark.timeout(180)
def test_three_hundred_faults(
    server: AppServer, visitors: list[Visitor], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("CRITICAL")
    pages: dict[str, str | bytes] = {f"{number}.lsp": f"<?lsp {code} ?>" for number, code in enumerate(FAULTS.values())}
    kinds = [f"GET /bad/{name} HTTP/1.1\r\n".encode() for name in pages] + list(REQUESTS.values())
    endless = kinds.pop(list(FAULTS).index("sql endless"))

    def provoke(rounds: int) -> None:
        bad = server.app({".preload": SETUP, **pages}, "bad")
        assert bad.error is None
        # The endless last: from then on they keep all processors busy until the application ends.
        for kind in kinds * rounds + [endless] * rounds:
            _send(server.port, kind)
        bad.unload()

    provoke(3)  # pools and caches fill
    start = Standing.now(server)
    before = [visitor.count for visitor in visitors]
    provoke(FAULTS_IN_ALL // (len(kinds) + 1) + 1)
    for visitor, count in zip(visitors, before, strict=True):
        wait_until(lambda: visitor.count > count + 20, "everybody is served")  # noqa: B023
    seen = [start]

    def is_back() -> bool:
        seen[1:] = [Standing.now(server)]
        return seen[1].is_back_at(start)

    wait_until(is_back, seen, 60)

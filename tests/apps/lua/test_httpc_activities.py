"""HTTP clients wherever Lua may block: timers, threads, cosockets, coroutines; and what is left when one is killed."""

from __future__ import annotations

import pytest

from tests.apps.lua.app_server import AppServer
from tests.support.scripted_http import ScriptedHttp, answer
from tests.support.waiting import wait_until

SETUP = """
    function fetch(url)
        local http <close> = require"httpc".create()
        local ok, err = http:request{url = url}
        if not ok then return err end
        local status, fault = http:status()
        return status and http:read"a" or fault
    end
    done = {}
"""


def finish(server: AppServer, code: str, count: int) -> list[bytes]:
    """Run code, wait until `done` has so many entries; gives them."""
    server.vm.eval(SETUP)
    server.vm.eval(code)
    wait_until(lambda: server.vm.eval("return #done")[0] >= count)
    joined: bytes = server.vm.eval("return table.concat(done, '\\0')")[0]
    return joined.split(b"\0")


@pytest.mark.parametrize(
    "start",
    [
        "ba.thread.run(function() done[1] = fetch(url) end)",
        "t = ba.timer(function() done[1] = fetch(url) end) t:set(1)",
        "ba.socket.event(function(sock) done[1] = fetch(url) end)",
        "ba.thread.run(coroutine.wrap(function() done[1] = select(2, pcall(fetch, url)) end))",
        "for body in function(_, last) return not last and fetch(url) or nil end do done[1] = body end",
        "done[1] = setmetatable({}, {__index = function(_, key) return fetch(url) end}).x",
    ],
)
def test_anywhere(server: AppServer, start: str) -> None:
    with ScriptedHttp([[0.02, *answer(b"hello")]]) as scripted:
        assert finish(server, f"url = '{scripted.url}' {start}", 1) == [b"hello"]


def test_where_nothing_can_block_it_says_so(server: AppServer) -> None:
    code = "done[1] = select(2, pcall(table.sort, {1, 2}, function() return fetch'http://127.0.0.1:1' end))"
    assert b"blocking call across a C boundary" in finish(server, code, 1)[0]


def test_many_at_a_time(server: AppServer) -> None:
    server.write("", {"n.lsp": "<?lsp ba.sleep(50) response:write(request:data'n') ?>"})
    server.app({})
    code = """
        ba.thread.configure(200)
        for n = 1, 200 do
            ba.thread.run(function()
                local body = fetch("http://127.0.0.1:%d/n.lsp?n=" .. n)
                done[#done + 1] = body
            end)
        end
    """
    bodies = finish(server, code % server.port, 200)
    assert sorted(map(int, bodies)) == list(range(1, 201))
    server.vm.eval("done = nil collectgarbage() collectgarbage()")
    assert not server.services.http_clients


def test_killed_while_it_waits(server: AppServer) -> None:
    with ScriptedHttp([[60.0]]) as scripted:
        server.vm.eval(SETUP)
        server.vm.eval(f"ba.thread.run(function() done[1] = fetch('{scripted.url}') end)")
        wait_until(lambda: scripted.heads)
        (client,) = server.services.http_clients.values()
        stream = client.stream
        server.vm.activities.stop()
        wait_until(lambda: stream.closed)
        assert server.vm.eval("return #done") == (0,)

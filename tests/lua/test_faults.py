"""200 faults of one application, of every kind, while another application serves: that one loses nothing."""

from __future__ import annotations

import time
from typing import Any

import gevent
import pytest
from app_server import AppServer
from gevent import socket

from smqrt.lua.api import smq_hub
from smqrt.wire.websocket import TEXT
from tests.lua.test_websockets import Client

ROUNDS = 10

GOOD = {
    "echo.lsp": """<?lsp ba.socket.req2sock(request):event(function(s)
        while true do
          local data, istext = s:read()
          if not data then break end
          s:write(data, istext)
        end
      end, "s") ?>""",
    "page.lsp": "<?lsp ba.sleep(2) ?>page <?lsp=request:data'n' ?>",
}

SETUP = """
-- Sleeps for good, whatever its errors, inside a coroutine of its own.
function stubborn()
  coroutine.wrap(function() while true do pcall(function() ba.sleep(20) error"again" end) end end)()
end

function listener(f)
  local l = ba.socket.bind(0, {intf = "127.0.0.1"})
  local _, port = l:sockname()
  l:event(function() f(l:accept()) end)
  return port
end

dir:setfunc(function(env, path) if path == "thrown" then error"in a directory function" end return false end)
"""

FAULTS = {
    "timer": "ba.timer(function() error'in a timer' end):set(1, true)",
    "timer later": "ba.timer(function() coroutine.yield(true) ba.sleep(1) error'late' end):set(1, true)",
    "thread": "ba.thread.run(function() ba.sleep(1) error'in a thread' end)",
    "cosocket": "ba.socket.event(function(me) me:read(1) error'in a cosocket' end)",
    "cosocket at once": "ba.socket.event(function() error'at once' end)",
    "page": "error'in a page'",
    "page object": "error{code = 5}",
    "page nil": "error()",
    "committed page": "response:write'x' response:flush() error'too late'",
    "comparator": "table.sort({3, 2, 1}, function(a, b) ba.sleep(1) return a < b end)",
    "gsub": "('abc'):gsub('.', function() ba.sleep(1) end)",
    "finalizer": "setmetatable({}, {__gc = function() ba.sleep(1) end}) collectgarbage() setmetatable({}, "
    "{__gc = function() error'in a finalizer' end}) collectgarbage()",
    "close": "local x <close> = setmetatable({}, {__close = function() error'in close' end}) ba.sleep(1)",
    "overflow": "local function f(s) return (s:gsub('.', f)) end f'x'",
    "nested": "coroutine.wrap(function() coroutine.wrap(function() ba.sleep(1) error'deep' end)() end)()",
    "plain yield": "ba.socket.event(function() coroutine.yield(1) end)",
    "endless": "local s = ba.socket.event(function(me) ba.thread.create():run(app.stubborn) end)",
    "subscriber": "local smq = require'smq.hub'.create() smq:subscribe('t', {onmsg = function() error'in onmsg' end}) "
    "smq:publish('x', 't')",
    "foreign read": "local s = ba.socket.event(function(me) me:read(50) end) s:read()",
    "closed while blocked": "local s = ba.socket.event(function(me) pcall(me.read, me, 1e6) error'end' end) "
    "ba.sleep(1) s:close()",
    "accepted": "local port = app.listener(function(s) s:event(function() error'accepted' end, 's') end) "
    "local s <close> = ba.socket.connect('127.0.0.1', port) assert(s:read() == nil)",
    "huge": "require'nothing.of.this.name'",
}


class Customer:
    """Uses the good application all the time and checks every answer."""

    def __init__(self, server: AppServer, number: int) -> None:
        self.server, self.number = server, number
        self.count, self.slowest_s = 0, 0.0
        self.done = False

    def run(self) -> None:
        client = Client(self.server.port, "/good/echo.lsp")
        while not self.done:
            began = time.monotonic()
            text = f"{self.number}:{self.count}".encode()
            client.send(TEXT, text)
            assert client.receive() == (text, True, 0, 0)
            if self.count % 10 == 0:
                answer = self.server.ask(f"/good/page.lsp?n={self.count}")
                assert (answer.status, answer.text) == (200, f"page {self.count}")
            self.count += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            gevent.sleep(0.001)
        client.sock.close()


def test_two_hundred_faults(server: AppServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    smq_hub.install(server.vm, server.services, server.applications.exchanges)
    server.app(GOOD, "good")
    pages: dict[str, Any] = {f"{number}.lsp": f"<?lsp {code} ?>" for number, code in enumerate(FAULTS.values())}
    assert server.app({".preload": SETUP, **pages}, "bad").error is None
    customers = [Customer(server, number) for number in range(4)]
    tasks = [gevent.spawn(customer.run) for customer in customers]
    faults = 0
    for _ in range(ROUNDS):
        for number in range(len(FAULTS)):
            _provoke(server.port, f"/bad/{number}.lsp")
            faults += 1
    assert _provoke(server.port, "/bad/thrown").startswith(b"HTTP/1.1 500")
    gevent.sleep(0.1)
    for customer in customers:
        customer.done = True
    for task in tasks:
        task.get(timeout=5)
    assert faults >= 200
    assert min(customer.count for customer in customers) > 20
    assert max(customer.slowest_s for customer in customers) < 2
    assert server.ask("/good/page.lsp?n=end").text == "page end"
    server.vm.stop()  # kills what is stubborn
    with gevent.Timeout(3):
        while server.vm.activities.blocked:
            gevent.sleep(0.01)
    assert server.ask("/good/page.lsp?n=after").text == "page after"


def _provoke(port: int, path: str) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while data := sock.recv(65536):
            answer += data
    return answer

"""200 faults of one application, of every kind, while another application serves: that one loses nothing. And loops
that only compute, which hold up the others until they are ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import gevent
import pytest
from gevent import socket

from smqrt.apps.lua.api import smq_hub
from smqrt.apps.lua.watchdog import LoopWatchdog
from smqrt.wire.websocket import TEXT
from tests.apps.lua.app_server import AppServer
from tests.apps.lua.websocket_client import Client
from tests.support.waiting import wait_until

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

LOOPS = {
    "page": "while true do end",
    "page under pcall": "while true do pcall(function() while true do end end) end",
    "coroutine": "coroutine.wrap(function() while true do end end)()",
    "coroutine under pcall": "coroutine.wrap(function() while true do pcall(function() ::a:: goto a end) end end)()",
    "pcall of coroutines": "while true do pcall(coroutine.wrap(function() while true do end end)) end",
    "timer": "ba.timer(function() while true do end end):set(1, true)",
    "timer under pcall": "ba.timer(function() while true do pcall(function() ::a:: goto a end) end end):set(1, true)",
    "thread": "ba.thread.run(function() ba.sleep(1) while true do end end)",
    "cosocket": "ba.socket.event(function(me) me:read(1) while true do end end)",
    "comparator": "table.sort({3, 2, 1}, function(a, b) while true do end end)",
    "close": "local x <close> = setmetatable({}, {__close = function() while true do end end})",
    "subscriber": "local smq = require'smq.hub'.create() smq:subscribe('t', {onmsg = function() ::a:: goto a end}) "
    "smq:publish('x', 't')",
}
LOOP_S = 0.06


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
            gevent.sleep(0.005)
        client.sock.close()


@pytest.fixture
def customers(server: AppServer) -> Iterator[list[Customer]]:
    """They use the good application until the test has ended, and every answer was right."""
    smq_hub.install(server.vm, server.services, server.applications.exchanges)
    server.app(GOOD, "good")
    customers = [Customer(server, number) for number in range(4)]
    tasks = [gevent.spawn(customer.run) for customer in customers]
    yield customers
    for customer in customers:
        customer.done = True
    for task in tasks:
        task.get(timeout=5)
    assert server.ask("/good/page.lsp?n=end").text == "page end"


def _load_bad(server: AppServer, pages: Iterable[str]) -> None:
    files: dict[str, Any] = {f"{number}.lsp": f"<?lsp {code} ?>" for number, code in enumerate(pages)}
    assert server.app({".preload": SETUP, **files}, "bad").error is None


def test_two_hundred_faults(server: AppServer, customers: list[Customer], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    _load_bad(server, FAULTS.values())
    faults = 0
    for _ in range(ROUNDS):
        for number in range(len(FAULTS)):
            _provoke(server.port, f"/bad/{number}.lsp")
            faults += 1
    assert _provoke(server.port, "/bad/thrown").startswith(b"HTTP/1.1 500")
    assert faults >= 200
    wait_until(lambda: min(customer.count for customer in customers) > 20)
    assert max(customer.slowest_s for customer in customers) < 2
    for customer in customers:
        customer.done = True
    gevent.sleep(0.1)  # they end
    with gevent.Timeout(20):
        while server.vm.activities.blocked:
            server.vm.stop()  # kills what is stubborn; what is being resumed at that moment, the next time
            gevent.sleep(0.05)
    assert server.ask("/good/page.lsp?n=after").text == "page after"


@pytest.fixture
def watchdog(server: AppServer) -> Iterator[None]:
    watching = LoopWatchdog(server.vm, 60, loop_s=LOOP_S)
    watching.start()
    yield
    watching.stop()


@pytest.mark.parametrize("kind", LOOPS)
def test_endless_loops(
    kind: str, server: AppServer, customers: list[Customer], watchdog: None, caplog: pytest.LogCaptureFixture
) -> None:
    _load_bad(server, [LOOPS[kind]])
    for round_number in range(1, 3):
        before = [customer.count for customer in customers]
        _provoke(server.port, "/bad/0.lsp")
        for customer, count in zip(customers, before, strict=True):
            wait_until(lambda: customer.count >= count + 5, "everybody is served again", 30)  # noqa: B023
        message = f"0.lsp:1: this ran for {LOOP_S:g} s without yielding"
        wait_until(lambda: caplog.text.count(message) >= round_number, message)  # noqa: B023


def _provoke(port: int, path: str) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while data := sock.recv(65536):
            answer += data
    return answer

"""An application in Lua with two nodes of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smqrt.apps.lua.api import smq_client, smq_hub
from smqrt.cluster.engines.mesh import open_meshes
from tests.apps.lua.app_server import AppServer
from tests.support.waiting import wait_until

PRELOAD = """
mtls, conns, sides, hub = {}, {}, {}, require"smq.hub"
local function open(at, name)
  local side = {}
  side.channel = mtls[at]:open(name, function(node, up, err) record("status", at, node, up, err) end,
    function(data, node) record("data", at, data, node) end)
  return side.channel
end
function node(at, op)
  mtls[at] = require"smq.mtl".create("the password", op)
  conns[at] = assert(require"smq.conn".create(mtls[at], 0, {intf = "127.0.0.1"}))
  return mtls[at]
end
function join() conns[2]:add("127.0.0.1", conns[1].port) end
function channels(name)
  sides = {open(1, name or "chat"), open(2, name or "chat")}
end
function again(at, name) sides[at] = open(at, name or "chat") end
"""

ENV = """<?lsp local page = _ENV local _ENV = setmetatable({}, {
  __index = function(_, key) if app[key] ~= nil then return app[key] end return page[key] end,
  __newindex = function(_, key, value) app[key] = value end,
})
"""
"""A page of the tests has the variables of its application."""

TWO = "node(1) node(2) join()"


class Site:
    """An application with two nodes.

    Attributes:
        calls: what Lua's `record(...)` was called with.
    """

    def __init__(self, folder: Path) -> None:
        self.server = AppServer(folder)
        hubs = smq_hub.install(self.server.vm, self.server.services, self.server.applications.exchanges)
        smq_client.install_smq_cluster(self.server.vm, self.server.services, hubs)
        self.calls: list[tuple[Any, ...]] = []
        record: Any = lambda *values: self.calls.append(values)  # noqa: E731
        self.server.vm.namespace("recording", {"record": record}, source=b"local core, py = ... record = py.record")
        self.application = self.server.app({".preload": PRELOAD})
        assert self.application.error is None, self.application.error

    def run(self, source: str) -> str:
        """What Lua writes that runs as a page of the application."""
        self.server.write("", {"run.lsp": ENV + source + " ?>"})
        answer = self.server.ask("/run.lsp")
        assert answer.status == 200, answer.text
        return answer.text.strip()

    def value(self, expression: str) -> str:
        """Its values, as text."""
        return self.run(f"response:write(table.concat((function(...) local t = table.pack(...) for i = 1, t.n do "
                        f"t[i] = tostring(t[i]) end return t end)({expression}), ' '))")  # fmt: skip

    def error(self, call: str) -> str:
        """The error that a call raises, without its place."""
        text = self.run(f"local ok, text = pcall(function() {call} end) response:write(tostring(not ok and text))")
        place, _, text = text.rpartition("run.lsp:")
        return text.partition(": ")[2]

    def of(self, kind: str, at: int | None = None) -> list[tuple[Any, ...]]:
        """The calls of a function, of one node."""
        return [call[2:] for call in self.calls if call[0] == kind.encode() and at in (None, call[1])]

    def up(self) -> None:
        """Wait until both sides of a channel are there."""
        wait_until(lambda: all(self.of("status", at) and self.of("status", at)[-1][1] for at in (1, 2)), self.calls)

    def close(self) -> None:
        self.application.unload()
        self.server.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.close()
    assert not open_meshes

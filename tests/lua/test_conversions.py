"""Every call of the Lua API takes numbers as texts and texts as numbers, as Lua's own functions do; none ends in an error
of the library for values of a wrong kind."""

from __future__ import annotations

import logging
from pathlib import Path

import gevent
import pytest

from smqrt.lua import api_table
from smqrt.lua.api import smq_client, smq_cluster, smq_hub
from tests.lua.api_calls import CALLS, MAKERS, MEANS_ANOTHER
from tests.lua.app_server import AppServer
from tests.lua.conftest import HALF

HARNESS = Path(__file__).with_name("conversions.lua")


def prepared(server: AppServer, which: str, calls: str) -> None:
    hubs = smq_hub.install(server.vm, server.services, server.applications.exchanges)
    smq_cluster.install(server.vm, server.services, hubs)
    smq_client.install(server.vm, server.services)
    server.vm.namespace("test", {}, source=HALF)
    server.vm.eval(HARNESS.read_bytes(), "@conversions.lua")
    server.folder.joinpath("a.txt").write_text("return 5")
    server.app({}, "root")
    server.write("runner", {"step.lsp": "<?lsp audit.step(request) ?>", "prepare.lsp": PREPARE})
    server.app({}, "runner")
    another = ", ".join(f"[{name!r}] = {{{', '.join(f'[{at!r}] = true' for at in places.split())}}}" for name, places in MEANS_ANOTHER.items())
    server.vm.eval(f"calls, makers_text, which = ... another = {{{another}}}", "=x", calls.encode(), MAKERS.encode(), which.encode())
    answer = server.ask("/runner/prepare.lsp")
    assert answer.text == "ready", answer.text


PREPARE = """<?lsp
local key = ba.create.key()
local listener = ba.socket.bind(0, {intf = "127.0.0.1"})
keep = listener
audit.request = request
audit.prepare(which, calls, makers_text, another, {ignore = function() end, links = require"smq.mtl".create("secret"),
  listening = select(2, listener:sockname()), key = key, csr = ba.create.csr(key, {commonname = "x"}),
  public = (function() local x, y = ba.crypto.keyparams(key) return {x = x, y = y} end)(),
})
response:reset"buffer" response:write"ready"
?>"""


def run_all(server: AppServer) -> list[str]:
    count = 0
    while server.vm.eval("return audit.more ~= false")[0]:
        server.vm.eval("audit.more = nil")
        server.ask("/runner/step.lsp")
    return []


def all_calls() -> str:
    """The calls, and one without arguments of what else the table of the API has."""
    named = {line.partition(" | ")[0] for line in CALLS.splitlines()}
    kinds = {line.partition(" = ")[0] for line in MAKERS.splitlines()}
    others = [
        name
        for name in sorted(api_table.read().there - named)
        if (":" not in name or name.partition(":")[0] in kinds) and name not in NO_FUNCTIONS
    ]
    return CALLS + "".join(f"{name} | \n" for name in others)


NO_FUNCTIONS = {"page"}

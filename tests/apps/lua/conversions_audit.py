"""Call everything of the Lua API with values of all kinds: `-m tests.apps.lua.conversions_audit FOLDER WHICH GROUP`
prints what it finds as JSON. In a process of its own: what the calls open stays open until its end.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from smqrt.apps.lua import check
from smqrt.apps.lua.api import smq_client, smq_hub
from tests.apps.conftest import HALF
from tests.apps.lua.api_calls import CALLS, MAKERS, MEANS_ANOTHER
from tests.apps.lua.app_server import AppServer

HARNESS = Path(__file__).with_name("conversions.lua")
PREPARE = """<?lsp
local key = ba.create.key()
audit.listener = ba.socket.bind(0, {intf = "127.0.0.1"}) -- not of the page, whose variables end with it
audit.request = request
local names, links, kept = 0, require"smq.mtl".create("secret"), {} -- a channel that is collected is closed
audit.prepare(which, group, calls, named, makers_text, another, {
  ignore = function() end, unique = function() names = names + 1 return "n" .. names end,
  with_channel = function() kept[#kept + 1] = links:open("5", print, print) return links end,
  links = links, listening = select(2, audit.listener:sockname()),
  key = key, csr = ba.create.csr(key, {commonname = "x"}),
  public = {x = ba.crypto.keyparams(key), y = select(2, ba.crypto.keyparams(key))},
})
response:reset"buffer" response:write"ready"
?>"""
PAGES = 2000
SLOW = ("mtlm.create", "deferred", "response:deferred")
"""Not with wrong values: a password is made a key, and who waits for a deferred response waits long."""


def all_calls() -> list[str]:
    """The calls, and one without arguments of what else the table of the API has."""
    named = {line.partition(" | ")[0] for line in CALLS.splitlines()}
    kinds = {line.partition(" = ")[0] for line in MAKERS.splitlines()}
    others = [
        name for name in sorted(check.read_table().supported - named) if ":" not in name or name.split(":")[0] in kinds
    ]
    return [line for line in CALLS.splitlines() if line] + [f"{name} | " for name in others]


def of_group(group: str) -> str:
    """The calls that begin with one of these letters, "_a-h"."""
    return "\n".join(line for line in all_calls() if re.match(f"[{group}]", line, re.IGNORECASE))


def findings(server: AppServer, which: str, group: str, calls: str) -> list[str]:
    """What is wrong with calls, one line each."""
    hubs = smq_hub.install(server.vm, server.services, server.applications.exchanges)
    smq_client.install_smq_cluster(server.vm, server.services, hubs)
    smq_client.install_smq_client(server.vm, server.services)
    server.vm.namespace("test", {}, source=HALF)
    server.vm.eval(HARNESS.read_bytes(), "@conversions.lua")
    server.app({"a.txt": "return 5"})
    server.folder.joinpath("a.txt").write_text("return 5")
    server.app({"step.lsp": "<?lsp audit.step(request) ?>", "prepare.lsp": PREPARE}, "runner")
    another = ", ".join(
        f"[{name!r}] = {{{', '.join(f'[{at!r}] = true' for at in places.split())}}}"
        for name, places in MEANS_ANOTHER.items()
    )
    named = "\n".join(all_calls())
    texts = [text.encode() for text in (which, group, calls, named, MAKERS)]
    server.vm.eval(f"which, group, calls, named, makers_text = ... another = {{{another}}}", "=x", *texts)
    assert server.ask("/runner/prepare.lsp").text == "ready"
    for _ in range(PAGES):
        server.ask("/runner/step.lsp")
        if server.vm.eval("return audit.done") == (True,):
            break
    count, text = server.vm.eval('return audit.count, table.concat(audit.findings, "\\1")')
    assert isinstance(count, int)
    assert isinstance(text, bytes)
    assert count > 20
    return [line.decode("utf-8", "replace") for line in text.split(b"\1") if line]


def main(folder: str, which: str, group: str) -> None:
    """Print the findings for one of the groups of calls."""
    lines = of_group(group).splitlines()
    if which == "conversions":
        lines = [line for line in lines if not line.endswith("| ")]
    else:
        lines = [line for line in lines if not line.startswith(SLOW)]
    print("\n" + json.dumps(findings(AppServer(Path(folder)), which, group, "\n".join(lines))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # nothing is closed one by one

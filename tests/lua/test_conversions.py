"""Every call of the Lua API takes numbers as texts and texts as numbers, as Lua's own functions do; none ends in an
error of the library for values of a wrong kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gevent
import pytest

from smqrt.backplane.mesh import open_meshes
from smqrt.backplane.process import cluster
from smqrt.lua import api_table, conversions
from smqrt.lua.api import smq_client, smq_cluster, smq_hub
from smqrt.lua.bridge import LuaError
from smqrt.lua.vm import Vm
from tests.lua.api_calls import CALLS, MAKERS, MEANS_ANOTHER
from tests.lua.app_server import AppServer
from tests.lua.conftest import HALF

HARNESS = Path(__file__).with_name("conversions.lua")
PREPARE = """<?lsp
local key = ba.create.key()
listener = ba.socket.bind(0, {intf = "127.0.0.1"})
audit.request = request
audit.prepare(which, calls, makers_text, another, {
  ignore = function() end, links = require"smq.mtl".create("secret"), listening = select(2, listener:sockname()),
  key = key, csr = ba.create.csr(key, {commonname = "x"}),
  public = {x = ba.crypto.keyparams(key), y = select(2, ba.crypto.keyparams(key))},
})
response:reset"buffer" response:write"ready"
?>"""
PAGES = 2000
NUMBERS = "5 -5 +5 0x10 -0x10 0xffffffffffffffff 1e3 .5 5. 0x.8 0x1p4 1_0 nan inf 5m 0x - 1e400 9223372036854775808"
GROUPS = ("ba.", "a-h", "i-l", "m", "n-r", "s-z")
SLOW = ("mtlm.create", "deferred", "response:deferred")
"""Not with wrong values: a password is made a key, and who waits for a deferred response waits long."""


@pytest.fixture(autouse=True)
def _no_links_are_left() -> Iterator[None]:
    yield
    for mesh in list(open_meshes):
        mesh.close()
    cluster.mesh = None


def all_calls() -> list[str]:
    """The calls, and one without arguments of what else the table of the API has."""
    named = {line.partition(" | ")[0] for line in CALLS.splitlines()}
    kinds = {line.partition(" = ")[0] for line in MAKERS.splitlines()}
    others = [name for name in sorted(api_table.read().there - named) if ":" not in name or name.split(":")[0] in kinds]
    return [line for line in CALLS.splitlines() if line] + [f"{name} | " for name in others]


def of_group(group: str) -> str:
    """The calls of one of GROUPS."""
    if group == "ba.":
        return "\n".join(line for line in all_calls() if line.startswith("ba."))
    first, _, last = group.partition("-")
    return "\n".join(
        line for line in all_calls() if not line.startswith("ba.") and first <= line[0].lower() <= (last or first)
    )


def findings(server: AppServer, which: str, calls: str) -> list[str]:
    """What is wrong with calls, one line each."""
    hubs = smq_hub.install(server.vm, server.services, server.applications.exchanges)
    smq_cluster.install(server.vm, server.services, hubs)
    smq_client.install(server.vm, server.services)
    server.vm.namespace("test", {}, source=HALF)
    server.vm.eval(HARNESS.read_bytes(), "@conversions.lua")
    server.app({"a.txt": "return 5"})
    server.folder.joinpath("a.txt").write_text("return 5")
    server.app({"step.lsp": "<?lsp audit.step(request) ?>", "prepare.lsp": PREPARE}, "runner")
    another = ", ".join(
        f"[{name!r}] = {{{', '.join(f'[{at!r}] = true' for at in places.split())}}}"
        for name, places in MEANS_ANOTHER.items()
    )
    texts = calls.encode(), MAKERS.encode(), which.encode()
    server.vm.eval(f"calls, makers_text, which = ... another = {{{another}}}", "=x", *texts)
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


@pytest.mark.parametrize("group", GROUPS)
def test_both_forms_of_numbers_and_texts(server: AppServer, group: str) -> None:
    calls = "\n".join(line for line in of_group(group).splitlines() if not line.endswith("| "))
    assert findings(server, "conversions", calls) == []


@pytest.mark.parametrize("group", GROUPS)
def test_wrong_values_are_told_apart_from_faults_of_the_library(server: AppServer, group: str) -> None:
    calls = "\n".join(line for line in of_group(group).splitlines() if not line.startswith(SLOW))
    assert findings(server, "wrong", calls) == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("ba.sleep()", r"bad argument #1 to 'sleep' \(number expected, got no value\)"),
        ("ba.sleep('soon')", r"bad argument #1 to 'sleep' \(number expected, got string\)"),
        ("ba.sleep(true)", r"bad argument #1 to 'sleep' \(number expected, got boolean\)"),
        ("ba.rndbs(1.5)", r"bad argument #1 to 'rndbs' \(number has no integer representation\)"),
        ("ba.rndbs('1.5')", r"bad argument #1 to 'rndbs' \(number has no integer representation\)"),
        ("ba.b64encode(false)", r"bad argument #1 to 'b64encode' \(string expected, got boolean\)"),
        ("ba.encdate(0/0)", r"bad argument #1 to 'encdate' \(seconds since 1970"),
        ("ba.exec('a\\0b')", r"bad argument #1 to 'exec' \(a text without the character NUL"),
    ],
)
def test_errors(vm: Vm, code: str, message: str) -> None:
    with pytest.raises(LuaError, match=message):
        vm.eval(code)


def test_texts_of_numbers(vm: Vm) -> None:
    assert vm.eval(
        "return ba.b64decode(ba.b64encode(5)), ba.b64decode(ba.b64encode(1.5)), ba.b64decode(ba.b64encode(1.0))"
    ) == (
        b"5",
        b"1.5",
        b"1.0",
    )
    assert vm.eval("return #ba.rndbs('0x10'), #ba.rndbs(' 5 '), #ba.rndbs('1e3'), #ba.rndbs(2.0)") == (16, 5, 1000, 2)


def test_a_huge_number_of_threads_holds_nobody(vm: Vm) -> None:
    with gevent.Timeout(2):
        assert vm.eval("return ba.thread.configure(math.maxinteger)") == ((1 << 63) - 1,)


@pytest.mark.parametrize(
    "text",
    NUMBERS.split() + ["", " 7 ", "\t7\n", "1 2"],
)
def test_python_reads_numbers_as_lua_does(vm: Vm, text: str) -> None:
    assert vm.eval("return tonumber((...))", "=x", text.encode()) == (conversions.number_of(text),)


@pytest.mark.parametrize(
    "number", [5, -5, 1.5, 1.0, -0.0, 1e15, 1e100, 0.1, 123456789.125, float("inf"), float("-inf")]
)
def test_python_writes_numbers_as_lua_does(vm: Vm, number: float) -> None:
    assert vm.eval("return tostring((...))", "=x", number) == (conversions.text_of(number).encode(),)

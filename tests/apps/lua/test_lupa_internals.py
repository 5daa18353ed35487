"""The trial of lupa's build: what is used of Lua's C interface works, or isn't used, with one line in the log."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path

import lupa.lua51
import lupa.lua53
import pytest
import requests

from smqrt.apps.lua import activities, lupa_internals
from smqrt.apps.lua import vm as vm_module
from smqrt.apps.lua.lupa_internals import interrupt_of
from smqrt.apps.lua.vm import Vm, lupa_of
from smqrt.apps.lua.watchdog import LoopWatchdog
from tests.conftest import Served

LIMIT_S = 0.1
LUPA = lupa_of(vm_module.VERSION)
SOMETHING_ELSE = ctypes.create_string_buffer(64)

WRONG_BUILDS: dict[str, tuple[object, str, object, str]] = {
    "functions that are missing": (
        LUPA,
        "__file__",
        lupa.lua51.__file__,
        "undefined symbol: lua_version",
    ),
    "no library": (LUPA, "__file__", "/nowhere/lua54.so", "/nowhere/lua54.so"),
    "another Lua": (LUPA, "__file__", lupa.lua53.__file__, "its Lua is not 5."),
    "no address": (activities, "_address_in", lambda answer: 0, "Lua does not print the address of a coroutine"),
    "an address of nothing": (
        activities,
        "_address_in",
        lambda answer: 16,
        "Lua does not print the address of a coroutine",
    ),
    "an address out of the world": (activities, "_address_in", lambda answer: 1 << 70, "Lua does not print the"),
    "an address of something else": (
        activities,
        "_address_in",
        lambda answer: ctypes.addressof(SOMETHING_ELSE),
        "Lua does not print the address of a coroutine",
    ),
    "hooks that are not called": (lupa_internals, "_ALL_EVENTS", 0, "hooks are not called"),
    "another registry": (
        lupa_internals,
        "_REGISTRIES",
        {504: -1_001_001, 505: -1_001_000},
        "functions fail inside a hook",
    ),
}


def test_the_installed_build_is_as_expected(vm: Vm, caplog: pytest.LogCaptureFixture) -> None:
    assert interrupt_of(vm)
    assert caplog.records == []
    assert vm.eval("return 1 + 1") == (2,)


@pytest.mark.parametrize("wrong", WRONG_BUILDS.values(), ids=WRONG_BUILDS.keys())
def test_another_build_disables_the_feature_with_a_log_line(
    wrong: tuple[object, str, object, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    where, name, value, reason = wrong
    monkeypatch.setattr(where, name, value)
    vm = Vm()
    seen: list[bytes] = []
    watchdog = LoopWatchdog(vm, LIMIT_S, seen.append, loop_s=LIMIT_S)
    watchdog.start()
    busy = "local stop = os.clock() + 0.3 while os.clock() < stop do end return 'whole'"
    assert vm.run(vm.compile(busy)) == (b"whole",)
    watchdog.stop()
    assert len(caplog.records) == 1
    assert reason in caplog.records[0].message
    assert len(seen) == 1  # of Python alone
    assert seen[0].startswith(b"the event loop has been blocked for 0.1 s:\nnot in Lua, or in a C function")
    assert b"in test_another_build_disables" in seen[0]


def test_the_text_of_an_address() -> None:
    assert activities._address_in((True, b"0x7f00")) == 0x7F00
    for answer in (None, True, (True,), (True, b"(null)"), (True, 3.5), (True, b"")):
        assert activities._address_in(answer) == 0


def test_a_server_starts_and_serves_with_another_build(serve: Callable[..., Served], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("""
import ctypes
class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name == "lua_sethook": raise AttributeError("undefined symbol: lua_sethook")
        return super().__getattr__(name)
ctypes.CDLL = Library
""")
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "index.lsp").write_text("<?lsp=1+1?>")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    server = serve(tmp_path / "app", env={"PYTHONPATH": path})
    assert requests.get(server.url, timeout=10).text == "2"
    lines = [line for line in server.lines if "lupa" in line]
    assert len(lines) == 1
    assert re.search(r"lupa \S+ is not the expected build \(undefined symbol: lua_sethook\)", lines[0])

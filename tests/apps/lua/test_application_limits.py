"""Limits of applications: requests at once, timers, memory of Lua."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import gevent
import pytest
import requests

from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Vm
from smqrt.apps.lua.watchdog import LUA_MEMORY, LoopWatchdog
from smqrt.apps.python import directory
from smqrt.apps.python.directory import RequestSlots
from smqrt.http.headers import HttpError
from smqrt.settings.limits import LimitSettings, apply_limits
from tests.conftest import Served
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    yield
    apply_limits(LimitSettings(), {})
    directory.overload.clear()


APP = {
    ".preload": "",
    "slow.lsp": "<?lsp ba.sleep(1200) ?>slow",
    "quick.lsp": "quick",
    "timers.lsp": """<?lsp app.timers = app.timers or {}
        local ok, message
        repeat
          local timer = ba.timer(function() return true end)
          ok, message = pcall(timer.set, timer, 100000)
          app.timers[#app.timers + 1] = timer
        until not ok
        print(#app.timers, message) ?>""",
    "hungry.lsp": "<?lsp local t = {} for i = 1, math.huge do t[i] = ('x'):rep(100000) .. i end ?>",
    "leak.lsp": "<?lsp app.kept = {} for i = 1, 1000 do app.kept[i] = ('x'):rep(100000) .. i end ?>kept",
    "free.lsp": "<?lsp app.kept = nil collectgarbage() ?>free",
}


def test_a_server_with_small_limits(serve: Callable[..., Served], tmp_path: Path) -> None:
    for app in ("shop", "other"):
        (tmp_path / "apps" / app).mkdir(parents=True)
        for name, text in APP.items():
            (tmp_path / "apps" / app / name).write_text(text)
    flags = {"app-requests": 3, "app-requests-wait-s": 0.3, "app-timers": 20, "lua-memory-mib": 64, "head-bytes": 1000}
    served = serve(
        tmp_path / "apps", *(word for name, value in flags.items() for word in (f"--limits-{name}", str(value)))
    )
    url, session = served.url, requests.Session()

    def ask(path: str) -> requests.Response:
        return session.get(f"{url}/{path}", timeout=60)

    slow = [gevent.get_hub().threadpool.spawn(requests.get, f"{url}/shop/slow.lsp", timeout=60) for _ in range(3)]
    wait_until(lambda: ask("shop/quick.lsp").status_code == 503, "the slots are taken")
    refused = ask("shop/quick.lsp")
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert ask("other/quick.lsp").text == "quick", "another application has its own"
    assert [one.get().text for one in slow] == ["slow"] * 3
    assert ask("shop/quick.lsp").text == "quick"
    served.wait_for("refused: a request of shop: 3 requests are running, .*; see the setting limits.app_requests$")

    count, _, message = ask("shop/timers.lsp").text.partition("\t")
    assert count == "21"
    assert "20 timers are active; see the setting limits.app_timers" in message
    assert ask("other/timers.lsp").text.startswith("21")

    assert ask("shop/hungry.lsp").status_code == 500
    served.wait_for("not enough memory: Lua has more than 64 MiB; see the setting limits.lua_memory_mib", 60)
    assert ask("other/quick.lsp").text == "quick", "the server goes on, and what it held is free"
    assert session.get(f"{url}/shop/quick.lsp", headers={"X-Long": "x" * 1000}, timeout=60).status_code == 431
    assert served.stop() == 0


@pytest.fixture
def small(vm: Vm) -> Iterator[Vm]:
    watchdog = LoopWatchdog(vm, 60, memory_mib=32)
    watchdog.start()
    yield vm
    watchdog.stop()


def test_hungry_lua_gets_an_error_where_it_stands(small: Vm) -> None:
    fill = "while true do t[#t + 1] = ('x'):rep(50000) .. #t end"
    source = f"local t = {{}}\nlocal ok, why = pcall(function()\n{fill} end)\nerror(why, 0)"
    with pytest.raises(LuaError) as raised:
        small.run(small.compile(source, "@shop/.preload"))
    assert "not enough memory: Lua has more than 32 MiB" in raised.value.message
    assert small.eval("return 1 + 1") == (2,)


def test_what_is_kept_lets_no_request_in(small: Vm) -> None:
    small.eval("kept = {}")
    for _ in range(10):
        small.eval("for i = 1, 40 do kept[#kept + 1] = ('x'):rep(100000) .. #kept end")
    wait_until(lambda: directory.overload, "no request is let in")
    with pytest.raises(HttpError):
        RequestSlots("shop").take()
    assert LUA_MEMORY.count
    small.eval("kept = nil collectgarbage()")
    wait_until(lambda: not directory.overload, "they are let in again")
    RequestSlots("shop").take()


def test_garbage_is_no_reason(small: Vm) -> None:
    small.eval("for i = 1, 1000 do local one = ('x'):rep(100000) .. i end")
    assert small.eval("return 1") == (1,)

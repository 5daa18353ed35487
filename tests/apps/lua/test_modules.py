"""The smaller modules and helpers: EventEmitter, tokens (spec: bas-api §7, §12)."""

from __future__ import annotations

import re

import pytest

from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Services, Vm

# -- tokens


@pytest.mark.parametrize("key", ["", "16", "32"])
def test_tokens_round_trip_and_are_never_the_same(vm: Vm, key: str) -> None:
    (token,) = vm.eval(f"key = ba.aeskey({key}) data = ('x'):rep(1000) .. '\\0é' return ba.aesencode(key, data)")
    assert isinstance(token, bytes)
    assert re.fullmatch(rb"[A-Za-z0-9_-]+", token)
    vm.eval(f"""
    assert(#key == {key or 32} and ba.aeskey() ~= ba.aeskey())
    assert(ba.aesdecode(key, ...) == data and ba.aesencode(key, data) ~= ...)
    assert(ba.aesdecode(key, ba.aesencode(key, '')) == '' and ba.aesdecode(key, ba.aesencode(key, 'a', false)) == 'a')
    """, "=x", token)  # fmt: skip


def test_a_changed_token_is_nil(vm: Vm) -> None:
    vm.eval("""
    local key = ba.aeskey()
    local token = ba.aesencode(key, 'user=ann')
    for at = 1, #token do
      local other = token:sub(at, at) == 'A' and 'B' or 'A'
      assert(ba.aesdecode(key, token:sub(1, at - 1) .. other .. token:sub(at + 1)) == nil, at)
      assert(ba.aesdecode(key, token:sub(1, at - 1)) == nil)
    end
    for _, text in ipairs{'', 'x', '====', token .. '=', token .. '\\n', ' ' .. token, token .. 'A', ba.rndbs(100)} do
      assert(ba.aesdecode(key, text) == nil)
    end
    assert(ba.aesdecode(ba.aeskey(), token) == nil)
    """)


@pytest.mark.parametrize(
    "call", ["aeskey(24)", "aeskey'x'", "aesencode('short', 'x')", "aesencode(nil, 'x')", "aesdecode(ba.aeskey())"]
)
def test_wrong_arguments_of_tokens_raise(vm: Vm, call: str) -> None:
    with pytest.raises(LuaError, match=r"eval:1: (bad argument|an AES key must have 16 or 32 bytes)"):
        vm.eval(f"local value = ba.{call}")


# -- ports


def test_ports_of_the_server(vm: Vm, services: Services) -> None:
    assert vm.eval("return ba.serverport, ba.serversslport, ba.nosuchthing") == (None, None, None)
    services.http_port, services.https_port = 9357, 9443
    assert vm.eval("return ba.serverport, ba.serversslport") == (9357, 9443)


# -- EventEmitter

EMITTER = """
local EventEmitter = require "EventEmitter"
local e, seen = EventEmitter.create(), {}
local function note(word) return function(...) seen[#seen + 1] = table.concat({word, ...}, " ") end end
local function took() local all = table.concat(seen, "|") seen = {} return all end
"""


def test_events_reach_listeners_in_order(vm: Vm) -> None:
    vm.eval(
        EMITTER
        + """
    assert(e:on("x", note"a"):once("x", note"b"):addListener("x", note"c") == e)
    e:prependListener("x", note"first"):prependOnceListener("x", note"once")
    assert(e:emit("x", 1, "two") == true and took() == "once 1 two|first 1 two|a 1 two|b 1 two|c 1 two")
    assert(e:emit("x") == true and took() == "first|a|c")
    assert(e:emit("y", 1) == false and e:listenerCount"x" == 3 and e:listenerCount"y" == 0 and #e:listeners"x" == 3)
    assert(e:eventNames()[1] == "x" and #e:eventNames() == 1)
    assert(e:removeAllListeners"x" == e and e:emit"x" == false and #e:eventNames() == 0)
    for _, make in ipairs{EventEmitter, EventEmitter.new, function() return EventEmitter:new() end} do
      local other = make():on(1, note"one") other:emit(1) assert(took() == "one")
    end
    """
    )


def test_listeners_change_during_an_event(vm: Vm) -> None:
    vm.eval(
        EMITTER
        + """
    local late = note"late"
    local function leave() note"leaves"() e:off("x", leave) e:on("x", late) end
    e:on("x", leave):on("x", note"stays")
    e:emit"x" assert(took() == "leaves|stays")
    e:emit"x" assert(took() == "stays|late")
    e:removeListener("x", late):off("x", print)
    e:emit"x" assert(took() == "stays")
    e:on("twice", late):on("twice", late):off("twice", late) e:emit"twice" assert(took() == "late")
    local function note2(word) return function(name) note(word)(name) end end
    e:on("newListener", note2"new"):on("removeListener", note2"gone")
    e:on("z", late):off("z", late)
    assert(took() == "new removeListener|new z|gone z")
    local depth = 0
    e:once("deep", function() depth = depth + 1 e:emit"deep" end) e:emit"deep" assert(depth == 1)
    """
    )


def test_errors_of_listeners_and_of_events(vm: Vm) -> None:
    vm.eval(
        EMITTER
        + """
    e:on("x", function() error"broken" end):on("x", note"second")
    local ok, message = pcall(e.emit, e, "x") assert(not ok and message:find"broken" and took() == "")
    ok, message = pcall(e.emit, e, "error", "lost") assert(not ok and message:find"lost")
    ok, message = pcall(e.emit, e, "error") assert(not ok and message:find"unhandled 'error'")
    e:on("error", note"caught") assert(e:emit("error", "it") and took() == "caught it")
    for _, call in ipairs{
      function() e:on("x") end, function() e:on(nil, print) end, function() e:emit() end, function() e.on() end,
      function() e:off("x", 5) end, function() e:setMaxListeners(-1) end,
    } do ok, message = pcall(call) assert(not ok and message:find"bad argument", message) end
    """
    )


def test_tables_inherit_and_listeners_may_block(vm: Vm) -> None:
    vm.eval(
        EMITTER
        + """
    local Door = setmetatable({}, {__index = EventEmitter})
    Door.__index = Door
    local a, b = setmetatable({}, Door), setmetatable({}, Door)
    a:on("open", function() ba.sleep(1) note"a"() end) b:on("open", note"b")
    a:emit"open" assert(took() == "a") b:emit"open" assert(took() == "b")
    """
    )


def test_many_listeners_are_said_once(vm: Vm, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "smqrt.trace"):
        vm.eval(EMITTER + "for i = 1, 20 do e:on('x', print) end e:setMaxListeners(30) e:on('y', print)")
    assert [record.message.split(";")[0] for record in caplog.records] == ["EventEmitter: 11 listeners of 'x'"]

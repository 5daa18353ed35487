"""Tables as bytes: both halves of the codec read what the other has written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smqrt.apps.lua import api, bridge
from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Services, Vm

INTEGERS = st.integers(-(2**63), 2**63 - 1)
PLAIN = st.binary(max_size=20) | st.booleans() | INTEGERS | st.floats(allow_nan=False)
KEYS = st.binary(max_size=20) | st.integers(1, 2**40)
TABLES = st.recursive(
    st.dictionaries(KEYS, PLAIN, max_size=4), lambda inner: st.dictionaries(KEYS, PLAIN | inner, max_size=4)
)

HALF = b"""
local core = ...
through_lua = function(text) return core.table_codec.dump(core.table_codec.load(text)) end
dumped = function(source) return core.table_codec.dump(load("return " .. source)()) end
"""


@pytest.fixture(scope="module")
def in_lua() -> Callable[[str, bytes], Any]:
    vm = Vm()
    api.install(vm, Services())
    vm.namespace("test", {}, source=HALF)
    return lambda function, text: vm.eval(f"return {function}(...)", "=test", text)[0]


@settings(max_examples=50)
@given(TABLES)
def test_python_reads_what_it_has_written(table: dict[Any, Any]) -> None:
    assert bridge.load(bridge.dump(table)) == table


@settings(max_examples=50)
@given(TABLES)
def test_lua_reads_it_and_writes_the_same(in_lua: Callable[[str, bytes], Any], table: dict[Any, Any]) -> None:
    assert bridge.load(in_lua("through_lua", bridge.dump(table))) == table


def test_text_lists_and_none_become_what_lua_has() -> None:
    table = {"name": "é", "list": ["a", (1.5, True)], "nothing": None, "more": bytearray(b"x")}
    assert bridge.load(bridge.dump(table)) == {
        b"name": "é".encode(),
        b"list": {1: b"a", 2: {1: 1.5, 2: True}},
        b"more": b"x",
    }


def test_an_integer_stays_one_and_a_float_too() -> None:
    loaded = bridge.load(bridge.dump({1: 2, 2: 2.0}))
    assert [type(value) for value in loaded.values()] == [int, float]


def test_the_bytes() -> None:
    assert bridge.dump({b"k": [True, False, 1]}) == bytes.fromhex(
        "6d 00000001 73 00000001 6b 6d 00000003 69 0000000000000001 74 69 0000000000000002 66 69 0000000000000003 69"
        "0000000000000001"
    )


@pytest.mark.parametrize("value", [object(), {"a": object()}, [lambda: None]])
def test_what_is_no_value_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError):
        bridge.dump(value)


@pytest.mark.parametrize("source", ["{print}", "{coroutine.create(print)}"])
def test_lua_refuses_functions_and_threads(in_lua: Callable[[str, bytes], Any], source: str) -> None:
    with pytest.raises(LuaError, match="can't be sent"):
        in_lua("dumped", source.encode())


def test_lua_refuses_a_table_without_end(in_lua: Callable[[str, bytes], Any]) -> None:
    with pytest.raises(LuaError, match="nested too deep"):
        in_lua("dumped", b"(function() local t = {} t.t = t return t end)()")

"""Sparkplug B from Lua: `require "SparkplugB"`."""

from __future__ import annotations

from smqrt.apps.lua.vm import Vm


def test_in_lua(vm: Vm) -> None:
    source = """
    local sp = require "SparkplugB"
    assert(sp.DataType.Int32 == 3 and sp.DataType[3] == "Int32")
    local data = sp.encode{timestamp = 5, seq = 0, metrics = {
      {name = "t", datatype = "Float", value = 21.5}, {name = "big", datatype = sp.DataType.UInt64, value = -1},
      {name = "on", value = true}, {name = "raw", datatype = "Bytes", value = "\\0\\xff"},
      {name = "set", datatype = "DataSet",
       value = {columns = {"a", "b"}, types = {"Int8", "String"}, rows = {{1, "x"}, {nil, "y"}}}},
      {name = "none", datatype = "Int8"},
    }}
    local p = assert(sp.decode(data))
    local m = p.metrics
    assert(p.timestamp == 5 and #m == 6 and m[1].value == 21.5 and m[2].value == -1 and m[3].value == true)
    assert(m[4].value == "\\0\\xff" and m[5].value.rows[2][1] == nil and m[5].value.rows[2][2] == "y")
    assert(m[6].is_null and m[6].value == nil and m[2].datatype == "UInt64")
    local many = {}
    for i = 1, 3000 do many[i] = {name = "m" .. i, value = i} end
    assert(#sp.decode(sp.encode{metrics = many}).metrics == 3000)
    for _, wrong in ipairs{1, {metrics = 1}, {metrics = {{value = print}}}} do assert(not pcall(sp.encode, wrong)) end
    assert(not pcall(sp.decode))
    return select(2, sp.decode"\\xff"), select(2, pcall(sp.encode, {metrics = {{datatype = "Int8", value = 300}}}))"""
    fault, raised = vm.eval(source)
    assert isinstance(fault, bytes)
    assert fault.startswith(b"not a Sparkplug B payload")
    assert b"must be a whole number from -128 to 127 for Int8, not 300" in (raised or b"")  # type: ignore[operator]

"""The module org.conman.cbor: the examples of RFC 8949, tags, references, and what is not CBOR."""

from __future__ import annotations

import random

import gevent
import pytest

from smqrt.apps.lua.vm import Services, Vm

# RFC 8949, Appendix A: value in Lua, encoding. The encoder writes the same.
SAME = """
0 00|1 01|10 0a|23 17|24 1818|25 1819|100 1864|1000 1903e8|1000000 1a000f4240|1000000000000 1b000000e8d4a51000
-1 20|-10 29|-100 3863|-1000 3903e7|0.0 f90000|-0.0 f98000|1.0 f93c00|1.1 fb3ff199999999999a|1.5 f93e00
65504.0 f97bff|100000.0 fa47c35000|3.4028234663852886e+38 fa7f7fffff|1.0e+300 fb7e37e43c8800759c
5.960464477539063e-8 f90001|0.00006103515625 f90400|-4.0 f9c400|-4.1 fbc010666666666666|1/0 f97c00|0/0 f97e00
-1/0 f9fc00|false f4|true f5|nil f6|"" 60|"a" 6161|"IETF" 6449455446|"\\"\\\\" 62225c|"\\u{fc}" 62c3bc
"\\u{6c34}" 63e6b0b4|{} a0|{1,2,3} 83010203|{1,{2,3},{4,5}} 8301820203820405|{a=1} a1616101|"\\1\\xff" 4201ff
math.maxinteger 1b7fffffffffffffff|math.mininteger 3b7fffffffffffffff
"""
# Encodings that only the decoder knows.
OTHERS = """
2.0^64 1bffffffffffffffff|-2.0^64 3bffffffffffffffff|1/0 fa7f800000|1/0 fb7ff0000000000000|nil f7|16 f0
255 f8ff|"2013-03-21T20:04:00Z" c074323031332d30332d32315432303a30343a30305a|1363896240 c11a514b67b0
"\\1\\0\\0" c243010000|"dIETF" d818456449455446|{} 80|{1,2,3,4} 9f01020304ff
{1,{2,3},{4,5}} 9f018202039f0405ffff|"\\1\\2\\3\\4\\5" 5f42010243030405ff
"streaming" 7f657374726561646d696e67ff|{a=1,b={2,3}} bf61610161629f0203ffff|{[1]=2,[3]=4} a201020304
{Fun=true,Amt=-2} bf6346756ef563416d7421ff|{1,nil,3} 8301f603|5 d9d9f705
"""
PRELUDE = """
cbor = require "org.conman.cbor"
function hex(text) return (text:gsub(".", function(c) return ("%02x"):format(c:byte()) end)) end
function unhex(text) return (text:gsub("%x%x", function(digits) return string.char(tonumber(digits, 16)) end)) end
function same(a, b)
  if a ~= a then return b ~= b end
  if type(a) ~= "table" or type(b) ~= "table" then return a == b and math.type(a) == math.type(b) end
  for k, v in pairs(a) do if not same(v, b[k]) then return false end end
  for k in pairs(b) do if a[k] == nil then return false end end
  return true
end
"""


@pytest.fixture(autouse=True)
def module(vm: Vm) -> None:
    vm.eval(PRELUDE)


def examples(text: str) -> list[list[str]]:
    return [line.rsplit(" ", 1) for line in text.strip().replace("\n", "|").split("|")]


def test_the_examples_of_the_rfc(vm: Vm) -> None:
    for value, encoding in examples(SAME):
        assert vm.eval(f"return hex(cbor.encode({value}))") == (encoding.encode(),), value
    for value, encoding in examples(SAME) + examples(OTHERS):
        source = f'local value, position = cbor.decode(unhex "{encoding}") return same(value, {value}), position'
        assert vm.eval(source) == (True, len(encoding) // 2 + 1), (value, encoding)


def test_types(vm: Vm) -> None:
    vm.eval("""
    local function kind(text, conv) return select(3, cbor.decode(unhex(text), 1, conv)) end
    for text, name in pairs {["00"] = "UINT", ["20"] = "NINT", ["40"] = "BIN", ["60"] = "TEXT", ["80"] = "ARRAY",
      a0 = "MAP",
      f4 = "false", f5 = "true", f6 = "null", f7 = "undefined", f93c00 = "half", fa3f800000 = "single", f820 = "simple",
      fb3ff0000000000000 = "double", c060 = "_datetime", d82060 = "_url", d9ffff60 = "tag_65535", d9d9f780 = "ARRAY"} do
      assert(kind(text) == name, text)
    end
    assert(cbor.isnumber "UINT" and cbor.isnumber "half" and not cbor.isnumber "TEXT")
    assert(cbor.isinteger "NINT" and not cbor.isinteger "double" and cbor.isfloat "single" and not cbor.isfloat "UINT")
    assert(hex(cbor.TYPE.UINT(5)) == "05" and hex(cbor.TYPE.NINT(-5)) == "24" and hex(cbor.TYPE.BIN "a") == "4161")
    assert(hex(cbor.TYPE.TEXT "a") == "6161" and hex(cbor.TYPE.ARRAY {}) == "80" and hex(cbor.TYPE.MAP {1}) == "a10101")
    assert(hex(cbor.SIMPLE.half(1)) == "f93c00" and hex(cbor.SIMPLE.single(1)) == "fa3f800000"
      and hex(cbor.SIMPLE.null()) == "f6")
    assert(hex(cbor.SIMPLE.double(1)) == "fb3ff0000000000000" and cbor.SIMPLE.__break() == "\\xff")
    assert(not pcall(cbor.SIMPLE.half, 0.1) and not pcall(cbor.SIMPLE.single, 0.1))
    assert(not pcall(cbor.TYPE.UINT, -1) and not pcall(cbor.TYPE.NINT, 1) and not pcall(cbor.TYPE.TEXT, "\\xff")
      and not pcall(cbor.TYPE.BIN, 1))
    local first, behind = cbor.decode(cbor.encode(1) .. cbor.encode(2))
    assert(first == 1 and cbor.decode(cbor.encode(1) .. cbor.encode(2), behind) == 2)
    assert(cbor.decode(ba.bytearray.create(cbor.encode {x = 1})).x == 1
      and hex(cbor.encode(ba.bytearray.create "a")) == "4161")
    """)


def test_tags_and_conversions(vm: Vm) -> None:
    vm.eval("""
    assert(hex(cbor.TAG._epoch(1)) == "c101" and hex(cbor.TAG._datetime "x") == "c06178"
      and hex(cbor.TAG._cbor "x") == "d8184178")
    assert(hex(cbor.TAG._magic_cbor()) == "d9d9f7" and hex(cbor.TAG._magic_cbor(1)) == "d9d9f701")
    assert(not pcall(cbor.TAG._epoch, "now") and not pcall(cbor.TAG._datetime, "\\xff"))
    local conv = {
      _epoch = function(value) return os.date("!%Y", value) end,
      TEXT = function(value, is_key) return is_key and value:upper() or value end,
      UINT = function(value) return value * 2 end,
    }
    local day = setmetatable({}, {__tocbor = function() return cbor.TAG._epoch(500000000) end})
    local read = cbor.decode(cbor.encode {year = day, n = 4}, 1, conv)
    assert(read.YEAR == "2001" and read.N == 8)
    assert(hex(cbor.encode(setmetatable({}, {__len = function() return 0 end}))) == "80")
    local pairs_of = setmetatable({}, {__pairs = function() return next, {a = 1} end})
    assert(hex(cbor.encode(pairs_of)) == "a1616101")
    """)


def test_a_key_of_web_authentication(vm: Vm) -> None:
    """What browsers send as a credential's public key: a map with negative keys (RFC 9052), behind it other data."""
    vm.eval("""
    local x, y = ba.crypto.keyparams(ba.create.key())
    local key, behind = cbor.decode(cbor.TYPE.MAP {[1] = 2, [3] = -7, [-1] = 1, [-2] = x, [-3] = y} .. "more")
    assert(key[1] == 2 and key[3] == -7 and key[-1] == 1 and #key[-2] == 32
      and ba.crypto.keysize {x = key[-2], y = key[-3]} == 32)
    """)


def test_references(vm: Vm) -> None:
    vm.eval("""
    local circle = {name = "c"}
    circle.me, circle.list = circle, {circle, circle}
    local read = cbor.decode(cbor.encode(circle, {}))
    assert(read.me == read and read.list[1] == read and read.list[2] == read and read.name == "c")
    local ok, message = cbor.pencode(circle)
    assert(ok == nil and message:find "in a circle")
    assert(cbor.encode {1} == "\\x81\\1") -- the depth is as before
    assert(select(4, cbor.pdecode(unhex "d81d00")):find "reference to an unknown table")
    """)


def test_what_is_no_cbor(vm: Vm) -> None:
    source = """local value, position, kind, message = cbor.pdecode(...)
    assert(value == nil and kind == nil and type(position) == "number", message)
    local ok, thrown = pcall(cbor.decode, ...)
    assert(not ok and thrown == message)
    return message"""
    cases = {
        "more data": "| 18| 1a0000| 41| 5bffffffffffffffff| 7b7fffffffffffffff| 81| 9bffffffffffffffff"
        "| bb7fffffffffffffff| a101| 9f01| bf01| 5f| 5f41",
        "information 28": "1c| 3c| dc| fc",
        "chunk of another type": "5f6161ff| 7f01ff| 5f5f4100ffff",
        "not UTF-8": "61ff| 7f61ff61c3ff",
        "unexpected break": "ff| 81ff",
        "is nil or NaN": "a1f601| a1f97e0001",
        "nested deeper": "81" * 300 + "|" + "c1" * 300 + "|" + "9f" * 300,
        "not CBOR": "1f| 3f| df",
    }
    for message, texts in cases.items():
        for text in texts.split("|"):
            found = vm.eval(source, "=test", bytes.fromhex(text.strip()))[0]
            assert isinstance(found, bytes)
            assert message.encode() in found, (text, found)
    assert vm.eval("return pcall(cbor.decode, nil)")[0] is False
    assert vm.eval("return cbor.pencode(print)") == (None, b"a function can't be encoded")
    assert vm.eval("return cbor.pencode(ba.timer(print))") == (None, b"a userdata can't be encoded")


def test_random_bytes_affect_no_others(vm: Vm) -> None:
    source = """local text = ...
    local value, position, kind, message = cbor.pdecode(text)
    if kind then cbor.encode(value) else assert(message:find "at byte %d+%)$", message) end"""
    chance = random.Random(8949)
    for _ in range(1500):
        vm.eval(source, "=test", chance.randbytes(chance.randrange(40)))


def test_documents_are_limited_and_do_not_hold_the_loop(vm: Vm, services: Services) -> None:
    many = b"\x9b" + services.json_values.to_bytes(8) + b"\x01" * services.json_values
    message = vm.eval("return select(4, cbor.pdecode(...))", "=test", many)[0]
    assert isinstance(message, bytes)
    assert b"raise json_values" in message
    members = services.json_values // 4 + 1
    message = vm.eval(
        "return select(4, cbor.pdecode(...))", "=test", b"\xba" + members.to_bytes(4) + b"\xf4\x01" * members
    )[0]
    assert isinstance(message, bytes)
    assert b"members" in message
    scattered = b"".join(b"\x1b" + (32767 * at).to_bytes(8) + b"\x01" for at in range(1, 25001))
    message = vm.eval("return select(4, cbor.pdecode(...))", "=test", b"\xba" + (25000).to_bytes(4) + scattered)[0]
    assert b"numbers as keys, in no order" in (message or b"")  # type: ignore[operator]
    dense = b"".join(b"\x1a" + at.to_bytes(4) + b"\x01" for at in range(5000))
    assert vm.eval("return cbor.decode(...)[4999]", "=test", b"\xba" + (5000).to_bytes(4) + dense) == (1,)
    turns = gevent.spawn(_count_turns)
    vm.eval("local list = {} for at = 1, 50000 do list[at] = at end assert(#cbor.decode(cbor.encode(list)) == 50000)")
    turns.kill()
    assert turns.value > 3


def test_long_texts(vm: Vm) -> None:
    vm.eval("""
    local text = ("aé水😀"):rep(400000)
    assert(cbor.encode(text):byte() == 0x7A and cbor.decode(cbor.encode(text)) == text)
    assert(cbor.encode(text .. "\\xff"):byte() == 0x5A and cbor.encode("\\xff" .. text):byte() == 0x5A)
    assert(cbor.encode(text .. "\\xc3"):byte() == 0x5A)""")


def _count_turns() -> int:
    turns = 0
    try:
        while True:
            gevent.sleep(0)
            turns += 1
    except gevent.GreenletExit:
        return turns

"""ba.json (spec: bas-api §7)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smqrt.apps.lua import api
from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Services, Vm
from tests.apps.lua.versions import by_version
from tests.support.waiting import wait_until


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ("{}", "{}"),
        ("{1, 2, 3}", "[1,2,3]"),
        ("{1, nil, 3}", by_version("[1,null,3]", "[1]")),  # the length of a list with holes
        ("{a = 1}", '{"a":1}'),
        ("{a = {b = {}}}", '{"a":{"b":{}}}'),
        ("{1, 2, name = 'x'}", "[1,2]"),
        ("{[10] = 1}", '{"10":1}'),
        ("{[1.5] = 1}", '{"1.5":1}'),
        ("{true, false, ba.json.null}", "[true,false,null]"),
        ("{print, ba.timer(print), coroutine.create(print)}", "[null,null,null]"),
        ("{2^53, 1.5, -0.0, 1e300, 3.0, 7}", "[9007199254740992.0,1.5,-0.0,1e+300,3.0,7]"),
        ("{0.1, 1/3}", "[0.1,0.33333333333333331]"),
        ("{1/0, -1/0, 0/0}", "[null,null,null]"),
        ("{math.maxinteger, math.mininteger}", "[9223372036854775807,-9223372036854775808]"),
        (r"""{'q" b\\ n\n t\t c\1 d\127 é /'}""", r'["q\" b\\ n\n t\t c\u0001 d\u007f é /"]'),
        ("{a = {}}, {1}, {b = 2}", '{"a":{}}[1]{"b":2}'),
    ],
)
def test_encode(vm: Vm, table: str, text: str) -> None:
    assert vm.eval(f"return ba.json.encode({table})") == (text.encode(),)


def test_encode_writes_null_for_a_cycle(vm: Vm) -> None:
    assert vm.eval("local t = {} t.self = t t.list = {t} return ba.json.encode(t)")[0] in (
        b'{"self":null,"list":[null]}',
        b'{"list":[null],"self":null}',
    )
    assert vm.eval("local t = {1} return ba.json.encode{t, t}") == (b"[[1],[1]]",)


def test_encode_refuses_what_is_no_table(vm: Vm) -> None:
    for call in ("'x'", "nil", "", "{}, 1", "ba.json.null"):
        with pytest.raises(LuaError, match="table expected"):
            vm.eval(f"return ba.json.encode({call})")


def test_encode_of_tables_nested_too_deeply(vm: Vm) -> None:
    nest = "local t = {} for i = 1, {} do t = {{t}} end return ba.json.encode(t)"
    assert vm.eval(nest.replace("{} do", "5000 do").replace("{{t}}", "{t}")) == (None, b"stackoverflow")
    assert len(vm.eval(nest.replace("{} do", "900 do").replace("{{t}}", "{t}"))[0]) > 900


def test_encodestr(vm: Vm) -> None:
    assert vm.eval(r"return ba.json.encodestr('a\"\n')") == (rb'"a\"\n"',)


DUMP = """
local function dump(v)
  if v == ba.json.null then return "null" end
  if type(v) ~= "table" then return math.type(v) == "float" and string.format("%.17g", v) .. "f" or tostring(v) end
  local keys = {}
  for k in pairs(v) do keys[#keys + 1] = k end
  table.sort(keys, function(a, b) return tostring(a) < tostring(b) end)
  for i, k in ipairs(keys) do keys[i] = tostring(k) .. "=" .. dump(v[k]) end
  return "{" .. table.concat(keys, " ") .. "}"
end
"""


def decoded(vm: Vm, text: str, arguments: str = "") -> tuple[Any, ...]:
    source = (
        DUMP
        + f"""
    local results = table.pack(ba.json.decode((...){arguments}))
    if results[1] == nil then return nil, results[2] end
    for i = 1, results.n do results[i] = dump(results[i]) end
    return table.unpack(results, 1, results.n)
    """
    )
    return tuple(v.decode() if isinstance(v, bytes) else v for v in vm.eval(source, "=x", text.encode()))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{}", "{}"),
        (" [ ] ", "{}"),
        ('{"a":1}', "{a=1}"),
        ('{"a": 1.0, "b" : 1e2, "c":-3, "d":12345678901234567890}', "{a=1f b=100f c=-3 d=1.2345678901234567e+19f}"),
        ("[1,null,3]", "{1=1 2=null 3=3}"),
        ("[true,false]", "{1=true 2=false}"),
        ('{"a":{"b":[1,{"c":[]}]}}', "{a={b={1=1 2={c={}}}}}"),
        ('{"a":1,}', "{a=1}"),
        ('{"a":1 , }', "{a=1}"),
        ('// c\n{"a":/* x */1, // y\n "b"/*z*/:2}// end', "{a=1 b=2}"),
        (r'["\"\\\/\b\f\n\r\t"]', '{1="\\/\b\f\n\r\t}'),
        (r'["\u00e9\u20ac\ud83d\ude00x"]', "{1=é€😀x}"),
        ('{"":0,"k\\u0031":"é"}', "{=0 k1=é}"),
        ('["/* no comment */ // either"]', "{1=/* no comment */ // either}"),
    ],
)
def test_decode(vm: Vm, text: str, value: str) -> None:
    assert decoded(vm, text) == (value,)


def test_decode_of_several_documents(vm: Vm) -> None:
    assert decoded(vm, '{"a":1} [2]\n{}') == ("{a=1}", "{1=2}", "{}")


def test_null_may_be_nil_and_moves_nothing(vm: Vm) -> None:
    assert decoded(vm, "[1,null,3]", ", false") == ("{1=1 3=3}",)
    assert decoded(vm, '{"a":null}', ", false") == ("{}",)
    assert vm.eval("return type(ba.json.null), tostring(ba.json.null)") == (b"userdata", b"null")


@pytest.mark.parametrize("text", [
    "1", '"x"', "null", "x", "[1,]", "[,1]", '{"a"}', '{"a":}', "{a:1}", "[1 2]", "]", "{]", "[}",
    '{"a":1]', '["\\x"]', '["\\u12g4"]',
    "[01x]", "[1.2.3]", "[nul1]", "[+1]", "[0x10]", '{} x', "[1]]", "/ {}", "{,}", "[--1]", "[tru e]",
])  # fmt: skip
def test_decode_of_what_is_no_json(vm: Vm, text: str) -> None:
    assert decoded(vm, text) == (None, "parse")


@pytest.mark.parametrize("text", [
    "", "  ", "{", "[", '{"a"', '{"a":', '{"a":1', "[1", "[1,", '["abc',
    '["a\\', "[tru", "[-", "/* x", "[1, // x", '[{"a":[',
])  # fmt: skip
def test_decode_of_half_a_document(vm: Vm, text: str) -> None:
    assert decoded(vm, text) == (None, "needmoredata")


def test_depth_and_name_length_are_limited(vm: Vm) -> None:
    assert decoded(vm, "[[[]]]", ", true, 2") == (None, "parse")
    assert decoded(vm, "[[[]]]", ", true, 3") == ("{1={1={}}}",)
    assert decoded(vm, '{"abc":1}', ", true, 9, 2") == (None, "parse")
    assert decoded(vm, "[" * 100_000 + "]" * 100_000) == (None, "parse")


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("[" + "1," * 20_000 + "1]", "values"),
        ("[" + "[1]," * 20_000 + "1]", "values"),
        ("[]" * 20_000, "values"),
        ("{" + ",".join(f'"{number}":1' for number in range(2_501)) + "}", "members"),
    ],
)
def test_what_a_document_may_hold_is_limited(text: str, limit: str) -> None:
    vm = Vm()
    api.install(vm, Services(json_values=10_000))
    value, word, sentence = vm.eval("return ba.json.decode((...))", "=test", text.encode())
    assert (value, word) == (None, b"mem")
    assert limit in sentence.decode()
    assert "json_values" in sentence.decode()
    assert vm.eval("return #ba.json.decode((...))", "=test", b"[" + b"1," * 5_000 + b"1]") == (5_001,)


values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, min_size=1, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
documents = st.lists(values, min_size=1, max_size=4) | st.dictionaries(st.text(), values, max_size=4)
machine = Vm()
api.install(machine, Services())
round_trip = machine.compile("return ba.json.encode(ba.json.decode((...)))")


@settings(max_examples=70)
@given(documents)
def test_a_round_trip_changes_nothing(document: Any) -> None:
    for text in (json.dumps(document), json.dumps(document, ensure_ascii=False), json.dumps(document, indent=2)):
        assert json.loads(machine.run(round_trip, text.encode("utf-8", "surrogatepass"))[0]) == document


@settings(max_examples=100)
@given(st.text('{}[]",:0123456789.eE+-truefalsn \\u/*\n', max_size=40).map(str.encode) | st.binary(max_size=40))
def test_decode_never_raises_on_text(text: bytes) -> None:
    values = machine.run(machine_decode, text)
    assert values == (True,) or values[1] in (b"parse", b"needmoredata")


machine_decode = machine.compile("local ok, word = ba.json.decode((...)) if ok then return true end return nil, word")


PARSE = """
local parser = ba.json.parser()
local seen = {}
for piece in (...):gmatch("[^|]*") do
  local ok, value = parser:parse(piece)
  seen[#seen + 1] = ok and (value and ba.json.encode(value) or "more") or "error"
end
return table.concat(seen, " ")
"""


@pytest.mark.parametrize(
    ("pieces", "answers"),
    [
        ('{"a":1}', '{"a":1}'),
        ('{"a"|:1|}', 'more more {"a":1}'),
        ('["]|\\|"]|"]', 'more more more ["]\\"]"]'),
        ("[1]|[2]", "[1] [2]"),
        ("[1|,[2]|]  |  [3]", "more more [1,[2]] [3]"),
        ("[1 /* ] */|, // ]|\n2]", "more more [1,2]"),
        ("[1 /* *|/ ]", "more [1]"),
        ("x|[1]", "error [1]"),
        ("{bad|[1]", "error [1]"),
        ('{"a":trx|[1]', "error [1]"),
        ("[1}|[2]", "error [2]"),
        ("]|[1]", "error [1]"),
        ("  |[1]", "more [1]"),
    ],
)
def test_parser(vm: Vm, pieces: str, answers: str) -> None:
    assert vm.eval(PARSE, "=x", pieces.encode()) == (answers.encode(),)


def test_parser_gives_several_documents_of_a_piece(vm: Vm) -> None:
    assert vm.eval("local p = ba.json.parser() return select('#', p:parse('[1][2]{}[')), p:parse(']')")[0] == 4
    source = "local ok, all = ba.json.parser():parse('[1][2]{}', true) return ok, #all, all[2][1]"
    assert vm.eval(source) == (True, 3, 2)


def test_parser_takes_no_document_without_end(vm: Vm) -> None:
    vm.eval("p, mib = ba.json.parser(), ('x'):rep(1 << 20)")
    vm.eval("assert(p:parse('[\"'))")
    assert [vm.eval("return p:parse(mib)") for _ in range(16)] == [(True,)] * 15 + [(None, b"mem")]
    assert vm.eval("return p:parse('[7]')")[0] is True


def test_parser_with_null_as_nil(vm: Vm) -> None:
    assert vm.eval("local ok, t = ba.json.parser(false):parse('[null,1]') return t[1], t[2]") == (None, 1)


@settings(max_examples=40)
@given(st.lists(documents, min_size=1, max_size=3), st.data())
def test_any_split_gives_the_same_documents(documents: list[Any], data: st.DataObject) -> None:
    text = " ".join(map(json.dumps, documents)).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    machine.run(machine_new)
    found = [machine.run(machine_feed, piece)[0] for piece in pieces]
    decoder, position, joined = json.JSONDecoder(), 0, b"".join(found).decode()
    for document in documents:
        value, position = decoder.raw_decode(joined, position)
        assert value == document
    assert position == len(joined)


machine_new = machine.compile("the_parser = ba.json.parser()")
machine_feed = machine.compile("""
local ok, all = the_parser:parse((...), true)
return ok and all and ba.json.encode(table.unpack(all)) or ok and '' or 'error'
""")


PIECES = ["\\u00e4", "\\ud83d\\ude00", "\\ud83d", "\\ude00", "\\\\", "\\n", "x", "\\\\u", '\\"']


@settings(max_examples=30)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=8), st.integers(0, 12))
def test_long_strings_with_escapes(pieces: list[str], shift: int) -> None:
    """They are decoded in portions: no escape and no pair may be cut."""
    unit = "".join(pieces)
    inner = "x" * shift + unit * (50_000 // len(unit))
    assert long_strings.eval("return ba.json.decode((...))[1]", "=x", f'["{inner}"]'.encode())[0] == wanted(inner)


def wanted(inner: str) -> bytes:
    return str(json.loads(f'"{inner}"')).encode("utf-8", "surrogatepass")


long_strings = Vm()
api.install(long_strings, Services())


def test_two_decode_at_the_same_time(vm: Vm) -> None:
    """Each gives way in the middle, and goes on with its own options."""
    vm.eval("""
      done, text = {}, "[" .. ("null,[[1]],"):rep(20000) .. "1]"
      function decode(name, ...)
        local value, word = ba.json.decode(text, ...)
        done[name] = value and value[1] == ba.json.null and #value or value and "nil" or word
      end
    """)
    names = {"null": "true", "nil": "false", "shallow": "true, 2", "again": "true"}
    for name, options in names.items():
        vm.eval(f"ba.thread.run(function() decode('{name}', {options}) end)")
    wait_until(lambda: vm.eval("local n = 0 for _ in pairs(done) do n = n + 1 end return n") == (4,))
    assert vm.eval("return done.null, done['nil'], done.shallow, done.again") == (40001, b"nil", b"parse", 40001)


def test_a_long_text_in_a_place_that_cannot_block(vm: Vm) -> None:
    source = """
      local text = "[" .. ("1,"):rep(20000) .. "1]"
      return select(2, string.gsub("x", "x", function() return #ba.json.decode(text) end)), #ba.json.decode(text)
    """
    assert vm.eval(source) == (1, 20001)

"""XML for Lua: the parser with callbacks and without, chunks, faults, bounds; xml2table."""

from __future__ import annotations

import pytest

from smqrt.apps.lua.vm import Vm

HELPERS = """
local xparser, xml2table = require "xparser", require "xml2table"
local function flat(node)
  if type(node) == "string" then return "'" .. node .. "'" end
  local parts = {node.tag}
  for _, name in ipairs(node.attr) do parts[#parts + 1] = name .. "=" .. node.attr[name] end
  for _, child in ipairs(node) do parts[#parts + 1] = flat(child) end
  return "(" .. table.concat(parts, " ") .. ")"
end
"""


def run(vm: Vm, source: str, *arguments: bytes) -> list[object]:
    values = [*vm.eval(HELPERS + source, "=test", *arguments), None]
    return [value.decode() if isinstance(value, bytes) else value for value in values]


DOCUMENT = """<?xml version="1.0" encoding="UTF-8"?><!-- hi --><a x="1" y="&lt;2&gt;">
 t&#228;xt <b/><![CDATA[<raw>]]>more<c><d z='q'>in</d></c> </a>"""


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_a_document_as_a_table(vm: Vm, chunk: int) -> None:
    source = f"""
    local text, p = [=[{DOCUMENT}]=], xparser.create()
    assert(type(p) == "userdata")
    local state, doc
    for at = 1, #text, {chunk} do
      assert(state == nil or state == true)
      state, doc = p:parse(text:sub(at, at + {chunk} - 1))
    end
    assert(p:parse" \\n" == "DONE")
    return state, flat(doc), select(2, p:parse"junk"), p:destroy(), p:destroy(), pcall(p.parse, p, "x")"""
    state, document, junk, *rest = run(vm, source)
    assert state == "DONE"
    assert document == "(a x=1 y=<2> '\n täxt ' (b) '<raw>more' (c (d z=q 'in')))"
    assert junk == "junk after document element: line 3, column 0"
    assert rest[:3] == [True, False, False]
    assert str(rest[3]).endswith("the parser was destroyed")


def test_callbacks(vm: Vm) -> None:
    source = """
    local log, context = {}, {}
    local function note(...) log[#log + 1] = table.concat({...}, " ") end
    local callbacks = {
      StartElement = function(c, name, attributes) assert(c == context) note("<", name, attributes.x or "") end,
      EndElement = function(c, name) note(">", name) end,
      CharacterData = function(c, text) note("T", text) end,
      Comment = function(c, text) note("C", text) end,
      ProcessingInstruction = function(c, target, data) note("P", target, data) end,
    }
    local p = xparser.create(callbacks, context)
    assert(p:parse"<a><?go now?><!--c--><b x='1'> </b>" == true)
    local state, result = p:parse"t</a>"
    assert(state == "DONE" and result == context)
    p:reset()
    callbacks.EndElement = nil
    assert(p:parse"<z/>" == "DONE")
    return table.concat(log, "|")"""
    assert run(vm, source)[:1] == ["< a |P go now|C c|< b 1|T  |> b|T t|> a|< z "]


def test_callbacks_may_fail_block_reset_and_destroy(vm: Vm) -> None:
    source = """
    local p, names
    local function with(f) names = {} p = xparser.create({StartElement = f}) end
    with(function(_, name) error("no " .. name, 0) end)
    local ok, fault = pcall(p.parse, p, "<a><b/></a>")
    assert(not ok and fault == "no a" and select(2, p:parse"<b/>") == "a callback failed before")
    p:reset()
    assert(not pcall(p.parse, p, "<c/>"))
    with(function(_, name) ba.sleep(1) names[#names + 1] = name end)
    assert(p:parse"<a><b/><c/></a>" == "DONE" and #names == 3)
    with(function(_, name) names[#names + 1] = name p:destroy() end)
    assert(p:parse"<a><b/></a>" == true and #names == 1 and not pcall(p.parse, p, "x"))
    with(function(_, name) names[#names + 1] = name if name == "a" then p:reset() end end)
    assert(p:parse"<a><b/></a>" == true and #names == 1 and p:parse"<n/>" == "DONE")
    with(function() p:parse"<x/>" end)
    return select(2, pcall(p.parse, p, "<a/>"))"""
    assert str(run(vm, source)[0]).endswith("parse: a callback can't call it")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("<a><b></a>", "mismatched tag: line 1, column 8"),
        ("\n<a>&x;</a>", "undefined entity: line 2, column 3"),
        ("", "the document is not complete"),
        ("<a>", "the document is not complete"),
        ('<!DOCTYPE a [<!ENTITY x "y">]><a>&x;</a>', "declarations of entities are not supported: line 1, column 24"),
        (
            '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><a>&x;</a>',
            "declarations of entities are not supported",
        ),
        ('<!DOCTYPE a [<!ATTLIST b c CDATA "x">]><a><b/></a>', "declarations of attributes are not supported"),
        ('<!DOCTYPE a SYSTEM "http://127.0.0.1:1/x.dtd"><a>&x;</a>', None),
        ("<a>\xff</a>", "not well-formed (invalid token): line 1, column 3"),
    ],
)
def test_what_is_no_document(vm: Vm, text: str, fault: str | None) -> None:
    document, message, *_ = run(vm, "return xml2table((...))", text.encode("latin-1"))
    if fault is None:  # a document type is allowed, and not read: the entity may be declared there
        assert message is None
    else:
        assert document is None
        assert str(message).startswith(fault)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("('<a>'):rep(201)", "elements are nested more than 200 deep"),
        ("'<a ' .. ('x'):rep(300000)", "a tag or comment has more than 262144 bytes"),
        ("'<' .. ('x'):rep(1001) .. '/>'", "a name with its namespace has more than 1000 characters"),
        ("'<a ' .. ('x'):rep(1001) .. '=\"\"/>'", "a name with its namespace has more than 1000 characters"),
        ("'<a>' .. (' '):rep(17 * 1024 * 1024)", "the document has more than 16777216 bytes"),
        ("'<a>' .. ('<b/>'):rep(100001)", "the document has more than 100000 elements and texts"),
    ],
)
def test_bounds(vm: Vm, text: str, fault: str) -> None:
    assert str(run(vm, f"return select(2, xml2table.parse({text}))")[0]).startswith(fault)


def test_a_long_namespace_does_not_come_with_every_element(vm: Vm) -> None:
    source = """
    local parser = xparser.create({}, nil, "namespaces")
    return select(2, parser:parse('<a xmlns="' .. ("u"):rep(200000) .. '">' .. ("<b/>"):rep(2000)))"""
    assert str(run(vm, source)[0]).startswith("a name with its namespace has more than 1000 characters")


def test_too_many_attributes(vm: Vm) -> None:
    source = """local t = {"<a"} for i = 1, 1001 do t[i + 1] = " a" .. i .. "=''" end
    return select(2, xml2table(table.concat(t) .. "/>"))"""
    assert str(run(vm, source)[0]).startswith("an element has more than 1000 attributes")


def test_flags_and_wrong_arguments(vm: Vm) -> None:
    source = """
    local doc = xml2table("<x:a xmlns:x='urn:1'> <b/></x:a>", "namespaces", "keepspace")
    for _, f in ipairs{function() xparser.create(1) end, function() xparser.create(nil, nil, "odd") end,
      function() xparser.create{StartElement = 1} end, function() xparser.create():parse{} end, xml2table.parse} do
      assert(not pcall(f))
    end
    return flat(doc), #require"xml2table".parse("<a> <b/> </a>")"""
    assert run(vm, source)[:2] == ["(urn:1|a ' ' (b))", 1]


def test_a_large_document_does_not_hold_the_others(vm: Vm) -> None:
    source = """
    local turns, go = 0, true
    ba.thread.run(function() while go do turns = turns + 1 ba.sleep(0) end end)
    ba.sleep(1)
    local doc = assert(xml2table("<a>" .. ("<b x='1'/>"):rep(50000) .. "</a>"))
    go = false
    return #doc, turns"""
    count, turns, *_ = run(vm, source)
    assert count == 50000
    assert isinstance(turns, int)
    assert turns > 10

"""XML, encodings, dates, compression, digests and random numbers for Lua (spec: bas-api §7, §13)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import zlib

import gevent
import pytest

from smqrt.apps.lua.api import codec
from smqrt.apps.lua.api.codec import Digests, XmlBinding, XmlError, XmlParser
from smqrt.apps.lua.vm import Vm
from smqrt.errors import ArgumentError

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


@pytest.mark.parametrize("data", [b"", b"a", b"ab", b"abc", bytes(range(256)), b"\xff\xfe\xfd" * 9])
def test_base64_both_ways(vm: Vm, data: bytes) -> None:
    call = vm.compile("local s = ... return ba.b64encode(s), ba.b64urlencode(s), ba.b64urlencode(s, true)")
    plain, url, padded = vm.run(call, data)
    assert plain == base64.b64encode(data)
    assert padded == base64.urlsafe_b64encode(data)
    assert url == padded.rstrip(b"=")
    for text in (plain, url, padded):
        assert vm.eval("return ba.b64decode(...)", "=x", text) == (data,)


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("aG\nVs bG8=", b"hello"),
        ("aGVsbG8", b"hello"),
        ("__8=", b"\xff\xff"),
        ("//8", b"\xff\xff"),
        ("!!", b""),
        ("a", b""),
    ],
)
def test_base64_decode_ignores_noise_and_never_fails(vm: Vm, text: str, data: bytes) -> None:
    assert vm.eval("return ba.b64decode(...)", "=x", text.encode()) == (data,)


def test_percent_encoding(vm: Vm) -> None:
    assert vm.eval("return ba.urlencode('a b&c=d/é~-_.:!()*\\255?#+\\0'), ba.urldecode('a+b%20c%2fd%zz%')") == (
        "a%20b%26c%3Dd/é~-_.:!()*".encode() + b"\xff%3F%23%2B%00",
        b"a b c/d%zz%",
    )


def test_dates(vm: Vm) -> None:
    assert vm.eval("return ba.encdate(784111777), ba.parsedate('Sun, 06 Nov 1994 08:49:37 GMT')") == (
        b"Sun, 06 Nov 1994 08:49:37 GMT",
        784111777,
    )
    assert vm.eval("return ba.parsedate('no date'), #ba.encdate()") == (None, 29)


def test_mime(vm: Vm) -> None:
    assert vm.eval("return ba.mime'html', ba.mime'.png', ba.mime'nothing'") == (
        b"text/html",
        b"image/png",
        b"application/octet-stream",
    )


def test_deflate(vm: Vm) -> None:
    import gzip
    import zlib

    plain, packed = vm.eval("local s = ('x'):rep(1000) return ba.deflate(s), ba.deflate(s, true)")
    assert zlib.decompress(plain) == gzip.decompress(packed) == b"x" * 1000
    assert len(plain) < 50


@pytest.mark.parametrize("name", ["md5", "sha1", "sha256", "sha384", "sha512"])
def test_hash_is_curried_and_begins_anew(vm: Vm, name: str) -> None:
    source = """
    local h = ba.crypto.hash(...)
    local first = h("ab")("c")(true)
    return first, h("abc")(true, "hex"), h(true, "b64"), h("x")(true, "binary")
    """
    digest = hashlib.new(name, b"abc")
    assert vm.eval(source, "=x", name.encode()) == (
        digest.digest(),
        digest.hexdigest().encode(),
        base64.b64encode(hashlib.new(name).digest()),
        hashlib.new(name, b"x").digest(),
    )


def test_hmac(vm: Vm) -> None:
    expected = hmac.digest(b"key", b"data", "sha256").hex().encode()
    assert vm.eval("return ba.crypto.hash('hmac', 'sha256', 'key')('data')(true, 'hex')") == (expected,)


def test_unfinished_digests_are_removed(vm: Vm) -> None:
    before = vm.memory_bytes()
    vm.eval("for i = 1, 2000 do ba.crypto.hash('sha1')('x') end collectgarbage() collectgarbage()")
    assert vm.memory_bytes() < before + 50_000


def test_random_numbers_are_in_their_range(vm: Vm) -> None:
    vm.eval("""
    for i = 1, 200 do
      local a, b, c = ba.rnd(3), ba.rnd(-2, 2), ba.rnd()
      assert(a >= 1 and a <= 3 and b >= -2 and b <= 2 and c >= 0 and c < 2^32)
      assert(math.type(a) == 'integer' and math.type(c) == 'integer')
      for bytes = 1, 7 do local r = ba.rnds(bytes) assert(r >= 0 and r < 1 << 8 * bytes) end
      for _, bytes in ipairs{8, 9, 1000, 0, -1} do assert(math.type(ba.rnds(bytes)) == 'integer') end
      assert(package.cpath == '')
    end
    assert(#ba.rndbs(33) == 33 and ba.rndbs(16) ~= ba.rndbs(16))
    ba.rndseed(42)
    """)
    assert vm.eval("return pcall(ba.rnd, 2, 1)")[0] is False


def test_all_values_of_a_small_range_come(vm: Vm) -> None:
    assert vm.eval("local s = {} for i = 1, 200 do s[ba.rnd(0, 2)] = true end return s[0], s[1], s[2]") == (True,) * 3


def test_large_texts_are_worked_on_in_portions(vm: Vm) -> None:
    """The same results, and others run meanwhile."""
    turns = 0

    def count() -> None:
        nonlocal turns
        while True:
            gevent.sleep(0)
            turns += 1

    counting = gevent.spawn(count)
    vm.eval("""
    local text = ("a b%\\xff+"):rep(60000)
    local encoded = ba.urlencode(text)
    assert(encoded == ba.urlencode(text:sub(1, 6)):rep(60000) and ba.urldecode(encoded) == text)
    assert(ba.urldecode(("%4"):rep(100000)) == ("%4"):rep(100000) and ba.urldecode(encoded .. "%") == text .. "%")
    for shift = 0, 3 do
      local shifted = ("x"):rep(shift) .. ("%41"):rep(50000)
      assert(ba.urldecode(shifted) == ("x"):rep(shift) .. ("A"):rep(50000))
    end
    local long = ("0123456789abcdef"):rep(400000)
    local whole = ba.crypto.hash "sha256" (long) (true)
    local hash = ba.crypto.hash "sha256"
    for at = 1, #long, 1 << 20 do hash(long:sub(at, at + (1 << 20) - 1)) end
    assert(hash(true) == whole)
    """)
    counting.kill()
    assert turns > 5
    for gzip in (False, True):
        packed = vm.eval("return ba.deflate(('some text '):rep(50000), ...)", "=test", gzip)[0]
        assert isinstance(packed, bytes)
        assert zlib.decompress(packed, wbits=31 if gzip else 15) == b"some text " * 50000


@pytest.mark.parametrize("before", range(5))
def test_an_escape_between_two_portions_is_decoded(before: int) -> None:
    start = b"x" * (codec.PIECE_BYTES - before)
    for escape, text in ((b"%c3%a4", "ä".encode()), (b"+%", b" %"), (b"%%41", b"%A"), (b"%4", b"%4")):
        assert codec.urldecode_large(start + escape) == start + text


def test_a_digest_ends_once_and_names_its_formats() -> None:
    digests = Digests()
    with pytest.raises(ArgumentError, match="unknown hash algorithm 'md4': use one of md5, sha1"):
        digests.open(b"md4", None)
    handle = digests.open(b"sha1", b"key")
    digests.update(handle, b"data")
    with pytest.raises(ArgumentError, match="binary, hex or b64 expected"):
        digests.finish(handle, b"decimal")
    assert digests.finish(handle, b"hex") == hmac.digest(b"key", b"data", "sha1").hex().encode()
    with pytest.raises(KeyError):
        digests.update(handle, b"more")
    digests.drop(handle)


def test_dates_of_old_servers_are_read() -> None:
    for date in (b"Sunday, 06-Nov-94 08:49:37 GMT", b"Sun Nov  6 08:49:37 1994", b"06 Nov 1994 09:49:37 +0100"):
        assert codec.parse_date(date) == 784111777, date
    assert codec.parse_date(b"06 Nov 1994 08:49:37" + b" " * codec.MAX_DATE_BYTES) is None


def test_eight_random_bytes_are_a_lua_integer() -> None:
    seen = [codec.random_unsigned(8) for _ in range(200)]
    assert min(seen) < 0 < max(seen)
    assert all(-(1 << 63) <= number < 1 << 63 for number in seen)
    assert all(0 <= codec.random_unsigned(7) < 1 << 56 for _ in range(20))


def test_an_unfinished_tag_is_bounded() -> None:
    """Also in pieces, each of which makes expat read it all again."""
    parser = XmlParser(has_namespaces=False)
    parser.feed(b"<a x='")
    for _ in range(31):
        parser.feed(b"y" * 8192)
    with pytest.raises(XmlError, match="a tag or comment has more than 262144 bytes: line 1, column 0"):
        parser.feed(b"y" * 8192)


def test_a_document_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "DOCUMENT_BYTES", 20)
    parser = XmlParser(has_namespaces=False)
    parser.feed(b"<a>" + b"x" * 17)
    with pytest.raises(XmlError, match="the document has more than 20 bytes"):
        parser.feed(b"x")


def test_a_malformed_document_is_an_error_of_its_parser() -> None:
    binding = XmlBinding()
    good, bad = binding.new(True), binding.new(False)
    assert binding.feed(bad, b"<a></b>") == (None, b"mismatched tag: line 1, column 5")
    events, done = binding.feed(good, b"<a xmlns='u'/>")
    assert isinstance(events, bytes)
    assert events.startswith(b"S\0\0\0\x03u|a\0\0\0\0E")
    assert done is True
    binding.collect(bad)
    with pytest.raises(KeyError):
        binding.feed(bad, b"")

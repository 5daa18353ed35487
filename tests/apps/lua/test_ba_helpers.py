"""The smaller helpers of ba: encodings, digests, random numbers, byte order, trace (spec: bas-api §7, §8.1)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import struct
import zlib

import gevent
import pytest

from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Vm

# -- encodings


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


# -- digests and random numbers


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


# -- byte order


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("number", [0, 1, 255, 256, 2**31, 2**63 - 1, -1, -2])
def test_h2n_cuts_and_n2h_reads_unsigned(vm: Vm, size: int, number: int) -> None:
    bits = number & (2 ** (8 * size) - 1)
    (text,) = vm.eval("return ba.socket.h2n(...)", "=x", size, number)
    assert text == bits.to_bytes(size, "big")
    value = bits - 2**64 if size == 8 and bits >= 2**63 else bits
    assert vm.eval("return ba.socket.n2h(...)", "=x", size, b"##" + text + b"#", 3) == (value,)


def test_floats_in_network_order(vm: Vm) -> None:
    assert vm.eval("return ba.socket.fh2n(4, 1.5), ba.socket.fh2n(8, -2.25)") == (
        struct.pack(">f", 1.5),
        struct.pack(">d", -2.25),
    )
    assert vm.eval("return ba.socket.fn2h(4, ...)", "=x", struct.pack(">f", 1.5)) == (1.5,)
    assert vm.eval("return ba.socket.fn2h(8, ...)", "=x", b"x" + struct.pack(">d", -2.25), 2) == (-2.25,)


@pytest.mark.parametrize(
    "call", ["n2h(4, 'abc')", "n2h(2, 'abc', 3)", "n2h(1, 'a', 0)", "n2h(9, 'abc')", "h2n(0, 1)", "h2n(1, 1.5)"]
)
def test_a_bad_offset_or_size_raises(vm: Vm, call: str) -> None:
    with pytest.raises(LuaError, match="bad argument"):
        vm.eval(f"return ba.socket.{call}")


# -- what the server tells


def test_version(vm: Vm) -> None:
    version, lua, date = vm.eval("return ba.version()")
    assert version >= 5803
    assert (lua, vm.eval("return _VERSION")) in ((504, (b"Lua 5.4",)), (505, (b"Lua 5.5",)))
    assert len(date) == 10


def test_cmpaddr(vm: Vm) -> None:
    source = (
        "return ba.cmpaddr('127.0.0.1', '::ffff:127.0.0.1'), ba.cmpaddr('::1', '0:0::1'), ba.cmpaddr('1.2.3.4', 'x')"
    )
    assert vm.eval(source) == (True, True, False)


# -- trace


def test_trace_names_function_and_line(vm: Vm, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "smqrt.trace"):
        vm.eval("local function work()\n trace('a', 1, nil, true) end\nwork()\ntrace('main', {} and 2.5)", "@app/p.lsp")
    assert [record.message for record in caplog.records] == ["work 2: a\t1\tnil\ttrue", "app/p.lsp 4: main\t2.5"]


def test_tracep_has_a_priority_and_maybe_no_prefix(vm: Vm, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "smqrt.trace"):
        vm.eval("""
        local function work()
          tracep(7, 'shown')
          tracep(8, 'hidden')
          tracep(false, 0, 'bare', 2)
          tracep(true, 0, 'dressed')
        end
        work()
        """)
    assert [record.message for record in caplog.records] == ["work 3: shown", "bare\t2", "work 6: dressed"]
    with pytest.raises(LuaError, match="bad argument #1 to 'tracep'"):
        vm.eval("tracep('no priority')")


def test_trace_uses_tostring(vm: Vm, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "smqrt.trace"):
        vm.eval("trace(setmetatable({}, {__tostring = function() return 'own' end}))")
    assert "own" in caplog.text


def test_print_writes_to_standard_output(vm: Vm, capsys: pytest.CaptureFixture[str]) -> None:
    vm.eval("print('hello', nil, 1.5) print()")
    assert capsys.readouterr().out == "hello\tnil\t1.5\n\n"


def test_seterrh(vm: Vm, caplog: pytest.LogCaptureFixture) -> None:
    vm.namespace("reporter", {}, source=b"report = ({...})[1].report_error")
    vm.eval("ba.seterrh(function(message, env) got = message .. env.name end) report('oops ', {name = 'page'})")
    assert vm.eval("return got") == (b"oops page",)
    vm.eval("ba.seterrh(function() error('in handler') end) report('x')")
    assert "error handler failed" in caplog.text
    vm.eval("ba.seterrh() report('x')")


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

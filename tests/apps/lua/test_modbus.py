"""`require "modbus.client"`: against pymodbus, and against servers that lie, hang and refuse."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gevent
import pytest
import trustme

from smqrt.apps.lua.vm import Vm
from tests.apps.lua.app_server import AppServer
from tests.apps.lua.modbus_server import PyModbus, ScriptedModbus, response
from tests.support.waiting import wait_until

PRELUDE = """
local port = ...
local modbus = require "modbus.client"
local function list(t)
  local texts = {}
  for at, value in ipairs(t) do texts[at] = tostring(value) end
  return table.concat(texts, " ")
end
local function equal(found, wanted)
   if found ~= wanted then error(("found %s, wanted %s"):format(tostring(found), tostring(wanted)), 2) end
end
local function open(op)
  op = op or {}
  op.port = port
  return assert(modbus.connect("127.0.0.1", op))
end
"""


@pytest.fixture(scope="module")
def pymodbus() -> Iterator[PyModbus]:
    server = PyModbus()
    yield server
    server.stop()


def run(vm: Vm, port: int, source: str) -> Any:
    return vm.eval(PRELUDE + source, "=x", port)


# ---- pymodbus


def test_coils_and_discrete_inputs(vm: Vm, pymodbus: PyModbus) -> None:
    run(
        vm,
        pymodbus.port,
        """
    local mb = open()
    equal(mb:wcoil(3, true), true)
    equal(list(mb:rcoil(2, 4)), "false true false false")
    equal(mb:rcoil(3), true)
    local many = {}
    for at = 1, 1968 do many[at] = at % 3 == 0 end
    equal(mb:wcoil(10, {true, false, true, true, false, false, false, false, true, true}), true)
    equal(list(mb:rcoil(10, 11)), "true false true true false false false false true true false")
    equal(mb:wcoil(3, false, 7), true)
    equal(mb:rcoil(3, 1, 7)[1], false)
    equal(mb:rcoil(3), true)
    equal(#mb:discrete(0, 300), 300)
    equal(mb:discrete(5), true)
    assert(mb:connected() and mb:close() and not mb:close() and not mb:connected())
    equal(select(2, mb:rcoil(0)), "socketclosed")""",
    )


def test_registers_of_all_types(vm: Vm, pymodbus: PyModbus) -> None:
    run(
        vm,
        pymodbus.port,
        """
    local mb <close> = open{unit = 7}
    equal(list(mb:register(100, 5)), "100 101 102 103 104")
    equal(mb:register(42), 42)
    equal(mb:wholding(0, 65535), true)
    equal(mb:rholding(0), 65535)
    equal(mb:wholding(0, {1, 2.9, -1}), true)
    equal(list(mb:rholding(0, 3)), "1 2 65535")
    equal(mb:wholding(10, {1.5, -2.25}, "float"), true)
    equal(list(mb:rholding(10, 2, "float")), "1.5 -2.25")
    equal(mb:wholding(20, 0xDEADBEEF, "dword"), true)
    equal(mb:rholding(20, nil, "dword"), 0xDEADBEEF)
    equal(list(mb:rholding(20, 2)), "57005 48879")
    equal(mb:wholding(30, math.pi, "double", 7), true)
    equal(mb:rholding(30, 1, 7, "double")[1], math.pi)
    equal(mb:wholding(40, "hello"), true)
    equal(mb:rholding(40, 5, "string"), "hello")
    equal(mb:rholding(40, 6, "string"), "hello\\0")
    equal(list(mb:readwrite(50, {7, 8}, 49, 4)), "0 7 8 0")
    equal(mb:rholding(0, 1, 1)[1], 0)""",
    )


def test_an_exception_of_the_server_ends_the_connection(vm: Vm, pymodbus: PyModbus) -> None:
    run(
        vm,
        pymodbus.port,
        """
    local closed
    local mb = open{onclose = function(err, client) closed = {err, client} end}
    local value, err = mb:rholding(60000, 2)
    assert(value == nil and err == 2 and closed[1] == 2 and closed[2] == mb)
    assert(not mb:connected() and select(2, mb:connected()) == 2)
    mb = open()
    equal(mb:wholding(0, 1), true)""",
    )


def test_asynchronous(vm: Vm, pymodbus: PyModbus) -> None:
    run(
        vm,
        pymodbus.port,
        """
    local got, closed = {}, nil
    local mb = open{async = true, onclose = function(err) closed = err end}
    local function cb(value, err, number, client)
      assert(client == mb)
      value = type(value) == "table" and list(value) or tostring(value)
      got[#got + 1] = ("%s %s %d"):format(value, err, number)
    end
    equal(mb:wholding(0, {1, 2, 3}, 1, cb), 1)
    equal(mb:rholding(0, 3, 1, cb), 2)
    for at = 3, 100 do equal(mb:rholding(0, cb), at) end
    while #got < 100 do ba.sleep(1) end
    equal(got[1], "true nil 1")
    equal(got[2], "1 2 3 nil 2")
    equal(got[100], "1 nil 100")
    mb:rholding(60000, 2, function(value, err) got = {value, err} error "of the callback" end)
    while not closed do ba.sleep(1) end
    assert(got[1] == nil and got[2] == 2 and closed == 2)
    equal(select(2, mb:rholding(0, cb)), "socketclosed")""",
    )


def test_in_a_cosocket(vm: Vm, pymodbus: PyModbus) -> None:
    run(
        vm,
        pymodbus.port,
        """
    local found
    ba.socket.event(function()
      local mb = open()
      assert(mb:wholding(70, 7))
      local second = open{async = true}
      second:rholding(70, function(value) found = value end)
      while not found do ba.sleep(1) end
      second:close()
    end)
    while not found do ba.sleep(1) end
    equal(found, 7)
    local done
    ba.thread.run(function()
      local mb <close> = assert(modbus.connect(assert(ba.socket.connect("127.0.0.1", port))))
      equal(mb:rholding(70), 7)
      local other <close> = assert(modbus.connect(assert(ba.socket.connect("127.0.0.1", port)), {async = true}))
      other:rholding(70, function(value) done = value end)
      while not done do ba.sleep(1) end
    end)
    while not done do ba.sleep(1) end
    equal(done, 7)""",
    )


# ---- servers that follow a script


def pdu(text: bytes, request: bytes) -> bytes:
    return response(request, text)


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (partial(pdu, b"\x83\x0b"), b"11"),
        (partial(pdu, b"\x83"), b"invalidresp"),
        (partial(pdu, b"\x04\x02\0\1"), b"invalidresp"),
        (partial(pdu, b"\x03\x04\0\1\0\2"), b"invalidresp"),
        (partial(pdu, b"\x03\x02\0"), b"invalidresp"),
        (lambda request: request[:2] + b"\0\1" + response(request, b"\x03\x02\0\1")[4:], b"invalidresp"),
        (lambda request: request[:4] + b"\xff\xff\1", b"invalidresp"),
        (lambda request: request[:4] + b"\0\1\1\3", b"invalidresp"),
        (lambda request: None, b"timeout"),
        (lambda request: response(request, b"\x03\x02\0\1")[:-1], b"timeout"),
        (lambda request: struct.pack(">H", 999) + response(request, b"\x03\x02\0\1")[2:], b"timeout"),
    ],
)
@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_wrong_responses(vm: Vm, answer: Any, word: bytes, mode: str) -> None:
    source = """
    local closed, value, err
    local mb = open{timeout = 50, async = %s, onclose = function(word) closed = word end}
    local function cb(...) value, err = ... end
    if %s then
      assert(mb:rholding(0, cb))
      while not closed do ba.sleep(1) end
    else
      value, err = mb:rholding(0)
    end
    assert(value == nil and closed == err and not mb:connected())
    return tostring(err)"""
    is_async = "true" if mode == "async" else "false"
    with ScriptedModbus(answer) as server:
        assert run(vm, server.port, source % (is_async, is_async)) == (word,)
        server.wait_closed()


def test_requests_as_bytes(vm: Vm) -> None:
    with ScriptedModbus(lambda request: response(request, request[7:12])) as server:
        run(
            vm,
            server.port,
            """
        local mb = open{unit = 255}
        assert(mb:wcoil(0xAC, true) and mb:wholding(1, 3, 17))
        assert(mb:wcoil(0x13, {true, false, true, true, false, false, true, true, true, false}))
        assert(mb:wholding(1, {0xA, 0x102}))""",
        )
    assert server.requests == [
        bytes.fromhex("0001 0000 0006 ff 05 00ac ff00"),
        bytes.fromhex("0002 0000 0006 11 06 0001 0003"),
        bytes.fromhex("0003 0000 0009 ff 0f 0013 000a 02 cd01"),
        bytes.fromhex("0004 0000 000b ff 10 0001 0002 04 000a 0102"),
    ]


def test_responses_in_pieces_and_of_others(vm: Vm) -> None:
    def answer(request: bytes) -> bytes:
        stranger = response(b"\x77\x77" + request[2:], b"\x03\x02\0\5")
        return stranger + response(request, b"\x03\x02" + request[8:10]) + stranger[:3]

    with ScriptedModbus(answer) as server:
        source = """local mb = open()
        equal(mb:rholding(11), 11)
        local value, err = mb:rholding(12)
        return tostring(value), tostring(err)"""
        assert run(vm, server.port, source)[1] == b"invalidresp"


@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_a_flood_of_responses_to_no_request(vm: Vm, mode: str) -> None:
    is_async = "true" if mode == "async" else "false"
    with ScriptedModbus(lambda request: response(b"\x77\x77" + request[2:], b"\x83\1") * 50_000) as server:
        source = """local mb, word = open{async = %s}, nil
        if %s then mb:rholding(1, function(_, err) word = err end) else _, word = mb:rholding(1) end
        while not word do ba.sleep(1) end
        return word"""
        assert run(vm, server.port, source % (is_async, is_async)) == (b"invalidresp",)
        server.wait_closed()


def test_several_callers_take_turns(vm: Vm) -> None:
    def answer(request: bytes) -> bytes:
        gevent.sleep(0.01)
        return response(request, b"\x03\x02" + request[8:10])

    with ScriptedModbus(answer) as server:
        run(
            vm,
            server.port,
            """
        local mb, got = open(), {}
        for at = 1, 3 do ba.thread.run(function() got[at] = mb:rholding(at) end) end
        while not (got[1] and got[2] and got[3]) do ba.sleep(1) end
        equal(list(got), "1 2 3")""",
        )


def test_too_many_transactions(vm: Vm) -> None:
    with ScriptedModbus(lambda request: None) as server:
        source = """
        local failed = 0
        local mb = open{async = true}
        local function cb(_, err) if err == "socketclosed" then failed = failed + 1 end end
        for _ = 1, 256 do assert(mb:rholding(0, cb)) end
        local value, word = mb:rholding(0, cb)
        assert(value == nil and word == "full" and mb:connected())
        mb:close()
        return failed"""
        assert run(vm, server.port, source) == (256,)
        server.wait_closed()


def test_the_server_ends_the_connection(vm: Vm) -> None:
    with ScriptedModbus(lambda request: b"") as server:
        pass
    source = """local mb, word = modbus.connect("127.0.0.1", {port = port})
    return tostring(mb), word"""
    assert run(vm, server.port, source) == (b"nil", b"cannotconnect")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("mb:rcoil(-1, 1)", "bad argument #1 to 'rcoil' (an address from 0 to 65535 expected, got -1)"),
        ("mb:rcoil(0, 2001)", "bad argument #2 to 'rcoil' (1 to 2000 bits or words expected, got 2001)"),
        ("mb:rcoil(65535, 2)", "(1 to 1 bits or words expected, got 2)"),
        ("mb:discrete(0, 0)", "'discrete' (1 to 2000"),
        ("mb:rholding(0, 126)", "(1 to 125"),
        ("mb:rholding(0, 63, 'float')", "(1 to 125 bits or words expected, got 126)"),
        ("mb:register('x')", "bad argument #1 to 'register' (number expected, got string)"),
        (
            "mb:register(0, 1, 'int')",
            "(word, dword, float, double or string expected, got int)",
        ),
        ("mb:register(0, 1, 256)", "(a unit from 0 to 255 expected, got 256)"),
        ("mb:register(0, 1, {})", "(type, unit or callback expected, got table)"),
        ("mb:register(0, 1, print)", "a callback needs connect(addr, {async = true})"),
        ("mb:wcoil(0, 1)", "bad argument #2 to 'wcoil' (boolean expected, got number)"),
        ("mb:wcoil(0, {1})", "bad argument #2 to 'wcoil' (boolean expected, got number)"),
        ("mb:wcoil(0, {})", "(1 to 1968"),
        ("mb:wholding(0, 65536)", "(a number from -32768 to 65535 expected, got 65536)"),
        ("mb:wholding(0, 0/0)", "expected, got "),
        ("mb:wholding(0, ('x'):rep(247))", "(1 to 123"),
        ("mb:wholding(0, nil)", "'wholding' (number, string or table expected, got no value)"),
        ("mb:readwrite(0, {1}, 0, 126)", "(1 to 125"),
        ("mb.rcoil({}, 1)", "modbus expected"),
        ("modbus.connect(7)", "bad argument #1 to 'connect' (socket expected, got number)"),
        ("modbus.connect('x', {unit = 256})", "a unit from 0 to 255"),
        ("modbus.connect('x', {async = 1})", "bad argument #async to 'connect' (boolean expected, got number)"),
        ("open{async = true}:rcoil(0)", "an asynchronous client needs a callback"),
    ],
)
def test_wrong_arguments(vm: Vm, pymodbus: PyModbus, call: str, message: str) -> None:
    source = f"local mb = open() local ok, text = pcall(function() return {call} end) assert(not ok) return text"
    assert message in run(vm, pymodbus.port, source)[0].decode()


def test_over_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    (tmp_path / "ca.pem").write_bytes(authority.cert_pem.bytes())
    from gevent.ssl import PROTOCOL_TLS_SERVER, SSLContext

    context = SSLContext(PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    source = """
    local store = ba.create.certstore()
    assert(store:addcert(ba.openio "home", "ca.pem"))
    local mb = open{shark = ba.create.sharkssl(store)}
    equal(mb:rholding(11), 11)
    local other, word = modbus.connect("127.0.0.1", {port = port, shark = ba.sharkclient()})
    assert(other == nil and word == "sslnottrusted")
    equal(open{secure = true, nocheck = true}:rholding(12), 12)"""
    server = AppServer(tmp_path)
    with ScriptedModbus(lambda request: response(request, b"\x03\x02" + request[8:10]), context) as scripted:
        run(server.vm, scripted.port, source)
    server.close()


def test_a_killed_caller_leaves_no_half_response(server: AppServer) -> None:
    with ScriptedModbus(lambda request: None) as scripted:
        source = f"""<?lsp mb = require "modbus.client".connect("127.0.0.1", {{port = {scripted.port}}})
        ba.thread.run(function() mb:rholding(0) end)"""
        server.page(f"{source} ?>")
        wait_until(lambda: len(scripted.requests) == 1)
        server.vm.stop()
        scripted.wait_closed()

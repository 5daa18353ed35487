"""The smaller helpers of ba: byte order, version, addresses, trace and print (spec: bas-api §7, §8.1)."""

from __future__ import annotations

import logging
import struct

import pytest

from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Vm

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

"""Numbers that no socket, timer or port takes are refused with a clear error; none of them stops the loop."""

from __future__ import annotations

import gevent
import pytest

from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Vm

UDP = "local u <close> = ba.socket.udpcon(0) return "
TCP = """local l <close> = ba.socket.bind(0, {intf = '127.0.0.1'})
local s <close> = ba.socket.connect('127.0.0.1', (select(2, l:sockname()))) return """
CLIENT = "return require 'httpc'.create()"
TIMER = "return ba.timer(function() end)"


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        (UDP + "u:read(0/0)", "milliseconds expected, got nan"),
        ("ba.sleep(0/0)", "milliseconds expected, got nan"),
        (TIMER + ":set(0/0)", "milliseconds expected, got nan"),
        (CLIENT + ":timeout(0/0)", "milliseconds expected, got nan"),
        (CLIENT + ":timeout(-1)", "above 0 expected"),
        ("ba.socket.connect('127.0.0.1', 9, {timeout = 0/0})", "milliseconds expected, got nan"),
        (CLIENT + ":request{url = 'http://127.0.0.1:9/', size = -5}", "a size expected, got -5"),
        ("require 'httpc'.create{maxsize = 0}", "above 0 expected, got 0"),
        (TCP + "s:queuelen(0)", "above 0 expected, got 0"),
        (TCP + "s:setoption('keepalive', true, 32768)", "1 to 32767, not 32768"),
        (TCP + "s:setoption('keepalive', true, 0)", "1 to 32767, not 0"),
        (TCP + "s:setoption('keepalive', true, 60, -1)", "1 to 32767, not -1"),
        (TCP + "s:setoption('keepalive', true, 0/0)", "1 to 32767, not nan"),
        (UDP + "u:setoption('ip-membership', true, 5)", "an IPv4 group address"),
        ("ba.socket.connect('127.0.0.1', 9, {shark = ba.sharkclient(), alpn = ''})", "1 to 255 ASCII characters"),
        ("ba.socket.connect('127.0.0.1', 9, {shark = ba.sharkclient(), alpn = {'h2', '\\xff'}})", "1 to 255 ASCII"),
        (UDP + "u:sendto('x', '127.0.0.1', 70000)", "port 70000; a port is 0 to 65535"),
    ],
)
def test_refused(vm: Vm, code: str, rule: str) -> None:
    with gevent.Timeout(5), pytest.raises(LuaError, match=rule):
        vm.eval(code)


@pytest.mark.parametrize("code", [UDP + "u:read(-5)", UDP + "u:read(0)"])
def test_a_time_that_is_past(vm: Vm, code: str) -> None:
    with gevent.Timeout(5):
        assert vm.eval(code) == (None, b"timeout")


@pytest.mark.parametrize("ms", ["math.huge", "1e300", "2^53"])
def test_a_time_that_never_comes(vm: Vm, ms: str) -> None:
    vm.eval(f"u = ba.socket.udpcon(0) seen = false ba.thread.run(function() seen = u:read({ms}) end)")
    gevent.sleep(0.02)  # it would be over if the number had overflowed
    assert vm.eval("u:close() return seen") == (False,)
    with gevent.Timeout(5):
        assert vm.eval(f"local t <close> = ba.timer(function() end) return t:set({ms})") == (True,)


@pytest.mark.parametrize("port", [-1, 65536, 70000])
def test_ports_do_not_wrap_around(vm: Vm, port: int) -> None:
    assert vm.eval(f"return ba.socket.connect('127.0.0.1', {port})")[1] == b"cannotconnect"
    assert vm.eval(f"return ba.socket.udpcon('127.0.0.1', {port})")[1] == b"cannotconnect"
    assert vm.eval(f"return ba.socket.bind({port})")[1] == b"bind"

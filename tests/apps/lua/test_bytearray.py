"""ba.bytearray (spec: bas-api §8.4)."""

from __future__ import annotations

import pytest

from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Vm


@pytest.mark.parametrize(
    "source",
    [
        'local b = create("abc") assert(#b == 3 and b[1] == 97 and b[3] == 99 and tostring(b) == "abc")',
        'local b = create(4) assert(#b == 4 and tostring(b) == ("\\0"):rep(4)) b[2] = 255 assert(b[2] == 255)',
        'local b = create("......") b[2] = "ab" b[4] = {99, 100} b[6] = create("!") assert(tostring(b) == ".abcd!")',
        'local b = create("hello") b[1] = 72 assert(bta.tostring(b) == "Hello" and bta.tostring(b, 2, 3) == "el")',
        'local b = create("hello") assert(bta.tostring(b, 2) == "ello" and bta.tostring(b, 6) == "")',
        "local b = create(10) local n, i, j = bta.size(b) assert(n == 10 and i == 1 and j == 10)",
        """local b = create("0123456789") bta.setsize(b, 3, 5)
           assert(#b == 3 and tostring(b) == "234" and b[1] == 50)
           b[1] = "xy"
           local n, i, j = bta.size(b) assert(n == 10 and i == 3 and j == 5)
           bta.setsize(b) assert(tostring(b) == "01xy456789")""",
        'local b = create("12345") assert(bta.copy(b, 4, "abcd") == 2 and tostring(b) == "123ab")',
        'local b = create("12345") assert(bta.copy(b, 1, "abcd", 2, 3) == 0 and tostring(b) == "bc345")',
        'local b = create("12345") assert(bta.copy(b, 1, "abcd", 2, -1) == 0 and tostring(b) == "bcd45")',
        'local b = create("12345") assert(bta.copy(b, 1, "abcd", 1, -4) == 0 and tostring(b) == "a2345")',
        'local b = create("12345") assert(bta.copy(b, 1, "abcd", 1, -5) == 0 and tostring(b) == "12345")',
        'local b = create("12345") assert(bta.tostring(b, 2, -2) == "234" and bta.tostring(b, -1 + 6, -1) == "5")',
        'local b = create("12345") assert(bta.copy(b, 2, create("xyz"), 3) == 0 and tostring(b) == "1z345")',
        "local b = create(8) bta.h2n(b, 2, 4, 0x01020304) assert(bta.n2h(b, 2, 4) == 0x01020304 and b[2] == 1)",
        "local b = create(8) bta.h2n(b, 1, 8, -1) assert(bta.n2h(b, 1, 8) == -1 and bta.n2h(b, 1, 2) == 65535)",
        'assert(bta.n2h(create("\\1\\2\\3"), 2, 2) == 0x203)',
        'local s = ("0123456789"):rep(10000) local b = create(s) b[1] = 48 assert(tostring(b) == s and #b == 100000)',
        'local b = create(20000) b[5001] = ("ab"):rep(7000) assert(tostring(b):sub(4999, 5004) == "\\0\\0abab")',
        'assert(type(create(1)) == "userdata" and create("a") == create("a") and create("a") ~= create("b"))',
        'local b = create("ab") assert(b.field == nil) for i = 1, #b do assert(b[i] == 96 + i) end',
        'local b = create("") assert(#b == 0 and tostring(b) == "" and bta.copy(b, 1, "xyz") == 3)',
    ],
)
def test_it(vm: Vm, source: str) -> None:
    vm.eval("local bta, create = ba.bytearray, ba.bytearray.create " + source)


@pytest.mark.parametrize(
    "source",
    [
        "return create(3)[4]", "return create(3)[0]", "create(3)[4] = 1", "create(3)[1] = 256", "create(3)[1] = -1",
        'create(3)[2] = "abc"', "create(3)[1] = 1.5", "create(-1)", "create({})", "create(3).x = 1",
        "bta.tostring(create(3), 0)", "bta.tostring(create(3), 1, 4)", "bta.setsize(create(3), 2, 4)",
        'bta.copy(create(3), 1, "abc", 1, -5)',
        'bta.copy(create(3), 5, "x")', 'bta.copy(create(3), 1, "x", 1, 2)', "bta.h2n(create(3), 1, 4, 0)",
        "bta.n2h(create(3), 3, 2)", "bta.n2h(create(9), 1, 9)", 'bta.size("x")', "create(1 << 40)",
    ],
)  # fmt: skip
def test_what_is_out_of_range_raises(vm: Vm, source: str) -> None:
    with pytest.raises(LuaError):
        vm.eval("local bta, create = ba.bytearray, ba.bytearray.create " + source)

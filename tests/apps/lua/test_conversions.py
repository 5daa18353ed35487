"""Every call of the Lua API takes numbers as texts and texts as numbers, as Lua's own functions do; none ends in an
error of the library for values of a wrong kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gevent
import pytest

from smqrt.apps.lua import bridge
from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Vm
from tests.conftest import REPOSITORY

NUMBERS = "5 -5 +5 0x10 -0x10 0xffffffffffffffff 1e3 .5 5. 0x.8 0x1p4 1_0 nan inf 5m 0x - 1e400 9223372036854775808"
GROUPS = [("conversions", "_a-z"), ("wrong", "_a-h"), ("wrong", "i-z")]
"""What the processes call, by its first letter: few, since most of the CPU time of each is its start."""


@pytest.mark.parametrize(("which", "group"), GROUPS)
def test_the_whole_api(tmp_path: Path, which: str, group: str) -> None:
    """Both forms of numbers and texts do the same; wrong values are told apart from faults of the library."""
    command = [sys.executable, "-m", "tests.apps.lua.conversions_audit", str(tmp_path), which, group]
    done = subprocess.run(
        command,
        cwd=tmp_path,  # they remove and write files
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [], done.stderr[-2000:]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("ba.sleep()", r"bad argument #1 to 'sleep' \(number expected, got no value\)"),
        ("ba.sleep('soon')", r"bad argument #1 to 'sleep' \(number expected, got string\)"),
        ("ba.sleep(true)", r"bad argument #1 to 'sleep' \(number expected, got boolean\)"),
        ("ba.rndbs(1.5)", r"bad argument #1 to 'rndbs' \(number has no integer representation\)"),
        ("ba.rndbs('1.5')", r"bad argument #1 to 'rndbs' \(number has no integer representation\)"),
        ("ba.b64encode(false)", r"bad argument #1 to 'b64encode' \(string expected, got boolean\)"),
        ("ba.encdate(0/0)", r"bad argument #1 to 'encdate' \(seconds since 1970"),
        ("ba.exec('a\\0b')", r"bad argument #1 to 'exec' \(a string without the character NUL"),
    ],
)
def test_errors(vm: Vm, code: str, message: str) -> None:
    with pytest.raises(LuaError, match=message):
        vm.eval(code)


def test_texts_of_numbers(vm: Vm) -> None:
    assert vm.eval(
        "return ba.b64decode(ba.b64encode(5)), ba.b64decode(ba.b64encode(1.5)), ba.b64decode(ba.b64encode(1.0))"
    ) == (
        b"5",
        b"1.5",
        b"1.0",
    )
    assert vm.eval("return #ba.rndbs('0x10'), #ba.rndbs(' 5 '), #ba.rndbs('1e3'), #ba.rndbs(2.0)") == (16, 5, 1000, 2)


def test_a_huge_number_of_threads_delays_no_others(vm: Vm) -> None:
    with gevent.Timeout(2):
        assert vm.eval("return ba.thread.configure(math.maxinteger)") == ((1 << 63) - 1,)


@pytest.mark.parametrize(
    "text",
    NUMBERS.split() + ["", " 7 ", "\t7\n", "1 2"],
)
def test_python_reads_numbers_as_lua_does(vm: Vm, text: str) -> None:
    assert vm.eval("return tonumber((...))", "=x", text.encode()) == (bridge.number_of(text),)


@pytest.mark.parametrize(
    "number", [5, -5, 1.5, 1.0, -0.0, 1e15, 1e100, 0.1, 123456789.125, float("inf"), float("-inf")]
)
def test_python_writes_numbers_as_lua_does(vm: Vm, number: float) -> None:
    assert vm.eval("return tostring((...))", "=x", number) == (bridge.text_of(number).encode(),)

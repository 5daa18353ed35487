"""ba.datetime (spec: bas-api §7)."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smqrt.apps.lua import api
from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Services, Vm
from tests.http.cpu import seconds


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("'2024-02-29T12:30:45Z'", "2024-02-29T12:30:45Z"),
        ("'2024-02-29'", "2024-02-29T00:00:00Z"),
        ("'2024-02-29 12:30'", "2024-02-29T12:30:00Z"),
        ("'2024-02-29T12:30:45.5+01:30'", "2024-02-29T12:30:45.5+01:30"),
        ("'2024-02-29T12:30:45.000000001-0800'", "2024-02-29T12:30:45.000000001-08:00"),
        ("0", "1970-01-01T00:00:00Z"),
        ("1.5", "1970-01-01T00:00:01.5Z"),
        ("-1", "1969-12-31T23:59:59Z"),
        ("0, 5", "1970-01-01T00:00:00.000000005Z"),
        ("0, 0, 60", "1970-01-01T01:00:00+01:00"),
        ("0, {days = 1}", "1970-01-02T00:00:00Z"),
        ("0, 0, 0, {hours = -1}", "1969-12-31T23:00:00Z"),
        ("0, 0, 0, 1000000000", "1970-01-01T00:00:01Z"),
        ("'2024-01-01', {days = 1, hours = 2, mins = 3, secs = 4, nsecs = 5}", "2024-01-02T02:03:04.000000005Z"),
        ("'2024-01-01', -1", "2023-12-31T23:59:59.999999999Z"),
        ("'MIN'", "0001-01-01T00:00:00Z"),
        ("'MAX'", "9999-12-31T23:59:59.999999999Z"),
        ("{year = 2024, month = 5, day = 6, hour = 7, min = 8, sec = 9}", "2024-05-06T07:08:09Z"),
        ("{year = 2024, month = 5, day = 6, hour = 7, offset = 120}", "2024-05-06T07:00:00+02:00"),
    ],
)
def test_making_and_showing(vm: Vm, arguments: str, text: str) -> None:
    assert vm.eval(f"return tostring(ba.datetime({arguments}))") == (text.encode(),)


def test_now(vm: Vm) -> None:
    for call in ("ba.datetime()", "ba.datetime('NOW')", "ba.datetime('NOW', 120)"):
        seconds, nanoseconds, offset = vm.eval(f"return {call}:ticks()")
        assert abs(seconds - time.time()) < 5
        assert 0 <= nanoseconds < 1_000_000_000
        assert offset == (120 if "120" in call else 0)
    assert vm.eval("return ba.datetime('NOW', {days = 1}) - ba.datetime() > 86399 * 1000000000") == (True,)


@pytest.mark.parametrize(
    "arguments",
    ["'x'", "'2023-02-29'", "'2024-13-01'", "'2024-01-01T25:00:00Z'", "'2024-01-01T00:00:00+99'", "'0000-01-01'",
     "1e12 // 1", "'MAX', 1", "{year = 2024, month = 2, day = 30}", "''"],
)  # fmt: skip
def test_what_is_no_datetime(vm: Vm, arguments: str) -> None:
    assert vm.eval(f"return ba.datetime({arguments})") == (None, b"Invalid datetime range")


def test_wrong_types_raise(vm: Vm) -> None:
    for arguments in ("true", "print", "0, 'x'", "'2024-01-01', {days = 'x'}"):
        with pytest.raises(LuaError, match="bad argument"):
            vm.eval(f"ba.datetime({arguments})")


def test_comparing(vm: Vm) -> None:
    source = """
    local a, b = ba.datetime("2024-01-01T00:00:00Z"), ba.datetime("2024-01-01T01:00:00.000000001+01:00")
    return a < b, a <= b, a == b, a > b, a == ba.datetime("2024-01-01T02:00:00+02:00"), a <= a
    """
    assert vm.eval(source) == (True, True, False, False, True, True)


def test_arithmetic(vm: Vm) -> None:
    source = """
    local a = ba.datetime("2024-02-28T23:00:00Z")
    return tostring(a + {hours = 1}), tostring({days = 2} + a), tostring(a - {days = 59}), tostring(a - 1),
      (a + {secs = 2, nsecs = 3}) - a
    """
    assert vm.eval(source) == (
        b"2024-02-29T00:00:00Z",
        b"2024-03-01T23:00:00Z",
        b"2023-12-31T23:00:00Z",
        b"2024-02-28T22:59:59.999999999Z",
        2_000_000_003,
    )
    for expression in ("d(0) - d(1)", "d('MAX') + 1", "d('MIN') - 1", "1 - d(0)", "d('MAX') - d('MIN')"):
        with pytest.raises(LuaError):
            vm.eval(f"local d = ba.datetime return {expression}")


def test_offset_and_date(vm: Vm) -> None:
    source = """
    local d = ba.datetime("2024-03-01T00:30:00+01:00")
    local utc, here = d:date(), d:date(true)
    return utc.day, utc.month, utc.hour, utc.offset, utc.wday, utc.yday, here.day, here.hour, here.offset,
      d:tostring(0), d:tostring(-90), d:offset(), d:offset(0), tostring(d), type(d)
    """
    assert vm.eval(source) == (
        29, 2, 23, 0, 5, 60, 1, 0, 60,
        b"2024-02-29T23:30:00Z", b"2024-02-29T22:00:00-01:30", 60, 0, b"2024-02-29T23:30:00Z", b"userdata",
    )  # fmt: skip


machine = Vm()
api.install(machine, Services())
shown = machine.compile("""
local d = ba.datetime(...)
local t = d:date()
return tostring(d), t.year, t.month, t.day, t.wday, t.yday, ba.datetime(tostring(d)) == d, ba.datetime(t) == d
""")


@settings(max_examples=200)
@given(st.integers(-62135596800, 253402300799))
def test_the_calendar_is_that_of_python(seconds: int) -> None:
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    date = moment.timetuple()
    assert machine.run(shown, seconds) == (
        moment.isoformat().replace("+00:00", "Z").encode(),
        date.tm_year,
        date.tm_mon,
        date.tm_mday,
        moment.isoweekday() % 7 + 1,
        date.tm_yday,
        True,
        True,
    )


@pytest.mark.parametrize("digits", ["1" * 3000, "1" * 1000 + "." + "1" * 1000 + "x", ":" * 3000 + "x"])
def test_digits_without_end_take_no_time(vm: Vm, digits: str) -> None:
    source = f"return ba.datetime('2026-11-22T00:00:{digits}x')"
    assert seconds(lambda: vm.eval(source)) < 0.01
    assert vm.eval(source) == (None, b"Invalid datetime range")

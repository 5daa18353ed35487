"""os.setlocale: answers as plain Lua in the locale "C", and changes nothing of the process."""

from __future__ import annotations

import locale

import pytest

from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Vm
from tests.apps.lua.app_server import AppServer


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ("os.setlocale()", b"C"),
        ("os.setlocale(nil, 'ctype')", b"C"),
        ("os.setlocale('C')", b"C"),
        ("os.setlocale('POSIX', 'all')", b"C"),
        ("os.setlocale('', 'numeric')", b"C"),
        ("os.setlocale('C.UTF-8')", None),
        ("os.setlocale('de_DE.UTF-8', 'time')", None),
        ("os.setlocale('no such locale')", None),
        ("os.setlocale(5)", None),
    ],
)
def test_answers_of_the_only_locale(vm: Vm, call: str, answer: object) -> None:
    before = locale.setlocale(locale.LC_ALL)
    assert vm.eval(f"return {call}") == (answer,)
    assert locale.setlocale(locale.LC_ALL) == before


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("os.setlocale('C', 'money')", r"bad argument #2 to 'setlocale' \(invalid option 'money'\)"),
        ("os.setlocale({})", r"bad argument #1 to 'setlocale' \(string expected, got table\)"),
        ("os.setlocale('C', {})", r"bad argument #2 to 'setlocale' \(string expected, got table\)"),
    ],
)
def test_wrong_arguments(vm: Vm, call: str, error: str) -> None:
    with pytest.raises(LuaError, match=error):
        vm.eval(call)


def test_one_application_changes_nothing_of_another(server: AppServer) -> None:
    """C.UTF-8 is there on every system; what has a decimal comma is not."""
    before = locale.setlocale(locale.LC_ALL)
    try:
        locale.setlocale(locale.LC_ALL, "C")
        server.app({".preload": "for _, name in ipairs{'de_DE.UTF-8', 'C.UTF-8', ''} do os.setlocale(name) end"})
        assert locale.setlocale(locale.LC_ALL) == "C"
        source = "return ba.json.encode{1.5}, string.format('%.1f', 1.5), tonumber '1.5', os.setlocale()"
        assert server.vm.eval(source) == (b"[1.5]", b"1.5", 1.5, b"C")
    finally:
        locale.setlocale(locale.LC_ALL, before)

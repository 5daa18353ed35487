"""Former names of modules that the manual has named."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from smqrt.former_modules import FORMER


@pytest.mark.parametrize("former", FORMER)
def test_a_former_name_imports_the_module_with_a_warning(former: str) -> None:
    program = (
        f"import {former} as module, sys, importlib\n"
        f"assert module is importlib.import_module({FORMER[former]!r})\n"
        f"assert module.__spec__.name == {FORMER[former]!r}"
    )
    ended = subprocess.run([sys.executable, "-W", "always", "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert f"DeprecationWarning: {former} is now {FORMER[former]}" in ended.stderr


@pytest.mark.parametrize("name", ["smqrt.nothing", "smqrt.net.nothing", "smqrt.net.listener"])
def test_other_names_are_not_found(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=name):
        import_module(name)

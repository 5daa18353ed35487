"""Differences between the versions of Lua."""

from __future__ import annotations

from typing import TypeVar

from smqrt.apps.lua import vm

T = TypeVar("T")


def by_version(lua54: T, lua55: T) -> T:
    """What is expected of the Lua that the tests run on, see conftest.py."""
    return lua54 if vm.VERSION == "5.4" else lua55

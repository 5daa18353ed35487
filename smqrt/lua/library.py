"""The Lua sources that the package ships in `smqrt/lua/lib`."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

_NAME = re.compile(r"[A-Za-z0-9_]+(?:[./][A-Za-z0-9_]+)*")
_PRIVATE = ("core", "ba")  # run by the vm itself, no modules for applications


def chunk_name(name: str) -> bytes:
    """The Lua chunk name of library `name`; the prefix tells library frames from those of applications."""
    return f"@smqrt/lua/lib/{_path(name)}".encode()


@cache
def source(name: str) -> bytes | None:
    """The source of library `name`, dots or slashes between its parts; None when there is none."""
    if not _NAME.fullmatch(name):
        return None
    file = resources.files("smqrt.lua") / "lib" / _path(name)
    return file.read_bytes() if file.is_file() else None


def module_source(name: str) -> bytes | None:
    """The same for what an application may `require`."""
    return None if re.split(r"[./]", name)[0] in _PRIVATE else source(name)


def _path(name: str) -> str:
    return name.replace(".", "/") + ".lua"

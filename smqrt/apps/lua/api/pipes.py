"""`ba.pipe`: named pipes (spec: bas-api §7). Reading and writing are those of other files; the Lua half is
lib/ba/pipes.lua."""

from __future__ import annotations

import os
import stat

from smqrt.apps.lua.api.files import FilesBinding
from smqrt.apps.lua.api.open_files import with_words
from smqrt.apps.lua.bridge import LuaResult, fail, from_utf8
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm
from smqrt.loop import greenlet_pool


def make(path: bytes, mode: int) -> LuaResult:
    """Make a named pipe with these permissions; blocks."""
    greenlet_pool.in_thread(os.mkfifo, from_utf8(path), mode)
    return True


def check(path: bytes) -> LuaResult:
    """True when it is a named pipe; blocks."""
    status = greenlet_pool.in_thread(os.stat, from_utf8(path))
    return True if stat.S_ISFIFO(status.st_mode) else fail("invalidname")


def install(vm: Vm, services: Services, files: FilesBinding) -> None:
    """Give Lua `ba.pipe`. What it opens is closed when its application ends."""
    blocking = {"make": with_words(make), "check": with_words(check)}

    def end_with_app(number: int, application: int | None) -> None:
        scope = services.scope_of(application)
        if scope is not None:
            scope.add(files.file(number))

    vm.namespace("ba.pipes", {"end_with_app": end_with_app}, blocking)

"""The `mako` table: what applications ask the server process (spec: bas-api §3)."""

from __future__ import annotations

import itertools
import logging
import os
import sys

import smqrt
from smqrt.lua.api.system import BUILD_DATE
from smqrt.lua.api.text import utf8
from smqrt.lua.bridge import Function
from smqrt.lua.services import Services
from smqrt.lua.vm import Vm

log = logging.getLogger("smqrt.lua")


class ExitFunctions:
    """What applications registered with `mako.onexit`."""

    def __init__(self, vm: Vm) -> None:
        self._vm = vm
        self._ref = 0

    def attach(self, ref: int) -> None:
        """Take the reference of the Lua function that runs them."""
        self._ref = ref

    def run(self) -> None:
        """Run them, in the order of their registration; errors are logged. May block."""
        self._vm.run(self._ref)


def install(vm: Vm, services: Services) -> ExitFunctions:
    """Give Lua the `mako` table; return its exit functions."""
    exit_functions = ExitFunctions(vm)
    functions: dict[str, Function] = {
        "argv": lambda: tuple(utf8(word) for word in services.argv),
        "environment": lambda: tuple(map(utf8, itertools.chain.from_iterable(os.environ.items()))),
        "cfgdir": _current_folder,
        "cfgfname": lambda: None,
        "cwd": _current_folder,
        "date": lambda: BUILD_DATE,
        "execpath": lambda: utf8(os.path.dirname(os.path.realpath(sys.argv[0])) + "/"),
        "version": lambda: smqrt.__version__.encode(),
        "port": lambda secure: (services.https_port if secure else services.http_port) or None,
        "can_stop": lambda: services.stop is not None,
        "stop": lambda status: services.stop(status) if services.stop else None,
        "attach": exit_functions.attach,
        "report": lambda text: log.error("%s", text.decode("utf-8", "replace")),
    }
    vm.namespace("ba.mako", functions)
    return exit_functions


def _current_folder() -> bytes:
    return utf8(os.getcwd() + "/")

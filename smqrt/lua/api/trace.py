"""trace, tracep and print: what applications tell the person at the server (spec: bas-api §7, runtime §7)."""

from __future__ import annotations

import logging
import sys

from smqrt.lua.services import Services
from smqrt.lua.vm import Vm
from smqrt.printable import PrintableFormatter

SHOWN_PRIORITY = 7  # messages with a larger number are not shown; 0 is the most important


def install(vm: Vm, services: Services) -> None:
    """Give Lua `trace`, `tracep` and `print`. Messages go to `services.log`, to stderr when nobody set up logging."""
    log = services.log
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(PrintableFormatter())
        log.addHandler(handler)
        log.setLevel(logging.INFO)

    def trace(priority: int, text: bytes) -> None:
        if priority <= SHOWN_PRIORITY:
            log.info("%s", text.decode("utf-8", "replace"))

    vm.namespace("ba.trace", {"trace": trace, "print": _print})


def _print(text: bytes) -> None:
    sys.stdout.write(text.decode("utf-8", "replace") + "\n")
    sys.stdout.flush()

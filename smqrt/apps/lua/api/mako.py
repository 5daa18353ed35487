"""The server process for Lua applications: `mako` and `require "loadconf"` (spec: bas-api §3, runtime §1.2)."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from gevent import get_hub

import smqrt
from smqrt.apps.lua.api.dirs import DirsBinding
from smqrt.apps.lua.api.system import BUILD_DATE
from smqrt.apps.lua.bridge import Function, LuaValues, fail, utf8
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm
from smqrt.workers.worker_identity import worker_place

log = logging.getLogger("smqrt.lua")

MAX_CONF_BYTES = 1 << 20


def install_loadconf(vm: Vm, services: Services) -> Callable[[], LuaValues]:
    """Give Lua `require "loadconf"`.

    Returns:
        What reads the file: gives its variables (see `table_codec`), or None and the message of the error. May block.
    """
    refs: list[int] = []

    def source() -> LuaValues:
        path = services.conf
        return (None,) if path is None else get_hub().threadpool.apply(_source, (path,))

    vm.namespace("ba.loadconf", {"attach": refs.append}, {"source": source})
    return lambda: vm.run(refs[0])


def _source(path: Path) -> LuaValues:
    """The text of the file and its chunk name; None when it is gone, with a sentence when it can't be read."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONF_BYTES + 1)
    except FileNotFoundError:
        return (None,)
    except OSError as error:
        return None, utf8(f"{path} can't be read: {error.strerror}")
    if len(text) > MAX_CONF_BYTES:
        return None, utf8(f"{path} has more than {MAX_CONF_BYTES} bytes")
    return text, utf8(f"@{path.name}")


def install(vm: Vm, services: Services, dirs: DirsBinding | None = None) -> Callable[[], None]:
    """Give Lua the `mako` table; return what runs the functions of `mako.onexit`, in the order of their registration.
    That may block; errors are logged."""
    refs: list[int] = []
    conf = services.conf
    functions: dict[str, Function] = {
        "argv": lambda: tuple(utf8(word) for word in services.argv),
        "environment": lambda: tuple(map(utf8, itertools.chain.from_iterable(os.environ.items()))),
        "cfgdir": lambda: utf8(f"{conf.parent}/".replace("//", "/")) if conf else _current_folder(),
        "cfgfname": lambda: utf8(str(conf)) if conf else None,
        "cwd": _current_folder,
        "date": lambda: BUILD_DATE,
        "execpath": lambda: utf8(os.path.dirname(os.path.realpath(sys.argv[0])) + "/"),
        "version": lambda: smqrt.__version__.encode(),
        "worker": lambda: (worker_place().number, worker_place().count),
        "port": lambda secure: (services.https_port if secure else services.http_port) or None,
        "rtl": lambda: dirs.register(services.rtl) if dirs and services.rtl else None,
        "load_certificates_here": lambda: _loaded(services, in_thread=False),
        "can_stop": lambda: services.stop is not None,
        "stop": lambda status: services.stop(status) if services.stop else None,
        "attach": refs.append,
        "report": lambda text: log.error("%s", text.decode("utf-8", "replace")),
    }
    vm.namespace("ba.mako", functions, {"load_certificates": lambda: _loaded(services, in_thread=True)})
    vm.namespace("ba.configured", {})

    def run() -> None:
        vm.run(refs[0])

    return run


def _loaded(services: Services, in_thread: bool) -> LuaValues:
    load = services.load_certificates
    fault = load(in_thread) if load else "there are no certificates to read again"
    return (True,) if fault is None else fail(fault)


def _current_folder() -> bytes:
    return utf8(os.getcwd() + "/")

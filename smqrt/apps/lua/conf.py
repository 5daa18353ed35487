"""Configuration files in Lua, such as mako.conf, whose globals are settings."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smqrt.apps.lua import api, bridge
from smqrt.apps.lua.api import files, mako
from smqrt.apps.lua.bridge import from_utf8
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm
from smqrt.errors import SmqrtError, StartError
from smqrt.http.disk import DiskIo
from smqrt.http.resources import server_io

Value = Any
_NO_LOG = logging.Logger("none", logging.CRITICAL)
_NO_LOG.addHandler(logging.NullHandler())


def variables(file: Path, words: Sequence[str]) -> dict[str, Value]:
    """Run a file in a separate Lua state; the server's own state is created after its ports are open.

    Args:
        file: the file.
        words: all words of the command line, for `mako.argv`.

    Returns:
        Its globals: str, bool, int, float, or a dict of these.

    Raises:
        StartError: the file can't be read, or its Lua code fails; the message has file and line.
    """
    vm = Vm()
    ios = {"disk": DiskIo("/"), "home": DiskIo("."), "vm": server_io()}
    # The server runs the file again, and shows its output then, when the format of the log is known.
    services = Services(ios=dict(ios), argv=list(words), conf=file, log=_NO_LOG, output=lambda line: None)
    try:
        api.install(vm, services)
        files.install(vm, services)
        mako.install_mako(vm, services)
        answer = mako.install_loadconf(vm, services)()
    except SmqrtError as error:
        raise StartError(f"{file}: {error}") from None
    finally:
        vm.stop()
    if not isinstance(answer[0], bytes):
        message = from_utf8(answer[1] if isinstance(answer[1], bytes) else b"it failed")
        raise StartError(f"{file.parent}/{message}" if message.startswith(file.name) else message)
    found: dict[str, Value] = _texts(bridge.load(answer[0]))
    return found


def _texts(value: Value) -> Value:
    if isinstance(value, bytes):
        return from_utf8(value)
    return {_texts(key): _texts(item) for key, item in value.items()} if isinstance(value, dict) else value

"""Python halves of the Lua API: one module per namespace, or several.

The Lua halves are in smqrt/apps/lua/lib.
"""

from __future__ import annotations

from smqrt.apps.lua.api import (
    codec,
    crypto,
    httpc,
    luasocket,
    luasql,
    mako,
    mqtt,
    mqttbroker,
    processes,
    sockets,
    sparkplug,
)
from smqrt.apps.lua.vm import Services, Vm

INSTALLERS = (
    mako.install_system,
    codec.install_codec,
    sockets.install,
    crypto.install_crypto,
    processes.install_processes,
    processes.install_plain,
    httpc.install,
    mqtt.install_mqtt,
    mqttbroker.install,
    luasql.install,
    luasocket.install,
    codec.install_xml,
    sparkplug.install_sparkplug,
    crypto.install_acme,
)
"""Parts of the API that work without a running server. A Lua half uses the parts that precede it."""


def install(vm: Vm, services: Services) -> None:
    """Install `trace`, `tracep`, `print`, the helpers of `ba` (spec: bas-api §7), sockets and clients."""
    for install_part in INSTALLERS:
        install_part(vm, services)

"""`ba.create.servcon`: more ports for the server, with and without TLS (spec: bas-api §10)."""

from __future__ import annotations

import itertools

from smqrt.errors import StartError
from smqrt.lua.bridge import LuaResult, fail
from smqrt.lua.services import Services
from smqrt.lua.vm import Vm
from smqrt.net.listener import Listener


class ListenerBinding:
    """The ports by the numbers by which Lua knows them."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._listeners: dict[int, Listener] = {}
        self._next = itertools.count(1).__next__

    def open(self, port: int, tls: int | None, intf: bytes | None, ipv6: bool) -> LuaResult:
        """Serve another port: its number, or nil and why not.

        Args:
            tls: number of a TLS server, None for plain HTTP.
            intf: address to listen on; all by default.
        """
        server = self._services.http_server
        if server is None:
            return fail("failed", "there is no HTTP server here")
        host = intf.decode("ascii", "replace") if intf else "::" if ipv6 else "0.0.0.0"
        try:
            if tls is None:
                listener = Listener(host, port, server.accepted)
            else:
                listener = Listener(host, port, server.accepted_secure, self._services.tls[tls].context())
        except StartError as error:
            return fail("bind", str(error))
        listener.start()
        number = self._next()
        self._listeners[number] = listener
        return number

    def port(self, number: int) -> int | None:
        """The port listened on, None when it is closed."""
        listener = self._listeners.get(number)
        return listener.address[1] if listener else None

    def close(self, number: int) -> bool:
        """Accept no more; open connections stay. False when it was closed before."""
        listener = self._listeners.pop(number, None)
        if listener is None:
            return False
        listener.close()
        return True


def install(vm: Vm, services: Services) -> None:
    """Give Lua `ba.create.servcon`."""
    binding = ListenerBinding(services)
    vm.namespace("ba.servcon", {"open": binding.open, "port": binding.port, "close": binding.close})

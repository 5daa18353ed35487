"""TLS objects for Lua: whom to trust, one's own certificates, clients and servers made of them (spec: bas-api §10).

`services.tls` holds clients and servers by the number by which Lua knows them; sockets, HTTP and MQTT look there.
"""

from __future__ import annotations

import itertools
import json

from smqrt.apps.lua.bridge import LuaResult, fail, methods
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm
from smqrt.errors import ArgumentError
from smqrt.transport import certificates
from smqrt.transport.tls_contexts import CertStore, ClientTls, Identity, ServerTls


def describe(data: bytes | None) -> bytes | None:
    """What `certificates.describe` says as JSON text, from which the Lua half makes a table."""
    fields = certificates.describe(data)
    return json.dumps(fields).encode() if fields else None


class TlsBinding:
    """Certificate stores, certificates, clients and servers by their numbers."""

    def __init__(self, services: Services) -> None:
        self._tls = services.tls
        self._stores: dict[int, CertStore] = {}
        self._identities: dict[int, Identity] = {}
        self._next = itertools.count(1).__next__

    def new_store(self) -> int:
        """Make an empty store."""
        number = self._next()
        self._stores[number] = CertStore()
        return number

    def add_to_store(self, number: int, data: bytes) -> LuaResult:
        """Trust the certificates in `data`: how many there are, or nil and the reason."""
        try:
            return self._stores[number].add(data)
        except ArgumentError as error:
            return fail("failed", str(error))

    def new_identity(self, certificate: bytes, key: bytes, password: bytes | None) -> LuaResult:
        """A certificate with its key, or nil and the reason."""
        try:
            identity = Identity(certificate, key, password)
        except ArgumentError as error:
            return fail("failed", str(error))
        number = self._next()
        self._identities[number] = identity
        return number

    def default_client(self) -> int:
        """A client that trusts whom this machine trusts."""
        return self._keep(ClientTls())

    def new_client(self, store: int | None) -> int:
        """A client that trusts a store; without one, nobody."""
        return self._keep(ClientTls(CertStore() if store is None else self._stores[store]))

    def new_server(self, store: int | None) -> int:
        """A server; with a store, it asks clients for a certificate."""
        return self._keep(ServerTls(None if store is None else self._stores[store]))

    def add_identity(self, tls: int, identity: int) -> bool:
        """Present a certificate from now on."""
        self._tls[tls].add_identity(self._identities[identity])
        return True

    def drop(self, number: int) -> None:
        """Lua's object is gone; who uses the thing keeps it."""
        for kind in (self._stores, self._identities, self._tls):
            kind.pop(number, None)

    def _keep(self, tls: ClientTls | ServerTls) -> int:
        number = self._next()
        self._tls[number] = tls
        return number


_FUNCTIONS = "new_store add_to_store new_identity default_client new_client new_server add_identity drop"


def install(vm: Vm, services: Services) -> None:
    """Give Lua `ba.sharkclient`, `ba.create.certstore`, `sharkcert`, `sharkssl`, and `ba.parsecert`."""
    binding = TlsBinding(services)
    vm.namespace("ba.tls", methods(binding, _FUNCTIONS) | {"describe": describe})

"""`ba.tpm` on the key file: the Python half (spec: bas-api §5, §7, §17). The other half is lib/ba/tpm.lua."""

from __future__ import annotations

from smqrt.apps.lua.api.crypto import computed, with_crypto_words
from smqrt.apps.lua.bridge import from_utf8, methods
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm
from smqrt.crypto.keyfile import KeyFile


class TpmBinding:
    """The functions of Lua on one key file, which is read at the first call.

    Args:
        services: `key_file` says where it is.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._file: KeyFile | None = None

    def load(self) -> bool:
        """Read or make the file; touches the disk."""
        if self._file is None:
            self._file = KeyFile(self._services.key_file)
        self._file.load()
        return True

    @property
    def _keys(self) -> KeyFile:
        assert self._file is not None  # the Lua half calls `load` first
        return self._file

    def derive(self, name: bytes, size_bytes: int, unique: bool) -> bytes:
        return self._keys.derive(name, size_bytes, unique)

    def has(self, name: bytes) -> bool:
        return self._keys.has(from_utf8(name))

    def pem(self, name: bytes) -> bytes:
        return self._keys.pem(from_utf8(name))

    def add(self, name: bytes, pem: bytes) -> bool:
        """Keep a new key; touches the disk."""
        self._keys.add(from_utf8(name), pem)
        return True


def install(vm: Vm, services: Services) -> None:
    """Give Lua `ba.tpm`."""
    binding = TpmBinding(services)
    functions = methods(binding, "load derive has pem add", with_crypto_words)
    threaded = {f"{name}_in_thread": computed(functions[name]) for name in ("load", "add")}
    vm.namespace("ba.tpm", functions, threaded)

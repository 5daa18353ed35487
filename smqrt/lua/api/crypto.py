"""Digests and random numbers (spec: bas-api §7)."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from base64 import b64encode
from collections.abc import Callable
from itertools import count
from typing import Any

from smqrt.lua.bridge import ArgumentError
from smqrt.lua.services import Services
from smqrt.lua.vm import Vm

ALGORITHMS = ("md5", "sha1", "sha256", "sha384", "sha512")
_FORMATS: dict[bytes, Callable[[bytes], bytes]] = {
    b"binary": bytes,
    b"hex": lambda digest: digest.hex().encode(),
    b"b64": b64encode,
}


class Digests:
    """The digests under way, by handle."""

    def __init__(self) -> None:
        self._open: dict[int, Any] = {}
        self._handles = count(1)

    def open(self, algorithm: bytes, key: bytes | None) -> int:
        """Begin a digest, or an HMAC when there is a key."""
        name = _algorithm(algorithm)
        handle = next(self._handles)
        self._open[handle] = hashlib.new(name) if key is None else hmac.new(key, digestmod=name)
        return handle

    def update(self, handle: int, data: bytes) -> None:
        """Add `data`."""
        self._open[handle].update(data)

    def finish(self, handle: int, form: bytes) -> bytes:
        """End a digest and return it as `binary`, `hex` or `b64`."""
        if form not in _FORMATS:
            raise ArgumentError("bad argument #2 to 'hash' (binary, hex or b64 expected)")
        encode = _FORMATS[form]
        return encode(self._open.pop(handle).digest())

    def drop(self, handle: int) -> None:
        """Forget a digest that nobody finished."""
        self._open.pop(handle, None)


def _algorithm(name: bytes) -> str:
    text = name.decode("latin-1")
    if text not in ALGORITHMS:
        raise ArgumentError(f"unknown hash algorithm '{text}': use one of {', '.join(ALGORITHMS)}")
    return text


def random_below(limit: int) -> int:
    """A random integer from 0 to `limit` - 1."""
    return secrets.randbelow(limit)


def random_unsigned(size_bytes: int) -> int:
    """A random integer of `size_bytes` bytes; eight of them give the bits of a Lua integer."""
    return int.from_bytes(secrets.token_bytes(size_bytes), "big", signed=size_bytes == 8)


def install(vm: Vm, services: Services) -> None:
    """Give Lua `ba.crypto.hash` and the random numbers of `ba`."""
    digests = Digests()
    vm.namespace(
        "ba.crypto",
        {
            "open": digests.open,
            "update": digests.update,
            "finish": digests.finish,
            "drop": digests.drop,
            "random_below": random_below,
            "random_unsigned": random_unsigned,
            "random_bytes": secrets.token_bytes,
        },
    )

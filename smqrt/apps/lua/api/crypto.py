"""Ciphers, keys, tokens and certificates for Lua: the Python half (spec: bas-api §7, §10, §12)."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from itertools import count

from gevent.lock import BoundedSemaphore

from smqrt.apps.lua.bridge import Function, LuaResult, LuaValue, Table, fail, from_latin1, load, methods, utf8
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm
from smqrt.crypto import ciphers, keys, requests, tokens
from smqrt.errors import CryptoError
from smqrt.loop.greenlet_pool import in_thread
from smqrt.loop.scheduling import Turn

COMPUTING_AT_ONCE = 2
"""So many threads compute keys; the hub has ten, and names are looked up and files read in them too."""
_computing = BoundedSemaphore(COMPUTING_AT_ONCE)


def with_crypto_words(function: Function) -> Function:
    """`function` with failures as Lua expects them: nil, an error word and what exactly."""

    @wraps(function)
    def call(*args: LuaValue) -> LuaResult:
        try:
            return function(*args)
        except CryptoError as error:
            return fail(error.word, str(error)) if str(error) != error.word else fail(error.word)

    return call


def computed(function: Function) -> Function:
    """`function` in a thread, as one of few."""

    @wraps(function)
    def call(*args: LuaValue) -> LuaResult:
        with _computing:
            return in_thread(function, *args)

    return call


class SymmetricBinding:
    """The ciphers of Lua by their handles."""

    def __init__(self) -> None:
        self._ciphers: dict[int, ciphers.Symmetric] = {}
        self._next = count(1).__next__

    def open(self, mode: bytes, key: bytes, iv: bytes, direction: bytes | None) -> int:
        cipher = ciphers.Symmetric(from_latin1(mode), key, iv, _text(direction))
        handle = self._next()
        self._ciphers[handle] = cipher
        return handle

    def drop(self, handle: int) -> None:
        """Lua's object is gone."""
        self._ciphers.pop(handle, None)

    def set_auth(self, handle: int, data: bytes) -> bool:
        self._ciphers[handle].set_auth(data)
        return True

    def encrypt(self, handle: int, data: bytes, padded: bool) -> LuaResult:
        return self._encrypted(handle, data, padded, _go_on)

    def encrypt_large(self, handle: int, data: bytes, padded: bool) -> LuaResult:
        """The same with turns for the others; blocks."""
        return self._encrypted(handle, data, padded, Turn().yield_if_due)

    def _encrypted(self, handle: int, data: bytes, padded: bool, breathe: ciphers.Breathe) -> LuaResult:
        sealed, tag = self._ciphers[handle].encrypt(data, padded, breathe)
        return sealed if tag is None else (sealed, tag)

    def decrypt(self, handle: int, data: bytes, tag: bytes | None, padded: bool) -> LuaResult:
        return self._ciphers[handle].decrypt(data, tag, padded)

    def decrypt_large(self, handle: int, data: bytes, tag: bytes | None, padded: bool) -> LuaResult:
        """The same with turns for the others; blocks."""
        return self._ciphers[handle].decrypt(data, tag, padded, Turn().yield_if_due)


def _go_on() -> None: ...


# ---- keys. Lua gives a key as a kind and one or two texts.


def _key(kind: bytes, first: bytes, second: bytes | None) -> keys.Key:
    if kind == b"pem":
        return keys.load(first)
    assert second is not None  # the Lua half has asked
    return keys.curve_key(first, second) if kind == b"curve" else keys.rsa_key(first, second)


def _text(value: bytes | None) -> str | None:
    return None if value is None else from_latin1(value)


def sign(pem: bytes, data: bytes, digest: bytes | None, padded: bytes) -> bytes:
    """See `keys.sign`."""
    return keys.sign(data, keys.private(pem), _text(digest), from_latin1(padded))


def verify(
    kind: bytes, first: bytes, second: bytes | None, one: bytes, other: bytes, digest: bytes | None, padded: bytes
) -> bool:
    """See `keys.verify`. Of the two texts, the one that has the form of a signature is it, the second in doubt."""
    key = keys.public(_key(kind, first, second))
    data, signature = (one, other) if keys.is_signature(other, key) else (other, one)
    return keys.verify(data, signature, key, _text(digest), from_latin1(padded))


def key_params(kind: bytes, first: bytes, second: bytes | None) -> tuple[bytes, bytes]:
    """See `keys.parameters`."""
    return keys.parameters(_key(kind, first, second))


def key_size(kind: bytes, first: bytes, second: bytes | None) -> int:
    """See `keys.key_size_bytes`."""
    return keys.key_size_bytes(_key(kind, first, second))


def encrypt(kind: bytes, first: bytes, second: bytes | None, data: bytes, padded: bytes, digest: bytes | None) -> bytes:
    """See `keys.encrypt`."""
    return keys.encrypt(data, keys.public(_key(kind, first, second)), from_latin1(padded), _text(digest))


def decrypt(pem: bytes, data: bytes, padded: bytes, digest: bytes | None) -> bytes:
    """See `keys.decrypt`."""
    return keys.decrypt(data, keys.private(pem), from_latin1(padded), _text(digest))


def generate(kind: bytes, bits: int, curve: bytes) -> bytes:
    """See `keys.generate`."""
    return keys.generate(from_latin1(kind), bits, from_latin1(curve))


def request(pem: bytes, name: bytes, words: bytes) -> bytes:
    """See `requests.request`. name, words: tables as bytes."""
    wishes = requests.wishes_of(list(texts_of(load(words)).values()))
    return requests.request(keys.private(pem), texts_of(load(name)), wishes)


def certificate(
    asked: bytes, pem: bytes, issuer: bytes | None, start_s: float | None, end_s: float | None, serial: int | None
) -> bytes:
    """See `requests.certificate`."""
    return requests.certificate(asked, keys.private(pem), issuer, start_s, end_s, serial)


def texts_of(table: Table) -> dict[str, str]:
    """A table of texts by their names; numbers as text."""
    return {_as_text(name): _as_text(value) for name, value in table.items()}


def _as_text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


# ---- tokens


def secret_of(kind: bytes, first: bytes, second: bytes | None) -> tokens.Secret:
    """A shared secret, or a key."""
    return first if kind == b"secret" else _key(kind, first, second)


def token_sign(
    kind: bytes, first: bytes, second: bytes | None, payload: bytes, algorithm: bytes | None, header: bytes
) -> bytes:
    """See `tokens.sign`. header: JSON text."""
    return tokens.sign(payload, secret_of(kind, first, second), _text(algorithm), json.loads(header))


def token_key(token: bytes) -> bytes | None:
    """The "kid" of a token, None when it has none."""
    kid = tokens.header_of(token).get("kid")
    return utf8(kid) if isinstance(kid, str) else None


def token_verify(kind: bytes, first: bytes, second: bytes | None, token: bytes) -> LuaResult:
    """See `tokens.verify`: header and payload as JSON text."""
    header, payload = tokens.verify(token, secret_of(kind, first, second))
    return json.dumps(header).encode(), payload


_KEYS: dict[str, Callable[..., LuaResult]] = {
    "sign": sign,
    "verify": verify,
    "keyparams": key_params,
    "keysize": key_size,
    "sigparams": keys.signature_parameters,
    "encrypt": encrypt,
    "decrypt": decrypt,
    "generate": generate,
    "request": request,
    "certificate": certificate,
    "token_sign": token_sign,
    "token_verify": token_verify,
}


def install(vm: Vm, services: Services) -> None:
    """Give Lua `ba.crypto` but for digests, `ba.create.key`, `csr` and `certificate`, and the module `jwt`."""
    binding = SymmetricBinding()
    direct = methods(binding, "open drop set_auth encrypt decrypt", with_crypto_words)
    large = methods(binding, "encrypt_large decrypt_large", with_crypto_words)
    vm.namespace("ba.ciphers", direct, large | {"pbkdf2": computed(_pbkdf2)})
    functions = {name: with_crypto_words(function) for name, function in _KEYS.items()}
    threaded = {f"{name}_in_thread": computed(function) for name, function in functions.items()}
    vm.namespace("ba.keys", functions | {"token_key": with_crypto_words(token_key)}, threaded)


def _pbkdf2(algorithm: bytes, password: bytes, salt: bytes, iterations: int, size_bytes: int) -> bytes:
    return ciphers.pbkdf2(from_latin1(algorithm), password, salt, iterations, size_bytes)

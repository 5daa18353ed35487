"""Python half of ciphers, keys, tokens, certificates, `ba.tpm` and ACME (spec: bas-api §5, §7, §10, §12, §17)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import gevent
from gevent.lock import BoundedSemaphore

from smqrt.acme import orders
from smqrt.acme.files import HTTP_01, PREFIX, Answer, new_key, write_private
from smqrt.apps.lua.bridge import (
    Function,
    LuaResult,
    LuaValue,
    LuaValues,
    Table,
    fail,
    from_latin1,
    from_utf8,
    load,
    methods,
    utf8,
)
from smqrt.apps.lua.vm import Services, Vm
from smqrt.crypto import ciphers, keys, tokens
from smqrt.crypto.keyfile import KeyFile
from smqrt.errors import AcmeError, CryptoError
from smqrt.loop.scheduling import Turn
from smqrt.loop.threads import DedicatedThreads, in_thread
from smqrt.workers.worker_rpc import worker_place

MAX_COMPUTATIONS = 2
"""Threads that compute keys at the same time. gevent's pool has ten; name lookups and file reads need them too."""
_computations = BoundedSemaphore(MAX_COMPUTATIONS)


def with_crypto_words(function: Function) -> Function:
    """Wrap a function so that a CryptoError becomes nil, an error word and the details."""

    @wraps(function)
    def call(*args: LuaValue) -> LuaResult:
        try:
            return function(*args)
        except CryptoError as error:
            return fail(error.word, str(error)) if str(error) != error.word else fail(error.word)

    return call


def computed(function: Function) -> Function:
    """Wrap a function so that it runs in a thread, at most `MAX_COMPUTATIONS` at the same time."""

    @wraps(function)
    def call(*args: LuaValue) -> LuaResult:
        with _computations:
            return in_thread(function, *args)

    return call


class SymmetricBinding:
    """Symmetric ciphers by handle."""

    def __init__(self) -> None:
        self._ciphers: dict[int, ciphers.Symmetric] = {}
        self._next = count(1).__next__

    def open(self, mode: bytes, key: bytes, iv: bytes, direction: bytes | None) -> int:
        cipher = ciphers.Symmetric(from_latin1(mode), key, iv, _text(direction))
        handle = self._next()
        self._ciphers[handle] = cipher
        return handle

    def drop(self, handle: int) -> None:
        """Forget a cipher whose Lua object was collected."""
        self._ciphers.pop(handle, None)

    def set_auth(self, handle: int, data: bytes) -> bool:
        self._ciphers[handle].set_auth(data)
        return True

    def encrypt(self, handle: int, data: bytes, padded: bool) -> LuaResult:
        return self._encrypt(handle, data, padded, lambda: None)

    def encrypt_large(self, handle: int, data: bytes, padded: bool) -> LuaResult:
        """As `encrypt`, yielding to other greenlets in between; blocks."""
        return self._encrypt(handle, data, padded, Turn().yield_if_due)

    def _encrypt(self, handle: int, data: bytes, padded: bool, yield_if_due: ciphers.YieldIfDue) -> LuaResult:
        sealed, tag = self._ciphers[handle].encrypt(data, padded, yield_if_due)
        return sealed if tag is None else (sealed, tag)

    def decrypt(self, handle: int, data: bytes, tag: bytes | None, padded: bool) -> LuaResult:
        return self._ciphers[handle].decrypt(data, tag, padded)

    def decrypt_large(self, handle: int, data: bytes, tag: bytes | None, padded: bool) -> LuaResult:
        """As `decrypt`, yielding to other greenlets in between; blocks."""
        return self._ciphers[handle].decrypt(data, tag, padded, Turn().yield_if_due)


# ---- Keys. Lua passes a key as its kind and one or two texts: "pem" with PEM text, "curve" or "rsa" with two numbers.


def _key(kind: bytes, first: bytes, second: bytes | None) -> keys.Key:
    if kind == b"pem":
        return keys.load(first)
    assert second is not None  # the Lua half has checked it
    return keys.curve_key(first, second) if kind == b"curve" else keys.rsa_key(first, second)


def _text(value: bytes | None) -> str | None:
    return None if value is None else from_latin1(value)


def sign(pem: bytes, data: bytes, digest: bytes | None, padded: bytes) -> bytes:
    """See `keys.sign`."""
    return keys.sign(data, keys.private(pem), _text(digest), from_latin1(padded))


def verify(
    kind: bytes, first: bytes, second: bytes | None, one: bytes, other: bytes, digest: bytes | None, padded: bytes
) -> bool:
    """See `keys.verify`. Data and signature may be passed in either order.

    The text with the form of a signature is the signature; if both have it, the second one.
    """
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
    """See `keys.request`; `name` and `words` are packed tables."""
    uses = keys.requested_uses(list(text_table(load(words)).values()))
    return keys.request(keys.private(pem), text_table(load(name)), uses)


def certificate(
    csr: bytes, pem: bytes, issuer: bytes | None, start_s: float | None, end_s: float | None, serial: int | None
) -> bytes:
    """See `keys.certificate`."""
    return keys.certificate(csr, keys.private(pem), issuer, start_s, end_s, serial)


def text_table(table: Table) -> dict[str, str]:
    """Return the names and values of a table as text."""

    def text(value: object) -> str:
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)

    return {text(name): text(value) for name, value in table.items()}


# ---- Tokens


def secret_of(kind: bytes, first: bytes, second: bytes | None) -> tokens.Secret:
    """Return a shared secret or a key."""
    return first if kind == b"secret" else _key(kind, first, second)


def token_sign(
    kind: bytes, first: bytes, second: bytes | None, payload: bytes, algorithm: bytes | None, header: bytes
) -> bytes:
    """See `tokens.sign`; `header` is JSON text."""
    return tokens.sign(payload, secret_of(kind, first, second), _text(algorithm), json.loads(header))


def token_key(token: bytes) -> bytes | None:
    """Return the key ID ("kid") of a token; None if it has none."""
    kid = tokens.header_of(token).get("kid")
    return utf8(kid) if isinstance(kid, str) else None


def token_verify(kind: bytes, first: bytes, second: bytes | None, token: bytes) -> LuaResult:
    """See `tokens.verify`; return header and payload as JSON text."""
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


# ---- ba.tpm


class TpmBinding:
    """The functions of `ba.tpm`. They use one key file, which is read at the first call.

    Args:
        services: `key_file` is the path of the file.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._file: KeyFile | None = None

    def load(self) -> bool:
        """Read or create the key file; blocks on the disk."""
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
        """Store a new key; blocks on the disk."""
        self._keys.add(from_utf8(name), pem)
        return True


def install_crypto(vm: Vm, services: Services) -> None:
    """Install `ba.crypto` except digests, `ba.create.key`, `csr`, `certificate`, the module `jwt` and `ba.tpm`."""

    def pbkdf2(algorithm: bytes, password: bytes, salt: bytes, iterations: int, size_bytes: int) -> bytes:
        return ciphers.pbkdf2(from_latin1(algorithm), password, salt, iterations, size_bytes)

    symmetric = SymmetricBinding()
    direct = methods(symmetric, "open drop set_auth encrypt decrypt", with_crypto_words)
    large = methods(symmetric, "encrypt_large decrypt_large", with_crypto_words)
    vm.namespace("ba.ciphers", direct, large | {"pbkdf2": computed(pbkdf2)})
    functions = {name: with_crypto_words(function) for name, function in _KEYS.items()}
    threaded = {f"{name}_in_thread": computed(function) for name, function in functions.items()}
    vm.namespace("ba.keys", functions | {"token_key": with_crypto_words(token_key)}, threaded)
    tpm = methods(TpmBinding(services), "load derive has pem add", with_crypto_words)
    vm.namespace("ba.tpm", tpm, {f"{name}_in_thread": computed(tpm[name]) for name in ("load", "add")})


# ---- Certificates by ACME: `acme/engine` (spec: bas-api §17.1)

GIVE_UP_S = orders.ORDER_S + 60.0
"""Timeout of an order. It is longer than that of `orders`, whose error message is more exact."""


class AcmeBinding:
    """Certificate orders of applications, one at a time.

    Args:
        services: `http_server` answers the challenges.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._key_authorizations: dict[str, bytes] = {}  # by the token of the challenge
        self._pool: DedicatedThreads | None = None
        self._answers_challenges = False

    def order(
        self,
        name: bytes,
        directory: bytes,
        contact: bytes,
        ca: bytes,
        account_key: bytes | None,
        account_id: bytes | None,
        key: bytes | None,
    ) -> LuaResult:
        """Order a certificate for a host name; blocks.

        Args:
            name: the host name.
            directory: URL of the authority's directory.
            contact: mail address of the account.
            ca: file with the root certificate of the authority; empty for the system's.
            account_key: PEM text; None for a new account.
            account_id: URL of the account; None if unknown.
            key: PEM text of the certificate's key; None for a new key.

        Returns:
            The key, the certificate with its chain, the key and the URL of the account; nil and a message after a
            failure.
        """
        if fault := self._answer_challenges():
            return fail(fault)
        account = from_utf8(directory), from_utf8(contact), from_utf8(ca), account_key, account_id
        pool = self._pool = self._pool or DedicatedThreads()  # not gevent's own: an order may take minutes
        try:
            result = pool.submit(_order, from_utf8(name), account, key or new_key(), self._publish)
            return result.get(timeout=GIVE_UP_S)
        except gevent.Timeout:
            self._pool = None  # the thread can't be stopped, so the next order needs another one
            return fail(f"the order did not finish within {GIVE_UP_S:g} s")

    def _answer_challenges(self) -> str | None:
        """Make the HTTP server answer challenges; return an error message, None for success."""
        server = self._services.http_server
        if server is None:
            return "no HTTP server is running, so the authority can't check the host name"
        if worker_place().count > 1:
            return "a server with workers orders its certificate by the setting tls.acme, not by acme/engine"
        if not self._answers_challenges:
            self._answers_challenges = True
            before = server.challenge_answer

            def answer(path: str) -> bytes | None:
                token = path.removeprefix(PREFIX) if path.startswith(PREFIX) else ""
                return self._key_authorizations.get(token) or (before(path) if before else None)

            server.challenge_answer = answer
        return None

    def _publish(self, answers: Sequence[Answer]) -> None:
        self._key_authorizations = {one.token: one.key_authorization.encode() for one in answers}


_Account = tuple[str, str, str, bytes | None, bytes | None]


def _order(name: str, account: _Account, key: bytes, publish: Callable[[Sequence[Answer]], object]) -> LuaValues:
    """Order in this thread. Failures are return values: gevent prints exceptions of its threads to stderr."""
    directory, contact, ca, account_key, account_id = account
    try:
        with TemporaryDirectory(prefix="smqrt-acme") as name_of_folder:
            folder = Path(name_of_folder)
            if account_key is not None:
                write_private(folder / "account.key", account_key)
                if account_id is not None:
                    known = {"uri": from_utf8(account_id), "contact": contact}
                    write_private(folder / "account.json", json.dumps(known).encode())
            chain = orders.order(orders.Account(directory, folder, contact, ca), [name], HTTP_01, key, publish)
            uri = json.loads((folder / "account.json").read_bytes())["uri"]
            return key, chain, (folder / "account.key").read_bytes(), utf8(uri)
    except AcmeError as error:
        return fail(str(error))
    except (OSError, ValueError) as error:
        return fail(f"the order of {name} failed: {error}")


def install_acme(vm: Vm, services: Services) -> None:
    """Install `acme/engine`."""
    vm.namespace("ba.acme", {}, methods(AcmeBinding(services), "order"))

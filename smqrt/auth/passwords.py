"""Password checks with argon2id, in a few threads beside the event loop."""

from __future__ import annotations

import hmac
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import argon2
from argon2.exceptions import VerificationError, VerifyMismatchError
from gevent.event import AsyncResult
from gevent.lock import BoundedSemaphore
from gevent.threadpool import ThreadPool

from smqrt.errors import SmqrtError

MAX_PARALLEL = 2
"""A hash takes 64 MiB and, with four lanes, up to four cores for about 50 ms."""
MAX_WAITING = 64
"""Of all clients. On one core the last one waits about as long as the time limit of Connect (4 s)."""
MAX_WAITING_OF_ADDRESS = 32
MAX_REMEMBERED = 20_000
MEMORY_KIB, ROUNDS, LANES = 65536, 3, 4  # RFC 9106 §4, the second recommended option
MAX_PASSWORD_BYTES = 4096


class BusyError(SmqrtError):
    """The queue of password checks is full."""


class _PendingCheck:
    """A password check, shared by all clients with the same user and password."""

    def __init__(self) -> None:
        self.result: AsyncResult[bool] = AsyncResult()
        self.clients: list[Callable[[], bool]] = []


class Passwords:
    """Checks passwords.

    A right password is cached as a keyed hash, whose key ends with the process: clients that connect again need no
    argon2 hash, and a thousand clients of one user need one. A wrong password is never cached, so that every guess
    takes the same time.

    Args:
        max_parallel: hashes that are computed at a time.
        max_waiting: checks that may wait, of all clients.
    """

    def __init__(self, max_parallel: int = MAX_PARALLEL, max_waiting: int = MAX_WAITING) -> None:
        self._max_parallel, self._max_waiting = max_parallel, max_waiting
        self._pool: ThreadPool | None = None
        self._slots = BoundedSemaphore(max_parallel)
        self._waiting_of: Counter[str] = Counter()
        self._pending: dict[bytes, _PendingCheck] = {}
        self._key = secrets.token_bytes(32)
        self._right: OrderedDict[bytes, None] = OrderedDict()
        self._decoy_hash = ""  # of a random password, for unknown users

    @property
    def waiting(self) -> int:
        """The number of checks that run or wait."""
        return len(self._pending)

    def knows(self, name: str, password_hash: str, password: bytes) -> bool:
        """Return whether the password was right before, without computing a hash."""
        return self._mark(name, password_hash, password) in self._right

    def verify(
        self,
        name: str,
        password_hash: str | None,
        password: bytes,
        address: str = "",
        is_connected: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Return whether a password has the hash; blocks this greenlet.

        Args:
            name: of the user.
            password_hash: None for an unknown user; the check takes the same time.
            password: from the client.
            address: of the client, for the limit of one address.
            is_connected: returns whether the client is still connected.

        Raises:
            BusyError: too many checks wait.
        """
        if len(password) > MAX_PASSWORD_BYTES:
            return False
        mark = self._mark(name, password_hash or "", password)
        if mark in self._right:
            self._right.move_to_end(mark)
            return True
        pending = self._pending.get(mark)
        if pending is not None:
            pending.clients.append(is_connected)
            return bool(pending.result.get())
        if len(self._pending) >= self._max_waiting or self._waiting_of[address] >= MAX_WAITING_OF_ADDRESS:
            raise BusyError("the queue of password checks is full")
        pending = self._pending[mark] = _PendingCheck()
        pending.clients.append(is_connected)
        self._waiting_of[address] += 1
        is_right = False
        try:
            with self._slots:  # not the queue of the pool: nothing is computed for clients that have disconnected
                if any(is_client_connected() for is_client_connected in pending.clients):
                    is_right = self._compute(password_hash, password)
        finally:
            del self._pending[mark]
            self._waiting_of[address] -= 1
            if not self._waiting_of[address]:
                del self._waiting_of[address]
            if is_right:
                self._right[mark] = None
                if len(self._right) > MAX_REMEMBERED:
                    self._right.popitem(last=False)
            pending.result.set(is_right)
        return is_right

    def is_pending(self, name: str, password_hash: str | None, password: bytes) -> bool:
        """Return whether the same password of the same user is being checked, so that it is not another guess."""
        return self._mark(name, password_hash or "", password) in self._pending

    def _compute(self, password_hash: str | None, password: bytes) -> bool:
        if not password_hash and not self._decoy_hash:
            self._decoy_hash = str(self._threads().apply(new_hash, (secrets.token_bytes(32),)))
        is_match = bool(self._threads().apply(verify_now, (password_hash or self._decoy_hash, password)))
        return is_match and password_hash is not None

    def set_typical(self, password_hash: str) -> None:
        """Use the parameters of this hash for unknown users, so that their checks take the same time."""
        found = argon2.extract_parameters(password_hash)
        hasher = argon2.PasswordHasher(found.time_cost, found.memory_cost, found.parallelism, found.hash_len)
        salt = secrets.token_bytes(found.salt_len)
        self._decoy_hash = str(self._threads().apply(hasher.hash, (secrets.token_bytes(32),), {"salt": salt}))

    def close(self) -> None:
        """Stop the threads."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.kill()

    def _threads(self) -> ThreadPool:
        if self._pool is None:
            self._pool = ThreadPool(self._max_parallel)
        return self._pool

    def _mark(self, name: str, password_hash: str, password: bytes) -> bytes:
        user = sha256(f"{name}:{password_hash}".encode("utf-8", "surrogateescape")).digest()
        return hmac.digest(self._key, user + password, "sha256")


def new_hash(password: bytes, memory_kib: int = MEMORY_KIB) -> str:
    """Return the hash of a password with a new salt. Takes about 50 ms."""
    return argon2.PasswordHasher(ROUNDS, memory_kib, LANES).hash(password)


def verify_now(password_hash: str, password: bytes) -> bool:
    """Return whether a password has the hash. Takes about 50 ms in the calling thread."""
    try:
        return bool(_HASHER.verify(password_hash, password))
    except VerifyMismatchError:
        return False
    except VerificationError:  # such as too little memory
        return False


_HASHER: Any = argon2.PasswordHasher()

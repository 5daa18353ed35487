"""Passwords against their hashes: argon2id in threads of its own, a few at a time, away from the loop."""

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

AT_ONCE = 2
"""A hash takes 64 MiB and, on four lanes, up to four cores for some 50 ms."""
MAX_WAITING = 64
"""Of all clients; with a core to itself, those at the end wait about as long as the time for Connect (4 s) allows."""
MAX_WAITING_OF_ADDRESS = 32
MAX_REMEMBERED = 20_000
MEMORY_KIB, ROUNDS, LANES = 65536, 3, 4  # RFC 9106 §4, the second recommended option
MAX_PASSWORD_BYTES = 4096


class BusyError(SmqrtError):
    """So many passwords wait to be looked at that this one was not."""


class _Pending:
    """A password that is being looked at, for all who gave the same one for the same user."""

    def __init__(self) -> None:
        self.result: AsyncResult[bool] = AsyncResult()
        self.askers: list[Callable[[], bool]] = []

    def is_wanted(self) -> bool:
        return any(is_there() for is_there in self.askers)


class Passwords:
    """Looks at passwords.

    A password that was right is remembered, by a keyed hash of it that ends with the process: clients that come back
    after a lost connection cost nothing, and a thousand that log in as the same user cost one hash. A wrong one is
    never remembered, so guesses cost the same every time.

    Args:
        at_once: hashes that are computed at a time.
        max_waiting: passwords that may wait, of all clients.
    """

    def __init__(self, at_once: int = AT_ONCE, max_waiting: int = MAX_WAITING) -> None:
        self._at_once, self._max_waiting = at_once, max_waiting
        self._pool: ThreadPool | None = None
        self._places = BoundedSemaphore(at_once)
        self._waiting_of: Counter[str] = Counter()
        self._pending: dict[bytes, _Pending] = {}
        self._key = secrets.token_bytes(32)
        self._right: OrderedDict[bytes, None] = OrderedDict()
        self._nobody = ""

    @property
    def waiting(self) -> int:
        """How many are being looked at or wait for it."""
        return len(self._pending)

    def knows(self, name: str, password_hash: str, password: bytes) -> bool:
        """Whether it was right before, which costs nothing to tell."""
        return self._mark(name, password_hash, password) in self._right

    def verify(
        self,
        name: str,
        password_hash: str | None,
        password: bytes,
        address: str = "",
        is_there: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Whether `password` is the one of `password_hash`; blocks this greenlet.

        Args:
            name: of the user.
            password_hash: None for a user that does not exist, which takes as long.
            password: as the client gave it.
            address: whose it is, for its share of the places.
            is_there: whether somebody still waits for the answer.

        Raises:
            BusyError: too many wait already.
        """
        if len(password) > MAX_PASSWORD_BYTES:
            return False
        mark = self._mark(name, password_hash or "", password)
        if mark in self._right:
            self._right.move_to_end(mark)
            return True
        pending = self._pending.get(mark)
        if pending is not None:
            pending.askers.append(is_there)
            return bool(pending.result.get())
        if len(self._pending) >= self._max_waiting or self._waiting_of[address] >= MAX_WAITING_OF_ADDRESS:
            raise BusyError("too many passwords wait to be looked at")
        return self._first(mark, password_hash, password, address, is_there)

    def is_pending(self, name: str, password_hash: str | None, password: bytes) -> bool:
        """Whether the same password of the same user is being looked at: it is no other guess."""
        return self._mark(name, password_hash or "", password) in self._pending

    def _first(
        self, mark: bytes, password_hash: str | None, password: bytes, address: str, is_there: Callable[[], bool]
    ) -> bool:
        pending = self._pending[mark] = _Pending()
        pending.askers.append(is_there)
        self._waiting_of[address] += 1
        is_right = False
        try:
            with self._places:  # not the pool's own queue: for who went away meanwhile, nothing is computed
                if pending.is_wanted():
                    is_right = self._compute(password_hash, password)
        finally:
            del self._pending[mark]
            self._waiting_of[address] -= 1
            if not self._waiting_of[address]:
                del self._waiting_of[address]
            if is_right:
                self._remember(mark)
            pending.result.set(is_right)
        return is_right

    def _compute(self, password_hash: str | None, password: bytes) -> bool:
        found = bool(self._threads().apply(verify_now, (password_hash or self._nobodys(), password)))
        return found and password_hash is not None

    def set_typical(self, password_hash: str) -> None:
        """Let unknown users cost what this hash does."""
        found = argon2.extract_parameters(password_hash)
        hasher = argon2.PasswordHasher(found.time_cost, found.memory_cost, found.parallelism, found.hash_len)
        salt = secrets.token_bytes(found.salt_len)
        self._nobody = str(self._threads().apply(hasher.hash, (secrets.token_bytes(32),), {"salt": salt}))

    def close(self) -> None:
        """End the threads."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.kill()

    def _threads(self) -> ThreadPool:
        if self._pool is None:
            self._pool = ThreadPool(self._at_once)
        return self._pool

    def _nobodys(self) -> str:
        if not self._nobody:
            self._nobody = str(self._threads().apply(new_hash, (secrets.token_bytes(32),)))
        return self._nobody

    def _mark(self, name: str, password_hash: str, password: bytes) -> bytes:
        whose = sha256(f"{name}:{password_hash}".encode("utf-8", "surrogateescape")).digest()
        return hmac.digest(self._key, whose + password, "sha256")

    def _remember(self, mark: bytes) -> None:
        self._right[mark] = None
        if len(self._right) > MAX_REMEMBERED:
            self._right.popitem(last=False)


def new_hash(password: bytes, memory_kib: int = MEMORY_KIB) -> str:
    """The hash of a password, with a salt of its own. Takes a while."""
    return argon2.PasswordHasher(ROUNDS, memory_kib, LANES).hash(password)


def verify_now(password_hash: str, password: bytes) -> bool:
    """Whether the password is the one of a hash. Takes a while, in the thread that asks."""
    try:
        return bool(_HASHER.verify(password_hash, password))
    except VerifyMismatchError:
        return False
    except VerificationError:  # not enough memory, say
        return False


_HASHER: Any = argon2.PasswordHasher()

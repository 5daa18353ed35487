"""Users file and password checks.

A line of the file:

    name:$argon2id$v=19$m=65536,t=3,p=4$...:group,group
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import argon2
from argon2 import Parameters, extract_parameters
from argon2.exceptions import InvalidHashError, VerificationError, VerifyMismatchError
from argon2.low_level import Type
from gevent.event import AsyncResult
from gevent.lock import BoundedSemaphore
from gevent.threadpool import ThreadPool

from smqrt.auth.identity import MAX_GROUPS, name_fault
from smqrt.errors import ArgumentError, SmqrtError

MAX_FILE_BYTES = 64 << 20
MAX_MEMORY_KIB, MAX_ROUNDS, MAX_LANES = 1 << 20, 64, 16
"""Maximum parameters of a hash: a check with more would take too much memory or time."""


@dataclass(frozen=True, slots=True)
class User:
    """A line of the file.

    Attributes:
        name: the user name.
        password_hash: an argon2id hash, in the PHC string format.
        groups: the groups of the user.
    """

    name: str
    password_hash: str
    groups: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The line of the user in the file."""
        return ":".join((self.name, self.password_hash, *([",".join(self.groups)] if self.groups else [])))


def parse(text: str, file: str) -> dict[str, User]:
    """Parse the text of a users file; empty lines and those that begin with # are ignored.

    Raises:
        ArgumentError: an invalid line; the message names file, line and remedy, and never the hash.
    """
    users: dict[str, User] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, rest = line.rstrip().partition(":")
        password_hash, _, groups = rest.partition(":")
        form = "a line is 'name:hash' or 'name:hash:group,group'; `smqrt passwd` writes it"
        try:
            if fault := name_fault(name) if colon else form:
                raise ArgumentError(fault)
            check_hash(name, password_hash)
            user = User(name, password_hash, groups_of(groups))
            if name in users:
                raise ArgumentError(f"the user {name} occurs twice")
        except ArgumentError as error:
            raise ArgumentError(f"{file}:{number}: {error}") from None
        users[name] = user
    return users


def groups_of(text: str) -> tuple[str, ...]:
    """Return the groups in a comma-separated text.

    Raises:
        ArgumentError: an invalid group name, or too many groups.
    """
    groups = tuple(dict.fromkeys(group for group in text.split(",") if group))
    for group in groups:
        # A name with a dollar sign may be part of a hash, which must not appear in logs.
        shown = f"the group name {group[:64]!r}" if "$" not in group else "a group name"
        if fault := name_fault(group, shown):
            raise ArgumentError(fault)
    if len(groups) > MAX_GROUPS:
        raise ArgumentError(f"a user may be in at most {MAX_GROUPS} groups, not {len(groups)}")
    return groups


def check_hash(name: str, password_hash: str) -> Parameters:
    """Return the parameters of a hash.

    Raises:
        ArgumentError: the hash is not an argon2id hash, or a check would take too much memory or time.
    """
    try:
        found = extract_parameters(password_hash)
    except (InvalidHashError, ValueError, IndexError):
        raise ArgumentError(f"the hash of {name} is not an argon2id hash; `smqrt passwd` creates one") from None
    if found.type is not Type.ID:
        raise ArgumentError(f"the hash of {name} is not an argon2id hash; `smqrt passwd` creates one")
    if found.memory_cost > MAX_MEMORY_KIB or found.time_cost > MAX_ROUNDS or found.parallelism > MAX_LANES:
        raise ArgumentError(
            f"the hash of {name} takes more than {MAX_MEMORY_KIB >> 10} MiB, {MAX_ROUNDS} rounds or {MAX_LANES} lanes; "
            "`smqrt passwd` creates a new one"
        )
    return found


# ---- Users file


def load(path: Path) -> dict[str, User]:
    """Read a users file; blocks.

    Raises:
        ArgumentError: the file can't be read, is not private, or has an invalid line.
    """
    return parse(read_private(path), str(path))


def read_private(path: Path) -> str:
    """Return the text of a file that only its owner and group can read. Blocks.

    Raises:
        ArgumentError: the file can't be read, is not UTF-8, is too large, or other users may read or change it.
    """
    text = read_file(path)
    if os.stat(path).st_mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        raise ArgumentError(f"{path}: other users may read or change it; run: chmod 600 {path}")
    return text


def read_file(path: Path) -> str:
    """Return the text of a file. Blocks.

    Raises:
        ArgumentError: the file can't be read, is not UTF-8, or is too large.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ArgumentError(f"{path} can't be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ArgumentError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{path} is not UTF-8 at byte {error.start}") from None


def write(path: Path, text: str) -> None:
    """Replace a file atomically. Blocks.

    A new file is private to its owner; an existing one keeps its owner, group and mode.

    Raises:
        ArgumentError: the file can't be written.
    """
    target = Path(os.path.realpath(path))  # a symbolic link is kept
    try:
        fd, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise ArgumentError(f"{path} can't be written: {error.strerror}") from None
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(text.encode("utf-8"))
            if target.exists():  # before the rename, so that the file never has the wrong owner or mode
                before = target.stat()
                if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(fd, before.st_uid, before.st_gid)
                os.fchmod(fd, stat.S_IMODE(before.st_mode) & ~(stat.S_IRWXO | stat.S_IWGRP))
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise ArgumentError(f"{path} can't be written: {error.strerror}") from None


def with_user(text: str, user: User | None, name: str) -> str:
    """Return the text of a users file with the line of `name` replaced or added, or removed when `user` is None.

    Other lines and comments are kept.
    """
    lines, is_done = [], user is None
    for line in text.splitlines():
        if line.partition(":")[0] != name or line.startswith("#"):
            lines.append(line)
        elif not is_done and user is not None:
            lines.append(user.line)
            is_done = True
    if not is_done and user is not None:
        lines.append(user.line)
    return "".join(f"{line}\n" for line in lines)


Users = Mapping[str, User]


# ---- Password checks with argon2id, in threads

MAX_PARALLEL = 2
"""Hashes computed at a time. A hash takes 64 MiB and, with four lanes, up to four cores for about 50 ms."""
MAX_WAITING = 64
"""Waiting checks of all clients. On one core the last one waits about as long as the time limit of Connect (4 s)."""
MAX_WAITING_OF_ADDRESS = 32
MAX_CACHED = 20_000
"""Correct passwords in the cache; the least recently used one is removed."""
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

    A correct password is cached as a keyed hash; the key exists only in this process. Clients that reconnect then need
    no argon2 hash, and a thousand clients of one user need one. A wrong password is never cached, so that every guess
    takes the same time.

    Args:
        max_parallel: maximum number of hashes that are computed at a time.
        max_waiting: maximum number of checks that wait, of all clients.
    """

    def __init__(self, max_parallel: int = MAX_PARALLEL, max_waiting: int = MAX_WAITING) -> None:
        self._max_parallel, self._max_waiting = max_parallel, max_waiting
        self._pool: ThreadPool | None = None
        self._slots = BoundedSemaphore(max_parallel)
        self._waiting_of: Counter[str] = Counter()
        self._pending: dict[bytes, _PendingCheck] = {}
        self._key = secrets.token_bytes(32)
        self._correct: OrderedDict[bytes, None] = OrderedDict()
        self._decoy_hash = ""  # of a random password, for unknown users

    @property
    def waiting(self) -> int:
        """Number of running and waiting checks."""
        return len(self._pending)

    def is_cached(self, name: str, password_hash: str, password: bytes) -> bool:
        """Return whether the password is in the cache of correct passwords; computes no argon2 hash."""
        return self._cache_key(name, password_hash, password) in self._correct

    def verify(
        self,
        name: str,
        password_hash: str | None,
        password: bytes,
        address: str = "",
        is_connected: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Return whether a password matches the hash; blocks this greenlet.

        Args:
            name: the user name.
            password_hash: None for an unknown user; the check takes the same time.
            password: the password that the client sent.
            address: the client's address, for the limit of one address.
            is_connected: returns whether the client is still connected.

        Raises:
            BusyError: too many checks wait.
        """
        if len(password) > MAX_PASSWORD_BYTES:
            return False
        key = self._cache_key(name, password_hash or "", password)
        if key in self._correct:
            self._correct.move_to_end(key)
            return True
        pending = self._pending.get(key)
        if pending is not None:
            pending.clients.append(is_connected)
            return bool(pending.result.get())
        if len(self._pending) >= self._max_waiting or self._waiting_of[address] >= MAX_WAITING_OF_ADDRESS:
            raise BusyError("the queue of password checks is full")
        pending = self._pending[key] = _PendingCheck()
        pending.clients.append(is_connected)
        self._waiting_of[address] += 1
        is_right = False
        try:
            with self._slots:  # instead of the pool's queue, so that checks of disconnected clients are skipped
                if any(is_client_connected() for is_client_connected in pending.clients):
                    is_right = self._compute(password_hash, password)
        finally:
            del self._pending[key]
            self._waiting_of[address] -= 1
            if not self._waiting_of[address]:
                del self._waiting_of[address]
            if is_right:
                self._correct[key] = None
                if len(self._correct) > MAX_CACHED:
                    self._correct.popitem(last=False)
            pending.result.set(is_right)
        return is_right

    def is_pending(self, name: str, password_hash: str | None, password: bytes) -> bool:
        """Return whether the same password of the same user is being checked at this time."""
        return self._cache_key(name, password_hash or "", password) in self._pending

    def _compute(self, password_hash: str | None, password: bytes) -> bool:
        if not password_hash and not self._decoy_hash:
            self._decoy_hash = str(self._threads().apply(new_hash, (secrets.token_bytes(32),)))
        compared = password_hash or self._decoy_hash  # an unknown user takes the same time
        is_match = bool(self._threads().apply(verify_now, (compared, password)))
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

    def _cache_key(self, name: str, password_hash: str, password: bytes) -> bytes:
        """Return the cache key of a user and password; a change of the password changes it, because of the hash."""
        user = sha256(f"{name}:{password_hash}".encode("utf-8", "surrogateescape")).digest()
        return hmac.digest(self._key, user + password, "sha256")


def new_hash(password: bytes, memory_kib: int = MEMORY_KIB) -> str:
    """Return the hash of a password with a new salt. Takes about 50 ms."""
    return argon2.PasswordHasher(ROUNDS, memory_kib, LANES).hash(password)


def verify_now(password_hash: str, password: bytes) -> bool:
    """Return whether a password matches the hash. Takes about 50 ms in the calling thread."""
    try:
        return bool(_HASHER.verify(password_hash, password))
    except VerifyMismatchError:
        return False
    except VerificationError:  # such as too little memory
        return False


_HASHER: Any = argon2.PasswordHasher()

"""Single-use values for logins: nonces of Digest and seeds of login forms.

They are signed, so unused values need no memory.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum

NONCE_LIFETIME_S = 300.0
SEED_LIFETIME_S = 12 * 3600.0  # a login page may be open overnight
_MAX_KEPT = 10_000  # used values, with about 300 bytes each
_MAX_CHECKED = 1024  # cached nonces whose signature was checked
_WINDOW = 256  # requests with one nonce that may arrive out of order; browsers send about ten at the same time
_TIME_BYTES, _RANDOM_BYTES, _MAC_BYTES = 8, 8, 16


Alone = Callable[[], AbstractContextManager[bool]]
"""A lock against other workers, see `HttpSessions.alone`."""


def no_other_workers() -> AbstractContextManager[bool]:
    """Return the lock for a process without other workers, see `HttpSessions.alone`."""
    return nullcontext(True)


class State(Enum):
    """The state of a value that a client has returned."""

    GOOD = "good"
    STALE = "stale"
    """It was issued, but has expired or was used before. The client needs a new one."""
    FOREIGN = "foreign"
    """It was never issued, or its user has logged out."""


class Signer:
    """Signer with a secret key, which is in memory only.

    Args:
        key: key shared by the workers of a server; None for a random one.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key or secrets.token_bytes(32)

    def sign(self, data: bytes) -> bytes:
        """Return the signature of `data`."""
        return hmac.digest(self._key, data, "sha256")[:_MAC_BYTES]

    def is_valid(self, data: bytes, signature: bytes) -> bool:
        """Return whether `signature` is that of `data`."""
        return hmac.compare_digest(self.sign(data), signature)


_PACKED_USES = struct.Struct(">d?I32s")


@dataclass(slots=True)
class _Uses:
    """The used counts of a nonce: the highest one, and a bit for each of the `_WINDOW` counts up to it."""

    made_s: float
    highest: int = 0
    bits: int = 0
    is_over: bool = False

    def has(self, count: int) -> bool:
        behind = self.highest - count
        return behind >= 0 and (behind >= _WINDOW or bool(self.bits >> behind & 1))

    def add(self, count: int) -> None:
        ahead = count - self.highest
        if ahead > 0:
            self.highest, self.bits = count, (self.bits << min(ahead, _WINDOW) | 1) & (1 << _WINDOW) - 1
        else:
            self.bits |= 1 << -ahead

    def packed(self) -> bytes:
        return _PACKED_USES.pack(self.made_s, self.is_over, self.highest, self.bits.to_bytes(32))

    @classmethod
    def of(cls, data: bytes) -> _Uses:
        made_s, is_over, highest, bits = _PACKED_USES.unpack(data)
        return cls(made_s, highest, int.from_bytes(bits), is_over)


class Kept:
    """Bounded storage of used values with their counts. Values as old as the removed ones count as used.

    Attributes:
        on_use: called with each used value and its packed counts, for `arrived` at the other workers of a server.
    """

    def __init__(self) -> None:
        self.on_use: Callable[[bytes, bytes], object] = lambda text, uses: None
        self._uses: OrderedDict[str, _Uses] = OrderedDict()
        self._removed_s = 0.0

    def get(self, text: str, made_s: float) -> _Uses | None:
        """Return the counts of a value; None if they are unknown because it is too old."""
        uses = self._uses.get(text)
        return uses or (None if made_s <= self._removed_s else _Uses(made_s))

    def put(self, text: str, uses: _Uses) -> None:
        """Store the counts of a value, and send them to other workers."""
        self._store(text, uses)
        self.on_use(text.encode(), uses.packed())

    def arrived(self, text: bytes, uses: bytes) -> None:
        """Store the counts that another worker has sent."""
        self._store(text.decode(), _Uses.of(uses))

    def _store(self, text: str, uses: _Uses) -> None:
        self._uses[text] = uses
        self._uses.move_to_end(text)
        if len(self._uses) > _MAX_KEPT:
            _, oldest = self._uses.popitem(last=False)
            self._removed_s = max(self._removed_s, oldest.made_s)

    def __len__(self) -> int:
        return len(self._uses)


class Nonces:
    """The nonces of Digest (RFC 7616 §3.3).

    Args:
        now: returns the time in seconds.
        key: see `Signer`.
        alone: excludes the other workers of a server, see `HttpSessions.alone`.

    Attributes:
        kept: the used nonces.
    """

    def __init__(self, now: Callable[[], float], key: bytes | None = None, alone: Alone = no_other_workers) -> None:
        self._signer, self._now, self._alone = Signer(key), now, alone
        self.kept = Kept()
        self._checked: dict[str, float] = {}  # time of issue of nonces whose signature was checked

    def issue(self) -> str:
        """Return a new nonce."""
        data = int(self._now() * 1000).to_bytes(_TIME_BYTES) + secrets.token_bytes(_RANDOM_BYTES)
        return urlsafe_b64encode(data + self._signer.sign(data)).decode("ascii")

    def state(self, nonce: str, count: int) -> State:
        """Return the state of a nonce for a request with this count."""
        made_s = self._made_s(nonce)
        if made_s is None:
            return State.STALE  # it may be from before a restart of this server
        if not 0 <= self._now() - made_s <= NONCE_LIFETIME_S:
            return State.STALE
        uses = self.kept.get(nonce, made_s)
        if uses is None or uses.has(count):
            return State.FOREIGN if uses is not None and uses.is_over else State.STALE
        return State.FOREIGN if uses.is_over else State.GOOD

    def use(self, nonce: str, count: int) -> bool:
        """Record the use of a nonce with this count; return whether it is the first use."""
        made_s = self._made_s(nonce)
        if made_s is None:
            return False
        with self._alone() as is_certain:
            uses = self.kept.get(nonce, made_s)
            if not is_certain or uses is None or uses.has(count) or uses.is_over:
                return False
            uses.add(count)
            self.kept.put(nonce, uses)
        return True

    def end(self, nonce: str) -> None:
        """Invalidate a nonce."""
        made_s = self._made_s(nonce)
        if made_s is not None:
            self.kept.put(nonce, _Uses(made_s, is_over=True))

    def _made_s(self, nonce: str) -> float | None:
        """Return the time of issue of a nonce, None for a forged one."""
        made_s = self._checked.get(nonce)
        if made_s is None:
            data = _decoded(nonce, _TIME_BYTES + _RANDOM_BYTES + _MAC_BYTES)
            if data is None or not self._signer.is_valid(data[:-_MAC_BYTES], data[-_MAC_BYTES:]):
                return None
            if len(self._checked) >= _MAX_CHECKED:
                self._checked.clear()
            made_s = self._checked[nonce] = int.from_bytes(data[:_TIME_BYTES]) / 1000
        return made_s


class Seeds:
    """The seeds of login forms, each valid for one login (spec: bas-api §5).

    Args, Attributes: see `Nonces`.
    """

    def __init__(self, now: Callable[[], float], key: bytes | None = None, alone: Alone = no_other_workers) -> None:
        self._signer, self._now, self._alone = Signer(key), now, alone
        self.kept = Kept()

    def issue(self) -> tuple[str, str]:
        """Return a new seed, a decimal number that may be negative, and the key that authenticates it."""
        seed = str(secrets.randbelow(1 << 32) - (1 << 31))
        issued = int(self._now() * 1000).to_bytes(_TIME_BYTES)
        key = issued + self._signer.sign(issued + seed.encode())
        return seed, urlsafe_b64encode(key).decode("ascii")

    def is_good(self, seed: str, key: str) -> bool:
        """Return whether a seed was issued with this key and is unused."""
        made_s = self._made_s(seed, key)
        if made_s is None or not 0 <= self._now() - made_s <= SEED_LIFETIME_S:
            return False
        uses = self.kept.get(key, made_s)
        return uses is not None and not uses.is_over

    def use(self, seed: str, key: str) -> bool:
        """Record the use of a seed by a login; return whether it is the first use."""
        made_s = self._made_s(seed, key)
        if made_s is None:
            return False
        with self._alone() as is_certain:
            if not is_certain or not self.is_good(seed, key):
                return False
            self.kept.put(key, _Uses(made_s, is_over=True))
        return True

    def _made_s(self, seed: str, key: str) -> float | None:
        data = _decoded(key, _TIME_BYTES + _MAC_BYTES)
        text = seed.encode("utf-8", "surrogateescape")
        if data is None or not self._signer.is_valid(data[:_TIME_BYTES] + text, data[_TIME_BYTES:]):
            return None
        return int.from_bytes(data[:_TIME_BYTES]) / 1000


def _decoded(text: str, length: int) -> bytes | None:
    if len(text) > 2 * length:
        return None
    try:
        data = urlsafe_b64decode(text.encode("ascii"))
    except (Error, ValueError):
        return None
    is_exact = urlsafe_b64encode(data).decode("ascii") == text  # reject other spellings of the same value
    return data if len(data) == length and is_exact else None

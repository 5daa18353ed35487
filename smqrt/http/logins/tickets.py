"""Values that a server hands out and takes back once: the nonces of Digest and the seeds of login forms.

They are signed, so nothing is kept of those that nobody uses.
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
SEED_LIFETIME_S = 12 * 3600.0  # a login page may stand open over night
_MAX_KEPT = 10_000  # of those in use, some 300 bytes each
_MAX_CHECKED = 1024
_WINDOW = 256  # requests of one nonce that may overtake each other; browsers have some ten under way
_TIME_BYTES, _RANDOM_BYTES, _MAC_BYTES = 8, 8, 16


Alone = Callable[[], AbstractContextManager[bool]]


def nobody_else() -> AbstractContextManager[bool]:
    """For a process alone: see `HttpSessions.alone`."""
    return nullcontext(True)


class State(Enum):
    """What a value that came back is."""

    GOOD = "good"
    STALE = "stale"
    """It was handed out, and is too old or was used before: a new one is to be handed out."""
    FOREIGN = "foreign"
    """It was never handed out, or its owner has logged out."""


class Signer:
    """Signs bytes with a key that nobody else knows and that ends with the server.

    Args:
        key: that the workers of a server have in common; None makes one.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key or secrets.token_bytes(32)

    def sign(self, data: bytes) -> bytes:
        """Return the signature of `data`."""
        return hmac.digest(self._key, data, "sha256")[:_MAC_BYTES]

    def made(self, data: bytes, signature: bytes) -> bool:
        """Return whether it is the signature of `data`."""
        return hmac.compare_digest(self.sign(data), signature)


_uses = struct.Struct(">d?I32s")


@dataclass(slots=True)
class _Uses:
    """The counts of a nonce that were used: the highest, and a bit for each of those below; when it was made, and
    whether it is good for nothing any more."""

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
        return _uses.pack(self.made_s, self.is_over, self.highest, self.bits.to_bytes(32))

    @classmethod
    def of(cls, data: bytes) -> _Uses:
        made_s, is_over, highest, bits = _uses.unpack(data)
        return cls(made_s, highest, int.from_bytes(bits), is_over)


class Kept:
    """What was used, by its text, with the time of those that had to make room: what is as old was used, too.

    Attributes:
        tell: called with each text that was used, and what `arrived` takes at the other workers of a server.
    """

    def __init__(self) -> None:
        self.tell: Callable[[bytes, bytes], object] = lambda text, uses: None
        self._uses: OrderedDict[str, _Uses] = OrderedDict()
        self._floor_s = 0.0

    def get(self, text: str, made_s: float) -> _Uses | None:
        """Return the uses; None when nobody can tell any more."""
        uses = self._uses.get(text)
        return uses or (None if made_s <= self._floor_s else _Uses(made_s))

    def put(self, text: str, uses: _Uses) -> None:
        """Keep the uses."""
        self._keep(text, uses)
        self.tell(text.encode(), uses.packed())

    def arrived(self, text: bytes, uses: bytes) -> None:
        """Keep what another worker has told."""
        self._keep(text.decode(), _Uses.of(uses))

    def _keep(self, text: str, uses: _Uses) -> None:
        self._uses[text] = uses
        self._uses.move_to_end(text)
        if len(self._uses) > _MAX_KEPT:
            _, oldest = self._uses.popitem(last=False)
            self._floor_s = max(self._floor_s, oldest.made_s)

    def __len__(self) -> int:
        return len(self._uses)


class Nonces:
    """The nonces of Digest (RFC 7616 §3.3).

    Args:
        now: gives the time in seconds.
        key: see `Signer`.
        alone: keeps the other workers of a server from using one meanwhile; tells whether that could be done.

    Attributes:
        kept: those that were used.
    """

    def __init__(self, now: Callable[[], float], key: bytes | None = None, alone: Alone = nobody_else) -> None:
        self._signer, self._now, self._alone = Signer(key), now, alone
        self.kept = Kept()
        self._checked: dict[str, float] = {}  # those in use, whose signature was looked at, with their times

    def issue(self) -> str:
        """Make one."""
        data = int(self._now() * 1000).to_bytes(_TIME_BYTES) + secrets.token_bytes(_RANDOM_BYTES)
        return urlsafe_b64encode(data + self._signer.sign(data)).decode("ascii")

    def state(self, nonce: str, count: int) -> State:
        """Return whether a request may use it with this count."""
        made_s = self._made_s(nonce)
        if made_s is None:
            return State.STALE  # of this server before it was started anew, perhaps
        if not 0 <= self._now() - made_s <= NONCE_LIFETIME_S:
            return State.STALE
        uses = self.kept.get(nonce, made_s)
        if uses is None or uses.has(count):
            return State.FOREIGN if uses is not None and uses.is_over else State.STALE
        return State.FOREIGN if uses.is_over else State.GOOD

    def use(self, nonce: str, count: int) -> bool:
        """Note that it was used with this count; return whether it was the first time."""
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
        """Let it be good for nothing any more."""
        made_s = self._made_s(nonce)
        if made_s is not None:
            self.kept.put(nonce, _Uses(made_s, is_over=True))

    def _made_s(self, nonce: str) -> float | None:
        """Return the time at which it was handed out, None when it was not."""
        made_s = self._checked.get(nonce)
        if made_s is None:
            data = _decoded(nonce, _TIME_BYTES + _RANDOM_BYTES + _MAC_BYTES)
            if data is None or not self._signer.made(data[:-_MAC_BYTES], data[-_MAC_BYTES:]):
                return None
            if len(self._checked) >= _MAX_CHECKED:
                self._checked.clear()
            made_s = self._checked[nonce] = int.from_bytes(data[:_TIME_BYTES]) / 1000
        return made_s


class Seeds:
    """The seeds of login forms, each good for one login (spec: bas-api §5).

    Args, Attributes: see `Nonces`.
    """

    def __init__(self, now: Callable[[], float], key: bytes | None = None, alone: Alone = nobody_else) -> None:
        self._signer, self._now, self._alone = Signer(key), now, alone
        self.kept = Kept()

    def issue(self) -> tuple[str, str]:
        """Make one: a number in decimal, which may be negative, and the key that proves where it came from."""
        seed = str(secrets.randbelow(1 << 32) - (1 << 31))
        made = int(self._now() * 1000).to_bytes(_TIME_BYTES)
        key = made + self._signer.sign(made + seed.encode())
        return seed, urlsafe_b64encode(key).decode("ascii")

    def is_good(self, seed: str, key: str) -> bool:
        """Return whether it was handed out with this key and not used for a login yet."""
        made_s = self._made_s(seed, key)
        if made_s is None or not 0 <= self._now() - made_s <= SEED_LIFETIME_S:
            return False
        uses = self.kept.get(key, made_s)
        return uses is not None and not uses.is_over

    def use(self, seed: str, key: str) -> bool:
        """Note that a login used it; return whether it was the first."""
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
        if data is None or not self._signer.made(data[:_TIME_BYTES] + text, data[_TIME_BYTES:]):
            return None
        return int.from_bytes(data[:_TIME_BYTES]) / 1000


def _decoded(text: str, length: int) -> bytes | None:
    if len(text) > 2 * length:
        return None
    try:
        data = urlsafe_b64decode(text.encode("ascii"))
    except (Error, ValueError):
        return None
    is_exact = urlsafe_b64encode(data).decode("ascii") == text  # one value has one spelling
    return data if len(data) == length and is_exact else None

"""Throttle of failed logins, for pages and hubs together.

It limits the guesses from one address, for one name from one address, and for one name from all addresses.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from ipaddress import ip_address
from math import ceil
from secrets import token_bytes
from typing import TypeVar

from smqrt.settings.limits import Limit

K = TypeVar("K")
V = TypeVar("V")

_MAX_ENTRIES = 8192  # addresses and names, about 200 bytes each; the least recently used one is removed
_MAX_NAME = 64  # characters; a longer name is replaced by its hash
_SITE_BITS = 64  # of an IPv6 address: a site usually has all addresses with such a prefix
_ANYWHERE = "*"  # instead of an address: all addresses


@dataclass(frozen=True, slots=True)
class GuessLimit:
    """The number of consecutive guesses, and the seconds until one more guess is available."""

    guesses: int
    refill_s: float


@dataclass(slots=True)
class _Count:
    """The remaining guesses at the time `at_s`, and the failures since the last success."""

    left: float
    at_s: float
    failures: int = 0


LOGINS = Limit("logins", "", "too many failed logins; further ones are refused for some time")


class Throttle:
    """Counts the guesses of each address.

    An attempt takes one guess of its address, and one of its name at that address, before the password is checked. A
    successful login refunds both, so that correct passwords are never throttled. A name that has logged in from
    an address before takes no guess of the address, so that clients behind the same proxy can't block it.

    Args:
        now: returns the time in seconds.
        name: the limit for one name from one address.
        address: the limit for all names from one address.
        anywhere: the limit for one name from all addresses that it has not logged in from before; None for none.

    Attributes:
        share: called with an ID and an event; the other workers of a server pass both to their `arrived`.
    """

    def __init__(
        self, now: Callable[[], float], name: GuessLimit, address: GuessLimit, anywhere: GuessLimit | None = None
    ) -> None:
        self._now = now
        self._name, self._address, self._anywhere = name, address, anywhere
        self._counts: OrderedDict[tuple[str, str | None], _Count] = OrderedDict()
        self._known: OrderedDict[tuple[str, str], None] = OrderedDict()
        self.share: Callable[[bytes, bytes], object] = lambda name, event: None

    def take(self, address: str, name: str) -> bool:
        """Take a guess; return False when none is left."""
        if self._take(site_of(address), _short_name(name)):
            return True
        LOGINS.refused(f"a login from {address}")
        return False

    def _take(self, site: str, name: str) -> bool:
        key = site, name
        is_known = key in self._known
        if is_known and key not in self._counts:  # the usual login
            _remember(self._counts, key, _Count(self._name.guesses - 1, self._now()))
            return True
        of_site = self._count(site, None)
        # Without a guess of the address, no entry is made for the name: one address could displace all other entries.
        taken = [self._count(site, name)] if of_site.left >= 1 or is_known else []
        if taken and not is_known:
            taken.append(of_site)
            if self._anywhere is not None:
                taken.append(self._count(_ANYWHERE, name))
        if not taken or any(count.left < 1 for count in taken):
            return False
        for count in taken:
            count.left -= 1
        return True

    def failed(self, address: str, name: str) -> None:
        """Count a failed attempt."""
        self._fail(site_of(address), _short_name(name))
        self._share(address, name, is_right=False)

    def _fail(self, site: str, name: str) -> None:
        self._count(site, name)
        self._count(site, None).failures += 1

    def succeeded(self, address: str, name: str) -> None:
        """Refund the guesses of an attempt that succeeded, and reset the failures of its name."""
        site = site_of(address)
        count = self._counts.get((site, None))
        if count is not None and count.failures:
            self._share(address, name, is_right=True)
        self._succeed(site, _short_name(name))

    def _succeed(self, site: str, name: str) -> None:
        key = site, name
        self._counts.pop(key, None)
        if key not in self._known:
            self._refund(site, name)
        count = self._counts.get((site, None))
        if count is not None:
            count.failures = 0
        _remember(self._known, key, None)

    def _share(self, address: str, name: str, is_right: bool) -> None:
        self.share(token_bytes(16), json.dumps([site_of(address), _short_name(name), is_right]).encode())

    def arrived(self, _: bytes, event: bytes) -> None:
        """Count an attempt of another worker."""
        site, name, is_right = json.loads(event)
        self._take(site, name)
        if is_right:
            self._succeed(site, name)
        else:
            self._fail(site, name)

    def refund(self, address: str, name: str) -> None:
        """Refund the guesses of an attempt whose password was not checked."""
        site, name = site_of(address), _short_name(name)
        self._count(site, name).left += 1
        self._refund(site, name)

    def _refund(self, site: str, name: str) -> None:
        if (site, name) not in self._known:
            self._count(site, None).left += 1  # `_count` limits it
            if self._anywhere is not None:
                self._count(_ANYWHERE, name).left += 1

    def failures(self, address: str) -> int:
        """Return the number of failed logins of an address since the last success."""
        count = self._counts.get((site_of(address), None))
        return count.failures if count is not None else 0

    def wait_s(self, address: str, name: str) -> int:
        """Return the seconds until an attempt is possible."""
        site, name = site_of(address), _short_name(name)
        waits = [0.0]
        if (site, name) in self._counts:
            waits.append(self._name.refill_s * (1 - self._count(site, name).left))
        if (site, name) not in self._known:
            waits.append(self._address.refill_s * (1 - self._count(site, None).left))
            if self._anywhere is not None and (_ANYWHERE, name) in self._counts:
                waits.append(self._anywhere.refill_s * (1 - self._count(_ANYWHERE, name).left))
        return max(1, ceil(max(waits)))

    def _count(self, site: str, name: str | None) -> _Count:
        rule = self._address if name is None else self._name
        if site == _ANYWHERE and self._anywhere is not None:
            rule = self._anywhere
        now_s = self._now()
        count = self._counts.get((site, name))
        if count is None:
            count = _Count(rule.guesses, now_s)
        count.left = min(rule.guesses, count.left + (now_s - count.at_s) / rule.refill_s)
        count.at_s = now_s
        _remember(self._counts, (site, name), count)
        return count


def _remember(table: OrderedDict[K, V], key: K, value: V) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > _MAX_ENTRIES:
        table.popitem(last=False)


def _short_name(name: str) -> str:
    return name if len(name) <= _MAX_NAME else sha256(name.encode("utf-8", "backslashreplace")).hexdigest()


def site_of(address: str) -> str:
    """Return the site of an address: an IPv4 address, or the /64 network of an IPv6 address."""
    if ":" not in address:
        return address
    try:
        number = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    mapped = getattr(number, "ipv4_mapped", None)
    return str(mapped) if mapped is not None else f"{int(number) >> (128 - _SITE_BITS):x}::/{_SITE_BITS}"

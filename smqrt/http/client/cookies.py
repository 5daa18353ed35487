"""The cookies of one client (RFC 6265): each goes back to the host that set it, and to nobody else."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime

from smqrt.http.client.url import Url

MAX_COOKIES = 300
MAX_COOKIES_OF_HOST = 50
MAX_COOKIE_BYTES = 4096  # name and value, and the path (RFC 6265 §6.1)
_FOREVER_S = 10**9


@dataclass(frozen=True, slots=True)
class Cookie:
    """A cookie as a server set it. `expires_s` is Unix time, None for one that lasts as long as the client."""

    name: str
    value: str
    path: str = "/"
    secure: bool = False
    expires_s: float | None = None


@dataclass(slots=True)
class Jar:
    """What a client keeps, by host, path and name."""

    _cookies: dict[tuple[str, str, str], Cookie] = field(default_factory=dict)

    def keep(self, url: Url, headers: Iterable[tuple[str, str]]) -> None:
        """Keep (or forget) what a response of `url` sets."""
        for cookie in parse(headers, url):
            key = (url.host, cookie.path, cookie.name)
            if cookie.expires_s is not None and cookie.expires_s <= time.time():
                self._cookies.pop(key, None)
            elif not (cookie.secure and not url.secure) and (key in self._cookies or self._has_room(url.host)):
                self._cookies[key] = cookie

    def _has_room(self, host: str) -> bool:
        if len(self._cookies) >= MAX_COOKIES:
            now_s = time.time()
            self._cookies = {key: one for key, one in self._cookies.items() if (one.expires_s or now_s + 1) > now_s}
        of_host = sum(key[0] == host for key in self._cookies)
        return of_host < MAX_COOKIES_OF_HOST and len(self._cookies) < MAX_COOKIES

    def value(self, url: Url) -> str:
        """The Cookie field for a request to `url`, empty when there is none; longer paths come first."""
        fitting = [cookie for (host, _, _), cookie in self._cookies.items() if host == url.host and _fits(cookie, url)]
        fitting.sort(key=lambda cookie: -len(cookie.path))
        return "; ".join(f"{cookie.name}={cookie.value}" for cookie in fitting)


def parse(headers: Iterable[tuple[str, str]], url: Url | None = None) -> list[Cookie]:
    """The cookies that the fields of a response set. `url`: where it came from."""
    path = url.target.partition("?")[0].rpartition("/")[0] or "/" if url else "/"
    found = (_cookie(value, path) for name, value in headers if name.lower() == "set-cookie")
    return [cookie for cookie in found if cookie]


def _cookie(text: str, default_path: str) -> Cookie | None:
    pair, *attributes = text.split(";")
    name, equals, value = pair.partition("=")
    if not equals or not name.strip() or len(pair) > MAX_COOKIE_BYTES:
        return None
    known = {key.strip().lower(): word.strip() for key, _, word in (one.partition("=") for one in attributes)}
    path = known.get("path", "")
    if not path.startswith("/") or len(path) > MAX_COOKIE_BYTES:
        path = default_path
    return Cookie(name.strip(), value.strip(), path, "secure" in known, _expiry(known))


def _expiry(attributes: dict[str, str]) -> float | None:
    if "max-age" in attributes:
        try:
            return time.time() + min(int(attributes["max-age"]), _FOREVER_S)
        except ValueError:
            return None
    try:
        return parsedate_to_datetime(attributes["expires"]).timestamp()
    except (KeyError, ValueError, TypeError, OverflowError):
        return None


def _fits(cookie: Cookie, url: Url) -> bool:
    if cookie.secure and not url.secure or (cookie.expires_s is not None and cookie.expires_s <= time.time()):
        return False
    path = url.target.partition("?")[0]
    return path == cookie.path or path.startswith(cookie.path.rstrip("/") + "/")

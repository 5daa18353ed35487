"""The HTTP client that follows redirects, keeps cookies (RFC 6265: each goes back to the host that set it) and answers
challenges (Digest, RFC 7616: a password is proved without being sent).
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from urllib.request import parse_http_list, parse_keqv_list

from smqrt.http.client.conversation import HttpClientOptions, HttpConversation
from smqrt.http.client.exchange import ClientRequest, joined
from smqrt.wire.url import Url

MAX_REDIRECTS = 9
MAX_CHALLENGES = 100  # of as many servers; they ask again when they were forgotten
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_DRAIN_BYTES = 65536  # a longer body of a redirect is not waited for
MAX_COOKIES = 300
MAX_COOKIES_OF_HOST = 50
MAX_COOKIE_BYTES = 4096  # name and value, and the path (RFC 6265 §6.1)
_FOREVER_S = 10**9
_HASHES = {"MD5": "md5", "SHA-256": "sha256", "SHA-512-256": "sha512_256"}


class HttpClient(HttpConversation):
    """A conversation that follows up to nine redirects, and answers one challenge (Digest), as far as it need not send
    a body again. What it learned is used for the requests that follow.
    """

    def __init__(self, options: HttpClientOptions) -> None:
        super().__init__(options)
        self._jar = CookieJar()
        self._asked: ClientRequest | None = None
        self._redirects = 0
        self._challenges: dict[tuple[bool, str, int], Challenge] = {}
        self._proved = False

    def ask(self, request: ClientRequest) -> None:
        """See `HttpConversation.ask`."""
        self._redirects = 0
        self._proved = False
        self._ask(request)

    def _ask(self, request: ClientRequest) -> None:
        self._asked = request
        own = {name.lower() for name, _ in request.headers}
        more = [("Cookie", self._jar.value(request.url)), ("Authorization", self._proof(request))]
        headers = [(name, value) for name, value in more if value and name.lower() not in own]
        super().ask(replace(request, headers=[*request.headers, *headers]))

    def _proof(self, request: ClientRequest) -> str:
        challenge = self._challenges.get(request.url.origin)
        user, password = request.login
        if challenge is None or user is None:
            return ""
        return challenge.answer(request.method, request.url.target, user, password or "")

    def status(self) -> int:
        """See `HttpConversation.status`; the one behind the last redirect."""
        while True:
            answered = self._response.status is not None
            status = super().status()
            if answered or self._asked is None:
                return status
            self._jar.keep(self._asked.url, self.headers)
            following = self._challenged() if status == 401 else self._following(status)
            if following is None:
                return status
            self.skip(_DRAIN_BYTES)
            self._ask(following)

    @property
    def url(self) -> Url | None:
        """Where the last request went."""
        return self._asked.url if self._asked else None

    def _following(self, status: int) -> ClientRequest | None:
        location = self.get("location")
        if status not in _REDIRECTS or location is None or self._redirects >= MAX_REDIRECTS:
            return None
        assert self._asked is not None
        self._redirects += 1
        self._proved = False
        url = joined(self._asked.url, location.encode("latin-1").decode("utf-8", "replace"))
        return self._asked.redirected(status, url)

    def _challenged(self) -> ClientRequest | None:
        """The same request again, when the server asked for a proof that can be given and was not."""
        assert self._asked is not None
        challenge = find_challenge([value for name, value in self.headers if name.lower() == "www-authenticate"])
        if challenge is None or self._asked.login[0] is None:
            return None
        had = self._challenges.get(self._asked.url.origin)
        self._remember(challenge)
        if self._proved or (had is not None and not challenge.stale) or self._asked.length != 0:
            return None
        self._proved = True
        return self._asked

    def _remember(self, challenge: Challenge) -> None:
        assert self._asked is not None
        if len(self._challenges) >= MAX_CHALLENGES:
            self._challenges.clear()
        self._challenges[self._asked.url.origin] = challenge


@dataclass(frozen=True, slots=True)
class Cookie:
    """A cookie as a server set it. `expires_s` is Unix time, None for one that lasts as long as the client."""

    name: str
    value: str
    path: str = "/"
    secure: bool = False
    expires_s: float | None = None


@dataclass(slots=True)
class CookieJar:
    """What a client keeps, by host, path and name."""

    _cookies: dict[tuple[str, str, str], Cookie] = field(default_factory=dict)

    def keep(self, url: Url, headers: Iterable[tuple[str, str]]) -> None:
        """Keep (or forget) what a response of `url` sets."""
        for cookie in parse_cookies(headers, url):
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


def parse_cookies(headers: Iterable[tuple[str, str]], url: Url | None = None) -> list[Cookie]:
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


@dataclass(slots=True)
class Challenge:
    """What a server asked. Good for many requests to it.

    Attributes:
        fields: realm, nonce, and what else it said.
    """

    fields: dict[str, str]
    _count: int = field(default=0, init=False)

    @property
    def stale(self) -> bool:
        """Whether the credentials were right, and only the nonce was too old."""
        return self.fields.get("stale", "").lower() == "true"

    def answer(self, method: str, target: str, user: str, password: str, cnonce: str | None = None) -> str:
        """The value of the Authorization field for a request."""
        self._count += 1
        fields, count, cnonce = self.fields, f"{self._count:08x}", cnonce or os.urandom(16).hex()
        algorithm = fields.get("algorithm", "MD5")
        name = _HASHES[algorithm.upper().removesuffix("-SESS")]
        ha1 = _hash(name, f"{user}:{fields['realm']}:{password}")
        if algorithm.upper().endswith("-SESS"):
            ha1 = _hash(name, f"{ha1}:{fields['nonce']}:{cnonce}")
        with_qop = f"{count}:{cnonce}:auth:" if "qop" in fields else ""
        proof = _hash(name, f"{ha1}:{fields['nonce']}:{with_qop}{_hash(name, f'{method}:{target}')}")
        parts = {"username": user.encode().decode("latin-1"), "realm": fields["realm"], "nonce": fields["nonce"]}
        parts |= {"uri": target, "response": proof}
        parts |= {key: fields[key] for key in ("opaque",) if key in fields}
        text = ", ".join(f'{key}="{_quoted(value)}"' for key, value in parts.items()) + f", algorithm={algorithm}"
        return f"Digest {text}" + (f', qop=auth, nc={count}, cnonce="{cnonce}"' if with_qop else "")


def find_challenge(values: list[str]) -> Challenge | None:
    """The first challenge among the WWW-Authenticate fields that can be met, None when there is none."""
    for value in values:
        scheme, _, rest = value.strip().partition(" ")
        if scheme.lower() == "digest" and (challenge := _challenge_of(rest)):
            return challenge
    return None


def _challenge_of(text: str) -> Challenge | None:
    pairs = [part for part in parse_http_list(text) if part.partition("=")[2]]
    fields = {key.lower(): value for key, value in parse_keqv_list(pairs).items()}
    known = fields.get("algorithm", "MD5").upper().removesuffix("-SESS") in _HASHES
    protects = "auth" in fields.get("qop", "auth").replace(",", " ").lower().split()
    return Challenge(fields) if known and protects and {"realm", "nonce"} <= set(fields) else None


def _hash(name: str, text: str) -> str:
    return hashlib.new(name, text.encode()).hexdigest()


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')

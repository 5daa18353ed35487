"""JSON Web Tokens as logins: who a token says its bearer is, once its signature and its claims have been checked
(RFC 7519, RFC 8725).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import gevent

from smqrt.auth.identity import MAX_GROUPS, Identity, Method, name_fault
from smqrt.auth.users import read_file, read_private
from smqrt.crypto import tokens
from smqrt.crypto.tokens import VerifyKey
from smqrt.errors import ArgumentError, CryptoError, SmqrtError
from smqrt.settings.settings import AuthSettings

log = logging.getLogger("smqrt")

MAX_TOKEN_BYTES = 16 << 10
MIN_SECRET_BYTES = 32
"""A shorter one can be guessed from a token, with a graphics card (RFC 7518 §3.2)."""
MAX_TRIED = 8
"""Keys that a token without a name of its key is tried with."""
MAX_JWKS_BYTES = 256 << 10
REFRESH_S = 300.0
UNKNOWN_S = 60.0
"""For a key that is not known, the keys are fetched at most so often."""
FIRST_WAIT_S = 5.0

Fetch = Callable[[str, int], bytes]
"""`(url, most_bytes)`: gets a document; blocks its greenlet for a few seconds at most. Raises OSError or SmqrtError."""


class TokenError(SmqrtError):
    """A token that lets nobody in; the text is for its bearer."""


class Keys:
    """The keys that tokens are signed with: of files, which are read again with the others, and of an address.

    Args:
        settings: the group `auth`.
        fetch: gets the document of an address.
        changed: called when keys of the address are there, or some are there no more.

    Attributes:
        fault: why the last attempt to fetch failed; empty when it did not.
    """

    def __init__(self, settings: AuthSettings, fetch: Fetch, changed: Callable[[], object]) -> None:
        self._settings, self._fetch, self._changed = settings, fetch, changed
        self._of_files: list[VerifyKey] = []
        self._of_address: list[VerifyKey] = []
        self.fault = ""
        self._fetched_s = float("-inf")
        self._under_way: gevent.Greenlet[..., None] | None = None
        self._refresher: gevent.Greenlet[..., None] | None = None

    def set_of_files(self, found: list[VerifyKey]) -> None:
        """Use these from now on."""
        self._of_files = found

    def for_token(self, header: Mapping[str, object]) -> list[VerifyKey]:
        """The keys that a token may be signed with by its header; blocks when they have to be fetched first."""
        found = self._fitting(header)
        if not found and self._settings.jwt_jwks:
            self._fetch_now_and_then()
            found = self._fitting(header)
        return found[:MAX_TRIED]

    def has(self, proof: str) -> bool:
        """Whether a key is still good. While those of the address were never fetched, nobody can say it is not."""
        is_open = bool(self._settings.jwt_jwks) and not self._of_address
        return is_open or any(key.proof == proof for key in (*self._of_files, *self._of_address))

    def _fitting(self, header: Mapping[str, object]) -> list[VerifyKey]:
        algorithm, name = header.get("alg"), header.get("kid")
        allowed = [
            key
            for key in (*self._of_files, *self._of_address)
            if algorithm in key.algorithms and algorithm in self._settings.jwt_algorithms
        ]
        if not isinstance(name, str):
            return allowed
        return [key for key in allowed if key.name == name] or [key for key in allowed if key.name is None]

    # ---- the address

    def start(self) -> None:
        """Begin to fetch, now and then."""
        if self._settings.jwt_jwks and self._refresher is None:
            self._refresher = gevent.spawn(self._refresh)

    def stop(self) -> None:
        """Fetch no more."""
        for one in (self._refresher, self._under_way):
            if one is not None:
                one.kill(block=False)
        self._refresher = self._under_way = None

    def _refresh(self) -> None:
        while True:
            self._fetch_now_and_then(0.0)
            gevent.sleep(REFRESH_S if not self.fault else UNKNOWN_S)

    def _fetch_now_and_then(self, every_s: float = UNKNOWN_S) -> None:
        """Fetch the keys, unless that was done a moment ago; those who ask at the same time wait for one answer."""
        if self._under_way is None:
            if time.monotonic() - self._fetched_s < every_s:
                return
            self._fetched_s = time.monotonic()
            self._under_way = gevent.spawn(self._fetch_keys)
        under_way = self._under_way
        under_way.join(FIRST_WAIT_S)

    def _fetch_keys(self) -> None:
        url = self._settings.jwt_jwks or ""
        try:
            found = tokens.keys_of_set(self._fetch(url, MAX_JWKS_BYTES))
        except (SmqrtError, OSError) as error:
            if str(error) != self.fault:
                log.error("keys of tokens kept as they were: %s: %s; see the setting auth.jwt_jwks", url, error)
            self.fault = str(error) or type(error).__name__
        else:
            if self.fault:
                log.warning("keys of tokens fetched again from %s", url)
            gone = {key.proof for key in self._of_address} - {key.proof for key in found}
            is_first, self._of_address, self.fault = not self._of_address, found, ""
            if gone or is_first:
                self._changed()
        finally:
            self._under_way = None


def identity_of(token: bytes, keys: Keys, settings: AuthSettings) -> Identity:
    """Who a token stands for; may block while keys are fetched.

    Raises:
        TokenError: it is none, or no good; the text says why.
    """
    if len(token) > MAX_TOKEN_BYTES:
        raise TokenError(f"a token of more than {MAX_TOKEN_BYTES >> 10} KiB")
    try:
        header = tokens.header_of(token)
    except CryptoError:
        raise TokenError("what should be a token is none") from None
    fault = f"its key is not known, or its algorithm is none of {', '.join(settings.jwt_algorithms)}"
    for key in keys.for_token(header):
        try:
            claims = tokens.claims(
                token,
                key,
                allowed=settings.jwt_algorithms,
                issuer=settings.jwt_issuer,
                audience=settings.jwt_audience,
                leeway_s=settings.jwt_leeway_s,
                required=settings.jwt_required,
            )
        except CryptoError as error:
            fault = str(error)
        else:
            return _identity(claims, key, settings)
    raise TokenError(fault)


def _identity(claims: Mapping[str, object], key: VerifyKey, settings: AuthSettings) -> Identity:
    user = _at(claims, settings.jwt_user)
    if not isinstance(user, str):
        raise TokenError(f"it has no text in the claim {settings.jwt_user}, which names the user")
    if fault := name_fault(user):
        raise TokenError(fault)
    return Identity(
        user,
        _groups(_at(claims, settings.jwt_groups)),
        Method.TOKEN,
        expires_s=_end_s(claims.get("exp"), settings),
        proof=key.proof,
    )


def _end_s(expires: object, settings: AuthSettings) -> float | None:
    """When the connection ends."""
    if not settings.jwt_disconnect or not isinstance(expires, int | float):
        return None
    try:
        return float(expires) + settings.jwt_leeway_s
    except OverflowError:
        raise TokenError("it is malformed") from None


def _at(claims: Mapping[str, object], path: str) -> object:
    """A claim by its name, or by the names that lead to it: `realm_access.roles`."""
    if path in claims:
        return claims[path]
    found: object = claims
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _groups(value: object) -> tuple[str, ...]:
    """The groups of a list, or of a text with spaces or commas between; what can't be the name of a group is left
    out."""
    words: Sequence[object] = ()
    if isinstance(value, str):
        words = value.replace(",", " ").split()
    elif isinstance(value, list):
        words = value
    names = dict.fromkeys(word for word in words if isinstance(word, str) and name_fault(word) is None)
    return tuple(names)[:MAX_GROUPS]


# ---- the settings


def is_wanted(settings: AuthSettings) -> bool:
    """Whether tokens are taken."""
    return bool(settings.jwt_key or settings.jwt_secret or settings.jwt_jwks)


def check(settings: AuthSettings) -> None:
    """Look at what can be wrong with settings of tokens together.

    Raises:
        ArgumentError: one sentence.
    """
    if unknown := [name for name in settings.jwt_algorithms if name not in tokens.VERIFIED]:
        raise ArgumentError(f"auth.jwt_algorithms: {unknown[0]!r} is none of {', '.join(tokens.VERIFIED)}")
    if not settings.jwt_jwks:
        return
    url = urlsplit(settings.jwt_jwks)
    if url.scheme != "https" and not (url.scheme == "http" and _is_loopback(url.hostname or "")):
        raise ArgumentError(f"auth.jwt_jwks must be an address of https, not {settings.jwt_jwks!r}")
    if not settings.jwt_issuer and not settings.jwt_audience:
        raise ArgumentError(
            "auth.jwt_jwks needs auth.jwt_issuer or auth.jwt_audience: else tokens that were made for others let in too"
        )


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def paths(settings: AuthSettings) -> list[str]:
    """The files with keys."""
    return [path for path in (settings.jwt_key, settings.jwt_secret) if path]


def load(settings: AuthSettings) -> list[VerifyKey]:
    """Read the files with keys; blocks.

    Raises:
        ArgumentError: one can't be read, or is none.
    """
    found: list[VerifyKey] = []
    try:
        if settings.jwt_key:
            found += tokens.verify_keys(read_file(Path(settings.jwt_key)).encode())
    except CryptoError as error:
        raise ArgumentError(f"{settings.jwt_key}: {error}") from None
    if settings.jwt_secret:
        secret = read_private(Path(settings.jwt_secret)).rstrip("\r\n").encode()
        if len(secret) < MIN_SECRET_BYTES:
            raise ArgumentError(f"{settings.jwt_secret}: a secret has at least {MIN_SECRET_BYTES} bytes")
        found.append(tokens.shared_key(secret))
    return found

"""Logins of a server's users, bound to a session and an address (spec: bas-api §5, runtime §8).

The module also has the single-use values that clients hash with their passwords: nonces of Digest and seeds of login
forms.
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
from hmac import digest
from time import monotonic, time
from typing import Any

from smqrt.auth.identity import Identity, Method
from smqrt.auth.throttle import GuessLimit, Throttle
from smqrt.http.sessions import HttpSession, Note, RequestSessions, SessionRequest

BASIC, DIGEST, FORM, PROGRAM = "basic", "digest", "form", "?"
"""Kinds of logins, as `request:user()` returns them (spec: bas-api §2.1). The last one is for `request:login`."""
ANONYMOUS = "anonymous"
"""The name of a login without a name."""

NAME_LIMIT = GuessLimit(10, 10.0)
ADDRESS_LIMIT = GuessLimit(60, 1.0)
ANYWHERE_LIMIT = GuessLimit(300, 1.0)
"""Limit for one name from all addresses. It does not delay addresses from which the user has logged in before."""
TRACKER_NAME_LIMIT = TRACKER_ADDRESS_LIMIT = GuessLimit(4, 600.0)  # of the login tracker (spec: runtime §1.2)
_GUESS_NOTE_S = 60.0  # how long reports of guesses at other workers are kept
_LOGIN, _NONCE = "login", "nonce"  # in Request.env


@dataclass(slots=True, eq=False)
class Login:
    """The login of a user.

    Attributes:
        name: name of the user.
        password: password that the client sent, or else the secret in the user database; None if unknown.
        kind: "basic", "digest", "form" or "?".
        peer: IP address for which it is valid.
        session: its session; the login ends with it.
        identity: identity of a user of the server's users file, with which a browser can connect to hubs.
        is_nameless: whether it is anonymous. Its name is `ANONYMOUS`, and its sessions are not counted.
    """

    name: str
    password: str | None
    kind: str
    peer: str
    session: HttpSession
    is_nameless: bool = False
    identity: Identity | None = None

    @property
    def needs_credentials(self) -> bool:
        """Whether every request must have credentials, so that a stolen cookie is useless."""
        return self.kind in (BASIC, DIGEST)

    def record(self) -> dict[str, Any]:
        """Return the login as JSON values, for `of_record` in another worker."""
        one, identity = self.identity, None
        if one is not None:
            names = ("user", "groups", "expires_s", "proof")
            identity = {**{name: getattr(one, name) for name in names}, "method": one.method.value}
        fields = ("name", "password", "kind", "peer", "is_nameless")
        return {**{name: getattr(self, name) for name in fields}, "identity": identity}

    @classmethod
    def of_record(cls, record: dict[str, Any], session: HttpSession) -> Login:
        """Return the login of a record.

        Args:
            record: the result of `record`.
            session: its session.
        """
        one, identity = record["identity"], None
        if one is not None:
            identity = Identity(**{**one, "groups": tuple(one["groups"]), "method": Method(one["method"])})
        return cls(**{**record, "identity": identity}, session=session)


class Logins:
    """The logins of a server, with nonces, seeds and limits of guesses.

    Args:
        sessions: the sessions of the server.
        secret: secret shared by the workers of the server; empty without other workers.

    Attributes:
        nonces, seeds: single-use values that clients hash with their passwords.
        throttle, tracker: limits of guesses; `tracker` is the strict one of authenticators with `tracker`.
    """

    def __init__(self, sessions: RequestSessions | None = None, secret: bytes = b"") -> None:
        self.sessions = RequestSessions() if sessions is None else sessions  # an empty one is falsy
        self.sessions.ended.append(self._remove)
        alone = self.sessions.alone
        self.nonces = Nonces(time, _key(secret, b"nonces"), alone)
        self.seeds = Seeds(time, _key(secret, b"seeds"), alone)
        self.throttle = Throttle(monotonic, NAME_LIMIT, ADDRESS_LIMIT, ANYWHERE_LIMIT)
        self.tracker = Throttle(monotonic, TRACKER_NAME_LIMIT, TRACKER_ADDRESS_LIMIT)
        self._by_name: dict[str, list[Login]] = {}
        # Share nonces, seeds, guesses and logins with the other workers of the server.
        self.sessions.on_login = self._apply_record
        share = self.sessions.share_notes
        self.nonces.used.on_use = share(b"n", NONCE_LIFETIME_S, self.nonces.used.arrived)
        self.seeds.used.on_use = share(b"d", SEED_LIFETIME_S, self.seeds.used.arrived)
        for kind, throttle in ((b"f", self.throttle), (b"t", self.tracker)):
            throttle.share = share(kind, _GUESS_NOTE_S, throttle.arrived) or throttle.share

    def _apply_record(self, session: HttpSession, record: dict[str, Any] | None) -> None:
        self._remove(session)
        if record is not None:
            self._add(Login.of_record(record, session))

    def of(self, request: SessionRequest) -> Login | None:
        """Return the login of a request, or None. A cookie from another address has no login."""
        login: Login | None = request.env.get(_LOGIN)
        if login is not None and login.session.login is login:
            return login
        session = self.sessions.of(request)
        login = session.login if session is not None else None
        return login if login is not None and login.peer == str(request.peer[0]) else None

    def users(self) -> list[str]:
        """Return the names of the users who are logged in."""
        self.sessions.catch_up()
        return sorted(self._by_name)

    def sessions_of(self, name: str) -> list[HttpSession]:
        """Return the sessions of a user, the oldest first."""
        self.sessions.catch_up()
        return [login.session for login in self._by_name.get(name, ())]

    def begin(
        self,
        request: SessionRequest,
        name: str | None,
        password: str | None = None,
        kind: str = PROGRAM,
        maxusers: int = 1,
        recycle: bool = True,
        inactive_s: int | None = None,
        identity: Identity | None = None,
    ) -> Login | None:
        """Log the client of a request in; its response must not have begun.

        A session of the client keeps its attributes and gets a new id. A session of another user ends.

        Args:
            request: the request.
            name: name of the user; None for an anonymous login, of which any number may exist.
            password: see `Login.password`.
            kind: see `Login.kind`.
            maxusers: largest number of sessions of the user.
            recycle: end the user's oldest session if `maxusers` is reached.
            inactive_s: seconds without a request after which the login ends; None for the default.
            identity: see `Login.identity`.

        Returns:
            the login; None if `maxusers` is reached.
        """
        peer = str(request.peer[0])
        login = self._find_continued(request, name, kind, peer) if name else None
        if login is None:
            with self.sessions.alone():  # otherwise logins at two workers at the same time could exceed `maxusers`
                if name:
                    own = self._session_of_same_address(request)
                    others = [session for session in self.sessions_of(name) if session is not own]
                    if len(others) >= maxusers and not recycle:
                        return None
                    for session in others[: max(0, len(others) - maxusers + 1)]:
                        self.sessions.terminate(session)
                login = self._create(request, name, kind, peer)
                self._update(login, password, inactive_s, identity)
        else:
            self._update(login, password, inactive_s, identity)
        request.env[_LOGIN] = login
        return login

    def _update(self, login: Login, password: str | None, inactive_s: int | None, identity: Identity | None) -> None:
        login.password, login.identity = password, identity
        self.sessions.save_login(login.session)
        if inactive_s is not None:
            login.session.max_inactive_s = inactive_s
            self.sessions.save(login.session)

    def end(self, request: SessionRequest, everywhere: bool = False) -> bool:
        """Log the client of a request out and end its session, also without a login.

        Args:
            everywhere: end all sessions of the user.

        Returns:
            whether the client was logged in.
        """
        login, session = self.of(request), self.sessions.of(request)
        nonce = request.env.pop(_NONCE, None)
        if nonce is not None:
            self.nonces.end(nonce)
        if login is not None:
            has_others = everywhere and not login.is_nameless
            for one in self.sessions_of(login.name) if has_others else [login.session]:
                self.sessions.terminate(one)
        if session is not None and session.login is None:
            self.sessions.terminate(session)
        return login is not None

    def recheck_clients(self, revalidate: Callable[[Identity], str | None]) -> None:
        """End the logins of users that have become invalid, after the server's users file has changed.

        Args:
            revalidate: returns why an identity is invalid, None for a valid one.
        """
        for login in [login for logins in self._by_name.values() for login in logins]:
            if login.identity is not None and revalidate(login.identity) is not None:
                self.sessions.terminate(login.session)

    def note_nonce(self, request: SessionRequest, nonce: str) -> None:
        """Store the nonce of a request's login, for its logout."""
        request.env[_NONCE] = nonce

    def noted_nonce(self, request: SessionRequest) -> str | None:
        """Return the nonce that `note_nonce` stored."""
        nonce: str | None = request.env.get(_NONCE)
        return nonce

    def _find_continued(self, request: SessionRequest, name: str, kind: str, peer: str) -> Login | None:
        """Return the login that a Basic or Digest request continues, with or without a cookie, or None."""
        if kind not in (BASIC, DIGEST):
            return None
        session = self.sessions.of(request)
        logins = [session.login] if session is not None and session.login else self._by_name.get(name, [])
        for login in logins:
            if (login.name, login.kind, login.peer) == (name, kind, peer):
                self.sessions.adopt(request, login.session)
                self.sessions.touch_each_second(login.session)
                return login
        return None

    def _session_of_same_address(self, request: SessionRequest) -> HttpSession | None:
        """Return the session of a request. A session of another address is ignored: its cookie may be stolen."""
        session = self.sessions.of(request)
        return session if session is not None and session.peer == str(request.peer[0]) else None

    def _create(self, request: SessionRequest, name: str | None, kind: str, peer: str) -> Login:
        session = self._session_of_same_address(request)
        before = session.login if session is not None else None
        if session is not None and before is not None and not before.is_nameless and before.name != name:
            self.sessions.terminate(session)  # its attributes must not become visible to another user
            session = None
        if session is None:
            session = self.sessions.begin(request)
        else:
            self._remove(session)
            self.sessions.change_id(request)  # against session fixation: the old id may be known to an attacker
        return self._add(Login(name or ANONYMOUS, None, kind, peer, session, not name))

    def _add(self, login: Login) -> Login:
        login.session.login = login
        if not login.is_nameless:
            self._by_name.setdefault(login.name, []).append(login)
        return login

    def _remove(self, session: HttpSession) -> None:
        login, session.login = session.login, None
        if login is None or login.is_nameless:
            return
        logins = self._by_name[login.name]
        logins.remove(login)
        if not logins:
            del self._by_name[login.name]


def _key(secret: bytes, use: bytes) -> bytes | None:
    return digest(secret, use, "sha256") if secret else None


# ---- Single-use values for logins: nonces of Digest and seeds of login forms.
#
# They are signed, so unused values need no memory.

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

    VALID = "valid"
    STALE = "stale"
    """It has expired, was used before, or this server did not issue it. The client needs a new one."""
    ENDED = "ended"
    """Its user has logged out."""


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

    issued_s: float
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
        return _PACKED_USES.pack(self.issued_s, self.is_over, self.highest, self.bits.to_bytes(32))

    @classmethod
    def of(cls, data: bytes) -> _Uses:
        issued_s, is_over, highest, bits = _PACKED_USES.unpack(data)
        return cls(issued_s, highest, int.from_bytes(bits), is_over)


class UsedValues:
    """Bounded storage of used values with their counts. Values as old as the removed ones count as used.

    Attributes:
        on_use: called with each used value and its packed counts, for `arrived` at the other workers of a server; None
            without other workers.
    """

    def __init__(self) -> None:
        self.on_use: Note | None = None
        self._uses: OrderedDict[str, _Uses] = OrderedDict()
        self._removed_s = 0.0

    def get(self, text: str, issued_s: float) -> _Uses | None:
        """Return the counts of a value; None if they are unknown because it is too old."""
        uses = self._uses.get(text)
        return uses or (None if issued_s <= self._removed_s else _Uses(issued_s))

    def put(self, text: str, uses: _Uses) -> None:
        """Store the counts of a value, and send them to other workers."""
        self._store(text, uses)
        if self.on_use is not None:
            self.on_use(text.encode(), uses.packed())

    def arrived(self, text: bytes, uses: bytes) -> None:
        """Store the counts that another worker has sent."""
        self._store(text.decode(), _Uses.of(uses))

    def _store(self, text: str, uses: _Uses) -> None:
        self._uses[text] = uses
        self._uses.move_to_end(text)
        if len(self._uses) > _MAX_KEPT:
            _, oldest = self._uses.popitem(last=False)
            self._removed_s = max(self._removed_s, oldest.issued_s)

    def __len__(self) -> int:
        return len(self._uses)


class Nonces:
    """The nonces of Digest (RFC 7616 §3.3).

    Args:
        now: returns the time in seconds.
        key: see `Signer`.
        alone: excludes the other workers of a server, see `HttpSessions.alone`.

    Attributes:
        used: the used nonces.
    """

    def __init__(self, now: Callable[[], float], key: bytes | None = None, alone: Alone = no_other_workers) -> None:
        self._signer, self._now, self._alone = Signer(key), now, alone
        self.used = UsedValues()
        self._checked: dict[str, float] = {}  # time of issue of nonces whose signature was checked

    def issue(self) -> str:
        """Return a new nonce."""
        data = int(self._now() * 1000).to_bytes(_TIME_BYTES) + secrets.token_bytes(_RANDOM_BYTES)
        return urlsafe_b64encode(data + self._signer.sign(data)).decode("ascii")

    def state(self, nonce: str, count: int) -> State:
        """Return the state of a nonce for a request with this count."""
        issued_s = self._issued_s(nonce)
        if issued_s is None:
            return State.STALE  # it may be from before a restart of this server
        if not 0 <= self._now() - issued_s <= NONCE_LIFETIME_S:
            return State.STALE
        uses = self.used.get(nonce, issued_s)
        if uses is None or uses.has(count):
            return State.ENDED if uses is not None and uses.is_over else State.STALE
        return State.ENDED if uses.is_over else State.VALID

    def use(self, nonce: str, count: int) -> bool:
        """Record the use of a nonce with this count; return whether it is the first use."""
        issued_s = self._issued_s(nonce)
        if issued_s is None:
            return False
        with self._alone() as is_certain:
            uses = self.used.get(nonce, issued_s)
            if not is_certain or uses is None or uses.has(count) or uses.is_over:
                return False
            uses.add(count)
            self.used.put(nonce, uses)
        return True

    def end(self, nonce: str) -> None:
        """Invalidate a nonce."""
        issued_s = self._issued_s(nonce)
        if issued_s is not None:
            self.used.put(nonce, _Uses(issued_s, is_over=True))

    def _issued_s(self, nonce: str) -> float | None:
        """Return the time of issue of a nonce, None for a forged one."""
        issued_s = self._checked.get(nonce)
        if issued_s is None:
            data = _decoded(nonce, _TIME_BYTES + _RANDOM_BYTES + _MAC_BYTES)
            if data is None or not self._signer.is_valid(data[:-_MAC_BYTES], data[-_MAC_BYTES:]):
                return None
            if len(self._checked) >= _MAX_CHECKED:
                self._checked.clear()
            issued_s = self._checked[nonce] = int.from_bytes(data[:_TIME_BYTES]) / 1000
        return issued_s


class Seeds:
    """The seeds of login forms, each valid for one login (spec: bas-api §5).

    Args, Attributes: see `Nonces`.
    """

    def __init__(self, now: Callable[[], float], key: bytes | None = None, alone: Alone = no_other_workers) -> None:
        self._signer, self._now, self._alone = Signer(key), now, alone
        self.used = UsedValues()

    def issue(self) -> tuple[str, str]:
        """Return a new seed, a decimal number that may be negative, and the key that authenticates it."""
        seed = str(secrets.randbelow(1 << 32) - (1 << 31))
        issued = int(self._now() * 1000).to_bytes(_TIME_BYTES)
        key = issued + self._signer.sign(issued + seed.encode())
        return seed, urlsafe_b64encode(key).decode("ascii")

    def is_valid(self, seed: str, key: str) -> bool:
        """Return whether a seed was issued with this key and is unused."""
        issued_s = self._issued_s(seed, key)
        if issued_s is None or not 0 <= self._now() - issued_s <= SEED_LIFETIME_S:
            return False
        uses = self.used.get(key, issued_s)
        return uses is not None and not uses.is_over

    def use(self, seed: str, key: str) -> bool:
        """Record the use of a seed by a login; return whether it is the first use."""
        issued_s = self._issued_s(seed, key)
        if issued_s is None:
            return False
        with self._alone() as is_certain:
            if not is_certain or not self.is_valid(seed, key):
                return False
            self.used.put(key, _Uses(issued_s, is_over=True))
        return True

    def _issued_s(self, seed: str, key: str) -> float | None:
        data = _decoded(key, _TIME_BYTES + _MAC_BYTES)
        text = seed.encode("utf-8", "surrogateescape")
        if data is None or not self._signer.is_valid(data[:_TIME_BYTES] + text, data[_TIME_BYTES:]):
            return None
        return int.from_bytes(data[:_TIME_BYTES]) / 1000


def _decoded(text: str, length: int) -> bytes | None:
    """Return `length` bytes from URL-safe Base64, None for any other text."""
    if len(text) > 2 * length:
        return None
    try:
        data = urlsafe_b64decode(text.encode("ascii"))
    except (Error, ValueError):
        return None
    is_exact = urlsafe_b64encode(data).decode("ascii") == text  # reject other spellings of the same value
    return data if len(data) == length and is_exact else None

"""Logins of a server's users, bound to a session and an address (spec: bas-api §5, runtime §8)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hmac import digest
from time import monotonic, time
from typing import Any

from smqrt.auth.identity import Identity, Method
from smqrt.auth.throttle import GuessLimit, Throttle
from smqrt.http.logins.tickets import NONCE_LIFETIME_S, SEED_LIFETIME_S, Nonces, Seeds
from smqrt.http.sessions import HttpSession, RequestSessions, SessionRequest

BASIC, DIGEST, FORM, PROGRAM = "basic", "digest", "form", "?"
"""Kinds of logins, as `request:user()` returns them (spec: bas-api §2.1). The last one is for `request:login`."""
ANONYMOUS = "anonymous"
"""The name of a login without a name."""

NAME_LIMIT = GuessLimit(10, 10.0)
ADDRESS_LIMIT = GuessLimit(60, 1.0)
ANYWHERE_LIMIT = GuessLimit(300, 1.0)
"""Guesses of one name from all addresses. It does not delay addresses from which the user has logged in before."""
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
        self.sessions = RequestSessions() if sessions is None else sessions  # an empty one is false
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
        self.nonces.kept.on_use = share(b"n", NONCE_LIFETIME_S, self.nonces.kept.arrived)
        self.seeds.kept.on_use = share(b"d", SEED_LIFETIME_S, self.seeds.kept.arrived)
        for kind, throttle in ((b"f", self.throttle), (b"t", self.tracker)):
            throttle.tell = share(kind, _GUESS_NOTE_S, throttle.arrived)

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
        """Return the login that a request of Basic or Digest continues, with or without a cookie, or None."""
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

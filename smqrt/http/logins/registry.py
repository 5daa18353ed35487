"""The users who are logged in: logins are bound to a session and to the address they came from (spec: bas-api §5,
runtime §8)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hmac import digest
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from smqrt.auth.identity import Identity, Method
from smqrt.auth.throttle import GuessLimit, Throttle
from smqrt.http.logins.tickets import NONCE_LIFETIME_S, SEED_LIFETIME_S, Nonces, Seeds
from smqrt.http.sessions import HttpSession, RequestSessions

if TYPE_CHECKING:
    from smqrt.http.message import Request

BASIC, DIGEST, FORM, PROGRAM = "basic", "digest", "form", "?"
"""How somebody logged in: what `request:user()` tells (spec: bas-api §2.1). The last is `request:login`."""
ANONYMOUS = "anonymous"
"""The name of a login without a name."""

NAME_LIMIT = GuessLimit(10, 10.0)
ADDRESS_LIMIT = GuessLimit(60, 1.0)
ANYWHERE_LIMIT = GuessLimit(300, 1.0)
"""Of one name from all addresses: many guess together. Who has logged in from an address before is not held up."""
TRACKER_NAME_LIMIT = TRACKER_ADDRESS_LIMIT = GuessLimit(4, 600.0)  # the original's login tracker (spec: runtime §1.2)
_NOTE_S = 60.0  # of guesses at other workers
_LOGIN, _NONCE = "login", "nonce"  # in Request.env


@dataclass(slots=True, eq=False)
class Login:
    """Somebody who is logged in.

    Attributes:
        name: of the user.
        password: as the client gave it, or else what the user database stores; None when nobody knows it.
        kind: "basic", "digest", "form" or "?".
        peer: the IP address it is good for.
        session: its session; the login ends with it.
        identity: of a user of the server's users file: hubs let a browser in by it.
        is_nameless: whether it is of nobody in particular: the name is `ANONYMOUS`, and nothing is counted by it.
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
        """Whether every request has to prove who it comes from again, so that a stolen cookie opens nothing."""
        return self.kind in (BASIC, DIGEST)

    def record(self) -> dict[str, Any]:
        """What `of_record` makes the same login of, in another worker of the server; JSON takes it."""
        fields = ("name", "password", "kind", "peer", "is_nameless")
        identity = None if self.identity is None else _identity_record(self.identity)
        return {**{name: getattr(self, name) for name in fields}, "identity": identity}

    @classmethod
    def of_record(cls, record: dict[str, Any], session: HttpSession) -> Login:
        """The login that a record is of.

        Args:
            record: of `record`.
            session: its session.
        """
        identity = None if record["identity"] is None else _identity_of(record["identity"])
        return cls(**{**record, "identity": identity}, session=session)


def _identity_record(identity: Identity) -> dict[str, Any]:
    """What `IdentityService.checked` looks at."""
    user, groups, method = identity.user, list(identity.groups), identity.method.value
    return {"user": user, "groups": groups, "method": method, "expires_s": identity.expires_s, "proof": identity.proof}


def _identity_of(record: dict[str, Any]) -> Identity:
    return Identity(**{**record, "groups": tuple(record["groups"]), "method": Method(record["method"])})


class Logins:
    """The logins of a server, and what guards them.

    Args:
        sessions: the sessions of the server.
        secret: that the workers of the server have in common; empty for a process alone.

    Attributes:
        nonces, seeds: what clients hash their passwords with.
        throttle, tracker: limits to guessing, the usual one and the strict one of authenticators with `tracker`.
    """

    def __init__(self, sessions: RequestSessions | None = None, secret: bytes = b"") -> None:
        self.sessions = RequestSessions() if sessions is None else sessions  # an empty one is false
        self.sessions.ended.append(self._forget)
        alone = self.sessions.alone
        self.nonces = Nonces(time, _key(secret, b"nonces"), alone)
        self.seeds = Seeds(time, _key(secret, b"seeds"), alone)
        self.throttle = Throttle(monotonic, NAME_LIMIT, ADDRESS_LIMIT, ANYWHERE_LIMIT)
        self.tracker = Throttle(monotonic, TRACKER_NAME_LIMIT, TRACKER_ADDRESS_LIMIT)
        self._by_name: dict[str, list[Login]] = {}
        self._share()

    def _share(self) -> None:
        """Let other workers of the server know what this one does, and learn what they do."""
        self.sessions.on_login = self._arrived
        share = self.sessions.share_notes
        self.nonces.kept.tell = share(b"n", NONCE_LIFETIME_S, self.nonces.kept.arrived)
        self.seeds.kept.tell = share(b"d", SEED_LIFETIME_S, self.seeds.kept.arrived)
        for kind, throttle in ((b"f", self.throttle), (b"t", self.tracker)):
            throttle.tell = share(kind, _NOTE_S, throttle.arrived)

    def _arrived(self, session: HttpSession, record: dict[str, Any] | None) -> None:
        self._forget(session)
        if record is not None:
            self._add(Login.of_record(record, session))

    def of(self, request: Request) -> Login | None:
        """Return the login of a request; None when it has none, also when its cookie comes from another address."""
        login: Login | None = request.env.get(_LOGIN)
        if login is not None and login.session.login is login:
            return login
        session = self.sessions.of(request)
        login = session.login if session is not None else None
        return login if login is not None and login.peer == str(request.peer[0]) else None

    def users(self) -> list[str]:
        """Return the names of those who are logged in."""
        self.sessions.catch_up()
        return sorted(self._by_name)

    def sessions_of(self, name: str) -> list[HttpSession]:
        """Return the sessions of a user, the oldest first."""
        self.sessions.catch_up()
        return [login.session for login in self._by_name.get(name, ())]

    def begin(
        self,
        request: Request,
        name: str | None,
        password: str | None = None,
        kind: str = PROGRAM,
        maxusers: int = 1,
        recycle: bool = True,
        inactive_s: int | None = None,
        identity: Identity | None = None,
    ) -> Login | None:
        """Log the client of a request in, whose response has not begun. The session that it has keeps its attributes
        and gets another id; that of somebody else ends.

        Args:
            name: None for an anonymous login, of which there may be any number.
            password: for `Login.password`.
            kind: for `Login.kind`.
            maxusers: sessions that the name may have.
            recycle: end the oldest of them for this one.
            inactive_s: seconds without a request after which the login ends; None for the usual.
            identity: of a user of the server's users file.

        Returns:
            None when the name has as many sessions as it may.
        """
        peer = str(request.peer[0])
        login = self._same(request, name, kind, peer) if name else None
        if login is None:
            with self.sessions.alone():
                if name and not self._make_room(request, name, maxusers, recycle):
                    return None
                login = self._new(request, name, kind, peer)
                self._complete(login, password, inactive_s, identity)
        else:
            self._complete(login, password, inactive_s, identity)
        request.env[_LOGIN] = login
        return login

    def _complete(self, login: Login, password: str | None, inactive_s: int | None, identity: Identity | None) -> None:
        login.password, login.identity = password, identity
        self.sessions.save_login(login.session)
        if inactive_s is not None:
            login.session.max_inactive_s = inactive_s
            self.sessions.save(login.session)

    def end(self, request: Request, everywhere: bool = False) -> bool:
        """Log the client of a request out and end its session, with or without a login.

        Args:
            everywhere: end all sessions of the user.

        Returns:
            whether somebody was logged in.
        """
        login, session = self.of(request), self.sessions.of(request)
        nonce = request.env.pop(_NONCE, None)
        if nonce is not None:
            self.nonces.end(nonce)
        if login is not None:
            everyone = everywhere and not login.is_nameless
            for one in self.sessions_of(login.name) if everyone else [login.session]:
                self.sessions.terminate(one)
        if session is not None and session.login is None:
            self.sessions.terminate(session)
        return login is not None

    def look_again(self, still: Callable[[Identity], str | None]) -> None:
        """End the logins of those who may not stay, after the server's users have changed.

        Args:
            still: why somebody may not stay, None when he may.
        """
        for login in [login for logins in self._by_name.values() for login in logins]:
            if login.identity is not None and still(login.identity) is not None:
                self.sessions.terminate(login.session)

    def note_nonce(self, request: Request, nonce: str) -> None:
        """Keep the nonce that a request logged in with, for its logout."""
        request.env[_NONCE] = nonce

    def noted_nonce(self, request: Request) -> str | None:
        """Return what `note_nonce` kept."""
        nonce: str | None = request.env.get(_NONCE)
        return nonce

    def _same(self, request: Request, name: str, kind: str, peer: str) -> Login | None:
        """Return a login that this one continues: each request of Basic and Digest is one, with or without a cookie."""
        if kind not in (BASIC, DIGEST):
            return None
        session = self.sessions.of(request)
        logins = [session.login] if session is not None and session.login else self._by_name.get(name, [])
        for login in logins:
            if (login.name, login.kind, login.peer) == (name, kind, peer):
                self.sessions.adopt(request, login.session)
                self.sessions.touch_now_and_then(login.session)
                return login
        return None

    def _make_room(self, request: Request, name: str, maxusers: int, recycle: bool) -> bool:
        own = self._own(request)
        others = [session for session in self.sessions_of(name) if session is not own]
        if len(others) >= maxusers and not recycle:
            return False
        for session in others[: max(0, len(others) - maxusers + 1)]:
            self.sessions.terminate(session)
        return True

    def _own(self, request: Request) -> HttpSession | None:
        """Return the session of a request, unless it is from another address: then the cookie may be stolen."""
        session = self.sessions.of(request)
        return session if session is not None and session.peer == str(request.peer[0]) else None

    def _new(self, request: Request, name: str | None, kind: str, peer: str) -> Login:
        session = self._own(request)
        before = session.login if session is not None else None
        if session is not None and before is not None and not before.is_nameless and before.name != name:
            self.sessions.terminate(session)  # another user begins with nothing of the last one
            session = None
        if session is None:
            session = self.sessions.begin(request)
        else:
            self._forget(session)
            self.sessions.change_id(request)
        return self._add(Login(name or ANONYMOUS, None, kind, peer, session, not name))

    def _add(self, login: Login) -> Login:
        login.session.login = login
        if not login.is_nameless:
            self._by_name.setdefault(login.name, []).append(login)
        return login

    def _forget(self, session: HttpSession) -> None:
        login, session.login = session.login, None
        if login is None or login.is_nameless:
            return
        logins = self._by_name[login.name]
        logins.remove(login)
        if not logins:
            del self._by_name[login.name]


def _key(secret: bytes, use: bytes) -> bytes | None:
    return digest(secret, use, "sha256") if secret else None

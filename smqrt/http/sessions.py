"""Sessions of browsers, known by a cookie (spec: bas-api §5, runtime §8). No clock, no timer: the owner brings both."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import time
from typing import TYPE_CHECKING, Any

from gevent import get_hub

from smqrt.http.headers import cookie_of
from smqrt.loop import greenlet_pool
from smqrt.loop.scheduling import Turn
from smqrt.settings.limit_register import Limit

if TYPE_CHECKING:
    from smqrt.http.message import Request


COOKIE = "smqrt_session"
MAX_INACTIVE_S = 20 * 60
MAX_SESSIONS = 10_000  # a page that makes one for each visitor must not fill the memory: the least recently used goes
MAX_PER_ADDRESS = 1000  # nor may one visitor drive out the sessions of all others
TellOthers = Callable[[bytes, bytes], object]
"""Tells other workers a note: its name, and what it says."""
Arrived = Callable[[bytes, bytes], object]
"""Called with a note of another worker."""


@dataclass(slots=True, eq=False)
class HttpSession:
    """A session: `session["name"]` is what an application keeps in it, as with a dict.

    Attributes:
        id: 24 characters that nobody guesses; the cookie's value.
        number: by which the server's own code knows it.
        peer: the client's IP address when it was made.
        created_s, accessed_s: times of the owner's clock.
        max_inactive_s: it ends when it was not used for so long.
        uses: how many requests have found it.
        locks: how many hold it; it does not expire meanwhile.
        attributes: what applications in Python keep in it.
        login: who is logged in, see `smqrt.http.logins`.
    """

    id: str
    number: int
    peer: str
    created_s: float
    accessed_s: float
    max_inactive_s: float = MAX_INACTIVE_S
    uses: int = 0
    locks: int = 0
    attributes: dict[str, Any] = field(default_factory=dict)
    login: Any = None

    def __getitem__(self, name: str) -> Any:
        return self.attributes[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.attributes[name] = value

    def __delitem__(self, name: str) -> None:
        del self.attributes[name]

    def __contains__(self, name: object) -> bool:
        return name in self.attributes

    def get(self, name: str, default: Any = None) -> Any:
        """Return what is kept under this name."""
        return self.attributes.get(name, default)

    def pop(self, name: str, default: Any = None) -> Any:
        """Return what is kept under this name, and forget it."""
        return self.attributes.pop(name, default)

    def setdefault(self, name: str, value: Any) -> Any:
        """Return what is kept under this name, after keeping `value` when that was nothing."""
        return self.attributes.setdefault(name, value)

    def expired(self, now_s: float) -> bool:
        """Return whether it was unused for too long."""
        return not self.locks and now_s - self.accessed_s > self.max_inactive_s


SESSIONS_PER_ADDRESS = Limit(
    "sessions_per_address", "sessions_per_address", "an address has as many HTTP sessions as it may"
)
SESSIONS = Limit("sessions", "", "there are as many HTTP sessions as there may be")


class HttpSessions:
    """All sessions of a server, in the order of their last use.

    Args:
        now: gives the time in seconds.
        on_end: called with each session that ended, by `terminate`, by time, or to make room.
        per_address: how many one IP address may have; beyond, the one it used least recently ends.
        most: how many there may be; beyond, the least recently used ends.

    Attributes:
        on_login: called when another worker has changed who is logged in with a session; with `Login.record`, or None
            for nobody.
    """

    def __init__(
        self,
        now: Callable[[], float],
        on_end: Callable[[HttpSession], None],
        per_address: int = MAX_PER_ADDRESS,
        most: int = MAX_SESSIONS,
    ) -> None:
        self._now = now
        self._on_end = on_end
        self._per_address, self._most = per_address, most
        self.on_login: Callable[[HttpSession, Any], object] = lambda session, record: None
        self._by_peer: dict[str, dict[str, HttpSession]] = {}
        self._next_number = itertools.count(self._first_number()).__next__
        self._by_id: dict[str, HttpSession] = {}
        self._by_number: dict[int, HttpSession] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def create(self, peer: str) -> HttpSession:
        """Make a session for the client with this IP address."""
        if len(self._by_peer.get(peer, ())) >= self._per_address:
            rule = f"{peer} has {self._per_address} sessions already, and the one it used least recently ends"
            self._displace(self._by_peer[peer], SESSIONS_PER_ADDRESS, rule)
        if len(self._by_id) >= self._most:
            rule = f"there are {self._most} sessions already, and the one used least recently ends"
            self._displace(self._by_id, SESSIONS, rule)
        now_s = self._now()
        session = self._made(_new_id(), self._next_number(), peer, now_s)
        self._add(session)
        return session

    def _first_number(self) -> int:
        return 1

    def _made(self, session_id: str, number: int, peer: str, now_s: float) -> HttpSession:
        return HttpSession(session_id, number, peer, now_s, now_s)

    def _add(self, session: HttpSession) -> None:
        self._by_number[session.number] = session
        self._by_id[session.id] = self._by_peer.setdefault(session.peer, {})[session.id] = session

    def _displace(self, sessions: dict[str, HttpSession], limit: Limit, rule: str) -> None:
        limit.refused("one more HTTP session", rule)
        self.terminate(self._oldest(sessions))

    def _oldest(self, sessions: dict[str, HttpSession]) -> HttpSession:
        """The one that was used least recently."""
        return next(iter(sessions.values()))

    def find(self, session_id: str) -> HttpSession | None:
        """Return the session with this id and note that it was used; None when there is none (any more)."""
        session = self._alive(self._by_id.get(session_id))
        if session is not None:
            session.uses += 1
            self.touch(session)
        return session

    def by_number(self, number: int) -> HttpSession | None:
        """Return the session with this number; None when there is none (any more)."""
        return self._alive(self._by_number.get(number))

    def numbers(self) -> list[int]:
        """Return the numbers of all sessions."""
        return sorted(self._by_number)

    def touch(self, session: HttpSession) -> None:
        """Note that `session` was used."""
        session.accessed_s = self._now()
        self._move_to_end(session)

    def _move_to_end(self, session: HttpSession) -> None:
        if self._by_id.pop(session.id, None) is not None:
            self._by_id[session.id] = session
            of_peer = self._by_peer[session.peer]
            of_peer[session.id] = of_peer.pop(session.id)

    def touch_now_and_then(self, session: HttpSession) -> None:
        """The same for a session that may be used a thousand times a second: noted once a second."""
        if not 0 <= self._now() - session.accessed_s < 1:
            self.touch(session)

    def renew(self, session: HttpSession) -> None:
        """Return a session that has not ended another id."""
        self._rename(session, _new_id())

    def _rename(self, session: HttpSession, session_id: str) -> None:
        of_peer = self._by_peer[session.peer]
        del self._by_id[session.id], of_peer[session.id]
        session.id = session_id
        self._by_id[session.id] = of_peer[session.id] = session

    def hold(self, session: HttpSession, change: int) -> None:
        """Let one more hold a session (1), or one less (-1)."""
        session.locks = max(0, session.locks + change)

    def terminate(self, session: HttpSession) -> bool:
        """End a session; return whether it was there."""
        return self._remove(session)

    def _remove(self, session: HttpSession) -> bool:
        if self._by_id.pop(session.id, None) is None:
            return False
        del self._by_number[session.number]
        of_peer = self._by_peer[session.peer]
        del of_peer[session.id]
        if not of_peer:
            del self._by_peer[session.peer]
        self._on_end(session)
        return True

    def expire(self, breathe: Callable[[], object] = bool) -> None:
        """End what was unused for too long; `yield_if_due` is called after each."""
        now_s = self._now()
        for session in [session for session in self._by_id.values() if session.expired(now_s)]:
            if session.expired(now_s):  # it may have been used meanwhile
                self.terminate(session)
                breathe()

    # What the workers of a server have to tell one another; a process alone has nothing to tell.

    def catch_up(self) -> None:
        """Learn what other workers of this server have done."""

    def save(self, session: HttpSession) -> None:
        """Let other workers know what an application keeps in a session, and how long it lives."""

    def save_login(self, session: HttpSession) -> None:
        """Let other workers know who is logged in with a session."""

    def alone(self) -> AbstractContextManager[bool]:
        """Keep other workers from changing anything meanwhile; nothing inside may switch greenlets.

        Returns:
            whether that could be done.
        """
        return nullcontext(True)

    def share_notes(self, kind: bytes, keep_s: float, arrived: Arrived) -> TellOthers:
        """Share what belongs to no session.

        Args:
            kind: one byte, the notes' own.
            keep_s: how long a note is of use.
            arrived: called with each note of another worker.

        Returns:
            what tells the others a note.
        """
        return lambda name, data: None

    def close(self) -> None:
        """Called when the server ends."""

    def _alive(self, session: HttpSession | None) -> HttpSession | None:
        if session is not None and session.expired(self._now()):
            self.terminate(session)
            return None
        return session


def _new_id() -> str:
    return secrets.token_urlsafe(18)


def cookie_field(session: HttpSession, secure: bool) -> str:
    """Return the value of the Set-Cookie field that tells the browser its session."""
    return f"{COOKIE}={session.id}; Path=/; HttpOnly; SameSite=Lax" + ("; Secure" if secure else "")


# ---- The sessions of a server's requests: found by their cookie, begun for a visitor, ended by a timer when unused.

EXPIRE_EVERY_S = 5.0
_KEY = "session"  # in Request.env


class RequestSessions(HttpSessions):
    """The sessions of a server.

    Args:
        per_address, most: see `HttpSessions`.

    Attributes:
        ended: functions that are called with each session that ended; they must not block.
    """

    def __init__(self, per_address: int = MAX_PER_ADDRESS, most: int = MAX_SESSIONS) -> None:
        super().__init__(time, self._tell, per_address, most)
        self.ended: list[Callable[[HttpSession], object]] = []
        self._timer: Any = None
        self._watching = False

    def of(self, request: Request) -> HttpSession | None:
        """Return the session of a request, None when it has none."""
        session: HttpSession | None = request.env.get(_KEY)
        if session is None or self.by_number(session.number) is not session:
            fields = request.get("cookie")
            session = self.find(cookie_of(fields, COOKIE) or "") if fields else None
            request.env[_KEY] = session
        return session

    def begin(self, request: Request) -> HttpSession:
        """Make a session for the client of a request whose response has not begun, and set its cookie."""
        session = self.create(str(request.peer[0]))
        self.adopt(request, session)
        _set_cookie(request, session)
        self._watch()
        return session

    def change_id(self, request: Request) -> None:
        """Return the request's session another id and cookie: who knew the old one knows nothing any more."""
        session = self.of(request)
        if session is not None:
            self.renew(session)
            _set_cookie(request, session)

    def adopt(self, request: Request, session: HttpSession) -> None:
        """Let `session` be the request's."""
        request.env[_KEY] = session

    def _tell(self, session: HttpSession) -> None:
        for function in self.ended:
            function(session)

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = get_hub().loop.timer(EXPIRE_EVERY_S, EXPIRE_EVERY_S, ref=False)
        if not self._watching:
            self._watching = True
            self._timer.again(greenlet_pool.start, self._expire)

    def _expire(self) -> None:
        """In a worker: functions of applications are started for each session that ends, and that takes time."""
        self._timer.stop()
        try:
            self.expire(Turn().yield_if_due)
        finally:
            self._watching = bool(self)
            if self._watching:  # not `start`: a timer of libev that has fired fires again at once
                self._timer.again(greenlet_pool.start, self._expire)


def _set_cookie(request: Request, session: HttpSession) -> None:
    request.response.headers.set_cookie(COOKIE, cookie_field(session, request.secure))

"""HTTP sessions of browsers (spec: bas-api §5)."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import time
from typing import Any, Protocol

from gevent import get_hub

from smqrt.http.headers import cookie_of
from smqrt.http.response import Response
from smqrt.loop import greenlets
from smqrt.loop.scheduling import Turn
from smqrt.settings.limits import Limit

COOKIE = "smqrt_session"
MAX_INACTIVE_S = 20 * 60
MAX_SESSIONS = 10_000  # bounds the memory if a page creates a session for each client
MAX_PER_ADDRESS = 1000  # so that one client cannot evict the sessions of all other clients
_ALONE = nullcontext(True)  # shared: it has no state
Note = Callable[[bytes, bytes], object]
"""Sends a note to other workers, or receives one. The arguments are its name and its data."""


@dataclass(slots=True, eq=False)
class HttpSession:
    """A session; `session["name"]` is a value that an application stores, as in a dict.

    Attributes:
        id: 24 random characters, the value of the cookie.
        number: number of the session inside the server, which is not secret.
        peer: IP address of the client when the session was created.
        created_s, accessed_s: times of the clock of `HttpSessions`.
        max_inactive_s: time without a request after which the session expires.
        uses: number of requests with this session.
        locks: number of locks; a locked session does not expire.
        attributes: values that Python applications store.
        login: the login, see `smqrt.http.logins`.
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
        """Return the value of a name, or `default`."""
        return self.attributes.get(name, default)

    def pop(self, name: str, default: Any = None) -> Any:
        """Remove the value of a name and return it, or `default`."""
        return self.attributes.pop(name, default)

    def setdefault(self, name: str, value: Any) -> Any:
        """Return the value of a name. A missing one is set to `value` first."""
        return self.attributes.setdefault(name, value)

    def expired(self, now_s: float) -> bool:
        """Return whether the session was unused for longer than `max_inactive_s`."""
        return not self.locks and now_s - self.accessed_s > self.max_inactive_s


class SessionRequest(Protocol):
    """The parts of `smqrt.http.message.Request` that sessions and logins use."""

    env: dict[str, Any]
    peer: tuple[str, int]
    response: Response
    secure: bool

    def get(self, name: str) -> str | None:
        """Return a header field, or None without it."""


SESSIONS_PER_ADDRESS = Limit("sessions_per_address", "sessions_per_address", "HTTP sessions of one address")
SESSIONS = Limit("sessions", "", "HTTP sessions")


class HttpSessions:
    """All sessions of a server, ordered by their last use. The owner calls `expire`.

    Args:
        now: returns the time in seconds.
        on_end: called with each session that ended: terminated, expired or evicted.
        per_address: limit for one IP address; beyond it, the address's least recently used session ends.
        max_sessions: limit for all; beyond it, the least recently used session ends.

    Attributes:
        on_login: called when another worker has changed the login of a session; with `Login.record`, or None after a
            logout.
    """

    def __init__(
        self,
        now: Callable[[], float],
        on_end: Callable[[HttpSession], None],
        per_address: int = MAX_PER_ADDRESS,
        max_sessions: int = MAX_SESSIONS,
    ) -> None:
        self._now = now
        self._on_end = on_end
        self._per_address, self._max_sessions = per_address, max_sessions
        self.on_login: Callable[[HttpSession, Any], object] = lambda session, record: None
        self._by_peer: dict[str, dict[str, HttpSession]] = {}
        self._next_number = itertools.count(self._first_number()).__next__
        self._by_id: dict[str, HttpSession] = {}  # ordered by last use, see `_move_to_end`
        self._by_number: dict[int, HttpSession] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def create(self, peer: str) -> HttpSession:
        """Create a session for the client with this IP address."""
        if len(self._by_peer.get(peer, ())) >= self._per_address:
            rule = f"limit reached: sessions_per_address ({self._per_address}) for {peer}"
            self._evict(self._by_peer[peer], SESSIONS_PER_ADDRESS, rule)
        if len(self._by_id) >= self._max_sessions:
            self._evict(self._by_id, SESSIONS, f"limit reached: sessions ({self._max_sessions})")
        session = self._new_session(_new_id(), self._next_number(), peer, self._now())
        self._add(session)
        return session

    def _first_number(self) -> int:
        return 1

    def _new_session(self, session_id: str, number: int, peer: str, now_s: float) -> HttpSession:
        return HttpSession(session_id, number, peer, now_s, now_s)

    def _add(self, session: HttpSession) -> None:
        self._by_number[session.number] = session
        self._by_id[session.id] = self._by_peer.setdefault(session.peer, {})[session.id] = session

    def _evict(self, sessions: dict[str, HttpSession], limit: Limit, rule: str) -> None:
        limit.refused("a further HTTP session", f"{rule}; the least recently used one ends")
        self.terminate(self._oldest(sessions))

    def _oldest(self, sessions: dict[str, HttpSession]) -> HttpSession:
        """Return the session that was used least recently."""
        return next(iter(sessions.values()))

    def find(self, session_id: str) -> HttpSession | None:
        """Return the session with this id and record its use; None if it does not exist or has ended."""
        session = self._unless_expired(self._by_id.get(session_id))
        if session is not None:
            session.uses += 1
            self.touch(session)
        return session

    def by_number(self, number: int) -> HttpSession | None:
        """Return the session with this number; None if it does not exist or has ended."""
        return self._unless_expired(self._by_number.get(number))

    def numbers(self) -> list[int]:
        """Return the numbers of all sessions."""
        return sorted(self._by_number)

    def touch(self, session: HttpSession) -> None:
        """Record the use of a session."""
        session.accessed_s = self._now()
        self._move_to_end(session)

    def _move_to_end(self, session: HttpSession) -> None:
        if self._by_id.pop(session.id, None) is not None:
            self._by_id[session.id] = session
            of_peer = self._by_peer[session.peer]
            of_peer[session.id] = of_peer.pop(session.id)

    def touch_each_second(self, session: HttpSession) -> None:
        """Record the use of a session at most once a second, for sessions with many requests."""
        if not 0 <= self._now() - session.accessed_s < 1:
            self.touch(session)

    def renew(self, session: HttpSession) -> None:
        """Change the id of a session that has not ended."""
        self._rename(session, _new_id())

    def _rename(self, session: HttpSession, session_id: str) -> None:
        of_peer = self._by_peer[session.peer]
        del self._by_id[session.id], of_peer[session.id]
        session.id = session_id
        self._by_id[session.id] = of_peer[session.id] = session

    def change_locks(self, session: HttpSession, change: int) -> None:
        """Add a lock to a session (1), or remove one (-1)."""
        session.locks = max(0, session.locks + change)

    def terminate(self, session: HttpSession) -> bool:
        """End a session; return whether it existed."""
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

    def expire(self, yield_turn: Callable[[], object] = lambda: None) -> None:
        """End expired sessions; `yield_turn` is called after each."""
        now_s = self._now()
        for session in [session for session in self._by_id.values() if session.expired(now_s)]:
            if session.expired(now_s):  # `yield_turn` runs other greenlets, which may have used it
                self.terminate(session)
                yield_turn()

    # Hooks for sessions that several workers share. A single process needs none.

    def catch_up(self) -> None:
        """Apply the changes of other workers."""

    def save(self, session: HttpSession) -> None:
        """Send the values that applications store in a session, and its `max_inactive_s`, to other workers."""

    def save_login(self, session: HttpSession) -> None:
        """Send the login of a session to other workers."""

    def alone(self) -> AbstractContextManager[bool]:
        """Exclude other workers inside a `with` block, which must not switch greenlets.

        Returns:
            the context; its value is whether the lock was obtained.
        """
        return _ALONE

    def share_notes(self, kind: bytes, keep_s: float, arrived: Note) -> Note | None:
        """Share notes that are not part of a session.

        Args:
            kind: one byte that identifies this kind of notes.
            keep_s: how long a note is valid.
            arrived: receives each note of another worker.

        Returns:
            the function that sends a note to the other workers; None without other workers.
        """
        return None

    def close(self) -> None:
        """Release the resources at shutdown."""

    def _unless_expired(self, session: HttpSession | None) -> HttpSession | None:
        """Return the session, or None and end it if it has expired."""
        if session is not None and session.expired(self._now()):
            self.terminate(session)
            return None
        return session


def _new_id() -> str:
    return secrets.token_urlsafe(18)


def cookie_field(session: HttpSession, secure: bool) -> str:
    """Return the value of the Set-Cookie field of a session."""
    return f"{COOKIE}={session.id}; Path=/; HttpOnly; SameSite=Lax" + ("; Secure" if secure else "")


# ---- Sessions of requests: lookup and expiry

EXPIRE_EVERY_S = 5.0
_SESSION = "session"  # in Request.env


class RequestSessions(HttpSessions):
    """The sessions of a server, found by the cookies of requests.

    Args:
        per_address, max_sessions: see `HttpSessions`.

    Attributes:
        ended: functions that are called with each session that ended; they must not block.
    """

    def __init__(self, per_address: int = MAX_PER_ADDRESS, max_sessions: int = MAX_SESSIONS) -> None:
        super().__init__(time, self._call_ended, per_address, max_sessions)
        self.ended: list[Callable[[HttpSession], object]] = []
        self._timer: Any = None
        self._is_timer_active = False

    def of(self, request: SessionRequest) -> HttpSession | None:
        """Return the session of a request, or None."""
        session: HttpSession | None = request.env.get(_SESSION)
        if session is None or self.by_number(session.number) is not session:
            fields = request.get("cookie")
            session = self.find(cookie_of(fields, COOKIE) or "") if fields else None
            request.env[_SESSION] = session
        return session

    def begin(self, request: SessionRequest) -> HttpSession:
        """Create a session for the client of a request, and set its cookie. The response must not have begun."""
        session = self.create(str(request.peer[0]))
        self.adopt(request, session)
        _set_cookie(request, session)
        self._start_timer()
        return session

    def change_id(self, request: SessionRequest) -> None:
        """Change the id and the cookie of a request's session. This invalidates the old id."""
        session = self.of(request)
        if session is not None:
            self.renew(session)
            _set_cookie(request, session)

    def adopt(self, request: SessionRequest, session: HttpSession) -> None:
        """Set the session of a request."""
        request.env[_SESSION] = session

    def _call_ended(self, session: HttpSession) -> None:
        for function in self.ended:
            function(session)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = get_hub().loop.timer(EXPIRE_EVERY_S, EXPIRE_EVERY_S, ref=False)
        if not self._is_timer_active:
            self._is_timer_active = True
            self._timer.again(greenlets.start, self._expire)

    def _expire(self) -> None:
        """End expired sessions; runs in a pooled greenlet, because functions of applications may take time."""
        self._timer.stop()
        try:
            self.expire(Turn().yield_if_due)
        finally:
            self._is_timer_active = bool(self)
            if self._is_timer_active:  # not `start`: a libev timer that has fired would fire again at once
                self._timer.again(greenlets.start, self._expire)


def _set_cookie(request: SessionRequest, session: HttpSession) -> None:
    request.response.headers.set_cookie(COOKIE, cookie_field(session, request.secure))

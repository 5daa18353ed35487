"""HTTP sessions of browsers, in one or several workers (spec: bas-api §5)."""

from __future__ import annotations

import itertools
import json
import marshal
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from time import monotonic, time
from typing import Any, Protocol, cast

from gevent import get_hub

from smqrt.http.headers import cookie_of
from smqrt.http.response import Response
from smqrt.loop import greenlets
from smqrt.loop.scheduling import Turn
from smqrt.settings.limits import Limit, LineLimit
from smqrt.workers.shared_rows import MAX_WRITTEN, Row, SharedRows
from smqrt.workers.worker_rpc import WorkerPlace

COOKIE = "smqrt_session"
MAX_INACTIVE_S = 20 * 60
MAX_SESSIONS = 10_000  # bounds the memory if a page creates one for each visitor; the least recently used one ends
MAX_PER_ADDRESS = 1000  # so that one visitor cannot displace the sessions of all others
Note = Callable[[bytes, bytes], object]
"""Sends a note to other workers, or receives one: called with its name and its data."""


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
        attributes: values of applications in Python.
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
        on_end: called with each session that ended: terminated, expired or displaced.
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
        self._by_id: dict[str, HttpSession] = {}
        self._by_number: dict[int, HttpSession] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def create(self, peer: str) -> HttpSession:
        """Create a session for the client with this IP address."""
        if len(self._by_peer.get(peer, ())) >= self._per_address:
            rule = f"limit reached: sessions_per_address ({self._per_address}) for {peer}"
            self._displace(self._by_peer[peer], SESSIONS_PER_ADDRESS, rule)
        if len(self._by_id) >= self._max_sessions:
            self._displace(self._by_id, SESSIONS, f"limit reached: sessions ({self._max_sessions})")
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

    def _displace(self, sessions: dict[str, HttpSession], limit: Limit, rule: str) -> None:
        limit.refused("a further HTTP session", f"{rule}; the least recently used one ends")
        self.terminate(self._oldest(sessions))

    def _oldest(self, sessions: dict[str, HttpSession]) -> HttpSession:
        """Return the session that was used least recently."""
        return next(iter(sessions.values()))

    def find(self, session_id: str) -> HttpSession | None:
        """Return the session with this id and note its use; None if it does not exist or has ended."""
        session = self._alive(self._by_id.get(session_id))
        if session is not None:
            session.uses += 1
            self.touch(session)
        return session

    def by_number(self, number: int) -> HttpSession | None:
        """Return the session with this number; None if it does not exist or has ended."""
        return self._alive(self._by_number.get(number))

    def numbers(self) -> list[int]:
        """Return the numbers of all sessions."""
        return sorted(self._by_number)

    def touch(self, session: HttpSession) -> None:
        """Note the use of a session."""
        session.accessed_s = self._now()
        self._move_to_end(session)

    def _move_to_end(self, session: HttpSession) -> None:
        if self._by_id.pop(session.id, None) is not None:
            self._by_id[session.id] = session
            of_peer = self._by_peer[session.peer]
            of_peer[session.id] = of_peer.pop(session.id)

    def touch_each_second(self, session: HttpSession) -> None:
        """Note the use of a session at most once a second, for sessions with many requests."""
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

    def hold(self, session: HttpSession, change: int) -> None:
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

    def expire(self, yield_turn: Callable[[], object] = bool) -> None:
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
        """Send a session's values of applications and its `max_inactive_s` to other workers."""

    def save_login(self, session: HttpSession) -> None:
        """Send the login of a session to other workers."""

    def alone(self) -> AbstractContextManager[bool]:
        """Lock out other workers inside a `with` block, which must not switch greenlets.

        Returns:
            the context; its value is whether the lock was obtained.
        """
        return nullcontext(True)

    def share_notes(self, kind: bytes, keep_s: float, arrived: Note) -> Note:
        """Share notes that belong to no session.

        Args:
            kind: one byte that identifies this kind of notes.
            keep_s: how long a note is valid.
            arrived: receives each note of another worker.

        Returns:
            the function that sends a note to the other workers.
        """
        return lambda name, data: None

    def close(self) -> None:
        """Release the resources at shutdown."""

    def _alive(self, session: HttpSession | None) -> HttpSession | None:
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
        """Change the id and the cookie of a request's session, so that the old id becomes useless."""
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
        """End expired sessions, in a pooled greenlet: functions of applications for ended sessions take time."""
        self._timer.stop()
        try:
            self.expire(Turn().yield_if_due)
        finally:
            self._is_timer_active = bool(self)
            if self._is_timer_active:  # not `start`: a libev timer that has fired would fire again at once
                self._timer.again(greenlets.start, self._expire)


def _set_cookie(request: SessionRequest, session: HttpSession) -> None:
    request.response.headers.set_cookie(COOKIE, cookie_field(session, request.secure))


# ---- Sessions shared by workers
#
# Each worker has all sessions in memory. The other workers receive the changes of a session before the response is sent
# (help: workers, decision 0033).

HEAD = b"s"
"""The kind of row that exists as long as its session: first id, address of the client, time of creation."""
_ID, _INACTIVE, _LOGIN, _USES = b"i", b"m", b"g", b"u"
_PYTHON = b"p"
LUA = b"l"
"""The kind of rows with attributes of applications in Lua; the first byte of a row's name is its kind."""
TICK_S = 1.0
"""Interval of sending the uses of sessions, and changes outside of requests."""
SLACK_S = 2 * TICK_S
"""Sessions expire later by this time, because the note of a use at another worker may arrive that late."""
LOCK_S = 5 * TICK_S  # validity of another worker's lock, which that worker renews with each tick
MAX_VALUE_BYTES = 256 << 10
_PURGE_TICKS = 10
_MAX_COMPARED = 100
_BATCHES, _TICK_BATCHES, _FIRST_BATCHES = 4, 500, 10_000  # of other workers' rows, read per call
_FRESH_S = 0.005
_MAX_DEPTH = 20
_NUMBERS_PER_WORKER = 1_000_000_000  # session numbers
_use = struct.Struct(">dI?")  # last use of a session, number of uses in that worker, whether that worker has a lock
_scalars = (str, int, float, bool, bytes, type(None))
_lines = LineLimit()


class SharedSession(HttpSession):
    """A session shared with other workers.

    Attributes:
        known: its rows that all workers have, by name.
        changes: number of changes of Lua attributes by other workers.
        locked_s: time of another worker's last note of a lock.
        own_uses: part of `uses` in this worker.
        has_rows: whether other workers may have rows of Python attributes or of `max_inactive_s`.
        changed: called when an attribute is set or read.
    """

    def __init__(self, session_id: str, number: int, peer: str, created_s: float, changed: Callable[[Any], object]):
        super().__init__(session_id, number, peer, created_s, created_s)
        self.known: dict[bytes, bytes] = {}
        self.changes = self.own_uses = 0
        self.locked_s = 0.0
        self.has_rows = False
        self.changed = changed

    def __getitem__(self, name: str) -> Any:
        self.changed(self)  # the value may be a list, which the caller can change
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """See `HttpSession.get`."""
        self.changed(self)
        return super().get(name, default)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self.changed(self)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self.changed(self)

    def pop(self, name: str, default: Any = None) -> Any:
        """See `HttpSession.pop`."""
        self.changed(self)
        return super().pop(name, default)

    def setdefault(self, name: str, value: Any) -> Any:
        """See `HttpSession.setdefault`."""
        self.changed(self)
        return super().setdefault(name, value)

    def expired(self, now_s: float) -> bool:
        """See `HttpSession.expired`."""
        return now_s - self.locked_s > LOCK_S and super().expired(now_s - SLACK_S)


class SharedSessions(RequestSessions):
    """The sessions of a server with several workers, in one of them.

    Args:
        rows: the table that the workers share.
        per_address, max_sessions: see `HttpSessions`; limits for all workers together.

    Attributes:
        ticked: functions that are called every `TICK_S`; they must not block.
    """

    def __init__(self, rows: SharedRows, per_address: int, max_sessions: int) -> None:
        self._rows = rows
        super().__init__(per_address, max_sessions)
        self.ticked: list[Callable[[], object]] = []
        self._note_receivers: dict[bytes, Note] = {}
        self._changed: set[SharedSession] = set()
        self._locked: set[SharedSession] = set()
        self._is_loaded = self._is_catching_up = False
        self._ticks = 0
        self._caught_up_s = -_FRESH_S
        self._ticker = get_hub().loop.timer(TICK_S, TICK_S, ref=False)
        self._ticker.start(greenlets.start, self._tick)

    # ---- changes from other workers

    def catch_up(self) -> None:
        """See `HttpSessions.catch_up`. The first call loads all sessions."""
        if self._is_catching_up:
            return
        self._is_catching_up = True
        try:
            for _ in range(_BATCHES if self._is_loaded else _FIRST_BATCHES):
                living = self._rows.living_if_missed()
                if living is not None:
                    for session in [one for number, one in self._by_number.items() if number not in living]:
                        self._remove(session)
                for row in self._rows.changes():
                    self._apply(row)
                if self._rows.is_complete:
                    break
            self._is_loaded = True
        finally:
            self._is_catching_up = False
            self._caught_up_s = monotonic()

    def _apply(self, row: Row) -> None:
        kind, rest, data = row.name[:1], row.name[1:], row.data
        session = cast("SharedSession | None", self._by_number.get(row.owner))
        if row.owner == 0:
            if data is not None and kind in self._note_receivers:
                self._note_receivers[kind](rest, data)
        elif kind == HEAD and data is None:
            if session is not None:
                self._remove(session)
        elif kind == HEAD and data is not None:
            if session is None:
                session_id, peer, created_s = json.loads(data)
                self._add(self._new_session(session_id, row.owner, peer, created_s))
                self._start_timer()
        elif session is not None:
            self._apply_to_session(session, kind, row.name, data)

    def _apply_to_session(self, session: SharedSession, kind: bytes, name: bytes, data: bytes | None) -> None:
        if kind == _ID and data:
            self._rename(session, data.decode())
        elif kind == _USES and data:
            accessed_s, uses, is_locked = _use.unpack(data)
            session.uses += uses - (_use.unpack(session.known[name])[1] if name in session.known else 0)
            session.locked_s = time() if is_locked else 0.0
            if accessed_s > session.accessed_s:
                session.accessed_s = accessed_s
                self._move_to_end(session)
        elif kind == _INACTIVE and data:
            session.max_inactive_s, session.has_rows = float(data), True
        elif kind == _LOGIN:
            self.on_login(session, json.loads(data) if data else None)
        elif kind == _PYTHON:
            _apply_attribute(session, name, data)
            return
        session.changes += kind == LUA
        _set_known(session, name, data)

    # ---- changes for other workers

    def save(self, session: HttpSession) -> None:
        """See `HttpSessions.save`. Compares all attributes: values such as lists change without a call."""
        assert isinstance(session, SharedSession)
        if self._by_number.get(session.number) is not session:
            return
        if not session.attributes and session.max_inactive_s == MAX_INACTIVE_S and not session.has_rows:
            return  # most sessions
        session.has_rows = True
        wanted = _attribute_rows(session)
        removed = [name for name in session.known if name[:1] == _PYTHON and name not in wanted]
        with self._rows.together():
            if session.max_inactive_s != MAX_INACTIVE_S or _INACTIVE in session.known:
                self.put(session, _INACTIVE, repr(float(session.max_inactive_s)).encode())
            for name, data in wanted.items():
                self.put(session, name, data)
            for name in removed:
                self.put(session, name, None)

    def put(self, session: SharedSession, name: bytes, data: bytes | None) -> None:
        """Write a row of a session if it has changed.

        Args:
            session: the session.
            name: name of the row.
            data: content of the row, None to remove it.
        """
        if session.known.get(name) != data:
            _set_known(session, name, data)
            self._rows.put(session.number, name, data)

    def save_login(self, session: HttpSession) -> None:
        """See `HttpSessions.save_login`."""
        login = session.login
        self.put(cast(SharedSession, session), _LOGIN, b"" if login is None else json.dumps(login.record()).encode())

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """See `HttpSessions.alone`."""
        with self._rows.together(alone=True) as is_alone:
            self.catch_up()
            yield is_alone and self._rows.is_complete

    def share_notes(self, kind: bytes, keep_s: float, arrived: Note) -> Note:
        """See `HttpSessions.share_notes`."""
        self._note_receivers[kind] = arrived
        return lambda name, data: self._rows.put(0, kind + name, data, keep_s)

    def close(self) -> None:
        """Send the remaining changes to the other workers."""
        self._ticker.stop()
        self._send_uses(self._changed)
        self._rows.write()

    # ---- the sessions

    def of(self, request: SessionRequest) -> HttpSession | None:
        """See `RequestSessions.of`."""
        session = super().of(request)
        if session is not None:
            request.response.before_send = partial(self.save, session)
        return session

    def adopt(self, request: SessionRequest, session: HttpSession) -> None:
        """See `RequestSessions.adopt`."""
        super().adopt(request, session)
        request.response.before_send = partial(self.save, session)

    def create(self, peer: str) -> HttpSession:
        """See `HttpSessions.create`."""
        self.catch_up()
        with self._rows.together():
            session = super().create(peer)
            self._rows.put(session.number, HEAD, json.dumps([session.id, peer, session.created_s]).encode())
        return session

    def _oldest(self, sessions: dict[str, HttpSession]) -> HttpSession:
        """See `HttpSessions._oldest`. Uses in other workers arrive late, so the order is only approximate."""
        return min(islice(sessions.values(), _MAX_COMPARED), key=lambda session: session.accessed_s)

    def _first_number(self) -> int:
        return (self._rows.writer - 1) * _NUMBERS_PER_WORKER + 1

    def _new_session(self, session_id: str, number: int, peer: str, now_s: float) -> SharedSession:
        return SharedSession(session_id, number, peer, now_s, self._changed.add)

    def find(self, session_id: str) -> HttpSession | None:
        """See `HttpSessions.find`."""
        self.catch_up()
        session = cast("SharedSession | None", super().find(session_id))
        if session is not None:
            session.own_uses += 1
        return session

    def by_number(self, number: int) -> HttpSession | None:
        """See `HttpSessions.by_number`. Called often, so it applies changes of other workers after `_FRESH_S`."""
        if monotonic() - self._caught_up_s > _FRESH_S:
            self.catch_up()
        return super().by_number(number)

    def numbers(self) -> list[int]:
        """See `HttpSessions.numbers`."""
        self.catch_up()
        return super().numbers()

    def touch(self, session: HttpSession) -> None:
        """See `HttpSessions.touch`. Other workers receive it with the next tick."""
        super().touch(session)
        self._changed.add(cast(SharedSession, session))

    def renew(self, session: HttpSession) -> None:
        """See `HttpSessions.renew`."""
        super().renew(session)
        self.put(cast(SharedSession, session), _ID, session.id.encode())

    def hold(self, session: HttpSession, change: int) -> None:
        """See `HttpSessions.hold`. Each tick renews a lock, so that the locks of a dead worker expire."""
        super().hold(session, change)
        shared = cast(SharedSession, session)
        if shared.locks:
            self._locked.add(shared)
        else:
            self._locked.discard(shared)
        self._send_uses([shared])

    def terminate(self, session: HttpSession) -> bool:
        """See `HttpSessions.terminate`."""
        if not self._remove(session):
            return False
        self._rows.end(session.number)
        return True

    # ---- ticks

    def _tick(self) -> None:
        self._ticker.stop()
        try:
            turn = Turn()
            self.catch_up()
            for _ in range(_TICK_BATCHES):
                if self._rows.is_complete:
                    break
                turn.yield_if_due()
                self.catch_up()
            changed = self._changed | self._locked
            self._changed.clear()
            self._send_uses(changed, turn.yield_if_due)
            for function in self.ticked:
                function()
            self._rows.write()
            self._ticks += 1
            if self._ticks % _PURGE_TICKS == 0:
                while self._rows.purge():
                    turn.yield_if_due()
        finally:
            self._ticker.again(greenlets.start, self._tick)

    def _send_uses(self, sessions: Iterable[SharedSession], yield_turn: Callable[[], object] = bool) -> None:
        living = [one for one in sessions if self._by_number.get(one.number) is one]
        for at in range(0, len(living), MAX_WRITTEN):
            with self._rows.together():
                for session in living[at : at + MAX_WRITTEN]:
                    self.save(session)
                    row = _use.pack(session.accessed_s, session.own_uses, session.locks > 0)
                    self._rows.put(session.number, b"%b%d" % (_USES, self._rows.writer), row)
            yield_turn()


def sessions_of(place: WorkerPlace, per_address: int, max_sessions: int) -> RequestSessions:
    """Return the sessions of this process, which are shared if it is one worker of several.

    Args:
        place: place of this process among the workers.
        per_address, max_sessions: see `HttpSessions`.

    Raises:
        StartError: the shared table is not available.
    """
    if place.directory is None:
        return RequestSessions(per_address, max_sessions)
    return SharedSessions(SharedRows(place.directory, place.secret, HEAD), per_address, max_sessions)


def _set_known(session: SharedSession, name: bytes, data: bytes | None) -> None:
    if data is None:
        session.known.pop(name, None)
    else:
        session.known[name] = data


def _attribute_rows(session: SharedSession) -> dict[bytes, bytes]:
    """Return the rows of the Python attributes that can be shared."""
    found: dict[bytes, bytes] = {}
    for name, value in session.attributes.items():
        if isinstance(name, str) and is_plain(value):
            data = marshal.dumps(value, 2)  # version 2 is deterministic: equal values give equal bytes
            if is_small(data, session, name):
                found[_PYTHON + name.encode("utf-8", "surrogatepass")] = data
    return found


def _apply_attribute(session: SharedSession, row: bytes, data: bytes | None) -> None:
    name = row[1:].decode("utf-8", "surrogatepass")
    session.has_rows = True
    if data is not None:
        value = session.attributes[name] = marshal.loads(data)
        session.known[row] = marshal.dumps(value, 2)
    elif session.known.pop(row, None) is not None:
        session.attributes.pop(name, None)


def is_plain(value: object, depth: int = 0) -> bool:
    """Return whether a Python value can be shared.

    That is None, texts, numbers, booleans, bytes, and lists, tuples, sets and dicts of such values.
    """
    kind = type(value)
    if kind in _scalars:
        return True
    if depth >= _MAX_DEPTH:
        return False
    if kind is dict:
        pairs = cast("dict[object, object]", value).items()
        return all(is_plain(key, depth + 1) and is_plain(item, depth + 1) for key, item in pairs)
    if kind in (list, tuple, set, frozenset):
        return all(is_plain(item, depth + 1) for item in cast("list[object]", value))
    return False


def is_small(data: bytes, session: HttpSession, name: str) -> bool:
    """Return whether an attribute is small enough to be shared; log a warning if it is not."""
    if len(data) <= MAX_VALUE_BYTES:
        return True
    size_kib, max_kib = len(data) >> 10, MAX_VALUE_BYTES >> 10
    what = f"attribute {name} of session {session.number} has {size_kib} KiB"
    _lines.warn(f"{what}; attributes over {max_kib} KiB are not shared with other workers")
    return False

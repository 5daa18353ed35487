"""The sessions of a server with several workers: each worker has all of them in memory, and what happens to one is
known to the others before the response goes out (help: workers, decision 0033)."""

from __future__ import annotations

import json
import marshal
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from time import monotonic, time
from typing import TYPE_CHECKING, Any, cast

from gevent import get_hub

from smqrt.http.sessions import MAX_INACTIVE_S, Arrived, HttpSession, RequestSessions, TellOthers
from smqrt.loop import greenlet_pool
from smqrt.loop.scheduling import Turn
from smqrt.settings.limit_register import LineLimit
from smqrt.workers.shared_rows import MOST_WRITTEN, Row, SharedRows
from smqrt.workers.worker_identity import WorkerPlace

if TYPE_CHECKING:
    from smqrt.http.message import Request

HEAD = b"s"
"""The row of a session that is there as long as it lives: its first id, the client's address, when it was made."""
_ID, _INACTIVE, _LOGIN, _USES = b"i", b"m", b"g", b"u"
_PYTHON = b"p"
LUA = b"l"
"""Begins the names of rows with attributes of applications in Lua."""
TICK_S = 1.0
"""So often the uses of sessions are told, and what was not part of a request."""
SLACK_S = 2 * TICK_S
"""A session lives so much longer than it should, since another worker may not have said yet that it was used."""
HELD_S = 5 * TICK_S
MOST_VALUE_BYTES = 256 << 10
_PURGE_TICKS = 10
_COMPARED = 100
_PORTIONS, _TICK_PORTIONS, _FIRST_PORTIONS = 4, 500, 10_000  # of what others have written, in one go
_MOMENT_S = 0.005
_DEEPEST = 20
_OF_A_PROCESS = 1_000_000_000  # numbers of sessions
_use = struct.Struct(">dI?")  # when a session was used last, how often in that worker, whether somebody holds it there
_scalars = (str, int, float, bool, bytes, type(None))
_lines = LineLimit()


class SharedSession(HttpSession):
    """A session that other workers have too.

    Attributes:
        known: the rows that all workers have of it, by name.
        changes: how often another worker has set an attribute of applications in Lua.
        held_s: when another worker said that somebody holds it.
        own_uses: the part of `uses` that is of this worker.
        has_said: whether there may be something of Python, or a time, that the others know of.
        changed: called when an attribute is set, or given out.
    """

    def __init__(self, session_id: str, number: int, peer: str, created_s: float, changed: Callable[[Any], object]):
        super().__init__(session_id, number, peer, created_s, created_s)
        self.known: dict[bytes, bytes] = {}
        self.changes = self.own_uses = 0
        self.held_s = 0.0
        self.has_said = False
        self.changed = changed

    def __getitem__(self, name: str) -> Any:
        self.changed(self)  # it may be a list
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
        return now_s - self.held_s > HELD_S and super().expired(now_s - SLACK_S)


class SharedSessions(RequestSessions):
    """The sessions of a server, of which this process is one worker.

    Args:
        rows: what the workers share.
        per_address, most: see `HttpSessions`; over all workers.

    Attributes:
        ticked: functions that are called once in `TICK_S`; they must not block.
    """

    def __init__(self, rows: SharedRows, per_address: int, most: int) -> None:
        self._rows = rows
        super().__init__(per_address, most)
        self.ticked: list[Callable[[], object]] = []
        self._arrivals: dict[bytes, Arrived] = {}
        self._changed: set[SharedSession] = set()
        self._held: set[SharedSession] = set()
        self._is_loaded = self._is_catching_up = False
        self._ticks = 0
        self._caught_up_s = -_MOMENT_S
        self._ticker = get_hub().loop.timer(TICK_S, TICK_S, ref=False)
        self._ticker.start(greenlet_pool.start, self._tick)

    # ---- what the others say

    def catch_up(self) -> None:
        """See `HttpSessions.catch_up`. The first time that is everything."""
        if self._is_catching_up:
            return
        self._is_catching_up = True
        try:
            for _ in range(_PORTIONS if self._is_loaded else _FIRST_PORTIONS):
                self._catch_up()
                if self._rows.is_complete:
                    break
            self._is_loaded = True
        finally:
            self._is_catching_up = False
            self._caught_up_s = monotonic()

    def _catch_up(self) -> None:
        living = self._rows.living_if_missed()
        if living is not None:
            for session in [one for number, one in self._by_number.items() if number not in living]:
                self._remove(session)
        for row in self._rows.changes():
            self._apply(row)

    def _apply(self, row: Row) -> None:
        kind, rest, data = row.name[:1], row.name[1:], row.data
        session = cast("SharedSession | None", self._by_number.get(row.owner))
        if row.owner == 0:
            if data is not None and kind in self._arrivals:
                self._arrivals[kind](rest, data)
        elif kind == HEAD:
            self._apply_head(row.owner, session, data)
        elif session is not None:
            self._apply_part(session, kind, row.name, data)

    def _apply_head(self, number: int, session: SharedSession | None, data: bytes | None) -> None:
        if data is None:
            if session is not None:
                self._remove(session)
        elif session is None:
            session_id, peer, created_s = json.loads(data)
            self._add(self._made(session_id, number, peer, created_s))
            self._watch()

    def _apply_part(self, session: SharedSession, kind: bytes, name: bytes, data: bytes | None) -> None:
        if kind == _ID and data:
            self._rename(session, data.decode())
        elif kind == _USES and data:
            self._apply_use(session, name, data)
        elif kind == _INACTIVE and data:
            session.max_inactive_s, session.has_said = float(data), True
        elif kind == _LOGIN:
            self.on_login(session, json.loads(data) if data else None)
        elif kind == _PYTHON:
            _apply_attribute(session, name, data)
            return
        session.changes += kind == LUA
        _note(session, name, data)

    def _apply_use(self, session: SharedSession, name: bytes, data: bytes) -> None:
        accessed_s, uses, is_held = _use.unpack(data)
        before = _use.unpack(session.known[name])[1] if name in session.known else 0
        session.uses += uses - before
        session.held_s = time() if is_held else 0.0
        if accessed_s > session.accessed_s:
            session.accessed_s = accessed_s
            self._move_to_end(session)

    # ---- what is said to the others

    def save(self, session: HttpSession) -> None:
        """See `HttpSessions.save`. What is in attributes may have changed without a word, as a list does."""
        assert isinstance(session, SharedSession)
        if self._by_number.get(session.number) is not session:
            return
        if not session.attributes and session.max_inactive_s == MAX_INACTIVE_S and not session.has_said:
            return  # as are by far the most
        session.has_said = True
        wanted = _attributes(session)
        gone = [name for name in session.known if name[:1] == _PYTHON and name not in wanted]
        with self._rows.together():
            if session.max_inactive_s != MAX_INACTIVE_S or _INACTIVE in session.known:
                self.put(session, _INACTIVE, repr(float(session.max_inactive_s)).encode())
            for name, data in wanted.items():
                self.put(session, name, data)
            for name in gone:
                self.put(session, name, None)

    def put(self, session: SharedSession, name: bytes, data: bytes | None) -> None:
        """Write a row of a session, unless it is so already.

        Args:
            name: of the row.
            data: None to take it away.
        """
        if session.known.get(name) != data:
            _note(session, name, data)
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

    def share_notes(self, kind: bytes, keep_s: float, arrived: Arrived) -> TellOthers:
        """See `HttpSessions.share_notes`."""
        self._arrivals[kind] = arrived
        return lambda name, data: self._rows.put(0, kind + name, data, keep_s)

    def close(self) -> None:
        """Tell the others what they don't know yet."""
        self._ticker.stop()
        self._tell_uses(self._changed)
        self._rows.write()

    # ---- the sessions

    def of(self, request: Request) -> HttpSession | None:
        """See `RequestSessions.of`."""
        session = super().of(request)
        if session is not None:
            request.response.before_send = partial(self.save, session)
        return session

    def adopt(self, request: Request, session: HttpSession) -> None:
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
        """Uses at other workers are told late, so the order is not quite that of the last use."""
        return min(islice(sessions.values(), _COMPARED), key=lambda session: session.accessed_s)

    def _first_number(self) -> int:
        return (self._rows.writer - 1) * _OF_A_PROCESS + 1

    def _made(self, session_id: str, number: int, peer: str, now_s: float) -> SharedSession:
        return SharedSession(session_id, number, peer, now_s, self._changed.add)

    def find(self, session_id: str) -> HttpSession | None:
        """See `HttpSessions.find`."""
        self.catch_up()
        session = cast("SharedSession | None", super().find(session_id))
        if session is not None:
            session.own_uses += 1
        return session

    def by_number(self, number: int) -> HttpSession | None:
        """See `HttpSessions.by_number`. For those who have found it before: they ask often, and see a moment later what
        others do."""
        if monotonic() - self._caught_up_s > _MOMENT_S:
            self.catch_up()
        return super().by_number(number)

    def numbers(self) -> list[int]:
        """See `HttpSessions.numbers`."""
        self.catch_up()
        return super().numbers()

    def touch(self, session: HttpSession) -> None:
        """See `HttpSessions.touch`; the others hear of it with the next tick."""
        super().touch(session)
        self._changed.add(cast(SharedSession, session))

    def renew(self, session: HttpSession) -> None:
        """See `HttpSessions.renew`."""
        super().renew(session)
        self.put(cast(SharedSession, session), _ID, session.id.encode())

    def hold(self, session: HttpSession, change: int) -> None:
        """See `HttpSessions.hold`. Others are told again and again: who dies holds nothing."""
        super().hold(session, change)
        shared = cast(SharedSession, session)
        if shared.locks:
            self._held.add(shared)
        else:
            self._held.discard(shared)
        self._tell_uses([shared])

    def terminate(self, session: HttpSession) -> bool:
        """See `HttpSessions.terminate`."""
        if not self._remove(session):
            return False
        self._rows.end(session.number)
        return True

    # ---- now and then

    def _tick(self) -> None:
        self._ticker.stop()
        try:
            turn = Turn()
            self.catch_up()
            for _ in range(_TICK_PORTIONS):
                if self._rows.is_complete:
                    break
                turn.yield_if_due()
                self.catch_up()
            changed = self._changed | self._held
            self._changed.clear()
            self._tell_uses(changed, turn.yield_if_due)
            for function in self.ticked:
                function()
            self._rows.write()
            self._purge(turn)
        finally:
            self._ticker.again(greenlet_pool.start, self._tick)

    def _tell_uses(self, sessions: Iterable[SharedSession], breathe: Callable[[], object] = bool) -> None:
        living = [one for one in sessions if self._by_number.get(one.number) is one]
        for at in range(0, len(living), MOST_WRITTEN):
            with self._rows.together():
                for session in living[at : at + MOST_WRITTEN]:
                    self.save(session)
                    row = _use.pack(session.accessed_s, session.own_uses, session.locks > 0)
                    self._rows.put(session.number, b"%b%d" % (_USES, self._rows.writer), row)
            breathe()

    def _purge(self, turn: Turn) -> None:
        self._ticks += 1
        if self._ticks % _PURGE_TICKS == 0:
            while self._rows.purge():
                turn.yield_if_due()


def sessions_of(place: WorkerPlace, per_address: int, most: int) -> RequestSessions:
    """The sessions of this process: shared with others when it is one worker of several.

    Args:
        place: of this process.
        per_address, most: see `HttpSessions`.

    Raises:
        StartError: they can't be shared; one sentence.
    """
    if place.directory is None:
        return RequestSessions(per_address, most)
    return SharedSessions(SharedRows(place.directory, place.secret, HEAD), per_address, most)


def _note(session: SharedSession, name: bytes, data: bytes | None) -> None:
    if data is None:
        session.known.pop(name, None)
    else:
        session.known[name] = data


def _attributes(session: SharedSession) -> dict[bytes, bytes]:
    """The rows of those attributes of Python that other workers can have."""
    found: dict[bytes, bytes] = {}
    for name, value in session.attributes.items():
        if isinstance(name, str) and is_plain(value):
            data = marshal.dumps(value, 2)  # of this version, the same value is always the same bytes
            if is_small(data, session, name):
                found[_PYTHON + name.encode("utf-8", "surrogatepass")] = data
    return found


def _apply_attribute(session: SharedSession, row: bytes, data: bytes | None) -> None:
    name = row[1:].decode("utf-8", "surrogatepass")
    session.has_said = True
    if data is not None:
        value = session.attributes[name] = marshal.loads(data)
        session.known[row] = marshal.dumps(value, 2)
    elif session.known.pop(row, None) is not None:
        session.attributes.pop(name, None)


def is_plain(value: object, depth: int = 0) -> bool:
    """Return whether a value of Python can be had by other workers: None, texts, numbers, booleans, bytes, and lists,
    tuples, sets and dicts of such."""
    kind = type(value)
    if kind in _scalars:
        return True
    if depth >= _DEEPEST:
        return False
    if kind is dict:
        pairs = cast("dict[object, object]", value).items()
        return all(is_plain(key, depth + 1) and is_plain(item, depth + 1) for key, item in pairs)
    if kind in (list, tuple, set, frozenset):
        return all(is_plain(item, depth + 1) for item in cast("list[object]", value))
    return False


def is_small(data: bytes, session: HttpSession, name: str) -> bool:
    """Return whether other workers get the attribute of this name; when it is too long the log says so."""
    if len(data) <= MOST_VALUE_BYTES:
        return True
    size_kib, most_kib = len(data) >> 10, MOST_VALUE_BYTES >> 10
    what = f"the attribute {name} of session {session.number} has {size_kib} KiB"
    _lines.warn(f"{what}, and other workers get {most_kib} KiB at most: it stays in this one")
    return False

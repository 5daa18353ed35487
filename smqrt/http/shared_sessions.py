"""Sessions that the workers of a server share.

Each worker has all sessions in memory. The other workers receive the changes of a session before the response is sent
(help: workers, decision 0033).
"""

from __future__ import annotations

import json
import marshal
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from time import monotonic, time
from typing import Any, cast

from gevent import get_hub

from smqrt.http.sessions import MAX_INACTIVE_S, HttpSession, Note, RequestSessions, SessionRequest
from smqrt.loop import greenlets
from smqrt.loop.scheduling import Turn
from smqrt.settings.limits import LineLimit
from smqrt.workers.shared_rows import MAX_WRITTEN, Row, SharedRows
from smqrt.workers.worker_rpc import WorkerPlace

HEAD = b"s"
"""The kind of row that exists as long as its session: first id, address of the client, time of creation."""
_ID, _INACTIVE, _LOGIN, _USES = b"i", b"m", b"g", b"u"
_PYTHON = b"p"
LUA = b"l"
"""The kind of rows with attributes of applications in Lua; the first byte of a row's name is its kind."""
TICK_S = 1.0
"""Interval between reports of uses of sessions, and of changes outside requests."""
SLACK_S = 2 * TICK_S
"""Delay before an unused session expires, because another worker may report a use that late."""
LOCK_S = 5 * TICK_S  # validity of another worker's lock, which that worker renews with each tick
MAX_VALUE_BYTES = 256 << 10
_PURGE_TICKS = 10  # between two deletions of obsolete rows
_MAX_COMPARED = 100  # sessions, to find the least recently used one; comparing all would block the loop
_BATCHES, _TICK_BATCHES, _FIRST_BATCHES = 4, 500, 10_000  # of other workers' rows, read per call
_FRESH_S = 0.005  # how long `by_number` relies on the last check for changes
_MAX_DEPTH = 20  # of nested lists and dicts
_NUMBERS_PER_WORKER = 1_000_000_000  # session numbers
_USE = struct.Struct(">dI?")  # last use of a session, number of uses in that worker, whether that worker has a lock
_SCALARS = (str, int, float, bool, bytes, type(None))
_lines = LineLimit()


class SharedSession(HttpSession):
    """A session shared with other workers.

    Attributes:
        known: its rows that all workers have, by name.
        changes: number of changes of Lua attributes by other workers.
        locked_s: time of the last report of a lock by another worker.
        own_uses: part of `uses` in this worker.
        has_rows: whether other workers may have rows of Python attributes or of `max_inactive_s`.
        changed: called when an attribute is set or read, because a list or dict that was read may be changed.
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

    # ---- Changes from other workers

    def catch_up(self) -> None:
        """See `HttpSessions.catch_up`. The first call loads all sessions."""
        if self._is_catching_up:
            return
        self._is_catching_up = True
        try:
            for _ in range(_BATCHES if self._is_loaded else _FIRST_BATCHES):
                present = self._rows.owners_if_missed()
                if present is not None:
                    for session in [one for number, one in self._by_number.items() if number not in present]:
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
            accessed_s, uses, is_locked = _USE.unpack(data)
            session.uses += uses - (_USE.unpack(session.known[name])[1] if name in session.known else 0)
            session.locked_s = time() if is_locked else 0.0
            if accessed_s > session.accessed_s:
                session.accessed_s = accessed_s
                self._move_to_end(session)
        elif kind == _INACTIVE and data:
            session.max_inactive_s, session.has_rows = float(data), True
        elif kind == _LOGIN:
            self.on_login(session, json.loads(data) if data else None)
        elif kind == _PYTHON:
            session.has_rows = True
            attribute = name[1:].decode("utf-8", "surrogatepass")
            if data is not None:
                value = session.attributes[attribute] = marshal.loads(data)
                # `save` compares bytes, and those of another worker may differ for an equal value, such as a set.
                session.known[name] = marshal.dumps(value, 2)
            elif session.known.pop(name, None) is not None:
                session.attributes.pop(attribute, None)
            return
        session.changes += kind == LUA
        _set_known(session, name, data)

    # ---- Changes for other workers

    def save(self, session: HttpSession) -> None:
        """See `HttpSessions.save`. Compares all attributes: values such as lists change without a call."""
        assert isinstance(session, SharedSession)
        if self._by_number.get(session.number) is not session:
            return
        if not session.attributes and session.max_inactive_s == MAX_INACTIVE_S and not session.has_rows:
            return  # most sessions
        session.has_rows = True
        wanted: dict[bytes, bytes] = {}  # rows of the Python attributes that can be shared
        for attribute, value in session.attributes.items():
            if isinstance(attribute, str) and is_plain(value):
                data = marshal.dumps(value, 2)  # version 2 is deterministic: equal values give equal bytes
                if is_small(data, session, attribute):
                    wanted[_PYTHON + attribute.encode("utf-8", "surrogatepass")] = data
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

    # ---- The sessions

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

    def change_locks(self, session: HttpSession, change: int) -> None:
        """See `HttpSessions.change_locks`. Each tick renews a lock, so that the locks of a dead worker expire."""
        super().change_locks(session, change)
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

    # ---- Ticks

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

    def _send_uses(self, sessions: Iterable[SharedSession], yield_turn: Callable[[], object] = lambda: None) -> None:
        present = [one for one in sessions if self._by_number.get(one.number) is one]
        for at in range(0, len(present), MAX_WRITTEN):
            with self._rows.together():
                for session in present[at : at + MAX_WRITTEN]:
                    self.save(session)
                    row = _USE.pack(session.accessed_s, session.own_uses, session.locks > 0)
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


def is_plain(value: object, depth: int = 0) -> bool:
    """Return whether a Python value can be shared.

    These are None, strings, numbers, booleans, bytes, and lists, tuples, sets and dicts of such values.
    """
    kind = type(value)
    if kind in _SCALARS:
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
    fault = f"attribute {name} of session {session.number} has {size_kib} KiB"
    _lines.warn(f"{fault}; attributes over {max_kib} KiB are not shared with other workers")
    return False

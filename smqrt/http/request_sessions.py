"""The sessions of a server's requests: found by their cookie, begun for a visitor, ended by a timer when unused."""

from __future__ import annotations

from collections.abc import Callable
from time import time
from typing import TYPE_CHECKING, Any

from gevent import get_hub

from smqrt.http.headers import cookie_of
from smqrt.http.sessions import COOKIE, MAX_PER_ADDRESS, MAX_SESSIONS, HttpSession, HttpSessions, cookie_field
from smqrt.loop import greenlet_pool
from smqrt.loop.scheduling import Turn

if TYPE_CHECKING:
    from smqrt.http.message import Request

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
        """Give the session of a request, None when it has none."""
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
        """Give the request's session another id and cookie: who knew the old one knows nothing any more."""
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
            self.expire(Turn().breathe)
        finally:
            self._watching = bool(self)
            if self._watching:  # not `start`: a timer of libev that has fired fires again at once
                self._timer.again(greenlet_pool.start, self._expire)


def _set_cookie(request: Request, session: HttpSession) -> None:
    request.response.headers.set_cookie(COOKIE, cookie_field(session, request.secure))

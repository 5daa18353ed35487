"""The directory of an application: what it serves runs as the application's own code."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from traceback import FrameSummary, TracebackException, walk_tb
from typing import Any

from gevent.event import Event

from smqrt.apps.python.modules import PRELOAD
from smqrt.errors import ArgumentError
from smqrt.http.headers import ClientGoneError, HttpError
from smqrt.http.logins import Authenticator, Authorizer, LoginGuard
from smqrt.http.message import Request
from smqrt.http.resources import Io
from smqrt.http.static_files import StaticFile
from smqrt.http.tree import Directory, ResourceReader
from smqrt.http.wsgi import BODY_BYTES, Application, WsgiDirectory
from smqrt.process import current_application
from smqrt.settings.limit_register import Limit
from smqrt.settings.limits import in_force

# ---- Errors in an application's Python code, as its author wants to read them: file and line first, Python's traceback
# below, without the frames of the server around it.

_MAX_FRAMES = 50  # of an endless recursion
_MAX_CHARACTERS = 16_384  # an exception may carry what a stranger has sent


def describe(error: BaseException, is_own: Callable[[str], bool], position: str = "") -> str:
    """Give the text of a failure.

    Args:
        error: what was raised.
        is_own: tells by its name whether a file is the application's.
        position: the file to name when no line of the application took part.
    """
    told = TracebackException.from_exception(error, limit=-_MAX_FRAMES)
    _cut(told, is_own)
    places = [f"{frame.filename}:{frame.lineno}" for frame in told.stack if is_own(frame.filename)]
    if isinstance(error, SyntaxError) and error.filename and is_own(error.filename):
        places.append(f"{error.filename}:{error.lineno}")
    position = places[-1] if places else position
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    summary = ": ".join(part for part in (position, type(error).__name__, _short(message)) if part)
    return _short(f"{summary}\ntraceback:\n{''.join(told.format()).rstrip()}")


def _cut(told: TracebackException, is_own: Callable[[str], bool]) -> None:
    """Leave the frames before the first of the application out, there and in what it was raised from."""
    seen: list[TracebackException] = []
    rest: list[TracebackException | None] = [told]
    while rest:
        one = rest.pop()
        if one is None or one in seen or len(seen) > _MAX_FRAMES:
            continue
        seen.append(one)
        frames: list[FrameSummary] = list(one.stack)
        first = next((at for at, frame in enumerate(frames) if is_own(frame.filename)), 0)
        one.stack[:] = frames[first:]
        rest += [one.__cause__, one.__context__]


def _short(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + " …"


class _OwnGuard(LoginGuard):
    """A guard whose users, login pages and authorizers are an application's own code.

    Args:
        guard: the guard.
        as_own: runs a function as that code.
    """

    def __init__(self, guard: LoginGuard, as_own: Callable[..., bool]) -> None:
        super().__init__(guard.authenticator, guard.authorizer, guard.directory)
        self._as_own = as_own

    def stops(self, request: Request, relpath: str) -> bool:
        """See `LoginGuard.stops`."""
        return self._as_own(request, super().stops, request, relpath)

    def allows_also(self, request: Request, method: str, path: str) -> bool:
        """See `Guard.allows_also`."""
        return self._as_own(request, super().allows_also, request, method, path)


APP_REQUESTS = Limit("app_requests", "limits.app_requests", "so many requests of one application run at once")
SLOT = "slot"
"""Where the environment of a request has the slot it runs in."""
overload: list[str] = []
"""Why no application takes requests for now; empty mostly."""


class RequestSlots:
    """Lets so many requests of one application run at once; others wait for a while, in order.

    Args:
        name: of the application, for the log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._running = 0
        self._waiting: deque[Event] = deque()

    def take(self) -> None:
        """Take a slot; blocks until there is one.

        Raises:
            HttpError: 503, there was none in time, or no application takes requests.
        """
        settings = in_force()
        if overload:
            raise HttpError(503, overload[0], headers={"Retry-After": "5"})
        if settings.app_requests is None or self._running < settings.app_requests:
            self._running += 1
            return
        if not self._wait(settings.app_requests_wait_s):
            rule = f"{self._running} of its requests run, and none ended in {settings.app_requests_wait_s:g} s"
            APP_REQUESTS.refused(f"a request of {self._name or 'the application at /'}", rule)
            raise HttpError(503, _BUSY, headers={"Retry-After": "1"})

    def _wait(self, within_s: float) -> bool:
        """Wait for a slot; whether there was one. Who is killed meanwhile has none."""
        turn = Event()
        self._waiting.append(turn)
        is_mine = False
        try:
            turn.wait(within_s)
            is_mine = turn.is_set()
        finally:
            if not is_mine and turn.is_set():
                self.release()
            elif not is_mine:
                self._waiting.remove(turn)
        return is_mine

    def release(self) -> None:
        """Give a slot back, to the one who has waited longest."""
        most = in_force().app_requests
        self._running -= 1
        while self._waiting and (most is None or self._running < most):
            self._running += 1
            self._waiting.popleft().set()


class _Slot:
    """A slot that a request has; given back once."""

    __slots__ = ("slots",)

    def __init__(self, slots: RequestSlots) -> None:
        slots.take()
        self.slots: RequestSlots | None = slots

    def close(self) -> None:
        """Give it back."""
        slots, self.slots = self.slots, None
        if slots is not None:
            slots.release()


_BUSY = "The application has as many requests under way as it may; try again in a second."


class ApplicationDirectory(ResourceReader):
    """The directory of an application: what it serves runs as the application's own code.

    Args:
        name, priority, io: see `ResourceReader`.
        owner: the application.
        find_session: gives the session of a request, None when it has none.
        label: what tracebacks call its folder, such as "chat/".
    """

    def __init__(
        self,
        name: str,
        priority: int,
        io: Io,
        owner: current_application.AppScope,
        find_session: Callable[[Request], object],
        label: str = "",
    ) -> None:
        super().__init__(name, priority, io=io)
        self.label = label
        self._owner, self._find_session = owner, find_session
        self._slots = RequestSlots(name)

    def setauth(self, authenticator: Authenticator | None = None, authorizer: Authorizer | None = None) -> None:
        """See `Directory.setauth`. What the application has written for it runs as its own code."""
        super().setauth(authenticator, authorizer)
        if self.guard is not None:
            self.guard = _OwnGuard(self.guard, self._as_own)

    def mount(
        self,
        application: Application,
        name: str | None = None,
        priority: int = 0,
        *,
        body_bytes: int | None = BODY_BYTES,
    ) -> WsgiDirectory:
        """Let a WSGI application (PEP 3333: Flask, Django, …) answer what the files of this folder don't.

        Args:
            application: the WSGI application.
            name: the path segment it answers; without, every path.
            priority: see `Directory`.
            body_bytes: the longest body it gets, None for any length.

        Returns:
            its directory, inserted into this one.

        Raises:
            ArgumentError: `application` can't be called, or the name or the priority is wrong.
        """
        if not callable(application):
            raise ArgumentError(f"application: a WSGI application is a callable, not {type(application).__name__}")
        mounted = WsgiDirectory(application, name, priority, body_bytes=body_bytes)
        self.insert(mounted)
        return mounted

    def describe(self, error: BaseException) -> str:
        """Give the text of a failure of the application's Python code, its file and line first."""
        return describe(error, self._has_code, self.label + PRELOAD)

    def _has_code(self, file: str) -> bool:
        return file.startswith(self.label) or self._owner.has_file(file)

    # What may run code; the files, which most requests are for, need none of this.

    def _call(self, request: Request, relpath: str) -> bool:
        return self._as_own(request, super()._call, request, relpath)

    def _run(self, request: Request, entry: StaticFile) -> bool:
        return self._as_own(request, super()._run, request, entry)

    def _ask(self, children: list[Directory], request: Request, relpath: str) -> bool:
        return bool(children) and self._as_own(request, super()._ask, children, request, relpath)

    def _as_own(self, request: Request, answer: Callable[..., bool], *args: Any) -> bool:
        request.env["find_session"] = self._find_session
        slot = None
        if SLOT not in request.env:
            slot = request.env[SLOT] = _Slot(self._slots)
        token = current_application.current_app.set(self._owner)
        try:
            return answer(*args)
        except (HttpError, ClientGoneError):
            raise
        except Exception as error:
            if not self._may_show(request, error):
                raise
            request.report_failure("Python", self.describe(error))
            return True
        finally:
            current_application.current_app.reset(token)
            if slot is not None:
                request.env.pop(SLOT, None)
                slot.close()

    def _may_show(self, request: Request, error: Exception) -> bool:
        """Whether a failure can be put into the response: it is the application's, and what was sent is no download
        that would look complete.
        """
        response = request.response
        if not request.initial or response.ended:
            return False
        if response.committed and not response.headers.get("content-type", "").startswith("text/html"):
            return False
        return any(self._has_code(frame.f_code.co_filename) for frame, _ in walk_tb(error.__traceback__))

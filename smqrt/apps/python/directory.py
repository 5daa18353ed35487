"""Directory of a Python application, whose pages and functions run in the scope of the application."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from traceback import FrameSummary, TracebackException, walk_tb
from typing import Any

from gevent.event import Event

from smqrt.errors import ArgumentError
from smqrt.http.headers import ClientGoneError, HttpError
from smqrt.http.logins import Authenticator, Authorizer, LoginGuard
from smqrt.http.message import SLOT, Request, report_failure
from smqrt.http.resources import Io
from smqrt.http.static_files import StaticFile
from smqrt.http.tree import Directory, ResourceReader
from smqrt.http.wsgi import BODY_BYTES, Application, WsgiDirectory
from smqrt.process import current_process
from smqrt.settings.limits import Limit, current_limits

PRELOAD = ".preload.py"

# ---- Error texts for authors of applications: file and line, then the traceback without frames of the server.

_MAX_FRAMES = 50  # an endless recursion has a thousand
_MAX_CHARACTERS = 16_384  # the text of an exception may contain data of clients


def describe(error: BaseException, is_own: Callable[[str], bool], position: str = "") -> str:
    """Return the text of an exception.

    Args:
        error: the exception.
        is_own: returns whether a file with this name belongs to the application.
        position: the file to name if the traceback has no line of the application.
    """
    traceback = TracebackException.from_exception(error, limit=-_MAX_FRAMES)
    # Remove the frames before the first one of the application, also in causes and contexts.
    seen: list[TracebackException] = []
    remaining: list[TracebackException | None] = [traceback]
    while remaining:
        one = remaining.pop()
        if one is None or one in seen or len(seen) > _MAX_FRAMES:
            continue
        seen.append(one)
        frames: list[FrameSummary] = list(one.stack)
        first = next((at for at, frame in enumerate(frames) if is_own(frame.filename)), 0)
        one.stack[:] = frames[first:]
        remaining += [one.__cause__, one.__context__]
    places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.stack if is_own(frame.filename)]
    if isinstance(error, SyntaxError) and error.filename and is_own(error.filename):
        places.append(f"{error.filename}:{error.lineno}")
    position = places[-1] if places else position
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    summary = ": ".join(part for part in (position, type(error).__name__, _short(message)) if part)
    return _short(f"{summary}\ntraceback:\n{''.join(traceback.format()).rstrip()}")


def _short(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + " …"


class _OwnGuard(LoginGuard):
    """A login guard whose users, login pages and authorizers run in the scope of an application.

    Args:
        guard: the guard.
        as_own: runs a function in that scope.
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


APP_REQUESTS = Limit("app_requests", "limits.app_requests", "concurrent requests of one application")
overload: list[str] = []
"""The message if all applications reject requests at the moment; else empty."""


class RequestSlots:
    """Limits the concurrent requests of an application; further requests wait for a limited time, in order.

    Args:
        name: the name of the application, for the log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._running = 0
        self._waiting: deque[Event] = deque()

    def take(self) -> None:
        """Take a slot. Blocks until one is free.

        Raises:
            HttpError: 503, no slot became free in time, or all applications reject requests.
        """
        settings = current_limits()
        if overload:
            raise HttpError(503, overload[0], headers={"Retry-After": "5"})
        if settings.app_requests is None or self._running < settings.app_requests:
            self._running += 1
            return
        if not self._wait(settings.app_requests_wait_s):
            rule = f"{self._running} requests are running, none ended within {settings.app_requests_wait_s:g} s"
            APP_REQUESTS.refused(f"a request of {self._name or 'the application at /'}", rule)
            raise HttpError(503, _BUSY, headers={"Retry-After": "1"})

    def _wait(self, within_s: float) -> bool:
        """Wait for a slot; return whether one became free. A greenlet that is killed while waiting returns its slot."""
        turn = Event()
        self._waiting.append(turn)
        is_mine = False
        try:
            turn.wait(within_s)
            is_mine = turn.is_set()
        finally:
            if not is_mine and turn.is_set():
                self.release()  # killed after `release` had assigned it the slot
            elif not is_mine:
                self._waiting.remove(turn)
        return is_mine

    def release(self) -> None:
        """Return a slot; the request that has waited longest takes it."""
        self._running -= 1
        limit = current_limits().app_requests if self._waiting else None
        while self._waiting and (limit is None or self._running < limit):
            self._running += 1
            self._waiting.popleft().set()


_BUSY = "The application is processing its maximum number of requests. Try again in a second."


class ApplicationDirectory(ResourceReader):
    """The directory of an application. Code that it calls runs in the scope of the application.

    Args:
        name, priority, io: see `ResourceReader`.
        owner: the application.
        find_session: returns the session of a request; None if it has none.
        label: the name of its folder in tracebacks, such as "chat/".
    """

    _is_plain = True  # except for what `_as_own` calls

    def __init__(
        self,
        name: str,
        priority: int,
        io: Io,
        owner: current_process.AppScope,
        find_session: Callable[[Request], object],
        label: str = "",
    ) -> None:
        super().__init__(name, priority, io=io)
        self.label = label
        self._owner, self._find_session = owner, find_session
        self._slots = RequestSlots(name)

    def setauth(self, authenticator: Authenticator | None = None, authorizer: Authorizer | None = None) -> None:
        """See `Directory.setauth`; functions of the application run in its scope."""
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
        """Mount a WSGI application (PEP 3333: Flask, Django, …), for paths that are not files of this folder.

        Args:
            application: the WSGI application.
            name: the path segment that it serves; None for all paths.
            priority: see `Directory`.
            body_bytes: maximum length of a request body; None for no limit.

        Returns:
            Its directory, inserted into this one.

        Raises:
            ArgumentError: `application` is not callable, or the name or the priority is invalid.
        """
        if not callable(application):
            raise ArgumentError(f"application: a WSGI application is a callable, not {type(application).__name__}")
        mounted = WsgiDirectory(application, name, priority, body_bytes=body_bytes)
        self.insert(mounted)
        return mounted

    def describe(self, error: BaseException) -> str:
        """Return the text of an exception in the application's Python code, with its file and line first."""
        return describe(error, self._has_code, self.label + PRELOAD)

    def _has_code(self, file: str) -> bool:
        return file.startswith(self.label) or self._owner.has_file(file)

    # Only methods that may run code are overridden: most requests are for files, which need no scope.

    def _call(self, request: Request, relpath: str) -> bool:
        return self._as_own(request, super()._call, request, relpath)

    def _run(self, request: Request, entry: StaticFile) -> bool:
        return self._as_own(request, super()._run, request, entry)

    def _try_children(self, children: list[Directory], request: Request, relpath: str) -> bool:
        for child in children:
            if relpath.startswith(child.prefix):  # otherwise no code runs
                return self._as_own(request, super()._try_children, children, request, relpath)
        return False

    def _as_own(self, request: Request, answer: Callable[..., bool], *args: Any) -> bool:
        request.is_repeatable = False
        request.env["find_session"] = self._find_session
        takes_slot = SLOT not in request.env
        if takes_slot:
            self._slots.take()
            request.env[SLOT] = self._slots
        token = current_process.current_app.set(self._owner)
        try:
            return answer(*args)
        except (HttpError, ClientGoneError):  # a response, and the end of the connection: not errors of the code
            raise
        except Exception as error:
            if not self._can_show(request, error):
                raise
            report_failure(request, "Python", self.describe(error))
            return True
        finally:
            current_process.current_app.reset(token)
            if takes_slot:
                slots = request.env.pop(SLOT, None)
                if slots is not None:  # `Request.detach` has not returned it
                    slots.release()

    def _can_show(self, request: Request, error: Exception) -> bool:
        """Return whether the error can be written into the response.

        The error must be that of the application. A response that has begun must be HTML; in a download, the text would
        become part of the file.
        """
        response = request.response
        if not request.initial or response.ended:
            return False
        if response.committed and not response.headers.get("content-type", "").startswith("text/html"):
            return False
        return any(self._has_code(frame.f_code.co_filename) for frame, _ in walk_tb(error.__traceback__))

"""The directory of an application: what it serves runs as the application's own code."""

from __future__ import annotations

from collections.abc import Callable
from traceback import walk_tb
from typing import Any

from smqrt import app_folder
from smqrt.app.failure import describe
from smqrt.app.modules import PRELOAD
from smqrt.errors import ArgumentError
from smqrt.http.files import StaticFile
from smqrt.http.logins import Authenticator, Authorizer, LoginGuard
from smqrt.http.message import Request
from smqrt.http.resources import Io
from smqrt.http.status import ClientGoneError, HttpError
from smqrt.http.tree import Directory, ResourceReader
from smqrt.http.wsgi import BODY_BYTES, Application, WsgiDirectory


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
        owner: app_folder.AppScope,
        find_session: Callable[[Request], object],
        label: str = "",
    ) -> None:
        super().__init__(name, priority, io=io)
        self.label = label
        self._owner, self._find_session = owner, find_session

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
        token = app_folder.current_app.set(self._owner)
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
            app_folder.current_app.reset(token)

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

"""The guard of a directory: its authenticator, and what its users may do there (spec: bas-api §4, `dir:setauth`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smqrt.http.logins.authenticator import Authenticator
from smqrt.http.logins.authorizer import Authorizer
from smqrt.http.logins.users import Answered

if TYPE_CHECKING:
    from smqrt.http.logins.registry import Login
    from smqrt.http.message import Request
    from smqrt.http.tree import Directory


_PASSED = "guards"  # in Request.env


def passed(request: Request) -> list[LoginGuard]:
    """Give the guards that have let a request in so far."""
    return list(_logins(request))


def _logins(request: Request) -> dict[LoginGuard, Login]:
    found: dict[LoginGuard, Login] = request.env.setdefault(_PASSED, {})
    return found


class LoginGuard:
    """Stands before a directory.

    Args:
        authenticator: tells who asks.
        authorizer: tells what they may; None for everything.
        directory: the directory, for the login page.
    """

    def __init__(self, authenticator: Authenticator, authorizer: Authorizer | None, directory: Directory) -> None:
        self.authenticator, self.authorizer = authenticator, authorizer
        self.directory = directory

    def stops(self, request: Request, relpath: str) -> bool:
        """Whether the request goes no further, because it has been answered: with a login page, 401, 403. May block.

        Args:
            relpath: the path as seen from the directory.

        Raises:
            HttpError: the body can't be read.
        """
        login = self.authenticator.authenticate(request, relpath, self.directory)
        if login is None:
            return True
        if not login.needs_credentials and not request.response.committed:
            request.response.headers.set("Cache-Control", "private")  # what a cookie opens is for nobody else
        try:
            if self._allows(request, login, request.method, relpath):
                _logins(request)[self] = login
                return False
        except Answered:
            return True
        self.directory.refuse(request)
        return True

    def allows_also(self, request: Request, method: str, path: str) -> bool:
        """Whether a request that it has let in may be about another path as well. May block.

        Args:
            method: what it does there.
            path: from the root of the server.
        """
        relpath = path.removeprefix(self.directory.baseuri())
        try:
            return self._allows(request, _logins(request)[self], method, relpath)
        except Answered:
            return False

    def _allows(self, request: Request, login: Login, method: str, relpath: str) -> bool:
        return self.authorizer is None or self.authorizer.allows(request, login, method, relpath)

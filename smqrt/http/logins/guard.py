"""The guard of a directory: its authenticator, and what its users may do there (spec: bas-api §4, `dir:setauth`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smqrt.http.logins.authenticator import Authenticator
from smqrt.http.logins.authorizer import Authorizer
from smqrt.http.logins.users import Answered

if TYPE_CHECKING:
    from smqrt.http.message import Request
    from smqrt.http.tree import Directory


_PASSED = "guards"  # in Request.env


def passed(request: Request) -> list[Guard]:
    """Give the guards that have let a request in so far."""
    found: list[Guard] = request.env.get(_PASSED, [])
    return found


class Guard:
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
            if self.authorizer is None or self.authorizer.allows(request, login, request.method, relpath):
                request.env.setdefault(_PASSED, []).append(self)
                return False
        except Answered:
            return True
        self.directory.refuse(request)
        return True

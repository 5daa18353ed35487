"""The users of the server's users file as a user database of pages (help: identity)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smqrt.auth.passwords import BusyError
from smqrt.auth.service import IdentityService, of_server
from smqrt.errors import ArgumentError
from smqrt.http.logins.users import Account, Answered

if TYPE_CHECKING:
    from smqrt.http.message import Request

MAX_SESSIONS = 1000
"""Sessions of one user: people have a few, programs that keep no cookies one for each connection."""


class ServerUsers:
    """The users of the users file. Their passwords are kept as argon2id, so they have to come in clear text: by Basic
    or a form, and never by Digest.

    Args:
        service: of the server.
    """

    def __init__(self, service: IdentityService) -> None:
        self._service = service

    def find(self, name: str, password: str | None, request: Request) -> Account | None:
        """See `Users.find`. Too many logins at once get 503."""
        if password is None:
            return None
        try:
            clear = password.encode("utf-8", "surrogateescape")
            identity = self._service.identity_of(name, clear, str(request.peer[0]))
        except BusyError as busy:
            request.response.error(503, f"{busy}.", {"Retry-After": "1"})
            raise Answered from None
        if identity is None:
            return None
        return Account(is_verified=True, maxusers=MAX_SESSIONS, recycle=True, identity=identity)

    def roles(self, name: str) -> frozenset[str]:
        """Give the groups of a user; none of one who is unknown."""
        return frozenset(self._service.groups_of(name))


def server_users() -> ServerUsers:
    """Give the users of the server's users file.

    Raises:
        ArgumentError: it has none.
    """
    service = of_server()
    if service is None or not service.settings.users:
        raise ArgumentError("the server has no users file; name one in the setting auth.users")
    return ServerUsers(service)

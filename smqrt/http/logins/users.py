"""User databases for logins: tables, functions, and the server's users file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import md5, sha256
from hmac import compare_digest
from typing import TYPE_CHECKING, Any, Protocol

from smqrt.auth.identity import Identity
from smqrt.auth.service import IdentityService, server_identity_service
from smqrt.auth.users import BusyError
from smqrt.errors import ArgumentError

if TYPE_CHECKING:
    from smqrt.http.message import Request


MAX_USERS = 5  # default limit of a user's sessions at the same time
_HA1 = re.compile(r"[0-9a-fA-F]{32}")


class Answered(Exception):
    """Raised by a user database or a login page that has already sent the response."""


@dataclass(frozen=True, slots=True)
class Account:
    """A user of a user database, with one of the first three values (spec: bas-api §5).

    Attributes:
        password: password in clear text.
        ha1: MD5(user:realm:password), 32 hexadecimal digits, if the clear text is not stored.
        is_verified: whether the database has verified the password itself.
        maxusers: largest number of sessions at the same time.
        recycle: whether a further login ends the oldest session; otherwise it is rejected.
        inactive_s: seconds without a request after which the login ends; None for the default.
        identity: identity of a user of the server's users file.
    """

    password: str | None = None
    ha1: str | None = None
    is_verified: bool = False
    maxusers: int = MAX_USERS
    recycle: bool = False
    inactive_s: int | None = None
    identity: Identity | None = None

    @property
    def secret(self) -> str | None:
        """The stored secret: the password or the HA1."""
        return self.ha1 if self.password is None else self.password


class Users(Protocol):
    """A user database."""

    def find(self, name: str, password: str | None, request: Request) -> Account | None:
        """Return the account of a user, or None; may block.

        Args:
            name: name that the client sent.
            password: password in clear text; None if the client sent a hash.
            request: the request.

        Raises:
            Answered: the database has sent the response itself.
        """


UserFunction = Callable[[str, str | None, "Request"], "Account | str | bool | None"]
"""A user database as a function of name, password and request. It returns an account, a password in clear text, True
for a password that it has verified, or None or False for an unknown user."""


class FunctionUsers:
    """A user database that calls a function.

    Args:
        function: see `UserFunction`; may block.
    """

    def __init__(self, function: UserFunction) -> None:
        self._function = function

    def find(self, name: str, password: str | None, request: Request) -> Account | None:
        """See `Users.find`."""
        answer = self._function(name, password, request)
        if isinstance(answer, str):
            return Account(password=answer)
        if isinstance(answer, Account):
            return answer
        return Account(is_verified=True) if answer is True else None


@dataclass(frozen=True, slots=True)
class _Entry:
    account: Account
    roles: frozenset[str]


class UserTable:
    """A user database in memory.

    Args:
        users: by name a password, or `{"pwd": "text" or ["HA1"], "roles": [...], "maxusers": 5, "recycle": False,
            "inactive": seconds}`.

    Attributes:
        has_ha1: whether a user has an HA1 instead of a password.

    Raises:
        ArgumentError: an entry is malformed; the text names it.
    """

    def __init__(self, users: Mapping[str, Any] | None = None) -> None:
        self._entries: dict[str, _Entry] = {}
        self.has_ha1 = False
        self.set(users or {})

    def set(self, users: Mapping[str, Any]) -> None:
        """Replace all users. Raises as the constructor, and then keeps the old users."""
        self._entries = {name: _entry(name, value) for name, value in users.items()}
        self.has_ha1 = any(entry.account.ha1 is not None for entry in self._entries.values())

    def find(self, name: str, password: str | None = None, request: Request | None = None) -> Account | None:
        """See `Users.find`."""
        entry = self._entries.get(name)
        return entry.account if entry else None

    def roles(self, name: str) -> frozenset[str]:
        """Return the roles of a user; empty for an unknown one."""
        entry = self._entries.get(name)
        return entry.roles if entry else frozenset()

    def __len__(self) -> int:
        return len(self._entries)

    def names(self) -> list[str]:
        """Return the names of all users."""
        return sorted(self._entries)


def _entry(name: str, value: Any) -> _Entry:
    fields = {"pwd": value} if isinstance(value, str) else value
    if not isinstance(fields, Mapping):
        raise ArgumentError(f"user {name!r}: must be a table with a field 'pwd'")
    secret, password, ha1 = fields.get("pwd"), None, None
    if isinstance(secret, str):
        password = secret
    elif (
        isinstance(secret, list | tuple)
        and len(secret) == 1
        and isinstance(secret[0], str)
        and _HA1.fullmatch(secret[0])
    ):
        ha1 = secret[0].lower()
    else:
        raise ArgumentError(f"user {name!r}: 'pwd' must be a text, or a list with an HA1 of 32 hexadecimal digits")
    roles = fields.get("roles") or ()
    if not isinstance(roles, Iterable) or isinstance(roles, str) or not all(isinstance(role, str) for role in roles):
        raise ArgumentError(f"user {name!r}: 'roles' must be a list of texts")
    account = Account(
        password,
        ha1,
        maxusers=_number(name, fields, "maxusers", MAX_USERS),
        recycle=fields.get("recycle") is True,
        inactive_s=_number(name, fields, "inactive", None),
    )
    return _Entry(account, frozenset(roles))


def _number(name: str, fields: Mapping[str, Any], field: str, default: Any) -> Any:
    value = fields.get(field, default)
    if value is default:
        return default
    # A number of Lua may be a float, which is exact up to 2^53.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < 1 << 53:
        raise ArgumentError(f"user {name!r}: '{field}' must be a number of at least 1")
    return int(value)


def users_of(users: Users | UserFunction | Mapping[str, Any]) -> Users:
    """Return the user database of a database, a function or a dict; see `UserTable` and `UserFunction`."""
    if isinstance(users, Mapping):
        return UserTable(users)
    if hasattr(users, "find"):
        return users
    if not callable(users):
        raise ArgumentError(f"users: a dict, a function or a user database is needed, not {type(users).__name__}")
    return FunctionUsers(users)


def as_bytes(text: str) -> bytes:
    """Return a text as bytes for hashes. Surrogate escapes become the original bytes."""
    return text.encode("utf-8", "surrogateescape")


def ha1_of(name: str, realm: str, password: str) -> str:
    """Return MD5(user:realm:password) in hexadecimal digits."""
    return md5(as_bytes(f"{name}:{realm}:{password}"), usedforsecurity=False).hexdigest()


def is_same_secret(left: str, right: str) -> bool:
    """Return whether two secrets are equal. The time does not depend on their difference or their length."""
    return compare_digest(sha256(as_bytes(left)).digest(), sha256(as_bytes(right)).digest())


UNKNOWN_USER = Account(password="", ha1="0" * 32)
"""Account for an unknown user, so that the check takes as long as for a wrong password."""


def proves_clear_text(account: Account, name: str, realm: str, password: str) -> bool:
    """Return whether `password` is that of the account; takes the same time for every kind of account."""
    # Each comparison comes before the check for None, so that both are always made.
    by_password = is_same_secret(account.password or "", password) and account.password is not None
    by_ha1 = is_same_secret(account.ha1 or "", ha1_of(name, realm, password)) and account.ha1 is not None
    return account.is_verified or by_password or by_ha1


# ---- The server's users file as a user database (help: identity).

MAX_SESSIONS = 1000
"""Sessions of one user. People have a few; programs without cookies have one per connection."""


class ServerUsers:
    """The users of the users file.

    It stores passwords as argon2id hashes, so clients must send them in clear text: by Basic or a form, not by Digest.

    Args:
        service: identity service of the server.
    """

    def __init__(self, service: IdentityService) -> None:
        self._service = service

    def find(self, name: str, password: str | None, request: Request) -> Account | None:
        """See `Users.find`. Responds with 503 while too many passwords are being checked."""
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
        """Return the groups of a user; empty for an unknown one."""
        return frozenset(self._service.groups_of(name))


def server_users() -> ServerUsers:
    """Return the users of the server's users file.

    Raises:
        ArgumentError: the server has no users file.
    """
    service = server_identity_service()
    if service is None or not service.settings.users:
        raise ArgumentError("the server has no users file; add one with the setting auth.users")
    return ServerUsers(service)

"""Users and their secrets: what a user database answers, and two databases, a table and a function."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import md5, sha256
from hmac import compare_digest
from typing import TYPE_CHECKING, Any, Protocol

from smqrt.auth.identity import Identity
from smqrt.auth.passwords import BusyError
from smqrt.auth.service import IdentityService, of_server
from smqrt.errors import ArgumentError

if TYPE_CHECKING:
    from smqrt.http.message import Request


MAX_USERS = 5  # sessions that one user may have at the same time, unless its account says otherwise
_HA1 = re.compile(r"[0-9a-fA-F]{32}")


class Answered(Exception):
    """A user database or a login page has answered the request itself."""


@dataclass(frozen=True, slots=True)
class Account:
    """What a user database knows of a user; one of the first three is there (spec: bas-api §5).

    Attributes:
        password: in clear text.
        ha1: MD5(user:realm:password), 32 hexadecimal digits, when the clear text is not kept.
        is_verified: the database has looked at the password itself and found it right.
        maxusers: sessions that the user may have at the same time.
        recycle: whether a login beyond ends the oldest of them; otherwise it is refused.
        inactive_s: seconds without a request after which the login ends; None for the usual.
        identity: of a user of the server's users file.
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
        """What is stored: the password or the HA1."""
        return self.ha1 if self.password is None else self.password


class Users(Protocol):
    """A user database."""

    def find(self, name: str, password: str | None, request: Request) -> Account | None:
        """Return the account of a user, None when there is none; may block.

        Args:
            name: as the client gave it.
            password: in clear text, None when the client sent a hash.
            request: that asks.

        Raises:
            Answered: it has answered the request itself.
        """


UserFunction = Callable[[str, str | None, "Request"], "Account | str | bool | None"]
"""A user database as a function: name, password and request; gives an account, a password in clear text, True for a
password it has verified, or None or False for a user that does not exist."""


class FunctionUsers:
    """A user database that is a function.

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
        users: by name, a password or `{"pwd": "text" or ["HA1"], "roles": [...], "maxusers": 5, "recycle": False,
            "inactive": seconds}`.

    Attributes:
        has_ha1: whether there is a user with an HA1 in place of a password.

    Raises:
        ArgumentError: an entry is none of these; it names the entry.
    """

    def __init__(self, users: Mapping[str, Any] | None = None) -> None:
        self._entries: dict[str, _Entry] = {}
        self.has_ha1 = False
        self.set(users or {})

    def set(self, users: Mapping[str, Any]) -> None:
        """Replace all users. Raises as the constructor; then the old ones stay."""
        self._entries = {name: _entry(name, value) for name, value in users.items()}
        self.has_ha1 = any(entry.account.ha1 is not None for entry in self._entries.values())

    def find(self, name: str, password: str | None = None, request: Request | None = None) -> Account | None:
        """See `Users.find`."""
        entry = self._entries.get(name)
        return entry.account if entry else None

    def roles(self, name: str) -> frozenset[str]:
        """Return the roles of a user; none of one who is unknown."""
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
        raise ArgumentError(f"user {name!r}: a table with a field 'pwd' is needed")
    password, ha1 = _secret(name, fields.get("pwd"))
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


def _secret(name: str, value: Any) -> tuple[str | None, str | None]:
    if isinstance(value, str):
        return value, None
    if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], str) and _HA1.fullmatch(value[0]):
        return None, value[0].lower()
    raise ArgumentError(f"user {name!r}: 'pwd' must be a text, or a list with an HA1 of 32 hexadecimal digits")


def _number(name: str, fields: Mapping[str, Any], field: str, default: Any) -> Any:
    value = fields.get(field, default)
    if value is default:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < 1 << 53:
        raise ArgumentError(f"user {name!r}: '{field}' must be a number of at least 1")
    return int(value)


def users_of(users: Users | UserFunction | Mapping[str, Any]) -> Users:
    """Return a user database of a database, a function or a dict; see `UserTable` and `UserFunction`."""
    if isinstance(users, Mapping):
        return UserTable(users)
    if hasattr(users, "find"):
        return users
    if not callable(users):
        raise ArgumentError(f"users: a dict, a function or a user database is needed, not {type(users).__name__}")
    return FunctionUsers(users)


def as_bytes(text: str) -> bytes:
    """Return a text as hashes take it; bytes that were no UTF-8 come back as they were."""
    return text.encode("utf-8", "surrogateescape")


def ha1_of(name: str, realm: str, password: str) -> str:
    """Return MD5(user:realm:password) in hexadecimal digits."""
    return md5(as_bytes(f"{name}:{realm}:{password}"), usedforsecurity=False).hexdigest()


def same(left: str, right: str) -> bool:
    """Compare two secrets in a time that tells neither where they differ nor how long they are."""
    return compare_digest(sha256(as_bytes(left)).digest(), sha256(as_bytes(right)).digest())


NOBODY = Account(password="", ha1="0" * 32)
"""Stands for an unknown user: what is done for one costs as much as for a wrong password."""


def proves_clear_text(account: Account, name: str, realm: str, password: str) -> bool:
    """Return whether `password` is that of the account; takes the same time for every kind of account."""
    by_password = same(account.password or "", password) and account.password is not None
    by_ha1 = same(account.ha1 or "", ha1_of(name, realm, password)) and account.ha1 is not None
    return account.is_verified or by_password or by_ha1


# ---- The users of the server's users file as a user database of pages (help: identity).

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
        """Return the groups of a user; none of one who is unknown."""
        return frozenset(self._service.groups_of(name))


def server_users() -> ServerUsers:
    """Return the users of the server's users file.

    Raises:
        ArgumentError: it has none.
    """
    service = of_server()
    if service is None or not service.settings.users:
        raise ArgumentError("the server has no users file; name one in the setting auth.users")
    return ServerUsers(service)

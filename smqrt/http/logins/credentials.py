"""Credentials of requests, and the user databases that they are checked against (spec: bas-api §5).

Credentials are Basic (RFC 7617), Digest (RFC 7616) and login forms.
"""

from __future__ import annotations

import re
from base64 import b64decode
from binascii import Error
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import md5, sha1, sha256
from hmac import compare_digest
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from smqrt.auth.identity import Identity
from smqrt.auth.service import IdentityService, server_identity_service
from smqrt.auth.users import BusyError
from smqrt.errors import ArgumentError
from smqrt.http.body import URLENCODED, media_type
from smqrt.http.headers import HttpError
from smqrt.http.logins.registry import BASIC, DIGEST, FORM, Logins, State

if TYPE_CHECKING:
    from smqrt.http.message import Request


_MAX_FIELD_BYTES = 4096  # of an Authorization field
_MAX_TEXT = 1024  # characters of a name or a password in a form, because they are hashed and names are stored
_PARAMETER = re.compile(r'\b([A-Za-z]{1,16})[ \t]?=[ \t]?(?:"((?:[^"\\]|\\.)*)"|([^\s,"]{1,512}))')
_ESCAPE = re.compile(r"\\(.)")
_COUNT = re.compile(r"[0-9a-fA-F]{8}")
_REQUIRED = frozenset(("username", "realm", "nonce", "uri", "response", "cnonce", "nc", "qop"))

_MAX_CACHED = 64  # hashes of URLs, which are not secret

Hash = Callable[[bytes], str]


def _md5(data: bytes) -> str:
    return md5(data, usedforsecurity=False).hexdigest()


def _sha256(data: bytes) -> str:
    return sha256(data).hexdigest()


ALGORITHMS: dict[str, Hash] = {"SHA-256": _sha256, "MD5": _md5}
"""Algorithms of Digest, in the order in which they are offered."""


@lru_cache(_MAX_CACHED)
def _ha2(algorithm: str, method: str, uri: str) -> str:
    return ALGORITHMS[algorithm](as_bytes(f"{method}:{uri}"))


class Credentials(Protocol):
    """Credentials that a client sent.

    Attributes:
        kind: "basic", "digest" or "form".
        name: name of the user.
        password: password in clear text, None if it is hashed.
    """

    kind: ClassVar[str]
    name: str
    password: str | None

    def proves(self, account: Account, realm: str) -> bool:
        """Return whether the credentials match the account; takes the same time for every account."""

    def freshness(self, logins: Logins) -> State:
        """Return the state of their nonce or seed. A value that this server did not issue is stale."""

    def use(self, logins: Logins) -> bool:
        """Record their use for a login; return whether it is the first use."""

    def can_be_proven(self, account: Account) -> bool:
        """Return whether the client's hash can be compared with the stored secret of the account."""


@dataclass(slots=True)
class ClearText:
    """A name and a password."""

    name: str
    password: str | None
    kind: ClassVar[str] = BASIC

    def proves(self, account: Account, realm: str) -> bool:
        """See `Credentials.proves`."""
        return proves_clear_text(account, self.name, realm, self.password or "")

    def freshness(self, logins: Logins) -> State:
        """See `Credentials.freshness`. A password may be used any number of times."""
        return State.VALID

    def use(self, logins: Logins) -> bool:
        """See `Credentials.use`."""
        return True

    def can_be_proven(self, account: Account) -> bool:
        """See `Credentials.can_be_proven`."""
        return True


@dataclass(slots=True)
class FormClearText(ClearText):
    """A name and a password from a form."""

    kind: ClassVar[str] = FORM


@dataclass(slots=True)
class FormHash:
    """A name, and the SHA-1 of the secret and a seed, from a form."""

    name: str
    digest: str
    seed: str
    seedkey: str
    password: str | None = None
    kind: ClassVar[str] = FORM

    def proves(self, account: Account, realm: str) -> bool:
        """See `Credentials.proves`. A page may also hash the HA1 if the database has the password."""
        by_password = self._matches(account.password or "") and account.password is not None
        computed = ha1_of(self.name, realm, account.password or "")
        ha1 = account.ha1 or computed
        return self._matches(ha1) and account.secret is not None or by_password

    def _matches(self, secret: str) -> bool:
        return _same_hash(self.digest, sha1(as_bytes(secret + self.seed), usedforsecurity=False).hexdigest())

    def freshness(self, logins: Logins) -> State:
        """See `Credentials.freshness`."""
        return State.VALID if logins.seeds.is_valid(self.seed, self.seedkey) else State.STALE

    def use(self, logins: Logins) -> bool:
        """See `Credentials.use`."""
        return logins.seeds.use(self.seed, self.seedkey)

    def can_be_proven(self, account: Account) -> bool:
        """See `Credentials.can_be_proven`."""
        return True


@dataclass(slots=True)
class Digest:
    """The response to a Digest challenge.

    Attributes:
        fields: parameters by name.
        method: method of the request.
        algorithm: "MD5" or "SHA-256".
        count: number of requests with this nonce, including this one.
    """

    name: str
    fields: dict[str, str]
    method: str
    algorithm: str
    count: int
    password: str | None = None
    kind: ClassVar[str] = DIGEST

    def proves(self, account: Account, realm: str) -> bool:
        """See `Credentials.proves`."""
        fields, hashed = self.fields, ALGORITHMS[self.algorithm]
        by_password = hashed(as_bytes(f"{self.name}:{realm}:{account.password or ''}"))
        ha1 = account.ha1 if account.password is None and account.ha1 is not None else by_password
        ha2 = _ha2(self.algorithm, self.method, fields["uri"])
        answer = ":".join((ha1, fields["nonce"], fields["nc"], fields["cnonce"], "auth", ha2))
        return _same_hash(fields["response"], hashed(as_bytes(answer))) and account.secret is not None

    def freshness(self, logins: Logins) -> State:
        """See `Credentials.freshness`."""
        return logins.nonces.state(self.nonce, self.count)

    def use(self, logins: Logins) -> bool:
        """See `Credentials.use`."""
        return logins.nonces.use(self.nonce, self.count)

    def can_be_proven(self, account: Account) -> bool:
        """See `Credentials.can_be_proven`. An HA1 is an MD5 hash."""
        return self.algorithm == "MD5" or account.password is not None or account.ha1 is None

    @property
    def nonce(self) -> str:
        """The nonce of the challenge."""
        return self.fields["nonce"]


def _same_hash(given: str, expected: str) -> bool:
    return compare_digest(as_bytes(given.lower()), expected.encode("ascii"))  # clients may send upper-case digits


def basic_of(request: Request) -> Credentials | None:
    """Return the Basic credentials of a request; None if they are missing or malformed."""
    scheme, _, text = (request.get("authorization") or "").partition(" ")
    if scheme.lower() != "basic" or len(text) > _MAX_FIELD_BYTES:
        return None
    try:
        data = b64decode(text.strip(), validate=True)
    except (Error, ValueError):
        return None
    name, colon, password = _text(data).partition(":")
    return ClearText(name, password) if colon else None


def digest_of(request: Request, realm: str) -> Digest | None:
    """Return the Digest credentials of a request.

    Return None if they are missing, malformed, or for another URL, realm or algorithm.
    """
    scheme, _, text = (request.get("authorization") or "").partition(" ")
    if scheme.lower() != "digest" or len(text) > _MAX_FIELD_BYTES:
        return None
    text = text if text.isascii() else _text(text.encode("latin-1"))
    fields = _plain_parameters(text)
    if not fields:
        # Commas and escapes in values, spaces around "=", names in capitals. Malformed parts are skipped: if such a
        # part matters, the response does not match.
        found = _PARAMETER.findall(text)
        fields = {name.lower(): _ESCAPE.sub(r"\1", quoted or token) for name, quoted, token in found}
        if len(fields) != len(found) or not _REQUIRED.issubset(fields):  # fewer: a duplicate name
            return None
    algorithm = fields.get("algorithm", "MD5").upper()
    is_ours = fields["realm"] == realm and fields["qop"] == "auth" and algorithm in ALGORITHMS
    count = fields["nc"]
    uri = fields["uri"]
    is_target = uri == request.target or uri.partition("://")[2] == f"{request.host}{request.target}"
    if not is_ours or not _COUNT.fullmatch(count) or not is_target:
        return None
    return Digest(fields["username"], fields, request.method, algorithm, int(count, 16))


def _plain_parameters(text: str) -> dict[str, str] | None:
    """Parse the simple form `name=value, name="value"` of nearly all clients; None for any other text."""
    fields: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if '"' in value:
            inner = value[1:-1]
            if value[0] != '"' or value[-1] != '"' or len(value) < 2 or '"' in inner or "\\" in inner:
                return None
            value = inner
        if name in fields:
            return None
        fields[name] = value
    return fields if _REQUIRED.issubset(fields) else None


def _text(data: bytes) -> str:
    """Decode a name or a password: UTF-8, or Latin-1 from old clients."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def form_of(request: Request, accepts_clear_text: bool = True) -> Credentials | None:
    """Return the credentials of a login form: a POST with `ba_username` to any URL; None for other requests.

    Args:
        request: the request.
        accepts_clear_text: whether a password in clear text is accepted; otherwise it counts as wrong.

    Raises:
        HttpError: the body cannot be read, or the name or the password is too long.
    """
    if request.method != "POST" or media_type(request) != URLENCODED or not request.has_body:
        return None
    fields: dict[bytes, str] = {}
    for field, value in request.raw_params():
        fields.setdefault(field, value.decode("utf-8", "surrogateescape"))
    name, password = fields.get(b"ba_username"), fields.get(b"ba_password", "")
    if name is None:
        return None
    if len(name) > _MAX_TEXT or len(password) > _MAX_TEXT:
        raise HttpError(413, f"The name or the password has more than {_MAX_TEXT} characters.")
    seed, seedkey = fields.get(b"ba_seed"), fields.get(b"ba_seedkey")
    if seed and seedkey and re.fullmatch(r"[0-9a-fA-F]{40}", password):
        return FormHash(name, password, seed, seedkey)
    return FormClearText(name, password) if accepts_clear_text else FormHash(name, "", "", "")  # matches no secret


# ---- User databases for logins: tables, functions, and the server's users file.

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
        users: by name, a password or `{"pwd": "text" or ["HA1"], "roles": [...], "maxusers": 5, "recycle": False,
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
        raise ArgumentError(f"user {name!r}: 'pwd' must be a string, or a list with an HA1 of 32 hexadecimal digits")
    roles = fields.get("roles") or ()
    if not isinstance(roles, Iterable) or isinstance(roles, str) or not all(isinstance(role, str) for role in roles):
        raise ArgumentError(f"user {name!r}: 'roles' must be a list of strings")
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
    # A Lua number may be a float, which is exact up to 2^53.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < 1 << 53:
        raise ArgumentError(f"user {name!r}: '{field}' must be a number of at least 1")
    return int(value)


def users_of(users: Users | UserFunction | Mapping[str, Any]) -> Users:
    """Return a user database for a database, a function or a dict; see `UserTable` and `UserFunction`."""
    if isinstance(users, Mapping):
        return UserTable(users)
    if hasattr(users, "find"):
        return users
    if not callable(users):
        raise ArgumentError(f"users: a dict, a function or a user database is needed, not {type(users).__name__}")
    return FunctionUsers(users)


def as_bytes(text: str) -> bytes:
    """Return a string as bytes for hashes. Surrogate escapes become the original bytes."""
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

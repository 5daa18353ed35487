"""Authorizers: what a user may do where (spec: bas-api §5, §17 A5)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from smqrt.errors import ArgumentError
from smqrt.http.logins.authenticator import Authenticator
from smqrt.http.logins.registry import Login
from smqrt.http.logins.users import Answered

if TYPE_CHECKING:
    from smqrt.http.message import Request
    from smqrt.http.tree import Directory


class Authorizer(Protocol):
    """Decides on what somebody who is logged in asks for."""

    def allows(self, request: Request, login: Login, method: str, path: str) -> bool:
        """Return whether the user may; may block.

        Args:
            request: that asks.
            login: the user.
            method: asked for, in upper case.
            path: as seen from the directory with the authenticator, without a slash at its beginning.
        """


class Roles(Protocol):
    """Knows which roles users have: `UserTable`, `ServerUsers`."""

    def roles(self, name: str) -> frozenset[str]:
        """Return the roles of a user; none of one who is unknown."""
        ...


class FunctionAuthorizer:
    """An authorizer that is a function of name, method, path and session."""

    def __init__(self, function: Callable[[str, str, str, object], object]) -> None:
        self._function = function

    def allows(self, request: Request, login: Login, method: str, path: str) -> bool:
        """See `Authorizer.allows`."""
        return self._function(login.name, method, path, login.session) is True


@dataclass(frozen=True, slots=True)
class _Rule:
    """Who may use which methods; no methods are all of them."""

    methods: frozenset[str]
    roles: frozenset[str]

    def allows(self, method: str, roles: frozenset[str]) -> bool:
        return (not self.methods or method in self.methods) and not self.roles.isdisjoint(roles)


class Acl:
    """A list of patterns of paths, and who may do what there.

    The most specific pattern that fits decides alone; several entries with the same pattern allow what one of them
    allows. What no pattern fits is refused.

    Args:
        users: gives the roles of a user.
        rules: by any name, `{"urls": ["/docs/*"], "methods": ["GET"], "roles": ["reader"]}`; no methods are all.
        is_case_sensitive: whether letters of paths differ by their case.

    Raises:
        ArgumentError: an entry is not so; it names the entry.
    """

    def __init__(self, users: Roles, rules: Mapping[str, Any] | None = None, is_case_sensitive: bool = False) -> None:
        self._users = users
        self.is_case_sensitive = is_case_sensitive
        self._rules: list[tuple[tuple[int, bool], str, _Rule]] = []
        self.set(rules or {})

    def set(self, rules: Mapping[str, Any]) -> None:
        """Replace all rules. Raises as the constructor; then the old ones stay."""
        found = [(_weight(url), url, rule) for name, entry in rules.items() for url, rule in _rules(name, entry)]
        self._rules = sorted(found, key=lambda entry: entry[0], reverse=True)

    def allows(self, request: Request, login: Login, method: str, path: str) -> bool:
        """See `Authorizer.allows`; `path` may begin with a slash."""
        roles = self._users.roles(login.name)
        path = "/" + path.lstrip("/")
        decisive: tuple[int, bool] | None = None
        for weight, pattern, rule in self._rules:
            if decisive is not None and weight != decisive:
                break
            if self._fits(pattern, path):
                decisive = weight
                if rule.allows(method, roles):
                    return True
        return False

    def _fits(self, pattern: str, path: str) -> bool:
        if not self.is_case_sensitive:
            pattern, path = pattern.lower(), path.lower()
        if pattern.endswith("/*") and path == pattern[:-2]:
            return True  # who may not touch what is in a folder may not delete it either
        return path.startswith(pattern[:-1]) if pattern.endswith("*") else path == pattern


def _weight(pattern: str) -> tuple[int, bool]:
    """Longer is more specific, and without a star more so than with one. Two that fit and weigh the same are the
    same."""
    return len(pattern.removesuffix("*")), not pattern.endswith("*")


def _rules(name: str, entry: Any) -> list[tuple[str, _Rule]]:
    if not isinstance(entry, Mapping):
        raise ArgumentError(f"rule {name!r}: a table with 'urls', 'methods' and 'roles' is needed")
    urls = _texts(name, entry, "urls")
    if not urls:
        raise ArgumentError(f"rule {name!r}: 'urls' must be a list of patterns such as '/docs/*'")
    methods = frozenset(method.upper() for method in _texts(name, entry, "methods"))
    rule = _Rule(methods, frozenset(_texts(name, entry, "roles")))
    return [("/" + url.lstrip("/"), rule) for url in urls]


def _texts(name: str, entry: Mapping[str, Any], field: str) -> list[str]:
    values = entry.get(field) or ()
    if (
        not isinstance(values, Iterable)
        or isinstance(values, str | Mapping)
        or not all(isinstance(value, str) for value in values)
    ):
        raise ArgumentError(f"rule {name!r}: '{field}' must be a list of texts")
    return list(values)


# ---- The guard of a directory: its authenticator, and what its users may do there (spec: bas-api §4, `dir:setauth`).

_PASSED = "guards"  # in Request.env


def passed(request: Request) -> list[LoginGuard]:
    """Return the guards that have let a request in so far."""
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
        """Return whether the request goes no further, because it has been answered: with a login page, 401, 403. May
        block.

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
        """Return whether a request that it has let in may be about another path as well. May block.

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

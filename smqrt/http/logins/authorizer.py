"""Authorizers, and the login guard of a directory (spec: bas-api §5, §17 A5)."""

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


class Authorizer(Protocol):
    """Decides which requests a logged-in user may make."""

    def allows(self, request: Request, login: Login, method: str, path: str) -> bool:
        """Return whether the request is permitted; may block.

        Args:
            request: the request.
            login: login of the user.
            method: method in upper case.
            path: path relative to the directory with the authenticator, without a leading slash.
        """


class Roles(Protocol):
    """The roles of users: `UserTable`, `ServerUsers`."""

    def roles(self, name: str) -> frozenset[str]:
        """Return the roles of a user; empty for an unknown one."""
        ...


class FunctionAuthorizer:
    """An authorizer that calls a function with name, method, path and session."""

    def __init__(self, function: Callable[[str, str, str, object], object]) -> None:
        self._function = function

    def allows(self, request: Request, login: Login, method: str, path: str) -> bool:
        """See `Authorizer.allows`."""
        return self._function(login.name, method, path, login.session) is True


@dataclass(frozen=True, slots=True)
class _Rule:
    """Roles that may use methods. Without methods, they may use all."""

    methods: frozenset[str]
    roles: frozenset[str]

    def allows(self, method: str, roles: frozenset[str]) -> bool:
        return (not self.methods or method in self.methods) and not self.roles.isdisjoint(roles)


class Acl:
    """Access control list: roles and methods for patterns of paths.

    The most specific matching pattern decides alone. Several entries with the same pattern permit what one of them
    permits. A path without a matching pattern is denied.

    Args:
        users: provides the roles of users.
        rules: rules by any name, `{"urls": ["/docs/*"], "methods": ["GET"], "roles": ["reader"]}`. Without methods, a
            rule is for all methods.
        is_case_sensitive: whether paths are case-sensitive.

    Raises:
        ArgumentError: a rule is malformed; the text names it.
    """

    def __init__(self, users: Roles, rules: Mapping[str, Any] | None = None, is_case_sensitive: bool = False) -> None:
        self._users = users
        self.is_case_sensitive = is_case_sensitive
        self._rules: list[tuple[tuple[int, bool], str, _Rule]] = []
        self.set(rules or {})

    def set(self, rules: Mapping[str, Any]) -> None:
        """Replace all rules. Raises as the constructor, and then keeps the old rules."""
        found = [(_weight(url), url, rule) for name, entry in rules.items() for url, rule in _rules(name, entry)]
        self._rules = sorted(found, key=lambda entry: entry[0], reverse=True)

    def allows(self, request: Request, login: Login, method: str, path: str) -> bool:
        """See `Authorizer.allows`. Here `path` may begin with a slash."""
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
            return True  # the folder itself: a rule for its content also governs its deletion
        return path.startswith(pattern[:-1]) if pattern.endswith("*") else path == pattern


def _weight(pattern: str) -> tuple[int, bool]:
    """Return how specific a pattern is: by its length, then without a star. Two that match with the same weight are
    equal."""
    return len(pattern.removesuffix("*")), not pattern.endswith("*")


def _rules(name: str, entry: Any) -> list[tuple[str, _Rule]]:
    if not isinstance(entry, Mapping):
        raise ArgumentError(f"rule {name!r}: must be a table with 'urls', 'methods' and 'roles'")
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


# ---- The login guard of a directory (spec: bas-api §4, `dir:setauth`).

_PASSED_GUARDS = "guards"  # in Request.env


def passed(request: Request) -> list[LoginGuard]:
    """Return the guards that have permitted a request so far."""
    return list(_logins(request))


def _logins(request: Request) -> dict[LoginGuard, Login]:
    found: dict[LoginGuard, Login] = request.env.setdefault(_PASSED_GUARDS, {})
    return found


class GuardedDirectory(Protocol):
    """The parts of `smqrt.http.tree.Directory` that a guard uses."""

    def baseuri(self) -> str:
        """Return the path of the directory."""

    def refuse(self, request: Request) -> None:
        """Respond to a request that the authorizer denies."""


class LoginGuard:
    """Authentication and authorization for a directory.

    Args:
        authenticator: authenticates clients.
        authorizer: authorizes their requests; None permits all.
        directory: the directory, for the login page.
    """

    def __init__(
        self, authenticator: Authenticator, authorizer: Authorizer | None, directory: GuardedDirectory
    ) -> None:
        self.authenticator, self.authorizer = authenticator, authorizer
        self.directory = directory

    def stops(self, request: Request, relpath: str) -> bool:
        """Return whether the guard has answered the request: with a login page, 401 or 403. May block.

        Args:
            request: the request.
            relpath: path relative to the directory.

        Raises:
            HttpError: the body cannot be read.
        """
        login = self.authenticator.authenticate(request, relpath, self.directory)
        if login is None:
            return True
        if not login.needs_credentials and not request.response.committed:
            request.response.headers.set("Cache-Control", "private")  # the response depends on the cookie
        try:
            if self._allows(request, login, request.method, relpath):
                _logins(request)[self] = login
                return False
        except Answered:
            return True
        self.directory.refuse(request)
        return True

    def allows_also(self, request: Request, method: str, path: str) -> bool:
        """Return whether a request that the guard has permitted may also use another path. May block.

        Args:
            method: method for that path.
            path: path from the root of the server.
        """
        relpath = path.removeprefix(self.directory.baseuri())
        try:
            return self._allows(request, _logins(request)[self], method, relpath)
        except Answered:
            return False

    def _allows(self, request: Request, login: Login, method: str, relpath: str) -> bool:
        return self.authorizer is None or self.authorizer.allows(request, login, method, relpath)

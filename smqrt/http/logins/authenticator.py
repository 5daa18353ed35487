"""Authenticators, authorizers and login guards (spec: bas-api §5, §17)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Protocol

from smqrt.auth.throttle import Throttle
from smqrt.errors import ArgumentError
from smqrt.http.headers import error_page
from smqrt.http.logins.credentials import (
    UNKNOWN_USER,
    Account,
    Answered,
    Credentials,
    Digest,
    ServerUsers,
    UserFunction,
    Users,
    UserTable,
    as_bytes,
    basic_of,
    digest_of,
    form_of,
    users_of,
)
from smqrt.http.logins.registry import BASIC, DIGEST, FORM, Login, State

if TYPE_CHECKING:
    from smqrt.http.message import Request


# ---- Default login page

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Sign in · {realm}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/rtl/page.css">
<link rel="stylesheet" href="/rtl/login.css">
{scripts}</head>
<body>
<main>
<form method="post" class="card">
<div><h1>Sign in</h1><p class="soft">{realm}</p></div>
<div><label for="ba_username">Name</label>
<input id="ba_username" name="ba_username" required autocomplete="username" autocapitalize="none" autofocus></div>
<div><label for="ba_password">Password</label>
<input id="ba_password" name="ba_password" type="password" required autocomplete="current-password"></div>
<p role="alert">{error}</p>
{fields}<button id="ba_loginbut">Sign in</button>
</form>
</main>
</body>
</html>
"""
_SCRIPTS = """<script src="/rtl/sha1.js" defer></script>
<script src="/rtl/spark-md5.min.js" defer></script>
"""
_FIELDS = """<input type="hidden" name="ba_realm" value="{realm}">
<input type="hidden" name="ba_seed" value="{seed}">
<input type="hidden" name="ba_seedkey" value="{seedkey}">
"""


def login_page(info: AuthInfo, hashes: bool) -> bytes:
    """Return the default login page.

    Args:
        info: values for the page.
        hashes: whether the page hashes the password. A user database that needs the password cannot use a hash.
    """
    error = escape(info.why) or ("The name or the password is wrong." if info.username is not None else "")
    if info.denied:
        error = "Too many attempts. Try again in a while."
    realm = escape(info.realm)
    fields = _FIELDS.format(realm=realm, seed=info.seed, seedkey=info.seedkey) if hashes else ""
    page = _PAGE.format(realm=realm, error=error, scripts=_SCRIPTS if hashes else "", fields=fields)
    return page.encode("utf-8", "backslashreplace")


KINDS = ("auth", "digest", "basic", "form", "sform", "dav")
UNKNOWN_USER_WITH_HA1 = Account(ha1="0" * 32)
DEFAULT_REALM = "Barracuda Server"
_PAGE_METHODS = ("GET", "HEAD", "POST")
_PAGE_ENDS = ("/", ".htm", ".html", ".lsp")
_HTML = "text/html; charset=utf-8"
_LOGIN_NEEDED = b'{"error": "You have to log in."}'


@dataclass
class AuthInfo:
    """Values for a login page (spec: bas-api §5, `authinfo`).

    Attributes:
        type: "basic", "digest" or "form".
        realm: realm of the authenticator.
        loginattempts: failed logins of the client's address since its last successful one.
        denied: whether there were too many failed logins; then the credentials were not checked.
        seed, seedkey: values for a form that hashes the password; None for the other types.
        username, password: credentials that the client sent, or None.
        upwd: secret in the user database; None for an unknown user.
        reason: why a correct password was rejected: "maxusers", the limit of the user's sessions is reached; else None.
        maxusers, recycle, inactive: values of the user in the user database; `inactive` is in seconds.
        directory: the directory that requires the login; None for a handler.
    """

    type: str
    realm: str
    loginattempts: int = 0
    denied: bool = False
    seed: str | None = None
    seedkey: str | None = None
    username: str | None = None
    password: str | None = None
    upwd: str | None = None
    reason: str | None = None
    maxusers: int | None = None
    recycle: bool | None = None
    inactive: int | None = None
    directory: Any = None

    @property
    def why(self) -> str:
        """The reason as a sentence; empty without a reason."""
        if self.reason is None:
            return ""
        return f"The password is correct, but {self.username} has {self.maxusers} sessions already: log out of one."


LoginPage = Callable[["Request", AuthInfo], object]
"""Writes the login page into `request.response`; may block. May raise `Answered`."""


class Authenticator:
    """Authenticates the clients of a directory.

    Args:
        users: a dict by name (see `UserTable`), a function (see `UserFunction`), or another user database.
        kind: "digest" or "basic" as in HTTP; "form" for a login page; "sform" for one that without TLS accepts only
            hashed passwords; "auth" to choose "digest", "basic" or "form" for each client; "dav" to choose "digest" or
            "basic".
        realm: name in the browser's login dialog, and part of every HA1.
        page: writes the login page, or the page of a 401. None for the default page.
        tracker: whether an address must wait ten minutes before each further attempt after four failed logins.

    Raises:
        ArgumentError: the kind is unknown, or unsuitable for the server's users; or the realm has a quote or a control
            character.
    """

    def __init__(
        self,
        users: Users | UserFunction | Mapping[str, Any],
        kind: str = DIGEST,
        *,
        realm: str = DEFAULT_REALM,
        page: LoginPage | None = None,
        tracker: bool = False,
    ) -> None:
        if kind not in KINDS:
            raise ArgumentError(f"kind: unknown type of authenticator {kind!r}; use one of {', '.join(KINDS)}")
        if isinstance(users, ServerUsers) and kind not in ("basic", "form", "sform"):
            raise ArgumentError(
                f"kind: {kind!r} needs passwords in clear text; those of the server's users are hashes: use 'basic' or "
                "'form'"
            )
        if re.search(r'["\\\x00-\x1f\x7f]', realm):
            raise ArgumentError("realm: must not contain a quote, a backslash or a control character")
        self.kind, self.realm, self.page, self.tracker = kind, realm, page, tracker
        self._header_realm = as_bytes(realm).decode("latin-1")  # header fields are encoded as latin-1
        self._users = users_of(users)
        self._has_ha1 = False  # whether an HA1 was found: it is an MD5 hash, so Digest must then use MD5

    def authenticate(self, request: Request, path: str = "", directory: object = None) -> Login | None:
        """Return the login of a request. Without one, send a login page or a challenge and return None. May block.

        Args:
            request: the request.
            path: path relative to the protected directory, for the kind "auth".
            directory: the protected directory, for the login page.

        Raises:
            HttpError: the form cannot be read.
        """
        request.is_repeatable = False
        try:
            accepts_clear_text = self.kind != "sform" or request.secure
            credentials = form_of(request, accepts_clear_text) if self._has_form else None
            current = request.logins.of(request)
            if credentials is None:
                if current is not None and not current.needs_credentials:
                    return current
                kind = self._kind_for(request, path)
                if kind == BASIC:
                    credentials = basic_of(request)
                elif kind == DIGEST:
                    credentials = digest_of(request, self.realm)
                if credentials is None:
                    self._request_login(request, AuthInfo(kind, self.realm, directory=directory))
                    return None
            return self._attempt(request, credentials, current, directory)
        except Answered:
            return None

    # Kind of login

    @property
    def _has_form(self) -> bool:
        return self.kind in ("form", "sform", "auth")

    def _kind_for(self, request: Request, path: str) -> str:
        if self.kind in (BASIC, DIGEST):
            return self.kind
        if self.kind in ("form", "sform"):
            return FORM
        chosen = (request.get("authorization") or "").partition(" ")[0].lower()
        if chosen not in (BASIC, DIGEST):
            chosen = (request.get("prefauth") or "").strip().lower()
        if chosen in (BASIC, DIGEST):
            return chosen
        by_script = (request.get("x-requested-with") or "").lower() == "xmlhttprequest"
        # A client that sends PROPFIND or OPTIONS is a program, which cannot use a form.
        is_page = request.method in _PAGE_METHODS and (not path or path.lower().endswith(_PAGE_ENDS))
        return FORM if self._has_form and is_page and not by_script else DIGEST

    # Login attempts

    def _attempt(
        self, request: Request, credentials: Credentials, current: Login | None, directory: object
    ) -> Login | None:
        logins = request.logins
        logins.sessions.catch_up()  # the guesses at other workers count too
        freshness = self._freshness(request, credentials)
        if freshness is not State.VALID:
            self._request_login(request, self._info_of(credentials, directory, freshness), freshness is State.STALE)
            return None
        throttle, peer, name = self._throttle(request), str(request.peer[0]), credentials.name
        # A client that is logged in is not throttled, so that guesses of other clients cannot lock it out.
        is_trusted = current is not None and current.name == name and current.kind == credentials.kind
        if not is_trusted and not throttle.take(peer, name):
            info, wait_s = self._info_of(credentials, directory), throttle.wait_s(peer, name)
            info.denied = True
            request.response.headers.set("Retry-After", str(wait_s))
            self._send_page(request, info, 429, f"Too many failed logins. Try again in {wait_s} seconds.")
            return None
        account = self._users.find(name, credentials.password, request)
        is_proven = credentials.proves(account or UNKNOWN_USER, self.realm)
        if account is None or not is_proven:
            self._fail(request, credentials, account, directory)
            return None
        if not is_trusted or throttle.failures(peer):
            throttle.succeeded(peer, name)
        is_used = False  # whether an outer authenticator has used the nonce for this request
        if isinstance(credentials, Digest):
            nonce = credentials.nonce
            is_used = logins.noted_nonce(request) == nonce
            logins.note_nonce(request, nonce)
        if not is_used and not credentials.use(logins):
            self._request_login(request, self._info_of(credentials, directory, State.STALE), is_stale=True)
            return None
        return self._begin(request, credentials, account, directory)

    def _fail(self, request: Request, credentials: Credentials, account: Account | None, directory: object) -> None:
        # If one user of a table has an HA1, respond to all names as if they had one: this hides which names exist.
        stored = UNKNOWN_USER_WITH_HA1 if isinstance(self._users, UserTable) and self._users.has_ha1 else account
        if stored is not None and not credentials.can_be_proven(stored):
            self._has_ha1 = True
            self._request_login(request, self._info_of(credentials, directory, State.STALE), is_stale=True)
            return
        self._throttle(request).failed(str(request.peer[0]), credentials.name)
        self._request_login(request, self._info_of(credentials, directory, account=account))

    def _begin(self, request: Request, credentials: Credentials, account: Account, directory: object) -> Login | None:
        password = credentials.password if credentials.password is not None else account.secret
        limits = account.maxusers, account.recycle, account.inactive_s, account.identity
        login = request.logins.begin(request, credentials.name, password, credentials.kind, *limits)
        if login is None:
            info = self._info_of(credentials, directory, account=account)
            info.reason = "maxusers"
            self._request_login(request, info)
            return None
        if credentials.kind != FORM:
            return login
        # Redirect to the same URL with GET, so that a reload of the page does not send the password again.
        response = request.response
        response.status = 302
        scheme = "https" if request.secure else "http"
        response.headers.set("Location", f"{scheme}://{request.authority}{request.target}")
        response.headers.set("Cache-Control", "no-store")
        response.end()
        return None

    def _throttle(self, request: Request) -> Throttle:
        return request.logins.tracker if self.tracker else request.logins.throttle

    def _freshness(self, request: Request, credentials: Credentials) -> State:
        if isinstance(credentials, Digest):
            if self._has_ha1 and credentials.algorithm != "MD5":
                return State.STALE
            if request.logins.noted_nonce(request) == credentials.nonce:
                return State.VALID  # an outer authenticator has used it for this request
        return credentials.freshness(request.logins)

    # Responses without a login

    def _info_of(
        self,
        credentials: Credentials,
        directory: object,
        freshness: State = State.VALID,
        account: Account | None = None,
    ) -> AuthInfo:
        info = AuthInfo(credentials.kind, self.realm, directory=directory)
        # After a stale Digest, the client repeats the request by itself. Otherwise the page shows the failed attempt.
        if freshness is not State.STALE or credentials.kind == FORM:
            info.username, info.password = credentials.name, credentials.password
        if account is not None:
            info.upwd, info.maxusers = account.secret, account.maxusers
            info.recycle, info.inactive = account.recycle, account.inactive_s
        return info

    def _request_login(self, request: Request, info: AuthInfo, is_stale: bool = False) -> None:
        if info.type == FORM:
            if _wants_json(request, info.username is not None, self.page is not None):
                request.response.status = 401
                request.response.headers.set("Cache-Control", "no-store")
                request.response.headers.set("Content-Type", "application/json")
                request.response.end(_LOGIN_NEEDED)
            else:
                self._send_page(request, info, 200, info.why)
            return
        for challenge in self._challenges(request, info.type, is_stale):
            request.response.headers.add("WWW-Authenticate", challenge)
        self._send_page(request, info, 401, info.why)

    def _challenges(self, request: Request, kind: str, is_stale: bool) -> list[str]:
        basic = f'Basic realm="{self._header_realm}", charset="UTF-8"'
        if kind == BASIC:
            return [basic]
        nonce = request.logins.nonces.issue()
        stale = ", stale=true" if is_stale else ""
        algorithms = ("MD5",) if self._has_ha1 else ("SHA-256", "MD5")  # clients use the first one that they support
        digests = [
            f'Digest realm="{self._header_realm}", qop="auth", algorithm={algorithm}, nonce="{nonce}", '
            f'opaque="0", charset=UTF-8{stale}'
            for algorithm in algorithms
        ]
        # Basic sends the password in clear text, so these kinds offer it over TLS only.
        return [*digests, basic] if self.kind in ("auth", "dav") and request.secure else digests

    def _send_page(self, request: Request, info: AuthInfo, status: int, detail: str) -> None:
        info.loginattempts = self._throttle(request).failures(str(request.peer[0]))
        if info.type == FORM:
            info.seed, info.seedkey = request.logins.seeds.issue()
        response = request.response
        response.status = status
        response.headers.set("Cache-Control", "no-store")
        if self.page is None:
            response.headers.set("Content-Type", _HTML)
            hashes = isinstance(self._users, UserTable)
            response.end(login_page(info, hashes) if info.type == FORM else error_page(status, detail))
            return
        if "content-type" not in response.headers:
            response.headers.set("Content-Type", _HTML)
        self.page(request, info)


def _wants_json(request: Request, has_form: bool, has_page: bool) -> bool:
    """Return whether the client is a program that cannot use a login page.

    Scripts that post the form of a login page expect the page, unless they accept JSON and not HTML. For scripts with
    X-Requested-With, the page of an application sends the seed as JSON.
    """
    accepted = request.get("accept") or ""
    kinds = [one.partition(";")[0].strip().lower() for one in accepted.split(",")]
    if request.get("sec-fetch-mode") == "navigate" or "text/html" in kinds:
        return False
    by_script = request.get("x-requested-with") is not None
    if by_script and has_page:
        return False
    if "application/json" in kinds:
        return True
    content = (request.get("content-type") or "").partition(";")[0].strip().lower()
    return not has_form and (content == "application/json" or by_script)


# ---- Authorizers (spec: bas-api §5, §17 A5)


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

    Only the most specific matching pattern decides. If several entries have it, the request is permitted if one of them
    permits it. A path without a matching pattern is denied.

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
        # Weights: longer patterns first, then those without a star. Matching patterns of equal weight are the same.
        found = [
            ((len(url.removesuffix("*")), not url.endswith("*")), url, rule)
            for name, entry in rules.items()
            for url, rule in _rules(name, entry)
        ]
        self._rules = sorted(found, key=lambda entry: entry[0], reverse=True)

    def allows(self, request: Request, login: Login, method: str, path: str) -> bool:
        """See `Authorizer.allows`. Here `path` may begin with a slash."""
        roles = self._users.roles(login.name)
        path = "/" + (path if self.is_case_sensitive else path.lower()).lstrip("/")
        decisive: tuple[int, bool] | None = None
        for weight, pattern, rule in self._rules:
            if decisive is not None and weight != decisive:
                break
            pattern = pattern if self.is_case_sensitive else pattern.lower()
            is_folder = pattern.endswith("/*") and path == pattern[:-2]  # a rule for its content governs its deletion
            if is_folder or (path.startswith(pattern[:-1]) if pattern.endswith("*") else path == pattern):
                decisive = weight
                if rule.allows(method, roles):
                    return True
        return False


def _rules(name: str, entry: Any) -> list[tuple[str, _Rule]]:
    if not isinstance(entry, Mapping):
        raise ArgumentError(f"rule {name!r}: must be a table with 'urls', 'methods' and 'roles'")
    urls = _strings(name, entry, "urls")
    if not urls:
        raise ArgumentError(f"rule {name!r}: 'urls' must be a list of patterns such as '/docs/*'")
    methods = frozenset(method.upper() for method in _strings(name, entry, "methods"))
    rule = _Rule(methods, frozenset(_strings(name, entry, "roles")))
    return [("/" + url.lstrip("/"), rule) for url in urls]


def _strings(name: str, entry: Mapping[str, Any], field: str) -> list[str]:
    values = entry.get(field) or ()
    if (
        not isinstance(values, Iterable)
        or isinstance(values, str | Mapping)
        or not all(isinstance(value, str) for value in values)
    ):
        raise ArgumentError(f"rule {name!r}: '{field}' must be a list of strings")
    return list(values)


# ---- Login guard of a directory (spec: bas-api §4, `dir:setauth`)

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

    def deny(self, request: Request) -> None:
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
        self.directory.deny(request)
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

"""Identity service: logins, and checks of connected clients after changes.

It reads the users file and the access control list, and reads them again at a reload. `login` checks the credentials of
a client; `revalidate` re-checks a connected client after a change.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import gevent
from gevent import get_hub

from smqrt.auth import identity as acl
from smqrt.auth import users
from smqrt.auth.credentials import (
    CertificateError,
    FetchDocument,
    RevocationLists,
    TokenError,
    TokenKeys,
    accepts_tokens,
    check_template,
    check_token_settings,
    identity_of_certificate,
    identity_of_token,
    key_paths,
    load_keys,
    load_lists,
)
from smqrt.auth.identity import AclRights, Action, Identity, Method
from smqrt.auth.throttle import Throttle
from smqrt.auth.users import BusyError, Passwords
from smqrt.crypto.tokens import VerifyKey
from smqrt.errors import ArgumentError, SmqrtError, StartError
from smqrt.settings.limits import Limit, LineLimit
from smqrt.settings.server_settings import AuthSettings

log = logging.getLogger("smqrt")

PASSWORDS = Limit("passwords_waiting", "", "the queue of password checks is full")
EXPIRY_S = 1.0
"""The interval of checks for expired logins; a check takes some microseconds for a hundred clients."""


class LoginFailure(Enum):
    """Why a login was rejected. The client receives the text."""

    MISSING = "no user name and password, and no token"
    WRONG = "wrong user name or password"
    THROTTLED = "too many failed logins; try again later"
    BUSY = "too many logins at once; try again later"
    TOKEN = "the token is not valid"
    CERTIFICATE = "the client certificate names no user"
    CLIENT_ID = "the client id has + # or /, which are special in the access control list"


class LoginRejected(SmqrtError):
    """A login was rejected; the client receives the text.

    Args:
        reason: the reason.
        detail: the text for the client, by default that of the reason.
    """

    def __init__(self, reason: LoginFailure, detail: str = "") -> None:
        super().__init__(detail or reason.value)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class PresentedCredentials:
    """Credentials of a client.

    Attributes:
        address: the client's IP address.
        client_id: see `Identity`.
        name, password: user name and password; None without them.
        token: a JSON Web Token.
        certificate: the certificate that the TLS handshake has verified, DER.
        login: the login of the browser's session.
    """

    address: str
    client_id: bytes = b""
    name: str | None = None
    password: bytes | None = field(default=None, repr=False)
    token: bytes | None = field(default=None, repr=False)
    certificate: bytes | None = None
    login: Identity | None = None


class IdentityService:
    """Checks the credentials of clients.

    Args:
        settings: the settings group `auth`.
        throttle: limits failed logins.
        fetch: returns the keys of `auth.jwt_jwks`.
        revocation_lists: paths of files with revocation lists.

    Attributes:
        rights: the permissions of clients; None without an access control list.
        changed: functions that are called after a reload, to re-check connected clients.
        expiring: functions that are called every second, to disconnect clients whose login has expired.
        logins: number of logins by method.
        rejections: number of rejected logins by reason.
        throttle: see above.
        reload_failed: whether the last reload failed; the former content of the files then stays in use.

    Raises:
        StartError: a file can't be read or is not valid, or no login is possible.
    """

    def __init__(
        self,
        settings: AuthSettings,
        throttle: Throttle,
        fetch: FetchDocument,
        revocation_lists: Sequence[str] = (),
    ) -> None:
        _check(settings)
        self.settings = settings
        self.rights: AclRights | None = AclRights(Path(settings.acl)) if settings.acl else None
        self.changed: list[Callable[[], object]] = []
        self.expiring: list[Callable[[], object]] = []
        self._expiry_checks: gevent.Greenlet[..., None] | None = None
        self.logins: Counter[Method] = Counter()
        self.rejections: Counter[LoginFailure] = Counter()
        self.reload_failed = False
        self.throttle = throttle
        self._passwords = Passwords()
        self._users: users.Users = {}
        self._keys = TokenKeys(settings, fetch, self._call_changed)
        self._accepts_tokens = accepts_tokens(settings)
        self._list_files = list(revocation_lists) if settings.certificate_user else []
        self._revoked = RevocationLists()
        self._lines = LineLimit()
        if fault := self._load():
            raise StartError(f"{fault}.")

    @staticmethod
    def is_wanted(settings: AuthSettings) -> bool:
        """Return whether the settings need an identity service."""
        return bool(settings.users or settings.acl or settings.certificate_user or accepts_tokens(settings))

    @staticmethod
    def check(settings: AuthSettings, revocation_lists: Sequence[str] = ()) -> None:
        """Check the settings and read the files, like a new service.

        Raises:
            StartError: a file can't be read or is not valid, or no login is possible.
        """
        _check(settings)
        found = _read(settings, list(revocation_lists) if settings.certificate_user else [])
        if isinstance(found, ArgumentError):
            raise StartError(f"{found}.")

    # ---- the files

    def paths(self) -> list[str]:
        """Return the paths of all files that are read."""
        own = [path for path in (self.settings.users, self.settings.acl) if path]
        return [*own, *key_paths(self.settings), *self._list_files]

    def reload(self) -> str | None:
        """Read the files again; blocks this greenlet. After an error the former content stays in use.

        Returns:
            The error as a sentence; None on success.
        """
        fault = self._load()
        if fault is None:
            self._call_changed()
        self.reload_failed = fault is not None
        return fault

    def _call_changed(self) -> None:
        for fn in list(self.changed):
            fn()

    def _load(self) -> str | None:
        # In a thread, because parsing a large users file takes longer than a turn of the loop.
        outcome = get_hub().threadpool.apply(_read, (self.settings, self._list_files))
        if isinstance(outcome, ArgumentError):
            return str(outcome)
        found, rules, keys, self._revoked = outcome
        self._keys.set_file_keys(keys)
        self._users = found
        if self.rights is not None and rules is not None:
            self.rights.acl = rules
        if found:  # any user's: usually all hashes have the same parameters
            self._passwords.set_typical(next(iter(found.values())).password_hash)
        return None

    def start(self) -> None:
        """Begin to fetch the keys of tokens, and to check for expired logins."""
        self._keys.start()
        # Passwords do not expire, so without tokens and certificates there is no periodic check.
        if (self._accepts_tokens or self.settings.certificate_user) and self._expiry_checks is None:
            self._expiry_checks = gevent.spawn(self._check_expiry)

    def _check_expiry(self) -> None:
        while True:
            gevent.sleep(EXPIRY_S)
            for fn in list(self.expiring):
                fn()

    def close(self) -> None:
        """Stop the threads, the fetches and the checks."""
        self._keys.stop()
        if self._expiry_checks is not None:
            self._expiry_checks.kill(block=False)
        self._passwords.close()

    # ---- logins

    def login(self, credentials: PresentedCredentials, is_connected: Callable[[], bool] = lambda: True) -> Identity:
        """Return the identity of a client; blocks this greenlet.

        Args:
            credentials: the credentials that it presents.
            is_connected: returns whether the client is still connected; otherwise no password is checked.

        Raises:
            LoginRejected: the login was rejected; this is counted and logged.
        """
        try:
            identity = self._login(credentials, is_connected)
        except LoginRejected as rejected:
            self.rejections[rejected.reason] += 1
            name = f" as {credentials.name[:64]!r}" if credentials.name is not None else ""
            self._lines.warn(f"refused: a login{name} from {credentials.address}: {rejected}")
            raise
        self.logins[identity.method] += 1
        return identity

    def _login(self, credentials: PresentedCredentials, is_connected: Callable[[], bool]) -> Identity:
        # Credentials that the client sends explicitly take precedence over those of its browser and its connection.
        if credentials.name is not None:
            identity = self._by_password(credentials, credentials.name, credentials.password or b"", is_connected)
        elif credentials.token is not None:
            if not self._accepts_tokens:
                text = "this server does not accept tokens; see the setting auth.jwt_key"
                raise LoginRejected(LoginFailure.TOKEN, text)
            try:
                identity = identity_of_token(credentials.token, self._keys, self.settings)
            except TokenError as error:
                raise LoginRejected(LoginFailure.TOKEN, f"{LoginFailure.TOKEN.value}: {error}") from None
        elif credentials.login is not None:
            identity = self.checked(credentials.login)
        elif credentials.certificate is not None and self.settings.certificate_user:
            template, groups = self.settings.certificate_user, self.settings.certificate_groups
            try:
                identity = identity_of_certificate(credentials.certificate, template, groups)
            except CertificateError as error:
                raise LoginRejected(LoginFailure.CERTIFICATE, f"{LoginFailure.CERTIFICATE.value}: {error}") from None
            if fault := self.revalidate(identity):  # revoked, or expired since the handshake
                raise LoginRejected(LoginFailure.CERTIFICATE, fault)
        elif self.settings.anonymous:
            identity = Identity("")
        else:
            raise LoginRejected(LoginFailure.MISSING)
        identity.address, identity.client_id, identity.rights = credentials.address, credentials.client_id, self.rights
        return identity

    def _by_password(
        self, credentials: PresentedCredentials, name: str, password: bytes, is_connected: Callable[[], bool]
    ) -> Identity:
        user = self._users.get(name)
        password_hash = user.password_hash if user else None
        is_known = user is not None and self._passwords.is_cached(name, user.password_hash, password)
        # The same password on several connections, as after a restart of the server, is one guess.
        is_guess = not is_known and not self._passwords.is_pending(name, password_hash, password)
        if is_guess and not self.throttle.take(credentials.address, name):
            raise LoginRejected(LoginFailure.THROTTLED)
        try:
            is_right = self._passwords.verify(name, password_hash, password, credentials.address, is_connected)
        except BusyError:
            self.throttle.refund(credentials.address, name)
            PASSWORDS.refused(f"a login from {credentials.address}")
            raise LoginRejected(LoginFailure.BUSY) from None
        if user is None or not is_right:
            self.throttle.failed(credentials.address, name)
            raise LoginRejected(LoginFailure.WRONG)
        if is_guess:
            self.throttle.succeeded(credentials.address, name)
        return _user_identity(user)

    def identity_of(self, name: str, password: bytes, address: str) -> Identity | None:
        """Return the identity for a name and a password; blocks this greenlet.

        Failed attempts are not throttled here: the logins of pages call the throttle.

        Returns:
            None for a wrong password, or an unknown user.

        Raises:
            BusyError: the queue of password checks is full.
        """
        user = self._users.get(name)
        try:
            is_right = self._passwords.verify(name, user.password_hash if user else None, password, address)
        except BusyError:
            PASSWORDS.refused(f"a login from {address}")
            raise
        if user is None or not is_right:
            self.rejections[LoginFailure.WRONG] += 1
            return None
        identity = _user_identity(user)
        identity.address, identity.rights = address, self.rights
        return identity

    def identity_of_user(self, name: str, address: str, client_id: bytes) -> Identity | None:
        """Return the identity of a user whom an application has authenticated; None for an unknown user."""
        user = self._users.get(name)
        if user is None:
            return None
        identity = _user_identity(user)
        identity.address, identity.client_id, identity.rights = address, client_id, self.rights
        return identity

    def checked(self, identity: Identity) -> Identity:
        """Return a new identity for an earlier login that is still valid.

        Raises:
            LoginRejected: the login is no longer valid.
        """
        fault = self.revalidate(identity)
        if fault is not None:
            raise LoginRejected(LoginFailure.WRONG, fault)
        return Identity(
            identity.user, identity.groups, identity.method, expires_s=identity.expires_s, proof=identity.proof
        )

    # ---- connected clients

    def revalidate(self, identity: Identity) -> str | None:
        """Re-check a connected client, and update its groups.

        Returns:
            The reason, as text for the client, when the login is no longer valid; None when it is valid.
        """
        if identity.expires_s is not None and identity.expires_s <= time.time():
            return "the login has expired"
        if identity.method is Method.NONE:
            return None if self.settings.anonymous else "a login is required now"
        if identity.method is Method.TOKEN:
            return None if self._keys.has(identity.proof) else "the key of the token was revoked"
        if identity.method is Method.CERTIFICATE:
            return "the certificate was revoked" if self._revoked.has(identity.proof) else None
        user = self._users.get(identity.user)
        if user is None:
            return "the user was removed"
        if user.password_hash != identity.proof:  # the hash has a salt, so every change of a password changes it
            return "the password was changed"
        identity.groups = user.groups
        return None

    def may_still_publish(self, identity: Identity, name: bytes) -> bool:
        """Return whether the publisher of a last value, possibly from before a restart, may still publish it."""
        if identity.method is Method.PASSWORD:
            user = self._users.get(identity.user)
            if user is None:
                return False
            identity.groups = user.groups
        return self.rights is None or self.rights.acl.decide(identity, Action.WRITE, name).allowed

    def groups_of(self, name: str) -> tuple[str, ...]:
        """Return the groups of a user; none for an unknown user."""
        user = self._users.get(name)
        return user.groups if user else ()


def _user_identity(user: users.User) -> Identity:
    return Identity(user.name, user.groups, Method.PASSWORD, proof=user.password_hash)


_server_service: list[IdentityService] = []


def set_server_identity_service(service: IdentityService | None) -> None:
    """Set the identity service of hubs and logins that are created later; None, the default, for no service."""
    _server_service[:] = [] if service is None else [service]


def server_identity_service() -> IdentityService | None:
    """Return the identity service of the server; None without one."""
    return _server_service[0] if _server_service else None


def _check(settings: AuthSettings) -> None:
    """Raise StartError for an invalid combination of settings."""
    if not (settings.users or settings.anonymous or settings.certificate_user or accepts_tokens(settings)):
        raise StartError("auth.acl is set, but no login is possible; set auth.users, or auth.anonymous = true.")
    try:
        check_token_settings(settings)
        check_template("auth.certificate_user", settings.certificate_user)
        check_template("auth.certificate_groups", settings.certificate_groups)
    except ArgumentError as error:
        raise StartError(f"{error}.") from None


_Files = tuple[users.Users, acl.Acl | None, list[VerifyKey], RevocationLists]


def _read(settings: AuthSettings, list_files: Sequence[str]) -> _Files | ArgumentError:
    """Read all files; blocks. Returns an error instead of raising it, because gevent prints exceptions of threads."""
    try:
        found = users.load(Path(settings.users)) if settings.users else {}
        rules = acl.parse(users.read_file(Path(settings.acl)), settings.acl) if settings.acl else None
        keys, revoked = load_keys(settings), load_lists(list_files)
    except ArgumentError as error:
        return error
    return found, rules, keys, revoked


def accepted_logins(settings: AuthSettings) -> str:
    """Return the accepted logins of hubs, for the log at the start of a server."""
    accepted = {
        "users": settings.users,
        "tokens": settings.jwt_key or settings.jwt_secret or settings.jwt_jwks,
        "certificates": settings.certificate_user,
        "anonymous clients": settings.anonymous,
    }
    rules = f"rules of {settings.acl}" if settings.acl else "no rules"
    return f"hubs accept: {', '.join(name for name, is_set in accepted.items() if is_set)}; {rules}"

"""The identity service: who may come in, and who of those inside is still who they were.

It holds the users file and the access control list, and reads them again. `login` takes what a client shows;
`revalidate` looks at a client again, when something has changed.
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

from smqrt.auth import acl, bearer, certificates, users
from smqrt.auth.acl import AclRights
from smqrt.auth.identity import Action, Identity, Method
from smqrt.auth.passwords import BusyError, Passwords
from smqrt.auth.throttle import Throttle
from smqrt.crypto.tokens import VerifyKey
from smqrt.errors import ArgumentError, SmqrtError, StartError
from smqrt.settings.limit_register import Limit, LineLimit
from smqrt.settings.settings import AuthSettings

log = logging.getLogger("smqrt")

PASSWORDS = Limit("passwords_waiting", "", "so many passwords wait to be looked at as may")


EXPIRY_S = 1.0
"""So often it is looked whose login has expired: some microseconds for each hundred clients."""


class LoginFailure(Enum):
    """Why somebody was not let in."""

    MISSING = "no user name and password, and no token"
    WRONG = "wrong user name or password"
    THROTTLED = "too many failed logins; try again later"
    BUSY = "too many logins at once; try again later"
    TOKEN = "the token is not valid"
    CERTIFICATE = "the client certificate names no user"
    CLIENT_ID = "the client id is not one that the access control list can tell apart"


class LoginRefused(SmqrtError):
    """A client was not let in; the text is for the client.

    Args:
        why: the reason.
        detail: what the client may know beyond that.
    """

    def __init__(self, why: LoginFailure, detail: str = "") -> None:
        super().__init__(detail or why.value)
        self.why = why


@dataclass(frozen=True, slots=True)
class PresentedCredentials:
    """What a client shows to be let in.

    Attributes:
        address: its IP address.
        client_id: what it calls itself.
        name, password: of a user; None when it gave none.
        token: a JSON Web Token.
        certificate: the certificate that was verified in its TLS handshake, DER.
        login: who is logged in with the browser's session.
    """

    address: str
    client_id: bytes = b""
    name: str | None = None
    password: bytes | None = field(default=None, repr=False)
    token: bytes | None = field(default=None, repr=False)
    certificate: bytes | None = None
    login: Identity | None = None


class IdentityService:
    """Who may come in.

    Args:
        settings: the group `auth`.
        throttle: of failed logins.

    Attributes:
        rights: what those may do who are in; None without a list.
        changed: called after the files were read again: connected clients are to be looked at again.
        expiring: called once in a while: clients whose login has expired are to be ended.
        logins: how many came in, by method.
        refusals: how many did not, by reason.
        throttle: of failed logins.
        is_broken: whether the files can't be used, and those read before are in use.

    Raises:
        StartError: a file can't be read or has a mistake, or nobody could ever log in; one sentence.
    """

    def __init__(
        self, settings: AuthSettings, throttle: Throttle, fetch: bearer.Fetch, revocation_lists: Sequence[str] = ()
    ) -> None:
        _check(settings)
        self.settings = settings
        self.rights: AclRights | None = AclRights(Path(settings.acl)) if settings.acl else None
        self.changed: list[Callable[[], object]] = []
        self.expiring: list[Callable[[], object]] = []
        self._clock: gevent.Greenlet[..., None] | None = None
        self.logins: Counter[Method] = Counter()
        self.refusals: Counter[LoginFailure] = Counter()
        self.is_broken = False
        self.throttle = throttle
        self._passwords = Passwords()
        self._users: users.Users = {}
        self._keys = bearer.Keys(settings, fetch, self._tell_changed)
        self._takes_tokens = bearer.is_wanted(settings)
        self._list_files = list(revocation_lists) if settings.certificate_user else []
        self._revoked = certificates.RevocationLists()
        self._lines = LineLimit()
        if fault := self._load():
            raise StartError(f"{fault}.")

    @staticmethod
    def is_wanted(settings: AuthSettings) -> bool:
        """Whether the settings ask for one."""
        return bool(settings.users or settings.acl or settings.certificate_user or bearer.is_wanted(settings))

    @staticmethod
    def check(settings: AuthSettings, revocation_lists: Sequence[str] = ()) -> None:
        """Check the settings and read the files, as a new service does.

        Raises:
            StartError: a file can't be read or has a mistake, or nobody could ever log in; one sentence.
        """
        _check(settings)
        found = _read(settings, list(revocation_lists) if settings.certificate_user else [])
        if isinstance(found, ArgumentError):
            raise StartError(f"{found}.")

    # ---- the files

    def paths(self) -> list[str]:
        """The files that are read."""
        own = [path for path in (self.settings.users, self.settings.acl) if path]
        return [*own, *bearer.paths(self.settings), *self._list_files]

    def reload(self) -> str | None:
        """Read the files again; blocks this greenlet. What can't be read leaves everything as it was.

        Returns:
            Why it could not, one sentence; None when it did.
        """
        fault = self._load()
        if fault is None:
            self._tell_changed()
        self.is_broken = fault is not None
        return fault

    def _tell_changed(self) -> None:
        for tell in list(self.changed):
            tell()

    def _load(self) -> str | None:
        outcome = get_hub().threadpool.apply(_read, (self.settings, self._list_files))
        if isinstance(outcome, ArgumentError):
            return str(outcome)
        found, rules, keys, self._revoked = outcome
        self._keys.set_of_files(keys)
        self._users = found
        if self.rights is not None and rules is not None:
            self.rights.acl = rules
        if found:
            self._passwords.set_typical(next(iter(found.values())).password_hash)
        return None

    def start(self) -> None:
        """Begin to fetch the keys of tokens, and to look whose has expired."""
        self._keys.start()
        if (self._takes_tokens or self.settings.certificate_user) and self._clock is None:
            self._clock = gevent.spawn(self._tick)

    def _tick(self) -> None:
        while True:
            gevent.sleep(EXPIRY_S)
            for tell in list(self.expiring):
                tell()

    def close(self) -> None:
        """End the threads, and fetch nothing more."""
        self._keys.stop()
        if self._clock is not None:
            self._clock.kill(block=False)
        self._passwords.close()

    # ---- coming in

    def login(self, shown: PresentedCredentials, is_there: Callable[[], bool] = lambda: True) -> Identity:
        """Let a client in; blocks this greenlet.

        Args:
            shown: what it shows.
            is_there: whether it still waits for the answer.

        Raises:
            LoginRefused: it may not come in. Counted and logged.
        """
        try:
            identity = self._login(shown, is_there)
        except LoginRefused as refused:
            self.refusals[refused.why] += 1
            self._lines.warn(_refusal(shown, refused))
            raise
        self.logins[identity.method] += 1
        return identity

    def _login(self, shown: PresentedCredentials, is_there: Callable[[], bool]) -> Identity:
        if shown.name is not None:
            identity = self._by_password(shown, shown.name, shown.password or b"", is_there)
        elif shown.token is not None:
            identity = self._by_token(shown.token)
        elif shown.login is not None:
            identity = self.checked(shown.login)
        elif shown.certificate is not None and self.settings.certificate_user:
            identity = self._by_certificate(shown.certificate, self.settings.certificate_user)
        elif self.settings.anonymous:
            identity = Identity("")
        else:
            raise LoginRefused(LoginFailure.MISSING)
        identity.address, identity.client_id, identity.rights = shown.address, shown.client_id, self.rights
        return identity

    def _by_password(
        self, shown: PresentedCredentials, name: str, password: bytes, is_there: Callable[[], bool]
    ) -> Identity:
        user = self._users.get(name)
        password_hash = user.password_hash if user else None
        is_known = user is not None and self._passwords.knows(name, user.password_hash, password)
        is_guess = not is_known and not self._passwords.is_pending(name, password_hash, password)
        if is_guess and not self.throttle.take(shown.address, name):
            raise LoginRefused(LoginFailure.THROTTLED)
        try:
            is_right = self._passwords.verify(name, password_hash, password, shown.address, is_there)
        except BusyError:
            self.throttle.returned(shown.address, name)
            PASSWORDS.refused(f"a login from {shown.address}")
            raise LoginRefused(LoginFailure.BUSY) from None
        if user is None or not is_right:
            self.throttle.failed(shown.address, name)
            raise LoginRefused(LoginFailure.WRONG)
        if is_guess:
            self.throttle.succeeded(shown.address, name)
        return _user_identity(user)

    def _by_token(self, token: bytes) -> Identity:
        if not self._takes_tokens:
            raise LoginRefused(LoginFailure.TOKEN, "no tokens are taken here; see the setting auth.jwt_key")
        try:
            return bearer.identity_of(token, self._keys, self.settings)
        except bearer.TokenError as error:
            raise LoginRefused(LoginFailure.TOKEN, f"{LoginFailure.TOKEN.value}: {error}") from None

    def _by_certificate(self, der: bytes, template: str) -> Identity:
        try:
            identity = certificates.identity_of(der, template, self.settings.certificate_groups)
        except certificates.CertificateError as error:
            raise LoginRefused(LoginFailure.CERTIFICATE, f"{LoginFailure.CERTIFICATE.value}: {error}") from None
        if fault := self.revalidate(identity):
            raise LoginRefused(LoginFailure.CERTIFICATE, fault)
        return identity

    def identity_of(self, name: str, password: bytes, address: str) -> Identity | None:
        """Who a name and a password stand for, for pages, which count failed logins themselves; blocks this greenlet.

        Returns:
            None for a wrong password, or a user that is not there.

        Raises:
            BusyError: too many passwords wait to be looked at.
        """
        user = self._users.get(name)
        try:
            is_right = self._passwords.verify(name, user.password_hash if user else None, password, address)
        except BusyError:
            PASSWORDS.refused(f"a login from {address}")
            raise
        if user is None or not is_right:
            self.refusals[LoginFailure.WRONG] += 1
            return None
        identity = _user_identity(user)
        identity.address, identity.rights = address, self.rights
        return identity

    def checked(self, identity: Identity) -> Identity:
        """A new object for somebody who was let in before, as things are now.

        Raises:
            LoginRefused: it would not be let in any more.
        """
        fault = self.revalidate(identity)
        if fault is not None:
            raise LoginRefused(LoginFailure.WRONG, fault)
        return Identity(
            identity.user, identity.groups, identity.method, expires_s=identity.expires_s, proof=identity.proof
        )

    # ---- those inside

    def revalidate(self, identity: Identity) -> str | None:
        """Look at a client again, and note its groups as they are now.

        Returns:
            Why it may not stay, for the client; None when it may.
        """
        if identity.expires_s is not None and identity.expires_s <= time.time():
            return "the login has expired"
        if identity.method is Method.NONE:
            return None if self.settings.anonymous else "a login is needed now"
        if identity.method is Method.TOKEN:
            return None if self._keys.has(identity.proof) else "the key of the token is good no more"
        if identity.method is Method.CERTIFICATE:
            return "the certificate has been revoked" if self._revoked.has(identity.proof) else None
        user = self._users.get(identity.user)
        if user is None:
            return "the user was removed"
        if user.password_hash != identity.proof:
            return "the password was changed"
        identity.groups = user.groups
        return None

    def may_still_publish(self, identity: Identity, name: bytes) -> bool:
        """Whether somebody who published to the topic `name` once, maybe before a restart, would still be let to."""
        if identity.method is Method.PASSWORD:
            user = self._users.get(identity.user)
            if user is None:
                return False
            identity.groups = user.groups
        return self.rights is None or self.rights.acl.decide(identity, Action.WRITE, name).allowed

    def groups_of(self, name: str) -> tuple[str, ...]:
        """The groups of a user of the users file; none of one who is not there."""
        user = self._users.get(name)
        return user.groups if user else ()


def _user_identity(user: users.User) -> Identity:
    return Identity(user.name, user.groups, Method.PASSWORD, proof=user.password_hash)


_of_server: list[IdentityService] = []


def serve(service: IdentityService | None) -> None:
    """Have the hubs, and the logins that ask for it, that are made from now on use `service`; None: there is none, as
    at first.
    """
    _of_server[:] = [] if service is None else [service]


def of_server() -> IdentityService | None:
    """The identity service of the server; None when it has none."""
    return _of_server[0] if _of_server else None


def _check(settings: AuthSettings) -> None:
    """Raises StartError for settings that do not go together."""
    if not (settings.users or settings.anonymous or settings.certificate_user or bearer.is_wanted(settings)):
        raise StartError("auth.acl is set, but nobody can log in; set auth.users, or auth.anonymous = true.")
    try:
        bearer.check(settings)
        certificates.check_template("auth.certificate_user", settings.certificate_user)
        certificates.check_template("auth.certificate_groups", settings.certificate_groups)
    except ArgumentError as error:
        raise StartError(f"{error}.") from None


_Files = tuple[users.Users, acl.Acl | None, list[VerifyKey], certificates.RevocationLists]


def _read(settings: AuthSettings, list_files: Sequence[str]) -> _Files | ArgumentError:
    """In a thread: what that raises, gevent would print."""
    try:
        found = users.load(Path(settings.users)) if settings.users else {}
        rules = acl.parse(users.read_file(Path(settings.acl)), settings.acl) if settings.acl else None
        keys, revoked = bearer.load(settings), certificates.load_lists(list_files)
    except ArgumentError as error:
        return error
    return found, rules, keys, revoked


def _refusal(shown: PresentedCredentials, refused: LoginRefused) -> str:
    name = f" as {shown.name[:64]!r}" if shown.name is not None else ""
    return f"refused: a login{name} from {shown.address}: {refused}"


def ways_in(settings: AuthSettings) -> str:
    """Returns who is let into hubs, for the lines that a server begins with."""
    given = {
        "users": settings.users,
        "tokens": settings.jwt_key or settings.jwt_secret or settings.jwt_jwks,
        "certificates": settings.certificate_user,
        "anonymous clients": settings.anonymous,
    }
    rules = f"rules of {settings.acl}" if settings.acl else "no rules"
    return f"hubs let in: {', '.join(way for way, is_given in given.items() if is_given)}; {rules}"

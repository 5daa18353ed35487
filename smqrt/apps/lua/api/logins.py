"""Logins for Lua: user databases, authenticators and authorizers (spec: bas-api §5). The functions of applications stay
on the Lua side; Python knows their objects by handles."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from smqrt.apps.lua import bridge
from smqrt.apps.lua.api.dirs import DirsBinding
from smqrt.apps.lua.api.exchange import Exchange, Exchanges
from smqrt.apps.lua.bridge import LuaResult, LuaValue, LuaValues, fail, from_utf8, methods, utf8
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm
from smqrt.errors import ArgumentError
from smqrt.http.logins import (
    Account,
    Acl,
    Answered,
    Authenticator,
    AuthInfo,
    Authorizer,
    Login,
    UserTable,
    server_users,
)
from smqrt.http.logins.authenticator import DEFAULT_REALM
from smqrt.http.logins.users import MAX_USERS
from smqrt.http.message import Request

_TOLD = [
    "type",
    "loginattempts",
    "denied",
    "seed",
    "seedkey",
    "username",
    "password",
    "reason",
    "maxusers",
    "recycle",
    "inactive",
]


class LuaUsers:
    """The user database that is a Lua function."""

    def __init__(self, binding: LoginsBinding, handle: int) -> None:
        self._binding, self._handle = binding, handle

    def find(self, name: str, password: str | None, request: Request) -> Account | None:
        """See `Users.find`."""
        secret = None if password is None else utf8(password)
        answer = self._binding.ask(request, "find", self._handle, utf8(name), secret)
        return _account(answer, password is not None) if answer and answer[0] else None


def _account(answer: LuaValues, is_clear: bool) -> Account | None:
    """What the function gave: the kind of the secret, the secret, and the limits, which may be of any kind."""
    kind, value, maxusers, recycle, inactive = (*answer, *(None,) * 5)[:5]
    text = from_utf8(value) if isinstance(value, bytes) else None
    is_verified = kind == b"verified"
    if is_verified and not is_clear:
        return None  # it can't have looked at a hash
    return Account(
        password=text if kind == b"password" else None,
        ha1=text.lower() if text is not None and kind == b"ha1" else None,
        is_verified=is_verified,
        maxusers=_at_least_one(maxusers) or MAX_USERS,
        recycle=recycle is True,
        inactive_s=_at_least_one(inactive),
    )


def _at_least_one(value: LuaValue) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 1 <= value < 1 << 53 else None


class LuaAuthorizer:
    """The authorizer that is a Lua function."""

    def __init__(self, binding: LoginsBinding, handle: int) -> None:
        self._binding, self._handle = binding, handle

    def allows(self, request: Request, login: Login, method: str, path: str) -> bool:
        """See `Authorizer.allows`."""
        session = login.session.number
        answer = self._binding.ask(
            request, "authorize", self._handle, utf8(login.name), method.encode(), utf8(path), session
        )
        return bool(answer) and answer[0] is True


class LoginsBinding:
    """Keeps what the handles of Lua stand for."""

    def __init__(self, services: Services, exchanges: Exchanges, dirs: DirsBinding) -> None:
        self._logins = services.logins
        self._exchanges = exchanges
        self._dirs = dirs
        self._next_handle = itertools.count(1).__next__
        self._objects: dict[int, Any] = {}
        self._entries: dict[str, int] = {}

    def attach(self, name: bytes, ref: int) -> None:
        """Take the reference of a Lua function that calls one of an application."""
        self._entries[name.decode("ascii")] = ref

    def ask(self, request: Request, entry: str, *args: LuaValue) -> LuaValues:
        """Call a function of an application for a request; blocks. Raises Answered when it has answered the
        request."""
        answer = self._exchanges.consult(request, self._entries[entry], *args)
        if answer is None:
            raise Answered
        return answer

    # Objects

    def new_users(self) -> int:
        return self._keep(lambda handle: LuaUsers(self, handle))

    def new_table(self) -> int:
        return self._keep(lambda handle: UserTable())

    def new_server_users(self) -> int:
        return self._keep(lambda handle: server_users())

    def new_authorizer(self) -> int:
        return self._keep(lambda handle: LuaAuthorizer(self, handle))

    def new_acl(self, table: int) -> int:
        return self._keep(lambda handle: Acl(self._objects[table]))

    def new_authenticator(self, users: int, kind: bytes, realm: bytes | None, tracker: bool, has_page: bool) -> int:
        def make(handle: int) -> Authenticator:
            return Authenticator(
                self._objects[users],
                from_utf8(kind),
                realm=DEFAULT_REALM if realm is None else from_utf8(realm),
                page=partial(self._show, handle) if has_page else None,
                tracker=tracker,
            )

        return self._keep(make)

    def collect(self, handle: int) -> None:
        """The Lua object is gone."""
        self._objects.pop(handle, None)

    def _keep(self, make: Callable[[int], object]) -> int:
        handle = self._next_handle()
        self._objects[handle] = make(handle)
        return handle

    # User databases and authorizers

    def set_entries(self, handle: int, table: bytes) -> LuaResult:
        """Set the users of a table or the rules of a list; nil and what is wrong with one of them."""
        entries = {_text(name): _converted(_plain(value)) for name, value in bridge.load(table).items()}
        try:
            self._objects[handle].set(entries)
        except ArgumentError as error:
            return fail(str(error))
        return True

    def getpwd(self, handle: int, name: bytes) -> LuaResult:
        """The secret of a user, whether it is an HA1, and the limits."""
        account = self._objects[handle].find(from_utf8(name))
        if account is None:
            return None
        is_ha1 = account.password is None
        return utf8(account.secret), is_ha1, account.maxusers, account.recycle, account.inactive_s

    def casesensitive(self, handle: int, value: bool | None) -> bool:
        acl: Acl = self._objects[handle]
        acl.is_case_sensitive = acl.is_case_sensitive if value is None else value
        return acl.is_case_sensitive

    def authorize(self, handle: int, exchange: int, method: bytes, path: bytes, written: bytes | None) -> LuaResult:
        """Whether the user of a request may; false without a user."""
        return self._exchanges.inside(exchange, written, self._authorize, handle, from_utf8(method), from_utf8(path))

    def _authorize(self, exchange: Exchange, handle: int, method: str, path: str) -> tuple[bool]:
        login = exchange.request.user()
        authorizer: Authorizer = self._objects[handle]
        with suppress(Answered):
            return (login is not None and authorizer.allows(exchange.request, login, method.upper(), path.lstrip("/")),)
        return (False,)

    # Authenticators

    def set_auth(self, directory: int, authenticator: int, authorizer: int) -> None:
        """0 for none."""
        self._dirs.of(directory).setauth(self._objects.get(authenticator), self._objects.get(authorizer))

    def authenticate(self, handle: int, exchange: int, path: bytes, written: bytes | None) -> LuaResult:
        """Name, password and kind of the user; nil when the request has been answered."""
        return self._exchanges.inside(exchange, written, self._authenticate, handle, from_utf8(path))

    def _authenticate(self, exchange: Exchange, handle: int, path: str) -> LuaValues:
        authenticator: Authenticator = self._objects[handle]
        return _triple(authenticator.authenticate(exchange.request, path.lstrip("/")))

    def _show(self, handle: int, request: Request, info: AuthInfo) -> None:
        """The login page: what it writes is the answer."""
        fields = {name: getattr(info, name) for name in _TOLD}
        upwd = None if info.upwd is None else utf8(info.upwd)
        base = None if info.directory is None else (info.directory, "")
        self._exchanges.show(request, base, self._entries["show"], handle, bridge.dump(_encoded(fields)), upwd)

    # Users

    def user(self, exchange: int) -> LuaValues:
        return _triple(self._exchanges.request(exchange).user())

    def session_user(self, number: int) -> LuaValues:
        session = self._logins.sessions.by_number(number)
        return _triple(session.login if session is not None else None)

    def users(self) -> LuaValues:
        return tuple(map(utf8, self._logins.users()))

    def login(self, exchange: int, name: bytes | None, maxusers: int, recycle: bool) -> LuaResult:
        request = self._exchanges.request(exchange)
        try:
            done = request.login(None if name is None else from_utf8(name), maxusers, recycle)
        except RuntimeError:
            raise ArgumentError("login: iscommitted; a login comes before the page is sent") from None
        return utf8(done) if isinstance(done, str) else done

    def logout(self, exchange: int, everywhere: bool) -> bool:
        return self._exchanges.request(exchange).logout(everywhere)


def _triple(login: Login | None) -> LuaValues:
    if login is None:
        return (None,)
    return utf8(login.name), None if login.password is None else utf8(login.password), login.kind.encode()


def _encoded(fields: dict[str, object]) -> dict[str, object]:
    return {name: utf8(value) if isinstance(value, str) else value for name, value in fields.items()}


def _text(value: object) -> str:
    return from_utf8(value) if isinstance(value, bytes) else str(value)


def _plain(value: object) -> Any:
    """A value of Lua: strings as text, tables as lists when they have nothing but the keys 1, 2, ..."""
    if isinstance(value, bytes):
        return from_utf8(value)
    if not isinstance(value, dict):
        return value
    if all(at in value for at in range(1, len(value) + 1)):
        return [_plain(value[at]) for at in range(1, len(value) + 1)]
    return {_text(name): _plain(item) for name, item in value.items()}


_NUMBERS = frozenset(("maxusers", "inactive"))


def _converted(value: Any) -> Any:
    """An entry with texts where texts are wanted, and numbers where numbers are."""
    if isinstance(value, list):
        return list(map(_converted, value))
    if not isinstance(value, dict):
        return bridge.as_text(value)
    return {key: bridge.as_number(item) if key in _NUMBERS else _converted(item) for key, item in value.items()}


_DIRECT = (
    "attach new_users new_table new_server_users new_authorizer new_acl new_authenticator collect set_entries getpwd "
    "casesensitive set_auth user session_user users login logout"
)
_BLOCKING = "authorize authenticate"


def install(vm: Vm, services: Services, exchanges: Exchanges, dirs: DirsBinding) -> None:
    """Give Lua the logins."""
    binding = LoginsBinding(services, exchanges, dirs)
    vm.namespace("ba.logins", methods(binding, _DIRECT), methods(binding, _BLOCKING))

"""Python half of logins and HTTP sessions (spec: bas-api §2.1, §5).

The functions of applications and the attributes of sessions stay in Lua. It refers to user databases, authorizers and
authenticators by handles, and to sessions by numbers.
"""

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
from smqrt.apps.lua.vm import Services, Vm
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
from smqrt.http.logins.credentials import MAX_USERS
from smqrt.http.message import Request
from smqrt.http.sessions import HttpSession
from smqrt.http.shared_sessions import LUA, SharedSession, SharedSessions, is_small

_PAGE_FIELDS = [
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
    """A user database that is a Lua function."""

    def __init__(self, binding: LoginsBinding, handle: int) -> None:
        self._binding, self._handle = binding, handle

    def find(self, name: str, password: str | None, request: Request) -> Account | None:
        """See `Users.find`."""
        secret = None if password is None else utf8(password)
        answer = self._binding.ask(request, "find", self._handle, utf8(name), secret)
        if not answer or not answer[0]:
            return None
        # The kind of the secret, the secret, and the limits, which may be any Lua values. Trailing ones may be missing.
        kind, value, maxusers, recycle, inactive = (*answer, *(None,) * 5)[:5]
        text = from_utf8(value) if isinstance(value, bytes) else None
        is_verified = kind == b"verified"
        if is_verified and password is None:
            return None  # a Digest login has no password that the function could have verified
        return Account(
            password=text if kind == b"password" else None,
            ha1=text.lower() if text is not None and kind == b"ha1" else None,
            is_verified=is_verified,
            maxusers=_positive(maxusers) or MAX_USERS,
            recycle=recycle is True,
            inactive_s=_positive(inactive),
        )


def _positive(value: LuaValue) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 1 <= value < 1 << 53 else None  # 2^53: floats are exact integers below


class LuaAuthorizer:
    """An authorizer that is a Lua function."""

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
    """User databases, authorizers and authenticators by handle."""

    def __init__(self, services: Services, exchanges: Exchanges, dirs: DirsBinding) -> None:
        self._logins = services.logins
        self._exchanges = exchanges
        self._dirs = dirs
        self._next_handle = itertools.count(1).__next__
        self._objects: dict[int, Any] = {}
        self._entries: dict[str, int] = {}

    def attach(self, name: bytes, ref: int) -> None:
        """Set the reference of a Lua function that calls a function of an application."""
        self._entries[name.decode("ascii")] = ref

    def ask(self, request: Request, entry: str, *args: LuaValue) -> LuaValues:
        """Call a function of an application for a request; blocks.

        Raises:
            Answered: the function has answered the request.
        """
        values = self._exchanges.consult(request, self._entries[entry], *args)
        if values is None:
            raise Answered
        return values

    # ---- Objects

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
                page=partial(self._show_page, handle) if has_page else None,
                tracker=tracker,
            )

        return self._keep(make)

    def collect(self, handle: int) -> None:
        """Forget an object that Lua has collected."""
        self._objects.pop(handle, None)

    def _keep(self, make: Callable[[int], object]) -> int:
        handle = self._next_handle()
        self._objects[handle] = make(handle)
        return handle

    # ---- User databases and authorizers

    def set_entries(self, handle: int, table: bytes) -> LuaResult:
        """Set the users of a table or the rules of a list; return nil and a message if one of them is invalid."""
        entries = {_text(name): _converted(_plain(value)) for name, value in bridge.load(table).items()}
        try:
            self._objects[handle].set(entries)
        except ArgumentError as error:
            return fail(str(error))
        return True

    def getpwd(self, handle: int, name: bytes) -> LuaResult:
        """Return the secret of a user, whether it is an HA1 hash, and the limits; None for an unknown user."""
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
        """Return whether the user of a request has a permission; False without a user. Blocks."""

        def operation(exchange: Exchange) -> tuple[bool]:
            login = exchange.request.user()
            authorizer: Authorizer = self._objects[handle]
            word, name = from_utf8(method).upper(), from_utf8(path).lstrip("/")
            with suppress(Answered):
                return (login is not None and authorizer.allows(exchange.request, login, word, name),)
            return (False,)

        return self._exchanges.inside(exchange, written, operation)

    # ---- Authenticators

    def set_auth(self, directory: int, authenticator: int, authorizer: int) -> None:
        """Protect a directory; 0 means no authenticator or no authorizer."""
        self._dirs.directory(directory).setauth(self._objects.get(authenticator), self._objects.get(authorizer))

    def authenticate(self, handle: int, exchange: int, path: bytes, written: bytes | None) -> LuaResult:
        """Return the name, password and login kind of the user; None if the request was answered. Blocks."""

        def operation(exchange: Exchange) -> LuaValues:
            authenticator: Authenticator = self._objects[handle]
            return _login_values(authenticator.authenticate(exchange.request, from_utf8(path).lstrip("/")))

        return self._exchanges.inside(exchange, written, operation)

    def _show_page(self, handle: int, request: Request, info: AuthInfo) -> None:
        """Respond with the login page of the application."""
        fields = {name: getattr(info, name) for name in _PAGE_FIELDS}
        packed = bridge.dump({name: utf8(value) if isinstance(value, str) else value for name, value in fields.items()})
        upwd = None if info.upwd is None else utf8(info.upwd)
        base = None if info.directory is None else (info.directory, "")
        self._exchanges.show(request, base, self._entries["show"], handle, packed, upwd)

    # ---- Users

    def user(self, exchange: int) -> LuaValues:
        return _login_values(self._exchanges.request(exchange).user())

    def session_user(self, number: int) -> LuaValues:
        session = self._logins.sessions.by_number(number)
        return _login_values(session.login if session is not None else None)

    def users(self) -> LuaValues:
        return tuple(map(utf8, self._logins.users()))

    def login(self, exchange: int, name: bytes | None, maxusers: int, recycle: bool) -> LuaResult:
        request = self._exchanges.request(exchange)
        try:
            done = request.login(None if name is None else from_utf8(name), maxusers, recycle)
        except RuntimeError:
            raise ArgumentError("login: iscommitted; log in before the response is sent") from None
        return utf8(done) if isinstance(done, str) else done

    def logout(self, exchange: int, everywhere: bool) -> bool:
        return self._exchanges.request(exchange).logout(everywhere)


def _login_values(login: Login | None) -> LuaValues:
    if login is None:
        return (None,)
    return utf8(login.name), None if login.password is None else utf8(login.password), login.kind.encode()


def _text(value: object) -> str:
    return from_utf8(value) if isinstance(value, bytes) else str(value)


def _plain(value: object) -> Any:
    """Convert a Lua value: strings to text, tables whose only keys are 1, 2, ... to lists."""
    if isinstance(value, bytes):
        return from_utf8(value)
    if not isinstance(value, dict):
        return value
    if all(at in value for at in range(1, len(value) + 1)):
        return [_plain(value[at]) for at in range(1, len(value) + 1)]
    return {_text(name): _plain(item) for name, item in value.items()}


_NUMBERS = frozenset(("maxusers", "inactive"))


def _converted(value: Any) -> Any:
    """Convert an entry: limits to numbers, all other values to text."""
    if isinstance(value, list):
        return list(map(_converted, value))
    if not isinstance(value, dict):
        return bridge.as_text(value)
    return {key: bridge.as_number(item) if key in _NUMBERS else _converted(item) for key, item in value.items()}


# ---- Sessions


class SessionsBinding:
    """Functions of HTTP sessions, by their numbers."""

    def __init__(self, vm: Vm, services: Services, exchanges: Exchanges) -> None:
        self._vm = vm
        self._exchanges = exchanges
        self._ended = 0
        self._logins = services.logins
        self.sessions = services.logins.sessions
        self.sessions.ended.append(lambda session: vm.start(self._ended, session.number))

    def attach(self, ended: int) -> None:
        """Set the Lua function that is called with the number of each session that has ended."""
        self._ended = ended

    def session(self, handle: int, create: bool) -> int | bool:
        """Return the number of the request's session. If it has none, create one with `create`, else return False."""
        request = self._exchanges.request(handle)
        session = self.sessions.of(request)
        if session is None and create:
            if request.response.committed:
                raise ArgumentError("session: iscommitted; create the session before the response is sent")
            session = self.sessions.begin(request)
        return session.number if session else False

    def by_id(self, session_id: bytes) -> int | None:
        session = self.sessions.find(from_utf8(session_id))
        return None if session is None else session.number

    def adopt(self, handle: int, number: int) -> None:
        """Use a session for a request. Its login is valid only for the address of the login, as with a cookie."""
        self.sessions.adopt(self._exchanges.request(handle), self._session(number))

    def exists(self, number: int) -> bool:
        self.sessions.catch_up()
        return self.sessions.by_number(number) is not None

    def numbers(self, user: bytes | None) -> tuple[int, ...]:
        """Return the numbers of all sessions, or of the sessions of a user."""
        if user is None:
            return tuple(self.sessions.numbers())
        return tuple(session.number for session in self._logins.sessions_of(from_utf8(user)))

    def id(self, number: int) -> bytes:
        return utf8(self._session(number).id)

    def created(self, number: int) -> int:
        return int(self._session(number).created_s)

    def accessed(self, number: int, touch: bool) -> int:
        session = self._session(number)
        if touch:
            self.sessions.touch(session)
        return int(session.accessed_s)

    def max_inactive(self, number: int, seconds: int | None) -> int:
        session = self._session(number)
        if seconds is not None:
            if seconds < 1:
                raise ArgumentError("maxinactiveinterval: the time must be at least one second")
            session.max_inactive_s = seconds
            self.sessions.save(session)
        return int(session.max_inactive_s)

    def peername(self, number: int) -> bytes:
        return self._session(number).peer.encode()

    def uses(self, number: int) -> int:
        return self._session(number).uses

    def hold(self, number: int, change: int) -> bool:
        session = self._session(number)
        self.sessions.change_locks(session, change)
        return True

    def terminate(self, number: int) -> bool:
        session = self.sessions.by_number(number)
        return session is not None and self.sessions.terminate(session)

    def _session(self, number: int) -> HttpSession:
        session = self.sessions.by_number(number)
        if session is None:
            raise ArgumentError("the session has ended")
        return session


class SharedAttributesBinding:
    """Session attributes that the workers share: attributes with plain values."""

    def __init__(self, vm: Vm, sessions: SharedSessions) -> None:
        self._vm, self._sessions = vm, sessions
        self._tick = 0
        self._has_tables = False
        sessions.ticked.append(self._check_tables)

    def attach(self, tick: int) -> None:
        """Set the Lua function that looks for tables that were changed in place."""
        self._tick = tick

    def given(self) -> None:
        """Check tables at the next tick, since an application has read one and may change it."""
        self._has_tables = True

    def rows(self, number: int, changes: int) -> LuaResult:
        """Return the number of changes that other workers have made to a session, and all its attributes.

        Returns None if the session has ended or the number still is `changes`.
        """
        session = self._sessions.by_number(number)
        if not isinstance(session, SharedSession) or session.changes == changes:
            return None
        rows = {name[1:]: data for name, data in session.known.items() if name[:1] == LUA}
        return session.changes, bridge.dump(rows)

    def put(self, number: int, name: bytes, value: bytes | None) -> bool:
        """Set an attribute in all workers; return False if the value is too long."""
        session = self._sessions.by_number(number)
        if not isinstance(session, SharedSession):
            return True
        fits = value is None or is_small(value, session, f"of {len(name)} bytes")
        # Other workers remove an attribute that became too long, so that they don't return an old value.
        self._sessions.put(session, LUA + name, value if fits else None)
        return fits

    def _check_tables(self) -> None:
        if self._has_tables:
            self._has_tables = False
            self._vm.start(self._tick)


_DIRECT = (
    "attach new_users new_table new_server_users new_authorizer new_acl new_authenticator collect set_entries getpwd "
    "casesensitive set_auth user session_user users login logout"
)
_BLOCKING = "authorize authenticate"
_SESSIONS = "session by_id adopt exists numbers id created accessed max_inactive peername uses hold terminate attach"


def install(vm: Vm, services: Services, exchanges: Exchanges, dirs: DirsBinding) -> None:
    """Install the logins."""
    binding = LoginsBinding(services, exchanges, dirs)
    vm.namespace("ba.logins", methods(binding, _DIRECT), methods(binding, _BLOCKING))


def install_sessions(vm: Vm, services: Services, exchanges: Exchanges) -> SessionsBinding:
    """Install the sessions; return their binding."""
    binding = SessionsBinding(vm, services, exchanges)
    if isinstance(binding.sessions, SharedSessions):
        shared = SharedAttributesBinding(vm, binding.sessions)
        vm.namespace("ba.sharedattributes", methods(shared, "attach given rows put"))
    vm.namespace("ba.sessions", methods(binding, _SESSIONS))
    return binding

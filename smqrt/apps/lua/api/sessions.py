"""Sessions for Lua: `request:session` and `ba.session` (spec: bas-api §2.1, §5). Attributes stay on the Lua side."""

from __future__ import annotations

from smqrt.apps.lua import bridge
from smqrt.apps.lua.api.exchange import Exchanges
from smqrt.apps.lua.bridge import LuaResult, from_utf8, methods, utf8
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm
from smqrt.errors import ArgumentError
from smqrt.http.sessions import HttpSession
from smqrt.http.shared_sessions import LUA, SharedSession, SharedSessions, is_small


class SessionsBinding:
    """The functions of one server; Lua knows a session by its number."""

    def __init__(self, vm: Vm, services: Services, exchanges: Exchanges) -> None:
        self._vm = vm
        self._exchanges = exchanges
        self._ended = 0
        self._logins = services.logins
        self.sessions = services.logins.sessions
        self.sessions.ended.append(self._on_end)

    def attach(self, ended: int) -> None:
        """Take the reference of the Lua function that is called with the number of a session that ended."""
        self._ended = ended

    def session(self, handle: int, create: bool) -> int | bool:
        """The number of the request's session, False when it has none; `create` makes one."""
        request = self._exchanges.request(handle)
        session = self.sessions.of(request)
        if session is None and create:
            if request.response.committed:
                raise ArgumentError("session: iscommitted; a session is made before the page is sent")
            session = self.sessions.begin(request)
        return session.number if session else False

    def by_id(self, session_id: bytes) -> int | None:
        session = self.sessions.find(from_utf8(session_id))
        return None if session is None else session.number

    def adopt(self, handle: int, number: int) -> None:
        """Let this session be the request's. A login counts from its own address only, as with a cookie."""
        self.sessions.adopt(self._exchanges.request(handle), self._of(number))

    def exists(self, number: int) -> bool:
        self.sessions.catch_up()
        return self.sessions.by_number(number) is not None

    def numbers(self, user: bytes | None) -> tuple[int, ...]:
        """The numbers of all sessions, or of those of a user."""
        if user is None:
            return tuple(self.sessions.numbers())
        return tuple(session.number for session in self._logins.sessions_of(from_utf8(user)))

    def id(self, number: int) -> bytes:
        return utf8(self._of(number).id)

    def created(self, number: int) -> int:
        return int(self._of(number).created_s)

    def accessed(self, number: int, touch: bool) -> int:
        session = self._of(number)
        if touch:
            self.sessions.touch(session)
        return int(session.accessed_s)

    def max_inactive(self, number: int, seconds: int | None) -> int:
        session = self._of(number)
        if seconds is not None:
            if seconds < 1:
                raise ArgumentError("maxinactiveinterval: the time must be at least one second")
            session.max_inactive_s = seconds
            self.sessions.save(session)
        return int(session.max_inactive_s)

    def peername(self, number: int) -> bytes:
        return self._of(number).peer.encode()

    def uses(self, number: int) -> int:
        return self._of(number).uses

    def hold(self, number: int, change: int) -> bool:
        session = self._of(number)
        self.sessions.hold(session, change)
        return True

    def terminate(self, number: int) -> bool:
        session = self.sessions.by_number(number)
        return session is not None and self.sessions.terminate(session)

    def _of(self, number: int) -> HttpSession:
        session = self.sessions.by_number(number)
        if session is None:
            raise ArgumentError("the session has ended")
        return session

    def _on_end(self, session: HttpSession) -> None:
        self._vm.start(self._ended, session.number)


class SharedAttributesBinding:
    """Attributes of Lua in a worker of several: other workers have those that are plain values."""

    def __init__(self, vm: Vm, sessions: SharedSessions) -> None:
        self._vm, self._sessions = vm, sessions
        self._tick = 0
        self._is_given = False
        sessions.ticked.append(self._on_tick)

    def attach(self, tick: int) -> None:
        """Take the reference of the Lua function that looks for tables that were changed in place."""
        self._tick = tick

    def given(self) -> None:
        """An application has such tables."""
        self._is_given = True

    def rows(self, number: int, changes: int) -> LuaResult:
        """How often other workers have changed attributes of a session, and all of them; nil when it has ended, or when
        that was `changes` times."""
        session = self._sessions.by_number(number)
        if not isinstance(session, SharedSession) or session.changes == changes:
            return None
        rows = {name[1:]: data for name, data in session.known.items() if name[:1] == LUA}
        return session.changes, bridge.dump(rows)

    def put(self, number: int, name: bytes, value: bytes | None) -> bool:
        """Set an attribute everywhere; False when the value is too long."""
        session = self._sessions.by_number(number)
        if not isinstance(session, SharedSession):
            return True
        is_fit = value is None or is_small(value, session, f"of {len(name)} bytes")
        self._sessions.put(session, LUA + name, value if is_fit else None)
        return is_fit

    def _on_tick(self) -> None:
        if self._is_given:
            self._is_given = False
            self._vm.start(self._tick)


_DIRECT = "session by_id adopt exists numbers id created accessed max_inactive peername uses hold terminate attach"


def install(vm: Vm, services: Services, exchanges: Exchanges) -> SessionsBinding:
    """Give Lua the sessions; return what keeps them."""
    binding = SessionsBinding(vm, services, exchanges)
    if isinstance(binding.sessions, SharedSessions):
        shared = SharedAttributesBinding(vm, binding.sessions)
        vm.namespace("ba.sharedattributes", methods(shared, "attach given rows put"))
    vm.namespace("ba.sessions", methods(binding, _DIRECT))
    return binding

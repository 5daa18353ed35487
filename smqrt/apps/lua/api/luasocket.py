"""The globals `socket` and `mime`: LuaSocket's interface over `ba.socket` (spec: bas-api §12, §17). The Lua halves are
lib/socket.lua, lib/mime.lua and lib/ba/luasocket."""

from __future__ import annotations

import _socket
import socket
import struct
import time
from collections.abc import Callable, Iterable
from functools import partial

import gevent
from gevent import get_hub

from smqrt.apps.lua.api import mail
from smqrt.apps.lua.api.sockets import SocketBinding
from smqrt.apps.lua.bridge import Function, LuaResult, fail, methods, with_words
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm
from smqrt.broker.deferred import Deferred
from smqrt.errors import StreamError
from smqrt.loop.readiness import TimedDeferred, Wait

LOOKUP_S = 30.0
"""How long a name is looked up."""
FLUSH_S = 30.0
"""How long `shutdown` waits until what was sent is out."""
_OPTIONS = {
    b"keepalive": (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
    b"tcp-nodelay": (socket.IPPROTO_TCP, socket.TCP_NODELAY),
    b"reuseaddr": (socket.SOL_SOCKET, socket.SO_REUSEADDR),
}
_LINGER = struct.Struct("ii")


class FirstOf(TimedDeferred[bool]):
    """Resolved with true when the first of several waits is over, with false when time is up.

    Args:
        makers: each gives a `Wait`, or raises StreamError when there is nothing to wait for.
        timeout_s: None waits for ever.
    """

    __slots__ = ("_waits",)

    def __init__(self, makers: Iterable[Callable[[], Wait]], timeout_s: float | None) -> None:
        super().__init__(timeout_s)
        self._waits: list[Wait] = []
        for make in makers:
            try:
                wait = make()
            except StreamError:
                self.resolve(True)
                return
            self._waits.append(wait)
            wait.then(lambda value, error: self.resolve(True))

    def _expired(self) -> None:
        self.resolve(False)

    def _release(self) -> None:
        super()._release()
        waits, self._waits = self._waits, []
        for wait in waits:
            wait.cancel()


class LuaSocketBinding:
    """What the LuaSocket layer asks beyond the sockets of `ba.socket`."""

    def __init__(self, sockets: SocketBinding) -> None:
        self._sockets = sockets

    def attempt(self, number: int) -> LuaResult:
        """What a read gives now; nil, "timeout" when it would wait."""
        handle = self._sockets.handle(number)
        if handle.reading is not None:
            return fail("incorrectuse")
        return handle.receive() or fail("timeout")

    def has_room(self, number: int) -> bool:
        """Whether a writer need not wait."""
        try:
            stream = self._sockets.stream(number)
        except StreamError:
            return True
        return stream.queued_bytes < stream.queue_limit_bytes

    def await_any(self, readers: bytes, writers: bytes, timeout_ms: float | None) -> Deferred[bool]:
        """Park until one of the sockets can be read, or written, or for that time. The numbers are packed."""
        makers = [partial(self._readable, number) for number in _numbers(readers)]
        makers += [partial(self._writable, number) for number in _numbers(writers)]
        return FirstOf(makers, None if timeout_ms is None else timeout_ms / 1000)

    def _readable(self, number: int) -> Wait:
        return self._sockets.handle(number).readable(None)

    def _writable(self, number: int) -> Wait:
        return self._sockets.stream(number).writable(None)

    def shutdown(self, number: int, how: int) -> LuaResult:
        """Send what waits, then end one direction or both; blocks."""
        stream = self._sockets.stream(number)
        if stream.tls:
            return fail("incorrectuse")
        if how != socket.SHUT_RD and stream.queued_bytes:
            stream.flush(FLUSH_S)
        try:
            stream.transport.shutdown(how)
        except OSError:
            return fail("socketclosed")
        return True

    def set_linger(self, number: int, is_on: bool, timeout_s: int) -> LuaResult:
        """Set SO_LINGER."""
        value = _LINGER.pack(is_on, min(timeout_s, 0x7FFF))
        self._sockets.stream(number).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, value)
        return True

    def option(self, number: int, name: bytes) -> LuaResult:
        """The value of an option; of `linger` whether it is on, and the seconds."""
        sock = _socket.socket(fileno=self._sockets.stream(number).transport.fileno())
        try:
            if name == b"linger":
                is_on, timeout_s = _LINGER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.size))
                return bool(is_on), timeout_s
            return bool(sock.getsockopt(*_OPTIONS[name]))
        finally:
            sock.detach()


def _numbers(packed: bytes) -> list[int]:
    return [number for (number,) in struct.iter_unpack(">Q", packed)]


# ---- names


def _asked(what: bytes, ask: Callable[[str], tuple[str, list[str], list[str]]]) -> LuaResult:
    """Name, aliases and addresses; the latter two with spaces in between."""
    try:
        with gevent.Timeout(LOOKUP_S, StreamError("timeout")):
            name, aliases, addresses = ask(what.decode("utf-8", "replace"))
    except StreamError as error:
        return fail(error.word)
    except (OSError, UnicodeError):
        return fail("cannotresolve")
    return name.encode(), " ".join(aliases).encode(), " ".join(addresses).encode()


def toip(name: bytes) -> LuaResult:
    """The official name of `name`, its aliases and IPv4 addresses; blocks."""
    return _asked(name, get_hub().resolver.gethostbyname_ex)


def tohostname(ip: bytes) -> LuaResult:
    """The same for the name of an address; blocks."""
    return _asked(ip, get_hub().resolver.gethostbyaddr)


def addresses(name: bytes) -> LuaResult:
    """All addresses of a name, with spaces in between; blocks."""

    def ask(text: str) -> tuple[str, list[str], list[str]]:
        found = get_hub().resolver.getaddrinfo(text, 0, 0, socket.SOCK_STREAM, 0, 0)
        return text, [], list(dict.fromkeys(str(entry[4][0]) for entry in found))

    answer = _asked(name, ask)
    assert isinstance(answer, tuple)
    return answer if answer[0] is None else answer[2]


def gethostname() -> bytes:
    """The name of this machine."""
    return socket.gethostname().encode()


def install(vm: Vm, services: Services) -> None:
    """Give Lua the globals `socket` (with `socket.mail`) and `mime`, and what their modules stand on."""
    binding = LuaSocketBinding(services.sockets)
    direct = methods(binding, "attempt set_linger option", with_words)
    blocking = methods(binding, "shutdown", with_words)
    vm.namespace("ba.luasocket.waiting", direct, blocking)
    for part in ("inbox", "tcp", "udp"):
        vm.namespace(f"ba.luasocket.{part}", {})
    names: dict[str, Function] = {"toip": toip, "tohostname": tohostname, "addresses": addresses}
    facts: dict[str, Function] = {"gettime": time.time, "gethostname": gethostname, "has_room": binding.has_room}
    vm.namespace("socket", facts, names, parking={"await_any": binding.await_any})
    vm.namespace("mime", {})
    mail.install(vm, services)

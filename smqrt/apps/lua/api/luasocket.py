"""Python half of `socket`, `mime`, `socket.mail` and `mako.log` (spec: bas-api §3, §12, §17).

`socket` has LuaSocket's interface; its Lua half is based on `ba.socket`.
"""

from __future__ import annotations

import _socket
import socket
import struct
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import gevent
from gevent import get_hub

from smqrt.apps.lua import bridge
from smqrt.apps.lua.api.sockets import SocketBinding
from smqrt.apps.lua.bridge import Function, LuaResult, Table, fail, from_utf8, methods, with_error_words
from smqrt.apps.lua.vm import Services, Vm
from smqrt.broker.deferred import Deferred
from smqrt.errors import StreamError
from smqrt.loop.scheduling import TimedDeferred, Wait
from smqrt.mail.smtp import MAX_MAIL_BYTES, TIMEOUT_S, Attachment, Mail, MailServer
from smqrt.transport.tls_contexts import ClientTls

LOOKUP_TIMEOUT_S = 30.0
FLUSH_TIMEOUT_S = 30.0
"""Timeout of `shutdown` for sending the queued data."""
_OPTIONS = {
    b"keepalive": (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
    b"tcp-nodelay": (socket.IPPROTO_TCP, socket.TCP_NODELAY),
    b"reuseaddr": (socket.SOL_SOCKET, socket.SO_REUSEADDR),
}
_LINGER = struct.Struct("ii")


class FirstOf(TimedDeferred[bool]):
    """Resolves to True when the first of several waits ends, to False after the timeout.

    Args:
        makers: functions that return a `Wait`, or raise StreamError for a closed socket, which counts as ready.
        timeout_s: None for no timeout.
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
    """Functions of the LuaSocket layer that `ba.socket` does not have."""

    def __init__(self, sockets: SocketBinding) -> None:
        self._sockets = sockets

    def attempt(self, number: int) -> LuaResult:
        """Read without waiting; return nil, "timeout" when nothing has arrived."""
        handle = self._sockets.handle(number)
        if handle.reading is not None:
            return fail("incorrectuse")
        return handle.receive() or fail("timeout")

    def has_room(self, number: int) -> bool:
        """Return whether sending would not block."""
        try:
            stream = self._sockets.stream(number)
        except StreamError:
            return True
        return stream.queued_bytes < stream.queue_limit_bytes

    def await_any(self, readers: bytes, writers: bytes, timeout_ms: float | None) -> Deferred[bool]:
        """Park until one of the sockets can be read or written, or until the timeout.

        `readers` and `writers` are the numbers of sockets, packed in 8 bytes each.
        """

        def readable(number: int) -> Wait:
            return self._sockets.handle(number).readable(None)

        def writable(number: int) -> Wait:
            return self._sockets.stream(number).writable(None)

        makers = [partial(readable, number) for (number,) in struct.iter_unpack(">Q", readers)]
        makers += [partial(writable, number) for (number,) in struct.iter_unpack(">Q", writers)]
        return FirstOf(makers, None if timeout_ms is None else timeout_ms / 1000)

    def shutdown(self, number: int, how: int) -> LuaResult:
        """Send the queued data, then shut down one direction or both; blocks."""
        stream = self._sockets.stream(number)
        if stream.tls:
            return fail("incorrectuse")  # TLS has no half-closed connections
        if how != socket.SHUT_RD and stream.queued_bytes:
            stream.flush(FLUSH_TIMEOUT_S)
        try:
            stream.transport.shutdown(how)
        except OSError:
            return fail("socketclosed")
        return True

    def set_linger(self, number: int, is_on: bool, timeout_s: int) -> LuaResult:
        """Set SO_LINGER."""
        value = _LINGER.pack(is_on, min(timeout_s, 0x7FFF))  # since some systems store 16 bits
        self._sockets.stream(number).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, value)
        return True

    def option(self, number: int, name: bytes) -> LuaResult:
        """Return the value of an option; for `linger` whether it is on, and the seconds."""
        sock = _socket.socket(fileno=self._sockets.stream(number).transport.fileno())
        try:
            if name == b"linger":
                is_on, timeout_s = _LINGER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.size))
                return bool(is_on), timeout_s
            return bool(sock.getsockopt(*_OPTIONS[name]))
        finally:
            sock.detach()  # the descriptor belongs to the transport


# ---- Names


def _lookup(what: bytes, resolve: Callable[[str], tuple[str, list[str], list[str]]]) -> LuaResult:
    """Return the name, the aliases and the addresses; the latter two are separated by spaces."""
    try:
        with gevent.Timeout(LOOKUP_TIMEOUT_S, StreamError("timeout")):
            name, aliases, addresses = resolve(what.decode("utf-8", "replace"))
    except StreamError as error:
        return fail(error.word)
    except (OSError, UnicodeError):
        return fail("cannotresolve")
    return name.encode(), " ".join(aliases).encode(), " ".join(addresses).encode()


def toip(name: bytes) -> LuaResult:
    """Look up the official name of `name`, its aliases and IPv4 addresses; blocks."""
    return _lookup(name, get_hub().resolver.gethostbyname_ex)


def tohostname(ip: bytes) -> LuaResult:
    """Look up name, aliases and addresses of an IP address; blocks."""
    return _lookup(ip, get_hub().resolver.gethostbyaddr)


def addresses(name: bytes) -> LuaResult:
    """Look up all addresses of a name, separated by spaces; blocks."""

    def resolve(text: str) -> tuple[str, list[str], list[str]]:
        found = get_hub().resolver.getaddrinfo(text, 0, 0, socket.SOCK_STREAM, 0, 0)
        return text, [], list(dict.fromkeys(str(entry[4][0]) for entry in found))

    answer = _lookup(name, resolve)
    assert isinstance(answer, tuple)
    return answer if answer[0] is None else answer[2]


def gethostname() -> bytes:
    """Return the name of this machine."""
    return socket.gethostname().encode()


# ---- socket.mail


class MailBinding:
    """Sends mail.

    Args:
        services: contains the TLS clients.
    """

    def __init__(self, services: Services) -> None:
        self._services = services

    def send(self, server: bytes, mail: bytes) -> LuaResult:
        """Send a mail; blocks. Raises StreamError.

        Args:
            server: the mail server, a packed table.
            mail: the mail, a packed table.

        Returns:
            True, and the recipients that the server rejected, if any.
        """
        op, fields = bridge.load(server), bridge.load(mail)
        tls = self._services.tls[op[b"tls"]] if b"tls" in op else None
        assert tls is None or isinstance(tls, ClientTls)
        mail_server = MailServer(
            host=from_utf8(op[b"host"]),
            port=op.get(b"port"),
            user=from_utf8(op.get(b"user", b"")),
            password=from_utf8(op.get(b"password", b"")),
            tls=tls,
            starttls=op.get(b"starttls", False),
        )
        timeout_s = op[b"timeout_ms"] / 1000 if b"timeout_ms" in op else TIMEOUT_S
        charset = _text(fields, b"charset") or "utf-8"
        message = Mail(
            sender=_text(fields, b"from"),
            to=_texts(fields, b"to"),
            cc=_texts(fields, b"cc"),
            bcc=_texts(fields, b"bcc"),
            reply_to=_text(fields, b"replyto"),
            subject=_text(fields, b"subject"),
            text=_body(fields, b"text", charset),
            html=_body(fields, b"html", charset),
            charset=charset,
            encoding=_text(fields, b"encoding").lower(),
            images=[_attachment(one) for one in fields[b"images"].values()],
            attachments=[_attachment(one) for one in fields[b"files"].values()],
        )
        rejected = mail_server.send(message, timeout_s)
        return (True, "; ".join(rejected).encode()) if rejected else True


def _attachment(fields: Table) -> Attachment:
    return Attachment(
        name=_text(fields, b"name"),
        data=fields[b"data"],
        content_type=_text(fields, b"type"),
        description=_text(fields, b"description"),
        cid=_text(fields, b"id"),
    )


def _text(fields: Table, name: bytes) -> str:
    value: Any = fields.get(name, b"")
    return str(value, "utf-8", "replace")


def _texts(fields: Table, name: bytes) -> list[str]:
    return [str(value, "utf-8", "replace") for _, value in sorted(fields[name].items())]


def _body(fields: Table, name: bytes, charset: str) -> str | None:
    """Decode a field from `charset`."""
    data = fields.get(name)
    if data is None:
        return None
    try:
        return str(data, charset, "replace")
    except (LookupError, UnicodeError):  # an unknown charset: `Mail` reports it
        return str(data, "utf-8", "replace")


def install_log(vm: Vm) -> Callable[[], None]:
    """Install `mako.log` and the module `log`.

    Returns:
        A function that sends the content of the log at shutdown; it blocks for some seconds at most.
    """
    refs: list[int] = []
    vm.namespace("ba.maillog", {"attach": refs.append})

    def send() -> None:
        vm.run(refs[0])

    return send


def install(vm: Vm, services: Services) -> None:
    """Install the globals `socket` (with `socket.mail`) and `mime`, and the modules that they use."""
    binding = LuaSocketBinding(services.sockets)
    direct = methods(binding, "attempt set_linger option", with_error_words)
    blocking = methods(binding, "shutdown", with_error_words)
    vm.namespace("ba.luasocket.waiting", direct, blocking)
    for part in ("inbox", "tcp", "udp"):
        vm.namespace(f"ba.luasocket.{part}", {})
    names: dict[str, Function] = {"toip": toip, "tohostname": tohostname, "addresses": addresses}
    facts: dict[str, Function] = {"gettime": time.time, "gethostname": gethostname, "has_room": binding.has_room}
    vm.namespace("socket", facts, names, parking={"await_any": binding.await_any})
    vm.namespace("mime", {})
    mail = MailBinding(services)
    vm.namespace("socket.mail", {"max_bytes": lambda: MAX_MAIL_BYTES}, {"send": with_error_words(mail.send)})

"""`ba.socket` and the socket object (spec: bas-api §8). The Lua half is lib/ba/sockets.lua and its neighbours.

Lua knows a socket by a number. What waits in one of them (a read, an accept, a full queue) is parked: no greenlet.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import wraps
from typing import Any

from smqrt.broker.deferred import Deferred
from smqrt.errors import StreamError
from smqrt.http.message import Request
from smqrt.http.status import HttpError
from smqrt.lua.api.tls import describe
from smqrt.lua.bridge import ArgumentError, fail
from smqrt.lua.services import Services
from smqrt.lua.sockets.draining import Draining
from smqrt.lua.sockets.ends import AGAIN, DatagramEnd, End, ListenerEnd, StreamEnd
from smqrt.lua.sockets.options import set_option
from smqrt.lua.sockets.reading import Reading
from smqrt.lua.sockets.suspension import Suspensions
from smqrt.lua.sockets.websocket import WebSocketEnd
from smqrt.lua.vm import Vm
from smqrt.net.acceptor import Acceptor
from smqrt.net.addresses import resolve
from smqrt.net.contexts import ClientTls
from smqrt.net.datagram import Datagram
from smqrt.net.handover import websocket_key
from smqrt.net.stream import Stream
from smqrt.net.tls import TlsTransport
from smqrt.net.trust import Trust
from smqrt.net.turn import share
from smqrt.wire import websocket

Function = Callable[..., Any]

MAX_ALPN_BYTES = 255  # RFC 7301 §3.1


def _failing(function: Function) -> Function:
    """`function`, with `nil, word` in place of StreamError."""

    @wraps(function)
    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except StreamError as error:
            return fail(error.word, *([error.detail] if error.detail else []))

    return call


class SocketHalf:
    """Lua's sockets by their numbers."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._next = itertools.count(1).__next__
        self._ends: dict[int, Any] = {}
        self.suspensions = Suspensions()

    def add(self, end: End) -> int:
        """Give a socket its number."""
        number = self._next()
        self._ends[number] = end
        return number

    def _end(self, number: int | None) -> Any:
        try:
            return self._ends[number]  # type: ignore[index]
        except KeyError:
            raise StreamError("socketclosed") from None

    def _stream(self, number: int) -> Stream:
        stream: Stream | None = self._end(number).stream
        if stream is None:
            raise StreamError("incorrectuse")
        return stream

    def stream(self, number: int) -> Stream:
        """The connection of a socket, for protocols that are spoken in Python. Raises StreamError."""
        return self._stream(number)

    def shutdown(self) -> None:
        """The server stops: whoever waits gets nil, "sysshutdown"."""
        self.suspensions.wake_all(b"sysshutdown")
        for end in list(self._ends.values()):
            end.end_reading("sysshutdown")

    # ---- making them

    def connect(
        self,
        host: bytes,
        port: int,
        timeout_ms: float | None,
        source: bytes | None,
        ipv6: bool,
        tls: int | None,
        *alpn: bytes,
    ) -> Any:
        """Connect, and shake hands when `tls` is the number of a TLS client; blocks."""
        _protocols(alpn)
        name = host.decode("utf-8", "replace")
        timeout_s = None if timeout_ms is None else timeout_ms / 1000
        stream = Stream.connect(name, port, timeout_s, source.decode("ascii", "replace") if source else None, ipv6)
        end = StreamEnd(stream, host=name)
        if tls is not None:
            self._secure(end, tls, alpn)
        return self.add(end)

    def bind(self, port: int, host: bytes | None, ipv6: bool, tls: int | None) -> Any:
        """Listen."""
        server = self._services.tls[tls] if tls is not None else None
        acceptor = Acceptor(
            port, host.decode("ascii", "replace") if host else None, ipv6, server.context() if server else None
        )
        return self.add(ListenerEnd(acceptor, lambda transport: self.add(StreamEnd(Stream(transport), server))))

    def udp(self, host: bytes | None, port: int | None, local_port: int | None, intf: bytes | None, ipv6: bool) -> Any:
        """Make a UDP socket; blocks for the look-up of a name."""
        peer = None
        if host is not None:
            peer = resolve(host.decode("utf-8", "replace"), port or 0, ipv6)[0]
        bound = intf.decode("ascii", "replace") if intf else None
        return self.add(DatagramEnd(Datagram(local_port, bound, peer, ipv6)))

    def lookup(self, name: bytes) -> bytes:
        """The first address of a name; blocks."""
        address: str = resolve(name.decode("utf-8", "replace"), 0)[0][1][0]
        return address.encode()

    def take_request(self, request: Request, raw: bool) -> Any:
        """The connection of a request, and what was received of it: a WebSocket when it asks for one."""
        key = None if raw else websocket_key(request)
        try:
            taken = request.detach()
        except RuntimeError:
            return fail("iscommitted")
        taken.watcher.close()
        if key is None:
            return self.add(StreamEnd(Stream(taken.transport), server=taken.server)), taken.data or None
        stream = Stream(taken.transport, taken.data)
        stream.push_or_forget(websocket.switching_protocols(key))
        return self.add(WebSocketEnd(stream, False, server=taken.server)), None

    def give_request(self, number: int, data: bytes) -> Any:
        """Hand a connection back to HTTP, with `data` in front of what follows."""
        end = self._end(number)
        server = getattr(end, "server", None) or self._services.http_server
        if not isinstance(end, StreamEnd) or isinstance(end, WebSocketEnd) or server is None or end.reading:
            return fail("incorrectuse")
        peer = end.peername()
        transport, unread = end.stream.release()
        del self._ends[number]
        server.accepted(transport, peer, type(transport) is TlsTransport, data + unread)
        return True

    def take_http(self, client: int) -> Any:
        """The connection of an HTTP client, and what was received already: a WebSocket after a 101 answer; blocks."""
        taken = self._services.http_clients[client].release()
        if taken.websocket:
            return self.add(WebSocketEnd(taken.stream, True, taken.tls, taken.host)), None
        data = taken.stream.take_unread()
        return self.add(StreamEnd(taken.stream, taken.tls, taken.host)), data or None

    # ---- reading and writing

    def read(self, number: int, timeout_ms: float | None) -> Any:
        """What arrives next, see `End.receive`; parks."""
        end = self._end(number)
        if end.reading is not None:
            return fail("incorrectuse")
        values = None if end.paused else end.receive()
        return values or Reading(end, None if timeout_ms is None else timeout_ms / 1000, values is AGAIN)

    def put(self, number: int, data: bytes, is_text: bool) -> Any:
        """Send; false when the writer has to wait behind it, see `drain`, and true, "turn" when it should if it can;
        nil, "full" when it has to wait before it: nothing is taken.
        """
        end = self._end(number)
        stream: Stream | None = end.stream
        if stream is not None and stream.queued_bytes >= stream.queue_limit_bytes:
            return fail("full")
        has_room = end.put(data, is_text)
        return (True, b"turn") if has_room and share().spent() else has_room

    def offer(self, number: int, data: bytes, is_text: bool) -> Any:
        """Send or queue; nil and the length of the queue when it is full, and nothing is taken."""
        end = self._end(number)
        stream: Stream | None = end.stream
        if stream is not None and stream.queued_bytes >= stream.queue_limit_bytes:
            return None, stream.queued_bytes
        end.put(data, is_text)
        return True

    def drain(self, number: int) -> Any:
        """Park until there is room in the queue; when there is, until a later turn of the loop."""
        stream: Stream | None = self._end(number).stream
        if stream is not None and stream.queued_bytes > stream.queue_limit_bytes // 2:
            return Draining(stream)
        turn: Deferred[bool] = Deferred()
        share().later(turn.resolve, True)
        return turn

    def sendto(self, number: int, data: bytes, host: bytes, port: int) -> Any:
        """Send a datagram."""
        end = self._end(number)
        if not isinstance(end, DatagramEnd):
            raise StreamError("incorrectuse")
        end.sendto(data, host.decode("ascii", "replace"), port)
        return True

    def ping(self, number: int, data: bytes) -> Any:
        """Send a WebSocket ping; nil and the length of the queue when it is full."""
        end = self._end(number)
        if not isinstance(end, WebSocketEnd):
            raise StreamError("incorrectuse")
        return True if end.ping(data) else (None, end.stream.queued_bytes)

    def pause(self, number: int, is_paused: bool) -> Any:
        """Hold back what arrives, or go on; false when it was so already."""
        end = self._end(number)
        if end.paused is is_paused:
            return False
        end.pause(is_paused)
        return True

    def close(self, number: int, code: int | None = None, text: bytes = b"") -> Any:
        """Close; false when it was closed before."""
        end = self._ends.pop(number, None)
        if end is None:
            return False
        if isinstance(end, WebSocketEnd) and code is not None:
            end.close(code, text)
        else:
            end.close()
        end.end_reading("socketclosed")
        return True

    def drop(self, number: int) -> None:
        """Forget a socket whose connection has ended."""
        self._ends.pop(number, None)

    # ---- facts

    def peername(self, number: int) -> Any:
        """Address, port and whether it is IPv6, of the other side."""
        return _address(*self._end(number).peername())

    def sockname(self, number: int) -> Any:
        """The same of this side."""
        return _address(*self._end(number).sockname())

    def setoption(self, number: int, name: bytes, *values: Any) -> Any:
        """See `set_option`."""
        try:
            set_option(self._end(number), name, *values)
        except OSError:
            return fail("failed")
        return True

    def is_websocket(self, number: int) -> bool:
        """Whether it is a WebSocket."""
        return isinstance(self._ends.get(number), WebSocketEnd)

    def state(self, number: int) -> Any:
        """A word, and whether there is a connection."""
        end = self._end(number)
        return end.state.encode(), end.state == "connected"

    def queuelen(self, number: int, limit_bytes: int | None) -> Any:
        """The bytes that wait to be sent; sets how many may."""
        stream = self._stream(number)
        if limit_bytes is not None:
            stream.queue_limit_bytes = limit_bytes
        return stream.queued_bytes

    def maxsize(self, number: int, size_bytes: int) -> Any:
        """Set the size of the largest WebSocket message that is accepted."""
        end = self._end(number)
        if not isinstance(end, WebSocketEnd):
            raise StreamError("incorrectuse")
        end.codec.max_message_bytes = size_bytes
        return True

    def count(self) -> int:
        """How many sockets there are."""
        return len(self._ends)

    # ---- TLS

    def upgrade(self, number: int, tls: int, *alpn: bytes) -> Any:
        """Go on in TLS; blocks until the handshake is done. The socket is closed when it fails."""
        end = self._end(number)
        if type(end) is not StreamEnd or end.stream.tls or end.reading:
            raise StreamError("incorrectuse")
        self._secure(end, tls, alpn)
        return True

    def _secure(self, end: StreamEnd, number: int, alpn: tuple[bytes, ...]) -> None:
        tls = self._services.tls[number]
        context = tls.context(_protocols(alpn))
        if isinstance(tls, ClientTls):
            end.stream.starttls(context, end.host or None)
        else:
            end.stream.starttls(context, server_side=True)
        end.tls = tls

    def trusted(self, number: int, name: bytes | None) -> Any:
        """True, or nil and what is wrong with the certificate of the other side."""
        end = self._end(number)
        tls = self._tls(number)
        if not isinstance(getattr(end, "tls", None), ClientTls):  # OpenSSL has refused a client's if it is not trusted
            return True if tls.peer_certificate() else fail(Trust.NONE.value)
        trust = end.tls.store.judge(tls.peer_chain(), name.decode("utf-8", "replace") if name is not None else end.host)
        return True if trust is Trust.TRUSTED else fail(trust.value)

    def certificate(self, number: int) -> Any:
        """The certificate of the other side, for `core.certificate`."""
        return describe(self._tls(number).peer_certificate())

    def cipher(self, number: int) -> Any:
        """The name of the cipher, and the version of TLS."""
        cipher = self._tls(number).cipher()
        return (cipher[0].encode(), cipher[1].encode()) if cipher else None

    def alpn(self, number: int) -> Any:
        """The protocol that was chosen by ALPN."""
        word = self._tls(number).alpn()
        return word.encode() if word else None

    def is_resumed(self, number: int) -> Any:
        """Whether the TLS session goes on from an earlier connection."""
        return self._tls(number).resumed()

    def _tls(self, number: int) -> TlsTransport:
        tls: TlsTransport | None = self._end(number).tls_layer
        if tls is None:
            raise StreamError("sslnotenabled")
        return tls


def _protocols(alpn: tuple[bytes, ...]) -> list[str]:
    for word in alpn:
        if not (word.isascii() and 1 <= len(word) <= MAX_ALPN_BYTES):
            raise ArgumentError(f"alpn: a protocol is 1 to {MAX_ALPN_BYTES} ASCII characters, not {word[:20]!r}")
    return [word.decode() for word in alpn]


def _address(host: str, port: int) -> tuple[bytes, int, bool]:
    return host.encode(), port, ":" in host


_DIRECT = (
    "bind give_request put offer sendto ping pause close drop peername sockname setoption is_websocket state queuelen "
    "maxsize count trusted certificate cipher alpn is_resumed"
)
_BLOCKING = "connect udp lookup take_http upgrade"
_PARKING = "read drain"


def install(vm: Vm, services: Services) -> SocketHalf:
    """Give Lua `ba.socket` and `ba.bytearray`."""
    services.sockets = half = SocketHalf(services)

    def functions(names: str) -> dict[str, Function]:
        return {name: _failing(getattr(half, name)) for name in names.split()}

    def take_request(exchange: int, raw: bool) -> Any:
        if services.exchanges is None:
            raise ArgumentError("req2sock: there are no requests here")
        taken = services.exchanges.of(exchange)
        try:
            taken.request.access.check_origin(taken.request)
        except HttpError as error:
            taken.refusal = error
            return fail("noaccess")
        return half.take_request(taken.request, raw)

    suspensions = half.suspensions
    direct = functions(_DIRECT) | {"take_request": take_request, "wake": suspensions.wake, "start": vm.start}
    parking = functions(_PARKING) | {"suspend": suspensions.suspend}
    vm.namespace("ba.bytearray", {})
    vm.namespace("ba.sockets", direct, functions(_BLOCKING), parking=parking)
    vm.namespace("ba.cosockets", {})
    vm.namespace("ba.connections", {})
    return half

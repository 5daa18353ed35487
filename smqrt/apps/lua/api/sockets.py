"""`ba.socket` and the socket object (spec: bas-api §8). The Lua half is lib/ba/sockets.lua and its neighbours.

Lua knows a socket by a number. What waits in one of them (a read, an accept, a full queue) is parked: no greenlet.
"""

from __future__ import annotations

import itertools
from ipaddress import ip_address

from smqrt.apps.lua.api.tls import describe
from smqrt.apps.lua.bridge import Function, LuaResult, LuaValue, address, fail, methods, with_words
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.socket_handles import (
    AGAIN,
    ChunkedHandle,
    DatagramHandle,
    ListenerHandle,
    QueueDrain,
    Reading,
    SocketHandle,
    StreamHandle,
    Suspensions,
    WebSocketHandle,
)
from smqrt.apps.lua.vm import Vm
from smqrt.broker.deferred import Deferred
from smqrt.errors import ArgumentError, StartError, StreamError
from smqrt.http.headers import HttpError
from smqrt.http.message import Request
from smqrt.loop.scheduling import share
from smqrt.smq.handshake import websocket_key
from smqrt.transport.listener import Acceptor, Listener
from smqrt.transport.stream import Stream, resolve, set_option
from smqrt.transport.tls import TlsTransport
from smqrt.transport.tls_contexts import ClientTls, Trust
from smqrt.transport.udp import Datagram
from smqrt.wire import websocket

MAX_ALPN_BYTES = 255  # RFC 7301 §3.1


class SocketBinding:
    """Lua's sockets by their numbers."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._next = itertools.count(1).__next__
        self._handles: dict[int, SocketHandle] = {}
        self.suspensions = Suspensions()

    def add(self, handle: SocketHandle) -> int:
        """Give a socket its number."""
        number = self._next()
        self._handles[number] = handle
        return number

    def _handle(self, number: int | None) -> SocketHandle:
        try:
            return self._handles[number]  # type: ignore[index]
        except KeyError:
            raise StreamError("socketclosed") from None

    def _stream(self, number: int) -> Stream:
        stream = self._handle(number).stream
        if stream is None:
            raise StreamError("incorrectuse")
        return stream

    def handle(self, number: int) -> SocketHandle:
        """A socket. Raises StreamError."""
        return self._handle(number)

    def stream(self, number: int) -> Stream:
        """The connection of a socket, for protocols that are spoken in Python. Raises StreamError."""
        return self._stream(number)

    def shutdown(self) -> None:
        """The server stops: whoever waits gets nil, "sysshutdown"."""
        self.suspensions.wake_all(b"sysshutdown")
        for handle in list(self._handles.values()):
            handle.end_reading("sysshutdown")

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
    ) -> LuaResult:
        """Connect, and shake hands when `tls` is the number of a TLS client; blocks."""
        _protocols(alpn)
        name = host.decode("utf-8", "replace")
        timeout_s = None if timeout_ms is None else timeout_ms / 1000
        stream = Stream.connect(name, port, timeout_s, source.decode("ascii", "replace") if source else None, ipv6)
        handle = StreamHandle(stream, host=name)
        if tls is not None:
            self._secure(handle, tls, alpn)
        return self.add(handle)

    def bind(self, port: int, host: bytes | None, ipv6: bool, tls: int | None) -> LuaResult:
        """Listen."""
        server = self._services.tls[tls] if tls is not None else None
        address = _own_address(host)
        acceptor = Acceptor(port, address, ipv6, server.context() if server else None)
        return self.add(ListenerHandle(acceptor, lambda transport: self.add(StreamHandle(Stream(transport), server))))

    def udp(
        self, host: bytes | None, port: int | None, local_port: int | None, intf: bytes | None, ipv6: bool
    ) -> LuaResult:
        """Make a UDP socket; blocks for the look-up of a name."""
        peer = None
        if host is not None:
            peer = resolve(host.decode("utf-8", "replace"), port or 0, ipv6)[0]
        bound = _own_address(intf)
        return self.add(DatagramHandle(Datagram(local_port, bound, peer, ipv6)))

    def lookup(self, name: bytes) -> bytes:
        """The first address of a name; blocks."""
        address: str = resolve(name.decode("utf-8", "replace"), 0)[0][1][0]
        return address.encode()

    def take_request(
        self, request: Request, raw: bool, subprotocol: bytes | None = None, written: bytes | None = None
    ) -> LuaResult:
        """The connection of a request, and what was received of it: a WebSocket when it asks for one. Behind a flush it
        goes on with the body of the response, in chunks unless `raw`; first with `written`, what Lua has in its buffer.
        None for `written`: the response may not have begun.

        Raises HttpError when the client does not offer the sub-protocol.
        """
        key = None if raw else websocket_key(request)
        lines = b"" if key is None else request.upgrade_lines(subprotocol.decode("latin-1") if subprotocol else None)
        try:
            taken = request.detach(within=key is None and written is not None, more=written or b"")
        except RuntimeError:
            return fail("iscommitted")
        taken.watcher.close()
        if key is None:
            stream = Stream(taken.transport)
            stream.push_or_forget(taken.unsent)
            kind = ChunkedHandle if taken.is_chunked and not raw else StreamHandle
            return self.add(kind(stream, server=taken.server)), taken.data or None
        stream = Stream(taken.transport, taken.data)
        stream.push_or_forget(websocket.switching_protocols(key, lines))
        return self.add(WebSocketHandle(stream, False, server=taken.server)), None

    def give_request(self, number: int, data: bytes) -> LuaResult:
        """Hand a connection back to HTTP, with `data` in front of what follows."""
        handle = self._handle(number)
        server = getattr(handle, "server", None) or self._services.http_server
        if (
            not isinstance(handle, StreamHandle)
            or isinstance(handle, ChunkedHandle | WebSocketHandle)
            or server is None
            or handle.reading
        ):
            return fail("incorrectuse")
        peer = handle.peername()
        transport, unread = handle.stream.release()
        del self._handles[number]
        server.accepted(transport, peer, type(transport) is TlsTransport, data + unread)
        return True

    def take_http(self, client: int) -> LuaResult:
        """The connection of an HTTP client, and what was received already: a WebSocket after a 101 answer; blocks."""
        taken = self._services.http_clients[client].release()
        if taken.websocket:
            return self.add(WebSocketHandle(taken.stream, True, taken.tls, taken.host)), None
        data = taken.stream.take_unread()
        return self.add(StreamHandle(taken.stream, taken.tls, taken.host)), data or None

    # ---- reading and writing

    def read(self, number: int, timeout_ms: float | None) -> LuaResult:
        """What arrives next, see `SocketHandle.receive`; parks."""
        handle = self._handle(number)
        if handle.reading is not None:
            return fail("incorrectuse")
        values = None if handle.paused else handle.receive()
        return values or Reading(handle, None if timeout_ms is None else timeout_ms / 1000, values is AGAIN)

    def put(self, number: int, data: bytes, is_text: bool) -> LuaResult:
        """Send; false when the writer has to wait behind it, see `drain`, and true, "turn" when it should if it can;
        nil, "full" when it has to wait before it: nothing is taken.
        """
        handle = self._handle(number)
        stream = handle.stream
        if stream is not None and stream.queued_bytes >= stream.queue_limit_bytes:
            return fail("full")
        has_room = handle.put(data, is_text)
        return (True, b"turn") if has_room and share().spent() else has_room

    def offer(self, number: int, data: bytes, is_text: bool) -> LuaResult:
        """Send or queue; nil and the length of the queue when it is full, and nothing is taken."""
        handle = self._handle(number)
        stream = handle.stream
        if stream is not None and stream.queued_bytes >= stream.queue_limit_bytes:
            return None, stream.queued_bytes
        handle.put(data, is_text)
        return True

    def drain(self, number: int, timeout_ms: float | None = None) -> LuaResult:
        """Park until there is room in the queue, or for so long; when there is, until a later turn of the loop."""
        stream = self._handle(number).stream
        if stream is not None and stream.queued_bytes > stream.queue_limit_bytes // 2:
            return QueueDrain(stream, None if timeout_ms is None else timeout_ms / 1000)
        turn: Deferred[bool] = Deferred()
        share().later(turn.resolve, True)
        return turn

    def sendto(self, number: int, data: bytes, host: bytes, port: int) -> LuaResult:
        """Send a datagram."""
        handle = self._handle(number)
        if not isinstance(handle, DatagramHandle):
            raise StreamError("incorrectuse")
        handle.sendto(data, host.decode("ascii", "replace"), port)
        return True

    def ping(self, number: int, data: bytes) -> LuaResult:
        """Send a WebSocket ping; nil and the length of the queue when it is full."""
        handle = self._handle(number)
        if not isinstance(handle, WebSocketHandle):
            raise StreamError("incorrectuse")
        return True if handle.ping(data) else (None, handle.stream.queued_bytes)

    def pause(self, number: int, is_paused: bool) -> LuaResult:
        """Hold back what arrives, or go on; false when it was so already."""
        handle = self._handle(number)
        if handle.paused is is_paused:
            return False
        handle.pause(is_paused)
        return True

    def close(self, number: int, code: int | None = None, text: bytes = b"") -> LuaResult:
        """Close; false when it was closed before."""
        handle = self._handles.pop(number, None)
        if handle is None:
            return False
        if isinstance(handle, WebSocketHandle) and code is not None:
            handle.close(code, text)
        else:
            handle.close()
        handle.end_reading("socketclosed")
        return True

    def drop(self, number: int) -> None:
        """Forget a socket whose connection has ended."""
        self._handles.pop(number, None)

    # ---- facts

    def peername(self, number: int) -> LuaResult:
        """Address, port and whether it is IPv6, of the other side."""
        return address(*self._handle(number).peername())

    def sockname(self, number: int) -> LuaResult:
        """The same of this side."""
        return address(*self._handle(number).sockname())

    def setoption(self, number: int, name: bytes, *values: LuaValue) -> LuaResult:
        """See `set_option`."""
        try:
            set_option(self._handle(number), name.decode("utf-8", "replace"), *values)
        except OSError:
            return fail("failed")
        return True

    def is_websocket(self, number: int) -> bool:
        """Whether it is a WebSocket."""
        return isinstance(self._handles.get(number), WebSocketHandle)

    def state(self, number: int) -> LuaResult:
        """A word, and whether there is a connection."""
        handle = self._handle(number)
        return handle.state.encode(), handle.state == "connected"

    def queuelen(self, number: int, limit_bytes: int | None) -> LuaResult:
        """The bytes that wait to be sent; sets how many may."""
        stream = self._stream(number)
        if limit_bytes is not None:
            stream.queue_limit_bytes = limit_bytes
        return stream.queued_bytes

    def maxsize(self, number: int, size_bytes: int) -> LuaResult:
        """Set the size of the largest WebSocket message that is accepted."""
        handle = self._handle(number)
        if not isinstance(handle, WebSocketHandle):
            raise StreamError("incorrectuse")
        handle.codec.max_message_bytes = size_bytes
        return True

    def count(self) -> int:
        """How many sockets there are."""
        return len(self._handles)

    # ---- TLS

    def upgrade(self, number: int, tls: int, *alpn: bytes) -> LuaResult:
        """Go on in TLS; blocks until the handshake is done. The socket is closed when it fails."""
        handle = self._handle(number)
        if type(handle) is not StreamHandle or handle.stream.tls or handle.reading:
            raise StreamError("incorrectuse")
        self._secure(handle, tls, alpn)
        return True

    def _secure(self, handle: StreamHandle, number: int, alpn: tuple[bytes, ...]) -> None:
        tls = self._services.tls[number]
        context = tls.context(_protocols(alpn))
        if isinstance(tls, ClientTls):
            handle.stream.starttls(context, handle.host or None)
        else:
            handle.stream.starttls(context, server_side=True)
        handle.tls = tls

    def trusted(self, number: int, name: bytes | None) -> LuaResult:
        """True, or nil and what is wrong with the certificate of the other side."""
        handle = self._handle(number)
        tls = self._tls(number)
        if not isinstance(handle, StreamHandle) or not isinstance(handle.tls, ClientTls):
            # OpenSSL has refused the certificate of a client that is not trusted.
            return True if tls.peer_certificate() else fail(Trust.NONE.value)
        host = handle.host if name is None else name.decode("utf-8", "replace")
        trust = handle.tls.store.judge(tls.peer_chain(), host)
        return True if trust is Trust.TRUSTED else fail(trust.value)

    def certificate(self, number: int) -> LuaResult:
        """The certificate of the other side, for `core.certificate`."""
        return describe(self._tls(number).peer_certificate())

    def cipher(self, number: int) -> LuaResult:
        """The name of the cipher, and the version of TLS."""
        cipher = self._tls(number).cipher()
        return (cipher[0].encode(), cipher[1].encode()) if cipher else None

    def alpn(self, number: int) -> LuaResult:
        """The protocol that was chosen by ALPN."""
        word = self._tls(number).alpn()
        return word.encode() if word else None

    def is_resumed(self, number: int) -> LuaResult:
        """Whether the TLS session goes on from an earlier connection."""
        return self._tls(number).resumed()

    def _tls(self, number: int) -> TlsTransport:
        tls = self._handle(number).tls_layer
        if tls is None:
            raise StreamError("sslnotenabled")
        return tls


def _own_address(intf: bytes | None) -> str | None:
    """The address that `intf` is; a name would have to be looked up, which nobody waits for here."""
    if not intf:
        return None
    text = "127.0.0.1" if intf == b"localhost" else intf.decode("ascii", "replace")
    try:
        ip_address(text)
    except ValueError:
        raise StreamError("bind", f"intf {text!r}: an address of this machine is needed") from None
    return text


def _protocols(alpn: tuple[bytes, ...]) -> list[str]:
    for word in alpn:
        if not (word.isascii() and 1 <= len(word) <= MAX_ALPN_BYTES):
            raise ArgumentError(f"alpn: a protocol is 1 to {MAX_ALPN_BYTES} ASCII characters, not {word[:20]!r}")
    return [word.decode() for word in alpn]


_DIRECT = (
    "bind give_request put offer sendto ping pause close drop peername sockname setoption is_websocket state queuelen "
    "maxsize count trusted certificate cipher alpn is_resumed"
)
_BLOCKING = "connect udp lookup take_http upgrade"
_PARKING = "read drain"


class ListenerBinding:
    """The ports by the numbers by which Lua knows them."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._listeners: dict[int, Listener] = {}
        self._next = itertools.count(1).__next__

    def open(self, port: int, tls: int | None, intf: bytes | None, ipv6: bool) -> LuaResult:
        """Serve another port: its number, or nil and why not.

        Args:
            tls: number of a TLS server, None for plain HTTP.
            intf: address to listen on; all by default.
        """
        server = self._services.http_server
        if server is None:
            return fail("failed", "there is no HTTP server here")
        host = intf.decode("ascii", "replace") if intf else "::" if ipv6 else "0.0.0.0"
        try:
            if tls is None:
                listener = Listener(host, port, server.accepted)
            else:
                listener = Listener(host, port, server.accepted_secure, self._services.tls[tls].context())
        except StartError as error:
            return fail("bind", str(error))
        listener.start()
        number = self._next()
        self._listeners[number] = listener
        return number

    def port(self, number: int) -> int | None:
        """The port listened on, None when it is closed."""
        listener = self._listeners.get(number)
        return listener.address[1] if listener else None

    def close(self, number: int) -> bool:
        """Accept no more; open connections stay. False when it was closed before."""
        listener = self._listeners.pop(number, None)
        if listener is None:
            return False
        listener.close()
        return True


def install(vm: Vm, services: Services) -> SocketBinding:
    """Give Lua `ba.socket`, `ba.bytearray` and `ba.create.servcon`."""
    services.sockets = binding = SocketBinding(services)

    def functions(names: str) -> dict[str, Function]:
        return methods(binding, names, with_words)

    def take_request(exchange: int, raw: bool, subprotocol: bytes | None, written: bytes | None) -> LuaResult:
        if services.exchanges is None:
            raise ArgumentError("req2sock: there are no requests here")
        taken = services.exchanges.of(exchange)
        try:
            taken.request.access.check_origin(taken.request)
        except HttpError as error:
            taken.refusal = error
            return fail("noaccess")
        try:
            return binding.take_request(taken.request, raw, subprotocol, written)
        except HttpError as error:
            taken.refusal = error
            return fail("subprotocol", str(error).encode())

    suspensions = binding.suspensions
    direct = functions(_DIRECT) | {"take_request": take_request, "wake": suspensions.wake, "start": vm.start}
    parking = functions(_PARKING) | {"suspend": suspensions.suspend}
    vm.namespace("ba.bytearray", {})
    vm.namespace("ba.sockets", direct, functions(_BLOCKING), parking=parking)
    vm.namespace("ba.cosockets", {})
    vm.namespace("ba.connections", {})
    listeners = ListenerBinding(services)
    vm.namespace("ba.servcon", {"open": listeners.open, "port": listeners.port, "close": listeners.close})
    return binding

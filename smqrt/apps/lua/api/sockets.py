"""Python half of `ba.socket`, sockets and TLS objects (spec: bas-api §8, §10).

Lua refers to a socket by a number. An activity that waits for a socket (to read, to accept, for room in the queue) is
parked and needs no greenlet. `services.tls` contains TLS clients and servers by their numbers in Lua; sockets, HTTP and
MQTT use it. The Lua halves are lib/ba/sockets.lua, cosockets.lua, connections.lua and tls.lua.
"""

from __future__ import annotations

import itertools
import json
from ipaddress import ip_address

from smqrt.apps.lua.bridge import Function, LuaResult, LuaValue, address, fail, methods, with_error_words
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
from smqrt.apps.lua.vm import Services, Vm
from smqrt.broker.deferred import Deferred
from smqrt.errors import ArgumentError, StartError, StreamError
from smqrt.http.headers import HttpError
from smqrt.http.message import Request
from smqrt.loop.scheduling import share
from smqrt.smq.handshake import websocket_key
from smqrt.transport import tls_contexts
from smqrt.transport.listener import Acceptor, Listener
from smqrt.transport.stream import Datagram, Stream, resolve, set_option
from smqrt.transport.tls import TlsTransport
from smqrt.transport.tls_contexts import CertStore, ClientTls, Identity, ServerTls, Trust
from smqrt.wire import websocket

MAX_ALPN_BYTES = 255  # RFC 7301 §3.1


def describe(data: bytes | None) -> bytes | None:
    """Return the result of `tls_contexts.describe` as JSON, from which the Lua half creates a table."""
    fields = tls_contexts.describe(data)
    return json.dumps(fields).encode() if fields else None


class TlsBinding:
    """Certificate stores, certificates, TLS clients and TLS servers by number."""

    def __init__(self, services: Services) -> None:
        self._tls = services.tls
        self._stores: dict[int, CertStore] = {}
        self._identities: dict[int, Identity] = {}
        self._next = itertools.count(1).__next__

    def new_store(self) -> int:
        """Create an empty store; return its number."""
        number = self._next()
        self._stores[number] = CertStore()
        return number

    def add_to_store(self, number: int, data: bytes) -> LuaResult:
        """Add the certificates in `data`; return their count, or nil, "failed" and a message."""
        try:
            return self._stores[number].add(data)
        except ArgumentError as error:
            return fail("failed", str(error))

    def new_identity(self, certificate: bytes, key: bytes, password: bytes | None) -> LuaResult:
        """Load a certificate with its key; return its number, or nil, "failed" and a message."""
        try:
            identity = Identity(certificate, key, password)
        except ArgumentError as error:
            return fail("failed", str(error))
        number = self._next()
        self._identities[number] = identity
        return number

    def default_client(self) -> int:
        """Create a client that trusts the certificate authorities of this machine."""
        return self._keep(ClientTls())

    def new_client(self, store: int | None) -> int:
        """Create a client that trusts a store; without a store it trusts no certificate."""
        return self._keep(ClientTls(CertStore() if store is None else self._stores[store]))

    def new_server(self, store: int | None) -> int:
        """Create a server. If a store is given, clients must present a certificate that it trusts."""
        return self._keep(ServerTls(None if store is None else self._stores[store]))

    def add_identity(self, tls: int, identity: int) -> bool:
        """Add a certificate that the TLS client or server presents in new connections."""
        self._tls[tls].add_identity(self._identities[identity])
        return True

    def drop(self, number: int) -> None:
        """Forget an object that Lua has collected; existing connections still use it."""
        for kind in (self._stores, self._identities, self._tls):
            kind.pop(number, None)

    def _keep(self, tls: ClientTls | ServerTls) -> int:
        number = self._next()
        self._tls[number] = tls
        return number


_TLS_FUNCTIONS = "new_store add_to_store new_identity default_client new_client new_server add_identity drop"


class SocketBinding:
    """Sockets by number."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._next = itertools.count(1).__next__
        self._handles: dict[int, SocketHandle] = {}
        self.suspensions = Suspensions()

    def add(self, handle: SocketHandle) -> int:
        """Return a new number for a socket."""
        number = self._next()
        self._handles[number] = handle
        return number

    def handle(self, number: int | None) -> SocketHandle:
        """Return a socket. Raises StreamError when it is closed."""
        try:
            return self._handles[number]  # type: ignore[index]
        except KeyError:
            raise StreamError("socketclosed") from None

    def stream(self, number: int) -> Stream:
        """Return the connection of a socket, for protocols in Python. Raises StreamError when it has none."""
        stream = self.handle(number).stream
        if stream is None:
            raise StreamError("incorrectuse")
        return stream

    def shutdown(self) -> None:
        """End all waits at the shutdown of the server, with nil, "sysshutdown"."""
        self.suspensions.wake_all(b"sysshutdown")
        for handle in list(self._handles.values()):
            handle.end_reading("sysshutdown")

    # ---- Connect and listen

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
        """Connect, with TLS if `tls` is the number of a TLS client; blocks."""
        _protocols(alpn)  # raises before the connection is made
        name = host.decode("utf-8", "replace")
        timeout_s = None if timeout_ms is None else timeout_ms / 1000
        stream = Stream.connect(name, port, timeout_s, source.decode("ascii", "replace") if source else None, ipv6)
        handle = StreamHandle(stream, host=name)
        if tls is not None:
            _start_tls(handle, self._services.tls[tls], alpn)
        return self.add(handle)

    def bind(self, port: int, host: bytes | None, ipv6: bool, tls: int | None) -> LuaResult:
        """Listen on a port."""
        server = self._services.tls[tls] if tls is not None else None
        address = _local_address(host)
        acceptor = Acceptor(port, address, ipv6, server.context() if server else None)
        return self.add(ListenerHandle(acceptor, lambda transport: self.add(StreamHandle(Stream(transport), server))))

    def udp(
        self, host: bytes | None, port: int | None, local_port: int | None, intf: bytes | None, ipv6: bool
    ) -> LuaResult:
        """Create a UDP socket; blocks during the lookup of a name."""
        peer = None
        if host is not None:
            peer = resolve(host.decode("utf-8", "replace"), port or 0, ipv6)[0]
        bound = _local_address(intf)
        return self.add(DatagramHandle(Datagram(local_port, bound, peer, ipv6)))

    def lookup(self, name: bytes) -> bytes:
        """Return the first address of a name; blocks."""
        address: str = resolve(name.decode("utf-8", "replace"), 0)[0][1][0]
        return address.encode()

    def take_request(
        self, request: Request, raw: bool, subprotocol: bytes | None = None, written: bytes | None = None
    ) -> LuaResult:
        """Take over the connection of a request from HTTP, as a WebSocket if the request is an upgrade.

        If the response has begun, data written to the socket continues its body, in chunks unless `raw`.

        Args:
            request: the request.
            raw: whether to ignore WebSocket upgrades and the chunked encoding.
            subprotocol: the WebSocket sub-protocol to select; None for none.
            written: the data in Lua's buffer, which is sent first; None if the response must not have begun.

        Returns:
            The number of the socket, and the data that was already received; nil and "iscommitted" if the response
            must not have begun.

        Raises:
            HttpError: the client does not offer the sub-protocol.
        """
        key = None if raw else websocket_key(request)
        lines = b"" if key is None else request.upgrade_lines(subprotocol.decode("latin-1") if subprotocol else None)
        try:
            taken = request.detach(within=key is None and written is not None, more=written or b"")
        except RuntimeError:
            return fail("iscommitted")
        taken.watcher.close()  # the stream creates its own
        if key is None:
            stream = Stream(taken.transport)
            stream.push_or_forget(taken.unsent)
            kind = ChunkedHandle if taken.is_chunked and not raw else StreamHandle
            return self.add(kind(stream, server=taken.server)), taken.data or None
        stream = Stream(taken.transport, taken.data)
        stream.push_or_forget(websocket.switching_protocols(key, lines))
        return self.add(WebSocketHandle(stream, False, server=taken.server)), None

    def give_request(self, number: int, data: bytes) -> LuaResult:
        """Return a connection to HTTP, which first processes `data`."""
        handle = self.handle(number)
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
        """Take over the connection of an HTTP client, with the data that was already received; blocks.

        After a response with the status 101, the socket is a WebSocket.
        """
        taken = self._services.http_clients[client].release()
        if taken.websocket:
            return self.add(WebSocketHandle(taken.stream, True, taken.tls, taken.host)), None
        data = taken.stream.take_unread()
        return self.add(StreamHandle(taken.stream, taken.tls, taken.host)), data or None

    # ---- Read and write

    def read(self, number: int, timeout_ms: float | None) -> LuaResult:
        """Read the next data; see `SocketHandle.receive`. Parks."""
        handle = self.handle(number)
        if handle.reading is not None:
            return fail("incorrectuse")
        values = None if handle.paused else handle.receive()
        return values or Reading(handle, None if timeout_ms is None else timeout_ms / 1000, values is AGAIN)

    def put(self, number: int, data: bytes, is_text: bool) -> LuaResult:
        """Send or queue data.

        Returns:
            True if it is done. False if the caller must call `drain` afterwards. True and "turn" if it should call
            `drain`, to yield to others. Nil and "full" if the data was not accepted, so that it must call `drain`
            first.
        """
        handle = self.handle(number)
        stream = handle.stream
        if stream is not None and stream.queued_bytes >= stream.queue_limit_bytes:
            return fail("full")
        has_room = handle.put(data, is_text)
        return (True, b"turn") if has_room and share().spent() else has_room

    def offer(self, number: int, data: bytes, is_text: bool) -> LuaResult:
        """Send or queue data. If the queue is full, accept nothing; return nil and the length of the queue."""
        handle = self.handle(number)
        stream = handle.stream
        if stream is not None and stream.queued_bytes >= stream.queue_limit_bytes:
            return None, stream.queued_bytes
        handle.put(data, is_text)
        return True

    def drain(self, number: int, timeout_ms: float | None = None) -> LuaResult:
        """Park until the queue has room, at most `timeout_ms`; if it has room, until a later iteration of the loop."""
        stream = self.handle(number).stream
        # Half of the limit: at the limit itself, a writer would be resumed after each packet.
        if stream is not None and stream.queued_bytes > stream.queue_limit_bytes // 2:
            return QueueDrain(stream, None if timeout_ms is None else timeout_ms / 1000)
        turn: Deferred[bool] = Deferred()
        share().later(turn.resolve, True)
        return turn

    def sendto(self, number: int, data: bytes, host: bytes, port: int) -> LuaResult:
        """Send a datagram."""
        handle = self.handle(number)
        if not isinstance(handle, DatagramHandle):
            raise StreamError("incorrectuse")
        handle.sendto(data, host.decode("ascii", "replace"), port)
        return True

    def ping(self, number: int, data: bytes) -> LuaResult:
        """Send a WebSocket ping; return nil and the length of the queue when it is full."""
        handle = self.handle(number)
        if not isinstance(handle, WebSocketHandle):
            raise StreamError("incorrectuse")
        return True if handle.ping(data) else (None, handle.stream.queued_bytes)

    def pause(self, number: int, is_paused: bool) -> LuaResult:
        """Pause or resume reading; return False if the socket already is in that state."""
        handle = self.handle(number)
        if handle.paused is is_paused:
            return False
        handle.pause(is_paused)
        return True

    def close(self, number: int, code: int | None = None, text: bytes = b"") -> LuaResult:
        """Close a socket; return False if it was closed before.

        `code` and `text` are those of the Close frame of a WebSocket.
        """
        handle = self._handles.pop(number, None)
        if handle is None:
            return False
        if isinstance(handle, WebSocketHandle) and code is not None:
            handle.close(code, text)
        else:
            handle.close()
        handle.end_reading("socketclosed")  # after `close`: the activity that reads may run at once
        return True

    def drop(self, number: int) -> None:
        """Forget a socket whose connection has ended."""
        self._handles.pop(number, None)

    # ---- Properties

    def peername(self, number: int) -> LuaResult:
        """Return the address and port of the remote side, and whether it is IPv6."""
        return address(*self.handle(number).peername())

    def sockname(self, number: int) -> LuaResult:
        """As `peername`, for the local side."""
        return address(*self.handle(number).sockname())

    def setoption(self, number: int, name: bytes, *values: LuaValue) -> LuaResult:
        """See `set_option`."""
        try:
            set_option(self.handle(number), name.decode("utf-8", "replace"), *values)
        except OSError:
            return fail("failed")
        return True

    def is_websocket(self, number: int) -> bool:
        """Return whether it is a WebSocket."""
        return isinstance(self._handles.get(number), WebSocketHandle)

    def state(self, number: int) -> LuaResult:
        """Return the word of `sock:state()`, and whether the socket is connected."""
        handle = self.handle(number)
        return handle.state.encode(), handle.state == "connected"

    def queuelen(self, number: int, limit_bytes: int | None) -> LuaResult:
        """Return the number of bytes in the send queue; with `limit_bytes`, also set its limit."""
        stream = self.stream(number)
        if limit_bytes is not None:
            stream.queue_limit_bytes = limit_bytes
        return stream.queued_bytes

    def maxsize(self, number: int, size_bytes: int) -> LuaResult:
        """Set the maximum size of received WebSocket messages."""
        handle = self.handle(number)
        if not isinstance(handle, WebSocketHandle):
            raise StreamError("incorrectuse")
        handle.codec.max_message_bytes = size_bytes
        return True

    def count(self) -> int:
        """Return the number of sockets."""
        return len(self._handles)


class SocketTlsBinding:
    """TLS functions of sockets, by the numbers of the sockets."""

    def __init__(self, services: Services, sockets: SocketBinding) -> None:
        self._services, self._sockets = services, sockets

    def upgrade(self, number: int, tls: int, *alpn: bytes) -> LuaResult:
        """Start TLS; blocks during the handshake. A failure closes the socket."""
        handle = self._sockets.handle(number)
        if type(handle) is not StreamHandle or handle.stream.tls or handle.reading:
            raise StreamError("incorrectuse")
        _start_tls(handle, self._services.tls[tls], alpn)
        return True

    def trusted(self, number: int, name: bytes | None) -> LuaResult:
        """Return True if the certificate of the remote side is trusted; else nil and an error word."""
        handle = self._sockets.handle(number)
        tls = self._layer(number)
        if not isinstance(handle, StreamHandle) or not isinstance(handle.tls, ClientTls):
            # The remote side is a client; OpenSSL rejects untrusted certificates of clients in the handshake.
            return True if tls.peer_certificate() else fail(Trust.NONE.value)
        host = handle.host if name is None else name.decode("utf-8", "replace")
        trust = handle.tls.store.judge(tls.peer_chain(), host)
        return True if trust is Trust.TRUSTED else fail(trust.value)

    def certificate(self, number: int) -> LuaResult:
        """Return the certificate of the remote side, for `core.certificate`."""
        return describe(self._layer(number).peer_certificate())

    def cipher(self, number: int) -> LuaResult:
        """Return the name of the cipher and the TLS version."""
        cipher = self._layer(number).cipher()
        return (cipher[0].encode(), cipher[1].encode()) if cipher else None

    def alpn(self, number: int) -> LuaResult:
        """Return the protocol that ALPN selected."""
        word = self._layer(number).alpn()
        return word.encode() if word else None

    def is_resumed(self, number: int) -> LuaResult:
        """Return whether the TLS session was resumed."""
        return self._layer(number).resumed()

    def _layer(self, number: int) -> TlsTransport:
        tls = self._sockets.handle(number).tls_layer
        if tls is None:
            raise StreamError("sslnotenabled")
        return tls


def _start_tls(handle: StreamHandle, tls: ClientTls | ServerTls, alpn: tuple[bytes, ...]) -> None:
    context = tls.context(_protocols(alpn))
    if isinstance(tls, ClientTls):
        handle.stream.starttls(context, handle.host or None)
    else:
        handle.stream.starttls(context, server_side=True)
    handle.tls = tls


def _local_address(intf: bytes | None) -> str | None:
    """Return the address in `intf`. The only name is "localhost", since `bind` can't wait for a lookup."""
    if not intf:
        return None
    text = "127.0.0.1" if intf == b"localhost" else intf.decode("ascii", "replace")
    try:
        ip_address(text)
    except ValueError:
        raise StreamError("bind", f"intf {text!r}: must be an IP address of this machine") from None
    return text


def _protocols(alpn: tuple[bytes, ...]) -> list[str]:
    for word in alpn:
        if not (word.isascii() and 1 <= len(word) <= MAX_ALPN_BYTES):
            raise ArgumentError(f"alpn: a protocol is 1 to {MAX_ALPN_BYTES} ASCII characters, not {word[:20]!r}")
    return [word.decode() for word in alpn]


_DIRECT = (
    "bind give_request put offer sendto ping pause close drop peername sockname setoption is_websocket state queuelen "
    "maxsize count"
)
_BLOCKING = "connect udp lookup take_http"
_PARKING = "read drain"


class ListenerBinding:
    """Listening ports of `ba.create.servcon` by number."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._listeners: dict[int, Listener] = {}
        self._next = itertools.count(1).__next__

    def open(self, port: int, tls: int | None, intf: bytes | None, ipv6: bool) -> LuaResult:
        """Serve HTTP on another port; return its number, or nil, an error word and a message.

        Args:
            port: the port; 0 for any free one.
            tls: number of a TLS server; None for plain HTTP.
            intf: address to listen on; None for all.
            ipv6: whether to listen on all IPv6 addresses by default.
        """
        server = self._services.http_server
        if server is None:
            return fail("failed", "no HTTP server is running")
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
        """Return the port; None if it is closed."""
        listener = self._listeners.get(number)
        return listener.address[1] if listener else None

    def close(self, number: int) -> bool:
        """Close a port but not its connections; return False if it was closed before."""
        listener = self._listeners.pop(number, None)
        if listener is None:
            return False
        listener.close()
        return True


def install(vm: Vm, services: Services) -> SocketBinding:
    """Install `ba.socket`, `ba.bytearray`, `ba.create.servcon` and the TLS objects."""
    vm.namespace("ba.tls", methods(TlsBinding(services), _TLS_FUNCTIONS) | {"describe": describe})
    services.sockets = binding = SocketBinding(services)
    tls = SocketTlsBinding(services, binding)

    def functions(names: str) -> dict[str, Function]:
        return methods(binding, names, with_error_words)

    def take_request(exchange: int, raw: bool, subprotocol: bytes | None, written: bytes | None) -> LuaResult:
        if services.exchanges is None:
            raise ArgumentError("req2sock: no HTTP server is running")
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
    of_tls = methods(tls, "trusted certificate cipher alpn is_resumed", with_error_words)
    direct = functions(_DIRECT) | of_tls | {"take_request": take_request, "wake": suspensions.wake, "start": vm.start}
    parking = functions(_PARKING) | {"suspend": suspensions.suspend}
    vm.namespace("ba.bytearray", {})
    blocking = functions(_BLOCKING) | methods(tls, "upgrade", with_error_words)
    vm.namespace("ba.sockets", direct, blocking, parking=parking)
    vm.namespace("ba.cosockets", {})
    vm.namespace("ba.connections", {})
    listeners = ListenerBinding(services)
    vm.namespace("ba.servcon", {"open": listeners.open, "port": listeners.port, "close": listeners.close})
    return binding

"""`ba.socket`, socket objects and TLS objects for Lua: the Python half (spec: bas-api §8, §10).

Lua refers to a socket by a number. An activity that waits in one (a read, an accept, a full queue) is parked: it needs
no greenlet. `services.tls` has TLS clients and servers by the number that Lua has for them; sockets, HTTP and MQTT look
them up there. The Lua halves are lib/ba/sockets.lua and its neighbours, and lib/ba/tls.lua.
"""

from __future__ import annotations

import itertools
import json
from ipaddress import ip_address

from smqrt.apps.lua.bridge import Function, LuaResult, LuaValue, address, fail, methods, with_error_words
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
from smqrt.transport import tls_contexts
from smqrt.transport.listener import Acceptor, Listener
from smqrt.transport.stream import Datagram, Stream, resolve, set_option
from smqrt.transport.tls import TlsTransport
from smqrt.transport.tls_contexts import CertStore, ClientTls, Identity, ServerTls, Trust
from smqrt.wire import websocket

MAX_ALPN_BYTES = 255  # RFC 7301 §3.1


def describe(data: bytes | None) -> bytes | None:
    """Return what `certificates.describe` does as JSON text, from which the Lua half makes a table."""
    fields = tls_contexts.describe(data)
    return json.dumps(fields).encode() if fields else None


class TlsBinding:
    """Certificate stores, certificates, TLS clients and TLS servers by the numbers that Lua has for them."""

    def __init__(self, services: Services) -> None:
        self._tls = services.tls
        self._stores: dict[int, CertStore] = {}
        self._identities: dict[int, Identity] = {}
        self._next = itertools.count(1).__next__

    def new_store(self) -> int:
        """Make an empty store."""
        number = self._next()
        self._stores[number] = CertStore()
        return number

    def add_to_store(self, number: int, data: bytes) -> LuaResult:
        """Trust the certificates in `data`; return how many there are, or nil and the reason."""
        try:
            return self._stores[number].add(data)
        except ArgumentError as error:
            return fail("failed", str(error))

    def new_identity(self, certificate: bytes, key: bytes, password: bytes | None) -> LuaResult:
        """Make a certificate with its key; return nil and the reason when that fails."""
        try:
            identity = Identity(certificate, key, password)
        except ArgumentError as error:
            return fail("failed", str(error))
        number = self._next()
        self._identities[number] = identity
        return number

    def default_client(self) -> int:
        """Make a client that trusts the certificate authorities of this machine."""
        return self._keep(ClientTls())

    def new_client(self, store: int | None) -> int:
        """Make a client that trusts a store; without one it trusts no certificate."""
        return self._keep(ClientTls(CertStore() if store is None else self._stores[store]))

    def new_server(self, store: int | None) -> int:
        """Make a server; with a store, it asks clients for a certificate."""
        return self._keep(ServerTls(None if store is None else self._stores[store]))

    def add_identity(self, tls: int, identity: int) -> bool:
        """Present a certificate from now on."""
        self._tls[tls].add_identity(self._identities[identity])
        return True

    def drop(self, number: int) -> None:
        """Forget an object that Lua has collected; connections that use it keep it."""
        for kind in (self._stores, self._identities, self._tls):
            kind.pop(number, None)

    def _keep(self, tls: ClientTls | ServerTls) -> int:
        number = self._next()
        self._tls[number] = tls
        return number


_TLS_FUNCTIONS = "new_store add_to_store new_identity default_client new_client new_server add_identity drop"


class SocketBinding:
    """Sockets by the numbers that Lua has for them."""

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
        """Connect, with TLS when `tls` is the number of a TLS client; blocks."""
        _protocols(alpn)
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
        """Make a UDP socket; blocks for the lookup of a name."""
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
        """Take the connection of a request over from HTTP: a WebSocket when the request asks for one.

        After a flush of the response, the socket continues its body, in chunks unless `raw`.

        Args:
            written: data in Lua's buffer, sent first; None when the response must not have begun.

        Returns:
            the number of the socket, and the data that was received already.

        Raises:
            HttpError: the client does not offer the sub-protocol.
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
        """Give a connection back to HTTP, which reads `data` first."""
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
        """Take the connection of an HTTP client over, with the data that was received already; blocks.

        It is a WebSocket after a response with status 101.
        """
        taken = self._services.http_clients[client].release()
        if taken.websocket:
            return self.add(WebSocketHandle(taken.stream, True, taken.tls, taken.host)), None
        data = taken.stream.take_unread()
        return self.add(StreamHandle(taken.stream, taken.tls, taken.host)), data or None

    # ---- Read and write

    def read(self, number: int, timeout_ms: float | None) -> LuaResult:
        """Read what arrives next, see `SocketHandle.receive`; parks."""
        handle = self.handle(number)
        if handle.reading is not None:
            return fail("incorrectuse")
        values = None if handle.paused else handle.receive()
        return values or Reading(handle, None if timeout_ms is None else timeout_ms / 1000, values is AGAIN)

    def put(self, number: int, data: bytes, is_text: bool) -> LuaResult:
        """Send or queue data.

        Returns:
            true; false when the writer must wait in `drain` afterwards; true, "turn" when it should, if it can;
            nil, "full" when it must wait first: nothing was taken.
        """
        handle = self.handle(number)
        stream = handle.stream
        if stream is not None and stream.queued_bytes >= stream.queue_limit_bytes:
            return fail("full")
        has_room = handle.put(data, is_text)
        return (True, b"turn") if has_room and share().spent() else has_room

    def offer(self, number: int, data: bytes, is_text: bool) -> LuaResult:
        """Send or queue data; return nil and the length of the queue when it is full: nothing was taken."""
        handle = self.handle(number)
        stream = handle.stream
        if stream is not None and stream.queued_bytes >= stream.queue_limit_bytes:
            return None, stream.queued_bytes
        handle.put(data, is_text)
        return True

    def drain(self, number: int, timeout_ms: float | None = None) -> LuaResult:
        """Park until the queue has room, or for this time; when it has room, until a later turn of the loop."""
        stream = self.handle(number).stream
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
        """Pause or resume reading; return false when it is in that state already."""
        handle = self.handle(number)
        if handle.paused is is_paused:
            return False
        handle.pause(is_paused)
        return True

    def close(self, number: int, code: int | None = None, text: bytes = b"") -> LuaResult:
        """Close; return false when it was closed before."""
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

    # ---- Properties

    def peername(self, number: int) -> LuaResult:
        """Return address, port and whether it is IPv6, of the remote side."""
        return address(*self.handle(number).peername())

    def sockname(self, number: int) -> LuaResult:
        """Return the same of the local side."""
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
        """Return the word of `sock:state()`, and whether there is a connection."""
        handle = self.handle(number)
        return handle.state.encode(), handle.state == "connected"

    def queuelen(self, number: int, limit_bytes: int | None) -> LuaResult:
        """Return the bytes in the send queue; set its limit."""
        stream = self.stream(number)
        if limit_bytes is not None:
            stream.queue_limit_bytes = limit_bytes
        return stream.queued_bytes

    def maxsize(self, number: int, size_bytes: int) -> LuaResult:
        """Set the maximum size of a WebSocket message that is received."""
        handle = self.handle(number)
        if not isinstance(handle, WebSocketHandle):
            raise StreamError("incorrectuse")
        handle.codec.max_message_bytes = size_bytes
        return True

    def count(self) -> int:
        """Return how many sockets there are."""
        return len(self._handles)


class SocketTlsBinding:
    """TLS of sockets, by the numbers that Lua has for the sockets."""

    def __init__(self, services: Services, sockets: SocketBinding) -> None:
        self._services, self._sockets = services, sockets

    def upgrade(self, number: int, tls: int, *alpn: bytes) -> LuaResult:
        """Start TLS; blocks until the handshake is done. The socket is closed when it fails."""
        handle = self._sockets.handle(number)
        if type(handle) is not StreamHandle or handle.stream.tls or handle.reading:
            raise StreamError("incorrectuse")
        _start_tls(handle, self._services.tls[tls], alpn)
        return True

    def trusted(self, number: int, name: bytes | None) -> LuaResult:
        """Return true, or nil and what is wrong with the certificate of the remote side."""
        handle = self._sockets.handle(number)
        tls = self._layer(number)
        if not isinstance(handle, StreamHandle) or not isinstance(handle.tls, ClientTls):
            # OpenSSL has rejected untrusted certificates of clients in the handshake.
            return True if tls.peer_certificate() else fail(Trust.NONE.value)
        host = handle.host if name is None else name.decode("utf-8", "replace")
        trust = handle.tls.store.judge(tls.peer_chain(), host)
        return True if trust is Trust.TRUSTED else fail(trust.value)

    def certificate(self, number: int) -> LuaResult:
        """Return the certificate of the remote side, for `core.certificate`."""
        return describe(self._layer(number).peer_certificate())

    def cipher(self, number: int) -> LuaResult:
        """Return the name of the cipher, and the version of TLS."""
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
    """Return the address in `intf`. Only localhost is accepted as a name: `bind` can't wait for a lookup."""
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
    "maxsize count"
)
_BLOCKING = "connect udp lookup take_http"
_PARKING = "read drain"


class ListenerBinding:
    """Listening ports of `ba.create.servcon` by the numbers that Lua has for them."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._listeners: dict[int, Listener] = {}
        self._next = itertools.count(1).__next__

    def open(self, port: int, tls: int | None, intf: bytes | None, ipv6: bool) -> LuaResult:
        """Serve HTTP on another port; return its number, or nil and the reason.

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
        """Return the port, None when it is closed."""
        listener = self._listeners.get(number)
        return listener.address[1] if listener else None

    def close(self, number: int) -> bool:
        """Close a port; its connections stay open. Return false when it was closed before."""
        listener = self._listeners.pop(number, None)
        if listener is None:
            return False
        listener.close()
        return True


def install(vm: Vm, services: Services) -> SocketBinding:
    """Give Lua `ba.socket`, `ba.bytearray`, `ba.create.servcon` and the objects of TLS."""
    vm.namespace("ba.tls", methods(TlsBinding(services), _TLS_FUNCTIONS) | {"describe": describe})
    services.sockets = binding = SocketBinding(services)
    tls = SocketTlsBinding(services, binding)

    def functions(names: str) -> dict[str, Function]:
        return methods(binding, names, with_error_words)

    def take_request(exchange: int, raw: bool, subprotocol: bytes | None, written: bytes | None) -> LuaResult:
        if services.exchanges is None:
            raise ArgumentError("req2sock: the server has no HTTP requests")
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

"""A small SMQ client that says exactly what a test wants said, over every transport, and the server it talks to.

Both run in this process under gevent. Packets are bytes without framing; `Device` adds the framing of its transport.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gevent
from gevent import socket
from gevent.ssl import CERT_NONE, PROTOCOL_TLS_CLIENT, SSLContext, SSLError

from smqrt import hub
from smqrt.broker import outbox
from smqrt.http.server import HttpServer
from smqrt.smq import data_path
from smqrt.transport import tls
from smqrt.transport.listener import Listener
from smqrt.wire import smq as wire
from smqrt.wire import websocket
from smqrt.wire.smq import Type
from tests.support.pki import Authority, server_context
from tests.support.waiting import wait_until

PATIENCE_S = 15.0
RAW, TLS, WS, WSS = "raw", "tls", "ws", "wss"
KINDS = (RAW, TLS, WS, WSS)
MASK = b"\x11\x22\x33\x44"
WS_KEY = "dGhlIHNhbXBsZSBub25jZQ=="
WS_UPGRADE = "Upgrade: websocket\r\nConnection: Upgrade\r\n"
WS_HEADERS = f"{WS_UPGRADE}Sec-WebSocket-Key: {WS_KEY}\r\nSec-WebSocket-Version: 13\r\n"
RAW_HEADERS = "SimpleMQ: 1\r\nSendSmqHttpResponse: true\r\n"


def request(headers: str, method: str = "GET", target: str = "/smq", version: str = "1.1") -> bytes:
    """The head of a request."""
    return f"{method} {target} HTTP/{version}\r\nHost: test\r\n{headers}\r\n".encode("latin-1")


def connect_packet(
    uid: bytes = b"device", credentials: bytes = b"", info: bytes = b"", max_frame: int | None = None
) -> bytes:
    """Connect, version 2 when `max_frame` is given."""
    if max_frame is None:
        return wire.connect(uid, credentials, info)
    head = struct.pack(">BBHB", Type.CONNECT, 2, max_frame, len(uid))
    return head + uid + bytes((len(credentials),)) + credentials + info


def publish(tid: int, ptid: int, payload: bytes, stid: int = 0, kind: int = Type.PUBLISH) -> bytes:
    """A Publish or PubFrag packet."""
    return struct.pack(">BIII", kind, tid, ptid, stid) + payload


def masked(payload: bytes, opcode: int = websocket.BINARY, fin: bool = True, key: bytes = MASK) -> bytes:
    """A WebSocket frame as clients send it."""
    head = bytearray(websocket.header(opcode, len(payload)))
    head[0] = (0x80 if fin else 0) | opcode
    head[1] |= 0x80
    return bytes(head) + key + websocket.mask(payload, key)


@dataclass
class Ack:
    """Suback, Createack or Createsuback, taken apart."""

    kind: int
    denied: bool
    number: int
    name: bytes


class Stream:
    """What a server sent, in the framing of a transport; `take` gives packet by packet."""

    def __init__(self, on_websocket: bool) -> None:
        self.on_websocket = on_websocket
        self.data = b""

    def take(self) -> bytes | None:
        """The next packet (of a WebSocket: the next frame, control frames as `ws:<opcode>:<payload>`)."""
        return self._ws_packet() if self.on_websocket else self._raw_packet()

    def _raw_packet(self) -> bytes | None:
        if len(self.data) < 2:
            return None
        size = int.from_bytes(self.data[:2], "big")
        return self._cut(2, size)

    def _ws_packet(self) -> bytes | None:
        if len(self.data) < 2:
            return None
        first, short = self.data[0], self.data[1]
        start = 2 if short < 126 else 4
        assert first & 0x80, "a server that sends fragments"
        assert short < 127, "a masked frame, or one too large for SMQ"
        if len(self.data) < start:
            return None
        size = short if short < 126 else int.from_bytes(self.data[2:4], "big")
        payload = self._cut(start, start + size)
        if payload is None or first & 0x0F == websocket.BINARY:
            return payload
        return b"ws:%d:" % (first & 0x0F) + payload

    def _cut(self, start: int, end: int) -> bytes | None:
        if len(self.data) < end:
            return None
        packet, self.data = self.data[start:end], self.data[end:]
        return packet


class Device:
    """A connection to the broker.

    Attributes:
        etid: after `connect`.
        seed, ip: of Init, after `hello`.
        head: the HTTP reply, empty when there was none.
    """

    def __init__(
        self, address: tuple[str, int], kind: str = RAW, context: SSLContext | None = None, first: bytes = b""
    ) -> None:
        self.kind = kind
        self.secure, self.on_websocket = kind in (TLS, WSS), kind in (WS, WSS)
        self.sock: Any = socket.create_connection(address, timeout=PATIENCE_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.sendall(first)  # what a proxy sends before the client's own bytes
        if self.secure:
            self.sock = (context or client_context()).wrap_socket(self.sock)
        self.stream = Stream(self.on_websocket)
        self.head = b""
        self.etid = self.seed = 0
        self.ip = b""

    # ---- bytes

    def send_bytes(self, data: bytes) -> Device:
        self.sock.sendall(data)
        return self

    def more(self) -> bool:
        """Receive once; False at the end of the stream."""
        try:
            data = self.sock.recv(1 << 18)
        except (ConnectionError, SSLError):
            return False
        self.stream.data += data
        return bool(data)

    def framed(self, packet: bytes) -> bytes:
        return masked(packet) if self.on_websocket else wire.frame(packet)

    def close(self) -> None:
        self.sock.close()

    def reset(self) -> None:
        """Close with RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    # ---- packets

    def send(self, *packets: bytes) -> Device:
        """Send packets with one write."""
        return self.send_bytes(b"".join(map(self.framed, packets)))

    def receive(self) -> bytes:
        """The next packet."""
        while (packet := self.stream.take()) is None:
            assert self.more(), f"the connection ended; what was left: {self.stream.data!r}"
        return packet

    def expect(self, *packets: bytes) -> Device:
        """Check that these packets come next."""
        for packet in packets:
            got = self.receive()
            assert got == packet, f"{got[:80]!r} instead of {packet[:80]!r}"
        return self

    def until_end(self, torn: bool = False) -> list[bytes]:
        """All packets up to the end of the connection; `torn`: the last one may be cut."""
        packets = []
        while True:
            while (packet := self.stream.take()) is not None:
                packets.append(packet)
                if packet.startswith(b"ws:8:"):
                    with contextlib.suppress(OSError):
                        self.send_bytes(masked(packet[5:7], websocket.CLOSE))
            if not self.more():
                assert torn or not self.stream.data, f"half a packet at the end: {self.stream.data!r}"
                return packets

    def expect_end(self, *packets: bytes) -> None:
        """Check that these packets come, then the end (a WebSocket's close frame is not counted)."""
        got = [packet for packet in self.until_end() if not packet.startswith(b"ws:8:")]
        self.close()
        assert got == list(packets), got

    def sync(self) -> list[bytes]:
        """A round trip; gives what came before the Pong."""
        self.send(wire.PING)
        packets = []
        while (packet := self.receive()) != wire.PONG:
            packets.append(packet)
        return packets

    def expect_nothing(self) -> None:
        """Check that nothing came so far."""
        assert (got := self.sync()) == [], got

    # ---- steps of a session

    def start(self, headers: str | None = None, target: str = "/smq") -> Device:
        """Send the bootstrap request and read the reply and Init."""
        own = WS_HEADERS if self.on_websocket else RAW_HEADERS
        self.send_bytes(request(own if headers is None else headers, target=target))
        self.read_head()
        assert self.head[9:12] in (b"200", b"101"), f"{self.head!r} {self.stream.data[:300]!r}"
        return self.hello()

    def read_head(self) -> Device:
        while b"\r\n\r\n" not in self.stream.data:
            assert self.more(), f"no HTTP reply: {self.stream.data!r}"
        self.head, _, self.stream.data = self.stream.data.partition(b"\r\n\r\n")
        return self

    def hello(self) -> Device:
        """Read Init."""
        packet = self.receive()
        assert packet[:2] == b"\x01\x01", packet
        self.seed, self.ip = int.from_bytes(packet[2:6], "big"), packet[6:]
        return self

    def connect(self, uid: bytes = b"device", **more: Any) -> Device:
        """Send Connect and expect to be accepted."""
        self.send(connect_packet(uid, **more))
        return self.accepted()

    def accepted(self) -> Device:
        packet = self.receive()
        assert packet[:2] == b"\x03\x00", packet
        assert len(packet) == 6, "a successful Connack carries no text"
        self.etid = int.from_bytes(packet[2:6], "big")
        assert self.etid > 1
        return self

    def ask(self, kind: int, name: bytes) -> Ack:
        """Send Subscribe, Create or Createsub and read the answer."""
        self.send(bytes((kind,)) + name)
        return self.ack()

    def ack(self) -> Ack:
        packet = self.receive()
        status, number = packet[1], int.from_bytes(packet[2:6], "big")
        assert (status == 0) == (number != 0), packet
        return Ack(packet[0], status != 0, number, packet[6:])

    def subscribe(self, name: bytes) -> int:
        ack = self.ask(Type.SUBSCRIBE, name)
        assert ack == Ack(Type.SUBACK, False, ack.number, name)
        return ack.number

    def create(self, name: bytes) -> int:
        ack = self.ask(Type.CREATE, name)
        assert ack == Ack(Type.CREATEACK, False, ack.number, name)
        return ack.number

    def createsub(self, name: bytes) -> int:
        ack = self.ask(Type.CREATESUB, name)
        assert ack == Ack(Type.CREATESUBACK, False, ack.number, name)
        return ack.number

    def publish(self, tid: int, payload: bytes, stid: int = 0) -> Device:
        return self.send(publish(tid, self.etid, payload, stid))

    def disconnect(self) -> None:
        """Leave in order, and wait until the server has noticed."""
        with contextlib.suppress(OSError):
            self.send(wire.disconnect())
            self.until_end()
        self.close()


def client_context(cert: Path | None = None, key: Path | None = None) -> SSLContext:
    """A context that trusts everybody."""
    context = SSLContext(PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = CERT_NONE
    if cert:
        context.load_cert_chain(cert, key)
    return context


class _Dispatcher:
    """Answers every request by calling a function."""

    def __init__(self, function: Callable[[Any], object]) -> None:
        self.dispatch = function

    def cors(self, path: str) -> None:
        return None


@dataclass
class Site:
    """A broker behind an HTTP server, plain and over TLS.

    Attributes:
        smq: the broker, made with the options given.
        requests: the requests that came, in order.
    """

    smq: hub.Smq
    authority: Authority
    arg: Any = None
    requests: list[Any] = field(default_factory=list)
    _devices: list[Device] = field(default_factory=list)

    def __post_init__(self) -> None:
        for left in list(tls.under_way()._watched):
            left.expired()  # of a test before, whose other side never closed: nobody is to wait for it
        self.server = HttpServer(_Dispatcher(self._dispatch))
        self._listeners = [Listener("127.0.0.1", 0, self.server.accepted)]
        self._listeners[0].start()
        self._tls: Listener | None = None

    def _dispatch(self, incoming: Any) -> None:
        self.requests.append(incoming)
        self.smq.connect(incoming, self.arg)

    def address(self, secure: bool = False) -> tuple[str, int]:
        if secure and self._tls is None:
            context = server_context(*self.authority.pair("server"), self.authority.path)
            self._tls = Listener("127.0.0.1", 0, self.server.accepted_secure, context)
            self._tls.start()
            self._listeners.append(self._tls)
        listener = self._tls if secure else self._listeners[0]
        assert listener
        return listener.address

    def open(self, kind: str = RAW, context: SSLContext | None = None, first: bytes = b"") -> Device:
        """A connection on which nothing was said yet but `first`."""
        device = Device(self.address(kind in (TLS, WSS)), kind, context, first)
        self._devices.append(device)
        return device

    def device(self, uid: bytes = b"device", kind: str = RAW, **more: Any) -> Device:
        """A connected client."""
        return self.open(kind).start().connect(uid, **more)

    def client(self, uid: bytes = b"device", kind: str = RAW) -> tuple[Device, hub.Peer]:
        """A connected client, and the peer that it is to the hub."""
        device = self.device(uid, kind)
        peer = self.smq.etid2peer(device.etid)
        assert peer is not None
        return device, peer

    @property
    def state(self) -> Any:
        """The hub's state."""
        return self.smq._broker

    def close_devices(self) -> None:
        """Close what the test left open; the broker notices in its next turns."""
        for device in self._devices:
            device.close()

    def close(self) -> None:
        self.close_devices()
        self.smq.shutdown()
        for listener in self._listeners:
            listener.close()
        self.server.close()
        wait_until(lambda: not tls.under_way() and not data_path._handshakes, "connections closed")


def leftovers(state: Any) -> dict[str, Any]:
    """What a hub and the data path still hold of clients; empty when everybody has gone."""
    topics = state.topic_table.by_key.values()
    known = {state.server.etid, *state.sessions}
    found = {
        "sessions": list(state.sessions),
        "uids": list(state.uids),
        "ephemeral": [topic.id for topic in topics if topic.name is None and topic.id not in known],
        "subscriptions": [topic.name for topic in topics if topic.name is not None and topic.subscribers],
        "observers": [topic.id for topic in topics if topic.observers],
        "routes": [topic.id for topic in topics if topic.cached],
        "logged": list(state._logged_s),
        "handshakes": list(data_path._handshakes),
        "blocked": list(data_path._blocked),
        "graceful closes": len(tls.under_way()),
        "held bytes": outbox.QueuedMemory.total_bytes,
    }
    return {name: rest for name, rest in found.items() if rest}


def expect_clean(site: Site) -> None:
    """Close all devices and check that nothing is left of any client."""
    site.close_devices()
    wait_until(lambda: not leftovers(site.state), "everything of the clients is gone")


@contextlib.contextmanager
def bounded(seconds: float = 20.0) -> Iterator[None]:
    """Nothing in here may take longer."""
    with gevent.Timeout(seconds, AssertionError(f"not done within {seconds} s")):
        yield

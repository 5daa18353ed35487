"""State machine of a client's connection: bytes in, events out, without I/O.

    HTTP ──head──▶ INIT ──Init──▶ CONNECT ──connect()──▶ CONNACK ──Connack 0──▶ OPEN ──Disconnect, error──▶ CLOSED

`_HANDSHAKE_HANDLERS` has the packets of the states before OPEN, `_HANDLERS` those of OPEN. `receive` never raises: a
protocol error is the event `Ended`. In state HTTP the client sends its request and waits for the head of the response
(spec: smq §1.1). Afterwards it sends *frames* (see `smqrt.wire.smq`) and receives *packets*, with either framing.
"""

from __future__ import annotations

import re
import struct
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import NamedTuple, Protocol

from smqrt.errors import ArgumentError, CloseReason, ProtocolError, SmqrtError, StreamError
from smqrt.printable import printable
from smqrt.wire import smq, websocket
from smqrt.wire.smq import ConnackCode, Type
from smqrt.wire.url import Url, basic_authorization

# ---- Close reasons: a word for programs and a sentence for users.

REFUSALS = {
    ConnackCode.PROTOCOL_VERSION: "protocol version not supported",
    ConnackCode.SERVER_UNAVAILABLE: "server unavailable",
    ConnackCode.BAD_CREDENTIALS: "incorrect credentials",
    ConnackCode.CERTIFICATE_REQUIRED: "client certificate required",
    ConnackCode.CERTIFICATE_REJECTED: "client certificate not accepted",
    ConnackCode.ACCESS_DENIED: "access denied",
}
"""Connack codes in words (spec: smq §1.2)."""
_SENTENCES = {
    "sslnottrusted": "certificate not trusted",
    "sslhandshake": "TLS handshake failed",
    "cannotresolve": "host name not found",
    "cannotconnect": "no connection",
    "timeout": "no answer in time",
    "proxyauth": "the proxy did not accept the credentials",
}
_FINAL = frozenset(("sslnottrusted", "proxyauth"))  # another attempt would fail too


class ConnectionEnd(SmqrtError):
    """Close reason of a connection or of a connection attempt.

    Attributes:
        word: the argument of `onclose`: an error word (spec: bas-api §15), `nonsmq`, `protocolerror`, `pong`, `onauth`,
            `failed` (a function of the application raised an exception), the words of a rejection, the text of the
            broker's Disconnect, or None for a Disconnect without text.
        code: the Connack code of a rejection, else 0.
        can_reconnect: whether another attempt may succeed.
        by_broker: whether the broker sent a Disconnect packet.
    """

    def __init__(
        self, word: str | None, message: str, *, code: int = 0, can_reconnect: bool = True, by_broker: bool = False
    ) -> None:
        super().__init__(printable(message))  # it may contain text from the broker
        self.word = word
        self.code = code
        self.can_reconnect = can_reconnect
        self.by_broker = by_broker


def refused(code: int, text: str) -> ConnectionEnd:
    """Return the close reason for a Connack with `code` and `text`."""
    words = REFUSALS.get(ConnackCode(code), "") if code in REFUSALS else f"refused with code {code}"
    message = f"the broker refused the connection: {words}" + (f" ({text})" if text else "")
    return ConnectionEnd(words, message, code=code, can_reconnect=code == ConnackCode.SERVER_UNAVAILABLE)


def disconnected(text: str) -> ConnectionEnd:
    """Return the close reason for a Disconnect packet. Only a shutdown may be followed by a restart of the server."""
    message = "the broker closed the connection" + (f": {text}" if text else "")
    may_restart = text == CloseReason.SHUTDOWN.value
    return ConnectionEnd(text or None, message, can_reconnect=may_restart, by_broker=True)


def protocol_error(error: ProtocolError) -> ConnectionEnd:
    """Return the close reason for a protocol error of the broker."""
    return ConnectionEnd("protocolerror", f"protocol error of the broker: {error}")


def from_stream_error(error: StreamError, what: str) -> ConnectionEnd:
    """Return the close reason for a socket error; `what` names the broker."""
    word = error.word
    if word == "cannotconnect" and "refused" in error.detail:
        message = "connection refused; is the server running there?"
    elif word in ("cannotresolve", "timeout"):
        message = _SENTENCES[word]
    else:
        message = _SENTENCES.get(word, word if word.startswith("prx") else "connection lost")
        message += f": {error.detail}" if error.detail else ""
        if word == "sslnottrusted" and "no trusted authority" in error.detail:
            message += "; name the file with the authority's certificate in cafile (--cafile)"
        elif word == "sslhandshake" and "WRONG_VERSION_NUMBER" in error.detail:
            message = "the server does not use TLS on this port; use http:// or ws://"
    return ConnectionEnd(word, f"{what}: {message}", can_reconnect=word not in _FINAL)


_MAX_HEAD_BYTES = 16384  # of a response; a server of another protocol may never send an empty line
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})(?: ([^\r\n]*))?\Z")
_MAX_MESSAGE_BYTES = 0xFFFF  # the largest SMQ packet is smaller
_FIELD_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")


class Handshake:
    """The HTTP request and response at the start of a connection, without I/O.

    Attributes:
        request: the bytes to send first.
    """

    def __init__(self, url: Url, headers: Iterable[tuple[str, str]]) -> None:
        self._url = url
        self._key = websocket.new_key() if url.websocket else None
        self._received = bytearray()
        fields = [("Host", url.authority)]
        if self._key:
            fields += websocket.request_headers(self._key)
        else:
            fields += [("SimpleMQ", "1"), ("SendSmqHttpResponse", "true")]
        if url.user is not None:
            fields.append(("Authorization", basic_authorization(url.user, url.password)))
        fields += [check_header(name, value) for name, value in headers]
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
        self.request = f"GET {url.target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")

    def receive(self, data: bytes) -> bytes | None:
        """Process bytes from the socket.

        Returns:
            The bytes after the head when the broker accepted, None while the head is incomplete.

        Raises:
            ConnectionEnd: the response is not that of an SMQ broker.
        """
        self._received += data
        head, separator, rest = self._received.partition(b"\r\n\r\n")
        if not separator:
            if not b"HTTP/".startswith(bytes(self._received[:5])) or len(self._received) > _MAX_HEAD_BYTES:
                raise self._not_smq("does not speak HTTP")
            return None
        first, *lines = bytes(head).split(b"\r\n")
        match = _STATUS_LINE.match(first)
        if match is None:
            raise self._not_smq("does not speak HTTP")
        status = int(match[1])
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        if status != (101 if self._key else 200):
            reason = (match[2] or b"").decode("latin-1")
            hint = f" and redirects to {fields[b'location'].decode('latin-1')}" if b"location" in fields else ""
            raise self._not_smq(f"answered {status} {reason}".rstrip() + hint, can_reconnect=status >= 500)
        if self._key is None and fields.get(b"smqbroker", b"").lower() != b"true":
            raise self._not_smq("answered without the header SmqBroker")
        if self._key and fields.get(b"sec-websocket-accept", b"").decode("latin-1") != websocket.accept_key(self._key):
            raise self._not_smq("answered the WebSocket upgrade with a wrong key")
        return bytes(rest)

    def _not_smq(self, what: str, can_reconnect: bool = False) -> ConnectionEnd:
        return ConnectionEnd("nonsmq", f"{self._url} is not an SMQ broker: it {what}", can_reconnect=can_reconnect)


def check_header(name: str, value: str) -> tuple[str, str]:
    """Check a header field and return it.

    Raises:
        ArgumentError: the name is not a token, or the value has a line break, NUL or a character outside latin-1.
    """
    if not _FIELD_NAME.match(name):
        raise ArgumentError(f"headers: {name!r} is not a header name")
    if any(char in "\r\n\0" or ord(char) > 0xFF for char in value):
        raise ArgumentError(f"headers: the value of {name} must be latin-1 text without line breaks")
    return name, value


class Framing(Protocol):
    """Framing of packets: on a raw socket, or as masked binary messages on a WebSocket."""

    @property
    def closed(self) -> bool:
        """Whether the broker has closed the transport below SMQ."""

    def encode(self, frames: Iterable[bytes]) -> bytes:
        """Return the bytes of `frames` on the wire."""

    def receive(self, data: bytes) -> list[bytes]:
        """Return the packets that `data` completes."""

    def take_replies(self) -> bytes:
        """Return the bytes that the transport itself must send, such as WebSocket Pongs."""


class RawFraming:
    """Two bytes before each packet: the length of the packet, including these bytes."""

    closed = False  # Disconnect closes raw connections

    def __init__(self) -> None:
        self._rest = b""

    def encode(self, frames: Iterable[bytes]) -> bytes:
        return b"".join(frames)

    def receive(self, data: bytes) -> list[bytes]:
        if self._rest:
            data = self._rest + data
        packets, start, end = [], 0, len(data)
        while end - start >= 2:
            size = data[start] << 8 | data[start + 1]
            if size < 3:  # the length and the packet type
                raise ProtocolError(CloseReason.SHORT_PACKET, f"a frame of length {size}")
            if start + size > end:
                break
            packets.append(data[start + 2 : start + size])
            start += size
        self._rest = data[start:]
        return packets

    def take_replies(self) -> bytes:
        return b""


class WebSocketFraming:
    """One binary WebSocket message for each packet, without the length."""

    def __init__(self) -> None:
        self._codec = websocket.WebSocketCodec(is_client=True, max_message_bytes=_MAX_MESSAGE_BYTES)

    @property
    def closed(self) -> bool:
        return self._codec.close_code is not None

    def encode(self, frames: Iterable[bytes]) -> bytes:
        return b"".join(websocket.encode_masked(websocket.BINARY, frame[2:]) for frame in frames)

    def receive(self, data: bytes) -> list[bytes]:
        self._codec.feed(data)
        packets = []
        while (message := self._codec.next()) or self._codec.has_more:
            if message:
                packets.append(message.data)
        return packets

    def take_replies(self) -> bytes:
        return self._codec.take_replies()


# Size of one write. Messages that are still queued when the connection is lost are counted as dropped.
_TAKE_BYTES = 256 * 1024
# Limit of queued Pongs, as packets or as WebSocket frames. Further Pings of a broker that does not read are ignored.
_MAX_REPLIES_BYTES = 16 * 1024
# The fields after the packet type.
_ACK = struct.Struct(">BI")  # status or version, number
_PUBLISH = struct.Struct(">III")  # tid, ptid, subtid
_CHANGE = struct.Struct(">II")  # tid, subscribers
_ACK_TEXT_AT = 1 + _ACK.size
_PAYLOAD_AT = 1 + _PUBLISH.size


class Init(NamedTuple):
    """First packet of the broker; the response is `ClientProtocol.connect`.

    `address` is the IP address of this client, as the broker sees it.
    """

    seed: int
    address: str


class Accepted(NamedTuple):
    """The broker accepted the connection; `etid` is the client's own topic ID."""

    etid: int


class Ack(NamedTuple):
    """Response to Subscribe, Create or Createsub. `kind` is its packet type; `number` is 0 for a denied request."""

    kind: int
    number: int
    name: bytes


class Published(NamedTuple):
    """A published message."""

    data: bytes
    ptid: int
    tid: int
    subtid: int


class Change(NamedTuple):
    """The number of `subscribers` of topic `tid` has changed."""

    tid: int
    subscribers: int


class Pong(NamedTuple):
    """Response to the Ping with this `token`."""

    token: object


class Ended(NamedTuple):
    """The connection has ended; the last event."""

    end: ConnectionEnd


Event = Init | Accepted | Ack | Published | Change | Pong | Ended


class ClientState(Enum):
    """State of a connection."""

    HTTP = auto()
    INIT = auto()
    CONNECT = auto()
    CONNACK = auto()
    OPEN = auto()
    CLOSED = auto()


class ClientProtocol:
    """The state of one connection.

    Args:
        url: the broker; None for a connection without an HTTP request.
        headers: additional fields of the HTTP request.
        on_output: called when there is data to send; must not block.

    Attributes:
        unsent_bytes: size of the queued frames.
    """

    def __init__(
        self, url: Url | None, headers: Iterable[tuple[str, str]] = (), on_output: Callable[[], None] = lambda: None
    ) -> None:
        self.state = ClientState.HTTP if url else ClientState.INIT
        self.unsent_bytes = 0
        self._handshake = Handshake(url, headers) if url else None
        self._framing: Framing = WebSocketFraming() if url and url.websocket else RawFraming()
        self._frames: deque[bytes] = deque()
        self._out = bytearray(self._handshake.request if self._handshake else b"")
        self._on_output = on_output
        self._pongs_bytes = 0
        self._pings: deque[object] = deque()

    def connect(self, uid: bytes, credentials: bytes, info: bytes) -> None:
        """Respond to Init with Connect: `uid` of 6 to 255 bytes, `credentials` of at most 255."""
        self.state = ClientState.CONNACK
        self.send_packet(smq.connect(uid, credentials, info))

    def ping(self, token: object = None) -> None:
        """Send Ping. The event `Pong` has its `token`; the broker has then processed all earlier packets."""
        self._pings.append(token)
        self.send_packet(smq.PING)

    def send_packet(self, packet: bytes) -> None:
        """Queue one packet."""
        self.send(smq.frame(packet))

    def send(self, frame: bytes) -> None:
        """Queue one frame."""
        self._frames.append(frame)
        self.unsent_bytes += len(frame)
        self._on_output()

    def take(self) -> bytes:
        """Return the next bytes for the socket, about 256 KiB at most; empty when the queue is empty."""
        out, frames, size = self._out, self._frames, 0
        batch = []
        while frames and size < _TAKE_BYTES:
            size += len(frames[0])
            batch.append(frames.popleft())
        self.unsent_bytes -= size
        self._out = bytearray()
        self._pongs_bytes = 0
        return bytes(out + self._framing.encode(batch))

    def unsent_publishes(self) -> int:
        """Return the number of queued messages; they are lost with the connection."""
        # A frame has its packet type after the two bytes of its length.
        return sum(1 for frame in self._frames if frame[2] == Type.PUBLISH)

    def receive(self, data: bytes) -> list[Event]:
        """Process bytes from the socket and return their events."""
        if self.state is ClientState.CLOSED:
            return []
        events: list[Event] = []
        framing = self._framing
        try:
            if self.state is ClientState.HTTP and self._handshake:
                rest = self._handshake.receive(data)
                if rest is None:
                    return []
                self.state, data = ClientState.INIT, rest
            for packet in framing.receive(data):
                if (event := self._packet(packet)) is not None:
                    events.append(event)
        except ProtocolError as error:
            events.append(self._close(protocol_error(error)))
        except ConnectionEnd as end:  # a rejection, or another kind of server
            return [self._close(end)]
        replies = framing.take_replies()
        if replies and (framing.closed or len(self._out) < _MAX_REPLIES_BYTES):
            self._out += replies
            self._on_output()
        if framing.closed and self.state is not ClientState.CLOSED:
            events.append(self._close(ConnectionEnd("socketclosed", "the broker closed the WebSocket")))
        return events

    def _packet(self, packet: bytes) -> Event | None:
        """Process one packet. Raises ProtocolError, and ConnectionEnd for a rejection."""
        if self.state is ClientState.OPEN:
            handler = _HANDLERS.get(packet[0]) if packet else None
        else:
            handler = _HANDSHAKE_HANDLERS.get((self.state, packet[0])) if packet else None
        if self.state is ClientState.CLOSED:
            return None
        if handler is None:
            kind = packet[0] if packet else "empty"
            raise ProtocolError(CloseReason.UNKNOWN_PACKET, f"packet {kind} in state {self.state.name}")
        try:
            return handler(self, packet)
        except struct.error:
            raise ProtocolError(CloseReason.SHORT_PACKET, f"packet {packet[0]} of {len(packet)} bytes") from None

    def _close(self, end: ConnectionEnd) -> Ended:
        self.state = ClientState.CLOSED
        return Ended(end)

    def _init(self, packet: bytes) -> Event:
        version, seed = _ACK.unpack_from(packet, 1)
        if version != smq.VERSION:
            raise ConnectionEnd("protocolerror", f"the broker has SMQ version {version}, not 1", can_reconnect=False)
        self.state = ClientState.CONNECT
        return Init(seed, packet[_ACK_TEXT_AT:].decode("latin-1"))

    def _connack(self, packet: bytes) -> Event:
        code, etid = _ACK.unpack_from(packet, 1)
        if code:
            raise refused(code, packet[_ACK_TEXT_AT:].decode("utf-8", "replace"))
        if not etid:
            raise ProtocolError(CloseReason.SHORT_PACKET, "Connack without an ETID")
        self.state = ClientState.OPEN
        return Accepted(etid)

    def _ack(self, packet: bytes) -> Event:
        status, number = _ACK.unpack_from(packet, 1)
        return Ack(packet[0], 0 if status else number, packet[_ACK_TEXT_AT:])

    def _publish(self, packet: bytes) -> Event:
        tid, ptid, stid = _PUBLISH.unpack_from(packet, 1)
        return Published(packet[_PAYLOAD_AT:], ptid, tid, stid)

    def _change(self, packet: bytes) -> Event:
        return Change(*_CHANGE.unpack_from(packet, 1))

    def _disconnect(self, packet: bytes) -> Event:
        return self._close(disconnected(packet[1:].decode("utf-8", "replace")))

    def _ping(self, packet: bytes) -> None:
        if self._pongs_bytes < _MAX_REPLIES_BYTES:
            self._pongs_bytes += len(smq.PONG) + 2  # with the length
            self.send_packet(smq.PONG)

    def _pong(self, packet: bytes) -> Event:
        return Pong(self._pings.popleft() if self._pings else None)


_Handler = Callable[[ClientProtocol, bytes], Event | None]

# A broker may reject a client before its Connect, after a timeout or at shutdown.
_HANDSHAKE_HANDLERS: dict[tuple[ClientState, int], _Handler] = {
    (ClientState.INIT, Type.INIT): ClientProtocol._init,
    (ClientState.CONNACK, Type.CONNACK): ClientProtocol._connack,
    (ClientState.INIT, Type.CONNACK): ClientProtocol._connack,
    (ClientState.CONNECT, Type.CONNACK): ClientProtocol._connack,
    (ClientState.INIT, Type.DISCONNECT): ClientProtocol._disconnect,
    (ClientState.CONNECT, Type.DISCONNECT): ClientProtocol._disconnect,
    (ClientState.CONNACK, Type.DISCONNECT): ClientProtocol._disconnect,
}

_HANDLERS: dict[int, _Handler] = {
    Type.SUBACK: ClientProtocol._ack,
    Type.CREATEACK: ClientProtocol._ack,
    Type.CREATESUBACK: ClientProtocol._ack,
    Type.PUBLISH: ClientProtocol._publish,
    Type.CHANGE: ClientProtocol._change,
    Type.DISCONNECT: ClientProtocol._disconnect,
    Type.PING: ClientProtocol._ping,
    Type.PONG: ClientProtocol._pong,
}

"""Sockets of the Lua API behind one interface, `SocketHandle`, including WebSockets.

Activities wait for data (`Reading`), for room in the send queue (`QueueDrain`), or for `wake` (`Suspension`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

from gevent import get_hub

from smqrt.apps.lua.bridge import fail
from smqrt.broker.deferred import Deferred
from smqrt.broker.state import BrokerPeer
from smqrt.errors import ArgumentError, ProtocolError, StreamError
from smqrt.http.message import RequestServer
from smqrt.hub.peer import PeerSocket
from smqrt.loop.scheduling import TimedDeferred, Wait, share
from smqrt.transport.listener import Acceptor
from smqrt.transport.stream import Datagram, Stream, resolve
from smqrt.transport.tls import TlsTransport, Transport
from smqrt.transport.tls_contexts import ClientTls, ServerTls
from smqrt.wire import websocket
from smqrt.wire.websocket import WebSocketCodec

Values = tuple[Any, ...]

AGAIN: Values = ()
"""Result of `receive` when there may be more data, but other activities have to run first."""


class Reading(Deferred[Values]):
    """A pending read. Resolves to the values of the read, or to nil and "timeout" or another error word.

    Args:
        handle: the socket.
        timeout_s: seconds to wait; None for no limit.
        is_soon: whether to read again in the next iteration of the loop, even if the socket is not readable.
    """

    __slots__ = ("_handle", "_late_s", "_wait")

    def __init__(self, handle: SocketHandle, timeout_s: float | None, is_soon: bool = False) -> None:
        super().__init__()
        self._handle = handle
        self._late_s = None if timeout_s is None else monotonic() + timeout_s
        self._wait: Deferred[None] | None = None
        handle.reading = self
        if is_soon:
            self._await_turn()
        elif not handle.paused:
            self._await(timeout_s)

    def resume(self) -> None:
        """Continue after the end of a pause."""
        if self._wait is None:
            get_hub().loop.run_callback(self._try, None, None)

    def _await(self, timeout_s: float | None) -> None:
        self._wait = self._handle.readable(timeout_s)
        self._wait.then(self._try)

    def _await_turn(self) -> None:
        turn: Deferred[None] = Deferred()
        self._wait = turn
        turn.then(self._try)
        share().later(turn.resolve)

    def _try(self, _value: None, error: BaseException | None) -> None:
        self._wait = None
        if self.done or (self._handle.paused and error is None):
            return
        try:
            if error is not None:
                raise error
            values = self._handle.receive()
            left_s = None if self._late_s is None else self._late_s - monotonic()
            if values:
                self.resolve(values)
            elif values is None:
                self._await(left_s)
            elif left_s is not None and left_s <= 0:
                raise StreamError("timeout")
            else:
                self._await_turn()
        except StreamError as failure:
            self.resolve(fail(failure.word))
        except Exception as fault:  # else the activity would wait forever
            self.reject(fault)

    def _release(self) -> None:
        self._handle.reading = None
        if self._wait is not None:
            self._wait.cancel()
            self._wait = None


class SocketHandle:
    """A socket.

    Attributes:
        reading: the pending read; None without one.
        paused: whether reading is paused.
        state: the return value of `sock:state()`.
    """

    __slots__ = ("paused", "reading")
    state = "connected"
    stream: Stream | None = None

    def __init__(self) -> None:
        self.reading: Reading | None = None
        self.paused = False

    @property
    def tls_layer(self) -> TlsTransport | None:
        """The TLS layer of a connection; None without TLS."""
        return self.stream.tls if self.stream else None

    def receive(self) -> Values | None:
        """Return the values of a read. Raises StreamError.

        Returns None if no data has arrived, `AGAIN` if the caller must try again in a later iteration of the loop.
        """
        raise StreamError("incorrectuse")

    def readable(self, timeout_s: float | None) -> Wait:
        """Wait until `receive` may return data. Raises StreamError."""
        raise StreamError("incorrectuse")

    def put(self, data: bytes, is_text: bool | None) -> bool:
        """Send or queue data; return False if the writer should wait for room in the queue. Raises StreamError."""
        raise StreamError("incorrectuse")

    def peername(self) -> tuple[str, int]:
        """Return the address and port of the remote side. Raises StreamError."""
        raise StreamError("invalidsocketcon")

    def sockname(self) -> tuple[str, int]:
        """Return the address and port of the local side. Raises StreamError."""
        raise StreamError("invalidsocketcon")

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """Set an option of the socket. Raises StreamError, OSError."""
        raise StreamError("incorrectuse")

    def close(self) -> None:
        """Close the socket; a pending read returns nil, "socketclosed"."""
        raise StreamError("incorrectuse")

    def pause(self, is_paused: bool) -> None:
        """Pause or resume reading; the system buffers received data meanwhile."""
        self.paused = is_paused
        if self.reading is not None and not is_paused:
            self.reading.resume()

    def end_reading(self, word: str) -> None:
        """End a pending read with nil and an error word."""
        if self.reading is not None:
            self.reading.resolve(fail(word))


class StreamHandle(SocketHandle):
    """A TCP or TLS connection.

    Args:
        stream: the connection.
        tls: the TLS client or server (`ClientTls`, `ServerTls`); None without TLS.
        host: the host name of the connection, for the check of the certificate.
        server: the `HttpServer` that accepted it; None for other connections.
    """

    __slots__ = ("host", "server", "stream", "tls")
    stream: Stream

    def __init__(
        self,
        stream: Stream,
        tls: ClientTls | ServerTls | None = None,
        host: str = "",
        server: RequestServer | None = None,
    ) -> None:
        super().__init__()
        self.stream, self.tls, self.host, self.server = stream, tls, host, server

    def receive(self) -> Values | None:
        """See `SocketHandle`."""
        data = self.stream.try_read()
        if data:
            return (data,)
        return None if data is None else self.end_values()

    def end_values(self) -> Values:
        """Return the values of a read at the end of the stream."""
        return fail("sslclosenotify" if self.stream.tls else "socketclosed")

    def readable(self, timeout_s: float | None) -> Wait:
        """See `SocketHandle`."""
        return self.stream.readable(timeout_s)

    def put(self, data: bytes, is_text: bool | None) -> bool:
        """See `SocketHandle`."""
        return self.stream.push(data)

    def peername(self) -> tuple[str, int]:
        """See `SocketHandle`."""
        return self.stream.peername()

    def sockname(self) -> tuple[str, int]:
        """See `SocketHandle`."""
        return self.stream.sockname()

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """See `SocketHandle`."""
        self.stream.setsockopt(level, option, value)

    def close(self) -> None:
        """See `SocketHandle`."""
        self.stream.close()


_CHUNK = re.compile(rb"[0-9A-Fa-f]{1,16}(?:;[^\r\n]*)?\r\n")
_LAST_CHUNK = b"0\r\n\r\n"


class ChunkedHandle(StreamHandle):
    """The connection of a chunked response: writes become chunks, and `close` sends the last chunk.

    Some applications frame their chunks themselves. The first write shows this, and their data then stays unchanged.
    """

    __slots__ = ("_is_framed",)

    def __init__(self, stream: Stream, server: RequestServer) -> None:
        super().__init__(stream, server=server)
        self._is_framed: bool | None = None  # whether the application frames chunks; None before the first write

    def put(self, data: bytes, is_text: bool | None) -> bool:
        """See `SocketHandle`."""
        if data and self._is_framed is None:
            self._is_framed = _CHUNK.match(data) is not None
        if data and not self._is_framed:  # an empty chunk would end the response
            data = b"%x\r\n%b\r\n" % (len(data), data)
        return super().put(data, is_text)

    def close(self) -> None:
        """See `SocketHandle`."""
        if not self.stream.closed:
            if not self._is_framed:
                with suppress(StreamError):  # the client has disconnected
                    self.stream.push(_LAST_CHUNK)
            self.stream.close(graceful=True)


class ListenerHandle(SocketHandle):
    """A listening port; a read accepts a connection.

    Args:
        acceptor: the port.
        accepted: registers a transport and returns the number of the new socket.
    """

    __slots__ = ("_accepted", "_acceptor")
    state = "listening"

    def __init__(self, acceptor: Acceptor, accepted: Callable[[Transport], int]) -> None:
        super().__init__()
        self._acceptor, self._accepted = acceptor, accepted

    def receive(self) -> Values | None:
        """See `SocketHandle`."""
        transport = self._acceptor.try_accept()
        return None if transport is None else (self._accepted(transport),)

    def readable(self, timeout_s: float | None) -> Wait:
        """See `SocketHandle`."""
        return self._acceptor.acceptable(timeout_s)

    def sockname(self) -> tuple[str, int]:
        """See `SocketHandle`."""
        return self._acceptor.sockname()

    def close(self) -> None:
        """See `SocketHandle`."""
        self._acceptor.close()


class DatagramHandle(SocketHandle):
    """A UDP socket."""

    __slots__ = ("_datagram",)
    state = "udp"

    def __init__(self, datagram: Datagram) -> None:
        super().__init__()
        self._datagram = datagram

    def receive(self) -> Values | None:
        """See `SocketHandle`: the data, the address, the port, and whether it is IPv6."""
        received = self._datagram.try_receive()
        if received is None:
            return None
        data, (host, port) = received
        return data, host.encode(), port, ":" in host

    def readable(self, timeout_s: float | None) -> Wait:
        """See `SocketHandle`."""
        return self._datagram.readable(timeout_s)

    def put(self, data: bytes, is_text: bool | None) -> bool:
        """See `SocketHandle`."""
        self._datagram.send(data)
        return True

    def sendto(self, data: bytes, host: str, port: int) -> bool:
        """Send a datagram to a literal address. Raises StreamError; ArgumentError for a name."""
        try:
            # literal: a lookup would block.
            _, address = resolve(host, port, self._datagram.is_ipv6, literal=True)[0]
        except StreamError as error:
            if error.word == "cannotconnect":
                raise ArgumentError(f"sendto: {error.detail}") from None
            raise ArgumentError(f"sendto: '{host}' is not an IP address; use ba.socket.toip first") from None
        return self._datagram.send(data, address)

    def peername(self) -> tuple[str, int]:
        """See `SocketHandle`."""
        return self._datagram.peername()

    def sockname(self) -> tuple[str, int]:
        """See `SocketHandle`."""
        return self._datagram.sockname()

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """See `SocketHandle`."""
        self._datagram.setsockopt(level, option, value)

    def close(self) -> None:
        """See `SocketHandle`."""
        self._datagram.close()


class PeerHandle(SocketHandle):
    """A client of a broker. The server's own client has no socket, so its methods fail."""

    __slots__ = ("_socket",)

    def __init__(self, session: BrokerPeer) -> None:
        super().__init__()
        self._socket = PeerSocket(session)

    @property
    def tls_layer(self) -> TlsTransport | None:
        """See `SocketHandle`."""
        return self._connected().tls

    def peername(self) -> tuple[str, int]:
        """See `SocketHandle`."""
        return _or_closed(self._connected().peername())

    def sockname(self) -> tuple[str, int]:
        """See `SocketHandle`."""
        return _or_closed(self._connected().sockname())

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """See `SocketHandle`."""
        self._connected().setsockopt(level, option, value)

    def close(self) -> None:
        """Disconnect the client."""
        self._socket.close()

    def _connected(self) -> PeerSocket:
        if self._socket.transport is None:
            raise StreamError("invalidsocketcon")
        return self._socket


def _or_closed(name: tuple[str, int] | None) -> tuple[str, int]:
    if name is None:
        raise StreamError("socketclosed")
    return name


# ---- waits for room and for `wake`

STALLED_S = 30.0  # time without any progress after which a write fails


class QueueDrain(Deferred[object]):
    """A wait for room in the send queue. Resolves to True, or to nil and an error word.

    The word is "timeout" when the remote side has stopped reading, or after `timeout_s` seconds.
    """

    __slots__ = ("_left_bytes", "_stream", "_until_s", "_wait")

    def __init__(self, stream: Stream, timeout_s: float | None = None) -> None:
        super().__init__()
        self._stream = stream
        self._until_s = None if timeout_s is None else monotonic() + timeout_s
        self._wait: Wait
        self._await()

    def _release(self) -> None:
        self._wait.cancel()

    def _await(self) -> None:
        self._left_bytes = self._stream.queued_bytes
        left_s = STALLED_S if self._until_s is None else min(STALLED_S, self._until_s - monotonic())
        self._wait = self._stream.writable(left_s)
        self._wait.then(self._over)

    def _over(self, _value: None, error: BaseException | None) -> None:
        is_late = self._until_s is not None and monotonic() >= self._until_s
        if not isinstance(error, StreamError):
            self.resolve(True)
        elif error.word == "timeout" and self._stream.queued_bytes < self._left_bytes and not is_late:
            self._await()  # the remote side is slow, but reads
        else:
            self.resolve(fail(error.word))


class Suspension(TimedDeferred[object]):
    """A wait for `wake`. Resolves to True, or to nil and a word, which is "timeout" after the timeout."""

    __slots__ = ("_number", "_suspensions")

    def __init__(self, suspensions: dict[int, Suspension], number: int, timeout_s: float | None) -> None:
        super().__init__(timeout_s)
        self._suspensions, self._number = suspensions, number
        suspensions[number] = self

    def wake(self, word: bytes | None = None) -> None:
        """Resume the activity."""
        self.resolve(True if word is None else fail(word.decode()))

    def _expired(self) -> None:
        self.wake(b"timeout")

    def _release(self) -> None:
        super()._release()
        self._suspensions.pop(self._number, None)


class Suspensions:
    """Suspended activities by number, which Lua chooses."""

    def __init__(self) -> None:
        self._waiting: dict[int, Suspension] = {}

    def suspend(self, number: int, timeout_ms: float | None = None) -> Suspension:
        """Park the activity until `wake(number)`, or until the timeout."""
        return Suspension(self._waiting, number, None if timeout_ms is None else timeout_ms / 1000)

    def wake(self, number: int, word: bytes | None = None) -> bool:
        """Resume an activity with true, or with nil and a word; return False if none is suspended."""
        suspension = self._waiting.get(number)
        if suspension is None:
            return False
        suspension.wake(word)
        return True

    def wake_all(self, word: bytes) -> None:
        """Resume all activities with nil and a word."""
        for number in list(self._waiting):
            self.wake(number, word)


MAX_WRITE_BYTES = 65535
MAX_PING_BYTES = 125  # RFC 6455 §5.5: the payload of a control frame


class WebSocketHandle(StreamHandle):
    """A WebSocket after its handshake; `is_client` on the connecting side. See `StreamHandle` for other arguments."""

    __slots__ = ("_last", "codec")

    def __init__(
        self,
        stream: Stream,
        is_client: bool,
        tls: ClientTls | ServerTls | None = None,
        host: str = "",
        server: RequestServer | None = None,
    ) -> None:
        super().__init__(stream, tls, host, server)
        self.codec = WebSocketCodec(is_client)
        self._last: Values | None = None  # the result of all reads after the end

    def receive(self) -> Values | None:
        """See `SocketHandle`: the data and whether it is text; for a large frame also received and total bytes."""
        if self._last is not None:
            return self._last
        turn, codec = share(), self.codec
        while not turn.spent():
            try:
                message = codec.next()
            except ProtocolError as violation:
                return self._end_with("socketreadfailed", websocket.close_code(violation.reason))
            if replies := codec.take_replies():
                self.stream.push_or_forget(replies)
            if message is not None:
                return tuple(message) if message.frame_bytes else message[:2]
            if codec.close_code is not None:
                return self._end_with("socketclosed", codec.close_code)
            if codec.has_more:
                continue
            data = self.stream.try_read()
            if data is None:
                return None
            if not data:
                return self.end_values()
            codec.feed(data)
        return AGAIN

    def put(self, data: bytes, is_text: bool | None) -> bool:
        """See `SocketHandle`. Raises ArgumentError for data that is too long, and for text that is not UTF-8."""
        if len(data) > MAX_WRITE_BYTES:
            raise ArgumentError(f"write: {len(data)} bytes; a WebSocket message takes at most {MAX_WRITE_BYTES} a call")
        if is_text and not data.isascii():
            try:
                data.decode()
            except UnicodeDecodeError as error:
                at = error.start + 1
                raise ArgumentError(f"write: the text is not UTF-8 at byte {at}; send it as binary") from None
        return self.stream.push(self.codec.message(data, bool(is_text)))

    def ping(self, data: bytes) -> bool:
        """Send a ping; return False if the queue is full. Raises StreamError, ArgumentError."""
        if len(data) > MAX_PING_BYTES:
            raise ArgumentError(f"ping: {len(data)} bytes; a ping takes at most {MAX_PING_BYTES}")
        return self.stream.try_write(self.codec.ping(data))

    def close(self, code: int = websocket.CLOSE_NORMAL, text: bytes = b"") -> None:
        """Send a close frame and close; a pending read returns nil, "socketclosed"."""
        if not self.stream.closed:
            frame = self.codec.close(code, text)
            if frame:
                self.stream.push_or_forget(frame)
            self.stream.close(graceful=True)

    def _end_with(self, word: str, code: int) -> Values:
        self._last = fail(word, code)
        self.close(code)
        return self._last

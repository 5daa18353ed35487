"""The kinds of sockets that Lua knows, seen by one interface: an `End`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smqrt.errors import ArgumentError, StreamError
from smqrt.lua.bridge import fail
from smqrt.lua.sockets.reading import Reading
from smqrt.net.acceptor import Acceptor
from smqrt.net.addresses import resolve
from smqrt.net.datagram import Datagram
from smqrt.net.readiness import Wait
from smqrt.net.stream import Stream
from smqrt.net.tls import TlsTransport

Values = tuple[Any, ...]

AGAIN: Values = ()
"""What `receive` gives when there may be something, but others have their turn first."""


class End:
    """A socket.

    Attributes:
        reading: the activity that waits in a read, None when nobody does.
        paused: what arrives is not given to the reader.
        state: the word of `sock:state()`.
    """

    __slots__ = ("paused", "reading")
    state = "connected"
    stream: Stream | None = None

    def __init__(self) -> None:
        self.reading: Reading | None = None
        self.paused = False

    @property
    def tls_layer(self) -> TlsTransport | None:
        """The TLS of a connection, None without it."""
        return self.stream.tls if self.stream else None

    def receive(self) -> Values | None:
        """What a read gives now, None when nothing has arrived, `AGAIN` when it should be asked in a later turn of the
        loop. Raises StreamError."""
        raise StreamError("incorrectuse")

    def readable(self, timeout_s: float | None) -> Wait:
        """Wait until `receive` is worth another try. Raises StreamError."""
        raise StreamError("incorrectuse")

    def put(self, data: bytes, is_text: bool | None) -> bool:
        """Send or queue `data`; false when the writer should wait until there is room. Raises StreamError."""
        raise StreamError("incorrectuse")

    def pause(self, is_paused: bool) -> None:
        """Hold back what arrives, or go on."""
        self.paused = is_paused
        if self.reading is not None and not is_paused:
            self.reading.go_on()

    def end_reading(self, word: str) -> None:
        """Let a read that waits give nil and `word`."""
        if self.reading is not None:
            self.reading.resolve(fail(word))


class StreamEnd(End):
    """A TCP or TLS connection.

    Args:
        stream: the connection.
        tls: how it became TLS (`ClientTls`, `ServerTls`), None without TLS.
        host: the name that was connected to, for the check of the certificate.
        server: the `HttpServer` it came from, None when it did not.
    """

    __slots__ = ("host", "server", "stream", "tls")
    stream: Stream

    def __init__(self, stream: Stream, tls: Any = None, host: str = "", server: Any = None) -> None:
        super().__init__()
        self.stream, self.tls, self.host, self.server = stream, tls, host, server

    def receive(self) -> Values | None:
        """See `End`."""
        data = self.stream.try_read()
        if data:
            return (data,)
        return None if data is None else self.gone()

    def gone(self) -> Values:
        """What a read gives at the end of the stream."""
        return fail("sslclosenotify" if self.stream.tls else "socketclosed")

    def readable(self, timeout_s: float | None) -> Wait:
        """See `End`."""
        return self.stream.readable(timeout_s)

    def put(self, data: bytes, is_text: bool | None) -> bool:
        """See `End`."""
        return self.stream.push(data)

    def peername(self) -> tuple[str, int]:
        """Address and port of the other side. Raises StreamError."""
        return self.stream.peername()

    def sockname(self) -> tuple[str, int]:
        """Address and port of this side. Raises StreamError."""
        return self.stream.sockname()

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        """Set an option of the socket. Raises StreamError, OSError."""
        self.stream.setsockopt(level, option, value)

    def close(self) -> None:
        """Close; the reader, if any, gets nil, "socketclosed"."""
        self.stream.close()


class ListenerEnd(End):
    """A port that is listened on: a read of it accepts.

    Args:
        acceptor: the port.
        accepted: takes a transport, gives Lua's number for the new socket.
    """

    __slots__ = ("_accepted", "_acceptor")
    state = "listening"

    def __init__(self, acceptor: Acceptor, accepted: Callable[[Any], int]) -> None:
        super().__init__()
        self._acceptor, self._accepted = acceptor, accepted

    def receive(self) -> Values | None:
        """See `End`."""
        transport = self._acceptor.try_accept()
        return None if transport is None else (self._accepted(transport),)

    def readable(self, timeout_s: float | None) -> Wait:
        """See `End`."""
        return self._acceptor.acceptable(timeout_s)

    def peername(self) -> tuple[str, int]:
        """There is no other side. Raises StreamError."""
        raise StreamError("invalidsocketcon")

    def sockname(self) -> tuple[str, int]:
        """The bound address and port. Raises StreamError."""
        return self._acceptor.sockname()

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        """Listeners have no options of their own. Raises StreamError."""
        raise StreamError("incorrectuse")

    def close(self) -> None:
        """Close; who accepts gets nil, "socketclosed"."""
        self._acceptor.close()


class DatagramEnd(End):
    """A UDP socket."""

    __slots__ = ("_datagram",)
    state = "udp"

    def __init__(self, datagram: Datagram) -> None:
        super().__init__()
        self._datagram = datagram

    def receive(self) -> Values | None:
        """See `End`: the data, and the address, port and whether it is IPv6."""
        received = self._datagram.try_receive()
        if received is None:
            return None
        data, (host, port) = received
        return data, host.encode(), port, ":" in host

    def readable(self, timeout_s: float | None) -> Wait:
        """See `End`."""
        return self._datagram.readable(timeout_s)

    def put(self, data: bytes, is_text: bool | None) -> bool:
        """See `End`."""
        self._datagram.send(data)
        return True

    def sendto(self, data: bytes, host: str, port: int) -> bool:
        """Send a datagram to a literal address. Raises StreamError; ArgumentError for a name."""
        try:
            _, address = resolve(host, port, self._datagram.is_ipv6, literal=True)[0]
        except StreamError as error:
            if error.word == "cannotconnect":
                raise ArgumentError(f"sendto: {error.detail}") from None
            raise ArgumentError(f"sendto: '{host}' is no IP address; ask ba.socket.toip first") from None
        return self._datagram.send(data, address)

    def peername(self) -> tuple[str, int]:
        """Address and port of the partner. Raises StreamError."""
        return self._datagram.peername()

    def sockname(self) -> tuple[str, int]:
        """Address and port of this side. Raises StreamError."""
        return self._datagram.sockname()

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        """Set an option of the socket. Raises StreamError, OSError."""
        self._datagram.setsockopt(level, option, value)

    def close(self) -> None:
        """Close; the reader, if any, gets nil, "socketclosed"."""
        self._datagram.close()

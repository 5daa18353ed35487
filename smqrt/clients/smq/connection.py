"""One connection of an SMQ client.

The greenlet of the client reads, a second one writes. The client pings a broker that has sent nothing for `ping`
seconds, and closes the connection when no response arrives within `pong` seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import gevent
from gevent.event import Event as Signal

from smqrt.clients.smq.options import TRUST_FAULTS, SmqClientOptions
from smqrt.clients.smq.protocol import ClientProtocol, ConnectionEnd, Ended, Event, from_stream_error
from smqrt.errors import StreamError
from smqrt.loop.scheduling import Turn
from smqrt.transport.outgoing_proxy import open_through
from smqrt.transport.stream import Stream
from smqrt.transport.tls_contexts import ClientTls, Trust
from smqrt.wire import smq
from smqrt.wire.url import Url

_READ_BYTES = 16384  # up to 5,000 packets, which are processed without a pause
_DISCONNECT_S = 2.0  # the broker closes the connection within this time after Disconnect


class SmqConnector:
    """Opens the TCP and TLS connections of one client.

    Args:
        url: the broker.
        options: TLS, the proxy and the time limit.

    Raises:
        ArgumentError: a file with certificates can't be read or is not valid.
    """

    def __init__(self, url: Url, options: SmqClientOptions) -> None:
        self._url, self._options = url, options
        files = (options.cafile, options.certfile, options.keyfile)
        self._tls = (options.tls or ClientTls.from_files(*files)) if url.secure else None

    def __call__(self) -> Stream:
        """Return a new connection.

        Raises:
            StreamError: the connection failed, or the certificate is not trusted.
        """
        host, port, timeout_s = self._url.host, self._url.port, self._options.timeout
        end_s = monotonic() + timeout_s
        if self._options.proxy is None:
            stream = Stream.connect(host, port, timeout_s)
        else:
            stream = open_through(self._options.proxy, host, port, timeout_s)
        if self._tls is None:
            return stream
        stream.starttls(self._tls.context(), host, timeout_s=end_s - monotonic())
        if self._options.verify:  # here and not in the TLS context, for a close reason that names the fault
            assert stream.tls is not None
            trust = self._tls.store.judge(stream.tls.peer_chain(), host)
            if trust is not Trust.TRUSTED:
                stream.close()
                raise StreamError("sslnottrusted", TRUST_FAULTS[trust])
        return stream


class ClientConnection:
    """A connection to a broker.

    Args:
        url: the broker; None when `connect` returns a connection that needs no HTTP request.
        options: the time limits.
        connect: opens the connection; may raise StreamError.

    Attributes:
        accepted: whether the broker has accepted the connection; set by the client.
        protocol: the protocol state.
    """

    def __init__(self, url: Url | None, options: SmqClientOptions, connect: Callable[[], Stream]) -> None:
        self._name = str(url or "the connection of the application")
        self._options = options
        self._connect = connect
        self._stream: Stream | None = None
        self._wake = Signal()
        self._wake.set()
        self._closed = False
        self._write_failed: StreamError | None = None
        self._abort_timer: gevent.Greenlet[..., Any] | None = None
        self._accepted_by_s = monotonic() + options.timeout
        self.accepted = False
        self.protocol = ClientProtocol(url, options.headers.items(), self._wake.set)

    # ---- open

    def connect(self) -> None:
        """Open the TCP (and TLS) connection.

        Raises:
            ConnectionEnd: the connection failed.
        """
        with self._as_connection_end():
            stream = self._connect()
        if not isinstance(stream, Stream):
            raise ConnectionEnd("failed", f"the connect function returned {type(stream).__name__}, not a Stream")
        self._stream = stream
        if self._closed:  # `abort` was called meanwhile
            stream.close()

    @property
    def local_address(self) -> str:
        """The local IP address."""
        with self._as_connection_end():
            return self._open_stream().sockname()[0]

    # ---- run

    def run(self, handle: Callable[[Event], None], wait_for_room: Callable[[], None]) -> ConnectionEnd:
        """Read until the connection ends and pass each event to `handle`, while a second greenlet writes.

        Args:
            wait_for_room: blocks while too many callbacks are queued.

        Returns:
            The close reason.
        """
        writer, turn = gevent.spawn(self._write), Turn()
        try:
            while True:
                data = self._receive()
                turn.yield_if_due()  # a fast broker may keep `_receive` from ever waiting; other greenlets must run
                for event in self.protocol.receive(data):
                    if isinstance(event, Ended):
                        return event.end
                    handle(event)
                wait_for_room()
        except ConnectionEnd as end:
            return end
        finally:
            writer.kill()
            with contextlib.suppress(StreamError):  # the last event may have queued the response to a WebSocket close
                if not self._closed and (data := self.protocol.take()):
                    self._open_stream().try_write(data)
            self.abort()
            if self._abort_timer is not None:
                self._abort_timer.kill()

    def _receive(self) -> bytes:
        """Return the next data; ping a silent broker. Raises ConnectionEnd."""
        is_pinged = False
        while True:
            if self.accepted:
                timeout_s = self._options.pong if is_pinged else self._options.ping
            else:
                timeout_s = max(0.001, self._accepted_by_s - monotonic())
            try:
                with self._as_connection_end():
                    data = self._open_stream().read(_READ_BYTES, timeout_s)
            except ConnectionEnd as end:
                if end.word != "timeout" or not self.accepted:
                    raise
                if is_pinged:
                    text = f"{self._name}: no answer to a ping within {self._options.pong:g} s"
                    raise ConnectionEnd("pong", text) from None
                self.protocol.ping()
                is_pinged = True
                continue
            if not data or self._closed:
                raise self._closed_end()
            return data

    # ---- write

    def _write(self) -> None:
        try:
            while True:
                self._wake.wait()
                self._wake.clear()
                while data := self.protocol.take():
                    self._open_stream().write(data)
        except StreamError as error:
            self._write_failed = error
            self.abort()

    # ---- close

    def abort_after(self, seconds: float) -> None:
        """Close the connection after `seconds` at the latest."""
        if self._abort_timer is not None:
            self._abort_timer.kill(block=False)
        self._abort_timer = gevent.spawn_later(seconds, self.abort)

    def disconnect(self, text: bytes) -> None:
        """Send Disconnect after everything queued, and let the broker close the connection."""
        self.protocol.send_packet(smq.disconnect(text))
        self.abort_after(_DISCONNECT_S)

    def abort(self) -> None:
        """Close the connection, or cancel the connection attempt, at once."""
        self._closed = True
        if self._stream is not None:
            self._stream.close()

    def _open_stream(self) -> Stream:
        if self._stream is None:
            raise StreamError("socketclosed")
        return self._stream

    def _closed_end(self) -> ConnectionEnd:
        if self._write_failed is not None:
            return ConnectionEnd("socketwritefailed", f"{self._name}: sending failed: {self._write_failed}")
        return ConnectionEnd("socketclosed", f"{self._name}: the connection was closed")

    @contextlib.contextmanager
    def _as_connection_end(self) -> Iterator[None]:
        """Raise a StreamError as a ConnectionEnd."""
        try:
            yield
        except StreamError as error:
            raise self._closed_end() if self._closed else from_stream_error(error, self._name) from None

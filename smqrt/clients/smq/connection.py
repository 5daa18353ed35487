"""One connection's socket: opened, read, written and watched with greenlets around a `ClientProtocol`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import gevent
from gevent.event import Event as Signal

from smqrt.clients.smq.options import SmqClientOptions
from smqrt.clients.smq.protocol import ClientProtocol, ConnectionEnd, Ended, Event, from_stream_error
from smqrt.errors import ArgumentError, StreamError
from smqrt.loop.scheduling import Turn
from smqrt.transport.outgoing_proxy import open_through
from smqrt.transport.stream import Stream
from smqrt.transport.tls_contexts import ClientTls, Trust
from smqrt.wire import smq
from smqrt.wire.url import Url, parse_url

_REASONS = {
    Trust.CERTCN: "the certificate is out of date",
    Trust.CERT: "the certificate is for another name",
    Trust.CN: "nobody trusted vouches for the certificate",
    Trust.NONE: "the certificate is for another name, and nobody trusted vouches for it",
}
_READ_BYTES = 16384
"""What is worked off at once; a broker can put 5,000 packets into it."""
_DISCONNECT_S = 2.0
"""How long the broker may take to close after our Disconnect."""


def broker_url(text: str) -> Url:
    """Where a broker is: `http(s)://` for raw SMQ over the morphed HTTP socket, `ws(s)://` for WebSocket.

    Raises:
        ArgumentError: it is no such URL.
    """
    try:
        return parse_url(text)
    except ValueError as error:
        raise ArgumentError(f"url {text!r} can't be read: {error}") from None


class SmqConnector:
    """Makes the connections of one client.

    Args:
        url: where the broker is.
        options: TLS, the proxy and the time it may take.

    Raises:
        ArgumentError: a file with certificates can't be read or is wrong.
    """

    def __init__(self, url: Url, options: SmqClientOptions) -> None:
        self._url, self._options = url, options
        files = (options.cafile, options.certfile, options.keyfile)
        self._tls = (options.tls or ClientTls.from_files(*files)) if url.secure else None

    def __call__(self) -> Stream:
        """A new connection.

        Raises:
            StreamError: it could not be made.
        """
        end_s = monotonic() + self._options.timeout
        stream = self._connected()
        if self._tls is not None:
            stream.starttls(self._tls.context(), self._url.host, timeout_s=end_s - monotonic())
            if self._options.verify:
                self._check_trust(stream, self._tls)
        return stream

    def _connected(self) -> Stream:
        host, port, timeout_s = self._url.host, self._url.port, self._options.timeout
        if self._options.proxy is None:
            return Stream.connect(host, port, timeout_s)
        return open_through(self._options.proxy, host, port, timeout_s)

    def _check_trust(self, stream: Stream, tls: ClientTls) -> None:
        assert stream.tls is not None
        trust = tls.store.judge(stream.tls.peer_chain(), self._url.host)
        if trust is not Trust.TRUSTED:
            stream.close()
            raise StreamError("sslnottrusted", _REASONS[trust])


class ClientConnection:
    """A connection to a broker.

    Args:
        url: the broker; None when `connect` gives a connection over which it speaks SMQ already.
        options: times.
        connect: makes the connection; may raise StreamError.
    """

    def __init__(self, url: Url | None, options: SmqClientOptions, connect: Callable[[], Stream]) -> None:
        self._name = str(url or "the application's connection")
        self._options = options
        self._connect = connect
        self._stream: Stream | None = None
        self._wake = Signal()
        self._wake.set()
        self._closed = False
        self._write_failed: StreamError | None = None
        self._abort_timer: gevent.Greenlet[..., Any] | None = None
        self._accepted_by_s = time.monotonic() + options.timeout
        self.accepted = False
        self.protocol = ClientProtocol(url, options.headers.items(), self._wake.set)

    # ---- open

    def connect(self) -> None:
        """Make the TCP (and TLS) connection.

        Raises:
            ConnectionEnd: it could not be made in time.
        """
        with self._as_connection_end():
            stream = self._connect()
        if not isinstance(stream, Stream):
            raise ConnectionEnd("failed", f"{self._name}: its function gave {type(stream).__name__}, not a Stream")
        self._stream = stream
        if self._closed:
            stream.close()

    @property
    def local_address(self) -> str:
        """The IP address of this end."""
        with self._as_connection_end():
            return self._live().sockname()[0]

    # ---- run

    def run(self, handle: Callable[[Event], None], wait_for_room: Callable[[], None]) -> ConnectionEnd:
        """Read until the end, giving each event to `handle`; what is queued meanwhile is written by a second greenlet.

        Args:
            wait_for_room: blocks while the application is too far behind.

        Returns:
            Why the connection ended.
        """
        writer, turn = gevent.spawn(self._write), Turn()
        try:
            while True:
                data = self._receive()
                turn.yield_if_due()  # there may always be more to read: the writer, and the others, have their turn
                for event in self.protocol.receive(data):
                    if isinstance(event, Ended):
                        return event.end
                    handle(event)
                wait_for_room()
        except ConnectionEnd as end:
            return end
        finally:
            writer.kill()
            self._write_rest()
            self.abort()
            if self._abort_timer is not None:
                self._abort_timer.kill()

    def _receive(self) -> bytes:
        pinged = False
        while True:
            try:
                with self._as_connection_end():
                    data = self._live().read(_READ_BYTES, self._read_timeout_s(pinged))
            except ConnectionEnd as end:
                if end.word != "timeout":
                    raise
                self._timed_out(end, pinged)
                pinged = True
                continue
            if not data or self._closed:
                raise self._lost()
            return data

    def _read_timeout_s(self, pinged: bool) -> float:
        if not self.accepted:
            return max(0.001, self._accepted_by_s - time.monotonic())
        return self._options.pong if pinged else self._options.ping

    def _timed_out(self, end: ConnectionEnd, pinged: bool) -> None:
        if not self.accepted:
            raise end
        if pinged:
            raise ConnectionEnd("pong", f"{self._name}: no answer to a ping within {self._options.pong:g} s")
        self.protocol.ping()

    # ---- write

    def _write(self) -> None:
        try:
            while True:
                self._wake.wait()
                self._wake.clear()
                while data := self.protocol.take():
                    self._live().write(data)
        except StreamError as error:
            self._write_failed = error
            self.abort()

    def _write_rest(self) -> None:
        """The answer to a WebSocket close, for one, is due after the last event."""
        with contextlib.suppress(StreamError):
            if not self._closed and (data := self.protocol.take()):
                self._live().try_write(data)

    # ---- end

    def abort_after(self, seconds: float) -> None:
        """End the connection at the latest then."""
        if self._abort_timer is not None:
            self._abort_timer.kill(block=False)
        self._abort_timer = gevent.spawn_later(seconds, self.abort)

    def disconnect(self, text: bytes) -> None:
        """Send Disconnect behind everything queued and let the broker close."""
        self.protocol.send_packet(smq.disconnect(text))
        self.abort_after(_DISCONNECT_S)

    def abort(self) -> None:
        """End the connection, or the attempt to make one, now."""
        self._closed = True
        if self._stream is not None:
            self._stream.close()

    def _live(self) -> Stream:
        if self._stream is None:
            raise StreamError("socketclosed")
        return self._stream

    def _lost(self) -> ConnectionEnd:
        if self._write_failed is not None:
            return ConnectionEnd("socketwritefailed", f"{self._name}: sending failed: {self._write_failed}")
        return ConnectionEnd("socketclosed", f"{self._name}: the connection was closed")

    @contextlib.contextmanager
    def _as_connection_end(self) -> Iterator[None]:
        try:
            yield
        except StreamError as error:
            raise self._lost() if self._closed else from_stream_error(error, self._name) from None

"""One connection of an SMQ client, on asyncio.

The task of the client reads, a second one writes. The client pings a broker that has sent nothing for `ping` seconds,
and closes the connection when no response arrives within `pong` seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from smqrt.clients.smq.options import TRUST_FAULTS, SmqClientOptions
from smqrt.clients.smq.protocol import ClientProtocol, ConnectionEnd, Ended, Event, from_stream_error
from smqrt.errors import StreamError
from smqrt.transport.peer_certificates import peer_chain
from smqrt.transport.proxy_address import Proxy, proxy_failure
from smqrt.transport.tls_contexts import ClientTls, Trust
from smqrt.wire import smq
from smqrt.wire.url import Url

_READ_BYTES = 16384  # up to 5,000 packets, which are processed without a pause
_DISCONNECT_S = 2.0  # the broker closes the connection within this time after Disconnect
_CLOSE_S = 1.0  # for the last bytes and the end of TLS; then the socket is closed at once


class Reader(asyncio.StreamReader):
    """A stream reader that returns all received data also when the connection fails.

    The standard one raises the error at once: a Disconnect packet would be lost that the broker has sent before.

    Attributes:
        failure: the error of the connection.
    """

    failure: Exception | None = None

    def set_exception(self, exc: Exception) -> None:
        """Store the error; called when the connection is lost."""
        self.failure = exc
        self.feed_eof()


Streams = tuple[Reader, asyncio.StreamWriter]


async def _open_streams(*address: Any, **options: Any) -> Streams:
    """Do the same as `asyncio.open_connection`, with a `Reader`."""
    loop = asyncio.get_running_loop()
    reader = Reader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.create_connection(lambda: protocol, *address, **options)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


class Connector:
    """Opens the TCP and TLS connections of one client.

    Args:
        url: the broker.
        options: TLS and the proxy.
    """

    def __init__(self, url: Url, options: SmqClientOptions) -> None:
        self._url, self._options = url, options
        self._tls: ClientTls | None = None

    async def prepare(self) -> None:
        """Read the files with certificates, in a thread.

        Raises:
            ArgumentError: a file can't be read or is not valid.
        """
        if self._url.secure and self._tls is None:
            self._tls = await asyncio.to_thread(_tls_of, self._options)

    async def open(self) -> Streams:
        """Return a new connection.

        Raises:
            StreamError: the connection failed, or the certificate is not trusted.
        """
        host, port, proxy = self._url.host, self._url.port, self._options.proxy
        context, name = (None, None) if self._tls is None else (self._tls.context(), host)
        try:
            if proxy is None:
                reader, writer = await _open_streams(host, port, ssl=context, server_hostname=name)
            else:
                sock = await _open_through(proxy, host, port)
                reader, writer = await _open_streams(sock=sock, ssl=context, server_hostname=name)
        except socket.gaierror as error:
            raise StreamError("cannotresolve", f"{host}: {error.strerror}") from None
        except ssl.SSLError as error:
            raise StreamError("sslhandshake", error.reason or str(error)) from None
        except OSError as error:
            reason = (
                os.strerror(error.errno) if error.errno else str(error)
            )  # asyncio's own text is "Connect call failed"
            raise StreamError("cannotconnect", f"{host} port {port}: {reason}") from None
        if self._tls is not None and self._options.verify:
            # Here and not in the TLS context, for a close reason that names the fault.
            trust = self._tls.store.judge(peer_chain(writer.get_extra_info("ssl_object")), host)
            if trust is not Trust.TRUSTED:
                writer.transport.abort()
                raise StreamError("sslnottrusted", TRUST_FAULTS[trust])
        return reader, writer


def _tls_of(options: SmqClientOptions) -> ClientTls:
    """Return the TLS options of a client, with a context that has read its certificates."""
    tls = options.tls or ClientTls.from_files(options.cafile, options.certfile, options.keyfile)
    tls.context()  # `Connector.open` gets the same one
    return tls


async def _open_through(proxy: Proxy, host: str, port: int) -> socket.socket:
    """Connect to `host` through a proxy, which also resolves the name. Raises StreamError and OSError."""
    from python_socks import ProxyConnectionError, ProxyError, ProxyType  # here: slow to load, and rarely needed
    from python_socks.async_.asyncio import Proxy as AsyncioProxy

    kind = ProxyType.SOCKS5 if proxy.socks else ProxyType.HTTP
    made = AsyncioProxy(kind, proxy.host, proxy.port, proxy.user, proxy.password, rdns=True)
    try:
        return await made.connect(host, port)
    except ProxyConnectionError as error:
        raise StreamError("cannotconnect", str(error)) from None
    except ProxyError as error:
        if proxy.socks:
            raise proxy_failure(error.error_code, str(error)) from None
        if error.error_code is None:
            raise StreamError("prxnotcompatible", str(error)) from None
        word = "proxyauth" if error.error_code == 407 else "prxrefused"
        raise StreamError(word, f"the proxy answered {error.error_code}: {error}") from None
    except (UnicodeError, ValueError) as error:
        raise StreamError("prxaddress", f"{host}: {error}") from None


class Connection:
    """A connection to a broker.

    Args:
        url: the broker.
        options: the time limits.
        connector: opens the connection.
        on_sent: called after queued frames were sent.

    Attributes:
        accepted: whether the broker has accepted the connection; set by the client.
        protocol: the protocol state.
    """

    def __init__(self, url: Url, options: SmqClientOptions, connector: Connector, on_sent: Callable[[], None]) -> None:
        self._name, self._options, self._connector, self._on_sent = str(url), options, connector, on_sent
        self._reader: Reader
        self._writer: asyncio.StreamWriter | None = None
        self._wake = asyncio.Event()
        self._wake.set()
        self._closed = False
        self._write_failed: OSError | None = None
        self._abort_timer: asyncio.TimerHandle | None = None
        self._accepted_by_s = asyncio.get_running_loop().time() + options.timeout
        self.accepted = False
        self.protocol = ClientProtocol(url, options.headers.items(), self._wake.set)

    async def open(self) -> None:
        """Open the TCP (and TLS) connection.

        Raises:
            ConnectionEnd: the connection failed.
        """
        with self._as_connection_end():
            async with asyncio.timeout_at(self._accepted_by_s):
                await self._connector.prepare()
                self._reader, self._writer = await self._connector.open()

    @property
    def local_address(self) -> str:
        """The local IP address; empty when it is unknown."""
        address = self._writer.get_extra_info("sockname") if self._writer else None
        return str(address[0]) if address else ""

    @property
    def handshake_s(self) -> float:
        """Seconds until the broker must have accepted the connection."""
        return self._accepted_by_s - asyncio.get_running_loop().time()

    async def run(
        self, handle: Callable[[Event], Awaitable[None] | None], wait_for_room: Callable[[], Awaitable[None]]
    ) -> ConnectionEnd:
        """Read until the connection ends and pass each event to `handle`, while a second task writes.

        Args:
            handle: an awaitable result is awaited before the next event.
            wait_for_room: waits while the application has too many messages.

        Returns:
            The close reason.
        """
        writing = asyncio.create_task(self._write())
        try:
            while True:
                data = await self._receive()
                for event in self.protocol.receive(data):
                    if isinstance(event, Ended):
                        await self._close()
                        return event.end
                    if (waiting := handle(event)) is not None:
                        await waiting
                await wait_for_room()
                await asyncio.sleep(0)  # the stream may have more data, and then never lets other tasks run
        except ConnectionEnd as end:
            return end
        finally:
            writing.cancel()
            self.abort()
            if self._abort_timer is not None:
                self._abort_timer.cancel()

    async def _receive(self) -> bytes:
        """Return the next data; ping a silent broker. Raises ConnectionEnd."""
        is_pinged = False
        while True:
            if self.accepted:
                timeout_s = self._options.pong if is_pinged else self._options.ping
            else:
                timeout_s = max(0.001, self.handshake_s)
            try:
                with self._as_connection_end():
                    async with asyncio.timeout(timeout_s):
                        data = await self._reader.read(_READ_BYTES)
                    if not data and self._reader.failure is not None:
                        raise self._reader.failure
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

    async def _write(self) -> None:
        assert self._writer is not None
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while data := self.protocol.take():
                    self._writer.write(data)
                    await self._writer.drain()
                    self._on_sent()
        except OSError as error:
            self._write_failed = error
            self.abort()

    # ---- close

    def disconnect(self, text: bytes) -> None:
        """Send Disconnect after everything queued, and let the broker close the connection within 2 s."""
        self.protocol.send_packet(smq.disconnect(text))
        self._abort_timer = asyncio.get_running_loop().call_later(_DISCONNECT_S, self.abort)

    def abort(self) -> None:
        """Close the connection at once."""
        self._closed = True
        if self._writer is not None:
            self._writer.transport.abort()

    async def _close(self) -> None:
        """Send the last bytes, such as the response to a WebSocket close, and close the connection."""
        assert self._writer is not None
        with contextlib.suppress(OSError):  # also a TimeoutError
            self._writer.write(self.protocol.take())
            self._writer.close()
            async with asyncio.timeout(_CLOSE_S):
                await self._writer.wait_closed()

    def _closed_end(self) -> ConnectionEnd:
        if self._write_failed is not None:
            return ConnectionEnd("socketwritefailed", f"{self._name}: sending failed: {self._write_failed}")
        return ConnectionEnd("socketclosed", f"{self._name}: the connection was closed")

    @contextlib.contextmanager
    def _as_connection_end(self) -> Iterator[None]:
        """Raise errors of streams as a ConnectionEnd."""
        try:
            yield
        except StreamError as error:
            failure = error
        except TimeoutError:
            failure = StreamError("timeout")
        except OSError as error:
            failure = StreamError("socketreadfailed", error.strerror or str(error))
        else:
            return
        raise self._closed_end() if self._closed else from_stream_error(failure, self._name)

"""TCP, TLS and UDP sockets for greenlets and loop callbacks.

`read` and `write` block only the calling greenlet. `try_read`, `try_write` and the `Wait`s of `readable` and `writable`
do not block: the loop greenlet and Lua code may call them.
"""

from __future__ import annotations

import _socket
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol

import gevent
from gevent import get_hub

from smqrt.errors import ArgumentError, StreamError
from smqrt.loop.scheduling import READ, WRITE, Ready, Signal, Turn, Wait, block
from smqrt.transport.tls import Address, Buffer, TlsTransport, Transport, send_and_close
from smqrt.wire.connection_state import Life, transition
from smqrt.workers.worker_rpc import worker_place

# ---- Socket options (spec: bas-api §8.2)


class OptionSocket(Protocol):
    """A socket with `setsockopt`."""

    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> object:
        """Set an option."""


def set_option(sock: OptionSocket, name: str, *values: object) -> None:
    """Set an option of a socket.

    Args:
        sock: the socket.
        name: a name of `_SETTERS`.
        values: true or false, then the other values of the option.

    Raises:
        ArgumentError: an unknown option, or a wrong value.
        OSError: the system rejects it.
    """
    setter = _SETTERS.get(name)
    if setter is None:
        raise ArgumentError(f"setoption: unknown option '{name}'; use one of {', '.join(_SETTERS)}")
    if not values or not isinstance(values[0], bool):
        raise ArgumentError(f"setoption: '{name}' takes true or false")
    setter(sock, *values)


def _keepalive(sock: OptionSocket, is_on: bool, idle_s: int | None = None, interval_s: int | None = None) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, int(is_on))
    if is_on and idle_s is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _seconds(idle_s))
    if is_on and interval_s is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _seconds(interval_s))


def _seconds(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 32767:
        raise ArgumentError(f"setoption: 'keepalive' takes seconds, 1 to 32767, not {value!r}")
    return int(value)


def _membership(
    sock: OptionSocket, is_on: bool, group: str | bytes = b"", interface: str | bytes | None = None
) -> None:
    try:
        names = (name.encode() if isinstance(name, str) else name for name in (group, interface or b"0.0.0.0"))
        packed = b"".join(socket.inet_aton(str(name, "ascii")) for name in names)
    except (OSError, ValueError, TypeError):
        raise ArgumentError("setoption: 'ip-membership' takes true or false and an IPv4 group address") from None
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP if is_on else socket.IP_DROP_MEMBERSHIP, packed)


def _flag(level: int, option: int) -> Callable[..., None]:
    def set_flag(sock: OptionSocket, is_on: bool, *_: Any) -> None:
        sock.setsockopt(level, option, int(is_on))

    return set_flag


_NODELAY = _flag(socket.IPPROTO_TCP, socket.TCP_NODELAY)
_SETTERS: dict[str, Callable[..., None]] = {
    "keepalive": _keepalive,
    "tcp-nodelay": _NODELAY,
    "nodelay": _NODELAY,
    "broadcast": _flag(socket.SOL_SOCKET, socket.SO_BROADCAST),
    "dontroute": _flag(socket.SOL_SOCKET, socket.SO_DONTROUTE),
    "ip-membership": _membership,
}


Info = tuple[int, Address]
"""Address family, and the address for `connect` or `bind`."""


def resolve(
    host: str, port: int, ipv6: bool = False, kind: int = _socket.SOCK_STREAM, literal: bool = False
) -> list[Info]:
    """Return the addresses of `host` in the order to try them; blocks the greenlet for a name.

    Args:
        host: name or address.
        port: 0 to 65535.
        ipv6: IPv6 addresses only; otherwise IPv4 comes first.
        kind: the type of socket.
        literal: accept only an IP address, so that the call never blocks.

    Raises:
        StreamError: "cannotresolve"; "cannotconnect" for an invalid port.
    """
    if not 0 <= port <= 65535:
        raise StreamError("cannotconnect", f"port {port}; a port is 0 to 65535")
    family = _socket.AF_INET6 if ipv6 else _socket.AF_UNSPEC
    found: list[Any]
    try:
        found = _socket.getaddrinfo(host.strip("[]"), port, family, kind, 0, _socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):  # not an IP address
        if literal:
            raise StreamError("cannotresolve", f"{host}: not an IP address") from None
        try:
            found = get_hub().resolver.getaddrinfo(host, port, family, kind, 0, 0)
        except (OSError, UnicodeError) as error:
            raise StreamError("cannotresolve", f"{host}: {error}") from None
    # The sort is stable: within a family the order of the resolver stays.
    return sorted(((entry[0], entry[4]) for entry in found), key=lambda info: info[0] != _socket.AF_INET)


READ_BYTES = 65536
QUEUE_BYTES = 16384
"""Default limit of a write queue."""
HANDSHAKE_S = 10.0

_buffer = bytearray(READ_BYTES)  # shared by all streams: received data is copied out before any other receive
_view = memoryview(_buffer)


class Stream:
    """A connection with a bounded write queue.

    Args:
        transport: a connected non-blocking `_socket.socket` or `TlsTransport`; closed with this object.
        data: bytes that were received before; they are read first.

    Attributes:
        queue_limit_bytes: writers wait while this many bytes are unsent.
        queued_bytes: unsent bytes.
        on_close: called once, by the greenlet that closes the stream.
    """

    __slots__ = (
        "_drained",
        "_error",
        "_input",
        "_output",
        "_unread",
        "_unsent",
        "life",
        "on_close",
        "queue_limit_bytes",
        "queued_bytes",
        "transport",
    )

    def __init__(self, transport: Transport, data: bytes = b"") -> None:
        self.transport: Any = transport
        self.life = Life.OPEN
        self.queue_limit_bytes = QUEUE_BYTES
        self.queued_bytes = 0
        self.on_close: Callable[[], None] | None = None
        self._unread = data
        self._unsent: deque[memoryview] | tuple[()] = ()
        self._input: Ready | None = Ready(transport.fileno(), READ)
        self._output: Ready | None = None
        self._drained: Signal | None = None
        self._error: StreamError | None = None

    @classmethod
    def connect(
        cls, host: str, port: int, timeout_s: float | None = None, source: str | None = None, ipv6: bool = False
    ) -> Stream:
        """Connect to the first address of `host` that accepts; blocks the greenlet.

        Args:
            host: name or address.
            port: 1 to 65535.
            timeout_s: for name look-up and all attempts; None for the timeouts of the system.
            source: local address to connect from.
            ipv6: use IPv6 only; otherwise IPv4 is tried first.

        Raises:
            StreamError: "cannotresolve", "cannotconnect", "timeout", "bind" (the source address).
        """
        late = StreamError("timeout", f"no connection to {host}:{port} within {timeout_s} s")
        failure = StreamError("cannotconnect")
        with gevent.Timeout(timeout_s, late):
            origin = resolve(source, 0, ipv6)[0] if source else None
            for family, address in resolve(host, port, ipv6):
                if origin is not None and origin[0] != family:
                    continue
                sock = _socket.socket(family, _socket.SOCK_STREAM)
                try:
                    _connect(sock, address, origin)
                except OSError as error:
                    sock.close()
                    failure = StreamError("cannotconnect", f"{address[0]} port {address[1]}: {error.strerror or error}")
                except BaseException:  # the timeout, and the end of the greenlet
                    sock.close()
                    raise
                else:
                    return cls(sock)
        raise failure

    # ---- reading

    def try_read(self, size_bytes: int = READ_BYTES) -> bytes | None:
        """Return received data, at most `size_bytes`: None when there is none yet, b"" at the end of the stream.

        Raises:
            StreamError: "socketclosed" (by this side), "socketreadfailed", "sslalertrecv", "sslcryptoerr".
        """
        transport = self._live()
        if self._unread:
            data, self._unread = self._unread[:size_bytes], self._unread[size_bytes:]
            return data
        try:  # `_view` is copied below, before another stream receives
            got = transport.recv_into(_view, min(size_bytes, READ_BYTES))
        except BlockingIOError:
            if self._has_ciphertext():  # replies of the TLS layer
                self._flush_later()
            return None
        except OSError as error:
            raise _failed("socketreadfailed", error) from None
        return _view[:got].tobytes()

    def read(self, size_bytes: int = READ_BYTES, timeout_s: float | None = None) -> bytes:
        """Return the next data, at most `size_bytes`; b"" at the end of the stream. Blocks the greenlet.

        Raises:
            StreamError: as `try_read`, and "timeout", after which the stream stays usable.
        """
        end_s = None if timeout_s is None else monotonic() + timeout_s
        Turn().yield_if_due()  # `try_read` may succeed every time, and then never switch to other greenlets
        while (data := self.try_read(size_bytes)) is None:
            block(self.readable(None if end_s is None else end_s - monotonic()))
        return data

    def unread(self, data: bytes) -> None:
        """Put `data` back in front of the unread bytes."""
        self._unread = data + self._unread

    def take_unread(self) -> bytes:
        """Remove and return the unread bytes."""
        data, self._unread = self._unread, b""
        return data

    def readable(self, timeout_s: float | None = None) -> Wait:
        """Return a wait for the next time when `try_read` may succeed.

        Raises:
            StreamError: "socketclosed".
        """
        self._live()
        assert self._input is not None
        return self._input.wait(timeout_s)

    # ---- writing

    def try_write(self, data: Buffer) -> bool:
        """Send `data`, and queue the rest that the socket does not accept, unless the queue is full.

        Returns:
            False when the queue is full; nothing is sent.

        Raises:
            StreamError: "socketclosed"; "socketwritefailed", even for data queued earlier.
        """
        if self.queued_bytes >= self.queue_limit_bytes:
            self._live()
            return False
        self._send(data)
        return True

    def push(self, data: Buffer) -> bool:
        """Send `data`, and queue the rest that the socket does not accept. Raises as `try_write`.

        Returns:
            False when the queue is over its limit: the writer should wait until the stream is `writable`.
        """
        self._send(data)
        return self.queued_bytes <= self.queue_limit_bytes

    def push_or_forget(self, data: Buffer) -> None:
        """Send or queue `data` if possible, and ignore errors."""
        try:
            self.try_write(data)
        except StreamError:
            pass  # the next read or write raises it

    def write(self, data: Buffer, timeout_s: float | None = None) -> None:
        """Send `data`; blocks the greenlet while the queue is over its limit.

        Raises:
            StreamError: as `try_write`, and "timeout". After a timeout `data` stays queued, unless the queue was full
                before.
        """
        if self.queued_bytes >= self.queue_limit_bytes:
            block(self.writable(timeout_s))
        if not self.push(data):
            block(self.writable(timeout_s))
        else:
            Turn().yield_if_due()

    def writable(self, timeout_s: float | None = None) -> Wait:
        """Return a wait until at least half of the queue is free.

        Raises:
            StreamError: "socketclosed".
        """
        self._live()
        if self._drained is None:
            self._drained = Signal()
        return self._drained.wait(timeout_s)

    def flush(self, timeout_s: float | None = None) -> None:
        """Block the greenlet until the queue is empty. Raises as `write`."""
        limit_bytes, self.queue_limit_bytes = self.queue_limit_bytes, 0  # `writable` then waits for an empty queue
        try:
            while self.queued_bytes:
                block(self.writable(timeout_s))
        finally:
            self.queue_limit_bytes = limit_bytes

    def _send(self, data: Buffer) -> None:
        transport = self._live()
        if self._error is not None:
            raise self._error
        sent = 0
        if not self._unsent:
            try:
                sent = transport.send(data)
            except BlockingIOError:
                pass  # queued
            except OSError as error:
                raise self._broken(error) from None
        if sent < len(data):
            if not self._unsent:
                self._unsent = deque()  # created at first use: an empty deque takes 600 bytes
            self._unsent.append(memoryview(bytes(data[sent:])))
            self.queued_bytes += len(data) - sent
        if self._unsent or self._has_ciphertext():
            self._flush_later()

    def _output_ready(self) -> Ready:
        if self._output is None:
            self._output = Ready(self.transport.fileno(), WRITE)
        return self._output

    def _flush_later(self) -> None:
        if self.life is Life.OPEN:
            self.life = transition(self.life, Life.BLOCKED)
        output = self._output_ready()
        if not len(output):
            output.wait().then(self._flush)

    def _flush(self, _value: None, error: BaseException | None) -> None:
        if error is not None or self.transport is None:
            return
        try:
            if not self._unsent:
                self.transport.flush()
            unsent = self._unsent
            while type(unsent) is deque and unsent:
                data = unsent[0]
                sent = self.transport.send(data)
                self.queued_bytes -= sent
                if sent < len(data):
                    unsent[0] = data[sent:]
                    break
                unsent.popleft()
        except BlockingIOError:
            pass  # continued when the socket is writable
        except OSError as failure:
            self._broken(failure)
            return
        if self._unsent or self._has_ciphertext():
            self._flush_later()
        else:
            self.life = transition(self.life, Life.OPEN)
        if self._drained is not None and self.queued_bytes <= self.queue_limit_bytes // 2:
            self._drained.fire()

    def _has_ciphertext(self) -> bool:
        return type(self.transport) is TlsTransport and self.transport.wants_write

    def _broken(self, error: OSError) -> StreamError:
        self._error = _failed("socketwritefailed", error)
        self._unsent = ()
        self.queued_bytes = 0
        if self._drained is not None:
            self._drained.fail(self._error)
        return self._error

    # ---- TLS

    def starttls(
        self,
        context: ssl.SSLContext,
        server_hostname: str | None = None,
        alpn: list[str] | None = None,
        server_side: bool = False,
        timeout_s: float = HANDSHAKE_S,
    ) -> None:
        """Switch to TLS; blocks the greenlet until the handshake is finished. A failure closes the stream.

        Args:
            context: the TLS context.
            server_hostname: the server name to send (SNI).
            alpn: the protocols to offer, the preferred first.
            server_side: whether to be the TLS server.
            timeout_s: for the handshake.

        Raises:
            StreamError: "sslhandshake", "sslnottrusted" (a context that verifies), "timeout", "socketclosed".
        """
        if self.queued_bytes:
            block(self.writable(timeout_s))
        if alpn:
            context.set_alpn_protocols(alpn)  # the connection copies them, so that a shared context can be changed
        transport = TlsTransport(self._live(), context, server_side, server_hostname)
        transport.feed(self._unread)  # the peer may have sent its first handshake message already
        self.transport, self._unread = transport, b""
        assert self._input is not None
        end_s = monotonic() + timeout_s
        try:
            while True:
                try:
                    transport.handshake()
                    return
                except BlockingIOError:
                    pass
                except ssl.SSLCertVerificationError as error:
                    raise StreamError("sslnottrusted", error.verify_message) from None
                except OSError as error:
                    raise StreamError("sslhandshake", str(error)) from None
                if monotonic() >= end_s:  # `wait` never times out when the peer sends without pause
                    raise StreamError("timeout", "the TLS handshake took too long")
                ready = self._output_ready() if transport.wants_write else self._input
                block(ready.wait(end_s - monotonic()))
        except BaseException:
            self.close()
            raise

    @property
    def tls(self) -> TlsTransport | None:
        """The TLS transport, for certificate, cipher and ALPN; None without TLS."""
        return self.transport if type(self.transport) is TlsTransport else None

    # ---- the connection

    @property
    def closed(self) -> bool:
        """Whether this side has closed the stream."""
        return self.life.over

    def peername(self) -> tuple[str, int]:
        """Return address and port of the peer.

        Raises:
            StreamError: "socketclosed".
        """
        return _address_from(self._live().getpeername)

    def sockname(self) -> tuple[str, int]:
        """Return the local address and port. Raises as `peername`."""
        return _address_from(self._live().getsockname)

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """Set an option of the socket. Raises OSError, and as `peername`."""
        self._live().setsockopt(level, option, value)

    def release(self) -> tuple[Transport, bytes]:
        """Return the transport and the unread bytes, and close this object without them.

        Raises:
            StreamError: "socketclosed", or "incorrectuse" when unsent bytes are queued.
        """
        if self._unsent:
            raise StreamError("incorrectuse", "the stream has unsent data")
        transport, data = self._live(), self._unread
        self._detach("incorrectuse", Life.CLOSED)
        return transport, data

    def close(self, graceful: bool = False) -> bool:
        """Close; return False when it was closed before. Waiting calls of other greenlets raise "socketclosed".

        Queued data is still sent, in the background.

        Args:
            graceful: wait, in the background, until the peer closes too, so that it receives everything.
        """
        if self.life.over:
            return False
        transport, unsent = self.transport, tuple(self._unsent)
        is_graceful = self._error is None and (graceful or bool(unsent) or self._has_ciphertext())
        self._detach("socketclosed", Life.DRAINING if is_graceful else Life.CLOSED)
        if is_graceful:
            send_and_close(self, transport, unsent)
        else:
            transport.close()
        if self.on_close is not None:
            self.on_close()
        return True

    def _detach(self, word: str, to: Life) -> None:
        self.life = transition(self.life, to)
        error = StreamError(word)
        for ready in (self._input, self._output):
            if ready is not None:
                ready.close(error)
        if self._drained is not None:
            self._drained.fail(error)
        self.transport = self._input = self._output = None
        self._unsent = ()
        self._unread, self.queued_bytes = b"", 0

    def _live(self) -> Any:
        if self.transport is None:
            raise StreamError("socketclosed")
        return self.transport


def _connect(sock: _socket.socket, address: Address, source: Info | None) -> None:
    sock.setblocking(False)
    sock.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
    if source is not None:
        try:
            sock.bind(source[1])
        except OSError as error:
            raise StreamError("bind", f"{source[1][0]}: {error.strerror}") from None
    try:
        sock.connect(address)
        return
    except BlockingIOError:
        pass  # in progress
    ready = Ready(sock.fileno(), WRITE)
    try:
        block(ready.wait())
    finally:
        ready.close(StreamError("socketclosed"))
    number = sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_ERROR)
    if number:
        raise OSError(number, os.strerror(number))


def _address_from(get_name: Callable[[], Address]) -> tuple[str, int]:
    try:
        host, port = get_name()[:2]
    except OSError as error:
        raise _failed("socketclosed", error) from None
    return host, port


def _failed(word: str, error: OSError) -> StreamError:
    if isinstance(error, ssl.SSLError):
        word = "sslalertrecv" if "ALERT" in (error.reason or "") else "sslcryptoerr"
    return StreamError(word, error.strerror or str(error))


# ---- UDP sockets

MAX_BYTES = 65535


class Datagram:
    """A UDP socket, bound, connected, both or neither.

    Args:
        local_port: port to bind; with None the system chooses one at the first send.
        host: local address to bind.
        peer: the only peer, an element of `smqrt.transport.stream.resolve`.
        ipv6: the family of a socket without `peer`.

    Raises:
        StreamError: "bind", "cannotconnect".
    """

    def __init__(
        self,
        local_port: int | None = None,
        host: str | None = None,
        peer: Info | None = None,
        ipv6: bool = False,
    ) -> None:
        family = peer[0] if peer else (_socket.AF_INET6 if ipv6 else _socket.AF_INET)
        self.family = family
        self._socket: _socket.socket | None = _socket.socket(family, _socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        try:
            if local_port is not None or host:
                if local_port and worker_place().count > 1:  # every worker opens this port
                    self._socket.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEPORT, 1)
                try:
                    self._socket.bind((host or ("::" if family == _socket.AF_INET6 else ""), local_port or 0))
                except (OSError, OverflowError) as error:
                    raise StreamError("bind", str(error)) from None
            if peer:
                try:
                    self._socket.connect(peer[1])
                except OSError as error:
                    raise StreamError("cannotconnect", str(error)) from None
        except BaseException:
            self._socket.close()
            raise
        self._input = Ready(self._socket.fileno(), READ)

    @property
    def is_ipv6(self) -> bool:
        """Whether it uses IPv6."""
        return self.family == _socket.AF_INET6

    def try_receive(self) -> tuple[bytes, tuple[str, int]] | None:
        """Return a datagram and its sender's address, or None when there is none.

        Raises:
            StreamError: "socketclosed" (by this side), "socketreadfailed" (the connected port is closed).
        """
        try:
            data, address = self._live().recvfrom(MAX_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            raise StreamError("socketreadfailed", error.strerror or "") from None
        return data, address[:2]

    def readable(self, timeout_s: float | None = None) -> Wait:
        """Return a wait for the next time when `try_receive` may succeed.

        Raises:
            StreamError: "socketclosed".
        """
        self._live()
        return self._input.wait(timeout_s)

    def send(self, data: Buffer, address: tuple[str | int, ...] | None = None) -> bool:
        """Send a datagram to `address`, or to the connected peer. Return False when the system has dropped it.

        Raises:
            StreamError: "socketclosed", "socketwritefailed".
        """
        sock = self._live()
        try:
            if address is None:
                sock.send(data)
            else:
                sock.sendto(data, address)
        except BlockingIOError:
            return False
        except OSError as error:
            raise StreamError("socketwritefailed", error.strerror or "") from None
        return True

    def peername(self) -> tuple[str, int]:
        """Return address and port of the peer.

        Raises:
            StreamError: "socketclosed"; "invalidsocketcon" without a peer.
        """
        try:
            host, port = self._live().getpeername()[:2]
        except OSError:
            raise StreamError("invalidsocketcon") from None
        return host, port

    def sockname(self) -> tuple[str, int]:
        """Return the local address and port. Raises as `peername`."""
        host, port = self._live().getsockname()[:2]
        return host, port

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """Set an option of the socket. Raises OSError, and as `peername`."""
        self._live().setsockopt(level, option, value)

    def close(self) -> bool:
        """Close; waiting calls raise "socketclosed". Return False when it was closed before."""
        sock, self._socket = self._socket, None
        if sock is None:
            return False
        self._input.close(StreamError("socketclosed"))
        sock.close()
        return True

    def _live(self) -> _socket.socket:
        if self._socket is None:
            raise StreamError("socketclosed")
        return self._socket

"""A TCP or TLS connection for code that runs in greenlets, or that can't even afford a greenlet while it waits.

`read` and `write` block the calling greenlet only. `try_read`, `try_write` and the `Wait`s of `readable` and `writable`
are the same without blocking: callable from the Hub greenlet and from inside Lua.
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
from smqrt.loop.readiness import READ, WRITE, Ready, Signal, Wait, block
from smqrt.loop.scheduling import Turn
from smqrt.transport.graceful_close import send_and_close
from smqrt.transport.tls import Buffer, TlsTransport, Transport
from smqrt.wire.connection_state import Life, moved

# ---- Options of sockets by the names of `sock:setoption` (spec: bas-api §8.2).


class OptionSocket(Protocol):
    """A socket whose options can be set."""

    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> object:
        """Set an option."""


def set_option(sock: OptionSocket, name: str, *values: object) -> None:
    """Set an option of a socket.

    Args:
        sock: the socket.
        name: a name of `_SETTERS`.
        values: true or false, then what the option takes besides.

    Raises:
        ArgumentError: there is no option of that name, or a value is wrong.
        OSError: the system refuses it.
    """
    setter = _SETTERS.get(name)
    if setter is None:
        raise ArgumentError(f"setoption: unknown option '{name}'; there are {', '.join(_SETTERS)}")
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


Info = tuple[int, Any]
"""Address family and what `connect` or `bind` takes."""


def resolve(
    host: str, port: int, ipv6: bool = False, kind: int = _socket.SOCK_STREAM, literal: bool = False
) -> list[Info]:
    """The addresses of `host`, those to try first in front; blocks the greenlet for a name.

    ipv6: IPv6 addresses only; otherwise IPv4 comes first.
    literal: `host` is an IP address; then this never blocks.

    Raises:
        StreamError: "cannotresolve"; "cannotconnect" for a port that is none.
    """
    if not 0 <= port <= 65535:
        raise StreamError("cannotconnect", f"port {port}; a port is 0 to 65535")
    family = _socket.AF_INET6 if ipv6 else _socket.AF_UNSPEC
    found = _literal(host, port, family, kind)
    if literal and not found:
        raise StreamError("cannotresolve", f"{host}: no IP address")
    found = found or _looked_up(host, port, family, kind)
    return sorted(((entry[0], entry[4]) for entry in found), key=lambda info: info[0] != _socket.AF_INET)


def _literal(host: str, port: int, family: int, kind: int) -> list[Any]:
    try:
        return _socket.getaddrinfo(host.strip("[]"), port, family, kind, 0, _socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return []


def _looked_up(host: str, port: int, family: int, kind: int) -> list[Any]:
    try:
        found: list[Any] = get_hub().resolver.getaddrinfo(host, port, family, kind, 0, 0)
    except (OSError, UnicodeError) as error:
        raise StreamError("cannotresolve", f"{host}: {error}") from None
    return found


READ_BYTES = 65536
QUEUE_BYTES = 16384
HANDSHAKE_S = 10.0

_buffer = bytearray(READ_BYTES)  # shared: what is received is copied out before anything else can receive
_view = memoryview(_buffer)


class Stream:
    """One connection.

    Args:
        transport: connected non-blocking `_socket.socket` or `TlsTransport`; closed with this object.
        data: bytes that were received already, read first.

    Attributes:
        queue_limit_bytes: from so many unsent bytes on, writers have to wait.
        queued_bytes: unsent bytes.
        on_close: called once when the stream is closed, from whatever greenlet closes it.
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
        """Connect to the first address of `host` that answers; blocks the greenlet.

        Args:
            host: name or address.
            timeout_s: for all of it, the look-up of the name included; None waits as long as the system does.
            source: local address to connect from.
            ipv6: use IPv6 only; otherwise IPv4 is tried first.

        Raises:
            StreamError: "cannotresolve", "cannotconnect", "timeout", "bind" (the source address).
        """
        late = StreamError("timeout", f"no connection to {host}:{port} within {timeout_s} s")
        with gevent.Timeout(timeout_s, late):
            origin = resolve(source, 0, ipv6)[0] if source else None
            return cls(_connected(resolve(host, port, ipv6), origin))

    # ---- reading

    def try_read(self, size_bytes: int = READ_BYTES) -> bytes | None:
        """What has arrived, at most `size_bytes`: None when there is nothing now, b"" at the end of the stream.

        Raises:
            StreamError: "socketclosed" (here), "socketreadfailed", "sslalertrecv", "sslcryptoerr".
        """
        transport = self._live()
        if self._unread:
            data, self._unread = self._unread[:size_bytes], self._unread[size_bytes:]
            return data
        try:
            got = transport.recv_into(_view, min(size_bytes, READ_BYTES))
        except BlockingIOError:
            self._flush_answers()
            return None
        except OSError as error:
            raise _failed("socketreadfailed", error) from None
        return _view[:got].tobytes()

    def read(self, size_bytes: int = READ_BYTES, timeout_s: float | None = None) -> bytes:
        """What arrives next, at most `size_bytes`; b"" at the end of the stream. Blocks the greenlet.

        Raises:
            StreamError: as `try_read`, and "timeout"; the stream stays usable then.
        """
        end_s = None if timeout_s is None else monotonic() + timeout_s
        Turn().yield_if_due()  # who always finds something lets the others run
        while (data := self.try_read(size_bytes)) is None:
            block(self.readable(None if end_s is None else end_s - monotonic()))
        return data

    def unread(self, data: bytes) -> None:
        """Put `data` back: it is read next."""
        self._unread = data + self._unread

    def take_unread(self) -> bytes:
        """Take what was received already and is not read yet."""
        data, self._unread = self._unread, b""
        return data

    def readable(self, timeout_s: float | None = None) -> Wait:
        """Wait until `try_read` is worth another try.

        Raises:
            StreamError: "socketclosed".
        """
        self._live()
        assert self._input is not None
        return self._input.wait(timeout_s)

    # ---- writing

    def try_write(self, data: Buffer) -> bool:
        """Send `data`, or queue what the socket doesn't take; false, and nothing is taken, when the queue is full.

        Raises:
            StreamError: "socketclosed", or "socketwritefailed" for what was queued before as well.
        """
        if self.queued_bytes >= self.queue_limit_bytes:
            self._live()
            return False
        self._send(data)
        return True

    def push(self, data: Buffer) -> bool:
        """Send `data`, or queue what the socket doesn't take; false when the queue is over its limit now, so that the
        writer should wait until it is `writable`. Raises as `try_write`.
        """
        self._send(data)
        return self.queued_bytes <= self.queue_limit_bytes

    def push_or_forget(self, data: Buffer) -> None:
        """Send `data` if the connection is able to: for what nobody waits for."""
        try:
            self.try_write(data)
        except StreamError:
            pass  # the next read or write tells

    def write(self, data: Buffer, timeout_s: float | None = None) -> None:
        """Send all of `data`; blocks the greenlet until no more than the limit of the queue is left of it.

        Raises:
            StreamError: as `try_write`, and "timeout" when it was not taken in that time (it stays queued, unless the
                queue was full before).
        """
        if self.queued_bytes >= self.queue_limit_bytes:
            block(self.writable(timeout_s))
        if not self.push(data):
            block(self.writable(timeout_s))
        else:
            Turn().yield_if_due()

    def writable(self, timeout_s: float | None = None) -> Wait:
        """Wait until half of the queue is free.

        Raises:
            StreamError: "socketclosed".
        """
        self._live()
        if self._drained is None:
            self._drained = Signal()
        return self._drained.wait(timeout_s)

    def flush(self, timeout_s: float | None = None) -> None:
        """Block the greenlet until all that is queued is sent. Raises as `write`."""
        limit_bytes, self.queue_limit_bytes = self.queue_limit_bytes, 0
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
                self._unsent = deque()  # not before: an empty one takes 600 bytes
            self._unsent.append(memoryview(bytes(data[sent:])))
            self.queued_bytes += len(data) - sent
        if self._unsent or self._has_ciphertext():
            self._flush_later()

    def _writing(self) -> Ready:
        if self._output is None:
            self._output = Ready(self.transport.fileno(), WRITE)
        return self._output

    def _flush_later(self) -> None:
        if self.life is Life.OPEN:
            self.life = moved(self.life, Life.BLOCKED)
        output = self._writing()
        if not len(output):
            output.wait().then(self._flush)

    def _flush(self, _value: None, error: BaseException | None) -> None:
        if error is not None or self.transport is None:
            return
        try:
            self._send_unsent()
        except BlockingIOError:
            pass  # the next time it is writable
        except OSError as failure:
            self._broken(failure)
            return
        if self._unsent or self._has_ciphertext():
            self._flush_later()
        else:
            self.life = moved(self.life, Life.OPEN)
        if self._drained is not None and self.queued_bytes <= self.queue_limit_bytes // 2:
            self._drained.fire()

    def _send_unsent(self) -> None:
        if not self._unsent:
            self.transport.flush()
        unsent = self._unsent
        while type(unsent) is deque and unsent:
            data = unsent[0]
            sent = self.transport.send(data)
            self.queued_bytes -= sent
            if sent < len(data):
                unsent[0] = data[sent:]
                return
            unsent.popleft()

    def _has_ciphertext(self) -> bool:
        return type(self.transport) is TlsTransport and self.transport.wants_write

    def _flush_answers(self) -> None:
        if self._has_ciphertext():  # TLS answers the other side's messages by itself
            self._flush_later()

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
        """Go on in TLS; blocks the greenlet until the handshake is done. The stream is closed when it fails.

        Args:
            server_hostname: the name to ask for (SNI).
            alpn: the protocols to offer, the best first.

        Raises:
            StreamError: "sslhandshake", "sslnottrusted" (a context that verifies), "timeout", "socketclosed".
        """
        if self.queued_bytes:
            block(self.writable(timeout_s))
        if alpn:
            context.set_alpn_protocols(alpn)  # the connection made next takes a copy
        transport = TlsTransport(self._live(), context, server_side, server_hostname)
        transport.feed(self._unread)
        self.transport, self._unread = transport, b""
        try:
            self._handshake(transport, monotonic() + timeout_s)
        except BaseException:
            self.close()
            raise

    def _handshake(self, transport: TlsTransport, end_s: float) -> None:
        assert self._input is not None
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
            if monotonic() >= end_s:  # who never stops sending never has us wait
                raise StreamError("timeout", "the TLS handshake took too long")
            ready = self._writing() if transport.wants_write else self._input
            block(ready.wait(end_s - monotonic()))

    @property
    def tls(self) -> TlsTransport | None:
        """The TLS layer, for certificate, cipher, ALPN; None without TLS."""
        return self.transport if type(self.transport) is TlsTransport else None

    # ---- the connection

    @property
    def closed(self) -> bool:
        """Whether it was closed on this side."""
        return self.life.over

    def peername(self) -> tuple[str, int]:
        """Address and port of the other side.

        Raises:
            StreamError: "socketclosed".
        """
        return self._name(self._live().getpeername)

    def sockname(self) -> tuple[str, int]:
        """Address and port of this side. Raises as `peername`."""
        return self._name(self._live().getsockname)

    def _name(self, ask: Callable[[], Any]) -> tuple[str, int]:
        try:
            host, port = ask()[:2]
        except OSError as error:
            raise _failed("socketclosed", error) from None
        return host, port

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """Set an option of the socket. Raises OSError, and as `peername`."""
        self._live().setsockopt(level, option, value)

    def release(self) -> tuple[Transport, bytes]:
        """Give the transport and the bytes not yet read away; this object is closed then.

        Raises:
            StreamError: "socketclosed", or "incorrectuse" when unsent bytes are queued.
        """
        if self._unsent:
            raise StreamError("incorrectuse", "the stream has unsent data")
        transport, data = self._live(), self._unread
        self._detach("incorrectuse", Life.CLOSED)
        return transport, data

    def close(self, graceful: bool = False) -> bool:
        """Close; false when it was closed before. Callable from any greenlet: who reads or writes gets "socketclosed".

        What is queued is still sent, in the background.

        Args:
            graceful: wait, in the background, until the other side closes too, so that it surely gets all.
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
        self.life = moved(self.life, to)
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


def _connected(addresses: list[Info], source: Info | None) -> _socket.socket:
    failure = StreamError("cannotconnect")
    for family, address in addresses:
        if source is not None and source[0] != family:
            continue
        sock = _socket.socket(family, _socket.SOCK_STREAM)
        try:
            _connect(sock, address, source)
            return sock
        except OSError as error:
            sock.close()
            failure = StreamError("cannotconnect", f"{address[0]} port {address[1]}: {error.strerror or error}")
        except BaseException:
            sock.close()
            raise
    raise failure


def _connect(sock: _socket.socket, address: Any, source: Info | None) -> None:
    sock.setblocking(False)
    sock.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
    if source is not None:
        try:
            sock.bind(source[1])
        except OSError as error:
            raise StreamError("bind", f"{source[1][0]}: {error.strerror}") from None
    try:
        sock.connect(address)
    except BlockingIOError:
        _await_connection(sock)


def _await_connection(sock: _socket.socket) -> None:
    ready = Ready(sock.fileno(), WRITE)
    try:
        block(ready.wait())
    finally:
        ready.close(StreamError("socketclosed"))
    number = sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_ERROR)
    if number:
        raise OSError(number, os.strerror(number))


def _failed(word: str, error: OSError) -> StreamError:
    if isinstance(error, ssl.SSLError):
        word = "sslalertrecv" if "ALERT" in (error.reason or "") else "sslcryptoerr"
    return StreamError(word, error.strerror or str(error))

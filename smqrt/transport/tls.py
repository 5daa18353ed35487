"""Non-blocking TLS transports, handshakes and graceful close.

All data passes through `ssl.MemoryBIO`, so no call blocks, and monkey patching has no effect.
"""

from __future__ import annotations

import _socket
import logging
import ssl
from collections import Counter
from collections.abc import Callable, Iterable
from fcntl import ioctl
from socket import SHUT_WR
from termios import TIOCOUTQ
from time import monotonic, time
from typing import Any, Protocol

from gevent import get_hub

from smqrt.loop.scheduling import NEVER, READ, WRITE, Deadlines, Watcher, share
from smqrt.settings.limits import Limit, LineLimit
from smqrt.transport.peer_certificates import peer_chain
from smqrt.wire.connection_state import Life, transition

log = logging.getLogger("smqrt")

HANDSHAKE_S = 5.0
ACME_PROTOCOL = "acme-tls/1"
"""The ALPN protocol by which an ACME authority verifies a name; no data follows the handshake (RFC 8737)."""
_READ_BYTES = 16384  # at most 600 key updates, which take 7 to 30 ms
_FEW_BYTES = 4096  # read at the beginning of a connection, and after a read that took long and had no data
_LONG_S = 0.002
_BULK_READ_BYTES, _BULK_RECORD_BYTES = 32768, 8192  # after a large record, reads are larger
_MAX_REPLY_BYTES = 65536  # unread replies of the TLS layer (key updates, alerts) after which a connection fails
_RECORD_BYTES = 16384  # the largest plaintext of a TLS record
_PORTION_BYTES = 65536  # encrypted ahead of a full socket, per connection: small, because ciphertext is never shared
_READ, _WRITE = 1, 2  # events of libev

Buffer = bytes | bytearray | memoryview
Address = tuple[Any, ...]
"""A socket address as `accept` returns it: host and port first."""


class TlsSession:
    """Properties that the handshake of a TLS connection has negotiated."""

    __slots__ = ("_ssl",)
    _ssl: ssl.SSLObject

    def peer_certificate(self) -> bytes | None:
        """Return the peer's certificate in DER; None when it sent none."""
        return self._ssl.getpeercert(binary_form=True)

    def peer_chain(self) -> list[bytes]:
        """Return the certificates that the peer sent, in DER, its own first."""
        return peer_chain(self._ssl)

    def resumed(self) -> bool:
        """Return whether the handshake resumed the session of an earlier connection."""
        return bool(self._ssl.session_reused)

    def cipher(self) -> tuple[str, str, int] | None:
        """Return name, protocol and bits of the cipher."""
        return self._ssl.cipher()

    @property
    def ssl_object(self) -> ssl.SSLObject:
        """The connection's object of the standard library."""
        return self._ssl

    def alpn(self) -> str | None:
        """Return the protocol negotiated by ALPN."""
        return self._ssl.selected_alpn_protocol()

    def version(self) -> str | None:
        """Return the TLS version, such as "TLSv1.3"."""
        return self._ssl.version()


class TlsTransport(TlsSession):
    """A TLS connection with the methods of a non-blocking socket that the data path uses.

    Each `send` creates separate records. A call that would block raises `BlockingIOError`.

    Args:
        sock: connected and non-blocking; closed with this object.
        context: the context of a server, or of a client when `server_side` is false.
        server_hostname: the server name that a client sends.
    """

    __slots__ = ("_incoming", "_outgoing", "_read_bytes", "_sock", "_unread_reply_bytes", "_unsent")

    def __init__(
        self,
        sock: _socket.socket,
        context: ssl.SSLContext,
        server_side: bool = True,
        server_hostname: str | None = None,
    ) -> None:
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._incoming, self._outgoing, server_side, server_hostname)
        self._unsent = b""
        self._read_bytes = _FEW_BYTES
        self._unread_reply_bytes = 0

    def handshake(self) -> None:
        """Continue the handshake; receive at most once.

        Raises:
            BlockingIOError: not finished. Wait for the socket to become writable if `wants_write`, else readable.
            OSError: it failed (`ssl.SSLError` among others).
        """
        if not self._advance_handshake():
            self._receive()
            if not self._advance_handshake():
                raise BlockingIOError("the TLS handshake is not finished")

    def _advance_handshake(self) -> bool:
        """Continue with the received data; return whether the handshake is finished."""
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            self.flush()
            return False
        except ssl.SSLError:
            self._send_alert()
            raise
        self.flush()
        return True

    def feed(self, data: bytes) -> None:
        """Accept ciphertext that was received before the handshake."""
        self._incoming.write(data)

    def recv_into(self, buffer: bytearray | memoryview, size_bytes: int = 0) -> int:
        """Decrypt into `buffer`, at most `size_bytes` (0: its length); return 0 at the end of the stream.

        Receives at most once, so that an endless series of key updates does not block the caller.

        Raises:
            BlockingIOError: no application data has arrived.
            OSError: the connection is broken; `ssl.SSLError` also when the peer does not read replies of the TLS layer.
        """
        try:
            try:
                return self._ssl.read(size_bytes or len(buffer), buffer)  # type: ignore[return-value]
            except ssl.SSLWantReadError:
                self._receive()
            began_s = monotonic()
            size: int = self._ssl.read(size_bytes or len(buffer), buffer)  # type: ignore[assignment]
        except ssl.SSLWantReadError:
            self._read_bytes = _READ_BYTES if monotonic() - began_s < _LONG_S else _FEW_BYTES
            raise BlockingIOError("no application data, or only part of a record") from None
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return 0
        self._read_bytes = _BULK_READ_BYTES if size >= _BULK_RECORD_BYTES else _READ_BYTES
        return size

    def send(self, data: Buffer) -> int:
        """Encrypt and send as much of `data` as the socket accepts; return the number of encrypted bytes.

        At most `_PORTION_BYTES` of these are not sent but queued as ciphertext (see `wants_write`).

        Raises:
            BlockingIOError: earlier ciphertext is still queued; nothing was encrypted.
        """
        self.flush()
        view = memoryview(data)
        taken = 0
        while taken < len(view) and not self._unsent:
            portion = view[taken : taken + _PORTION_BYTES]
            records = []
            while portion:
                written = self._ssl.write(portion[:_RECORD_BYTES])
                records.append(self._outgoing.read())  # each record: a memory BIO never frees space
                portion, taken = portion[written:], taken + written
            if len(records) == 1:
                self._send(records[0])
                continue
            try:
                sent = self._sock.sendmsg(records)
            except BlockingIOError:
                sent = 0
            if sent < sum(map(len, records)):
                self._unsent = b"".join(records)[sent:]
        return taken

    def sendmsg(self, buffers: Iterable[Buffer]) -> int:
        """Send the buffers as one `send`."""
        return self.send(b"".join(buffers))

    def flush(self) -> None:
        """Send queued ciphertext.

        Raises:
            BlockingIOError: some is still queued.
        """
        self._send_queued()
        if self._unsent:
            raise BlockingIOError("ciphertext is queued until the socket is writable")

    @property
    def wants_write(self) -> bool:
        """Whether ciphertext is queued until the socket is writable."""
        return bool(self._unsent or self._outgoing.pending)

    @property
    def has_pending(self) -> bool:
        """Whether received bytes are buffered. Read again: the socket does not become readable for them."""
        return self._ssl.pending() > 0 or self._incoming.pending > 0

    def fileno(self) -> int:
        """Return the socket's file descriptor, -1 when closed."""
        return self._sock.fileno()

    @property
    def family(self) -> int:
        """The address family of the socket."""
        return self._sock.family

    @property
    def peer_host(self) -> str | None:
        """The peer's address, even after it has disconnected; None when unknown."""
        return getattr(self._sock, "peer_host", None)

    def getpeername(self) -> Address:
        """Return the peer's address."""
        address: Address = self._sock.getpeername()
        return address

    def getsockname(self) -> Address:
        """Return the local address."""
        address: Address = self._sock.getsockname()
        return address

    def count_for(self, host: str) -> bool:
        """See `smqrt.transport.admission.Admitted`; true for other sockets, which are not counted."""
        count_for = getattr(self._sock, "count_for", None)
        return count_for is None or count_for(host)

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """Set an option of the socket."""
        self._sock.setsockopt(level, option, value)

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """Return an option of the socket."""
        return self._sock.getsockopt(level, option, size)

    def shutdown(self, how: int) -> None:
        """Send close_notify (unless `how` is 0, reading only), then shut the socket down."""
        if how:
            self._send_close_notify()
        self._sock.shutdown(how)

    def close(self) -> None:
        """Send close_notify if the socket accepts it, and close the socket."""
        if self._sock.fileno() >= 0:
            self._send_close_notify()
            self._sock.close()

    def _send_close_notify(self) -> None:
        try:
            self._ssl.unwrap()
        except (OSError, ValueError):
            pass  # unwrap waits for the peer's close_notify; this side does not
        self._send_alert()

    def _send_alert(self) -> None:
        try:
            self._send_queued()
        except OSError:
            pass  # the peer has disconnected

    def _send_queued(self) -> None:
        if self._outgoing.pending:
            self._unsent += self._outgoing.read()
        if self._unsent:
            self._send(self._unsent)

    def _send(self, ciphertext: bytes) -> None:
        try:
            sent = self._sock.send(ciphertext)
        except BlockingIOError:
            sent = 0
        self._unsent = ciphertext[sent:]

    def _receive(self) -> None:
        if self._outgoing.pending:  # replies of the TLS layer, such as key updates
            self._unread_reply_bytes += self._outgoing.pending
            self._send_queued()
            if not self._unsent:
                self._unread_reply_bytes = 0
            elif self._unread_reply_bytes > _MAX_REPLY_BYTES:
                raise ssl.SSLError("the peer requests TLS replies and does not read them")
        data = self._sock.recv(self._read_bytes)
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()


class ClientSocket(Protocol):
    """The methods that a connection uses of its non-blocking socket."""

    def recv_into(self, buffer: memoryview, size_bytes: int, /) -> int:
        """Receive; return 0 at the end of the stream. Raises BlockingIOError and OSError, as the others do."""

    def send(self, data: Buffer, /) -> int:
        """Send as much as the socket accepts; return the number of sent bytes."""

    def sendmsg(self, buffers: list[bytes], /) -> int:
        """Send as much of all buffers as the socket accepts, in one system call; return the number of sent bytes."""

    def close(self) -> None:
        """Close the socket."""


Transport = _socket.socket | TlsTransport
"""A non-blocking transport, with or without TLS."""


_HANDSHAKE_TIME = Limit("tls_handshake", "tls.handshake_s", "a TLS handshake was not finished in time")
_REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": ("no client certificate", "client_certificate"),
    "UNSUPPORTED_PROTOCOL": ("the client's TLS versions are too old", "minimum_version"),
    "VERSION_TOO_LOW": ("the client's TLS versions are too old", "minimum_version"),
    "NO_SHARED_CIPHER": ("the client supports none of the server's ciphers and certificate types", ""),
    "HTTP_REQUEST": ("the client sent HTTP without TLS to a TLS port", ""),
    "WRONG_VERSION_NUMBER": ("the client did not send TLS", ""),
}
"""OpenSSL's reasons: message, and the setting that causes it."""
_DISTRUST_ALERTS = (
    "UNKNOWN_CA",
    "BAD_CERTIFICATE",
    "CERTIFICATE_UNKNOWN",
    "CERTIFICATE_EXPIRED",
    "UNSUPPORTED_CERTIFICATE",
)
_ALERT = "_ALERT_"


def handshake_failure(error: OSError) -> tuple[str, str | None]:
    """Return the reason of a failed handshake, and the setting that causes it.

    The setting is empty without one; None means that the failure is not logged.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        is_revocation = "CRL" in error.verify_message or "revoked" in error.verify_message
        return f"client certificate: {error.verify_message}", "client_crl" if is_revocation else "client_ca"
    reason = getattr(error, "reason", None)
    if not isinstance(error, ssl.SSLError) or not reason or "EOF" in reason:
        return "the client disconnected", None
    if reason in _REASONS:
        return _REASONS[reason]
    if _ALERT in reason:
        alert = reason.partition(_ALERT)[2]
        text = alert.lower().replace("_", " ")
        if alert in _DISTRUST_ALERTS:
            return f"the client does not trust the server's certificate: {text}", ""
        return f"the client sent the alert: {text}", None
    return reason.lower().replace("_", " "), None


class HandshakeQueue:
    """Unfinished TLS handshakes of accepted connections. Each has a watcher and a deadline, but no greenlet.

    Args:
        context: the TLS context of the server.
        on_ready: called with the `TlsTransport` and the address after the handshake.
        timeout_s: an unfinished handshake is closed after this time.

    Attributes:
        max_unfinished: the maximum of unfinished handshakes; a new one closes the oldest. 0 for no limit.
        succeeded, failed, resumed: number of handshakes that succeeded, failed, and resumed an earlier session.
        failures: failed handshakes by reason.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        on_ready: Callable[[TlsTransport, Address], None],
        timeout_s: float = HANDSHAKE_S,
    ) -> None:
        self.succeeded = self.failed = self.resumed = 0
        self.failures: Counter[str] = Counter()
        self._lines = LineLimit()
        self.context = context
        self.on_ready = on_ready
        self.timeout_s, self.max_unfinished = timeout_s, 0
        self.deadlines: Deadlines[_Handshake] = Deadlines(min(0.25, timeout_s / 4))  # precise enough for short timeouts
        self.share = share()
        self._open: dict[_Handshake, None] = {}

    def begin(self, sock: _socket.socket, address: Address) -> None:
        """Start the handshake of an accepted socket."""
        if self.max_unfinished and len(self._open) >= self.max_unfinished:
            next(iter(self._open)).displace()
        handshake = _Handshake(self, TlsTransport(sock, self.context), address)
        self._open[handshake] = None
        self.deadlines.watch(handshake)
        handshake.step()

    def finished(self, handshake: _Handshake) -> None:
        """Forget a handshake that has ended."""
        self._open.pop(handshake, None)
        self.deadlines.forget(handshake)

    def complete(self, transport: TlsTransport, address: Address) -> None:
        """Pass on a connection after its handshake."""
        is_resumed = transport.resumed()
        if is_resumed:  # OpenSSL does not check the expiry of the peer's certificate then
            try:
                not_after = (transport.ssl_object.getpeercert() or {}).get("notAfter")
                has_expired = not_after is not None and ssl.cert_time_to_seconds(str(not_after)) < time()
            except (ValueError, ssl.SSLError):  # an unreadable certificate
                has_expired = True
            if has_expired:
                transport.close()
                error = ssl.SSLCertVerificationError("certificate has expired")
                error.verify_message = "certificate has expired"
                self.count_failure(error, address)
                return
        self.succeeded += 1
        self.resumed += is_resumed
        if transport.alpn() == ACME_PROTOCOL:
            transport.close()
            return
        self.on_ready(transport, address)

    def count_failure(self, error: OSError, address: Address) -> None:
        """Count and log a failed handshake."""
        self.failed += 1
        reason, setting = handshake_failure(error)
        self.failures[reason] += 1
        if setting is not None:
            see = f"; see the setting {setting}" if setting else ""
            self._lines.warn(f"refused: TLS with {address[0]}: {reason}{see}")
        else:
            log.debug("TLS handshake with %s failed: %s", address, error)

    def count_timeout(self, address: Address) -> None:
        """Count and log a handshake that timed out."""
        self.failed += 1
        self.failures["timeout"] += 1
        _HANDSHAKE_TIME.refused(f"TLS with {address[0]}", f"the handshake was not finished within {self.timeout_s:g} s")

    def count_displaced(self, address: Address) -> None:
        """Count and log a handshake that was closed for a newer one."""
        self.failed += 1
        self.failures["closed for a newer one"] += 1
        _HANDSHAKE_TIME.refused(
            f"TLS with {address[0]}", f"{self.max_unfinished} handshakes are unfinished; closing the oldest"
        )

    def close(self) -> None:
        """Close all unfinished handshakes."""
        for handshake in list(self._open):
            handshake.abort()
        self.deadlines.close()


class _Handshake:
    """The unfinished handshake of one connection."""

    __slots__ = ("_address", "_queue", "_transport", "_watcher", "deadline_s")

    def __init__(self, queue: HandshakeQueue, transport: TlsTransport, address: Address) -> None:
        self._queue, self._transport, self._address = queue, transport, address
        self._watcher: Any = get_hub().loop.io(transport.fileno(), _READ)
        self.deadline_s = monotonic() + queue.timeout_s

    def step(self) -> None:
        """Continue the handshake, in a later turn when this turn's time is used up."""
        if self._queue.share.spent():
            self._watcher.stop()
            self._queue.share.later(self._continue)
        else:
            self._continue()

    def _continue(self) -> None:
        if self.deadline_s == NEVER:
            return  # closed before this turn
        try:
            self._transport.handshake()
        except BlockingIOError:
            self._watcher.stop()
            self._watcher.events = _WRITE if self._transport.wants_write else _READ
            self._watcher.start(self.step)
        except OSError as error:
            self.abort()
            self._queue.count_failure(error, self._address)
        else:
            self._end()
            self._queue.complete(self._transport, self._address)

    def expired(self) -> None:
        """Close after the timeout."""
        self.abort()
        self._queue.count_timeout(self._address)

    def displace(self) -> None:
        """Close to make room for a newer handshake."""
        self.abort()
        self._queue.count_displaced(self._address)

    def abort(self) -> None:
        """End the handshake and close the connection."""
        self._end()
        self._transport.close()

    def _end(self) -> None:
        self.deadline_s = NEVER
        self._watcher.stop()
        self._watcher.close()
        self._queue.finished(self)


# ---- Graceful close
#
# Queued data is sent, this side is shut down, and the peer has a limited time to read everything and to close its side.
# An immediate close would lose the queue, and would reset the connection when there is unread input.

SEND_S = 10.0  # plus a second for each MIN_BYTES_PER_S, so that a slow reader cannot delay the close forever
MIN_BYTES_PER_S = 1024
LINGER_S = 2.0  # total time, even if the peer keeps sending
_UNDER_WAY = "smqrt_graceful_closes"  # the attribute of the gevent loop's hub; each thread has its own
_discarded = bytearray(65536)
_ALL_CONFIRMED = bytes(4)  # TIOCOUTQ: no unconfirmed bytes


class DrainingConnection(Protocol):
    """A connection in the state DRAINING."""

    life: Life


def send_and_close(connection: DrainingConnection, transport: Transport, unsent: Iterable[Buffer]) -> None:
    """Send `unsent` and queued ciphertext, then close gracefully. At the end `connection` is CLOSED.

    Args:
        connection: the connection whose state is set.
        transport: its transport, without watchers.
        unsent: data to send first.
    """
    close = _GracefulClose(connection, transport, get_hub().loop.io(transport.fileno(), WRITE))
    close.send(b"".join(unsent))


def half_close(connection: DrainingConnection, transport: Transport, watcher: Watcher) -> None:
    """Send queued ciphertext, then close gracefully. At the end `connection` is CLOSED.

    Args:
        connection: the connection whose state is set.
        transport: its transport, without unsent data.
        watcher: the stopped watcher of the transport; closed at the end.
    """
    close = _GracefulClose(connection, transport, watcher)
    if type(transport) is TlsTransport and transport.wants_write:
        close.send(b"")
    else:
        close.half_close()


def under_way() -> Deadlines[_GracefulClose]:
    """Return the graceful closes of this thread's loop."""
    hub = get_hub()
    found: Deadlines[_GracefulClose] | None = getattr(hub, _UNDER_WAY, None)
    if found is None:
        found = Deadlines()
        setattr(hub, _UNDER_WAY, found)
    return found


def is_sending() -> bool:
    """Return whether any graceful close has bytes that the peer's system has not confirmed."""
    return any(isinstance(close, _GracefulClose) and close.is_sending for close in under_way())


class _GracefulClose:
    """Owns a transport and its watcher until both are closed."""

    __slots__ = ("_connection", "_transport", "_unsent", "_watcher", "deadline_s")

    def __init__(self, connection: DrainingConnection, transport: Transport, watcher: Any) -> None:
        self._connection, self._transport, self._watcher = connection, transport, watcher
        self._unsent = memoryview(b"")
        self.deadline_s = NEVER
        under_way().watch(self)

    @property
    def is_sending(self) -> bool:
        """Whether there are bytes that the peer's system has not confirmed."""
        return bool(self._unsent) or ioctl(self._transport.fileno(), TIOCOUTQ, _ALL_CONFIRMED) != _ALL_CONFIRMED

    def send(self, unsent: bytes) -> None:
        """Send `unsent`, then `half_close`."""
        self._unsent = memoryview(unsent)
        self.deadline_s = monotonic() + SEND_S + len(unsent) / MIN_BYTES_PER_S
        self._send()

    def _send(self) -> None:
        transport = self._transport
        try:
            if self._unsent:
                self._unsent = self._unsent[transport.send(self._unsent) :]
            elif type(transport) is TlsTransport:
                transport.flush()
        except BlockingIOError:
            pass  # continued when the socket is writable
        except OSError:
            self.expired()
            return
        if self._unsent or (type(transport) is TlsTransport and transport.wants_write):
            self._await(WRITE, self._send)
        else:
            self.half_close()

    def half_close(self) -> None:
        """Shut down this side, and wait up to `LINGER_S` for the peer."""
        try:
            self._transport.shutdown(SHUT_WR)
        except OSError:
            self.expired()
            return
        self.deadline_s = monotonic() + LINGER_S
        self._await(READ, self._discard)

    def _discard(self) -> None:
        try:
            if self._transport.recv_into(_discarded):
                return  # one read per event, so that a flooding peer does not delay other events
        except BlockingIOError:
            return
        except OSError:
            pass
        self.expired()

    def _await(self, events: int, step: Callable[[], None]) -> None:
        self._watcher.stop()
        self._watcher.events = events
        self._watcher.start(step)

    def expired(self) -> None:
        """Close now, at the end or after the timeout."""
        under_way().forget(self)
        self._watcher.stop()
        self._watcher.close()
        self._transport.close()
        self._connection.life = transition(self._connection.life, Life.CLOSED)

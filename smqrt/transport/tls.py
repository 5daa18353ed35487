"""TLS over memory: the record layer between a non-blocking socket and the data path.

Everything goes through `ssl.MemoryBIO`, so nothing here waits, and monkey patching changes nothing.
"""

from __future__ import annotations

import _socket
import _ssl
import logging
import ssl
from collections import Counter
from collections.abc import Callable, Iterable
from time import monotonic, time
from typing import Any, Protocol

from gevent import get_hub

from smqrt.loop.scheduling import NEVER, Deadlines, share
from smqrt.settings.limit_register import Limit, LineLimit

log = logging.getLogger("smqrt")

HANDSHAKE_S = 5.0
ACME_PROTOCOL = "acme-tls/1"
"""The protocol (ALPN) of a certificate authority that verifies a name by a handshake; nothing follows it (RFC 8737)."""
_READ_BYTES = 16384  # may be 600 changes of the key, which take 7 ms
_BULK_READ_BYTES, _BULK_RECORD_BYTES = 32768, 8192  # who sends large records is read in larger pieces
_MAX_ANSWERS_BYTES = 65536  # that the TLS layer gives by itself, and that the other side does not read
_RECORD_BYTES = 16384  # the most of TLS
_PORTION_BYTES = 65536  # nobody shares ciphertext: it is not made for clients that do not read
_READ, _WRITE = 1, 2

Buffer = bytes | bytearray | memoryview
Address = tuple[Any, ...]
"""Of the other side, as `accept` gives it: host and port first."""


class TlsTransport:
    """A TLS connection with the calls of a non-blocking socket that the data path uses.

    Each `send` makes records of its own. What can't be done now raises `BlockingIOError`.

    Args:
        sock: connected and non-blocking; closed with this object.
        context: of the server, or of a client when `server_side` is false.
        server_hostname: the name a client asks for.
    """

    __slots__ = ("_answers_bytes", "_incoming", "_outgoing", "_read_bytes", "_sock", "_ssl", "_unsent")

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
        self._read_bytes = _READ_BYTES
        self._answers_bytes = 0

    def handshake(self) -> None:
        """Go on with the handshake, with what one receive brings.

        Raises:
            BlockingIOError: it waits for the other side; `wants_write` tells whether to wait for writing instead.
            OSError: it failed (`ssl.SSLError` among others).
        """
        if not self._shaken():
            self._pull()
            if not self._shaken():
                raise BlockingIOError("the handshake goes on")

    def _shaken(self) -> bool:
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            self.flush()
            return False
        except ssl.SSLError:
            self._push_alert()
            raise
        self.flush()
        return True

    def feed(self, data: bytes) -> None:
        """Take ciphertext that somebody received before the handshake."""
        self._incoming.write(data)

    def recv_into(self, buffer: bytearray | memoryview, size_bytes: int = 0) -> int:
        """Decrypt into `buffer`, at most `size_bytes` (0: its length); 0 at the end of the stream.

        Receives once at most: else a stream of records that change keys would never let the caller go.

        Raises:
            BlockingIOError: nothing has arrived, or nothing of it is for us.
            OSError: the connection is broken; an `ssl.SSLError` too when answers of the TLS layer are not read.
        """
        try:
            try:
                return self._ssl.read(size_bytes or len(buffer), buffer)  # type: ignore[return-value]
            except ssl.SSLWantReadError:
                self._pull()
            size: int = self._ssl.read(size_bytes or len(buffer), buffer)  # type: ignore[assignment]
        except ssl.SSLWantReadError:
            self._read_bytes = _READ_BYTES
            raise BlockingIOError("nothing but records of TLS itself, or a part of one") from None
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return 0
        self._read_bytes = _BULK_READ_BYTES if size >= _BULK_RECORD_BYTES else _READ_BYTES
        return size

    def send(self, data: Buffer) -> int:
        """Encrypt and send as much of `data` as the socket takes, and at most `_PORTION_BYTES` more, which wait here
        (see `wants_write`); gives how much was encrypted.

        Raises:
            BlockingIOError: earlier data still waits; nothing was taken.
        """
        self.flush()
        view = memoryview(data)
        taken = 0
        while taken < len(view) and not self._unsent:
            portion = view[taken : taken + _PORTION_BYTES]
            records = []
            while portion:
                written = self._ssl.write(portion[:_RECORD_BYTES])
                records.append(self._outgoing.read())  # at once: a memory BIO never gives back what it once had to hold
                portion, taken = portion[written:], taken + written
            if len(records) == 1:
                self._send(records[0])
            else:
                self._send_several(records)
        return taken

    def sendmsg(self, buffers: Iterable[Buffer]) -> int:
        """Send the buffers as one `send`."""
        return self.send(b"".join(buffers))

    def flush(self) -> None:
        """Send ciphertext that waits.

        Raises:
            BlockingIOError: some is still left.
        """
        self._push()
        if self._unsent:
            raise BlockingIOError("ciphertext waits for the socket")

    @property
    def wants_write(self) -> bool:
        """Whether ciphertext waits for the socket to become writable."""
        return bool(self._unsent or self._outgoing.pending)

    @property
    def has_pending(self) -> bool:
        """Whether bytes wait here: the socket will not become readable for them, so read again."""
        return self._ssl.pending() > 0 or self._incoming.pending > 0

    def fileno(self) -> int:
        """Give the socket's file descriptor, -1 when closed."""
        return self._sock.fileno()

    @property
    def peer_host(self) -> str | None:
        """The address of the other side, also when that is gone; None when it is not known."""
        return getattr(self._sock, "peer_host", None)

    def getpeername(self) -> Address:
        """Give the client's address."""
        address: Address = self._sock.getpeername()
        return address

    def getsockname(self) -> Address:
        """Give our address."""
        address: Address = self._sock.getsockname()
        return address

    def comes_from(self, host: str) -> bool:
        """See `smqrt.transport.admission.Admitted`; true for other sockets, which nobody counts."""
        comes_from = getattr(self._sock, "comes_from", None)
        return comes_from is None or comes_from(host)

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """Set an option of the socket."""
        self._sock.setsockopt(level, option, value)

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """Get an option of the socket."""
        return self._sock.getsockopt(level, option, size)

    def peer_certificate(self) -> bytes | None:
        """Give the other side's certificate in DER form; None when it sent none."""
        return self._ssl.getpeercert(binary_form=True)

    def peer_is_over(self) -> bool:
        """Tell whether the other side's certificate was good and has expired since: resuming does not look."""
        try:
            ends = (self._ssl.getpeercert() or {}).get("notAfter")
            return ends is not None and ssl.cert_time_to_seconds(str(ends)) < time()
        except (ValueError, ssl.SSLError):
            return True  # nobody can read it

    def peer_chain(self) -> list[bytes]:
        """Give the certificates that the other side presented in DER form, its own first."""
        chain = self._ssl._sslobj.get_unverified_chain()  # type: ignore[attr-defined]  # public from Python 3.13 on
        return [certificate.public_bytes(_ssl.ENCODING_DER) for certificate in chain or ()]

    def resumed(self) -> bool:
        """Tell whether the session was begun by an earlier connection."""
        return bool(self._ssl.session_reused)

    def cipher(self) -> tuple[str, str, int] | None:
        """Give name, protocol and bits of the cipher."""
        return self._ssl.cipher()

    @property
    def ssl_object(self) -> ssl.SSLObject:
        """What the standard library knows of the connection."""
        return self._ssl

    def alpn(self) -> str | None:
        """Give the protocol that both sides chose by ALPN."""
        return self._ssl.selected_alpn_protocol()

    def version(self) -> str | None:
        """Give the protocol, such as "TLSv1.3"."""
        return self._ssl.version()

    def shutdown(self, how: int) -> None:
        """Say goodbye to the other side (unless `how` is 0, reading only), then shut the socket down."""
        if how:
            self._say_goodbye()
        self._sock.shutdown(how)

    def close(self) -> None:
        """Say goodbye if the socket takes it, and close it."""
        if self._sock.fileno() >= 0:
            self._say_goodbye()
            self._sock.close()

    def _say_goodbye(self) -> None:
        try:
            self._ssl.unwrap()
        except (OSError, ValueError):
            pass  # the other side's goodbye is not waited for
        self._push_alert()

    def _push_alert(self) -> None:
        try:
            self._push()
        except OSError:
            pass  # nobody there to hear it

    def _push(self) -> None:
        if self._outgoing.pending:
            self._unsent += self._outgoing.read()
        if self._unsent:
            self._send(self._unsent)

    def _send(self, ciphertext: bytes) -> None:
        """Send; what the socket does not take is kept for the next flush."""
        try:
            sent = self._sock.send(ciphertext)
        except BlockingIOError:
            sent = 0
        self._unsent = ciphertext[sent:]

    def _send_several(self, records: list[bytes]) -> None:
        try:
            sent = self._sock.sendmsg(records)
        except BlockingIOError:
            sent = 0
        if sent < sum(map(len, records)):
            self._unsent = b"".join(records)[sent:]

    def _push_answers(self) -> None:
        self._answers_bytes += self._outgoing.pending
        self._push()
        if not self._unsent:
            self._answers_bytes = 0
        elif self._answers_bytes > _MAX_ANSWERS_BYTES:
            raise ssl.SSLError("the other side asks for answers and reads none")

    def _pull(self) -> None:
        if self._outgoing.pending:
            self._push_answers()
        data = self._sock.recv(self._read_bytes)
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()


class ClientSocket(Protocol):
    """What a connection calls of its socket, which does not block."""

    def recv_into(self, buffer: memoryview, size_bytes: int, /) -> int:
        """Receive; 0 at the end of the stream. Raises BlockingIOError, OSError, as all of these."""

    def send(self, data: Buffer, /) -> int:
        """Send what fits."""

    def sendmsg(self, runs: list[bytes], /) -> int:
        """Send what fits of all `runs` in one system call."""

    def close(self) -> None:
        """Close."""


Transport = _socket.socket | TlsTransport
"""What connections read and write: non-blocking, with or without TLS."""


_HANDSHAKE_TIME = Limit("tls_handshake", "tls.handshake_s", "a TLS handshake was not done in time")
_REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": ("no client certificate", "client_certificate"),
    "UNSUPPORTED_PROTOCOL": ("the client's versions of TLS are too old", "minimum_version"),
    "VERSION_TOO_LOW": ("the client's versions of TLS are too old", "minimum_version"),
    "NO_SHARED_CIPHER": ("the client knows no cipher and no kind of certificate that we have", ""),
    "HTTP_REQUEST": ("the client speaks HTTP without TLS on a port for TLS", ""),
    "WRONG_VERSION_NUMBER": ("what the client says is not TLS", ""),
}
_DISTRUST = ("UNKNOWN_CA", "BAD_CERTIFICATE", "CERTIFICATE_UNKNOWN", "CERTIFICATE_EXPIRED", "UNSUPPORTED_CERTIFICATE")
_ALERT = "_ALERT_"


def _over() -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError("certificate has expired")
    error.verify_message = "certificate has expired"
    return error


def handshake_failure(error: OSError) -> tuple[str, str | None]:
    """Give why a handshake failed, and the setting that has to do with it; None for what needs no line in the log."""
    if isinstance(error, ssl.SSLCertVerificationError):
        about_lists = "CRL" in error.verify_message or "revoked" in error.verify_message
        return f"client certificate: {error.verify_message}", "client_crl" if about_lists else "client_ca"
    reason = getattr(error, "reason", None)
    if not isinstance(error, ssl.SSLError) or not reason or "EOF" in reason:
        return "the client went away", None
    if reason in _REASONS:
        return _REASONS[reason]
    if _ALERT in reason:
        said = reason.partition(_ALERT)[2]
        word = said.lower().replace("_", " ")
        return (
            (f"the client does not trust our certificate: {word}", "")
            if said in _DISTRUST
            else (f"the client: {word}", None)
        )
    return reason.lower().replace("_", " "), None


class HandshakeQueue:
    """Connections whose handshake is under way: each has a watcher and a deadline and costs the others nothing.

    Args:
        context: of the server.
        on_ready: called with the `TlsTransport` and the address when the handshake is done.
        timeout_s: after which an unfinished handshake is closed.

    Attributes:
        most: how many may be under way, for one more the oldest ends; 0 for as many as come.
        finished_well, failed, resumed: how many were done, how many were not, and how many of those that were done went
            on with the session of an earlier connection.
        failures: how many were not, by the reason.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        on_ready: Callable[[TlsTransport, Address], None],
        timeout_s: float = HANDSHAKE_S,
    ) -> None:
        self.finished_well = self.failed = self.resumed = 0
        self.failures: Counter[str] = Counter()
        self._lines = LineLimit()
        self.context = context
        self.on_ready = on_ready
        self.timeout_s, self.most = timeout_s, 0
        self.deadlines = Deadlines(min(0.25, timeout_s / 4))
        self.share = share()
        self._open: dict[_Handshake, None] = {}

    def begin(self, sock: _socket.socket, address: Address) -> None:
        """Take an accepted socket."""
        if self.most and len(self._open) >= self.most:
            next(iter(self._open)).makes_room()
        handshake = _Handshake(self, TlsTransport(sock, self.context), address)
        self._open[handshake] = None
        self.deadlines.watch(handshake)
        handshake.step()

    def finished(self, handshake: _Handshake) -> None:
        """Called by a handshake that ended either way."""
        self._open.pop(handshake, None)
        self.deadlines.forget(handshake)

    def done(self, transport: TlsTransport, address: Address) -> None:
        """Called by a handshake that was done."""
        is_resumed = transport.resumed()
        if is_resumed and transport.peer_is_over():
            transport.close()
            self.not_done(_over(), address)
            return
        self.finished_well += 1
        self.resumed += is_resumed
        if transport.alpn() == ACME_PROTOCOL:
            transport.close()
            return
        self.on_ready(transport, address)

    def not_done(self, error: OSError, address: Address) -> None:
        """Called by a handshake that failed."""
        self.failed += 1
        reason, setting = handshake_failure(error)
        self.failures[reason] += 1
        if setting is not None:
            see = f"; see the setting {setting}" if setting else ""
            self._lines.warn(f"refused: TLS with {address[0]}: {reason}{see}")
        else:
            log.debug("TLS handshake with %s failed: %s", address, error)

    def too_late(self, address: Address) -> None:
        """Called by a handshake whose time is over."""
        self.failed += 1
        self.failures["not done in time"] += 1
        _HANDSHAKE_TIME.refused(f"TLS with {address[0]}", f"the handshake was not done within {self.timeout_s:g} s")

    def one_too_many(self, address: Address) -> None:
        """Called by a handshake that ended for a newer one."""
        self.failed += 1
        self.failures["made room for others"] += 1
        _HANDSHAKE_TIME.refused(
            f"TLS with {address[0]}", f"{self.most} handshakes are under way; the oldest makes room"
        )

    def close(self) -> None:
        """End all handshakes."""
        for handshake in list(self._open):
            handshake.give_up()
        self.deadlines.close()


class _Handshake:
    __slots__ = ("_address", "_queue", "_transport", "_watcher", "deadline_s")

    def __init__(self, queue: HandshakeQueue, transport: TlsTransport, address: Address) -> None:
        self._queue, self._transport, self._address = queue, transport, address
        self._watcher: Any = get_hub().loop.io(transport.fileno(), _READ)
        self.deadline_s = monotonic() + queue.timeout_s

    def step(self) -> None:
        """Go on as far as the other side's bytes reach, in a later turn when many do."""
        if self._queue.share.spent():
            self._watcher.stop()
            self._queue.share.later(self._go_on)
        else:
            self._go_on()

    def _go_on(self) -> None:
        if self.deadline_s == NEVER:
            return  # it ended meanwhile
        try:
            self._transport.handshake()
        except BlockingIOError:
            self._wait(_WRITE if self._transport.wants_write else _READ)
        except OSError as error:
            self.give_up()
            self._queue.not_done(error, self._address)
        else:
            self._end()
            self._queue.done(self._transport, self._address)

    def expired(self) -> None:
        """Give up: its time is over."""
        self.give_up()
        self._queue.too_late(self._address)

    def makes_room(self) -> None:
        """Give up: too many others have come since."""
        self.give_up()
        self._queue.one_too_many(self._address)

    def give_up(self) -> None:
        """End it and close the connection."""
        self._end()
        self._transport.close()

    def _wait(self, events: int) -> None:
        self._watcher.stop()
        self._watcher.events = events
        self._watcher.start(self.step)

    def _end(self) -> None:
        self.deadline_s = NEVER
        self._watcher.stop()
        self._watcher.close()
        self._queue.finished(self)

"""SMTP client (RFC 5321): `smtplib` over connections that block only their greenlet.

Limits: a deadline for each mail, a maximum size of the server's replies, and a maximum of concurrent deliveries.
"""

from __future__ import annotations

import io
import smtplib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import gevent
from gevent.lock import BoundedSemaphore

from smqrt.errors import StreamError
from smqrt.loop import greenlet_pool
from smqrt.mail.message import EncodedMail, Mail
from smqrt.transport.stream import Stream
from smqrt.transport.tls_contexts import CertStore, ClientTls, Trust

SMTP_PORT, SMTPS_PORT, SUBMISSION_PORT = 25, 465, 587
TIMEOUT_S = 300.0
"""For a mail, from connecting to the server's last reply."""
SILENCE_S = 60.0
"""How long the server may take to reply, or to accept data."""
MAX_DELIVERIES = 8
"""Concurrent SMTP connections."""
MAX_UNSENT, MAX_UNSENT_BYTES = 1000, 64 << 20
"""Mails accepted by `send` and not sent yet: all but `MAX_DELIVERIES` wait."""
MAX_REPLY_BYTES = 64 << 10
"""All replies of a connection; a line has at most 512 bytes (RFC 5321 §4.5.3.1.5), a recipient gets one line."""

_deliveries = BoundedSemaphore(MAX_DELIVERIES)
_encoders = BoundedSemaphore(2)
"""Threads that encode mails at a time: the pool has other tasks too."""


class _Unsent:
    """Number and bytes of the unsent mails."""

    def __init__(self) -> None:
        self._count = self._bytes = 0

    @contextmanager
    def counting(self, size_bytes: int) -> Iterator[None]:
        """Count a mail while the context lasts. Raises StreamError when the limit is reached."""
        if self._count >= MAX_UNSENT or self._count and self._bytes + size_bytes > MAX_UNSENT_BYTES:
            raise StreamError("failed", f"{self._count} mails wait already, with {self._bytes >> 10} KiB")
        self._count, self._bytes = self._count + 1, self._bytes + size_bytes
        try:
            yield
        finally:
            self._count, self._bytes = self._count - 1, self._bytes - size_bytes


_unsent = _Unsent()


@dataclass(slots=True)
class MailServer:
    """An SMTP server that accepts mails for delivery.

    Attributes:
        host: name or address.
        port: None: 465 with `tls`, 587 with `starttls`, otherwise 25.
        user, password: credentials for CRAM-MD5, PLAIN or LOGIN, the first that the server offers; "" for none.
        tls: the TLS client; without `starttls` the connection begins with TLS. Its store decides which servers are
            trusted; a client that was given no store encrypts without verifying.
        starttls: switch to TLS after the greeting; a server without STARTTLS gets no mail.
    """

    host: str
    port: int | None = None
    user: str = ""
    password: str = ""
    tls: ClientTls | None = None
    starttls: bool = False

    def send(self, mail: Mail, timeout_s: float = TIMEOUT_S) -> list[str]:
        """Send a mail; blocks the greenlet.

        Returns:
            The recipients that the server rejected, each with the reply; the others get the mail.

        Raises:
            StreamError: it was not sent: "failed" with the server's reply or the fault of the mail, "auth",
                "timeout", "invalidresponse", "sslnottrusted", "sslnotenabled" (no STARTTLS), "toomuchdata", and as
                `Stream.connect`.
        """
        late = StreamError("timeout", f"the mail was not sent within {timeout_s:g} s")
        with _unsent.counting(mail.size), gevent.Timeout(timeout_s, late), _deliveries:
            if not (self.user + self.password).isascii():
                raise StreamError("auth", "user and password: ASCII only")  # a limit of smtplib
            sender, recipients = mail.envelope()
            with _encoders:
                data = greenlet_pool.in_thread(mail.encoded)
            default = SUBMISSION_PORT if self.starttls else SMTPS_PORT if self.tls else SMTP_PORT
            stream = Stream.connect(self.host, default if self.port is None else self.port, SILENCE_S)
            try:
                if self.tls and not self.starttls:
                    _start_tls(stream, self.tls, self.host)
                return self._deliver(stream, sender, recipients, data)
            except smtplib.SMTPException as error:
                raise _failure(error) from None
            except ValueError as error:  # a challenge that is not Base64, for instance
                raise StreamError("invalidresponse", str(error)) from None
            finally:
                stream.close()

    def _deliver(self, stream: Stream, sender: str, recipients: list[str], data: EncodedMail) -> list[str]:
        client = _Client(stream)
        client.read_greeting()
        if self.starttls:
            client.ehlo_or_helo_if_needed()
            if not client.has_extn("starttls") or client.docmd("STARTTLS")[0] != 220:
                raise StreamError("sslnotenabled", "the server has no STARTTLS")
            stream.take_unread()  # plain text after the reply may be injected: discard it
            _start_tls(stream, self.tls or ClientTls(), self.host)
            client.reset()
        if self.user:
            client.login(self.user, self.password)
        rejected = client.sendmail(sender, recipients, data)  # type: ignore[arg-type]
        stream.push_or_forget(b"QUIT\r\n")  # the mail is sent: the reply to QUIT does not matter
        stream.close(graceful=True)
        return [f"{address}: {_reply_text(code, text)}" for address, (code, text) in rejected.items()]


def _start_tls(stream: Stream, tls: ClientTls, host: str) -> None:
    stream.starttls(tls.context(), host)
    assert stream.tls is not None
    if not tls.store.pem and tls.store is not CertStore.system():
        return  # a client that was given no store encrypts only
    trust = tls.store.judge(stream.tls.peer_chain(), host)
    if trust is not Trust.TRUSTED:
        raise StreamError("sslnottrusted", f"{host}: its certificate is not trusted ({trust.value})")


def _failure(error: smtplib.SMTPException) -> StreamError:
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        replies = (f"{address}: {_reply_text(*reply)}" for address, reply in error.recipients.items())
        return StreamError("failed", "; ".join(replies))
    if isinstance(error, smtplib.SMTPAuthenticationError):
        return StreamError("auth", _reply_text(error.smtp_code, error.smtp_error))
    if isinstance(error, smtplib.SMTPServerDisconnected):
        return StreamError("socketclosed", str(error))
    if isinstance(error, smtplib.SMTPResponseException):
        if error.smtp_code == -1:
            return StreamError("invalidresponse", "not an SMTP server: its reply has no code")
        return StreamError("failed", _reply_text(error.smtp_code, error.smtp_error))
    if isinstance(error, smtplib.SMTPNotSupportedError):
        return StreamError("auth" if "AUTH" in str(error) else "failed", str(error))
    return StreamError("failed", str(error))


def _reply_text(code: int, text: bytes | str) -> str:
    decoded = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    return f"{code} {' '.join(decoded.split())}"


class _Client(smtplib.SMTP):
    """`smtplib` over a `Stream`."""

    def __init__(self, stream: Stream) -> None:
        host, _ = stream.sockname()
        # The address, not the host name: a name look-up may take long and would disclose an internal name.
        super().__init__(local_hostname=f"[IPv6:{host}]" if ":" in host else f"[{host}]")
        self._stream = stream
        self.sock: Any = _Socket(stream)

    def read_greeting(self) -> None:
        """Read the server's greeting."""
        code, text = self.getreply()
        if code != 220:
            raise smtplib.SMTPConnectError(code, text)

    def reset(self) -> None:
        """Discard what the server announced in plain text (RFC 3207 §4.2)."""
        self.file = None
        self.helo_resp = self.ehlo_resp = None
        self.esmtp_features = {}
        self.does_esmtp = False

    def data(self, msg: Any) -> tuple[int, bytes]:
        """See `smtplib.SMTP.data`: sends in pieces, so that a large mail does not block the loop."""
        self.putcmd("data")
        code, text = self.getreply()
        if code != 354:
            raise smtplib.SMTPDataError(code, text)
        for piece in msg.dot_stuffed():
            self._stream.write(piece, SILENCE_S)
        return self.getreply()

    def close(self) -> None:
        """Do nothing: `MailServer.send` closes the stream."""


class _Socket:
    """The part of a socket's interface that `smtplib` uses."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def sendall(self, data: bytes) -> None:
        """Send a command. Raises as `Stream.write`."""
        self._stream.write(data, SILENCE_S)

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return the server's replies as a file."""
        return io.BufferedReader(_Replies(self._stream))

    def close(self) -> None:
        """Do nothing: `_Client` does not own the stream."""


class _Replies(io.RawIOBase):
    """The bytes that the server sends, at most `MAX_REPLY_BYTES`."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream
        self._left_bytes = MAX_REPLY_BYTES

    def readable(self) -> bool:
        """See `io.IOBase`."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`; raises StreamError."""
        data = self._stream.read(len(buffer), SILENCE_S)
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise StreamError("invalidresponse", f"the server's replies have more than {MAX_REPLY_BYTES} bytes")
        buffer[: len(data)] = data
        return len(data)

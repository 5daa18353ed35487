"""Sending mail (RFC 5321): the standard library's `smtplib`, over connections that block their greenlet only.

The whole conversation has a deadline, an answer has a size, and few mails are under way at a time.
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
"""For a mail, from connecting to the server's last word."""
SILENCE_S = 60.0
"""How long a server may take for an answer, or take nothing."""
AT_ONCE = 8
MAX_UNSENT, MAX_UNSENT_BYTES = 1000, 64 << 20
"""Mails that were handed in and are not sent: all but `AT_ONCE` wait."""
MAX_ANSWER_BYTES = 64 << 10
"""Of all answers of a conversation; a line has at most 512 (RFC 5321 §4.5.3.1.5), and a recipient one line."""

_places = BoundedSemaphore(AT_ONCE)
_composing = BoundedSemaphore(2)
"""Threads that may be busy with it: the pool is for others too."""


class _Unsent:
    """What was handed in and is not sent."""

    def __init__(self) -> None:
        self._count = self._bytes = 0

    @contextmanager
    def holding(self, size_bytes: int) -> Iterator[None]:
        """Count a mail; raises StreamError when it is one too many."""
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
    """Where mails are handed in.

    Attributes:
        host: name or address.
        port: None: 465 with `tls`, 587 with `starttls`, otherwise 25.
        user, password: to log in with (CRAM-MD5, PLAIN or LOGIN, the first that the server offers); "" for none.
        tls: the TLS client; without `starttls` the connection begins with TLS. Who is to be trusted is its matter; one
            that trusts nobody because it was given no store only encrypts.
        starttls: go on in TLS after the greeting, or send nothing.
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
            recipients that the server refused, each with its words; the others get the mail.

        Raises:
            StreamError: it was not sent: "failed" with the server's words or what is wrong with the mail, "auth",
                "timeout", "invalidresponse", "sslnottrusted", "sslnotenabled" (no STARTTLS), "toomuchdata", and as
                `Stream.connect`.
        """
        late = StreamError("timeout", f"the mail was not sent within {timeout_s:g} s")
        with _unsent.holding(mail.size), gevent.Timeout(timeout_s, late), _places:
            return self._send(mail)

    def _send(self, mail: Mail) -> list[str]:
        if not (self.user + self.password).isascii():
            raise StreamError("auth", "user and password: ASCII only")  # smtplib knows no other
        sender, recipients = mail.envelope()
        with _composing:
            data = greenlet_pool.in_thread(mail.encoded)
        default = SUBMISSION_PORT if self.starttls else SMTPS_PORT if self.tls else SMTP_PORT
        stream = Stream.connect(self.host, default if self.port is None else self.port, SILENCE_S)
        try:
            if self.tls and not self.starttls:
                _secure(stream, self.tls, self.host)
            return self._converse(stream, sender, recipients, data)
        except smtplib.SMTPException as error:
            raise _failure(error) from None
        except ValueError as error:  # a challenge that is no Base64, for instance
            raise StreamError("invalidresponse", str(error)) from None
        finally:
            stream.close()

    def _converse(self, stream: Stream, sender: str, recipients: list[str], data: EncodedMail) -> list[str]:
        client = _Client(stream)
        client.greet()
        if self.starttls:
            client.ehlo_or_helo_if_needed()
            if not client.has_extn("starttls") or client.docmd("STARTTLS")[0] != 220:
                raise StreamError("sslnotenabled", "the server has no STARTTLS")
            stream.take_unread()  # what came in clear text behind the answer is nobody's
            _secure(stream, self.tls or ClientTls(), self.host)
            client.begin_again()
        if self.user:
            client.login(self.user, self.password)
        refused = client.sendmail(sender, recipients, data)  # type: ignore[arg-type]
        stream.push_or_forget(b"QUIT\r\n")  # the mail is sent: what the server says to that is of no interest
        stream.close(graceful=True)
        return [f"{address}: {_words(code, text)}" for address, (code, text) in refused.items()]


def _secure(stream: Stream, tls: ClientTls, host: str) -> None:
    stream.starttls(tls.context(), host)
    assert stream.tls is not None
    if not tls.store.pem and tls.store is not CertStore.system():
        return  # a client that was given no store
    trust = tls.store.judge(stream.tls.peer_chain(), host)
    if trust is not Trust.TRUSTED:
        raise StreamError("sslnottrusted", f"{host}: its certificate is not trusted ({trust.value})")


def _failure(error: smtplib.SMTPException) -> StreamError:
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        return StreamError("failed", "; ".join(f"{a}: {_words(*said)}" for a, said in error.recipients.items()))
    if isinstance(error, smtplib.SMTPAuthenticationError):
        return StreamError("auth", _words(error.smtp_code, error.smtp_error))
    if isinstance(error, smtplib.SMTPServerDisconnected):
        return StreamError("socketclosed", str(error))
    if isinstance(error, smtplib.SMTPResponseException):
        if error.smtp_code == -1:
            return StreamError("invalidresponse", "what answers there is no SMTP server")
        return StreamError("failed", _words(error.smtp_code, error.smtp_error))
    if isinstance(error, smtplib.SMTPNotSupportedError):
        return StreamError("auth" if "AUTH" in str(error) else "failed", str(error))
    return StreamError("failed", str(error))


def _words(code: int, text: bytes | str) -> str:
    said = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    return f"{code} {' '.join(said.split())}"


class _Client(smtplib.SMTP):
    """`smtplib`'s half of the conversation, over a `Stream`."""

    def __init__(self, stream: Stream) -> None:
        host, _ = stream.sockname()
        # By its address: to ask for the name of this machine may take long, and tell something internal.
        super().__init__(local_hostname=f"[IPv6:{host}]" if ":" in host else f"[{host}]")
        self._stream = stream
        self.sock: Any = _Socket(stream)

    def greet(self) -> None:
        """Hear the server's first words."""
        code, text = self.getreply()
        if code != 220:
            raise smtplib.SMTPConnectError(code, text)

    def begin_again(self) -> None:
        """Forget what was said in clear text (RFC 3207 §4.2)."""
        self.file = None
        self.helo_resp = self.ehlo_resp = None
        self.esmtp_features = {}
        self.does_esmtp = False

    def data(self, msg: Any) -> tuple[int, bytes]:
        """See `smtplib.SMTP.data`: here in portions, so that a large mail holds nobody."""
        self.putcmd("data")
        code, text = self.getreply()
        if code != 354:
            raise smtplib.SMTPDataError(code, text)
        for piece in msg.stuffed():
            self._stream.write(piece, SILENCE_S)
        return self.getreply()

    def close(self) -> None:
        """The stream is closed by who made it."""


class _Socket:
    """What `smtplib` needs of a socket."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def sendall(self, data: bytes) -> None:
        """Send a command. Raises as `Stream.write`."""
        self._stream.write(data, SILENCE_S)

    def makefile(self, mode: str) -> io.BufferedReader:
        """What the server says."""
        return io.BufferedReader(_Answers(self._stream))

    def close(self) -> None:
        """Nothing: `_Client` does not own the stream."""


class _Answers(io.RawIOBase):
    """The bytes that the server sends, no more than all its answers may have."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream
        self._left_bytes = MAX_ANSWER_BYTES

    def readable(self) -> bool:
        """See `io.IOBase`."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`; raises StreamError."""
        data = self._stream.read(len(buffer), SILENCE_S)
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise StreamError("invalidresponse", f"the server's answers have more than {MAX_ANSWER_BYTES} bytes")
        buffer[: len(data)] = data
        return len(data)

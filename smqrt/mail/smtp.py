"""MIME messages and the SMTP client that sends them (RFC 5321).

Limits: a deadline for each mail, a maximum size of the server's replies, and a maximum number of concurrent deliveries.
"""

from __future__ import annotations

import io
import smtplib
from binascii import b2a_base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.errors import MessageError
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import formataddr, formatdate, getaddresses, make_msgid
from secrets import token_hex
from typing import Any, cast

import gevent
from gevent.lock import BoundedSemaphore

from smqrt.errors import StreamError
from smqrt.loop import threads
from smqrt.transport.stream import Stream
from smqrt.transport.tls_contexts import CertStore, ClientTls, Trust

# ---- MIME messages (RFC 2045 to 2049)
#
# Subjects, names and addresses may be user input. A control character in one of them raises an error, so that input
# cannot add header fields or recipients.

MAX_MAIL_BYTES = 25 << 20
"""Maximum total size of texts and attachments; most servers have a similar limit."""
MAX_RECIPIENTS = 100
"""Maximum number of recipients; every server accepts this number (RFC 5321 §4.5.3.1.8)."""
MAX_FIELD_CHARS = 2000
"""Maximum length of a subject, a name or an address list: the time to fold a field grows faster than its length."""
MAX_FILES = 100
LARGE_BYTES = 64 << 10
"""Size above which this module encodes a part itself: `email` copies parts several times, with the interpreter lock."""
_LINE_BYTES = 57  # encoded as a line of 76 Base64 digits (RFC 2045 §6.8)
_PIECE_BYTES = 1024 * _LINE_BYTES
_CRLF = b"\r\n"
_ENCODINGS = ("7bit", "8bit", "base64", "quoted-printable")
_POLICY = SMTP.clone(cte_type="7bit")  # a server may not accept 8-bit text


@dataclass(slots=True)
class Attachment:
    """A file in a mail.

    Attributes:
        name: its file name; may be empty.
        data: its content.
        content_type: such as "image/png".
        description: a one-line description.
        cid: the identifier of an inline image; the HTML text refers to it as `cid:logo`, for example.
    """

    name: str
    data: bytes
    content_type: str = "application/octet-stream"
    description: str = ""
    cid: str = ""


@dataclass(slots=True)
class Mail:
    """A mail to send. Addresses are "ann@example.com" or "Ann <ann@example.com>", several separated by commas.

    Attributes:
        sender, to, cc, bcc, reply_to, subject: the header fields; `bcc` adds recipients but no field.
        text, html: the plain text, the HTML text, or both.
        charset: the character set of the texts.
        encoding: the transfer encoding of the texts, such as "base64"; empty for a suitable one.
        images, attachments: files in the HTML text, and attached files.
    """

    sender: str
    to: Sequence[str]
    subject: str = ""
    text: str | None = None
    html: str | None = None
    cc: Sequence[str] = ()
    bcc: Sequence[str] = ()
    reply_to: str = ""
    charset: str = "utf-8"
    encoding: str = ""
    images: Sequence[Attachment] = field(default_factory=list)
    attachments: Sequence[Attachment] = field(default_factory=list)

    def envelope(self) -> tuple[str, list[str]]:
        """Return the addresses of the sender and of all recipients.

        Raises:
            StreamError: "failed": an address is invalid, or there are no recipients, or too many.
        """
        senders = _addresses("from", [self.sender])
        if len(senders) != 1:
            raise StreamError("failed", "from: one address expected")
        found = [*_addresses("to", self.to), *_addresses("cc", self.cc), *_addresses("bcc", self.bcc)]
        recipients = list(dict.fromkeys(address for _, address in found))
        if not 1 <= len(recipients) <= MAX_RECIPIENTS:
            raise StreamError("failed", f"to: 1 to {MAX_RECIPIENTS} recipients expected, not {len(recipients)}")
        return senders[0][1], recipients

    def encoded(self) -> EncodedMail:
        """Encode the mail. Slow for a large mail: call it in a thread.

        Raises:
            StreamError: "failed" with the invalid part; "toomuchdata".
        """
        if self.size > MAX_MAIL_BYTES:
            raise StreamError("toomuchdata", f"a mail has at most {MAX_MAIL_BYTES >> 20} MiB")
        if len(self.images) + len(self.attachments) > MAX_FILES:
            raise StreamError("toomuchdata", f"a mail has at most {MAX_FILES} files")
        large = _LargeParts()
        try:
            return EncodedMail(large.insert_into(self._message(large).as_bytes()))
        except (MessageError, ValueError, LookupError) as error:  # LookupError: an unknown charset
            raise StreamError("failed", str(error)) from None

    @property
    def size(self) -> int:
        """The number of bytes of the files plus characters of the texts."""
        files = sum(len(one.data) for one in (*self.images, *self.attachments))
        return len(self.text or "") + len(self.html or "") + files

    def _message(self, large: _LargeParts) -> EmailMessage:
        message = EmailMessage(_POLICY)
        message["From"] = _address_list("from", [self.sender])
        reply_to = [self.reply_to] if self.reply_to else []
        for field_name, values in (("To", self.to), ("Cc", self.cc), ("Reply-To", reply_to)):
            if values:
                message[field_name] = _address_list(field_name.lower(), values)
        message["Subject"] = _line("subject", self.subject)
        message["Date"] = formatdate()
        message["Message-ID"] = make_msgid(domain=self.envelope()[0].rpartition("@")[2])
        html_part = message  # the part to which the images are added
        if self.text is not None or self.html is None:
            message.set_content(*self._content(self.text or "", "plain", large))
            if self.html is not None:
                message.add_alternative(*self._content(self.html, "html", large))
                html_part = _last_part(message)
        else:
            message.set_content(*self._content(self.html or "", "html", large))
        for image in self.images:
            if not image.cid:
                raise StreamError("failed", "htmlimg: an image needs an id; the text refers to it as cid:id")
            main, sub = _content_type(image)
            name = _line("name", image.name) or None
            cid = f"<{_line('id', image.cid).strip('<>')}>"
            data = large.replaced(image.data)
            html_part.add_related(data, main, sub, cid=cid, filename=name, disposition="inline")
            _describe(_last_part(html_part), image)
        for one in self.attachments:
            main, sub = _content_type(one)
            if main in ("message", "multipart"):  # `email` accepts these only as parsed messages
                main, sub = "application", "octet-stream"
            message.add_attachment(large.replaced(one.data), main, sub, filename=_line("name", one.name) or None)
            _describe(_last_part(message), one)
        return message

    def _content(self, text: str, subtype: str, large: _LargeParts) -> tuple[str, str, str, str | None]:
        """Return the arguments of `EmailMessage.set_content` for a text."""
        charset = _line("charset", self.charset)
        if len(text) > LARGE_BYTES:
            lines = text.replace("\r\n", "\n").replace("\r", "\n").replace("\n", "\r\n")
            return large.replaced(lines.encode(charset, "replace"), _CRLF).decode(), subtype, charset, "base64"
        if self.encoding and self.encoding not in _ENCODINGS:
            raise StreamError(
                "failed", f"encoding: one of {', '.join(_ENCODINGS)} expected, not {self.encoding[:40]!r}"
            )
        return text, subtype, charset, self.encoding or None


class EncodedMail:
    """An encoded mail; its lines end in CR LF.

    Args:
        pieces: the bytes of the mail.
    """

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def __len__(self) -> int:
        return sum(map(len, self._pieces))

    def dot_stuffed(self) -> Iterator[bytes]:
        """Yield the pieces with each leading dot of a line doubled, then the final dot (RFC 5321 §4.5.2)."""
        begins_line = True
        for piece in filter(None, self._pieces):
            if begins_line and piece.startswith(b"."):
                yield b"."
            yield piece.replace(b"\n.", b"\n..")
            begins_line = piece.endswith(b"\n")
        yield b".\r\n" if begins_line else b"\r\n.\r\n"


class _LargeParts:
    """Large parts of a mail. `email` encodes a placeholder for each; the Base64 of the part replaces it later."""

    def __init__(self) -> None:
        self._parts: dict[bytes, bytes] = {}

    def replaced(self, data: bytes, end: bytes = b"") -> bytes:
        """Return a placeholder for a large part in Base64; return a small part unchanged.

        Args:
            end: the bytes that `email` appends to the part.
        """
        if len(data) <= LARGE_BYTES:
            return data
        placeholder = b"part " + token_hex(16).encode()
        self._parts[b2a_base64(placeholder + end, newline=False)] = data + end
        return placeholder

    def insert_into(self, mail: bytes) -> list[bytes]:
        """Return the mail in pieces, with the parts in place of their placeholders."""
        pieces: list[bytes] = []
        for placeholder, data in self._parts.items():  # in the order of the mail
            before, found, mail = mail.partition(placeholder)
            assert found
            pieces.append(before)
            for at in range(0, len(data), _PIECE_BYTES):
                piece = data[at : at + _PIECE_BYTES]
                lines = (piece[line : line + _LINE_BYTES] for line in range(0, len(piece), _LINE_BYTES))
                pieces.append(b"".join(b2a_base64(line, newline=False) + _CRLF for line in lines))
            pieces[-1] = pieces[-1].removesuffix(_CRLF)
        return [*pieces, mail]


def _line(name: str, value: str) -> str:
    """Return the value of a header field after checking it."""
    if len(value) > MAX_FIELD_CHARS:
        raise StreamError("toomuchdata", f"{name}: at most {MAX_FIELD_CHARS} characters")
    if not value.isprintable():
        raise StreamError("failed", f"{name}: must not contain line ends or control characters")
    return value


def _addresses(name: str, values: Sequence[str]) -> list[tuple[str, str]]:
    """Return display names and addresses; domains are in ASCII."""
    found = []
    for display, address in getaddresses([_line(name, value) for value in values]):
        local, _, domain = address.rpartition("@")
        if not local.isascii() or not local or not domain or " " in address:
            raise StreamError("failed", f"{name}: {address[:80]!r} is not an address")
        try:
            ascii_domain = domain if domain.isascii() else domain.encode("idna").decode()
        except UnicodeError:
            raise StreamError("failed", f"{name}: {domain[:80]!r} is not a domain") from None
        found.append((display, f"{local}@{ascii_domain}"))
    return found


def _address_list(name: str, values: Sequence[str]) -> str:
    pairs = _addresses(name, values)
    return ", ".join(f"{_quoted(display)} <{address}>" if display else address for display, address in pairs)


def _quoted(display: str) -> str:
    """Quote a display name; `email` encodes characters outside ASCII when it folds the field."""
    if display.isascii():  # `formataddr` would encode other names here
        return formataddr((display, "x@x")).removesuffix(" <x@x>")
    return '"' + display.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _content_type(one: Attachment) -> tuple[str, str]:
    main, _, sub = _line("content type", one.content_type).partition(";")[0].strip().partition("/")
    if not all(part.replace("-", "").replace(".", "").replace("+", "").isalnum() for part in (main, sub)):
        raise StreamError("failed", f"{one.content_type[:80]!r} is not a content type such as image/png")
    return main.lower(), sub.lower()


def _last_part(whole: EmailMessage) -> EmailMessage:
    return cast(EmailMessage, list(whole.iter_parts())[-1])


def _describe(part: EmailMessage, one: Attachment) -> None:
    if one.description:
        part["Content-Description"] = _line("description", one.description)


SMTP_PORT, SMTPS_PORT, SUBMISSION_PORT = 25, 465, 587
TIMEOUT_S = 300.0
"""Time limit of a mail, from connecting to the server's last reply."""
SILENCE_S = 60.0
"""Time limit for a reply of the server, or for it to accept data."""
MAX_DELIVERIES = 8
"""Maximum number of concurrent SMTP connections."""
MAX_UNSENT, MAX_UNSENT_BYTES = 1000, 64 << 20
"""Maximum number and size of the mails in `send`; all but `MAX_DELIVERIES` of them wait."""
MAX_REPLY_BYTES = 64 << 10
"""Maximum of all replies of a connection: a line of at most 512 bytes for each recipient (RFC 5321 §4.5.3.1.5)."""

_deliveries = BoundedSemaphore(MAX_DELIVERIES)
_encoders = BoundedSemaphore(2)  # threads that encode mails; the pool has other tasks too


class _Unsent:
    """Number and bytes of the unsent mails."""

    def __init__(self) -> None:
        self._count = self._bytes = 0

    @contextmanager
    def counting(self, size_bytes: int) -> Iterator[None]:
        """Context manager: count a mail. Raises StreamError when the limit is reached."""
        # A single mail may exceed the limit of bytes.
        if self._count >= MAX_UNSENT or self._count and self._bytes + size_bytes > MAX_UNSENT_BYTES:
            raise StreamError("failed", f"limit reached: {self._count} mails wait, with {self._bytes >> 10} KiB")
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
        port: None for the default: 465 with `tls`, 587 with `starttls`, otherwise 25.
        user, password: credentials for CRAM-MD5, PLAIN or LOGIN, the first one that the server offers; "" for none.
        tls: the TLS client; without `starttls` the connection begins with TLS. Its store contains the trusted
            certificates; a client without a store encrypts, but does not verify the server.
        starttls: switch to TLS after the greeting. Sending fails when the server has no STARTTLS.
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
            StreamError: the mail was not sent: "failed" with the server's reply or the fault of the mail, "auth",
                "timeout", "invalidresponse", "sslnottrusted", "sslnotenabled" (no STARTTLS), "toomuchdata", and as
                `Stream.connect`.
        """
        late = StreamError("timeout", f"the mail was not sent within {timeout_s:g} s")
        with _unsent.counting(mail.size), gevent.Timeout(timeout_s, late), _deliveries:
            if not (self.user + self.password).isascii():
                raise StreamError("auth", "user and password: ASCII only")  # a limit of smtplib
            sender, recipients = mail.envelope()
            with _encoders:
                data = threads.in_thread(mail.encoded)
            default = SUBMISSION_PORT if self.starttls else SMTPS_PORT if self.tls else SMTP_PORT
            stream = Stream.connect(self.host, default if self.port is None else self.port, SILENCE_S)
            try:
                if self.tls and not self.starttls:
                    _start_tls(stream, self.tls, self.host)
                return self._deliver(stream, sender, recipients, data)
            except smtplib.SMTPException as error:
                raise _failure(error) from None
            except ValueError as error:  # of smtplib, such as for a challenge that is not Base64
                raise StreamError("invalidresponse", str(error)) from None
            finally:
                stream.close()

    def _deliver(self, stream: Stream, sender: str, recipients: list[str], data: EncodedMail) -> list[str]:
        """Send a mail over a connection, and return the rejected recipients."""
        client = _Client(stream)
        client.read_greeting()
        if self.starttls:
            client.ehlo_or_helo_if_needed()
            if not client.has_extn("starttls") or client.docmd("STARTTLS")[0] != 220:
                raise StreamError("sslnotenabled", "the server has no STARTTLS")
            stream.take_unread()  # discard plain text after the reply: an attacker may have injected it
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
        return  # a client without a store does not verify the server
    trust = tls.store.judge(stream.tls.peer_chain(), host)
    if trust is not Trust.TRUSTED:
        raise StreamError("sslnottrusted", f"{host}: its certificate is not trusted ({trust.value})")


def _failure(error: smtplib.SMTPException) -> StreamError:
    """Return an error of smtplib as a StreamError with the documented word."""
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
        # The address in place of the host name: a look-up may take long, and the name may be internal.
        super().__init__(local_hostname=f"[IPv6:{host}]" if ":" in host else f"[{host}]")
        self._stream = stream
        self.sock: Any = _Socket(stream)

    def read_greeting(self) -> None:
        """Read the server's greeting."""
        code, text = self.getreply()
        if code != 220:
            raise smtplib.SMTPConnectError(code, text)

    def reset(self) -> None:
        """Discard the extensions that the server announced in plain text (RFC 3207 §4.2)."""
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
    """The data from the server, at most `MAX_REPLY_BYTES`."""

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

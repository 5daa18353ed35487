"""A mail as an application describes it, and as it goes out: MIME (RFC 2045 to 2049), by the library `email`.

What a stranger may have typed (subject, names, addresses) can't add fields or recipients: a control character in a
field is refused.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from email.errors import MessageError
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import formataddr, formatdate, getaddresses, make_msgid
from secrets import token_hex
from typing import Any

from smqrt.errors import StreamError

MAX_MAIL_BYTES = 25 << 20
"""Texts and attachments together; most servers take no more."""
MAX_RECIPIENTS = 100
"""RFC 5321 §4.5.3.1.8: what every server takes."""
MAX_FIELD_CHARS = 2000
"""Of a subject, a name, a list of addresses: folding a field costs more than its length."""
MAX_FILES = 100
LARGE_BYTES = 64 << 10
"""`email` goes over a part many times, with the interpreter's lock held: larger ones are encoded here."""
_LINE_BYTES = 57
"""So many become 76 digits of Base64 (RFC 2045 §6.8)."""
_PIECE_BYTES = 1024 * _LINE_BYTES
_CRLF = b"\r\n"
_ENCODINGS = ("7bit", "8bit", "base64", "quoted-printable")
_POLICY = SMTP.clone(cte_type="7bit")


@dataclass(slots=True)
class Attachment:
    """A file within a mail.

    Attributes:
        name: its name for the reader; may be empty.
        data: its content.
        content_type: such as "image/png".
        description: a line about it.
        cid: by which the HTML text shows it, as `cid:logo`; for inline images.
    """

    name: str
    data: bytes
    content_type: str = "application/octet-stream"
    description: str = ""
    cid: str = ""


@dataclass(slots=True)
class Mail:
    """What is to be sent. Addresses are "ann@example.com" or "Ann <ann@example.com>", several with commas.

    Attributes:
        sender, to, cc, bcc, reply_to, subject: the fields; `bcc` is in none.
        text, html: the text in one form or both.
        charset: how texts are encoded.
        encoding: how they travel, "base64" for instance; empty: as fits them.
        images, attachments: files, shown within the HTML text or beside it.
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
        """The address of the sender, and those of all recipients.

        Raises:
            StreamError: "failed": one is no address, or there is none, or too many.
        """
        senders = _addresses("from", [self.sender])
        if len(senders) != 1:
            raise StreamError("failed", "from: one address expected")
        found = [pair for name in ("to", "cc", "bcc") for pair in _addresses(name, getattr(self, name))]
        recipients = list(dict.fromkeys(address for _, address in found))
        if not 1 <= len(recipients) <= MAX_RECIPIENTS:
            raise StreamError("failed", f"to: 1 to {MAX_RECIPIENTS} recipients expected, not {len(recipients)}")
        return senders[0][1], recipients

    def encoded(self) -> EncodedMail:
        """The mail with its fields. Takes long for a large one: for a thread.

        Raises:
            StreamError: "failed" and which part is wrong; "toomuchdata".
        """
        self._check_size()
        large = _Large()
        try:
            return EncodedMail(large.filled_in(self._message(large).as_bytes()))
        except (MessageError, ValueError, LookupError) as error:  # an unknown charset, for instance
            raise StreamError("failed", str(error)) from None

    @property
    def size(self) -> int:
        """The bytes of the files and the characters of the texts."""
        files = sum(len(one.data) for one in (*self.images, *self.attachments))
        return len(self.text or "") + len(self.html or "") + files

    def _check_size(self) -> None:
        if self.size > MAX_MAIL_BYTES:
            raise StreamError("toomuchdata", f"a mail has at most {MAX_MAIL_BYTES >> 20} MiB")
        if len(self.images) + len(self.attachments) > MAX_FILES:
            raise StreamError("toomuchdata", f"a mail has at most {MAX_FILES} files")

    def _message(self, large: _Large) -> EmailMessage:
        message = EmailMessage(_POLICY)
        message["From"] = _listed("from", [self.sender])
        for name, values in (("To", self.to), ("Cc", self.cc), ("Reply-To", [self.reply_to] if self.reply_to else [])):
            if values:
                message[name] = _listed(name.lower(), values)
        message["Subject"] = _line("subject", self.subject)
        message["Date"] = formatdate()
        message["Message-ID"] = make_msgid(domain=self.envelope()[0].rpartition("@")[2])
        self._add_texts(message, large)
        for one in self.attachments:
            _attach(message, one, large)
        return message

    def _add_texts(self, message: EmailMessage, large: _Large) -> None:
        part: Any = message  # that the images belong to
        if self.text is not None or self.html is None:
            message.set_content(*self._text(self.text or "", "plain", large))
            if self.html is not None:
                message.add_alternative(*self._text(self.html, "html", large))
                part = _last_part(message)
        else:
            message.set_content(*self._text(self.html or "", "html", large))
        for image in self.images:
            _relate(part, image, large)

    def _text(self, text: str, subtype: str, large: _Large) -> tuple[str, str, str, str | None]:
        charset = _line("charset", self.charset)
        if len(text) <= LARGE_BYTES:
            return text, subtype, charset, self._cte()
        lines = text.replace("\r\n", "\n").replace("\r", "\n").replace("\n", "\r\n")
        return large.kept(lines.encode(charset, "replace"), _CRLF).decode(), subtype, charset, "base64"

    def _cte(self) -> str | None:
        if self.encoding and self.encoding not in _ENCODINGS:
            raise StreamError(
                "failed", f"encoding: one of {', '.join(_ENCODINGS)} expected, not {self.encoding[:40]!r}"
            )
        return self.encoding or None


class EncodedMail:
    """A mail as it goes out, lines ending in CR LF.

    Args:
        pieces: its bytes.
    """

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def __len__(self) -> int:
        return sum(map(len, self._pieces))

    def stuffed(self) -> Iterator[bytes]:
        """Its pieces with a second dot in front of each line that begins with one, and the end (RFC 5321 §4.5.2)."""
        begins_line = True
        for piece in filter(None, self._pieces):
            if begins_line and piece.startswith(b"."):
                yield b"."
            yield piece.replace(b"\n.", b"\n..")
            begins_line = piece.endswith(b"\n")
        yield b".\r\n" if begins_line else b"\r\n.\r\n"


class _Large:
    """Large parts of a mail: `email` gets a mark for each, in the place of which the part comes afterwards."""

    def __init__(self) -> None:
        self._parts: dict[bytes, bytes] = {}

    def kept(self, data: bytes, end: bytes = b"") -> bytes:
        """The mark of a part that travels in Base64; the part itself when it is not large.

        end: what `email` puts behind the part.
        """
        if len(data) <= LARGE_BYTES:
            return data
        mark = b"part " + token_hex(16).encode()
        self._parts[b2a_base64(mark + end, newline=False)] = data + end
        return mark

    def filled_in(self, mail: bytes) -> list[bytes]:
        """The mail in pieces, with the parts in the places of their marks."""
        pieces: list[bytes] = []
        for mark, data in self._parts.items():  # they stand in this order
            before, found, mail = mail.partition(mark)
            assert found
            pieces.append(before)
            pieces += (_base64(data[at : at + _PIECE_BYTES]) for at in range(0, len(data), _PIECE_BYTES))
            pieces[-1] = pieces[-1].removesuffix(_CRLF)
        return [*pieces, mail]


def _base64(data: bytes) -> bytes:
    lines = (b2a_base64(data[at : at + _LINE_BYTES], newline=False) for at in range(0, len(data), _LINE_BYTES))
    return _CRLF.join((*lines, b""))


def _line(name: str, value: str) -> str:
    """`value`, which is to stand in a field."""
    if len(value) > MAX_FIELD_CHARS:
        raise StreamError("toomuchdata", f"{name}: at most {MAX_FIELD_CHARS} characters")
    if not value.isprintable():
        raise StreamError("failed", f"{name}: no line ends and control characters here")
    return value


def _addresses(name: str, values: Sequence[str]) -> list[tuple[str, str]]:
    found = getaddresses([_line(name, value) for value in values])
    for _, address in found:
        local, _, domain = address.rpartition("@")
        if not local.isascii() or not local or not domain or " " in address:
            raise StreamError("failed", f"{name}: {address[:80]!r} is no address")
    return [(display, _with_ascii_domain(name, address)) for display, address in found]


def _with_ascii_domain(name: str, address: str) -> str:
    local, _, domain = address.rpartition("@")
    try:
        return f"{local}@{domain if domain.isascii() else domain.encode('idna').decode()}"
    except UnicodeError:
        raise StreamError("failed", f"{name}: {domain[:80]!r} is no domain") from None


def _listed(name: str, values: Sequence[str]) -> str:
    pairs = _addresses(name, values)
    return ", ".join(f"{_quoted(display)} <{address}>" if display else address for display, address in pairs)


def _quoted(display: str) -> str:
    """A name in front of an address; `email` encodes what is no ASCII when it folds."""
    if display.isascii():
        return formataddr((display, "x@x")).removesuffix(" <x@x>")
    return '"' + display.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _kind(one: Attachment) -> tuple[str, str]:
    main, _, sub = _line("content type", one.content_type).partition(";")[0].strip().partition("/")
    if not all(part.replace("-", "").replace(".", "").replace("+", "").isalnum() for part in (main, sub)):
        raise StreamError("failed", f"{one.content_type[:80]!r} is no content type, such as image/png")
    return main.lower(), sub.lower()


def _last_part(whole: Any) -> Any:
    return list(whole.iter_parts())[-1]


def _describe(part: Any, one: Attachment) -> None:
    if one.description:
        part["Content-Description"] = _line("description", one.description)


def _attach(message: EmailMessage, one: Attachment, large: _Large) -> None:
    main, sub = _kind(one)
    if main in ("message", "multipart"):
        main, sub = "application", "octet-stream"
    message.add_attachment(large.kept(one.data), main, sub, filename=_line("name", one.name) or None)
    _describe(_last_part(message), one)


def _relate(part: Any, image: Attachment, large: _Large) -> None:
    if not image.cid:
        raise StreamError("failed", "htmlimg: an image needs an id, by which the text shows it as cid:id")
    main, sub = _kind(image)
    name = _line("name", image.name) or None
    cid = _line("id", image.cid).strip("<>")
    part.add_related(large.kept(image.data), main, sub, cid=f"<{cid}>", filename=name, disposition="inline")
    _describe(_last_part(part), image)

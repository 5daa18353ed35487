"""String functions, random numbers and the XML parser (spec: bas-api §7, §13).

The string functions of `ba` are encodings, dates, content types, compression and digests. Functions named `..._large`
process large strings in portions and may switch greenlets between them.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import mimetypes
import secrets
import zlib
from base64 import b64encode, urlsafe_b64encode
from binascii import a2b_base64
from collections.abc import Callable, Iterator
from email.utils import formatdate, mktime_tz, parsedate_tz
from itertools import count
from string import ascii_letters, digits
from struct import pack
from typing import Any, NoReturn
from urllib.parse import unquote_to_bytes
from xml.parsers import expat

from smqrt.apps.lua.bridge import Function, LuaValues, fail, methods
from smqrt.apps.lua.vm import Services, Vm
from smqrt.crypto import ciphers
from smqrt.errors import ArgumentError, SmqrtError
from smqrt.http.forms import PLUS_TO_SPACE
from smqrt.loop.scheduling import Turn

_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_TO_PLAIN = bytes.maketrans(b"-_", b"+/")
_NOISE = bytes(set(range(256)) - set(_ALPHABET + b"-_"))
_GZIP_WINDOW = 31  # zlib: 16 for the header of gzip, and 15 for the largest window


def b64decode(data: bytes) -> bytes:
    """Decode Base64 in the plain or URL-safe alphabet, ignoring all other bytes. Never fails."""
    digits = data.translate(_TO_PLAIN, _NOISE)
    if len(digits) % 4 == 1:  # a single last digit has six bits, less than a byte
        digits = digits[:-1]
    return a2b_base64(digits + b"=" * (-len(digits) % 4))


def b64urlencode(data: bytes, pad: bool) -> bytes:
    """Encode with the URL-safe alphabet; append `=` only if `pad` is true."""
    text = urlsafe_b64encode(data)
    return text if pad else text.rstrip(b"=")


_KEPT = frozenset(b"%b%b-_.~/:!()*" % (ascii_letters.encode(), digits.encode())) | frozenset(range(128, 256))
_ENCODED = [bytes((byte,)) if byte in _KEPT else b"%%%02X" % byte for byte in range(256)]


def urlencode(data: bytes) -> bytes:
    """Percent-encode everything but letters, digits, `-_.~/:!()*` and bytes over 127 (spec: bas-api §7)."""
    return b"".join(map(_ENCODED.__getitem__, data))


def urldecode(data: bytes) -> bytes:
    """Decode percent-encoding; `+` becomes a space."""
    return unquote_to_bytes(data.translate(PLUS_TO_SPACE))


MAX_DATE_BYTES = 256  # no date is longer, and the parser's time grows with the length

PIECE_BYTES = 64 << 10
"""Portion of a large text: some milliseconds of work."""


def _pieces(data: bytes, size_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
    """Yield `data` in portions; other greenlets may run in between."""
    view, turn = memoryview(data), Turn()
    for at in range(0, len(data), size_bytes):
        turn.yield_if_due()
        yield view[at : at + size_bytes]


def urlencode_large(data: bytes) -> bytes:
    """As `urlencode`, in portions; blocks."""
    return b"".join(urlencode(bytes(piece)) for piece in _pieces(data))


def urldecode_large(data: bytes) -> bytes:
    """As `urldecode`, in portions; blocks."""
    parts, rest = [], b""
    for piece in _pieces(data):
        text = rest + piece
        cut = text.rfind(b"%", -2)  # an escape may continue in the next portion
        text, rest = (text, b"") if cut < 0 else (text[:cut], text[cut:])
        parts.append(urldecode(text))
    return b"".join(parts) + urldecode(rest)


def encode_date(seconds: float) -> bytes:
    """Return the HTTP date of a Unix time in seconds."""
    return formatdate(seconds, usegmt=True).encode()


def parse_date(text: bytes) -> int | None:
    """Return the Unix time of a date in the format of HTTP and mail headers; None if invalid."""
    if len(text) > MAX_DATE_BYTES:
        return None
    # The parser of mail headers accepts all formats of HTTP dates, and dates without a weekday.
    parsed = parsedate_tz(text.decode("latin-1"))
    return None if parsed is None else int(mktime_tz(parsed))


def mime_type(extension: bytes) -> bytes:
    """Return the content type of a file name extension, with or without its dot."""
    name = "x." + extension.decode("latin-1").lstrip(".")
    return (mimetypes.guess_type(name)[0] or "application/octet-stream").encode()


def deflate(data: bytes, gzip: bool) -> bytes:
    """Compress for `Content-Encoding: gzip` if `gzip` is true, else for `deflate`."""
    return zlib.compress(data, wbits=_GZIP_WINDOW if gzip else zlib.MAX_WBITS)


def deflate_large(data: bytes, gzip: bool) -> bytes:
    """As `deflate`, in portions; blocks."""
    compressor = zlib.compressobj(wbits=_GZIP_WINDOW if gzip else zlib.MAX_WBITS)
    return b"".join(compressor.compress(piece) for piece in _pieces(data)) + compressor.flush()


DIGEST_PIECE_BYTES = 1 << 20  # larger than PIECE_BYTES, since digests are much faster than the other functions
ALGORITHMS = ("md5", "sha1", "sha256", "sha384", "sha512")
_FORMATS: dict[bytes, Callable[[bytes], bytes]] = {
    b"binary": bytes,
    b"hex": lambda digest: digest.hex().encode(),
    b"b64": b64encode,
}


class Digests:
    """Unfinished digests by handle."""

    def __init__(self) -> None:
        self._open: dict[int, Any] = {}
        self._handles = count(1)

    def open(self, algorithm: bytes, key: bytes | None) -> int:
        """Begin a digest, or an HMAC if a key is given; return its handle."""
        name = algorithm.decode("latin-1")
        if name not in ALGORITHMS:
            raise ArgumentError(f"unknown hash algorithm '{name}': use one of {', '.join(ALGORITHMS)}")
        handle = next(self._handles)
        self._open[handle] = hashlib.new(name) if key is None else hmac.new(key, digestmod=name)
        return handle

    def update(self, handle: int, data: bytes) -> None:
        """Add `data`."""
        self._open[handle].update(data)

    def update_large(self, handle: int, data: bytes) -> None:
        """As `update`, in portions; blocks."""
        for piece in _pieces(data, DIGEST_PIECE_BYTES):
            self._open[handle].update(piece)

    def finish(self, handle: int, form: bytes) -> bytes:
        """End a digest and return it as `binary`, `hex` or `b64`."""
        if form not in _FORMATS:
            raise ArgumentError("bad argument #2 to 'hash' (binary, hex or b64 expected)")
        encode = _FORMATS[form]
        return encode(self._open.pop(handle).digest())

    def drop(self, handle: int) -> None:
        """Forget an unfinished digest."""
        self._open.pop(handle, None)


def random_below(limit: int) -> int:
    """Return a random integer from 0 to `limit` - 1."""
    return secrets.randbelow(limit)


def random_unsigned(size_bytes: int) -> int:
    """Return a random integer of `size_bytes` bytes; signed for eight bytes, like a Lua integer."""
    return int.from_bytes(secrets.token_bytes(size_bytes), "big", signed=size_bytes == 8)


_FUNCTIONS: dict[str, Function] = {
    "b64encode": b64encode,
    "b64decode": b64decode,
    "b64urlencode": b64urlencode,
    "urlencode": urlencode,
    "urldecode": urldecode,
    "encdate": encode_date,
    "parsedate": parse_date,
    "mime": mime_type,
    "deflate": deflate,
}
_LARGE: dict[str, Function] = {
    "urlencode_large": urlencode_large,
    "urldecode_large": urldecode_large,
    "deflate_large": deflate_large,
}
_RANDOM: dict[str, Function] = {
    "random_below": random_below,
    "random_unsigned": random_unsigned,
    "random_bytes": secrets.token_bytes,
}


def install_codec(vm: Vm, services: Services) -> None:
    """Install `ba.json`, the encoders and decoders of `ba`, tokens, `ba.crypto.hash` and random numbers."""
    vm.namespace("ba.json", {})
    vm.namespace("ba.jsondecode", {"max_values": lambda: services.json_values})
    vm.namespace("ba.jsonparser", {})
    vm.namespace("ba.codec", _FUNCTIONS, _LARGE)
    vm.namespace("ba.tokens", {"new_key": ciphers.new_key, "seal": ciphers.seal, "unseal": ciphers.unseal})
    digests = Digests()
    large = methods(digests, "update_large")
    vm.namespace("ba.crypto", _RANDOM | methods(digests, "open update finish drop"), large)


# ---- The XML parser `xparser`, based on expat with the rules of defusedxml.
#
# Declarations of entities and attributes are rejected, external entities are not read, and the length of names is
# limited. So the events of a document are not much larger than the document. The events of a chunk are passed to Lua
# as one string, in their order:
#
# "S" name, number of attributes, name and value of each    "E" name    "T" text    "C" comment    "P" target, data
#
# Each text is preceded by its length in bytes.

DOCUMENT_BYTES = 16 << 20
TOKEN_BYTES = 256 << 10  # of a tag with attributes or a comment: expat scans it again with every chunk
MAX_DEPTH = 200
MAX_ATTRIBUTES = 1000
MAX_NAME = 1000  # characters including the URI of the namespace, which is part of every element name
SLICE_BYTES = 8 << 10  # up to 2,000 empty elements: some milliseconds
_TEXT_BYTES = 32 << 10  # size of expat's buffer for text, which limits the size of a text event


class XmlError(SmqrtError):
    """A document is malformed or exceeds a limit."""


class XmlParser:
    """The parser of one document.

    Args:
        has_namespaces: names are "URI|name".

    Attributes:
        done: whether the root element has ended.
    """

    def __init__(self, has_namespaces: bool) -> None:
        parser = expat.ParserCreate(namespace_separator="|" if has_namespaces else None)
        parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
        parser.buffer_text, parser.buffer_size, parser.ordered_attributes = True, _TEXT_BYTES, True
        parser.StartElementHandler, parser.EndElementHandler = self._start, self._end
        parser.CharacterDataHandler, parser.CommentHandler = self._text, self._comment
        parser.ProcessingInstructionHandler = self._instruction
        parser.EntityDeclHandler = parser.UnparsedEntityDeclHandler = self._refuse_entity
        parser.AttlistDeclHandler = self._refuse_attribute
        parser.ExternalEntityRefHandler = self._refuse_reference
        self._parser = parser
        self._parts: list[bytes] = []
        self._fed_bytes = self._depth = 0
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """Parse the next chunk; return its events.

        Raises:
            XmlError: the document is malformed or too large; the message contains line and column.
        """
        self._fed_bytes += len(data)
        try:
            if self._fed_bytes > DOCUMENT_BYTES:
                raise XmlError(f"the document has more than {DOCUMENT_BYTES} bytes")
            self._parser.Parse(data, False)
            # The index is that of the token that expat has not completed yet.
            if self._fed_bytes - max(self._parser.CurrentByteIndex, 0) > TOKEN_BYTES and not self.done:
                raise XmlError(f"a tag or comment has more than {TOKEN_BYTES} bytes")
        except (XmlError, expat.ExpatError) as error:
            text = expat.ErrorString(error.code) if isinstance(error, expat.ExpatError) else str(error)
            line, column = self._parser.CurrentLineNumber, self._parser.CurrentColumnNumber
            raise XmlError(f"{text}: line {line}, column {column}") from None
        events, self._parts = b"".join(self._parts), []
        return events

    def _start(self, name: str, attributes: list[str]) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise XmlError(f"elements are nested more than {MAX_DEPTH} deep")
        if len(attributes) > 2 * MAX_ATTRIBUTES:
            raise XmlError(f"an element has more than {MAX_ATTRIBUTES} attributes")
        if len(name) > MAX_NAME or any(len(each) > MAX_NAME for each in attributes[::2]):
            raise XmlError(f"a name with its namespace has more than {MAX_NAME} characters")
        self._put(b"S", name)
        self._parts.append(pack(">I", len(attributes) // 2))
        for text in attributes:
            self._put(b"", text)

    def _end(self, name: str) -> None:
        self._depth -= 1
        self.done = not self._depth
        self._put(b"E", name)

    def _text(self, text: str) -> None:
        self._put(b"T", text)

    def _comment(self, text: str) -> None:
        self._put(b"C", text)

    def _instruction(self, target: str, data: str) -> None:
        self._put(b"P", target)
        self._put(b"", data)

    def _refuse_entity(self, *_declaration: object) -> NoReturn:
        raise XmlError("declarations of entities are not supported")

    def _refuse_attribute(self, *_declaration: object) -> NoReturn:
        # An attribute with a default value would be added to every element.
        raise XmlError("declarations of attributes are not supported")

    def _refuse_reference(self, *_reference: object) -> NoReturn:
        raise XmlError("external entities are not supported")

    def _put(self, kind: bytes, text: str) -> None:
        data = text.encode("utf-8", "surrogatepass")
        self._parts += (kind, pack(">I", len(data)), data)


class XmlBinding:
    """XML parsers by handle."""

    def __init__(self) -> None:
        self._parsers: dict[int, XmlParser] = {}
        self._next_handle = itertools.count(1).__next__

    def new(self, has_namespaces: bool) -> int:
        handle = self._next_handle()
        self._parsers[handle] = XmlParser(has_namespaces)
        return handle

    def feed(self, handle: int, data: bytes) -> LuaValues:
        """Return the events of a chunk of at most `SLICE_BYTES`, and whether the root element has ended.

        Returns None and the message if the document is malformed or too large.
        """
        parser = self._parsers[handle]
        try:
            return parser.feed(data), parser.done
        except XmlError as error:
            return fail(str(error))

    def collect(self, handle: int) -> None:
        self._parsers.pop(handle, None)


def install_xml(vm: Vm, services: Services) -> None:
    """Install the XML parser."""
    binding = XmlBinding()
    vm.namespace("ba.xml", methods(binding, "new feed collect") | {"slice": lambda: SLICE_BYTES})

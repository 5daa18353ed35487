"""Base64, percent-encoding, HTTP dates, content types and compression (spec: bas-api §7)."""

from __future__ import annotations

import mimetypes
import zlib
from base64 import b64encode, urlsafe_b64encode
from binascii import a2b_base64
from email.utils import formatdate, mktime_tz, parsedate_tz
from urllib.parse import quote_from_bytes, unquote_to_bytes

from smqrt.lua.services import Services
from smqrt.lua.vm import Vm

_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_TO_PLAIN = bytes.maketrans(b"-_", b"+/")
_NOISE = bytes(set(range(256)) - set(_ALPHABET + b"-_"))
_GZIP_WINDOW = 31


def b64decode(data: bytes) -> bytes:
    """Decode either alphabet; what belongs to neither is ignored. Never fails."""
    digits = data.translate(_TO_PLAIN, _NOISE)
    if len(digits) % 4 == 1:  # six bits are no byte
        digits = digits[:-1]
    return a2b_base64(digits + b"=" * (-len(digits) % 4))


def b64urlencode(data: bytes, pad: bool) -> bytes:
    """Encode with the URL-safe alphabet, with `=` at the end only when asked."""
    text = urlsafe_b64encode(data)
    return text if pad else text.rstrip(b"=")


def urlencode(data: bytes) -> bytes:
    """Percent-encode everything but letters, digits and `-_.~`."""
    return quote_from_bytes(data, safe="").encode()


def urldecode(data: bytes) -> bytes:
    """The inverse; `+` is a space."""
    return unquote_to_bytes(data.replace(b"+", b" "))


def encode_date(seconds: float) -> bytes:
    """The date of an HTTP header for Unix time `seconds`."""
    return formatdate(seconds, usegmt=True).encode()


def parse_date(text: bytes) -> int | None:
    """Unix time of a date as HTTP and mail headers have it, None when it is no date."""
    parsed = parsedate_tz(text.decode("latin-1"))
    return None if parsed is None else int(mktime_tz(parsed))


def mime_type(extension: bytes) -> bytes:
    """The content type for a file name extension, with or without its dot."""
    name = "x." + extension.decode("latin-1").lstrip(".")
    return (mimetypes.guess_type(name)[0] or "application/octet-stream").encode()


def deflate(data: bytes, gzip: bool) -> bytes:
    """Compress for `Content-Encoding: deflate`, or `gzip`."""
    return zlib.compress(data, wbits=_GZIP_WINDOW if gzip else zlib.MAX_WBITS)


def install(vm: Vm, services: Services) -> None:
    """Give Lua the encoders and decoders of `ba`."""
    vm.namespace(
        "ba.codec",
        {
            "b64encode": b64encode,
            "b64decode": b64decode,
            "b64urlencode": b64urlencode,
            "urlencode": urlencode,
            "urldecode": urldecode,
            "encdate": encode_date,
            "parsedate": parse_date,
            "mime": mime_type,
            "deflate": deflate,
        },
    )

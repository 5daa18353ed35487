"""Names of files as the WebDAV engine, URLs and XML need them."""

from __future__ import annotations

import re
from urllib.parse import quote_from_bytes, unquote
from xml.sax.saxutils import escape

from smqrt.http.head import decode_path
from smqrt.http.headers import BadRequest, HttpError
from smqrt.http.resources import IoError, segments

_TROUBLESOME = re.compile("[%?;#\udc80-\udcff]")
_SAFE = "/!*'(),$-_.~+@:=&"
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_DESTINATION = re.compile(r"(?:(https?)://([^/?#]{1,255}))?(/[^?#]*)", re.IGNORECASE)


def canonical(path: str) -> str:
    """The one spelling of a path inside a share, without slashes at its ends: locks must not be escaped by another.

    Raises:
        HttpError: 404, no file has that name.
    """
    try:
        return "/".join(segments(path))
    except IoError:
        raise HttpError(404) from None


def escaped(path: str) -> str:
    """A path without what the engine takes for the syntax of URLs, and without bytes that are no UTF-8."""
    return _TROUBLESOME.sub(_escape, path)


def unescaped(path: str) -> str:
    """The inverse of `escaped`."""
    return unquote(path, errors="surrogateescape")


def href(path: str) -> str:
    """A path as a URL's."""
    return quote_from_bytes(path.encode("utf-8", "surrogateescape"), _SAFE)


def xml_text(text: str) -> str:
    """A text as XML's; what XML can't hold is replaced."""
    return escape(_NOT_XML.sub("\ufffd", text))


def destination(header: str, hosts: tuple[str, ...], bases: tuple[str, ...]) -> str:
    """The path inside the share that a Destination header names.

    Args:
        header: the field's value.
        hosts: the names of this server.
        bases: paths of the share, each with "/" at its end.

    Raises:
        HttpError: 400, it is no URL; 502, it is outside the share.
    """
    found = _DESTINATION.fullmatch(header.strip())
    if found is None or not header.isascii():
        raise HttpError(400, "the Destination header is no URL of a file")
    if found[2] is not None and found[2].lower() not in hosts:
        raise HttpError(502, "the destination is on another server")
    try:
        path = decode_path(found[3])
    except BadRequest as error:
        raise HttpError(400, f"Destination: {error}") from None
    for base in bases:
        if f"{path}/".startswith(base):
            return canonical(path[len(base) :])
    raise HttpError(502, "the destination is outside this file server")


def _escape(match: re.Match[str]) -> str:
    return f"%{ord(match[0]) & 0xFF:02X}"

"""File names in the forms for the WebDAV engine, URLs and XML."""

from __future__ import annotations

import re
from urllib.parse import quote_from_bytes, unquote
from xml.sax.saxutils import escape

from smqrt.http.head import decode_path
from smqrt.http.headers import BadRequest, HttpError
from smqrt.http.resources import IoError, segments

_URL_SYNTAX = re.compile("[%?;#\udc80-\udcff]")
_SAFE = "/!*'(),$-_.~+@:=&"
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_DESTINATION = re.compile(r"(?:(https?)://([^/?#]{1,255}))?(/[^?#]*)", re.IGNORECASE)


def canonical(path: str) -> str:
    """Return the canonical form of a path in a share, without slashes at its ends. Locks depend on a unique form.

    Raises:
        HttpError: 404, the name is invalid.
    """
    try:
        return "/".join(segments(path))
    except IoError:
        raise HttpError(404) from None


def escaped(path: str) -> str:
    """Escape a path for the engine: characters that it treats as URL syntax, and bytes that are not UTF-8."""
    return _URL_SYNTAX.sub(lambda match: f"%{ord(match[0]) & 0xFF:02X}", path)


def unescaped(path: str) -> str:
    """Reverse `escaped`."""
    return unquote(path, errors="surrogateescape")


def href(path: str) -> str:
    """Return a path as a URL path, percent-encoded."""
    return quote_from_bytes(path.encode("utf-8", "surrogateescape"), _SAFE)


def xml_text(text: str) -> str:
    """Return a text escaped for XML. Characters that XML does not allow are replaced."""
    return escape(_NOT_XML.sub("\ufffd", text))


def destination(header: str, hosts: tuple[str, ...], bases: tuple[str, ...]) -> str:
    """Return the path in the share of a Destination header.

    Args:
        header: value of the field.
        hosts: names of this server.
        bases: paths of the share, each with "/" at its end.

    Raises:
        HttpError: 400, it is not a URL; 502, it is outside of the share.
    """
    found = _DESTINATION.fullmatch(header.strip())
    if found is None or not header.isascii():
        raise HttpError(400, "the Destination header is not a URL of a file")
    if found[2] is not None and found[2].lower() not in hosts:
        raise HttpError(502, "the destination is on another server")
    try:
        path = decode_path(found[3])
    except BadRequest as error:
        raise HttpError(400, f"Destination: {error}") from None
    for base in bases:
        if f"{path}/".startswith(base):
            return canonical(path[len(base) :])
    raise HttpError(502, "the destination is outside of this file server")

"""The `Range` header and the parts of a multipart answer (RFC 9110 §14)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from secrets import token_hex

MAX_RANGES = 10  # more in one request are an attack; it gets the whole file
MULTIPART_BOUNDARY = f"smqrt-{token_hex(12)}"
_SPEC = re.compile(r"([0-9]{0,15})-([0-9]{0,15})")


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `first` up to and without `end`."""

    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


def parse_ranges(header: str, size: int) -> list[Span] | None:
    """Read a `Range` header for something of `size` bytes.

    Returns:
        the spans that can be given, none of them empty (an empty list: 416); None when the header is to be ignored.
    """
    unit, _, text = header.partition("=")
    specs = text.split(",")
    if unit.strip().lower() != "bytes" or len(specs) > MAX_RANGES:
        return None
    spans: list[Span] = []
    for spec in specs:
        match = _SPEC.fullmatch(spec.strip())
        if match is None or not any(match.groups()):
            return None
        if match[1] and match[2] and int(match[2]) < int(match[1]):
            return None
        span = _span(match[1], match[2], size)
        if span.first < span.end:
            spans.append(span)
    return None if sum(map(len, spans)) > size else spans  # overlapping: the whole is smaller


def _span(first: str, last: str, size: int) -> Span:
    if not first:
        return Span(max(size - int(last), 0), size)
    return Span(int(first), min(int(last) + 1, size) if last else size)


def part_head(span: Span, size: int, content_type: str) -> bytes:
    """Build what stands before a part of a multipart answer."""
    place = f"Content-Range: bytes {span.first}-{span.end - 1}/{size}"
    return f"\r\n--{MULTIPART_BOUNDARY}\r\nContent-Type: {content_type}\r\n{place}\r\n\r\n".encode("latin-1")


def multipart_length(heads: list[bytes], spans: list[Span], tail: bytes) -> int:
    """Give the length of a multipart answer."""
    return sum(map(len, heads)) + sum(map(len, spans)) + len(tail)

"""Headers of the PROXY protocol."""

from __future__ import annotations

import struct

from smqrt.wire.proxy_protocol import SIGNATURE

V4 = bytes([192, 0, 2, 7, 10, 0, 0, 1]) + struct.pack(">HH", 4711, 443)


def version_2(command: int = 0x21, family: int = 0x11, body: bytes = V4, length: int | None = None) -> bytes:
    return SIGNATURE + struct.pack(">BBH", command, family, len(body) if length is None else length) + body

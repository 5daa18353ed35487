"""The three inner loops of the data path, in Python: scan, unmask, encode. `net/jit.py` has their LuaJIT twins.

All work on one shared receive buffer. A twin gives the same bytes for the same input (a property test), so which one
runs is a question of speed only.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

from smqrt.wire.smq import PUBLISH_HEADER_BYTES, Type
from smqrt.wire.websocket import mask

BUFFER_BYTES = (64 + 512) << 10
"""Room for a left-over partial frame and the largest single receive."""
ENCODE_BYTES = 32 << 10
"""The most that `encode` takes at once."""


class Kernels(Protocol):
    """The shared receive buffer and the loops over it."""

    chars: ctypes.Array[ctypes.c_char]
    """The buffer; a slice of it is a `bytes` copy."""
    view: memoryview
    """The buffer for `recv_into` and for sending without a copy."""
    ends: memoryview
    """u32 array: where the runs found by `scan` end."""

    def scan(self, size: int) -> tuple[int, int, bool]:
        """Split `chars[:size]` into runs: consecutive Publish frames with the same nine bytes, or one frame of another
        type.

        Returns `(runs, used_bytes, bad)`: how many `ends` were written, where the last whole frame ends, and whether
        the frame after that breaks a rule (a length under 3, or a Publish under 15).
        """
        ...

    def unmask(self, size: int) -> tuple[int, int]:
        """Turn the leading whole, masked, final binary WebSocket frames of `chars[:size]` into raw frames, in place.

        Returns `(written_bytes, used_bytes)`; it stops at the first frame that is anything else.
        """
        ...

    def encode(self, run: bytes) -> tuple[bytes, int]:
        """The WebSocket frames for the leading whole raw frames of `run`, and how many bytes of it they took."""
        ...


def encode_run(kernels: Kernels, run: bytes) -> bytes:
    """The WebSocket form of a whole `run` of any size."""
    out, used = kernels.encode(run[:ENCODE_BYTES])
    if used == len(run):
        return out
    parts, at = [out], used
    while at < len(run):
        out, used = kernels.encode(run[at : at + ENCODE_BYTES])
        if not used:
            size = run[at] << 8 | run[at + 1]
            out, used = encode_frame(run[at : at + size]), size
        parts.append(out)
        at += used
    return b"".join(parts)


def encode_frame(raw: bytes) -> bytes:
    """The WebSocket frame of one raw frame."""
    size = len(raw) - 2
    head = bytes((0x82, size)) if size < 126 else b"\x82\x7e" + size.to_bytes(2, "big")
    return head + raw[2:]


class PureKernels:
    """The kernels in Python, for machines without LuaJIT and as the reference."""

    def __init__(self) -> None:
        self.chars = (ctypes.c_char * BUFFER_BYTES)()
        self.view = memoryview(self.chars).cast("B")
        self.ends = memoryview((ctypes.c_uint32 * (BUFFER_BYTES // 3 + 1))()).cast("B").cast("I")

    def scan(self, size: int) -> tuple[int, int, bool]:
        """See `Kernels.scan`."""
        data, at, runs, last = self.view, 0, 0, b""
        while size - at >= 3:
            length = data[at] << 8 | data[at + 1]
            publish = data[at + 2] == Type.PUBLISH
            if length < 3 or (publish and length < PUBLISH_HEADER_BYTES):
                return runs, at, True
            if at + length > size:
                break
            key = bytes(data[at + 2 : at + 11]) if publish else b""
            if key and key == last:
                runs -= 1
            at += length
            self.ends[runs] = at
            runs, last = runs + 1, key
        return runs, at, False

    def unmask(self, size: int) -> tuple[int, int]:
        """See `Kernels.unmask`."""
        data, at, to = self.view, 0, 0
        while size - at >= 6 and data[at] == 0x82:
            short, head = data[at + 1] & 0x7F, 6
            if data[at + 1] < 128 or short == 127 or short == 0:
                break
            if short == 126:
                if size - at < 8:
                    break
                short, head = data[at + 2] << 8 | data[at + 3], 8
            end = at + head + short
            if end > size or short + 2 > 0xFFFF or (head == 8 and short < 126):
                break
            payload = mask(bytes(data[at + head : end]), bytes(data[at + head - 4 : at + head]))
            data[to : to + 2] = (short + 2).to_bytes(2, "big")
            data[to + 2 : to + 2 + short] = payload
            to, at = to + 2 + short, end
        return to, at

    def encode(self, run: bytes) -> tuple[bytes, int]:
        """See `Kernels.encode`."""
        parts, at, size = [], 0, len(run)
        while size - at >= 2:
            end = at + (run[at] << 8 | run[at + 1])
            if end > size:
                break
            parts.append(encode_frame(run[at:end]))
            at = end
        return b"".join(parts), at

"""Inner loops of the data path, in Python and in LuaJIT.

All of them work on one shared receive buffer. Both kinds return the same bytes for the same input, which a property
test checks; they differ in speed only.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from importlib import resources
from typing import Any, Protocol

from smqrt.wire.mqtt.fields import varint
from smqrt.wire.smq import MAX_PAYLOAD_BYTES, PUBLISH_HEADER_BYTES, Type, count_frames, measure_frames
from smqrt.wire.websocket import mask

BUFFER_BYTES = (64 + 512) << 10
"""Space for an incomplete frame and the largest single receive."""
ENCODE_BYTES = 32 << 10
"""The maximum number of bytes for one call of `encode`."""
PACKED_BYTES = 128 << 10
"""The same for `packed`; a frame has at most half as many bytes."""
MAX_BATCHES = BUFFER_BYTES // 3 + 1  # the smallest frame has three bytes
MAX_PARTITIONS = 1024
ROW_MESSAGES = 100
"""The maximum number of messages with QoS 1 or 2 of one call of `publishes`."""


class Kernels(Protocol):
    """Shared receive buffer and the loops over it."""

    chars: ctypes.Array[ctypes.c_char]
    """The buffer; a slice of it is a copy as `bytes`."""
    view: memoryview
    """The buffer for `recv_into` and for sending without a copy."""
    ends: memoryview
    """u32 array: where the batches found by `scan` end."""
    frames: memoryview
    """u32 array: number of frames of each of these batches."""

    partitioned: ctypes.Array[ctypes.c_char]
    """Result of `partition`: the frames of one subscriber after those of another."""
    partition_ids: memoryview
    """u32 array: number of each partition that has frames."""
    partition_ends: memoryview
    """u32 array: where each of these ends in `partitioned`."""
    packet_numbers: Any
    """Result of `publishes`: packet identifiers of messages with QoS 1 and 2, two bytes each."""

    def scan(self, size: int, start: int) -> tuple[int, int, bool]:
        """Split `chars[start:size]` into batches: Publish frames with equal bytes 2 to 10, or one other frame.

        Returns:
            `(batches, used_bytes, bad)`: the number of `ends` that were written, where the last whole frame ends, and
            whether the next frame is invalid (a length under 3, or a Publish under 15).
        """
        ...

    def partition_table(self, keys: bytes, numbers: bytes) -> Any:
        """Return the route table for `partition`.

        Destinations of one subscriber share a partition, so that the order of its messages is kept.

        Args:
            keys: destinations, four bytes each.
            numbers: the partition of each, a native u32 below `MAX_PARTITIONS`.
        """
        ...

    def partition(self, size: int, table: Any, publisher: int) -> tuple[int, int, int]:
        """Sort the leading Publish frames of `chars[:size]` by partition into `partitioned`, in order within each.

        It stops at the first frame that is not a whole Publish of `publisher` (the bytes of the ETID as a little-endian
        number) to a destination in `table`.

        Returns:
            `(count, used_bytes, frames)`: the number of partitions with frames, the bytes of the buffer that were
            processed, and the number of frames.
        """
        ...

    def unmask(self, size: int) -> tuple[int, int]:
        """Turn the leading whole, masked, final binary WebSocket frames of `chars[:size]` into raw frames, in place.

        It stops at the first other frame. Returns `(written_bytes, used_bytes)`.
        """
        ...

    def encode(self, batch: bytes) -> tuple[bytes, int]:
        """Return the WebSocket frames for the leading whole frames of `batch`, and the size of these frames there."""
        ...

    def publishes(
        self, start: int, size: int, name_bytes: int, block_bytes: int, destination: int, publisher: int
    ) -> tuple[int, int, int]:
        """Turn the leading PUBLISH packets of MQTT in `chars[start:size]` into Publish frames in `partitioned`.

        It stops at the first packet that is incomplete, has another topic or QoS than the first one, has a flag,
        properties or the packet identifier 0, or has more payload than a frame. With QoS 1 and 2, the packet
        identifiers are in `packet_numbers`, and there are at most `ROW_MESSAGES` packets.

        Args:
            start: the position of a packet without flags.
            size: the end of the received bytes.
            name_bytes: the length of its topic.
            block_bytes: 1 for MQTT 5, where packets without properties have a byte for their length, otherwise 0.
            destination: the id of the topic (u32).
            publisher: the ETID of the client (u32).

        Returns:
            `(count, used, written)`: the number of packets, the position after them, and the bytes in `partitioned`.
        """
        ...

    def packed(self, batch: bytes, first: int, fixed: bytes) -> tuple[bytes, int]:
        """Return PUBLISH packets of MQTT for the leading whole frames of `batch`, and the size of these frames there.

        Args:
            batch: Publish frames.
            first: the first byte of the packets: their type and flags, with QoS 0.
            fixed: what follows the length in each packet: the topic with its length, and in MQTT 5 the properties.
        """
        ...

    def count(self, batch: bytes) -> int:
        """Return the number of frames in a whole batch."""
        ...

    def measure(self, batch: bytes | memoryview) -> tuple[int, int]:
        """Return the number of frames in a whole batch, and the length of the longest.

        A view must be one of the receive buffer.
        """
        ...


def encode_batch(kernels: Kernels, batch: bytes) -> bytes:
    """Return the WebSocket form of a whole batch of any size."""
    out, used = kernels.encode(batch[:ENCODE_BYTES])
    if used == len(batch):
        return out
    parts, at = [out], used
    while at < len(batch):
        out, used = kernels.encode(batch[at : at + ENCODE_BYTES])
        if not used:
            size = batch[at] << 8 | batch[at + 1]
            out, used = encode_frame(batch[at : at + size]), size
        parts.append(out)
        at += used
    return b"".join(parts)


def mqtt_packets(
    packed: Callable[[bytes, int, bytes], tuple[bytes, int]], batch: bytes, first: int, fixed: bytes
) -> bytes:
    """Return PUBLISH packets of MQTT for a whole batch of any size; `packed` is that of `Kernels`."""
    parts, at = [], 0
    while at < len(batch):
        out, used = packed(batch[at : at + PACKED_BYTES], first, fixed)
        parts.append(out)
        at += used
    return parts[0] if len(parts) == 1 else b"".join(parts)


def packed_in_python(batch: bytes, first: int, fixed: bytes) -> tuple[bytes, int]:
    """See `Kernels.packed`."""
    parts, at, size = [], 0, len(batch)
    while size - at >= PUBLISH_HEADER_BYTES:
        end = at + (batch[at] << 8 | batch[at + 1])
        if end > size:
            break
        payload = batch[at + PUBLISH_HEADER_BYTES : end]
        parts.append(bytes((first,)) + varint(len(fixed) + len(payload)) + fixed + payload)
        at = end
    return b"".join(parts), at


def encode_frame(raw: bytes) -> bytes:
    """Return the WebSocket frame of one raw frame."""
    size = len(raw) - 2
    # 0x82: a final binary frame; 0x7E: the size follows in two bytes
    head = bytes((0x82, size)) if size < 126 else b"\x82\x7e" + size.to_bytes(2, "big")
    return head + raw[2:]


def _u32_array(count: int) -> memoryview:
    return memoryview((ctypes.c_uint32 * count)()).cast("B").cast("I")


class PureKernels:
    """Kernels in Python, for machines without LuaJIT and as the reference."""

    def __init__(self) -> None:
        self.chars = (ctypes.c_char * BUFFER_BYTES)()
        self.view = memoryview(self.chars).cast("B")
        self.ends, self.frames = _u32_array(MAX_BATCHES), _u32_array(MAX_BATCHES)
        self.partitioned = (ctypes.c_char * BUFFER_BYTES)()
        self.partition_ids, self.partition_ends = _u32_array(MAX_PARTITIONS), _u32_array(MAX_PARTITIONS)
        self.packet_numbers: Any = (ctypes.c_char * (2 * ROW_MESSAGES))()

    def scan(self, size: int, start: int) -> tuple[int, int, bool]:
        """See `Kernels.scan`."""
        data, at, batches, last = self.view, start, 0, b""
        while size - at >= 2:
            length = data[at] << 8 | data[at + 1]
            publish = size - at > 2 and data[at + 2] == Type.PUBLISH
            if length < 3 or (publish and length < PUBLISH_HEADER_BYTES):
                return batches, at, True
            if at + length > size:
                break
            key = bytes(data[at + 2 : at + 11]) if publish else b""  # type, destination, publisher
            if key and key == last:
                batches -= 1
            else:
                self.frames[batches] = 0
            at += length
            self.ends[batches] = at
            self.frames[batches] += 1
            batches, last = batches + 1, key
        return batches, at, False

    def partition_table(self, keys: bytes, numbers: bytes) -> dict[bytes, int]:
        """See `Kernels.partition_table`."""
        partitions = memoryview(numbers).cast("I")
        return {keys[at * 4 : at * 4 + 4]: partition for at, partition in enumerate(partitions)}

    def partition(self, size: int, table: dict[bytes, int], publisher: int) -> tuple[int, int, int]:
        """See `Kernels.partition`."""
        data, at = self.view, 0
        parts: dict[int, list[bytes]] = {}
        while size - at >= PUBLISH_HEADER_BYTES:
            end = at + (data[at] << 8 | data[at + 1])
            partition = table.get(bytes(data[at + 3 : at + 7]))
            ours = int.from_bytes(data[at + 7 : at + 11], "little") == publisher
            if (
                not ours
                or partition is None
                or data[at + 2] != Type.PUBLISH
                or end - at < PUBLISH_HEADER_BYTES
                or end > size
            ):
                break
            parts.setdefault(partition, []).append(bytes(data[at:end]))
            at = end
        to, partitioned = 0, memoryview(self.partitioned).cast("B")
        for number, partition in enumerate(sorted(parts)):
            frames = b"".join(parts[partition])
            partitioned[to : to + len(frames)] = frames
            to += len(frames)
            self.partition_ids[number], self.partition_ends[number] = partition, to
        return len(parts), at, sum(map(len, parts.values()))

    def unmask(self, size: int) -> tuple[int, int]:
        """See `Kernels.unmask`."""
        data, at, to = self.view, 0, 0
        while size - at >= 6 and data[at] == 0x82:  # final, binary
            short, head = data[at + 1] & 0x7F, 6
            if data[at + 1] < 128 or short == 127 or short == 0:  # not masked, or too large for a raw frame, or empty
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

    def encode(self, batch: bytes) -> tuple[bytes, int]:
        """See `Kernels.encode`."""
        parts, at, size = [], 0, len(batch)
        while size - at >= 2:
            end = at + (batch[at] << 8 | batch[at + 1])
            if end > size:
                break
            parts.append(encode_frame(batch[at:end]))
            at = end
        return b"".join(parts), at

    def publishes(
        self, start: int, size: int, name_bytes: int, block_bytes: int, destination: int, publisher: int
    ) -> tuple[int, int, int]:
        """See `Kernels.publishes`."""
        data, at, out = memoryview(self.partitioned).cast("B"), start, 0
        head = bytes((Type.PUBLISH,)) + destination.to_bytes(4, "big") + publisher.to_bytes(4, "big") + bytes(4)
        count, name, first = 0, b"", self.view[start]
        number_bytes, most = (2, ROW_MESSAGES) if first != 0x30 else (0, size)
        while size - at >= 2 and self.view[at] == first and count < most:
            packet = self._plain_publish(at, size, name_bytes, number_bytes, block_bytes)
            if packet is None or (name and packet[0] != name):
                break
            name, number, payload, end = packet
            frame = (len(payload) + PUBLISH_HEADER_BYTES).to_bytes(2, "big") + head + payload
            if out + len(frame) > BUFFER_BYTES:
                break
            data[out : out + len(frame)] = frame
            if number_bytes:
                self.packet_numbers[2 * count : 2 * count + 2] = number
            at, out, count = end, out + len(frame), count + 1
        return count, at, out

    def _plain_publish(
        self, at: int, size: int, name_bytes: int, number_bytes: int, block_bytes: int
    ) -> tuple[bytes, bytes, bytes, int] | None:
        """Return topic with its length, packet identifier, payload and end; None if it does not fit `publishes`."""
        data, length, body = self.view, self.view[at + 1], at + 2
        if length > 127:
            if size - at < 4:
                return None
            length, body = length - 128 + data[at + 2] * 128, at + 3
            if data[at + 2] > 127:
                length, body = length - 16384 + data[at + 3] * 16384, at + 4
                if data[at + 3] > 127:
                    return None
        name_ends = body + 2 + name_bytes
        start = name_ends + number_bytes + block_bytes
        end = body + length
        if not start <= end <= size or end - start > MAX_PAYLOAD_BYTES:
            return None
        name, number = bytes(data[body:name_ends]), bytes(data[name_ends : name_ends + number_bytes])
        if name[0] << 8 | name[1] != name_bytes or (block_bytes and data[start - 1]) or number == b"\0\0":
            return None
        return name, number, bytes(data[start:end]), end

    def packed(self, batch: bytes, first: int, fixed: bytes) -> tuple[bytes, int]:
        """See `Kernels.packed`."""
        return packed_in_python(batch, first, fixed)

    def count(self, batch: bytes) -> int:
        """See `Kernels.count`."""
        return count_frames(batch)

    def measure(self, batch: bytes | memoryview) -> tuple[int, int]:
        """See `Kernels.measure`."""
        return measure_frames(batch)


# ---- Kernels in LuaJIT
#
# LuaJIT is part of the wheel of lupa, so no compiler is needed. `load` selects these kernels if they work.

log = logging.getLogger("smqrt")

_TRIAL, _FOUND = b"\x00\x05one\x00\x05two", ((2, 10, False), 5, 2)
"""Two frames, and the results of `scan`, `ends` and `count` for them."""


class JitKernels:
    """Kernels as compiled LuaJIT loops. A process has one: received data is processed before the next receive."""

    def __init__(self) -> None:
        import lupa.luajit21 as lupa

        self._runtime = lupa.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        source = resources.files("smqrt.wire").joinpath("luajit_kernels.lua").read_bytes()
        chunk: Any = self._runtime.compile(source)
        self.scan, self.unmask, self.encode, *others = chunk(BUFFER_BYTES)
        self.partition_table, self.partition, self._measure, self.publishes, self.packed, *addresses, self._keep = (
            others
        )
        buffer_at, ends_at, frames_at, partitioned_at, partition_ids_at, partition_ends_at, numbers_at = addresses
        self.chars = (ctypes.c_char * BUFFER_BYTES).from_address(buffer_at)
        self.view = memoryview(self.chars).cast("B")
        self.ends, self.frames = _u32_view(ends_at, MAX_BATCHES), _u32_view(frames_at, MAX_BATCHES)
        self.partitioned = (ctypes.c_char * BUFFER_BYTES).from_address(partitioned_at)
        self.partition_ids = _u32_view(partition_ids_at, MAX_PARTITIONS)
        self.partition_ends = _u32_view(partition_ends_at, MAX_PARTITIONS)
        self.packet_numbers = (ctypes.c_char * (2 * ROW_MESSAGES)).from_address(numbers_at)

    def count(self, batch: bytes) -> int:
        """See `Kernels.count`."""
        return self.measure(batch)[0]

    def measure(self, batch: bytes | memoryview) -> tuple[int, int]:
        """See `Kernels.measure`."""
        address = _address(batch) if isinstance(batch, bytes) else ctypes.addressof(ctypes.c_char.from_buffer(batch))
        found: tuple[int, int] = self._measure(address, len(batch))
        return found


def _address(data: bytes) -> int | None:
    # Lua would copy the bytes if they were passed as a string.
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value


def _u32_view(address: int, count: int) -> memoryview:
    return memoryview((ctypes.c_uint32 * count).from_address(address)).cast("B").cast("I")


def load() -> Kernels:
    """Return the fastest kernels that work on this machine; `SMQRT_KERNELS=pure` selects those in Python."""
    if os.environ.get("SMQRT_KERNELS") == "pure":
        return PureKernels()
    try:
        kernels = JitKernels()
        kernels.view[: len(_TRIAL)] = _TRIAL  # checks that Lua and Python have the same bytes at the addresses
        found = kernels.scan(len(_TRIAL), 0), kernels.ends[0], kernels.count(_TRIAL)
        if found != _FOUND:
            raise ValueError(f"they return {found} instead of {_FOUND}")
        return kernels
    except Exception as error:
        log.info("LuaJIT kernels are not available (%s); the Python kernels are used", error)
        return PureKernels()

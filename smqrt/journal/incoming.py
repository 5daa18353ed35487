"""The body of a commit, taken apart while it arrives.

A record is `u16 topic length, topic, u16 subtopic length, subtopic, u32 payload length, payload`, big-endian; a
subtopic of no bytes is none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NoReturn

from smqrt.errors import ArgumentError

Record = tuple[bytes, bytes | None, bytes]
"""Topic, subtopic, payload."""

_U16, _U32 = struct.Struct(">H"), struct.Struct(">I")


class Decoder:
    """Decodes records out of pieces of any size.

    Args:
        payload_bytes: the longest payload that is taken.

    Attributes:
        count: how many records were given so far.
    """

    def __init__(self, payload_bytes: int) -> None:
        self._payload_bytes = payload_bytes
        self._rest = b""
        self.count = 0

    def feed(self, piece: bytes) -> Iterator[Record]:
        """Takes the next piece; yields the records that it completes, so that others may have their turn in between.

        Raises:
            ArgumentError: a record has no topic, or too long a payload.
        """
        data = self._rest + piece if self._rest else piece
        at = 0
        while (end := self._end(data, at)) is not None:
            yield _record(data, at)
            self.count += 1
            at = end
        self._rest = data[at:]

    def finish(self) -> None:
        """Says that the body has ended.

        Raises:
            ArgumentError: it did so inside a record.
        """
        if self._rest:
            self._refuse("the body ends inside it; send whole records (topic, subtopic, payload, each with its length)")

    def _end(self, data: bytes, at: int) -> int | None:
        """Where the record at `at` ends; None when it is not all there."""
        size = len(data)
        if size - at < 2:
            return None
        topic_bytes = _U16.unpack_from(data, at)[0]
        if not topic_bytes:
            self._refuse("the topic is empty; every row is published to one")
        at += 2 + topic_bytes
        if size - at < 2:
            return None
        at += 2 + int(_U16.unpack_from(data, at)[0])
        if size - at < 4:
            return None
        payload_bytes = _U32.unpack_from(data, at)[0]
        if payload_bytes > self._payload_bytes:
            self._refuse(
                f"the payload has {payload_bytes} bytes; a message carries at most {self._payload_bytes}, split it"
            )
        end = at + 4 + int(payload_bytes)
        return end if end <= size else None

    def _refuse(self, what: str) -> NoReturn:
        raise ArgumentError(f"record {self.count + 1}: {what}.")


def _record(data: bytes, at: int) -> Record:
    """The whole record at `at`."""
    subtopic_at = at + 4 + int(_U16.unpack_from(data, at)[0])
    payload_at = subtopic_at + 4 + int(_U16.unpack_from(data, subtopic_at - 2)[0])
    topic = data[at + 2 : subtopic_at - 2]
    payload_bytes = _U32.unpack_from(data, payload_at - 4)[0]
    return topic, data[subtopic_at : payload_at - 4] or None, data[payload_at : payload_at + payload_bytes]

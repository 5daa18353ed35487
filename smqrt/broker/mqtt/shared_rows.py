"""Encoded PUBLISH packets with QoS 1 or 2 that several sessions send one after the other."""

from __future__ import annotations

from typing import NamedTuple

from smqrt.broker.mqtt.messages import LARGE_BYTES, MESSAGE_BYTES, NO_EXPIRY_S, Message

MAX_ROWS = 8
"""Rows that are remembered. Subscribers of a topic that are equally fast need the same one or two."""
MAX_ROW_BYTES = 64 << 10
"""Longer rows are not remembered."""


class Row(NamedTuple):
    """Messages in a row, with packet identifiers without gaps.

    Attributes:
        messages: the messages.
        by_number: the same by packet identifier.
        packets: their PUBLISH packets.
        memory_bytes: the memory of the messages while they wait, approximately.
    """

    messages: list[Message]
    by_number: dict[int, Message]
    packets: bytes
    memory_bytes: int


class SharedRows:
    """The last rows of a hub.

    Sessions that wait for the same messages, and have used the same packet identifiers, send the same bytes. They are
    encoded for the first one.
    """

    __slots__ = ("_rows",)

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int, Message], Row] = {}

    def find(self, messages: list[Message], version: int, number: int) -> Row | None:
        """Return the row of some messages, if one is remembered.

        Args:
            messages: the messages, at least one.
            version: the version of the subscriber.
            number: the first packet identifier.
        """
        row = self._rows.get((version, number, messages[0]))
        return row if row is not None and row.messages == messages else None

    def beginning_with(self, message: Message, version: int, number: int) -> Row | None:
        """Return the row that begins with a message, if one is remembered; see `find`."""
        return self._rows.get((version, number, message))

    def encode(self, messages: list[Message], version: int, number: int) -> Row | None:
        """Return a new row, and remember it; see `find`.

        Returns:
            None when a message expires, since its packet changes with time, or when one is large.
        """
        pieces: list[bytes] = []
        memory_bytes = 0
        for at, message in enumerate(messages, number):
            if message.expires_s != NO_EXPIRY_S or len(message.payload) > LARGE_BYTES:
                return None
            memory_bytes += message.size_bytes + MESSAGE_BYTES
            before, after = message.parts(version, 0)
            pieces += (before, at.to_bytes(2), after)
        row = Row(messages, dict(enumerate(messages, number)), b"".join(pieces), memory_bytes)
        if len(row.packets) <= MAX_ROW_BYTES:
            if len(self._rows) >= MAX_ROWS:
                self._rows.clear()
            self._rows[version, number, messages[0]] = row
        return row

    def clear(self) -> None:
        """Remember no rows."""
        self._rows.clear()

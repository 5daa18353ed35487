"""Interfaces that a session needs to send its messages."""

from __future__ import annotations

from typing import Protocol

from smqrt.broker.mqtt.messages import Message, Run


class ConnectedClient(Protocol):
    """The connected client of a session.

    Attributes:
        etid: its ETID.
    """

    etid: int

    def send_run(self, run: Run, retain: bool, identifiers: bytes) -> None:
        """Send messages with QoS 0."""

    def send_message(self, message: Message, number: int, is_dup: bool) -> bool:
        """Send a message; return false when the client does not take packets of this size."""

    def send_encoded(self, packets: bytes) -> None:
        """Send PUBLISH packets with QoS 1 or 2."""

    def send_unnumbered(self, packets: bytes) -> None:
        """Send retained messages with QoS 0, as PUBLISH packets."""

    def flush(self) -> None:
        """Pass what was sent to the socket now, not at the end of the turn."""

    @property
    def max_aliases_out(self) -> int:
        """The number of topic aliases that the client takes."""

    def alias_of(self, name: bytes) -> int:
        """Return the topic alias for a message with QoS 1 or 2 that is sent now, see `Message.parts`."""

    @property
    def peer_limit_bytes(self) -> int:
        """The largest packet that the client takes; 0 for any."""

    def send_release(self, number: int) -> None:
        """Send PUBREL."""

    @property
    def window(self) -> int:
        """The maximum of messages in flight."""

    @property
    def has_room(self) -> bool:
        """Whether the connection takes more messages now."""


class OriginFilter(Protocol):
    """Decides which messages a session gets that is at two nodes for a while, see `smqrt.cluster.mqtt_sessions`."""

    def takes(self, origin: int, /) -> bool:
        """Return whether the session gets the message with this id."""

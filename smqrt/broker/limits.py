"""What strangers may make a hub keep (help: limits)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from smqrt.broker.stats import Refusal

if TYPE_CHECKING:
    from smqrt.broker.session import Session
    from smqrt.broker.topics import SubTopics, Topics

NAME_BYTES = 64 << 20
"""Of all topic names together, and of all sub-topic names."""
CLIENT_NAME_BYTES = 4 << 20
"""Of the new names of one client."""


@dataclass(slots=True)
class Limits:
    """The limits of one hub.

    Attributes:
        names: topics in all, and sub-topics in all.
        client: new names of one client, its subscriptions, and its observations.
    """

    names: int = 250_000
    client: int = 10_000

    def of_all(self, table: Topics | SubTopics, name: bytes) -> Refusal | None:
        """Why `name` may not be added to `table`."""
        if len(table.by_name) >= self.names:
            return Refusal.NAMES
        return Refusal.NAME_BYTES if table.names_bytes + len(name) > NAME_BYTES else None

    def of_client(self, session: Session, name: bytes) -> Refusal | None:
        """Why `session` may not bring in `name`, which is new."""
        over = session.names_made >= self.client or session.names_made_bytes + len(name) > CLIENT_NAME_BYTES
        return Refusal.CLIENT_NAMES if over else None

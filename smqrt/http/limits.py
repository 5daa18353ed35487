"""Limits of what a client may take of an HTTP server (design: reliability §5)."""

from __future__ import annotations

from dataclasses import dataclass

from smqrt.http.status import HttpError
from smqrt.net.refusals import Refusals

_NO_ROOM = "The server holds as many bodies of requests in memory as it may; try again in a second."


@dataclass(frozen=True)
class HttpLimits:
    """What a client may take. Times in seconds, sizes in bytes.

    Attributes:
        first_byte_s: from accepting to the first byte.
        header_s: from the first byte of a head to its last.
        body_idle_s: between two pieces of a body.
        body_grace_s: what the server waits for a whole body; each `body_rate_bytes_s` bytes that came add a second.
        body_rate_bytes_s: see `body_grace_s`: a client that stays slower than this is cut off in the end.
        keep_alive_s: between two requests.
        send_idle_s: between two moments in which the client takes some of a response.
        head_bytes: request line and header fields.
        body_bytes: a body that is read as a whole (`Request.body`).
        bodies_bytes: all bodies that were read as a whole and whose requests are not over.
    """

    first_byte_s: float = 5.0
    header_s: float = 10.0
    body_idle_s: float = 10.0
    body_grace_s: float = 20.0
    body_rate_bytes_s: float = 500.0
    keep_alive_s: float = 60.0
    send_idle_s: float = 30.0
    head_bytes: int = 16384
    body_bytes: int = 4 << 20
    bodies_bytes: int = 128 << 20


class BodyMemory:
    """The memory for bodies that are read as a whole, of all requests together.

    Args:
        limit_bytes: how much there is.

    Attributes:
        held_bytes: how much is taken.
        refusals: the bodies that found no room.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.held_bytes = 0
        self.refusals = Refusals()
        self._limit_bytes = limit_bytes

    def take(self, count: int) -> None:
        """Takes `count` bytes.

        Raises:
            HttpError: 503, they are not there.
        """
        if self.held_bytes + count > self._limit_bytes:
            mib = self._limit_bytes >> 20
            self.refusals.add(f"refused a body: the bodies in memory have {mib} MiB already; the setting is bodies_mib")
            raise HttpError(503, _NO_ROOM, headers={"Retry-After": "1"}, close=True)
        self.held_bytes += count

    def give_back(self, count: int) -> None:
        """Gives `count` bytes back."""
        self.held_bytes -= count

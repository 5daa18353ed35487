"""Parts of the SMQ clients for gevent and for asyncio."""

from __future__ import annotations

import logging
import math

from smqrt.clients.smq.options import to_bytes
from smqrt.clients.smq.protocol import ConnectionEnd
from smqrt.clients.smq.session import ClientSession, to_text

log = logging.getLogger("smqrt.client")

MAX_CREDENTIALS_BYTES = 255


class KnownNames:
    """Names and numbers that a client knows, and the size of its send queue."""

    _session: ClientSession

    def gettid(self) -> int | None:
        """Return the client's own ETID, None while not connected."""
        return self._session.etid or None

    def topic2tid(self, topic: str | bytes) -> int | None:
        """Return the ID of a topic; None when it is unknown to this client."""
        return self._session.topics.number(to_bytes(topic))

    def tid2topic(self, tid: int) -> str | bytes | None:
        """Return the name of a topic (bytes when it is not UTF-8); None when it is unknown to this client."""
        return to_text(self._session.topics.name(tid))

    def subtopic2tid(self, subtopic: str | bytes) -> int | None:
        """Return the ID of a sub-topic; None when it is unknown to this client."""
        return self._session.subtopics.number(to_bytes(subtopic))

    def tid2subtopic(self, stid: int) -> str | bytes | None:
        """Return the name of a sub-topic; None when it is unknown to this client."""
        return to_text(self._session.subtopics.name(stid))

    @property
    def backlog_bytes(self) -> int:
        """The size of the unsent messages and requests."""
        return self._session.waiting_bytes

    @property
    def dropped(self) -> int:
        """The number of unsent messages that were dropped: queue full, topic denied, or connection lost."""
        return self._session.dropped


def checked_credentials(value: object) -> bytes:
    """Return the credentials that `onauth` returned, str or bytes.

    Raises:
        ConnectionEnd: they cannot be sent.
    """
    credentials: object = value or b""
    if isinstance(credentials, str):
        credentials = credentials.encode()
    if not isinstance(credentials, bytes | bytearray):
        fault = f"returned {type(credentials).__name__}; credentials are str or bytes"
    elif len(credentials) > MAX_CREDENTIALS_BYTES:
        fault = f"returned {len(credentials)} bytes; at most {MAX_CREDENTIALS_BYTES} can be sent"
    else:
        return bytes(credentials)
    raise ConnectionEnd("onauth", f"onauth {fault}", can_reconnect=False)


class EndLog:
    """Logs why connections ended: INFO, but WARNING for the first failure of a program that has no `onclose`.

    Such a program would wait for its first connection without a word, since log levels below WARNING are not shown by
    default.
    """

    def __init__(self) -> None:
        self._has_warned = False

    def add(self, end: ConnectionEnd, has_onclose: bool, connections: int) -> None:
        """Log the end of a connection or attempt; `connections` is the number of earlier successful attempts."""
        if has_onclose or connections or self._has_warned:
            log.info("%s", end)
        else:
            self._has_warned = True
            log.warning("not connected: %s", end)


def checked_decision(decision: object) -> bool | float | None:
    """Return the decision of `onclose`: a bool, None, or seconds, at least 0. Log any other value and return None."""
    if decision is None or isinstance(decision, bool):
        return decision
    if isinstance(decision, int | float) and not math.isnan(decision):
        return max(float(decision), 0.0)
    log.error("onclose returned %r; it must return None, False, True or a number of seconds; None is assumed", decision)
    return None

"""Record and log of closed client connections.

Each `CloseReason` has an explanation and a remedy for operators. The last connections are kept in memory; each cause
is logged at most once a second for a hub.
"""

from __future__ import annotations

import logging
import socket
import struct
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from time import time
from typing import Any

from smqrt.broker.outbox import Outbox
from smqrt.broker.sessions import TOO_MANY_CONNECTIONS, Session
from smqrt.broker.topics import USER_CONNECTIONS
from smqrt.errors import CloseReason
from smqrt.settings.limits import LineLimit
from smqrt.transport.tls import TlsTransport

log = logging.getLogger("smqrt.close")

KEPT = 1000
"""The number of closed connections that are kept, a few hundred bytes each."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What a close reason means to an operator.

    Attributes:
        what: what happened, one sentence.
        remedy: what to do about it, one sentence.
        setting: the setting of the server or option of the hub that changes it; empty for none.
        is_trouble: whether the log line is a warning; otherwise the close is ordinary.
    """

    what: str
    remedy: str
    setting: str = ""
    is_trouble: bool = True


EXPLANATIONS = {
    CloseReason.CLIENT_DISCONNECT: Ending(
        "The client sent a Disconnect packet.", "Nothing is wrong.", is_trouble=False
    ),
    CloseReason.PEER_CLOSED: Ending(
        "The client, or a device on the way, closed the connection without a Disconnect packet.",
        "A single one is harmless; many at once point to a proxy, a NAT or a network that drops connections.",
        "hub option keepidle",
        is_trouble=False,
    ),
    CloseReason.READ_FAILED: Ending(
        "Reading from the socket failed: the client reset the connection, or TCP keep-alive got no answer.",
        "Check the network, and whether the client's process died; a smaller keepidle detects dead clients sooner.",
        "hub option keepidle",
        is_trouble=False,
    ),
    CloseReason.WRITE_FAILED: Ending(
        "Writing to the socket failed: the client is gone.",
        "Check the network, and whether the client's process died.",
        "hub option keepidle",
        is_trouble=False,
    ),
    CloseReason.TAKEN_OVER: Ending(
        "Another connection with the same uid replaced this one.",
        "If they replace each other repeatedly, two clients use one uid: give each its own.",
        is_trouble=False,
    ),
    CloseReason.REFUSED: Ending(
        "The client was rejected: its login was wrong, or the application's authenticate denied it.",
        "Check the client's name and password, and what authenticate returns.",
        "auth.users",
    ),
    CloseReason.BAD_CONNECT: Ending(
        "The client's first packet was not a valid Connect; the line says what was wrong.",
        "Fix the client, or check whether it speaks SMQ at all.",
    ),
    CloseReason.CONNECT_TIMEOUT: Ending(
        "The client sent no Connect in time, or authenticate did not return in time.",
        "For slow networks increase the time; for a slow authenticate, check what it waits for.",
        "hub option readtmo",
    ),
    CloseReason.FORGED_PUBLISHER: Ending(
        "The client published with an ETID that is not its own.",
        "Use the ETID of the last Connack; it may change with a reconnect.",
    ),
    CloseReason.SHORT_PACKET: Ending(
        "The client sent a packet that is shorter than its type needs.", "Fix the client; it does not speak SMQ."
    ),
    CloseReason.UNKNOWN_PACKET: Ending(
        "The client sent a packet of a type that the protocol does not have.", "Fix the client."
    ),
    CloseReason.SECOND_CONNECT: Ending("The client sent Connect a second time.", "Fix the client."),
    CloseReason.FRAGMENT_TOO_LARGE: Ending(
        "Fragments (PubFrag) exceeded 65520 bytes together.", "Send larger data in several messages."
    ),
    CloseReason.FRAGMENT_NOT_ALLOWED: Ending(
        "The client sent PubFrag over a WebSocket, where it is not allowed.", "Send whole messages over WebSockets."
    ),
    CloseReason.WEBSOCKET_PROTOCOL: Ending(
        "The client violated the WebSocket protocol (RFC 6455).", "Fix the client, or the proxy in front of it."
    ),
    CloseReason.WEBSOCKET_CLOSED: Ending(
        "The client closed its WebSocket, for example because a page was closed or reloaded.",
        "Nothing is wrong.",
        is_trouble=False,
    ),
    CloseReason.INVALID_TEXT: Ending(
        "A WebSocket text message was not UTF-8.", "Send binary messages, or text that is UTF-8."
    ),
    CloseReason.TOO_MANY_FRAGMENTS: Ending(
        "A WebSocket message had too many fragments.", "Send messages in fewer, larger frames."
    ),
    CloseReason.MESSAGE_TOO_LARGE: Ending(
        "A message was larger than an SMQ packet can be, or than the server allows.",
        "Send larger data in several messages.",
        "limits.message_bytes",
    ),
    CloseReason.SLOW_CONSUMER: Ending(
        "The client did not read: its socket accepted no byte for 10 seconds, or too many answers waited for it,"
        " or too many messages (the policy `disconnect`).",
        "Check the client's network and CPU, or publish less to it; a larger budget bridges longer pauses.",
        "hub option budget",
    ),
    CloseReason.PUBLISH_RATE: Ending(
        "The client exceeded its publish rate.",
        "Publish less, allow more, or make such clients wait (limits.publish_policy).",
        "limits.publish_rate",
    ),
    CloseReason.IDLE: Ending(
        "The client was silent, and did not answer a ping.",
        'Check the client and its network; clients that do not answer Ping need idle_s = "unlimited".',
        "limits.idle_s",
    ),
    CloseReason.HOOK_FAILED: Ending(
        "A callback of the application failed while it served this client.",
        "The log has the error with its traceback.",
    ),
    CloseReason.RESTARTED: Ending(
        "The application of the hub, or the server, was restarted.",
        "Nothing is wrong: the client reconnects.",
        is_trouble=False,
    ),
    CloseReason.LOGIN_ENDED: Ending(
        "The client's login ended: its token expired, its user was removed, or the password changed.",
        "Let the client log in again.",
        "auth.users",
    ),
    CloseReason.SHUTDOWN: Ending(
        "The server, the application or an operator closed the connection.", "Nothing is wrong.", is_trouble=False
    ),
}
"""One for each reason; a test compares the table with the enum."""

UNKNOWN = Ending("The connection was closed.", "Check the log.")


def explanation_of(reason: CloseReason) -> Ending:
    """Return the explanation of a reason."""
    return EXPLANATIONS.get(reason, UNKNOWN)


def manual() -> str:
    """Return the table of the manual in Markdown."""
    lines = ["| reason | in the log | what happened | what to do | what changes it |", "|---|---|---|---|---|"]
    for reason, ending in EXPLANATIONS.items():
        setting = f"`{ending.setting.rpartition(' ')[2]}`" if ending.setting else ""
        kind = " of [the hub](hub-api.md)" if ending.setting.startswith("hub option ") else ""
        name = f"`{reason.name.lower()}`"
        lines.append(f"| {name} | `{reason.value}` | {ending.what} | {ending.remedy} | {setting}{kind} |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Closed:
    """A closed connection.

    Attributes:
        number: counts the closed connections of this process.
        at_s: when it was closed, in Unix seconds.
        hub: the number of its hub.
        etid: the client's ETID; 0 when it was never accepted.
        uid: the client's own identifier.
        user: the logged-in user; empty without a login.
        address: of the client.
        transport: "raw", "websocket", "raw+tls" or "websocket+tls".
        connected_s: how long it was connected; None when it was never accepted.
        reason: why it was closed.
        detail: more about the reason; may be empty.
        bytes_received, bytes_sent: of the client; None when there are no observers.
        setting: the setting that changes it, as in `Ending`; empty for none.
    """

    number: int
    at_s: float
    hub: int
    etid: int
    uid: bytes
    user: str
    address: str
    transport: str
    connected_s: float | None
    reason: CloseReason
    detail: str
    bytes_received: int | None = None
    bytes_sent: int | None = None
    setting: str = ""


class CloseLog:
    """The last closed connections."""

    def __init__(self, kept: int = KEPT) -> None:
        self.count = 0
        self._kept: deque[Closed] = deque(maxlen=kept)

    def add(self, closed: Closed) -> None:
        """Add a connection; the oldest one is dropped when there are too many."""
        self.count += 1
        self._kept.append(closed)

    def newest_first(self) -> Iterator[Closed]:
        """Yield the connections, the newest first."""
        return iter(list(reversed(self._kept)))


DETAIL_CHARS = 200
"""The part of a detail that is kept: some details contain text of the client."""

closes = CloseLog()
"""The last closed connections of this process."""
observers: list[Callable[[Closed], object]] = []
"""Functions that are called for each closed connection."""

_U64 = struct.Struct("=Q")
_TCP_INFO_BYTES = 104 + 4 * 8
_BYTES_ACKED_AT, _BYTES_RECEIVED_AT = 120, 128
"""Offsets of `tcpi_bytes_acked` and `tcpi_bytes_received` in `struct tcp_info` (linux/tcp.h, since 4.1)."""
_line_limits: defaultdict[tuple[int, CloseReason], LineLimit] = defaultdict(LineLimit)
"""By hub and reason."""
_MAX_LINE_LIMITS = 2000


def record(hub: int, session: Session, reason: CloseReason, detail: str) -> None:
    """Record a closed connection, and log it, unless this reason was logged for this hub within the last second."""
    since_s = session.since_s
    closed = Closed(
        closes.count + 1,
        time(),
        hub,
        session.etid,
        session.uid,
        user_of(session),
        address_of(session.outbox),
        transport_of(session.outbox),
        None if since_s is None else session.broker.clock() - since_s,
        reason,
        detail[:DETAIL_CHARS],
        *(transferred(session.outbox) if observers else (None, None)),
        setting=setting_of(session, reason, detail),
    )
    closes.add(closed)
    for observer in observers:
        observer(closed)
    level = logging.WARNING if explanation_of(reason).is_trouble else logging.INFO
    if len(_line_limits) >= _MAX_LINE_LIMITS:  # limits of closed hubs would accumulate
        _line_limits.clear()
    others = _line_limits[hub, reason].others() if log.isEnabledFor(level) else None
    if others is not None:
        log.log(level, "%s%s", sentence(closed), others, extra={"event": "close", "fields": fields(closed)})


def setting_of(session: Session, reason: CloseReason, detail: str) -> str:
    """Return the setting that changes this close; of a rejected client, the setting of what has rejected it."""
    if reason is not CloseReason.REFUSED:
        return explanation_of(reason).setting
    if detail == TOO_MANY_CONNECTIONS:
        return USER_CONNECTIONS.setting
    is_login_refused = session.broker.hooks.has_logins and session.identity is None
    return explanation_of(reason).setting if is_login_refused else ""  # otherwise the application has rejected it


def sentence(closed: Closed) -> str:
    """Return the log line."""
    client = f"{closed.uid!r} " if closed.uid else ""
    ending = explanation_of(closed.reason)
    detail = f" ({closed.detail})" if closed.detail and closed.detail != closed.reason.value else ""
    setting = f"; see {closed.setting}" if ending.is_trouble and closed.setting else ""
    return f"closed: {client}{closed.address} {closed.transport}: {closed.reason.value}{detail}{setting}"


def fields(closed: Closed) -> dict[str, object]:
    """Return the fields of the JSON log line."""
    return {
        "reason": closed.reason.name.lower(),
        "hub": closed.hub,
        "etid": closed.etid,
        "uid": closed.uid.decode("utf-8", "backslashreplace"),
        "user": closed.user,
        "address": closed.address,
        "transport": closed.transport,
        "detail": closed.detail,
        "setting": closed.setting,
    }


def user_of(session: Session) -> str:
    """Return the logged-in user; empty without a login."""
    return str(getattr(getattr(session, "identity", None), "user", None) or "")


def transport_of(outbox: Outbox) -> str:
    """Return "raw" or "websocket", over TLS with "+tls" appended."""
    kind = "websocket" if outbox.websocket or not outbox.takes_fragments else "raw"
    return f"{kind}+tls" if isinstance(getattr(outbox, "transport", None), TlsTransport) else kind


def address_of(outbox: Outbox) -> str:
    """Return the address of a client, also of a closed connection; empty when it is not known."""
    transport: Any = getattr(outbox, "transport", None)
    host = getattr(transport, "peer_host", None)
    if isinstance(host, str):
        return host
    with suppress(OSError, AttributeError, TypeError, IndexError):
        return str(transport.getpeername()[0])
    return ""


def transferred(outbox: Outbox) -> tuple[int | None, int | None]:
    """Return the bytes received from a client and acknowledged by it, as the kernel counts them, with all framing.

    None where there is no such count.
    """
    transport: Any = getattr(outbox, "transport", None)
    try:
        info = transport.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return _U64.unpack_from(info, _BYTES_RECEIVED_AT)[0], _U64.unpack_from(info, _BYTES_ACKED_AT)[0]
    except (OSError, AttributeError, struct.error):
        return None, None

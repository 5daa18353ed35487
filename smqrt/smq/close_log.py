"""Record and log of closed client connections.

Each `CloseReason` has an explanation and a remedy for operators. The last closed connections are kept in memory. Each
reason is logged at most once a second per hub.
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

from smqrt.broker.mqtt.client import FOREIGN_ID, MqttClient
from smqrt.broker.outbox import Outbox
from smqrt.broker.sessions import TOO_MANY_CONNECTIONS, Session
from smqrt.broker.topics import USER_CONNECTIONS
from smqrt.errors import CloseReason
from smqrt.settings.limits import LineLimit
from smqrt.transport.tls import TlsTransport

log = logging.getLogger("smqrt.close")

KEPT = 1000
"""Number of closed connections that are kept, a few hundred bytes each."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of a close reason for operators.

    Attributes:
        what: the event, in one sentence.
        remedy: the remedy, in one sentence.
        setting: the setting of the server, or option of the hub, that influences such closes; empty for none.
        is_trouble: whether the log line is a warning; otherwise the close is normal.
    """

    what: str
    remedy: str
    setting: str = ""
    is_trouble: bool = True


EXPLANATIONS = {
    CloseReason.CLIENT_DISCONNECT: Explanation(
        "The client sent a Disconnect packet.", "Nothing is wrong.", is_trouble=False
    ),
    CloseReason.PEER_CLOSED: Explanation(
        "The client, or a device on the way, closed the connection without a Disconnect packet.",
        "A single one is harmless; many at once point to a proxy, a NAT or a network that drops connections.",
        "hub option keepidle",
        is_trouble=False,
    ),
    CloseReason.READ_FAILED: Explanation(
        "Reading from the socket failed: the client reset the connection, or TCP keep-alive got no answer.",
        "Check the network, and whether the client's process died; a smaller keepidle detects dead clients sooner.",
        "hub option keepidle",
        is_trouble=False,
    ),
    CloseReason.WRITE_FAILED: Explanation(
        "Writing to the socket failed: the client is gone.",
        "Check the network, and whether the client's process died.",
        "hub option keepidle",
        is_trouble=False,
    ),
    CloseReason.TAKEN_OVER: Explanation(
        "Another connection with the same uid replaced this one.",
        "If they replace each other repeatedly, two clients use one uid: give each its own.",
        is_trouble=False,
    ),
    CloseReason.REFUSED: Explanation(
        "The client was rejected: its login was wrong, or the application's authenticate denied it.",
        "Check the client's name and password, and what authenticate returns.",
        "auth.users",
    ),
    CloseReason.BAD_CONNECT: Explanation(
        "The client's first packet was not a valid Connect; the line says what was wrong.",
        "Fix the client, or check whether it speaks SMQ at all.",
    ),
    CloseReason.CONNECT_TIMEOUT: Explanation(
        "The client sent no Connect in time, or authenticate did not return in time.",
        "For slow networks increase the time; for a slow authenticate, check what it waits for.",
        "hub option readtmo",
    ),
    CloseReason.FORGED_PUBLISHER: Explanation(
        "The client published with an ETID that is not its own.",
        "Use the ETID of the last Connack; it may change with a reconnect.",
    ),
    CloseReason.SHORT_PACKET: Explanation(
        "The client sent a packet that is shorter than its type needs.", "Fix the client; it does not speak SMQ."
    ),
    CloseReason.UNKNOWN_PACKET: Explanation(
        "The client sent a packet of a type that the protocol does not have.", "Fix the client."
    ),
    CloseReason.SECOND_CONNECT: Explanation("The client sent Connect a second time.", "Fix the client."),
    CloseReason.FRAGMENT_TOO_LARGE: Explanation(
        "Fragments (PubFrag) exceeded 65520 bytes together.", "Send larger data in several messages."
    ),
    CloseReason.FRAGMENT_NOT_ALLOWED: Explanation(
        "The client sent PubFrag over a WebSocket, where it is not allowed.", "Send whole messages over WebSockets."
    ),
    CloseReason.WEBSOCKET_PROTOCOL: Explanation(
        "The client violated the WebSocket protocol (RFC 6455).", "Fix the client, or the proxy in front of it."
    ),
    CloseReason.WEBSOCKET_CLOSED: Explanation(
        "The client closed its WebSocket, for example because a page was closed or reloaded.",
        "Nothing is wrong.",
        is_trouble=False,
    ),
    CloseReason.INVALID_TEXT: Explanation(
        "A WebSocket text message was not UTF-8.", "Send binary messages, or text that is UTF-8."
    ),
    CloseReason.TOO_MANY_FRAGMENTS: Explanation(
        "A WebSocket message had too many fragments.", "Send messages in fewer, larger frames."
    ),
    CloseReason.MESSAGE_TOO_LARGE: Explanation(
        "A message was larger than an SMQ packet can be, or than the server allows.",
        "Send larger data in several messages.",
        "limits.message_bytes",
    ),
    CloseReason.SLOW_CONSUMER: Explanation(
        "The client did not read: its socket accepted no byte for 10 seconds, or too many answers or messages "
        "(policy `disconnect`) were queued.",
        "Check the client's network and CPU, or publish less to it; a larger budget bridges longer pauses.",
        "hub option budget",
    ),
    CloseReason.PUBLISH_RATE: Explanation(
        "The client exceeded its publish rate.",
        "Publish less, allow more, or make such clients wait (limits.publish_policy).",
        "limits.publish_rate",
    ),
    CloseReason.IDLE: Explanation(
        "The client was silent, and did not answer a ping.",
        'Check the client and its network; clients that do not answer Ping need idle_s = "unlimited".',
        "limits.idle_s",
    ),
    CloseReason.MQTT_PROTOCOL: Explanation(
        "The MQTT client violated the protocol; the line says how.", "Fix the client."
    ),
    CloseReason.HOOK_FAILED: Explanation(
        "A callback of the application failed while it served this client.",
        "The log has the error with its traceback.",
    ),
    CloseReason.RESTARTED: Explanation(
        "The application of the hub, or the server, was restarted.",
        "Nothing is wrong: the client reconnects.",
        is_trouble=False,
    ),
    CloseReason.LOGIN_ENDED: Explanation(
        "The client's login ended: its token expired, its user was removed, or the password changed.",
        "Let the client log in again.",
        "auth.users",
    ),
    CloseReason.SHUTDOWN: Explanation(
        "The server, the application or an operator closed the connection.", "Nothing is wrong.", is_trouble=False
    ),
}
"""Explanations by reason; a test compares the table with the enumeration."""

UNKNOWN = Explanation("The connection was closed.", "Check the log.")


def explanation_of(reason: CloseReason) -> Explanation:
    """Return the explanation of a reason."""
    return EXPLANATIONS.get(reason, UNKNOWN)


def manual() -> str:
    """Return the table of the manual in Markdown."""
    lines = ["| reason | in the log | what happened | what to do | what changes it |", "|---|---|---|---|---|"]
    for reason, explanation in EXPLANATIONS.items():
        setting = f"`{explanation.setting.rpartition(' ')[2]}`" if explanation.setting else ""
        kind = " of [the hub](hub-api.md)" if explanation.setting.startswith("hub option ") else ""
        name = f"`{reason.name.lower()}`"
        lines.append(f"| {name} | `{reason.value}` | {explanation.what} | {explanation.remedy} | {setting}{kind} |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Closed:
    """A closed connection.

    Attributes:
        number: consecutive number of the closed connection in this process.
        at_s: time of the close, in Unix seconds.
        hub: number of the hub.
        etid: the client's ETID; 0 for a rejected client.
        uid: the identifier that the client sent.
        user: the logged-in user; empty without a login.
        address: the client's address.
        transport: "raw", "websocket", "raw+tls" or "websocket+tls".
        connected_s: duration of the connection in seconds; None for a rejected client.
        reason: the close reason.
        detail: details of the reason; may be empty.
        bytes_received, bytes_sent: traffic of the connection; None when there are no observers.
        setting: see `Explanation`; empty for none.
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
        """Add a connection; the oldest one is removed when the log is full."""
        self.count += 1
        self._kept.append(closed)

    def newest_first(self) -> Iterator[Closed]:
        """Yield the connections, the newest first."""
        return iter(list(reversed(self._kept)))


DETAIL_CHARS = 200
"""Maximum length of a detail: some contain text of the client."""

closes = CloseLog()
"""The last closed connections of this process."""
observers: list[Callable[[Closed], object]] = []
"""Functions that are called for each closed connection."""

_U64 = struct.Struct("=Q")
_TCP_INFO_BYTES = 104 + 4 * 8
_BYTES_ACKED_AT, _BYTES_RECEIVED_AT = 120, 128
"""Offsets of `tcpi_bytes_acked` and `tcpi_bytes_received` in `struct tcp_info` (linux/tcp.h, since 4.1)."""
_line_limits: defaultdict[tuple[int, CloseReason], LineLimit] = defaultdict(LineLimit)
"""Rate limits of log lines, by hub and reason."""
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
        *(transferred(session.outbox) if observers else (None, None)),  # a system call, which only observers need
        setting=setting_of(session, reason, detail),
    )
    closes.add(closed)
    for observer in observers:
        observer(closed)
    level = logging.WARNING if explanation_of(reason).is_trouble else logging.INFO
    if len(_line_limits) >= _MAX_LINE_LIMITS:  # those of closed hubs are never removed otherwise
        _line_limits.clear()
    others = _line_limits[hub, reason].line_suffix() if log.isEnabledFor(level) else None
    if others is not None:
        log.log(level, "%s%s", sentence(closed), others, extra={"event": "close", "fields": fields(closed)})


def setting_of(session: Session, reason: CloseReason, detail: str) -> str:
    """Return the setting that influences this close; for a rejected client, the setting of the check that failed."""
    if reason is not CloseReason.REFUSED:
        return explanation_of(reason).setting
    if detail == TOO_MANY_CONNECTIONS:
        return USER_CONNECTIONS.setting
    if detail.endswith(FOREIGN_ID):
        return "mqtt.client_id"
    has_asked = session.has_asked if isinstance(session, MqttClient) else True  # others ask as soon as they have read
    is_login_refused = has_asked and session.broker.hooks.has_logins and session.identity is None
    return explanation_of(reason).setting if is_login_refused else ""  # otherwise the application has rejected it


def sentence(closed: Closed) -> str:
    """Return the log line."""
    client = f"{closed.uid!r} " if closed.uid else ""
    explanation = explanation_of(closed.reason)
    detail = f" ({closed.detail})" if closed.detail and closed.detail != closed.reason.value else ""
    setting = f"; see {closed.setting}" if explanation.is_trouble and closed.setting else ""
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
    """Return "raw", "websocket", "mqtt" or "mqtt-websocket", over TLS with "+tls" appended."""
    kind = "websocket" if outbox.websocket or not outbox.takes_fragments else "raw"
    if outbox.protocol == "mqtt":
        kind = "mqtt-websocket" if outbox.websocket else "mqtt"
    return f"{kind}+tls" if isinstance(getattr(outbox, "transport", None), TlsTransport) else kind


def address_of(outbox: Outbox) -> str:
    """Return the address of a client, even of a closed connection; empty when it is unknown."""
    transport: Any = getattr(outbox, "transport", None)
    host = getattr(transport, "peer_host", None)
    if isinstance(host, str):
        return host
    with suppress(OSError, AttributeError, TypeError, IndexError):
        return str(transport.getpeername()[0])
    return ""


def transferred(outbox: Outbox) -> tuple[int | None, int | None]:
    """Return the bytes received from a client and the bytes acknowledged by it, including all framing.

    The kernel counts them. None without such a count.
    """
    transport: Any = getattr(outbox, "transport", None)
    try:
        info = transport.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return _U64.unpack_from(info, _BYTES_RECEIVED_AT)[0], _U64.unpack_from(info, _BYTES_ACKED_AT)[0]
    except (OSError, AttributeError, struct.error):
        return None, None

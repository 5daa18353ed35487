"""The ends of clients' connections: kept with who, when and why, and told in the log."""

from __future__ import annotations

import logging
import socket
import struct
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from time import time
from typing import Any

from smqrt.broker.outbox import Outbox
from smqrt.broker.session import TOO_MANY_CONNECTIONS, Session
from smqrt.broker.topics import USER_CONNECTIONS
from smqrt.errors import CloseReason
from smqrt.settings.limit_register import LineLimit
from smqrt.transport.tls import TlsTransport

# ---- Why connections ended: what each `CloseReason` means, what an operator can do, and the last of them in memory.

KEPT = 1000
"""So many endings are kept, a few hundred bytes each."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What a reason means to an operator.

    Attributes:
        what: what happened, one sentence.
        remedy: what to do about it, one sentence.
        setting: what changes it: a setting of the server, or an option of the hub; empty for nothing.
        is_trouble: whether it is no ordinary end, so that the log has a warning.
    """

    what: str
    remedy: str
    setting: str = ""
    is_trouble: bool = True


ENDINGS = {
    CloseReason.CLIENT_DISCONNECT: Ending(
        "The client said good-bye with a Disconnect packet.", "Nothing is wrong.", is_trouble=False
    ),
    CloseReason.PEER_CLOSED: Ending(
        "The client, or something between, closed the connection without a Disconnect packet.",
        "One of them is nothing; many at once point to a proxy, a NAT or a network that drops connections.",
        "hub option keepidle",
        is_trouble=False,
    ),
    CloseReason.READ_FAILED: Ending(
        "Reading from the socket failed: the client reset the connection, or TCP keep-alive got no answer.",
        "Look at the network, and whether the client's process died; a smaller keepidle finds dead clients sooner.",
        "hub option keepidle",
        is_trouble=False,
    ),
    CloseReason.WRITE_FAILED: Ending(
        "Writing to the socket failed: the client is gone.",
        "Look at the network, and whether the client's process died.",
        "hub option keepidle",
        is_trouble=False,
    ),
    CloseReason.TAKEN_OVER: Ending(
        "Another connection came with the same uid, and took the place of this one.",
        "When it goes back and forth, two clients use one uid: give each its own.",
        is_trouble=False,
    ),
    CloseReason.REFUSED: Ending(
        "The client was not let in: its login was wrong, or the application's authenticate said no.",
        "Look at the client's name and password, and at what authenticate answers.",
        "auth.users",
    ),
    CloseReason.BAD_CONNECT: Ending(
        "The client's first packet was not Connect, or not as it has to be; the line says what was wrong.",
        "Mend the client, or look whether it is one of SMQ at all.",
    ),
    CloseReason.CONNECT_TIMEOUT: Ending(
        "The client sent no Connect in time, or authenticate gave no answer in time.",
        "For slow networks give more time; for a slow authenticate, look at what it waits for.",
        "hub option readtmo",
    ),
    CloseReason.FORGED_PUBLISHER: Ending(
        "The client published under an ETID that is not its own.",
        "Use the ETID of the last Connack; after a reconnect it may be another one.",
    ),
    CloseReason.SHORT_PACKET: Ending(
        "The client sent a packet that is shorter than its type needs.", "Mend the client; it does not speak SMQ."
    ),
    CloseReason.UNKNOWN_PACKET: Ending(
        "The client sent a packet of a type that the protocol does not have.", "Mend the client."
    ),
    CloseReason.SECOND_CONNECT: Ending("The client sent Connect a second time.", "Mend the client."),
    CloseReason.FRAGMENT_TOO_LARGE: Ending(
        "Fragments (PubFrag) came together to more than 65520 bytes.", "Send larger things in several messages."
    ),
    CloseReason.FRAGMENT_NOT_ALLOWED: Ending(
        "The client sent PubFrag over a WebSocket, where it is not allowed.", "Send whole messages over WebSockets."
    ),
    CloseReason.WEBSOCKET_PROTOCOL: Ending(
        "The client broke a rule of WebSocket (RFC 6455).", "Mend the client, or the proxy in front of it."
    ),
    CloseReason.WEBSOCKET_CLOSED: Ending(
        "The client closed its WebSocket: a page was left or reloaded.", "Nothing is wrong.", is_trouble=False
    ),
    CloseReason.INVALID_TEXT: Ending(
        "A WebSocket text message was not UTF-8.", "Send binary messages, or text that is UTF-8."
    ),
    CloseReason.TOO_MANY_FRAGMENTS: Ending(
        "A WebSocket message came in more fragments than are taken.", "Send messages in fewer, larger frames."
    ),
    CloseReason.MESSAGE_TOO_LARGE: Ending(
        "A message was larger than an SMQ packet can be, or than messages may be here.",
        "Send larger things in several messages.",
        "limits.message_bytes",
    ),
    CloseReason.SLOW_CONSUMER: Ending(
        "The client did not read: its socket took not one byte for 10 seconds, or too many answers waited for it,"
        " or too many messages (the policy `disconnect`).",
        "Look at the client's network and CPU, or publish less to it; a larger budget bridges longer pauses.",
        "hub option budget",
    ),
    CloseReason.PUBLISH_RATE: Ending(
        "The client published more than it may in a second.",
        "Publish less, allow more, or let such clients wait (limits.publish_policy).",
        "limits.publish_rate",
    ),
    CloseReason.IDLE: Ending(
        "The client was silent, and did not answer when it was pinged.",
        'Look at the client and its network; clients that do not answer Ping need idle_s = "unlimited".',
        "limits.idle_s",
    ),
    CloseReason.HOOK_FAILED: Ending(
        "A callback of the application failed while this client was served.",
        "The log has the error with its traceback.",
    ),
    CloseReason.RESTARTED: Ending(
        "The application that has the hub, or the server, was started anew.",
        "Nothing is wrong: the client comes back.",
        is_trouble=False,
    ),
    CloseReason.LOGIN_ENDED: Ending(
        "The client's login ended: its token expired, its user was removed or got another password.",
        "Let the client log in again.",
        "auth.users",
    ),
    CloseReason.SHUTDOWN: Ending(
        "The server, the application or an operator ended the connection.", "Nothing is wrong.", is_trouble=False
    ),
}
"""One for each reason; a test holds the table to the enum."""

UNKNOWN = Ending("The connection ended.", "Look into the log.")


def ending_of(reason: CloseReason) -> Ending:
    """Returns what a reason means."""
    return ENDINGS.get(reason, UNKNOWN)


def manual() -> str:
    """Returns the table of the manual in Markdown."""
    lines = ["| reason | in the log | what happened | what to do | what changes it |", "|---|---|---|---|---|"]
    for reason, ending in ENDINGS.items():
        setting = f"`{ending.setting.rpartition(' ')[2]}`" if ending.setting else ""
        kind = " of [the hub](hub-api.md)" if ending.setting.startswith("hub option ") else ""
        name = f"`{reason.name.lower()}`"
        lines.append(f"| {name} | `{reason.value}` | {ending.what} | {ending.remedy} | {setting}{kind} |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Closed:
    """A connection that ended.

    Attributes:
        number: counts the endings of this process.
        at_s: when, in Unix seconds.
        hub: the number of its hub.
        etid: the client's ETID; 0 when it was never let in.
        uid: what the client called itself.
        user: who logged in; empty for nobody.
        address: the client's.
        transport: "raw", "websocket", "raw+tls" or "websocket+tls".
        connected_s: for how long it was connected; None when it was never let in.
        reason: why.
        detail: the same, more exactly; empty for no more.
        bytes_received, bytes_sent: what came from the client and what it took; None when nobody asked.
        setting: what changes that, as in `Ending`; empty for nothing.
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


class Closes:
    """The last endings, the newest of them last."""

    def __init__(self, kept: int = KEPT) -> None:
        self.count = 0
        self._kept: deque[Closed] = deque(maxlen=kept)

    def add(self, closed: Closed) -> None:
        """Keep an ending, and forget the oldest when there are too many."""
        self.count += 1
        self._kept.append(closed)

    def newest_first(self) -> Iterator[Closed]:
        """The endings, the newest first."""
        return iter(list(reversed(self._kept)))


log = logging.getLogger("smqrt.close")

DETAIL_CHARS = 200
"""Of a detail that are kept: strangers write some of them."""

closes = Closes()
"""The last ends in this process."""


observers: list[Callable[[Closed], object]] = []
"""Who is told of each end."""
_TCP_INFO_BYTES = 104 + 4 * 8
_BYTES_ACKED_AT, _BYTES_RECEIVED_AT = 120, 128
"""Where `struct tcp_info` of Linux has what the other side took, and what came from it (linux/tcp.h, since 4.1)."""
_lines: defaultdict[tuple[int, CloseReason], LineLimit] = defaultdict(LineLimit)
"""By hub and reason."""
_MANY_LINES = 2000


def ended(hub: int, session: Session, reason: CloseReason, detail: str) -> None:
    """Keep the end of a connection, and tell it in the log, unless there was a line of its cause in the last second."""
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
    level = logging.WARNING if ending_of(reason).is_trouble else logging.INFO
    if len(_lines) >= _MANY_LINES:  # hubs come and go
        _lines.clear()
    others = _lines[hub, reason].others() if log.isEnabledFor(level) else None
    if others is not None:
        log.log(level, "%s%s", sentence(closed), others, extra={"event": "close", "fields": fields(closed)})


def setting_of(session: Session, reason: CloseReason, detail: str) -> str:
    """Returns what changes that connections end so: of a refusal, the setting of what has refused the client."""
    if reason is not CloseReason.REFUSED:
        return ending_of(reason).setting
    if detail == TOO_MANY_CONNECTIONS:
        return USER_CONNECTIONS.setting
    is_login_refused = session.broker.hooks.has_logins and session.identity is None
    return ending_of(reason).setting if is_login_refused else ""  # else the application, or another user's client


def sentence(closed: Closed) -> str:
    """Returns the line of the log."""
    who = f"{closed.uid!r} " if closed.uid else ""
    ending = ending_of(closed.reason)
    detail = f" ({closed.detail})" if closed.detail and closed.detail != closed.reason.value else ""
    setting = f"; see {closed.setting}" if ending.is_trouble and closed.setting else ""
    return f"closed: {who}{closed.address} {closed.transport}: {closed.reason.value}{detail}{setting}"


def fields(closed: Closed) -> dict[str, object]:
    """Returns the same for a log of JSON lines."""
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
    """Returns who has logged in; empty for nobody."""
    return str(getattr(getattr(session, "identity", None), "user", None) or "")


def transport_of(outbox: Outbox) -> str:
    """Returns "raw" or "websocket", with "+tls" behind it over TLS."""
    kind = "websocket" if outbox.websocket or not outbox.takes_fragments else "raw"
    return f"{kind}+tls" if isinstance(getattr(outbox, "transport", None), TlsTransport) else kind


def address_of(outbox: Outbox) -> str:
    """Returns the address of a client, also when its connection is over; empty when it is not known."""
    transport: Any = getattr(outbox, "transport", None)
    host = getattr(transport, "peer_host", None)
    if isinstance(host, str):
        return host
    with suppress(OSError, AttributeError, TypeError, IndexError):
        return str(transport.getpeername()[0])
    return ""


def transferred(outbox: Outbox) -> tuple[int | None, int | None]:
    """Returns the bytes that came from a client, and those that it took: the kernel's count of the connection, with all
    that lies around messages. None where there is no such count.
    """
    transport: Any = getattr(outbox, "transport", None)
    try:
        data = transport.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return (
            struct.unpack_from("<Q" if sys.byteorder == "little" else ">Q", data, _BYTES_RECEIVED_AT)[0],
            struct.unpack_from("<Q" if sys.byteorder == "little" else ">Q", data, _BYTES_ACKED_AT)[0],
        )
    except (OSError, AttributeError, struct.error):
        return None, None

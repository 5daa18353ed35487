"""The ends of clients' connections: kept with who, when and why, and told in the log."""

from __future__ import annotations

import logging
import socket
import struct
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from time import time
from typing import Any

from smqrt.broker.outbox import Outbox
from smqrt.broker.session import TOO_MANY_CONNECTIONS, Session
from smqrt.broker.topics import USER_CONNECTIONS
from smqrt.errors import CloseReason
from smqrt.settings.limit_register import LineLimit
from smqrt.smq.close_reasons import Closed, Closes, ending_of
from smqrt.transport.tls import TlsTransport

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

"""Clients that have been silent for too long: each is pinged, and who does not answer is disconnected.

How long a client has been silent is what the kernel knows (`TCP_INFO`): reading costs nothing more. Over WebSockets the
ping is one of WebSocket, which every client answers (RFC 6455); over raw sockets it is Ping of SMQ.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterable, Iterator
from typing import Any

from gevent import get_hub

from smqrt.broker.outbox import BLOCKED, run_in_background
from smqrt.broker.session import Session
from smqrt.errors import CloseReason
from smqrt.settings.limit_register import Limit
from smqrt.settings.limits import LimitSettings
from smqrt.smq.connection import RawConnection
from smqrt.wire import smq, websocket

IDLE = Limit("idle", "limits.idle_s", "a client that is silent for so long has to answer when it is pinged")
LEAST_LOOK_S = 0.1
_LAST_DATA_RECEIVED = struct.Struct("I")
_AT_BYTE, _INFO_BYTES = 52, 104
"""Where `tcp_info` of Linux has `tcpi_last_data_recv`, in milliseconds (linux/tcp.h; the start never changes)."""


def silent_s(connection: RawConnection) -> float:
    """Seconds since the client has sent anything; 0 when that is not known."""
    try:
        info = connection.transport.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        return float(_LAST_DATA_RECEIVED.unpack_from(info, _AT_BYTE)[0]) / 1000
    except (OSError, struct.error):
        return 0.0  # it is closed, or a socket of another kind


class IdleClients:
    """Looks at the clients of hubs now and then.

    Args:
        clients: gives all clients of this process.
    """

    def __init__(self, clients: Any) -> None:
        self._clients = clients
        self._timer: Any = None
        self._pinged_s: dict[Session, float] = {}
        self._is_looking = False
        self._idle_s = self._answer_s = 0.0

    def apply(self, settings: LimitSettings) -> None:
        """Bring limits into force."""
        if self._timer is not None:
            self._timer.stop()
            self._timer.close()
            self._timer = None
        self._pinged_s.clear()
        if settings.idle_s is None:
            return
        self._idle_s, self._answer_s = settings.idle_s, settings.idle_answer_s
        look_s = max(LEAST_LOOK_S, min(self._idle_s, self._answer_s) / 4)
        self._timer = get_hub().loop.timer(look_s, look_s, ref=False)
        self._timer.start(self._look)

    def _look(self) -> None:
        if not self._is_looking:
            self._is_looking = True
            run_in_background(self._steps(list(self._clients())))

    def _steps(self, clients: Iterable[Session]) -> Iterator[None]:
        try:
            for session in clients:
                connection = session.outbox
                if isinstance(connection, RawConnection) and not session.closed:
                    self._check(session, connection)
                yield
            for session in [one for one in self._pinged_s if one.closed]:
                del self._pinged_s[session]
        finally:
            self._is_looking = False

    def _check(self, session: Session, connection: RawConnection) -> None:
        silence_s = silent_s(connection)
        if silence_s < self._idle_s or connection.paused or connection.life is BLOCKED:
            self._pinged_s.pop(session, None)  # one that takes nothing is met by another deadline
            return
        now_s = time.monotonic()
        pinged_s = self._pinged_s.get(session)
        if pinged_s is None:
            self._pinged_s[session] = now_s
            _ping(connection)
        elif now_s - pinged_s >= self._answer_s and silence_s >= now_s - pinged_s:
            del self._pinged_s[session]
            IDLE.refused(f"the client {ascii(session.uid[:64])[1:]}", f"it was silent for {silence_s:.0f} s")
            session.disconnect(CloseReason.IDLE, None, f"silent for {silence_s:.0f} s")


def _ping(connection: RawConnection) -> None:
    if connection.websocket:
        connection.put(websocket.encode(websocket.PING, b""))
    else:
        connection.reply(smq.PING)

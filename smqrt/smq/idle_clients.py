"""Idle clients: pinged after a time of silence, and disconnected if they do not answer.

The kernel knows how long a client has been silent (`TCP_INFO`), so reading has no extra cost. Over WebSockets the ping
is a WebSocket frame, which every client answers (RFC 6455); over raw sockets it is an SMQ packet.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gevent import get_hub

from smqrt.broker.outbox import BLOCKED, run_in_background
from smqrt.broker.session import Session
from smqrt.errors import CloseReason
from smqrt.settings.limit_register import Limit
from smqrt.settings.limits import LimitSettings
from smqrt.smq.connection import RawConnection
from smqrt.wire import smq, websocket

IDLE = Limit("idle", "limits.idle_s", "a client that is silent for this long must answer a ping")
MIN_CHECK_S = 0.1
_U32 = struct.Struct("I")
_LAST_DATA_RECEIVED_AT, _TCP_INFO_BYTES = 52, 104
"""The offset of `tcpi_last_data_recv`, in milliseconds, in `struct tcp_info` (linux/tcp.h; its start never changes)."""


def silent_s(connection: RawConnection) -> float:
    """Return the seconds since the client has sent anything; 0 when that is not known."""
    try:
        info = connection.transport.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return float(_U32.unpack_from(info, _LAST_DATA_RECEIVED_AT)[0]) / 1000
    except (OSError, struct.error):
        return 0.0  # a closed socket, or not a TCP socket


class IdleClients:
    """Checks the clients of all hubs periodically.

    Args:
        clients: returns all clients of this process.
    """

    def __init__(self, clients: Callable[[], Iterable[Session]]) -> None:
        self._clients = clients
        self._timer: Any = None
        self._pinged_s: dict[Session, float] = {}
        self._is_checking = False
        self._idle_s = self._answer_s = 0.0

    def apply(self, settings: LimitSettings) -> None:
        """Apply new limits."""
        if self._timer is not None:
            self._timer.stop()
            self._timer.close()
            self._timer = None
        self._pinged_s.clear()
        if settings.idle_s is None:
            return
        self._idle_s, self._answer_s = settings.idle_s, settings.idle_answer_s
        check_s = max(MIN_CHECK_S, min(self._idle_s, self._answer_s) / 4)
        self._timer = get_hub().loop.timer(check_s, check_s, ref=False)
        self._timer.start(self._check_all)

    def _check_all(self) -> None:
        if not self._is_checking:
            self._is_checking = True
            run_in_background(self._steps(list(self._clients())))

    def _steps(self, clients: Iterable[Session]) -> Iterator[None]:
        """Check one client in each step."""
        try:
            for session in clients:
                connection = session.outbox
                if isinstance(connection, RawConnection) and not session.closed:
                    self._check(session, connection)
                yield
            for session in [one for one in self._pinged_s if one.closed]:
                del self._pinged_s[session]
        finally:
            self._is_checking = False

    def _check(self, session: Session, connection: RawConnection) -> None:
        silence_s = silent_s(connection)
        # A blocked connection has a deadline of its own; the answer of a paused one is not read.
        if silence_s < self._idle_s or connection.paused or connection.life is BLOCKED:
            self._pinged_s.pop(session, None)
            return
        now_s = time.monotonic()
        pinged_s = self._pinged_s.get(session)
        if pinged_s is None:
            self._pinged_s[session] = now_s
            if connection.websocket:
                connection.put(websocket.encode(websocket.PING, b""))
            else:
                connection.reply(smq.PING)
        elif now_s - pinged_s >= self._answer_s and silence_s >= now_s - pinged_s:
            del self._pinged_s[session]
            IDLE.refused(f"the client {ascii(session.uid[:64])[1:]}", f"it was silent for {silence_s:.0f} s")
            session.disconnect(CloseReason.IDLE, None, f"silent for {silence_s:.0f} s")

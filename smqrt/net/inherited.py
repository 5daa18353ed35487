"""Listening sockets that another process has handed to this one: who asks for the same host and port gets them."""

from __future__ import annotations

import _socket
import contextlib
import os
from collections import defaultdict, deque

Asked = tuple[str, int]
"""Host and port as they were asked for: several may have asked for port 0, and get theirs in the same order."""


class InheritedSockets:
    """Those that nobody has asked for yet."""

    def __init__(self) -> None:
        self._fds: defaultdict[Asked, deque[int]] = defaultdict(deque)

    def add(self, asked_for: Asked, fd: int) -> None:
        """Keep the descriptor of a socket."""
        self._fds[asked_for].append(fd)

    def take(self, host: str, port: int) -> _socket.socket | None:
        """The next socket for a host and port, None when there is none."""
        fds = self._fds.get((host, port))
        if not fds:
            return None
        sock = _socket.socket(-1, -1, -1, fds.popleft())
        sock.setblocking(False)
        return sock

    def close(self) -> None:
        """Close those that nobody has asked for."""
        for fds in self._fds.values():
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._fds.clear()


inherited = InheritedSockets()
"""Of this process."""

"""Listening sockets that another process has handed to this one: who asks for the same host and port gets them."""

from __future__ import annotations

import _socket
import contextlib
import itertools
import os
from collections import defaultdict, deque

Asked = tuple[str, int]
"""Host and port as they were asked for: several may have asked for port 0, and get theirs in the same order."""


class InheritedSockets:
    """Those that nobody has asked for yet."""

    def __init__(self) -> None:
        self._fds: defaultdict[Asked, deque[list[int]]] = defaultdict(deque)

    def add(self, asked_for: Asked, fds: list[int]) -> None:
        """Keep the descriptors of the sockets of a port."""
        self._fds[asked_for].append(fds)

    def take(self, host: str, port: int) -> list[_socket.socket]:
        """The sockets of the next port for a host and port; none when there is none."""
        waiting = self._fds.get((host, port))
        sockets = [_socket.socket(-1, -1, -1, fd) for fd in waiting.popleft()] if waiting else []
        for one in sockets:
            one.setblocking(False)
        return sockets

    def close(self) -> None:
        """Close those that nobody has asked for."""
        for waiting in self._fds.values():
            for fd in itertools.chain.from_iterable(waiting):
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._fds.clear()


inherited = InheritedSockets()
"""Of this process."""

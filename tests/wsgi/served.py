"""Waiting for servers of other programs."""

from __future__ import annotations

from gevent import socket

WAIT_S = 30


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True

"""A cable between two sockets of this machine that can be cut, held and mended."""

from __future__ import annotations

from typing import Any

import gevent
from gevent import socket
from gevent.server import StreamServer


class Cable:
    """Passes what comes at its own port on to another one, and back.

    Attributes:
        port: its own.
    """

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self._is_cut = self._is_held = False
        self._sockets: set[Any] = set()
        self._server = StreamServer(("127.0.0.1", 0), self._serve)
        self._server.start()
        self.port: int = self._server.server_port

    def _serve(self, near: Any, address: object) -> None:
        if self._is_cut:
            near.close()
            return
        if self._is_held:
            gevent.sleep(30)
            return
        try:
            far = socket.create_connection(("127.0.0.1", self._to_port))
        except OSError:  # nobody listens there at the moment
            near.close()
            return
        for sock in (near, far):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.add(sock)
        back = gevent.spawn(self._pump, far, near)
        self._pump(near, far)
        back.join()

    def _pump(self, source: Any, sink: Any) -> None:
        try:
            while data := source.recv(1 << 16):
                while self._is_held:
                    gevent.sleep(0.01)
                sink.sendall(data)
        except OSError:
            pass
        for sock in (source, sink):
            self._sockets.discard(sock)
            sock.close()

    def cut(self) -> None:
        """End all connections at once, with what is on the way, and take no more."""
        self._is_cut = True
        self._end()

    def hold(self) -> None:
        """Pass nothing on, and end nothing."""
        self._is_held = True

    def mend(self) -> None:
        """Be a cable again; connections from before are ended."""
        self._is_cut = self._is_held = False
        self._end()

    def _end(self) -> None:
        for sock in list(self._sockets):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        """Stop."""
        self.cut()
        self._server.stop()

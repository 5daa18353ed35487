"""A cable between two sockets of this machine that can be cut, held and mended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gevent
from gevent import socket
from gevent.server import StreamServer


class Cable:
    """Passes what comes at its own port on to another one, and back.

    Args:
        to: a port, or the path of a Unix socket.
        at: the path of its own Unix socket; None for a port.

    Attributes:
        port: its own; 0 for a Unix socket.
        delay_s: what comes waits so long, both ways, before it is passed on.
    """

    def __init__(self, to: int | Path, at: Path | None = None) -> None:
        self._to = to
        self._is_cut = self._is_held = self._is_one_way = False
        self.delay_s = 0.0
        self._sockets: set[Any] = set()
        self._server = StreamServer(("127.0.0.1", 0) if at is None else _listening(at), self._serve)
        self._server.start()
        self.port: int = 0 if at else self._server.server_port

    def _serve(self, near: Any, address: object) -> None:
        if self._is_cut:
            near.close()
            return
        if self._is_held:
            gevent.sleep(30)
            return
        try:
            far = self._connected()
        except OSError:  # nobody listens there at the moment
            near.close()
            return
        for sock in (near, far):
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.add(sock)
        back = gevent.spawn(self._pump, far, near, is_back=True)
        self._pump(near, far)
        back.join()

    def _connected(self) -> Any:
        if isinstance(self._to, int):
            return socket.create_connection(("127.0.0.1", self._to))
        sock: Any = socket.socket(socket.AF_UNIX)
        sock.connect(str(self._to))
        return sock

    def _pump(self, source: Any, sink: Any, is_back: bool = False) -> None:
        try:
            while data := source.recv(1 << 16):
                gevent.sleep(self.delay_s)
                while self._is_held or (self._is_one_way and is_back):
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

    def one_way(self) -> None:
        """Pass nothing back, and end nothing."""
        self._is_one_way = True

    def mend(self) -> None:
        """Be a cable again; connections from before are ended."""
        self._is_cut = self._is_held = self._is_one_way = False
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


def _listening(path: Path) -> Any:
    sock: Any = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.listen(16)
    return sock

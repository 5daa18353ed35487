"""UDP sockets."""

from __future__ import annotations

import _socket

from smqrt.errors import StreamError
from smqrt.loop.readiness import READ, Ready, Wait
from smqrt.transport.stream import Info
from smqrt.transport.tls import Buffer
from smqrt.workers.worker_identity import worker_place

MAX_BYTES = 65535


class Datagram:
    """A UDP socket, bound, connected, both or neither.

    Args:
        local_port: port to bind; None binds none (the system chooses one at the first send).
        host: local address to bind.
        peer: the only peer, from `smqrt.transport.stream.resolve`.
        ipv6: the family of a socket without `peer`.

    Raises:
        StreamError: "bind", "cannotconnect".
    """

    def __init__(
        self,
        local_port: int | None = None,
        host: str | None = None,
        peer: Info | None = None,
        ipv6: bool = False,
    ) -> None:
        family = peer[0] if peer else (_socket.AF_INET6 if ipv6 else _socket.AF_INET)
        self.family = family
        self._socket: _socket.socket | None = _socket.socket(family, _socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        try:
            if local_port is not None or host:
                if local_port and worker_place().count > 1:  # every worker opens this port
                    self._socket.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEPORT, 1)
                try:
                    self._socket.bind((host or ("::" if family == _socket.AF_INET6 else ""), local_port or 0))
                except (OSError, OverflowError) as error:
                    raise StreamError("bind", str(error)) from None
            if peer:
                try:
                    self._socket.connect(peer[1])
                except OSError as error:
                    raise StreamError("cannotconnect", str(error)) from None
        except BaseException:
            self._socket.close()
            raise
        self._input = Ready(self._socket.fileno(), READ)

    @property
    def is_ipv6(self) -> bool:
        """Whether it uses IPv6."""
        return self.family == _socket.AF_INET6

    def try_receive(self) -> tuple[bytes, tuple[str, int]] | None:
        """Return a datagram and its sender's address, or None when there is none.

        Raises:
            StreamError: "socketclosed" (by this side), "socketreadfailed" (the connected port is closed).
        """
        try:
            data, address = self._live().recvfrom(MAX_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            raise StreamError("socketreadfailed", error.strerror or "") from None
        return data, address[:2]

    def readable(self, timeout_s: float | None = None) -> Wait:
        """Return a wait for the next time when `try_receive` may succeed.

        Raises:
            StreamError: "socketclosed".
        """
        self._live()
        return self._input.wait(timeout_s)

    def send(self, data: Buffer, address: tuple[str | int, ...] | None = None) -> bool:
        """Send a datagram to `address`, or to the connected peer. Return False when the system has dropped it.

        Raises:
            StreamError: "socketclosed", "socketwritefailed".
        """
        sock = self._live()
        try:
            if address is None:
                sock.send(data)
            else:
                sock.sendto(data, address)
        except BlockingIOError:
            return False
        except OSError as error:
            raise StreamError("socketwritefailed", error.strerror or "") from None
        return True

    def peername(self) -> tuple[str, int]:
        """Return address and port of the peer.

        Raises:
            StreamError: "socketclosed"; "invalidsocketcon" without a peer.
        """
        try:
            host, port = self._live().getpeername()[:2]
        except OSError:
            raise StreamError("invalidsocketcon") from None
        return host, port

    def sockname(self) -> tuple[str, int]:
        """Return the local address and port. Raises as `peername`."""
        host, port = self._live().getsockname()[:2]
        return host, port

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """Set an option of the socket. Raises OSError, and as `peername`."""
        self._live().setsockopt(level, option, value)

    def close(self) -> bool:
        """Close; waiting calls raise "socketclosed". Return False when it was closed before."""
        sock, self._socket = self._socket, None
        if sock is None:
            return False
        self._input.close(StreamError("socketclosed"))
        sock.close()
        return True

    def _live(self) -> _socket.socket:
        if self._socket is None:
            raise StreamError("socketclosed")
        return self._socket

"""What paho takes for its socket: bytes in memory, which a `Connection` carries to and from the network."""

from __future__ import annotations

from smqrt.mqtt.framing import Packets

_FULL_BYTES = 65536


class Pipe:
    """Both directions of one connection.

    Attributes:
        farewell: sent at the very end.
        taken_bytes: how many bytes of packets paho has given.
    """

    __slots__ = ("_outgoing", "closed", "farewell", "packets", "taken_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.packets = Packets(limit_bytes)
        self.closed = False
        self.farewell = b""
        self.taken_bytes = 0
        self._outgoing = bytearray()

    def send(self, data: bytes | bytearray) -> int:
        """Take `data`.

        Raises:
            BlockingIOError: so much waits that the network should have its turn.
        """
        if len(self._outgoing) >= _FULL_BYTES:
            raise BlockingIOError
        self._outgoing += data
        self.taken_bytes += len(data)
        return len(data)

    def take(self) -> bytearray:
        """What is to be sent."""
        data, self._outgoing = self._outgoing, bytearray()
        return data

    def recv(self, _size: int) -> bytes:
        """Paho never reads by itself: packets are taken from `packets`."""
        raise BlockingIOError

    def close(self) -> None:
        """Paho is done with the connection; what it sent before is still carried."""
        self.closed = True

    def fileno(self) -> int:
        """None."""
        return -1

    def setblocking(self, _flag: bool) -> None:
        """It never blocks."""

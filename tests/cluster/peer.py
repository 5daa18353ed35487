"""A node in pieces, for tests: it says on a blocking socket what it is told to, be it right or wrong."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from functools import cache

from smqrt.wire import cluster_packets as wire
from smqrt.wire import smq
from smqrt.wire.cluster_packets import Hello, Packet

PASSWORD = "of the test"


@cache
def key() -> bytes:
    """Made of `PASSWORD`."""
    return wire.key_of(PASSWORD.encode())


class Peer:
    """What has connected to a node, and plays one.

    Args:
        connect: makes the connection.
        number: of the node that it plays.

    Attributes:
        own, theirs: the Hello packets.
        there: the numbers of the other side's channels, by name.
    """

    def __init__(self, connect: Callable[[], socket.socket], number: int = 1000) -> None:
        self.sock = connect()
        self.number = number
        self.own = wire.hello(Hello(1, 1, os.urandom(wire.ID_BYTES), time.time_ns(), os.urandom(wire.NONCE_BYTES)))
        self.theirs = b""
        self.there: dict[bytes, int] = {}
        self._data = b""

    def say(self, *packets: bytes) -> None:
        self.sock.sendall(b"".join(map(smq.frame, packets)))

    def packet(self) -> bytes:
        """The next packet; raises OSError at the end."""
        while len(self._data) < 2 or len(self._data) < (size := int.from_bytes(self._data[:2], "big")):
            data = self.sock.recv(1 << 16)
            if not data:
                raise ConnectionError("the node closed the connection")
            self._data += data
        packet, self._data = self._data[2:size], self._data[size:]
        return packet

    def until(self, kind: Packet) -> bytes:
        """The next packet of a kind."""
        while True:
            packet = self.packet()
            if packet[0] == kind:
                return packet

    def greeted(self) -> Peer:
        """Both have said Hello."""
        self.say(self.own)
        self.theirs = self.until(Packet.HELLO)
        return self

    def proved(self) -> Peer:
        """Both have proved that they know the password."""
        self.greeted().say(wire.proof(key(), True, self.own + self.theirs))
        assert self.until(Packet.PROOF) == wire.proof(key(), False, self.own + self.theirs)
        return self

    def up(self, hubs: int = 1) -> Peer:
        """The link is up, and the other side has opened so many channels."""
        self.proved()
        taken = wire.parse_numbers(self.until(Packet.NODE)) or []
        while self.number in taken:  # nodes draw theirs, and one of 500 times one has ours
            self.number -= 1
        self.say(wire.numbers(Packet.NODE, [self.number]))
        while len(self.there) < hubs:
            number, name = wire.parse_channel(self.until(Packet.OPEN))
            if not name.startswith(wire.ABILITY):  # no channel
                self.there[name] = number
        return self

    def joined(self) -> Peer:
        """It has all hubs that the other side has, by the same numbers, and speaks of the first."""
        self.up().say(*(wire.channel(Packet.OPEN, number, name) for name, number in self.there.items()))
        self.say(wire.channel(Packet.CHANNEL, next(iter(self.there.values()))))
        return self

    def refused(self) -> int:
        """The code of the refusal that is the last word."""
        code = self.until(Packet.REFUSED)[1]
        assert self.ended()
        return code

    def ended(self, within_s: float = 10.0) -> bool:
        """Whether the other side ends the connection in time; what it says before is nothing to us."""
        deadline_s = time.monotonic() + within_s
        try:
            while (left_s := deadline_s - time.monotonic()) > 0:
                self.sock.settimeout(left_s)
                if not self.sock.recv(1 << 16):
                    return True
        except TimeoutError:
            return False
        except OSError:
            return True
        return False

    def close(self) -> None:
        self.sock.close()

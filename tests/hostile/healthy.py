"""A healthy client, in a process of its own: it sends itself a message every 5 ms and takes the time of each.

Standard input takes "begin" and "end", a line each; after "end" it prints the longest round trip in ms, one line. What
the server or this client waited for a core, because other processes had them all, is not counted: so the figure is that
of a machine with nothing else to do.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys

from tests.support.clock import undisturbed_s

EVERY_S = 0.005
GIVES_UP_S = 20.0
NOTHING_MS = float("-inf")  # nothing was measured; less than 0 is possible when there were no cores
TID = 0x7FFF0000  # nobody's: a message to an ETID may carry any sub-topic


class HealthyClient:
    """A raw SMQ device.

    Args:
        port: where the server listens, on loopback.
        pid: the server's process.
    """

    def __init__(self, port: int, pid: int) -> None:
        self._server = pid
        self._sock = socket.create_connection(("127.0.0.1", port), GIVES_UP_S)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.sendall(
            b"GET /watch/smq HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nSimpleMQ: 1\r\nSendSmqHttpResponse: true\r\n\r\n" % port
        )
        self._data = b""
        while b"\r\n\r\n" not in self._data:
            self._more()
        self._data = self._data.partition(b"\r\n\r\n")[2]
        self._packet()  # Init
        self._send(b"\x02\x01\x07healthy\x00")
        self.etid = int.from_bytes(self._packet()[2:6], "big")

    def _send(self, packet: bytes) -> None:
        self._sock.sendall((len(packet) + 2).to_bytes(2, "big") + packet)

    def _more(self) -> None:
        data = self._sock.recv(65536)
        if not data:
            raise ConnectionError("the server closed the healthy client's connection")
        self._data += data

    def _packet(self) -> bytes:
        while len(self._data) < 2 or len(self._data) < int.from_bytes(self._data[:2], "big"):
            self._more()
        size = int.from_bytes(self._data[:2], "big")
        packet, self._data = self._data[2:size], self._data[size:]
        return packet

    def round_trip_ms(self) -> float:
        """Returns how long a message to itself takes; GIVES_UP_S when it takes longer."""
        began_s = undisturbed_s(self._server)
        self._send(struct.pack(">BIII", 8, self.etid, self.etid, 1) + b"are you there?")
        try:
            self._packet()
        except TimeoutError:
            return GIVES_UP_S * 1000
        return (undisturbed_s(self._server) - began_s) * 1000


def main() -> None:
    """Serve the commands on standard input until it ends."""
    client, worst_ms, running = HealthyClient(int(sys.argv[1]), int(sys.argv[2])), NOTHING_MS, False
    commands = os.fdopen(0, "rb", buffering=0)  # a buffer would hide a second command from select
    print("ready", flush=True)
    while True:
        if select.select([commands], [], [], EVERY_S if running else None)[0]:
            command = commands.readline().strip().decode()
            if command == "end":
                print(worst_ms, flush=True)
            running, worst_ms = command == "begin", NOTHING_MS
            if not command:
                return
        if running:
            worst_ms = max(worst_ms, client.round_trip_ms())


if __name__ == "__main__":
    main()

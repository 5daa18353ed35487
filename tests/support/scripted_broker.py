"""A broker that follows a script, for what a real one does not do on request: silence, refusals, rubbish.

Blocking sockets in a thread for each connection, so it serves gevent clients and browsers alike.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

from smqrt.wire import smq, websocket
from smqrt.wire.smq import Type

HEAD = b"HTTP/1.1 200 OK\r\nSmqBroker: true\r\n\r\n"


class Conversation:
    """One accepted connection, as the script sees it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.head = b""
        self.key = ""
        self._buffer = b""
        sock.settimeout(10)

    def read_head(self) -> str:
        while b"\r\n\r\n" not in self._buffer:
            self._more()
        self.head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        for line in self.head.split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name.lower() == b"sec-websocket-key":
                self.key = value.strip().decode()
        return self.head.decode("latin-1")

    def bootstrap(self) -> str:
        """Answer the HTTP request as a broker does."""
        head = self.read_head()
        self.raw(websocket.switching_protocols(self.key) if self.key else HEAD)
        return head

    def accept(self, etid: int = 4711, seed: int = 77) -> bytes:
        """The whole bootstrap; returns the Connect packet."""
        self.bootstrap()
        self.send(smq.init(seed, "127.0.0.1"))
        connect = self.receive()
        self.send(smq.connack(0, etid))
        return connect

    def raw(self, data: bytes) -> None:
        self.sock.sendall(data)

    def send(self, packet: bytes) -> None:
        self.raw(websocket.encode(websocket.BINARY, packet) if self.key else smq.frame(packet))

    def receive(self) -> bytes:
        """The next packet."""
        if self.key:
            return self._receive_message()
        while len(self._buffer) < 2 or len(self._buffer) < int.from_bytes(self._buffer[:2], "big"):
            self._more()
        size = int.from_bytes(self._buffer[:2], "big")
        packet, self._buffer = self._buffer[2:size], self._buffer[size:]
        return packet

    def _receive_message(self) -> bytes:
        while True:
            frame, size = websocket.parse_client_frame(self._buffer, 70000)
            if frame is not None:
                self._buffer = self._buffer[size:]
                return frame.payload
            self._more()

    def _more(self) -> None:
        data = self.sock.recv(65536)
        if not data:
            raise EOFError("the client closed")
        self._buffer += data

    def acks(self, first_number: int = 100) -> None:
        """Answer every request until the client goes away; topics get rising numbers."""
        answers = {Type.SUBSCRIBE: Type.SUBACK, Type.CREATE: Type.CREATEACK, Type.CREATESUB: Type.CREATESUBACK}
        numbers: dict[bytes, int] = {}
        while True:
            packet = self.receive()
            if packet[0] in answers:
                number = numbers.setdefault(packet[1:], first_number + len(numbers))
                self.send(smq.ack(answers[Type(packet[0])], number, packet[1:]))
            elif packet[0] == Type.PING:
                self.send(smq.PONG)

    def wait_closed(self) -> None:
        while self.sock.recv(65536):
            pass


Script = Callable[[Conversation], Any]


class ScriptedBroker:
    """Each connection follows the next of `scripts`; the last one serves all that come after.

    Attributes:
        results: what each finished script returned, in order; an `EOFError` for a client that went away.
    """

    def __init__(self, *scripts: Script) -> None:
        self._scripts = list(scripts)
        self._one_ended = threading.Condition()
        self.results: list[Any] = []
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/smq.lsp"

    @property
    def ws_url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/smq.lsp"

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            script = self._scripts[min(self.connections, len(self._scripts) - 1)]
            self.connections += 1
            self._open.append(sock)
            threading.Thread(target=self._follow, args=(script, sock), daemon=True).start()

    def _follow(self, script: Script, sock: socket.socket) -> None:
        result: Any
        try:
            result = script(Conversation(sock))
        except (EOFError, OSError) as error:
            result = error
        finally:
            sock.close()
        with self._one_ended:
            self.results.append(result)
            self._one_ended.notify_all()

    def wait_results(self, count: int, timeout_s: float = 20) -> list[Any]:
        """Wait until so many scripts have ended, and give `results`: it may end after its client has."""
        with self._one_ended:
            assert self._one_ended.wait_for(lambda: len(self.results) >= count, timeout_s), self.results
        return self.results

    def close(self) -> None:
        self._listener.close()
        for sock in self._open:
            sock.close()

    def __enter__(self) -> ScriptedBroker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

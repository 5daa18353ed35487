"""A WebSocket client that shows every frame, on a gevent socket."""

from __future__ import annotations

from typing import Any

from gevent import socket
from gevent.ssl import SSLContext

from smqrt.wire import websocket
from smqrt.wire.websocket import WebSocketCodec, WebSocketMessage


class Client:
    """A WebSocket client on a gevent socket, or on another one that is connected."""

    def __init__(
        self,
        port: int,
        path: str = "/ws.lsp",
        headers: str = "",
        tls: SSLContext | None = None,
        sock: Any = None,
        host: str = "x",
    ) -> None:
        self.sock = sock or socket.create_connection(("127.0.0.1", port), timeout=5)
        if tls:
            self.sock = tls.wrap_socket(self.sock)
        key = websocket.new_key()
        fields = "".join(f"{name}: {value}\r\n" for name, value in websocket.request_headers(key))
        self.sock.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{fields}{headers}\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += self.sock.recv(65536)
        head, _, rest = head.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 "), head
        assert websocket.accept_key(key).encode() in head
        self.codec = WebSocketCodec(is_client=True)
        self.codec.feed(rest)

    def send(self, opcode: int, data: bytes, fin: bool = True) -> None:
        frame = bytearray(websocket.encode_masked(opcode, data))
        if not fin:
            frame[0] &= 0x7F
        self.sock.sendall(frame)

    def receive(self) -> WebSocketMessage | None:
        """The next message, None when the server has closed."""
        while (message := self.codec.next()) is None:
            if self.codec.close_code is not None:
                return None
            data = self.sock.recv(65536)
            if not data:
                return None
            self.codec.feed(data)
        return message

    def closed(self) -> int | None:
        """Waits for the close frame and gives its code."""
        assert self.receive() is None
        return self.codec.close_code

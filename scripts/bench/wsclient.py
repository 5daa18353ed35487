"""Client of the WebSocket benchmarks: it blocks, and counts bytes and nothing else."""

from __future__ import annotations

import socket

from smqrt.wire import websocket


def connect(port: int, path: str) -> socket.socket:
    """A WebSocket behind its handshake."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=20)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    fields = "".join(f"{name}: {value}\r\n" for name, value in websocket.request_headers(websocket.new_key()))
    sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{fields}\r\n".encode())
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += sock.recv(1000)
    if not head.startswith(b"HTTP/1.1 101"):
        raise SystemExit(f"no WebSocket at {path}: {head.decode('latin-1')}")
    return sock

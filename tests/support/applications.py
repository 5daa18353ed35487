"""Small applications for real servers, and a raw SMQ connection to one."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

SMQ_PAGE = "<?lsp app.smq:connect(request) ?>"


def application(folder: Path, preload: str | None = None, **pages: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if preload is not None:
        (folder / ".preload").write_text(preload)
    for name, text in (pages or {"index": f"<h1>{folder.name}</h1>"}).items():
        (folder / f"{name}.lsp").write_text(text)
    return folder


def smq_client(port: int, uid: bytes = b"test-id") -> socket.socket:
    """Returns a raw SMQ connection after its Connack."""
    sock = socket.create_connection(("127.0.0.1", port), 5)
    sock.sendall(b"GET /smq.lsp HTTP/1.1\r\nHost: localhost\r\nSimpleMQ: 1\r\n\r\n")
    assert packet(sock)[0] == 1
    sock.sendall(struct.pack("!HBBB", 6 + len(uid), 2, 1, len(uid)) + uid + b"\0")
    assert packet(sock)[:2] == b"\x03\x00"
    return sock


def packet(sock: socket.socket) -> bytes:
    head = sock.recv(2, socket.MSG_WAITALL)
    return sock.recv(int.from_bytes(head, "big") - 2, socket.MSG_WAITALL)

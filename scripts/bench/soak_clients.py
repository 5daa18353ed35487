"""Clients that the load generator has not, in a process of their own. At the end of the input they report.

soak_clients.py idle PORT COUNT      connect over TLS and are idle: how many are still there
soak_clients.py stalled PORT COUNT   subscribe to t/0 and do not read: how many messages came
soak_clients.py pings PORT 1         asks 200 times a second whether the server is there: the longest wait
"""

from __future__ import annotations

import contextlib
import json
import resource
import select
import socket
import ssl
import sys
import time

from smqrt.wire import smq

HELLO = b"GET /smq.lsp?hub=%s HTTP/1.1\r\nHost: 127.0.0.1\r\nSimpleMQ: 1\r\n\r\n"
SMALL_BYTES = 4096  # of a buffer that is soon full
PING_EVERY_S = 0.005


def main(kind: str, port: int, count: int) -> None:
    """Connect, say so, wait for the end of the input, and report."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    context = _trusting() if kind == "idle" else None
    clients = [_client(port, b"%s-%06d" % (kind.encode(), number), context) for number in range(count)]
    if kind == "stalled":
        for sock in clients:
            _subscribe(sock)
    print(json.dumps({"connected": len(clients)}), flush=True)
    if kind == "pings":
        print(json.dumps(_pinged(clients[0])), flush=True)
        return
    sys.stdin.read()
    print(json.dumps(_alive(clients) if kind == "idle" else _received(clients)), flush=True)


def _trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _client(port: int, uid: bytes, context: ssl.SSLContext | None) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BYTES)
    sock.connect(("127.0.0.1", port))
    if context is not None:
        sock = context.wrap_socket(sock)
    sock.sendall(HELLO % (b"stream" if uid.startswith(b"stalled") else b"idle"))
    _packet(sock)
    sock.sendall(smq.frame(smq.connect(uid)))
    _packet(sock)
    return sock


def _subscribe(sock: socket.socket) -> None:
    sock.sendall(smq.frame(smq.with_name(smq.Type.SUBSCRIBE, b"t/0")))
    while _packet(sock)[0] != smq.Type.SUBACK:
        pass


def _pinged(sock: socket.socket) -> dict[str, float]:
    longest_s, pings = 0.0, 0
    while not select.select([sys.stdin], [], [], PING_EVERY_S)[0]:
        began_s = time.perf_counter()
        sock.sendall(smq.frame(bytes((smq.Type.PING,))))
        _packet(sock)
        longest_s, pings = max(longest_s, time.perf_counter() - began_s), pings + 1
    return {"longest_ms": round(longest_s * 1000, 1), "pings": pings}


def _packet(sock: socket.socket) -> bytes:
    size = int.from_bytes(_exactly(sock, 2), "big")
    return _exactly(sock, size - 2)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def _alive(clients: list[socket.socket]) -> dict[str, int]:
    alive = 0
    for sock in clients:
        sock.setblocking(False)
        try:
            alive += bool(sock.recv(1))
        except (ssl.SSLWantReadError, BlockingIOError):
            alive += 1
        except OSError:
            pass
    return {"alive": alive}


def _received(clients: list[socket.socket]) -> dict[str, int]:
    messages = 0
    for sock in clients:
        sock.settimeout(1)
        with contextlib.suppress(EOFError, OSError):
            while True:
                messages += _packet(sock)[0] == smq.Type.PUBLISH
    return {"messages": messages}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

"""Messages a second through a WebSocket echo written in Lua, on one connection: pipelined, and one at a time."""

from __future__ import annotations

import argparse
import socket
import sys
import time

import brokers
from wsclient import connect

from smqrt.wire.websocket import BINARY, encode_masked

BAR = 20_000
PAYLOAD = b"0123456789abcdef" * 2
WINDOW = 512  # messages under way
MASKED = encode_masked(BINARY, PAYLOAD)
ECHO_BYTES = len(MASKED) - 4


def main() -> None:
    options = parse()
    server = brokers.start("smqrt")
    try:
        sock = connect(server.port, "/echo.lsp")
        pipelined(sock, 0.5)
        rate = max(pipelined(sock, options.seconds) for _ in range(options.rounds))
        print(f"pipelined, {WINDOW} under way: {rate:10,.0f} messages/s (bar {BAR:,})")
        print(f"one at a time:            {one_by_one(sock, options.seconds):10,.0f} messages/s")
    finally:
        server.stop()
    sys.exit(rate < BAR)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench/ws_echo", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often it is measured; the best counts (default 3)")
    parser.add_argument("--seconds", type=float, default=2, help="how long one measurement lasts (default 2)")
    return parser.parse_args()


def pipelined(sock: socket.socket, seconds: float) -> float:
    """Keeps WINDOW messages under way; gives the rate of echoes."""
    half = MASKED * (WINDOW // 2)
    half_echo = ECHO_BYTES * (WINDOW // 2)
    sock.sendall(half)
    began = time.perf_counter()
    echoes = 0
    while time.perf_counter() - began < seconds:
        sock.sendall(half)
        receive(sock, half_echo)
        echoes += WINDOW // 2
    elapsed = time.perf_counter() - began
    receive(sock, half_echo)
    return echoes / elapsed


def one_by_one(sock: socket.socket, seconds: float) -> float:
    """Sends when the echo of the one before is there; gives the rate."""
    began = time.perf_counter()
    count = 0
    while time.perf_counter() - began < seconds:
        sock.sendall(MASKED)
        receive(sock, ECHO_BYTES)
        count += 1
    return count / (time.perf_counter() - began)


def receive(sock: socket.socket, size: int) -> None:
    while size > 0:
        data = sock.recv(min(size, 65536))
        if not data:
            raise SystemExit("the server closed the connection")
        size -= len(data)


if __name__ == "__main__":
    main()

"""The cost of an idle cosocket: the memory of the server with and without thousands of WebSockets that wait to read."""

from __future__ import annotations

import argparse
import socket
import sys
import time
from pathlib import Path

import brokers
from wsclient import connect

BAR_BYTES = 8192


def main() -> None:
    options = parse()
    brokers.raise_file_limit()
    server = brokers.start("smqrt")
    try:
        pid = server.process.pid
        warm = open_all(server.port, 200)
        close_all(warm)
        before = settled_bytes(pid)
        socks = open_all(server.port, options.count)
        cost = (settled_bytes(pid) - before) / options.count
        close_all(socks)
        left = (settled_bytes(pid) - before) / options.count
    finally:
        server.stop()
    print(f"{options.count:,} idle cosockets: {cost:,.0f} bytes each (bar {BAR_BYTES:,}), {left:,.0f} left when closed")
    sys.exit(cost > BAR_BYTES)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench/cosockets_idle", description=__doc__)
    parser.add_argument("--count", type=int, default=5000, help="how many cosockets (default 5000)")
    return parser.parse_args()


def open_all(port: int, count: int) -> list[socket.socket]:
    return [connect(port, "/idle.lsp") for _ in range(count)]


def close_all(socks: list[socket.socket]) -> None:
    for sock in socks:
        sock.close()


def settled_bytes(pid: int) -> int:
    """The private memory of the process, when it has stopped changing."""
    last = 0
    for _ in range(20):
        time.sleep(0.5)
        now = resident_bytes(pid)
        if abs(now - last) < 65536:
            break
        last = now
    return now


def resident_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/smaps_rollup").read_text().split()
    return sum(
        int(fields[at + 1]) * 1024 for at, word in enumerate(fields) if word in ("Private_Dirty:", "Private_Clean:")
    )


if __name__ == "__main__":
    main()

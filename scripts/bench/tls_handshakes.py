"""TLS handshakes beside those of OpenSSL alone, and the memory of clients that are connected and silent.

Both servers have the same certificate and a core of their own; clients of `openssl s_time` on the other cores come to
one and then to the other. What a server used of its core is the figure to trust when the clients are what is slow.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import resource
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from smqrt.wire import smq

APP = Path(__file__).parent / "app"
CLOCK_HZ = os.sysconf("SC_CLK_TCK")
KEYS = {"ec": ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"], "rsa": ["-newkey", "rsa:2048"]}
BOOTSTRAP = b"GET /smq.lsp HTTP/1.1\r\nHost: 127.0.0.1\r\nSimpleMQ: 1\r\n\r\n"
START_S = 60


def free_port() -> int:
    """A port where nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def certificate(folder: str, kind: str) -> tuple[str, str]:
    """The files of a new self-signed certificate and its key."""
    cert, key = f"{folder}/{kind}.pem", f"{folder}/{kind}.key"
    command = ["openssl", "req", "-x509", *KEYS[kind], "-nodes", "-days", "9", "-subj", "/CN=127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


@contextlib.contextmanager
def running(command: list[str], port: int, core: int) -> Iterator[int]:
    """A server on its core; gives its process id."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    try:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{command[0]} did not start")
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def both(folder: str, kind: str, core: int) -> Iterator[dict[str, tuple[int, int]]]:
    """Both servers: process id and port by name."""
    cert, key = certificate(folder, kind)
    ports = free_port(), free_port()
    openssl = ["openssl", "s_server", "-cert", cert, "-key", key, "-accept", f"127.0.0.1:{ports[0]}", "-quiet"]
    ours = [sys.executable, "-m", "smqrt", "serve", str(APP), "--port", "0", "--tls-port", str(ports[1])]
    with (
        running([*openssl, "-ign_eof"], ports[0], core) as first,
        running([*ours, "--cert", cert, "--key", key, "--admin-port", "0"], ports[1], core) as second,
    ):
        yield {"openssl": (first, ports[0]), "smqrt": (second, ports[1])}


def cpu_s(pid: int) -> float:
    """What a process has used of the processor."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_HZ


def handshakes(port: int, version: str, seconds: int, clients: int, cores: set[int]) -> int:
    """How many `clients` do in so many seconds."""
    command = ["openssl", "s_time", "-new", "-connect", f"127.0.0.1:{port}", f"-{version}", "-time", str(seconds)]
    running = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        for _ in range(clients)
    ]
    said = [client.communicate()[0] for client in running]
    return sum(int(re.findall(r"(\d+) connections in \d+ real seconds", one)[-1]) for one in said)


def compare(kind: str, version: str, options: argparse.Namespace, server: int, others: set[int]) -> float:
    """Prints what a handshake costs both; returns the median of the ratio."""
    figures: dict[str, list[tuple[float, float]]] = {"openssl": [], "smqrt": []}
    with tempfile.TemporaryDirectory() as folder, both(folder, kind, server) as servers:
        for _ in range(options.rounds):
            for name, (pid, port) in servers.items():
                before_s = cpu_s(pid)
                count = handshakes(port, version, options.seconds, options.clients, others)
                figures[name].append(((cpu_s(pid) - before_s) / count * 1e6, count / options.seconds))
    ratios = [openssl[0] / ours[0] for openssl, ours in zip(figures["openssl"], figures["smqrt"], strict=True)]
    cost = {name: median(one[0] for one in rows) for name, rows in figures.items()}
    rate = {name: median(one[1] for one in rows) for name, rows in figures.items()}
    print(
        f"{kind:4} {version}  openssl {cost['openssl']:5.0f} us, {rate['openssl']:5.0f}/s"
        f"   smqrt {cost['smqrt']:5.0f} us, {rate['smqrt']:5.0f}/s   CPU of OpenSSL / ours: {median(ratios):.2f}"
    )
    return median(ratios)


def rss_kib(pid: int) -> int:
    """What a process has in memory."""
    return int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0])


def idle(count: int, server: int) -> float:
    """Prints the memory of a connected SMQ client over TLS that says nothing; returns it in KiB."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with tempfile.TemporaryDirectory() as folder, both(folder, "ec", server) as servers:
        pid, port = servers["smqrt"]
        clients = [silent(context, port, number) for number in range(100)]  # what is made once is there
        before = rss_kib(pid)
        clients += [silent(context, port, number) for number in range(100, count + 100)]
        each = (rss_kib(pid) - before) / count
        print(f"{count} silent SMQ clients over TLS: {each:.1f} KiB each")
        for client in clients:
            client.close()
    return each


def silent(context: ssl.SSLContext, port: int, number: int) -> ssl.SSLSocket:
    """A client that has connected to the hub of the page."""
    client = context.wrap_socket(socket.create_connection(("127.0.0.1", port), 30))
    client.sendall(BOOTSTRAP)
    client.recv(1000)
    client.sendall(smq.frame(smq.connect(b"client%d" % number)))
    client.recv(1000)
    return client


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of which the median counts (5)")
    parser.add_argument("--seconds", type=int, default=3, help="of each round and server (3)")
    parser.add_argument("--clients", type=int, default=3, help="at a time (3)")
    parser.add_argument("--idle", type=int, default=2000, help="silent clients (2000); 0 for none")
    parser.add_argument("--least", type=float, default=0.0, help="exit code 1 when a ratio is below")
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    cores = sorted(os.sched_getaffinity(0))
    server, others = cores[-1], set(cores[:-1] or cores)
    ratios = [compare(kind, version, options, server, others) for kind in KEYS for version in ("tls1_2", "tls1_3")]
    if options.idle:
        idle(options.idle, server)
    sys.exit(min(ratios) < options.least)


if __name__ == "__main__":
    main()

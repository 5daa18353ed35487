"""Starts the brokers of the comparison on free loopback ports, without persistence, and stops them."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from build import built, compiler

APP = Path(__file__).parent / "app"
RELAY = Path(__file__).parent / "relay.c"
READY_S = 10
NAMES = ["smqrt", "floor", "mosquitto", "nats", "redis"]


@dataclass
class Broker:
    """A running broker: `protocol` is its name for smqload; `tls_port` is 0 without one."""

    name: str
    protocol: str
    process: subprocess.Popen[str]
    port: int
    folder: tempfile.TemporaryDirectory[str]
    tls_port: int = 0

    @property
    def pids(self) -> list[int]:
        return [self.process.pid]

    def memory_bytes(self) -> int:
        """Its resident memory."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()


def raise_file_limit() -> int:
    """Lets this process and its children open as many files as the system allows; returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def available() -> list[str]:
    """Returns the names of the brokers that can be started here, ours first."""
    return [name for name in NAMES if name == "smqrt" or _program(name)]


def start(name: str, app: Path = APP, tls: bool = False, environment: Mapping[str, str] | None = None) -> Broker:
    """Starts one broker and returns it when it accepts connections; `app` is what ours serves, with `tls` over TLS
    too. `environment` is added to that of this process. A name that is none of NAMES is that of a commit of ours."""
    folder = tempfile.TemporaryDirectory(prefix="smqrt-bench-")
    added = {**os.environ, **(environment or {})}
    is_ours = name not in _COMMANDS
    command, port = _smqrt(app, tls) if is_ours else _COMMANDS[name](Path(folder.name))
    if name not in NAMES:
        check_out(name, Path(folder.name, "tree"))
        added["PYTHONPATH"] = str(Path(folder.name, "tree"))
    # Ours says its port, and its troubles are for the reader.
    out, err = (subprocess.PIPE, None) if is_ours else (subprocess.DEVNULL, subprocess.DEVNULL)
    process = subprocess.Popen(command, cwd=folder.name, stdout=out, stderr=err, text=True, env=added)
    broker = Broker(name, "smq" if is_ours else _PROTOCOLS[name], process, port, folder)
    try:
        broker.port = port or _announced_port(process)
        broker.tls_port = _announced_port(process, "https") if tls else 0
        wait_until_open(name, process, broker.port)
    except BaseException:
        broker.stop()
        raise
    return broker


def check_out(commit: str, tree: Path) -> None:
    """Makes a folder with the files of a commit of this repository."""
    tree.mkdir()
    repository = APP.parent.parent.parent
    files = subprocess.run(["git", "-C", str(repository), "archive", commit, "smqrt"], capture_output=True)
    if files.returncode:
        raise SystemExit(f"the commit {commit} cannot be read: {files.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", str(tree)], input=files.stdout, check=True)
    # Otherwise the server compiles its modules, and its idle clients reuse that memory.
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(tree)], check=False)


def _program(name: str) -> str | None:
    if name == "floor":
        return str(built(RELAY)) if compiler() else None
    path = f"{os.environ['PATH']}:/usr/sbin"
    return shutil.which({"nats": "nats-server", "redis": "redis-server"}.get(name, name), path=path)


def _smqrt(app: Path, tls: bool) -> tuple[list[str], int]:
    return [sys.executable, "-m", "smqrt", "serve", str(app), "--port", "0", *(["--tls-port", "0"] if tls else [])], 0


def _floor(_: Path) -> tuple[list[str], int]:
    port = free_port()
    return [str(built(RELAY)), str(port)], port


def _mosquitto(folder: Path) -> tuple[list[str], int]:
    port = free_port()
    user = "user root\n" if os.geteuid() == 0 else ""
    limits = "max_queued_messages 0\nmax_queued_bytes 0\nset_tcp_nodelay true\npersistence false\n"
    (folder / "conf").write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nlog_type error\n{limits}{user}")
    return [str(_program("mosquitto")), "-c", str(folder / "conf")], port


def _nats(folder: Path) -> tuple[list[str], int]:
    port = free_port()
    (folder / "conf").write_text(f"listen: 127.0.0.1:{port}\nmax_connections: 65536\nmax_pending: 1GB\n")
    return [str(_program("nats")), "-c", str(folder / "conf")], port


def _redis(_: Path) -> tuple[list[str], int]:
    port = free_port()
    limits = ["--maxclients", "20000", "--client-output-buffer-limit", "pubsub 0 0 0"]
    return [str(_program("redis")), "--bind", "127.0.0.1", "--port", str(port), "--save", "", *limits], port


_COMMANDS: dict[str, Callable[[Path], tuple[list[str], int]]] = {
    "floor": _floor,
    "mosquitto": _mosquitto,
    "nats": _nats,
    "redis": _redis,
}
_PROTOCOLS = {"floor": "smq", "mosquitto": "mqtt", "nats": "nats", "redis": "redis"}


def _announced_port(process: subprocess.Popen[str], scheme: str = "http") -> int:
    assert process.stdout
    for line in process.stdout:
        if match := re.match(rf"listening on {scheme}://.*:(\d+)$", line):
            return int(match[1])
    raise SystemExit("smqrt serve did not start; try: scripts/serve scripts/bench/app")


def wait_until_open(name: str, process: subprocess.Popen[str], port: int) -> None:
    """Returns when something accepts connections on the port; ends the program when that takes too long."""
    deadline = time.monotonic() + READY_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} did not start") from None
            time.sleep(0.02)

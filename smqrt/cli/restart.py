"""`smqrt restart`: hot restart of a running server."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import click

from smqrt.errors import StartError
from smqrt.server.restart.control_socket import check_socket_path
from smqrt.settings.settings import FILE_NAME
from smqrt.settings.sources import Sources
from smqrt.workers.fd_channel import ChannelError, FdChannel
from smqrt.workers.worker_identity import ENVIRONMENT as WORKER

_POLL_S = 0.05


@click.command()
@click.option(
    "--socket", "path", metavar="PATH", help="Control socket of the server.  [default: the setting restart.socket]"
)
@click.option("--pid", type=int, help="Process ID of a server without a control socket; the command sends SIGUSR2.")
@click.option("--config", metavar="FILE", help=f"Settings file.  [default: {FILE_NAME} if it exists]")
@click.option("--wait-s", type=float, default=90.0, show_default=True, help="Seconds to wait for the new process.")
def restart(path: str | None, pid: int | None, config: str | None, wait_s: float) -> None:
    """Restart a server without disconnecting its clients (hot restart).

    Waits until the new process has taken over. When the restart fails, the old process continues, and the exit code
    is 1.
    """
    if pid is not None:
        _restart_by_signal(pid, wait_s)
        return
    if not path:
        file = config or (FILE_NAME if Path(FILE_NAME).is_file() else None)
        settings = Sources(environment=os.environ, file=Path(file) if file else None).read().settings
        path = settings.restart.socket
    if not path:
        raise StartError("No server selected. Pass --socket or --pid, or set restart.socket.")
    _restart_by_socket(path, wait_s)


def _restart_by_socket(path: str, wait_s: float) -> None:
    check_socket_path("restart.socket", path)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(path)
    except OSError as error:
        raise StartError(f"No server at {path}: {error.strerror}.") from None
    channel = FdChannel(sock)
    try:
        if not channel.is_of_this_user():
            raise StartError(f"The process at {path} belongs to another user.")
        channel.send({"do": "restart"})
        answer, _ = channel.receive(wait_s)
    except ChannelError as error:
        raise StartError(f"The result of the restart is unknown: {error}. See the server's log.") from None
    finally:
        channel.close()
    if answer["do"] != "done":
        raise StartError(f"Restart failed, the old process continues: {answer.get('why')}.")
    if "workers" in answer:
        click.echo(f"restarted: {answer['workers']} new workers, {answer['clients']} clients kept")
    else:
        click.echo(f"restarted: new process {answer['pid']}, {answer['clients']} clients kept")


def _restart_by_signal(pid: int, wait_s: float) -> None:
    old = workers_of(pid) or [pid]
    if Path(f"/proc/{pid}").exists() and not _is_running(pid):
        raise StartError(f"Process {pid} has exited already; its parent has not read the exit code yet.")
    try:
        os.kill(pid, signal.SIGUSR2)
    except OSError as error:
        raise StartError(f"Cannot signal process {pid}: {error.strerror}.") from None
    until_s = time.monotonic() + wait_s
    while running := [one for one in old if _is_running(one)]:
        if time.monotonic() > until_s:
            sys.exit(f"Error: process {running[0]} is still running after {wait_s:g} s. See the server's log.")
        time.sleep(_POLL_S)
    if old == [pid]:
        click.echo(f"process {pid} has exited; a new process serves")
    else:
        click.echo(f"process{'es' if len(old) > 1 else ''} {', '.join(map(str, old))}: replaced")


def _is_running(pid: int) -> bool:
    """Whether a process is running, not a zombie (Z) or dead (X)."""
    try:
        # The state is the first field after the name, which is in parentheses and may contain any character.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False


def workers_of(pid: int) -> list[int]:
    """Return the process IDs of the workers of a supervisor; none for any other process."""
    try:
        files = Path(f"/proc/{pid}/task").glob("*/children")
        children = [int(one) for file in files for one in file.read_text().split()]
        return [one for one in children if f"{WORKER}=".encode() in Path(f"/proc/{one}/environ").read_bytes()]
    except OSError:  # the process belongs to another user or has exited
        return []

"""`smqrt restart`: has a running server replaced by a new process, and says how that went."""

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

_LOOK_S = 0.05


@click.command()
@click.option("--socket", "path", metavar="PATH", help="The server's setting restart.socket.  [default: as it has it]")
@click.option("--pid", type=int, help="The server's process, when it has no such socket; signalled and watched.")
@click.option("--config", metavar="FILE", help=f"Read settings from this file.  [default: {FILE_NAME} if there is one]")
@click.option("--wait-s", type=float, default=90.0, show_default=True, help="How long it may take.")
def restart(path: str | None, pid: int | None, config: str | None, wait_s: float) -> None:
    """Restart a server without its clients noticing: hot restart.

    Waits until a new process serves (exit code 0), or says why the old one goes on (exit code 1).
    """
    if pid is not None:
        _by_signal(pid, wait_s)
        return
    path = path or _configured(config)
    if not path:
        raise StartError("The server is not known: give --socket, --pid, or the setting restart.socket.")
    _by_socket(path, wait_s)


def _configured(config: str | None) -> str:
    named = config or (FILE_NAME if Path(FILE_NAME).is_file() else None)
    return Sources(environment=os.environ, file=Path(named) if named else None).read().settings.restart.socket


def _by_socket(path: str, wait_s: float) -> None:
    check_socket_path("restart.socket", path)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(path)
    except OSError as error:
        raise StartError(f"No server answers at {path}: {error.strerror}.") from None
    channel = FdChannel(sock)
    try:
        if not channel.is_of_this_user():
            raise StartError(f"The process at {path} belongs to another user.")
        channel.send({"do": "restart"})
        answer, _ = channel.receive(wait_s)
    except ChannelError as error:
        raise StartError(f"The restart is in doubt: {error}; the server's log tells more.") from None
    finally:
        channel.close()
    if answer["do"] != "done":
        raise StartError(f"Not restarted, the server goes on as before: {answer.get('why')}.")
    if "workers" in answer:
        click.echo(f"{answer['workers']} new workers serve, with {answer['clients']} clients of those before")
    else:
        click.echo(f"process {answer['pid']} serves, with {answer['clients']} clients of the one before")


def _by_signal(pid: int, wait_s: float) -> None:
    old = workers_of(pid) or [pid]
    if Path(f"/proc/{pid}").exists() and not _is_there(pid):
        raise StartError(f"Process {pid} has ended already; its parent has yet to ask for its exit code.")
    try:
        os.kill(pid, signal.SIGUSR2)
    except OSError as error:
        raise StartError(f"Process {pid} can't be asked: {error.strerror}.") from None
    until_s = time.monotonic() + wait_s
    while still := [one for one in old if _is_there(one)]:
        if time.monotonic() > until_s:
            sys.exit(f"Error: process {still[0]} is there after {wait_s:g} s; its log says why it goes on.")
        time.sleep(_LOOK_S)
    click.echo(f"{_listed(old)} has ended; a new one serves" if old == [pid] else f"{_listed(old)} have been replaced")


def _is_there(pid: int) -> bool:
    """Whether a process runs: one that has ended stays in the list until its parent has asked for its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False


def workers_of(pid: int) -> list[int]:
    """Returns the processes of the workers that a process supervises; none when it is no supervisor."""
    try:
        files = Path(f"/proc/{pid}/task").glob("*/children")
        children = [int(one) for file in files for one in file.read_text().split()]
        return [one for one in children if f"{WORKER}=".encode() in Path(f"/proc/{one}/environ").read_bytes()]
    except OSError:  # of another user, or gone
        return []


def _listed(processes: list[int]) -> str:
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"

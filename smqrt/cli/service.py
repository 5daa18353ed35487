"""`smqrt restart` and `smqrt systemd-unit`: service management."""

from __future__ import annotations

import os
import pwd
import re
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from smqrt.errors import StartError
from smqrt.printable import printable
from smqrt.process.current_process import start_folder
from smqrt.server.restart.control_socket import check_socket_path
from smqrt.settings.option_types import ENVIRONMENT, value_at
from smqrt.settings.server_settings import FILE_NAME, Settings
from smqrt.settings.sources import Configuration, Sources, settings_file
from smqrt.workers.worker_rpc import ENVIRONMENT as WORKER
from smqrt.workers.worker_rpc import ChannelError, FdChannel

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
        settings = Sources(environment=os.environ, file=settings_file(config)).read().settings
        path = settings.restart.socket
    if not path:
        raise StartError("No server selected. Pass --socket or --pid, or set restart.socket.")
    check_socket_path("restart.socket", path)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(path)
    except OSError as error:
        raise StartError(f"No server at {path}: {error.strerror}.") from None
    channel = FdChannel(sock)
    try:
        if not channel.is_of_this_user():  # another user may have created a socket at this path
            raise StartError(f"The process at {path} belongs to another user.")
        channel.send({"do": "restart"})
        answer, _ = channel.receive(wait_s)
    except ChannelError as error:
        raise StartError(f"The result of the restart is unknown: {error}. See the server's log.") from None
    finally:
        channel.close()
    if answer["do"] != "done":
        raise StartError(f"Restart failed; the old process continues: {answer.get('why')}.")
    if "workers" in answer:
        click.echo(f"restarted: {answer['workers']} new workers, {answer['clients']} clients kept")
    else:
        click.echo(f"restarted: new process {answer['pid']}, {answer['clients']} clients kept")


def _restart_by_signal(pid: int, wait_s: float) -> None:
    old = workers_of(pid) or [pid]  # a supervisor keeps running and replaces its workers
    if Path(f"/proc/{pid}").exists() and not _is_running(pid):
        raise StartError(f"Process {pid} has exited already; its parent has not read the exit code yet.")
    try:
        os.kill(pid, signal.SIGUSR2)
    except OSError as error:
        raise StartError(f"Cannot signal process {pid}: {error.strerror}.") from None
    deadline_s = time.monotonic() + wait_s
    while running := [one for one in old if _is_running(one)]:
        if time.monotonic() > deadline_s:
            sys.exit(f"Error: process {running[0]} is still running after {wait_s:g} s. See the server's log.")
        time.sleep(_POLL_S)
    if old == [pid]:
        click.echo(f"process {pid} has exited; a new process has taken over")
    else:
        click.echo(f"process{'es' if len(old) > 1 else ''} {', '.join(map(str, old))}: replaced")


def _is_running(pid: int) -> bool:
    """Return whether a process is running, not a zombie (Z) or dead (X)."""
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


# ---- `smqrt systemd-unit`

# Settings that name a file to read, by the last part of their name; files to write stay in the service's state
# directory.
_FILE_SETTINGS = {
    "cert", "key", "client_ca", "client_crl", "users", "acl", "jwt_key", "jwt_secret", "ca", "credentials"
}  # fmt: skip
_STOP_MARGIN_S = 10  # systemd waits longer than the server's own deadline
_STOP_DEFAULT_S = 300  # for servers without a deadline

_SERVICE = """\
# /etc/systemd/system/{name}.service: generated by `smqrt systemd-unit`
[Unit]
Description=smqrt: SMQ broker and application server
Wants=network-online.target
After=network-online.target

[Service]
Type=notify
ExecStart={command}
ExecReload=/bin/kill -HUP $MAINPID
Restart=on-failure
RestartSec=1
# The event loop notifies the watchdog; systemd restarts a server whose loop is blocked for this time.
WatchdogSec=30
# The settings drain.* limit the duration of a shutdown.
TimeoutStopSec={stop_s:g}
KillMode=mixed
LimitNOFILE=1048576
UMask=0077
{identity}
StateDirectory={name}
WorkingDirectory=%S/{name}
Environment=HOME=%S/{name} PYTHONUNBUFFERED=1
{files}# Permissions: use the network, write to the state directory{writes}.
{paths}ProtectSystem=strict
ProtectHome={home}
PrivateTmp={private_tmp}
PrivateDevices=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
RemoveIPC=yes
NoNewPrivileges=yes
{capabilities}
LockPersonality=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallErrorNumber=EPERM
# No MemoryDenyWriteExecute: LuaJIT compiles loops over messages to machine code.

[Install]
WantedBy=multi-user.target
"""

_SOCKET = """\
# /etc/systemd/system/{name}-{listener}.socket: generated by `smqrt systemd-unit`
[Unit]
Description=smqrt: the listener {listener}

[Socket]
ListenStream={address}
FileDescriptorName={listener}
Service={name}.service
Backlog=4096
NoDelay=yes

[Install]
WantedBy=sockets.target
"""


@click.command("systemd-unit")
@click.argument("arguments", nargs=-1, metavar="[APP|FLAG]...", type=click.UNPROCESSED)
@click.option("--name", default="smqrt", show_default=True, help="Name of the service.")
@click.option("--user", help="User to run as.  [default: a dynamic user of systemd]")
@click.option("--config", type=click.Path(path_type=Path), help=f"Settings file.  [default: {FILE_NAME} if it exists]")
@click.option(
    "--writable",
    "writable",
    multiple=True,
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Another folder to write to, besides /var/lib/NAME, such as an application that keeps a journal; repeatable.",
)
@click.option("--socket", "listener", metavar="LISTENER", help="Print the socket unit of a listener, such as http.")
@click.option("--listen", "address", metavar="ADDRESS", help="With --socket: port, or address and port, of the socket.")
def systemd_unit(
    arguments: tuple[str, ...],
    name: str,
    user: str | None,
    config: Path | None,
    writable: tuple[Path, ...],
    listener: str | None,
    address: str | None,
) -> None:
    """Print a systemd unit.

    APP and FLAG are arguments of `smqrt serve`; put flags after `--`.

    \b
    Examples:
      smqrt systemd-unit /srv/chat > /etc/systemd/system/smqrt.service
      smqrt systemd-unit --socket http --listen 80 > /etc/systemd/system/smqrt-http.socket
    """
    if not re.fullmatch(r"[A-Za-z0-9_.@-]+", name):
        raise StartError(f"--name {name!r}: the name of a service consists of letters, digits, and _ . @ -")
    if (listener is None) != (address is None):
        raise StartError("--socket and --listen require each other: --socket http --listen 80.")
    if listener is not None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,255}", listener):
            raise StartError(f"--socket {listener!r}: the name of a listener consists of letters, digits, and _ . -")
        click.echo(_SOCKET.format(name=name, listener=listener, address=address), nl=False)
        return
    config_file = settings_file(config)
    configuration = Sources(file=config_file).read()
    flags = ["--config", _absolute(config_file)] if config_file else []
    words = [_absolute(Path(word)) if Path(word).exists() else word for word in arguments]
    folders = [_absolute(folder) for folder in writable]
    # Paths in the configuration file are relative to its folder, and the service has another working folder.
    config_folder = _absolute(config_file.parent) if config_file else None
    files: dict[tuple[str, ...], list[str]] = {}
    for path in configuration.places:
        if names := _file_names(path, configuration.settings):
            files[path] = [_absolute(Path(one), config_folder) for one in names]
    script = Path(sys.executable).with_name("smqrt")
    program = [str(script)] if script.is_file() else [sys.executable, "-m", "smqrt"]
    command = [*program, "serve", *flags, *words]
    absolute = [word for word in command if Path(word).is_absolute()]
    for warning in _unreadable([*absolute, *folders, *(file for one in files.values() for file in one)], user):
        click.echo(printable(f"Warning: {warning}"), err=True)
    click.echo(_service(command, name, user, folders, configuration, files), nl=False)


def _absolute(path: Path, folder: str | None = None) -> str:
    """Return an absolute path; symbolic links, such as one to the current release, are not resolved."""
    path = Path(folder or start_folder(), path)
    return os.path.normpath(path) if ".." not in path.parts else str(path.resolve())


def _file_names(path: tuple[str, ...], settings: Settings) -> list[str]:
    """Return the file names in a setting; none when the setting does not name files."""
    value = value_at(settings, path)
    if path[-1] == "certificates" and isinstance(value, tuple):
        return [file for pair in value for file in pair]
    return [value] if path[-1] in _FILE_SETTINGS and isinstance(value, str) and value else []


def _environment(files: dict[tuple[str, ...], list[str]], settings: Settings) -> str:
    """Return variables for settings with relative paths; they take precedence over the configuration file."""
    lines = []
    for path, names in files.items():
        if names == _file_names(path, settings):
            continue
        pairs = [":".join(pair) for pair in zip(names[::2], names[1::2], strict=False)]  # certificate and key
        value = ",".join(pairs) if path[-1] == "certificates" else names[0]
        variable = ENVIRONMENT + "__".join(path).upper()
        lines.append(f"Environment={_quoted(f'{variable}={value}', is_command=False)}\n")
    return "".join(lines)


def _unreadable(paths: Iterable[str], user: str | None) -> Iterator[str]:
    """Yield a warning for each path that is missing or that the user of the service can't read on this machine."""
    # No user has the ID -1: the dynamic user has only the permissions of others.
    reader, uid, groups = "the dynamic user of systemd", -1, set[int]()
    if user:
        try:
            entry = pwd.getpwnam(user)
        except KeyError:
            yield f"no user {user} on this machine. Create it before you start the service."
            return
        reader, uid, groups = f"the user {user}", entry.pw_uid, set(os.getgrouplist(user, entry.pw_gid))
    for path in dict.fromkeys(paths):
        if not os.path.exists(path):
            yield f"{path} does not exist."
        elif uid != 0 and (denied := _denied_path(path, uid, groups)):
            cause = "" if denied == path else f": no permission for {denied}"
            yield f"{path} can't be read by {reader}{cause}. Change the permissions, move it, or pass another --user."


def _denied_path(path: str, uid: int, groups: set[int]) -> str | None:
    """Return the first parent folder that a user may not enter, or the path if the user may not read it."""
    real = Path(os.path.realpath(path))
    for one in (*reversed(real.parents), real):
        found = one.stat()
        # Bits of the mode: owner 6 to 8, group 3 to 5, others 0 to 2; in each 4 is read, 1 is enter.
        shift = 6 if found.st_uid == uid else 3 if found.st_gid in groups else 0
        required = (4 | stat.S_ISDIR(found.st_mode)) if one == real else 1
        if (found.st_mode >> shift) & required != required:
            return str(one)
    return None


def _service(
    command: list[str],
    name: str,
    user: str | None,
    writable: list[str],
    configuration: Configuration,
    files: dict[tuple[str, ...], list[str]],
) -> str:
    settings = configuration.settings
    ports = [settings.port, settings.tls_port, *(one.port for one in settings.listener.values())]
    # The flags after `--` are not parsed as settings here.
    ports += map(int, re.findall(r"--(?:tls-)?port[ =](\d{1,5})\b", " ".join(command)))
    is_low = any(port is not None and 0 < port < 1024 for port in ports)
    capabilities = "CAP_NET_BIND_SERVICE" if is_low else ""
    named = [file for one in files.values() for file in one]
    # The first two folders of each path decide whether the sandbox must include /home, /root or /tmp.
    folders = {Path(word).parts[1:3] for word in [*command, *writable, *named] if Path(word).is_absolute()}
    in_home = any(parts[0] in ("home", "root") for parts in folders if parts)
    in_tmp = any(parts[0] == "tmp" or parts == ("var", "tmp") for parts in folders if parts)
    deadline_s = settings.drain.timeout_s
    return _SERVICE.format(
        name=name,
        command=" ".join(map(_quoted, command)),
        files=_environment(files, settings),
        stop_s=deadline_s + _STOP_MARGIN_S if deadline_s else _STOP_DEFAULT_S,
        identity=f"User={user}" if user else "DynamicUser=yes",
        writes=" and to the folders below" if writable else "",
        paths="".join(f"ReadWritePaths={_quoted(folder)}\n" for folder in writable),
        home="read-only" if in_home else "yes",
        private_tmp="no" if in_tmp else "yes",
        capabilities=f"CapabilityBoundingSet={capabilities}\nAmbientCapabilities={capabilities}",
    )


def _quoted(word: str, is_command: bool = True) -> str:
    """Escape specifiers, in commands also variables, and quote the word where systemd requires it."""
    word = word.replace("%", "%%")
    word = word.replace("$", "$$") if is_command else word
    if re.fullmatch(r"[A-Za-z0-9_./:=,@%$+-]+", word):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'

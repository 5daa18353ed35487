"""`smqrt systemd-unit`: prints units for systemd, a service with few rights and the socket it may be started by."""

from __future__ import annotations

import os
import pwd
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from smqrt.errors import StartError
from smqrt.printable import printable
from smqrt.process.environment import start_folder
from smqrt.settings.settings import FILE_NAME, Settings
from smqrt.settings.sources import Configuration, Sources
from smqrt.settings.tree import ENVIRONMENT, value_at

_FILES = {
    "cert", "key", "client_ca", "client_crl", "users", "acl", "jwt_key", "jwt_secret", "ca", "credentials"
}  # fmt: skip
"""The settings that name a file to be read, by their last name; those that are written stay in the service's folder."""
_MARGIN_S = 10  # systemd waits a little longer than the server's own deadline
_NO_LIMIT_S = 300  # where the server has none

_SERVICE = """\
# /etc/systemd/system/{name}.service: made by `smqrt systemd-unit`
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
# The event loop itself feeds the watchdog: one that is held for so long is ended, and started again.
WatchdogSec=30
# The settings drain.* say how long an end takes.
TimeoutStopSec={stop_s:g}
KillMode=mixed
LimitNOFILE=1048576
UMask=0077
{identity}
StateDirectory={name}
WorkingDirectory=%S/{name}
Environment=HOME=%S/{name} PYTHONUNBUFFERED=1
{files}# What it may: use the network, write into its state directory{writes}.
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
# No MemoryDenyWriteExecute: LuaJIT compiles the loops over messages.

[Install]
WantedBy=multi-user.target
"""

_SOCKET = """\
# /etc/systemd/system/{name}-{listener}.socket: made by `smqrt systemd-unit`
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
@click.option("--name", default="smqrt", show_default=True, help="Of the service.")
@click.option("--user", help="Run as this user.  [default: one that systemd makes for it]")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help=f"The settings.  [default: {FILE_NAME} if there is one]",
)
@click.option(
    "--writable",
    "writable",
    multiple=True,
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="A folder the server may write into beside /var/lib/NAME, such as an application's that keeps a journal; "
    "repeatable.",
)
@click.option("--socket", "listener", metavar="LISTENER", help="Print the socket unit of a listener instead: http.")
@click.option("--listen", "address", metavar="ADDRESS", help="With --socket: a port, or an address and a port.")
def systemd_unit(
    arguments: tuple[str, ...],
    name: str,
    user: str | None,
    config: Path | None,
    writable: tuple[Path, ...],
    listener: str | None,
    address: str | None,
) -> None:
    """Print a systemd unit that serves applications: APP and FLAG are those of `smqrt serve`, behind `--`.

    \b
    smqrt systemd-unit /srv/chat > /etc/systemd/system/smqrt.service
    smqrt systemd-unit --socket http --listen 80 > /etc/systemd/system/smqrt-http.socket
    """
    if not re.fullmatch(r"[A-Za-z0-9_.@-]+", name):
        raise StartError(f"--name {name!r}: a service has letters, digits, and _ . @ - in its name.")
    if (listener is None) != (address is None):
        raise StartError("--socket and --listen belong together: --socket http --listen 80.")
    if listener is not None:
        click.echo(_SOCKET.format(name=name, listener=_word("--socket", listener), address=address), nl=False)
        return
    found = config or (Path(FILE_NAME) if Path(FILE_NAME).is_file() else None)
    configuration = Sources(file=found).read()
    flags = ["--config", _absolute(found)] if found else []
    words = [_absolute(Path(word)) if Path(word).exists() else word for word in arguments]
    folders = [_absolute(folder) for folder in writable]
    files = _files_of(configuration, found)
    command = [*_program(), "serve", *flags, *words]
    absolute = [word for word in command if Path(word).is_absolute()]
    for warning in _unreadable([*absolute, *folders, *(file for one in files.values() for file in one)], user):
        click.echo(printable(f"Warning: {warning}"), err=True)
    click.echo(_service(command, name, user, folders, configuration, files), nl=False)


def _absolute(path: Path, folder: str | None = None) -> str:
    """A path by way of `folder`, as it was written: a link, such as one to the current release, stays one."""
    path = Path(folder or start_folder(), path)
    return os.path.normpath(path) if ".." not in path.parts else str(path.resolve())


def _files_of(found: Configuration, config: Path | None) -> dict[tuple[str, ...], list[str]]:
    """The files that the settings name and the server reads, by setting.

    They are absolute: relative ones are beside the configuration file, and a service has another working folder.
    """
    folder = _absolute(config.parent) if config else None
    files: dict[tuple[str, ...], list[str]] = {}
    for path in found.places:
        names = _names(path, found.settings)
        if names:
            files[path] = [_absolute(Path(name), folder) for name in names]
    return files


def _names(path: tuple[str, ...], settings: Settings) -> list[str]:
    value = value_at(settings, path)
    if path[-1] == "certificates" and isinstance(value, tuple):
        return [file for pair in value for file in pair]
    return [value] if path[-1] in _FILES and isinstance(value, str) and value else []


def _environment(files: dict[tuple[str, ...], list[str]], settings: Settings) -> str:
    """Variables for the settings whose files are relative: they win over the configuration file."""
    lines = []
    for path, names in files.items():
        if names == _names(path, settings):
            continue
        pairs = [":".join(pair) for pair in zip(names[::2], names[1::2], strict=False)]
        value = ",".join(pairs) if path[-1] == "certificates" else names[0]
        variable = ENVIRONMENT + "__".join(path).upper()
        lines.append(f"Environment={_quoted(f'{variable}={value}', is_command=False)}\n")
    return "".join(lines)


def _unreadable(paths: Iterable[str], user: str | None) -> Iterator[str]:
    """What the user of the service could not read, as far as this machine shows it."""
    who, uid, groups = "the user that systemd makes (DynamicUser)", -1, set[int]()
    if user:
        try:
            entry = pwd.getpwnam(user)
        except KeyError:
            yield f"there is no user {user} on this machine; make it before the service is started."
            return
        who, uid, groups = f"the user {user}", entry.pw_uid, set(os.getgrouplist(user, entry.pw_gid))
    for path in dict.fromkeys(paths):
        if not os.path.exists(path):
            yield f"{path} is not there."
        elif uid != 0 and (closed := _closed_to(path, uid, groups)):
            at = "" if closed == path else f": {closed} is closed to it"
            yield f"{path} can't be read by {who}{at}; change the rights, move it, or give another --user."


def _closed_to(path: str, uid: int, groups: set[int]) -> str | None:
    """The first folder on the way to `path` that a user may not enter, or the path that it may not read."""
    real = Path(os.path.realpath(path))
    for one in (*reversed(real.parents), real):
        found = one.stat()
        shift = 6 if found.st_uid == uid else 3 if found.st_gid in groups else 0
        wanted = (4 | stat.S_ISDIR(found.st_mode)) if one == real else 1
        if (found.st_mode >> shift) & wanted != wanted:
            return str(one)
    return None


def _service(
    command: list[str],
    name: str,
    user: str | None,
    writable: list[str],
    found: Configuration,
    files: dict[tuple[str, ...], list[str]],
) -> str:
    settings = found.settings
    ports = [settings.port, settings.tls_port, *(one.port for one in settings.listener.values())]
    ports += map(int, re.findall(r"--(?:tls-)?port[ =](\d{1,5})\b", " ".join(command)))
    is_low = any(port is not None and 0 < port < 1024 for port in ports)
    capabilities = "CAP_NET_BIND_SERVICE" if is_low else ""
    named = [file for one in files.values() for file in one]
    folders = {Path(word).parts[1:3] for word in [*command, *writable, *named] if Path(word).is_absolute()}
    in_home = any(parts[0] in ("home", "root") for parts in folders if parts)
    in_tmp = any(parts[0] == "tmp" or parts == ("var", "tmp") for parts in folders if parts)
    most_s = settings.drain.timeout_s
    return _SERVICE.format(
        name=name,
        command=" ".join(map(_quoted, command)),
        files=_environment(files, settings),
        stop_s=most_s + _MARGIN_S if most_s else _NO_LIMIT_S,
        identity=f"User={user}" if user else "DynamicUser=yes",
        writes=", and into the folders below" if writable else "",
        paths="".join(f"ReadWritePaths={_quoted(folder)}\n" for folder in writable),
        home="read-only" if in_home else "yes",
        private_tmp="no" if in_tmp else "yes",
        capabilities=f"CapabilityBoundingSet={capabilities}\nAmbientCapabilities={capabilities}",
    )


def _program() -> Iterable[str]:
    """What runs in order to be `smqrt`: the installed script when there is one beside this Python."""
    script = Path(sys.executable).with_name("smqrt")
    return [str(script)] if script.is_file() else [sys.executable, "-m", "smqrt"]


def _word(option: str, text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,255}", text):
        raise StartError(f"{option} {text!r}: the name of a listener has letters, digits, and _ . - in it.")
    return text


def _quoted(word: str, is_command: bool = True) -> str:
    """A word as systemd reads it: no specifiers, in commands no variables, and quoted where it has to be."""
    word = word.replace("%", "%%")
    word = word.replace("$", "$$") if is_command else word
    if re.fullmatch(r"[A-Za-z0-9_./:=,@%$+-]+", word):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'

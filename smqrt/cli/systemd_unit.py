"""`smqrt systemd-unit`: prints units for systemd, a service with few rights and the socket it may be started by."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import click

from smqrt.errors import StartError
from smqrt.settings import FILE_NAME
from smqrt.settings_sources import Configuration, Sources

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
# What it may: use the network, write into its state directory{writes}.
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
    flags = ["--config", str(found.resolve())] if found else []
    words = [str(Path(word).resolve()) if Path(word).exists() else word for word in arguments]
    folders = [str(folder.resolve()) for folder in writable]
    click.echo(_service([*_program(), "serve", *flags, *words], name, user, folders, configuration), nl=False)


def _service(command: list[str], name: str, user: str | None, writable: list[str], found: Configuration) -> str:
    settings = found.settings
    ports = [settings.port, settings.tls_port, *(one.port for one in settings.listener.values())]
    ports += map(int, re.findall(r"--(?:tls-)?port[ =](\d{1,5})\b", " ".join(command)))
    is_low = any(port is not None and 0 < port < 1024 for port in ports)
    capabilities = "CAP_NET_BIND_SERVICE" if is_low else ""
    folders = {Path(word).parts[1:3] for word in [*command, *writable] if Path(word).is_absolute()}
    in_home = any(parts[0] in ("home", "root") for parts in folders if parts)
    in_tmp = any(parts[0] == "tmp" or parts == ("var", "tmp") for parts in folders if parts)
    most_s = settings.drain.most_s
    return _SERVICE.format(
        name=name,
        command=" ".join(map(_quoted, command)),
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


def _quoted(word: str) -> str:
    """A word as systemd reads it: no specifiers, no variables, and quoted where it has to be."""
    word = word.replace("%", "%%").replace("$", "$$")
    if re.fullmatch(r"[A-Za-z0-9_./:=,@%$+-]+", word):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'

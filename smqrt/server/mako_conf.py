"""mako.conf, the configuration file of Mako: a Lua file whose globals are settings (spec: runtime §1.2).

Its ports, certificates, limits and applications become settings of the server. Lua code reads the other variables, such
as users, file server and trace logger, through `require "loadconf"`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smqrt.errors import ArgumentError, StartError
from smqrt.settings.option_types import nearest, options_of, path, text, whole
from smqrt.settings.server_settings import Settings

NAME = "mako.conf"
UNSUPPORTED = frozenset(
    ("certstore", "favorRSA", "commandcnt", "rspsz", "reqminsz", "reqmaxsz", "timertick", "tracker_nodes")
    + ("tracker_maxlogin", "tracker_bantime", "acme", "proxy", "rtlprio", "stop")
)
"""Variables that Mako uses and this server does not."""
USED = frozenset(
    ("apps", "port", "sslport", "host", "sslhost", "certfile", "keyfile", "homeio", "users", "realm", "fileserver")
    + ("tracelogger", "sessioncnt", "conncnt", "log", "dbdir")
)
"""Variables that this server uses. All others belong to the applications."""
_SIMILAR = 0.8  # a variable of an application may resemble one of the server
TLS_PORT = 443  # Mako's default, when there is a certificate
_MOUNT = re.compile(r"([^/:]*):(-?[0-9]*):(.+)")
"""An application written as `name:priority:path`."""

Value = Any
"""The value of a Lua variable: str, bool, int, float, or a dict of these."""


@dataclass(frozen=True)
class ConfiguredApp:
    """An application of a mako.conf.

    Attributes:
        name: the path segment of its URL; empty for the root.
        path: a folder or ZIP file, which need not exist.
        priority: -127 to 127.
        entry: its index in `apps`, from 1.
    """

    name: str
    path: Path
    priority: int
    entry: int


@dataclass(frozen=True)
class MakoConf:
    """The contents of a mako.conf.

    Attributes:
        path: the file.
        settings: values by the names of the server's settings.
        apps: the applications, in order.
        home: the folder of the io "home", and of relative paths.
        plain_http: False when `port` is 0.
        tls_host: the address of the TLS port; None for the address of the plain port.
        sessions: the limit of HTTP sessions; None for the server's default.
        unsupported: the names of its variables that Mako uses and this server does not.
        misspelled: names that resemble a variable of the server, which is not set, with that variable.
    """

    path: Path
    settings: Mapping[str, object] = field(default_factory=dict)
    apps: Sequence[ConfiguredApp] = ()
    home: Path = Path()
    plain_http: bool = True
    tls_host: str | None = None
    sessions: int | None = None
    unsupported: Sequence[str] = ()
    misspelled: Mapping[str, str] = field(default_factory=dict)


def find(current: Path) -> Path | None:
    """Find the default mako.conf: in the folder of the executable, in `current`, or in the user's home.

    Returns:
        The first file that exists, or None.
    """
    folders = [Path(os.path.realpath(sys.argv[0])).parent, current, Path(os.environ.get("HOME") or current)]
    return next((folder / NAME for folder in folders if (folder / NAME).is_file()), None)


def read(file: Path, arguments: Sequence[str] = (), current: Path | None = None) -> MakoConf:
    """Run a mako.conf and return its contents.

    Args:
        file: the file.
        arguments: the arguments of the command line, for `mako.argv`.
        current: the folder of relative paths; the working folder by default.

    Raises:
        StartError: the file can't be read, its Lua fails, or a variable has an invalid value; one sentence with file
            and line, or the name of the variable.
    """
    file, current = file.absolute(), current or Path.cwd()
    if not file.exists():
        raise StartError(f"{file} does not exist.")
    from smqrt.apps.lua.applications import variables  # here: only a server with such a file needs Lua this early

    values = variables(file, arguments)
    try:
        home = current / _checked(values, "homeio", path, str(current))
        if not home.is_dir():
            raise ArgumentError(f"homeio must be a folder, not {str(home)!r}.")
        port = _checked(values, "port", lambda: whole(0, 0xFFFF), None)
        return MakoConf(
            path=file,
            settings=dict(_settings(values, home)),
            apps=list(_apps(values.get("apps"), home, file.parent)),
            home=home,
            plain_http=port != 0,
            tls_host=_checked(values, "sslhost", text, None),
            sessions=_checked(values, "sessioncnt", lambda: whole(1), None),
            unsupported=sorted(UNSUPPORTED & values.keys()),
            misspelled={
                name: near
                for name in sorted(values.keys() - USED - UNSUPPORTED)
                if (near := nearest(name, USED - values.keys(), _SIMILAR))
            },
        )
    except ArgumentError as error:
        raise StartError(f"{file}: {error}") from None


def _checked(values: Mapping[str, Value], name: str, rule: Callable[[], Any], default: Value) -> Value:
    return rule().check(name, values[name]) if values.get(name) is not None else default


_SETTINGS = {"port": "port", "sslport": "tls_port", "host": "host", "conncnt": "max_connections"}


def _settings(values: Mapping[str, Value], home: Path) -> Iterator[tuple[str, object]]:
    """Yield the settings of the server, without a port 0, which disables a listener."""
    table = options_of(Settings)
    for name, setting in _SETTINGS.items():
        if values.get(name) is not None:
            value = table[setting].metadata["rule"].check(name, values[name])
            if value != 0:
                yield setting, value
    files = {name: values[name] for name in ("certfile", "keyfile") if values.get(name) is not None}
    if len(files) == 1:
        raise ArgumentError(f"{next(iter(files))} is set alone; set both certfile and keyfile.")
    if files:
        certs, keys = (_paths(name, files[name]) for name in ("certfile", "keyfile"))
        if len(certs) != len(keys):
            raise ArgumentError(f"certfile has {len(certs)} files and keyfile {len(keys)}; the numbers must be equal.")
        pairs = [[str(home / cert), str(home / key)] for cert, key in zip(certs, keys, strict=True)]
        yield "cert", pairs[0][0]
        yield "key", pairs[0][1]
        if pairs[1:]:
            yield "listener.https.certificates", pairs[1:]
        if values.get("sslport") is None:
            yield "tls_port", TLS_PORT


def _paths(name: str, value: Value) -> list[str]:
    found = [value.get(number) for number in range(1, len(value) + 1)] if isinstance(value, dict) else [value]
    paths = [one for one in found if isinstance(one, str)]
    if not paths or len(paths) != len(found):
        raise ArgumentError(f"{name} must be the path of a file, or an array of paths, not {value!r}.")
    return paths


def _apps(apps: Value, home: Path, folder: Path) -> Iterator[ConfiguredApp]:
    """Yield the applications. Paths are relative to `home`, then to `folder`, which has the mako.conf."""
    if apps is None:
        return
    if not isinstance(apps, dict):
        apps = {1: apps}  # a single path
    entries = {1: apps} if isinstance(apps.get("path"), str) else apps
    for number in range(1, len(entries) + 1):
        if number not in entries:
            raise ArgumentError("apps must be an array of paths, or of tables such as {name='shop', path='apps/shop'}.")
        where, value = f"apps[{number}]", entries[number]
        if isinstance(value, str):
            mount = _MOUNT.fullmatch(value)
            name, priority, written = mount.groups() if mount else (None, "", value)
            prio = int(priority) if priority.strip("-") else 0
        elif isinstance(value, dict) and isinstance(value.get("path"), str):
            written, prio = value["path"], value.get("prio") or 0
            name = value.get("name") or ""
        else:
            raise ArgumentError(f"{where} must be a path, or a table such as {{name='shop', path='apps/shop'}}.")
        found, beside_conf = Path(os.path.normpath(home / written)), Path(os.path.normpath(folder / written))
        if not found.exists() and beside_conf.exists():
            found = beside_conf
        name = text().check(f"{where}.name", found.stem if name is None else name).strip("/")
        if "/" in name:
            raise ArgumentError(f"{where}.name must be one path segment, not {name!r}.")
        yield ConfiguredApp(name, found, whole(-127, 127).check(f"{where}.prio", prio), number)

"""mako.conf, the configuration file of Mako: a Lua file whose globals are settings (spec: runtime §1.2).

Its ports, certificates, limits and applications become settings of the server. The Lua side reads users, file server,
trace logger and the rest itself, through `require "loadconf"`.
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
from smqrt.settings.option_types import options_of, path, text, whole
from smqrt.settings.server_settings import Settings

NAME = "mako.conf"
NOT_HONOURED = frozenset(
    ("certstore", "favorRSA", "commandcnt", "rspsz", "reqminsz", "reqmaxsz", "timertick", "tracker_nodes")
    + ("tracker_maxlogin", "tracker_bantime", "acme", "proxy", "rtlprio", "stop")
)
"""Variables that Mako uses and this server does not. All other variables belong to the applications."""
TLS_PORT = 443  # Mako's default, when there is a certificate
_MOUNT = re.compile(r"([^/:]*):(-?[0-9]*):(.+)")

Value = Any
"""The value of a Lua variable: str, bool, int, float, or a dict of these."""


@dataclass(frozen=True)
class ConfiguredApp:
    """An application of a mako.conf.

    Attributes:
        name: the path segment of its URL; empty for the root.
        path: a folder or ZIP file; may be missing.
        priority: -127 to 127.
        entry: its number in `apps`, from 1.
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
        tls_host: the address of the TLS port, None for that of the plain one.
        sessions: the limit of HTTP sessions, None for the server's own limit.
        not_honoured: names of variables that Mako uses and this server does not.
    """

    path: Path
    settings: Mapping[str, object] = field(default_factory=dict)
    apps: Sequence[ConfiguredApp] = ()
    home: Path = Path()
    plain_http: bool = True
    tls_host: str | None = None
    sessions: int | None = None
    not_honoured: Sequence[str] = ()


def find(current: Path) -> Path | None:
    """Return the default mako.conf: in the folder of the executable, in the current one, or in the user's home.

    Returns:
        None when there is none.
    """
    folders = [Path(os.path.realpath(sys.argv[0])).parent, current, Path(os.environ.get("HOME") or current)]
    return next((folder / NAME for folder in folders if (folder / NAME).is_file()), None)


def read(file: Path, words: Sequence[str] = (), current: Path | None = None) -> MakoConf:
    """Run a mako.conf and return its contents.

    Args:
        file: the file.
        words: the arguments of the command line, for `mako.argv`.
        current: the folder of relative paths; the current one by default.

    Raises:
        StartError: it can't be read, its Lua fails, or a variable breaks its rule; one sentence with file and line, or
            the name of the variable.
    """
    file, current = file.absolute(), current or Path.cwd()
    if not file.exists():
        raise StartError(f"{file} does not exist.")
    from smqrt.apps.lua.applications import variables  # here: without such a file, this does not load Lua

    values = variables(file, words)
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
            not_honoured=sorted(NOT_HONOURED & values.keys()),
        )
    except ArgumentError as error:
        raise StartError(f"{file}: {error}") from None


def _checked(values: Mapping[str, Value], name: str, rule: Callable[[], Any], default: Value) -> Value:
    return rule().check(name, values[name]) if values.get(name) is not None else default


_SETTINGS = {"port": "port", "sslport": "tls_port", "host": "host", "conncnt": "max_connections"}


def _settings(values: Mapping[str, Value], home: Path) -> Iterator[tuple[str, object]]:
    """Yield the settings of the server. The port 0, which disables a listener, is not among them."""
    table = options_of(Settings)
    for name, setting in _SETTINGS.items():
        if values.get(name) is not None:
            value = table[setting].metadata["rule"].check(name, values[name])
            if value != 0:
                yield setting, value
    files = {name: values[name] for name in ("certfile", "keyfile") if values.get(name) is not None}
    if len(files) == 1:
        raise ArgumentError(f"{next(iter(files))} is given alone; certfile and keyfile belong together.")
    if files:
        certs, keys = (_paths(name, files[name]) for name in ("certfile", "keyfile"))
        if len(certs) != len(keys):
            raise ArgumentError(f"certfile has {len(certs)} files and keyfile {len(keys)}; each needs the other.")
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
        raise ArgumentError(f"{name} must be the path of a file, or an array of such, not {value!r}.")
    return paths


def _apps(apps: Value, home: Path, folder: Path) -> Iterator[ConfiguredApp]:
    if apps is None:
        return
    if not isinstance(apps, dict):
        apps = {1: apps}
    entries = {1: apps} if isinstance(apps.get("path"), str) else apps
    for number in range(1, len(entries) + 1):
        if number not in entries:
            raise ArgumentError("apps must be an array of paths, or of tables such as {name='shop', path='apps/shop'}.")
        yield _app(number, entries[number], home, folder)


def _app(entry: int, value: Value, home: Path, folder: Path) -> ConfiguredApp:
    where = f"apps[{entry}]"
    if isinstance(value, str):
        mount = _MOUNT.fullmatch(value)
        name, priority, given = mount.groups() if mount else (None, "", value)
        prio = int(priority) if priority.strip("-") else 0
    elif isinstance(value, dict) and isinstance(value.get("path"), str):
        given, prio = value["path"], value.get("prio") or 0
        name = value.get("name") or ""
    else:
        raise ArgumentError(f"{where} must be a path, or a table with one such as {{name='shop', path='apps/shop'}}.")
    found, beside = Path(os.path.normpath(home / given)), Path(os.path.normpath(folder / given))
    if not found.exists() and beside.exists():  # beside the mako.conf
        found = beside
    name = text().check(f"{where}.name", found.stem if name is None else name).strip("/")
    if "/" in name:
        raise ArgumentError(f"{where}.name must be one path segment, not {name!r}.")
    return ConfiguredApp(name, found, whole(-127, 127).check(f"{where}.prio", prio), entry)

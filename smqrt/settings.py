"""Every setting of the server, in one table: `Settings`.

A field is a setting: its name, its type, its default and its help. The flags of `smqrt serve`, the environment
variables `SMQRT_...`, the keys of `smqrt.toml` and the page of the manual are made from it. A flag wins over the
environment, the environment over the file, the file over the default.
"""

from __future__ import annotations

import tomllib
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from smqrt.errors import StartError

FILE_NAME = "smqrt.toml"


def _setting(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class Settings:
    """What `smqrt serve` can be told. Paths are relative to the current folder."""

    host: str = _setting("127.0.0.1", "Address to listen on; 0.0.0.0 or :: for every interface.")
    port: int = _setting(9357, "Port for HTTP, WebSocket and raw SMQ; 0 picks a free one.")
    tls_port: int | None = _setting(None, "Port for the same over TLS; 0 picks a free one. Off when not given.")
    cert: str | None = _setting(
        None, "Certificate chain for TLS, a PEM file. A self-signed pair is made when none is given."
    )
    key: str | None = _setting(None, "Private key for TLS, a PEM file.")
    client_ca: str | None = _setting(None, "Authorities (PEM) that client certificates are checked against.")
    hosts: str = _setting(
        "",
        "Names the server answers to, with commas between: `example.com`, `*.example.com`, an address, `*` for all. "
        "When not given: every name; on loopback only those of loopback.",
    )
    origins: str = _setting(
        "",
        "Origins whose pages may connect and send, beside the server's own: `https://example.com`, "
        "`https://*.example.com`, `null`, with commas between; `*` for all.",
    )
    debug: bool | None = _setting(
        None,
        "Show clients the traceback of an error instead of a number that stands in the log. "
        "On when the server listens on loopback, for clients of this machine.",
    )
    served_files: str = _setting(
        "",
        "Patterns of file names that are served though they are code, keys or data, with commas between: `*.py`.",
    )
    reload: bool = _setting(False, "Restart an application when its .preload or a module of it changes.")
    pipelines: bool = _setting(False, "Run the pipelines of every application that has some, each in its own process.")
    commit_mib: int = _setting(4, "The most that a pipeline may commit at once over HTTP, in MiB.")
    bodies_mib: int = _setting(
        128, "Memory for bodies of requests that are read as a whole, of all requests together, in MiB; beyond, 503."
    )
    max_connections: int = _setting(
        0, "Connections that may be open at once; beyond, 503. 0: as many as there are file descriptors, less 128."
    )
    connections_per_address: int = _setting(
        2000,
        "Connections of one IP address; beyond, 503. 0: no limit. Addresses of this machine have none. "
        "More when all clients come through one proxy elsewhere.",
    )
    sessions_per_address: int = _setting(
        1000,
        "HTTP sessions of one IP address; beyond, the one it used least recently ends. "
        "More when all clients come through one proxy.",
    )
    json_values: int = _setting(
        262_144,
        "Values that a JSON document given to `ba.json.decode` may have, and a quarter of it members of one object. "
        "More hold the server for longer: 50 ms for half a million.",
    )
    drain_s: float = _setting(2.0, "Seconds that requests under way may take when the server stops.")
    lua_loop_s: float = _setting(
        10.0, "Seconds that Lua may compute without giving way before it gets an error; 0 for as long as it likes."
    )

    def __post_init__(self) -> None:
        """Raises StartError for a limit that is none."""
        if not self.lua_loop_s >= 0:
            raise StartError(f"lua_loop_s is {self.lua_loop_s:g}; give a number of seconds, or 0 for no limit.")
        for name in ("bodies_mib", "sessions_per_address", "json_values"):
            if getattr(self, name) < 1:
                raise StartError(f"{name} is {getattr(self, name)}; give a number of at least 1.")


def table() -> tuple[Field[Any], ...]:
    """Returns the settings as dataclass fields, in the order of the manual."""
    return fields(Settings)


def flag(setting: Field[Any]) -> str:
    """Returns the command-line spelling: `tls_port` is `--tls-port`."""
    return "--" + setting.name.replace("_", "-")


def environment_name(setting: Field[Any]) -> str:
    """Returns the environment variable: `tls_port` is `SMQRT_TLS_PORT`."""
    return "SMQRT_" + setting.name.upper()


def load_file(path: Path) -> dict[str, Any]:
    """Reads a `smqrt.toml`: one `name = value` per setting.

    Args:
        path: the file.

    Returns:
        The values by setting name; types are checked where they are used.

    Raises:
        StartError: the file can't be read, isn't TOML, or names a setting that doesn't exist.
    """
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise StartError(f"{path} can't be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartError(f"{path} is not valid TOML: {error}.") from None
    known = [setting.name for setting in table()]
    for name in values:
        if name not in known:
            raise StartError(f"{path} has an unknown setting {name!r}; the settings are {', '.join(known)}.")
    return values


def manual() -> str:
    """Returns the table of the manual in Markdown."""
    lines = ["| in smqrt.toml | flag | environment | default | meaning |", "|---|---|---|---|---|"]
    for setting in table():
        default = "" if setting.default in (None, "", MISSING) else f"`{str(setting.default).lower()}`"
        row = (f"`{setting.name}`", f"`{flag(setting)}`", f"`{environment_name(setting)}`", default)
        lines.append(f"| {' | '.join(row)} | {setting.metadata['help']} |")
    return "\n".join(lines) + "\n"

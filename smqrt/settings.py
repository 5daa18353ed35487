"""Every setting of the server, in one table: `Settings`.

A field is a setting: its name, its type, its default and its help. The flags of `smqrt serve`, the environment
variables `SMQRT_...`, the keys of `smqrt.toml` and the page of the manual are made from it. A flag wins over the
environment, the environment over the file, the file over the default.
"""

from __future__ import annotations

import tomllib
from dataclasses import Field, dataclass
from pathlib import Path

from smqrt.errors import ArgumentError, StartError
from smqrt.options import number, option, optional, options_of, read, shown_default, switch, text, unknown, whole

FILE_NAME = "smqrt.toml"


@dataclass(frozen=True)
class Settings:
    """What `smqrt serve` can be told. Paths are relative to the current folder."""

    host: str = option("127.0.0.1", text(), "Address to listen on; 0.0.0.0 or :: for every interface.")
    port: int = option(9357, whole(0, 0xFFFF), "Port for HTTP, WebSocket and raw SMQ; 0 picks a free one.")
    tls_port: int | None = option(
        None, optional(whole(0, 0xFFFF)), "Port for the same over TLS; 0 picks a free one. Off when not given."
    )
    cert: str | None = option(
        None, optional(text()), "Certificate chain for TLS, a PEM file. A self-signed pair is made when none is given."
    )
    key: str | None = option(None, optional(text()), "Private key for TLS, a PEM file.")
    client_ca: str | None = option(
        None, optional(text()), "Authorities (PEM) that client certificates are checked against."
    )
    key_file: str | None = option(
        None,
        optional(text()),
        "File with the keys of `ba.tpm`; a name in `.key` is never served. `~/.config/smqrt/tpm.key` by default.",
    )
    hosts: str = option(
        "",
        text(),
        "Names the server answers to, with commas between: `example.com`, `*.example.com`, an address, `*` for all. "
        "When not given: every name; on loopback only those of loopback.",
    )
    origins: str = option(
        "",
        text(),
        "Origins whose pages may connect and send, beside the server's own: `https://example.com`, "
        "`https://*.example.com`, `null`, with commas between; `*` for all.",
    )
    debug: bool | None = option(
        None,
        optional(switch()),
        "Show clients the traceback of an error instead of a number that stands in the log. "
        "On when the server listens on loopback, for clients of this machine.",
    )
    served_files: str = option(
        "",
        text(),
        "Patterns of file names that are served though they are code, keys or data, with commas between: `*.py`.",
    )
    reload: bool = option(False, switch(), "Restart an application when its .preload or a module of it changes.")
    tracelogger: bool = option(
        False,
        switch(),
        "Show what applications trace at /rtl/tracelogger/, to whoever reaches the server, "
        "or to the `users` of mako.conf.",
    )
    pipelines: bool = option(
        False, switch(), "Run the pipelines of every application that has some, each in its own process."
    )
    commit_mib: int = option(4, whole(1), "The most that a pipeline may commit at once over HTTP, in MiB.")
    bodies_mib: int = option(
        128,
        whole(1),
        "Memory for bodies of requests that are read as a whole, of all requests together, in MiB; beyond, 503.",
    )
    max_connections: int = option(
        0,
        whole(0),
        "Connections that may be open at once; beyond, 503. 0: as many as there are file descriptors, less 128.",
    )
    connections_per_address: int = option(
        2000,
        whole(0),
        "Connections of one IP address; beyond, 503. 0: no limit. Addresses of this machine have none. "
        "More when all clients come through one proxy elsewhere.",
    )
    sessions_per_address: int = option(
        1000,
        whole(1),
        "HTTP sessions of one IP address; beyond, the one it used least recently ends. "
        "More when all clients come through one proxy.",
    )
    json_values: int = option(
        262_144,
        whole(1),
        "Values that a JSON document given to `ba.json.decode` may have, and a quarter of it members of one object. "
        "More hold the server for longer: 50 ms for half a million.",
    )
    drain_s: float = option(2.0, number(0), "Seconds that requests under way may take when the server stops.")
    lua_loop_s: float = option(
        10.0,
        number(0),
        "Seconds that Lua may compute without giving way before it gets an error; 0 for as long as it likes.",
    )

    def __post_init__(self) -> None:
        """Raises StartError for a value that breaks its rule."""
        try:
            read(Settings, {name: getattr(self, name) for name in options_of(Settings)})
        except ArgumentError as error:
            raise StartError(str(error)) from None


def table() -> tuple[Field[object], ...]:
    """Returns the settings as dataclass fields, in the order of the manual."""
    return tuple(options_of(Settings).values())


def flag(setting: Field[object]) -> str:
    """Returns the command-line spelling: `tls_port` is `--tls-port`."""
    return "--" + setting.name.replace("_", "-")


def environment_name(setting: Field[object]) -> str:
    """Returns the environment variable: `tls_port` is `SMQRT_TLS_PORT`."""
    return "SMQRT_" + setting.name.upper()


def load_file(path: Path) -> dict[str, object]:
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
    known = options_of(Settings)
    for name in values:
        if name not in known:
            raise StartError(unknown(f"{path}: {name}", known, name))
    return values


def manual() -> str:
    """Returns the table of the manual in Markdown."""
    lines = ["| in smqrt.toml | flag | environment | default | meaning |", "|---|---|---|---|---|"]
    for setting in table():
        row = (f"`{setting.name}`", f"`{flag(setting)}`", f"`{environment_name(setting)}`", shown_default(setting))
        lines.append(f"| {' | '.join(row)} | {setting.metadata['help']} |")
    return "\n".join(lines) + "\n"

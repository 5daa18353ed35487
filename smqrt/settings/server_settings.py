"""Declarations of all settings of the server.

Each field of `Settings` is a setting with its type, default and help. `group` declares a table of settings, `tables`
declares tables that users name. These declarations define the keys of `smqrt.toml` (`[limits] publish_rate`), the
environment variables (`SMQRT_LIMITS__PUBLISH_RATE`), the flags of `smqrt serve` (`--limits-publish-rate`), the page of
the manual (by `scripts/fix`) and the JSON Schema. `sources.py` reads the values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from ipaddress import ip_network

from smqrt.errors import ArgumentError, StartError
from smqrt.settings.cluster_settings import ClusterSettings
from smqrt.settings.limits import Limit, LimitSettings, MqttSettings, TopicSettings, registered
from smqrt.settings.option_types import (
    InvalidValueError,
    Rule,
    Setting,
    check,
    choice,
    file_mode,
    group,
    named_settings_of,
    number,
    option,
    optional,
    path,
    settings_of,
    shown_default,
    size,
    switch,
    tables,
    text,
    texts,
    whole,
)

FILE_NAME = "smqrt.toml"


@dataclass(frozen=True)
class PageSettings:
    """The pages of the server itself."""

    manual: bool = option(True, switch(), "Serve the manual at `/help/`.")
    applications: bool = option(
        True, switch(), "Serve a list of the applications at `/`, when no application is mounted there."
    )


@dataclass(frozen=True)
class LuaSettings:
    """The Lua interpreter of applications."""

    version: str = option(
        "5.4", choice("5.4", "5.5"), "Version of Lua: `5.4`, or `5.5`, which needs lupa 2.7 (help: lua-api)."
    )


def _pairs() -> Rule[tuple[tuple[str, str], ...]]:
    """Return the rule of certificates with their keys.

    It permits `[["site.pem", "site.key"], …]`, tables with `cert` and `key`, and a string.
    """

    def pair(given: object) -> tuple[str, str]:
        if isinstance(given, str):
            given = [part.strip() for part in given.split(":")]
        elif isinstance(given, dict):
            given = [given.get("cert"), given.get("key")] if given.keys() == {"cert", "key"} else []
        if isinstance(given, list | tuple) and len(given) == 2 and all(one and isinstance(one, str) for one in given):
            return given[0], given[1]
        raise InvalidValueError

    def read_pairs(value: object) -> tuple[tuple[str, str], ...]:
        pairs = [one for one in value.split(",") if one.strip()] if isinstance(value, str) else value
        if not isinstance(pairs, list | tuple):
            raise InvalidValueError
        return tuple(map(pair, pairs))

    pair_of_strings = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 2, "maxItems": 2}
    fields = {name: {"type": "string", "minLength": 1} for name in ("cert", "key")}
    table = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [pair_of_strings, table]}}]}
    requirement = """a list of pairs of files, [["site.pem", "site.key"], ...], or a string "site.pem:site.key, ...\""""
    return Rule(requirement, read_pairs, schema=schema)


_CLIENT_CERTIFICATE = choice("none", "optional", "required")
_VERSION = choice("1.2", "1.3")  # 1.0 and 1.1 are deprecated (RFC 8996)

LETS_ENCRYPT = "https://acme-v02.api.letsencrypt.org/directory"
_HOST_NAME = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*")
_MAX_HOST_NAME = 253  # characters, the limit of DNS
_MAX_HOST_NAMES = 100  # of one certificate at Let's Encrypt


def _host_names() -> Rule[tuple[str, ...]]:
    """Return the rule of host names of certificates. Addresses and `*` are not permitted."""

    def read_names(value: object) -> tuple[str, ...]:
        found = []
        for one in texts().read(value):
            try:
                name = one.rstrip(".").encode("idna").decode().lower()
            except UnicodeError:
                name = ""
            is_address = name.replace(".", "").isdigit()  # for IPv4; the pattern does not match IPv6
            if not _HOST_NAME.fullmatch(name) or len(name) > _MAX_HOST_NAME or is_address:
                raise InvalidValueError(
                    f"host names such as example.com, without * and no addresses; {one!r} is not one"
                )
            found.append(name)
        if len(found) > _MAX_HOST_NAMES:
            raise InvalidValueError(f"at most {_MAX_HOST_NAMES} host names")
        return tuple(dict.fromkeys(found))

    return replace(texts(), read=read_names)


def _directory() -> Rule[str]:
    def read_url(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(r"https?://[^\s/?#]+[^\s?#]*", value):
            raise InvalidValueError
        return value

    return Rule("the URL of an ACME directory, https://...", read_url)


@dataclass(frozen=True)
class TlsSettings:
    """TLS of all listeners; the table of a listener may override it."""

    acme: tuple[str, ...] = option(
        (),
        _host_names(),
        "Host names of a certificate that the server orders and renews itself; needs `pip install 'smqrt[acme]'`. "
        "You accept the terms of the authority (help: tls-server).",
        shown="",
    )
    acme_contact: str = option("", text(), "Mail address for messages from the certificate authority.")
    acme_directory: str = option(
        LETS_ENCRYPT, _directory(), "URL of the ACME directory of the certificate authority; Let's Encrypt by default."
    )
    acme_challenge: str | None = option(
        None,
        optional(choice("http-01", "tls-alpn-01")),
        "How the authority verifies the names: `http-01` at port 80, `tls-alpn-01` at port 443. "
        "When not given: the server chooses (help: tls-server).",
    )
    acme_folder: str | None = option(
        None,
        optional(path()),
        "Folder of the ACME account, its keys and certificates. `~/.local/state/smqrt/acme` by default; under systemd "
        "in the state directory of the service.",
    )
    acme_ca: str | None = option(
        None,
        optional(path()),
        "Certificates (PEM) that verify the TLS connection to the ACME directory, for a private certificate authority.",
    )
    acme_eab_id: str = option(
        "", text(), "Key identifier of your account, for authorities that need external account binding."
    )
    acme_eab_key: str = option("", text(), "HMAC key for external account binding (base64url).", secret=True)
    client_crl: str | None = option(
        None,
        optional(text()),
        "Revocation lists (PEM) of the authorities in `client_ca`, one for each. "
        "If one is missing or has expired, clients with a certificate are refused.",
        live=True,
    )
    client_certificate: str | None = option(
        None,
        optional(_CLIENT_CERTIFICATE),
        "Certificates of clients: `none`, `optional` or `required`. When not given: `optional` if `client_ca` is set, "
        "else `none`.",
        live=True,
    )
    minimum_version: str = option("1.2", _VERSION, "Oldest version of TLS: `1.2` or `1.3`.", live=True)
    alpn: tuple[str, ...] = option(
        ("http/1.1", "mqtt"),
        texts(),
        "Protocols for ALPN, in order of preference. A client that offers none of them is accepted without ALPN.",
        shown="`http/1.1,mqtt`",
        live=True,
    )
    handshake_s: float = option(5.0, number(0, above=True), "Time limit of a TLS handshake, in seconds.", live=True)
    key_password: str | None = option(
        None, optional(text()), "Password of the encrypted private keys of all listeners.", live=True, secret=True
    )


@dataclass(frozen=True)
class ListenerSettings:
    """A port. `port` and `tls_port` declare the listeners `http` and `https`; tables of these names change them."""

    host: str | None = option(None, optional(text()), "Address, or path of a Unix socket; else the top-level `host`.")
    port: int | None = option(None, optional(whole(0, 0xFFFF)), "Port; 0 picks a free one.")
    mode: str | None = option(
        None,
        optional(file_mode()),
        "Permissions of the file of a Unix socket, in octal digits. Clients need permission to write.",
        shown="`0660`",
    )
    enabled: bool = option(True, switch(), "Open this port. `false` for `http` leaves TLS only.")
    tls: bool | None = option(
        None, optional(switch()), "Use TLS. On if `cert` or `certificates` is given, and for `https`."
    )
    cert: str | None = option(
        None, optional(text()), "Certificate chain, a PEM file; by default the top-level `cert`.", live=True
    )
    key: str | None = option(None, optional(text()), "Private key of `cert`, a PEM file.", live=True)
    certificates: tuple[tuple[str, str], ...] = option(
        (),
        _pairs(),
        "More certificates with their keys, chosen by the server name of the client (SNI): "
        '`[["site.pem", "site.key"]]`, or a comma-separated string: `site.pem:site.key`.',
        shown="",
        live=True,
    )
    client_ca: str | None = option(
        None,
        optional(text()),
        "Authorities of client certificates, a PEM file; by default the top-level `client_ca`.",
        live=True,
    )
    client_crl: str | None = option(
        None, optional(text()), "Revocation lists of `client_ca`, a PEM file; by default `tls.client_crl`.", live=True
    )
    client_certificate: str | None = option(
        None,
        optional(_CLIENT_CERTIFICATE),
        "Certificates of clients: `none`, `optional` or `required`; as in `[tls]` by default.",
        live=True,
    )
    minimum_version: str | None = option(
        None, optional(_VERSION), "Oldest version of TLS: `1.2` or `1.3`; as in `[tls]` by default.", live=True
    )
    alpn: tuple[str, ...] | None = option(
        None, optional(texts()), "Protocols for ALPN; as in `[tls]` by default.", live=True
    )
    max_connections: int = option(
        0,
        whole(0),
        "Limit of open connections of this port; beyond, 503. 0: only the limit of all ports, `max_connections`.",
        live=True,
    )
    proxy_protocol: bool = option(
        False,
        switch(),
        "Require a header of the PROXY protocol, version 1 or 2, at the beginning of each connection, before TLS. Only "
        "networks of `proxy.trusted` may connect.",
    )


def _networks() -> Rule[tuple[str, ...]]:
    def read_networks(value: object) -> tuple[str, ...]:
        given = texts().read(value)  # outside of `try`, because InvalidValueError is a ValueError
        try:
            return tuple(one if one == "unix" else str(ip_network(one)) for one in given)
        except ValueError as error:
            raise ArgumentError(f"{error}; write addresses and networks such as 10.0.0.0/8, ::1 or unix") from None

    return replace(texts(), read=read_networks)


@dataclass(frozen=True)
class ProxySettings:
    """Proxies in front of the server."""

    trusted: tuple[str, ...] = option(
        (),
        _networks(),
        "Addresses and networks of proxies whose headers name the client: `10.0.0.0/8`, `::1`; `unix`: Unix sockets. "
        "Headers from other addresses are ignored.",
        shown="none",
        live=True,
    )
    headers: str = option(
        "auto",
        choice("auto", "x-forwarded", "forwarded"),
        "Header fields of the proxies: `x-forwarded` for `X-Forwarded-For` and related ones, `forwarded` for "
        "`Forwarded`. `auto`: either; different values are refused.",
        live=True,
    )
    header_s: float = option(5.0, number(0, above=True), "Time limit of the header of the PROXY protocol, in seconds.")


@dataclass(frozen=True)
class DrainSettings:
    """The shutdown of the server."""

    delay_s: float = option(
        0.0,
        number(0),
        "Seconds at the start of a shutdown in which the server still serves, while `/readyz` answers 503 so that load "
        "balancers select other servers.",
    )
    window_s: float | None = option(
        None,
        optional(number(0)),
        "Seconds over which SMQ clients are closed one by one. "
        "When not given: 0 for fewer than 100 clients, else 1 for each 2,000 clients, at most 5.",
    )
    timeout_s: float = option(
        60.0,
        number(0),
        "Time limit of the whole shutdown, in seconds; then the process exits with code 1. 0: no limit.",
    )


LOG_LEVELS = ("debug", "info", "warning", "error")


def _logger_levels() -> Rule[str]:
    """Return the rule of levels by logger: a string such as `smqrt.close=debug,smqrt.lua=warning`."""

    def read(value: object) -> str:
        parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else [""]
        pairs = [part.partition("=") for part in parts if part or len(parts) > 1]
        if not isinstance(value, str) or not all(name and level in LOG_LEVELS for name, _, level in pairs):
            raise InvalidValueError
        return value

    return Rule(f"levels by logger, such as smqrt.close=debug; a level is one of {', '.join(LOG_LEVELS)}", read)


def _access_log() -> Rule[str]:
    """Return the rule of `log.access`: "-" for true, a path, or "" for false."""

    def read(value: object) -> str:
        if isinstance(value, bool):
            return "-" if value else ""
        if not isinstance(value, str):
            raise InvalidValueError
        return {"true": "-", "yes": "-", "on": "-", "false": "", "no": "", "off": ""}.get(value.lower(), value)

    return Rule("true, false or the path of a file", read)


@dataclass(frozen=True)
class LogSettings:
    """The log, on standard error."""

    level: str | None = option(
        None,
        optional(choice(*LOG_LEVELS)),
        "Lowest level of the lines: `debug`, `info`, `warning` or `error`.",
        live=True,
        shown="`warning` for text, `info` for JSON",
    )
    levels: str = option(
        "", _logger_levels(), "Levels of individual loggers: `smqrt.close=warning,smqrt.lua=debug`.", live=True
    )
    format: str = option(
        "text", choice("text", "json"), "Format of the lines: plain text, or a JSON object in each line."
    )
    time: bool = option(False, switch(), "Begin each line of text with the time and the level.")
    color: bool | None = option(
        None, optional(switch()), "Colour for warnings and errors.", shown="on a terminal, without `NO_COLOR`"
    )
    access: str = option(
        "",
        _access_log(),
        "Write a line for each request and each closed SMQ connection to this file, or with `true` to standard output.",
        shown="`false`",
    )


@dataclass(frozen=True)
class OtelSettings:
    """Traces for OpenTelemetry."""

    endpoint: str | None = option(
        None,
        optional(text()),
        "Send a span for each request to this collector, such as `http://127.0.0.1:4318/v1/traces`; needs "
        "`pip install 'smqrt[otel]'`.",
    )
    service: str = option("smqrt", text(), "Name of this server in the traces.")


@dataclass(frozen=True)
class AdminSettings:
    """The admin listener: health, metrics, an API and the console (help: metrics)."""

    enabled: bool = option(True, switch(), "Open the admin listener.")
    host: str = option(
        "127.0.0.1",
        text(),
        "Address to listen on. An address that other machines reach needs `auth.users`, for logins, and TLS.",
    )
    port: int | None = option(
        None, optional(whole(0, 0xFFFF)), "Port; 0 picks a free one.", shown="9356, or a free one when that is taken"
    )
    tls: bool | None = option(None, optional(switch()), "Use TLS. On if `admin.cert` is given.", shown="`false`")
    cert: str | None = option(
        None, optional(text()), "Certificate chain, a PEM file; by default the top-level `cert`.", live=True
    )
    key: str | None = option(None, optional(text()), "Private key of `admin.cert`, a PEM file.", live=True)
    client_ca: str | None = option(
        None,
        optional(text()),
        "Authorities of client certificates, a PEM file. Clients without such a certificate are refused.",
        live=True,
    )
    console: bool = option(True, switch(), "Serve the console, at `/console/`.")
    lua_prompt: bool = option(
        False,
        switch(),
        "Open a socket for `smqrt lua`, where processes of the server's user and of root run code in Lua applications.",
    )
    lua_prompt_s: float = option(
        30.0, number(1, 3600), "Seconds after which a call at the Lua prompt ends, if it waits."
    )
    lua_prompt_loop_ms: int = option(
        50,
        whole(1, 60_000),
        "Milliseconds that a call at the Lua prompt may compute without yielding; then it gets an error.",
    )


@dataclass(frozen=True)
class LastValueSettings:
    """Limits of the last values of each hub (help: last-value)."""

    max_values: int = option(
        100_000, whole(0), "Number of last values of a hub; further ones are counted, but not kept."
    )
    max_bytes: int = option(64 << 20, size(), "Memory of the last values of a hub.", shown="`64MiB`")
    sync_s: float = option(
        1.0,
        number(0.01, 3600),
        "Seconds from a change to its commit, for hubs with `persist`. A crash can lose the changes of this time.",
    )


@dataclass(frozen=True)
class AuthSettings:
    """Authentication and permissions of clients of hubs (help: identity)."""

    users: str | None = option(
        None, optional(path()), "File with users, their hashed passwords and their groups; `smqrt passwd` writes it."
    )
    acl: str | None = option(
        None,
        optional(path()),
        "File with the access control list: which users may read, write, observe and create which topics.",
    )
    anonymous: bool = option(
        False, switch(), "Accept clients without credentials; the access control list calls them `anonymous`."
    )
    certificate_user: str | None = option(
        None,
        optional(text()),
        "Template of the user name of a client certificate: `{cn}`, `{dns}`, `{email}`, …. Used for clients without "
        "other credentials.",
    )
    certificate_groups: str | None = option(
        None, optional(text()), "Template of the groups of a client certificate, comma-separated: `{ou}`."
    )
    jwt_key: str | None = option(
        None,
        optional(path()),
        "File with the public keys or certificates (PEM), or the JWKS, that verify JSON Web Tokens.",
    )
    jwt_secret: str | None = option(
        None, optional(path()), "File with the secret of at least 32 bytes that verifies tokens (HS256)."
    )
    jwt_jwks: str | None = option(
        None, optional(text()), "URL of the JWKS, by https or on loopback; it is fetched in the background."
    )
    jwt_algorithms: tuple[str, ...] = option(
        ("RS256", "PS256", "ES256", "EdDSA", "HS256"),
        texts(),
        "Permitted algorithms of tokens, each only with a key of its kind.",
        shown="`RS256, PS256, ES256, EdDSA, HS256`",
    )
    jwt_issuer: str | None = option(None, optional(text()), "Required `iss` of tokens.")
    jwt_audience: str | None = option(None, optional(text()), "Required `aud` of tokens.")
    jwt_required: tuple[str, ...] = option(("exp",), texts(), "Claims that a token must have.", shown="`exp`")
    jwt_leeway_s: float = option(
        10.0, number(0, 300), "Tolerated clock difference to the issuer of a token, in seconds."
    )
    jwt_user: str = option("sub", text(), "The claim that names the user; `a.b` is `b` in `a`.")
    jwt_groups: str = option("groups", text(), "The claim with the groups: a list, or a string with spaces or commas.")
    jwt_disconnect: bool = option(True, switch(), "Close a connection when its token expires.")


@dataclass(frozen=True)
class RestartSettings:
    """Hot restart."""

    socket: str = option(
        "",
        text(),
        "Unix socket for `smqrt restart` and `--take-over`, for the user of the server only. "
        "When not given: only SIGUSR2 restarts the server.",
    )
    load_s: float = option(
        60.0,
        number(0, above=True),
        "Time limit of the new process for loading the applications, in seconds; then the old process continues.",
    )


MAX_WORKERS = 128


def _workers() -> Rule[int]:
    """Return the rule of `workers`: a number of processes, or "auto" for 0."""

    def read_workers(value: object) -> int:
        return 0 if value == "auto" else whole(0, MAX_WORKERS).read(value)

    schema = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": MAX_WORKERS}, {"const": "auto"}]}
    return Rule(f'a whole number from 1 to {MAX_WORKERS}, or "auto"', read_workers, int, schema)


@dataclass(frozen=True)
class Settings:
    """All settings of `smqrt serve`. Paths are relative to the current folder."""

    host: str = option("127.0.0.1", text(), "Address to listen on; 0.0.0.0 or :: for every interface.")
    port: int = option(9357, whole(0, 0xFFFF), "Port for HTTP, WebSocket and raw SMQ; 0 picks a free one.")
    tls_port: int | None = option(
        None,
        optional(whole(0, 0xFFFF)),
        "Port for HTTP, WebSocket and raw SMQ over TLS; 0 picks a free one. Off when not given.",
    )
    cert: str | None = option(
        None,
        optional(text()),
        "Certificate chain for TLS, a PEM file. When not given, the server makes a self-signed certificate.",
        live=True,
    )
    key: str | None = option(None, optional(text()), "Private key for TLS, a PEM file.", live=True)
    client_ca: str | None = option(None, optional(text()), "Authorities of client certificates, a PEM file.", live=True)
    tpm_key_file: str | None = option(
        None,
        optional(text()),
        "File with the keys of `ba.tpm`. A file with the extension `.key` is never served. "
        "`~/.config/smqrt/tpm.key` by default.",
    )
    workers: int = option(
        1, _workers(), "Number of processes that share the ports; `auto` (or 0): one for each core (help: workers)."
    )
    hosts: str = option(
        "",
        text(),
        "Host names of the server, comma-separated: `example.com`, `*.example.com`, an address, `*` for all; "
        "others are refused. When not given: all names; on loopback only the names of loopback.",
        live=True,
    )
    origins: str = option(
        "",
        text(),
        "Origins whose pages may connect, send and read, beside the server's own, comma-separated: "
        "`https://example.com`, `https://*.example.com`, `null`; `*` for all.",
        live=True,
    )
    debug: bool | None = option(
        None,
        optional(switch()),
        "Send clients the traceback of an error, not only its number. "
        "On if the server listens on loopback, for clients of this machine.",
        live=True,
    )
    served_files: str = option(
        "",
        text(),
        "Patterns of file names that are served although they are code, keys or data, comma-separated: `*.py`.",
    )
    reload: bool = option(False, switch(), "Restart an application when its .preload or one of its modules changes.")
    tracelogger: bool = option(
        False,
        switch(),
        "Show the traces of applications at /rtl/tracelogger/: to any client, or to the `users` of mako.conf.",
    )
    pipelines: bool = option(False, switch(), "Run the pipelines of applications, in one process for each application.")
    commit_mib: int = option(4, whole(1), "Limit of a commit of a pipeline over HTTP, in MiB.")
    bodies_mib: int = option(
        128, whole(1), "Memory of all request bodies that are read as a whole, in MiB; beyond, 503."
    )
    max_connections: int = option(
        0, whole(0), "Limit of open connections; beyond, 503. 0: the limit of open files, less 128.", live=True
    )
    connections_per_address: int = option(
        2000,
        whole(0),
        "Connections of one IP address; beyond, 503. 0: no limit. Addresses of this machine have none. "
        "Raise it for a proxy on another machine.",
        live=True,
    )
    sessions_per_address: int = option(
        1000,
        whole(1),
        "HTTP sessions of one IP address; beyond, the least recently used one is deleted. "
        "Raise it if all clients connect through one proxy.",
    )
    json_values: int = option(
        262_144,
        whole(1),
        "Values of a JSON document for `ba.json.decode`; one object may have a quarter of it. "
        "Half a million block the server for 50 ms.",
    )
    drain_s: float = option(
        2.0,
        number(0),
        "Time limit of a shutdown for running requests, and for clients that have not read everything, in seconds.",
        live=True,
    )
    lua_loop_s: float = option(
        10.0, number(0), "Seconds that Lua may compute without yielding; then it gets an error. 0: no limit."
    )
    limits: LimitSettings = group(LimitSettings, "Limits on what clients may use; see [limits](limits.md).")
    topics: Mapping[str, TopicSettings] = tables(
        TopicSettings,
        "Settings of topics. The name of the table is a topic filter: `+` matches one level, `#` the rest, as in "
        '`[topics."sensors/#"]`. The first matching table applies.',
    )
    tls: TlsSettings = group(TlsSettings, "TLS of all listeners.")
    listener: Mapping[str, ListenerSettings] = tables(
        ListenerSettings, "More ports beside `port` and `tls_port`, each with its own name."
    )
    proxy: ProxySettings = group(ProxySettings, "Proxies in front of the server.")
    drain: DrainSettings = group(DrainSettings, "The shutdown of the server.")
    strict: bool = option(
        False, switch(), "Make the server unready when an application has failed: `/readyz` answers 503."
    )
    log: LogSettings = group(LogSettings, "The log, on standard error, and the access log.")
    otel: OtelSettings = group(OtelSettings, "Traces for OpenTelemetry.")
    admin: AdminSettings = group(AdminSettings, "The admin listener: health, metrics, an API and the console.")
    restart: RestartSettings = group(
        RestartSettings, "Hot restart: a new process takes over sockets and sessions (help: hot-restart)."
    )
    lua: LuaSettings = group(LuaSettings, "The Lua interpreter of applications.")
    pages: PageSettings = group(PageSettings, "The server's own pages, beside those of applications.")
    auth: AuthSettings = group(AuthSettings, "Authentication and permissions of clients of hubs.")
    cluster: ClusterSettings = group(ClusterSettings, "Clusters of hubs over several processes (help: cluster).")
    last_value: LastValueSettings = group(
        LastValueSettings, "Limits of the last values that topics with `last_value` keep."
    )

    mqtt: MqttSettings = group(MqttSettings, "MQTT clients of hubs (help: mqtt-hub).")

    def __post_init__(self) -> None:
        """Raise StartError for a value that breaks its rule."""
        try:
            check(self)
        except ArgumentError as error:
            raise StartError(str(error)) from None


@cache
def table() -> tuple[Setting, ...]:
    """Return the settings outside named tables, in the order of the manual."""
    return tuple(settings_of(Settings))


@cache
def named_table() -> tuple[Setting, ...]:
    """Return the settings of named tables, in the order of the manual."""
    return tuple(named_settings_of(Settings))


# ---- Limits in the manual

_UNITS = (
    ("_bytes_per_s", "bytes/s"),
    ("_per_s", "per second"),
    ("_bytes", "bytes"),
    ("_mib", "MiB"),
    ("_rate", "per second"),
    ("_rate_per_address", "per second"),
    ("_s", "s"),
)
"""Units by the end of a setting's name; the first match applies."""


def limits_manual() -> str:
    """Return the table of limits of the manual in Markdown: settings of limits, then limits without a setting.

    The caller must have imported all modules that declare limits, for instance by `smqrt.server.runtime`.
    """
    counters: dict[str, list[Limit]] = {}
    for limit in registered():
        counters.setdefault(limit.setting, []).append(limit)
    lines = ["| setting | default | meaning, and effect when reached | counter |", "|---|---|---|---|"]
    for setting in table():
        found = counters.pop(setting.name, [])
        if not found and setting.path[0] != "limits":
            continue
        names = ", ".join(f"`{limit.name}`" for limit in found)
        lines.append(f"| `{setting.name}` | {_default_with_unit(setting)} | {setting.help} | {names} |")
    for limit in (limit for found in counters.values() for limit in found):
        setting_text = limit.setting and f"`{limit.setting}`"
        lines.append(f"| {setting_text} | fixed | {limit.rule[:1].upper()}{limit.rule[1:]}. | `{limit.name}` |")
    return "\n".join(lines) + "\n"


def _default_with_unit(setting: Setting) -> str:
    default = setting.field.default
    if isinstance(default, bool) or not isinstance(default, int | float):
        return shown_default(setting.field).strip("`") or "none"
    unit = next((unit for end, unit in _UNITS if setting.name.endswith(end)), "")
    if unit == "bytes" and default % (1 << 20) == 0:
        return f"{int(default) >> 20} MiB"
    return f"{default:,g} {unit}".rstrip() if isinstance(default, float) else f"{default:,} {unit}".rstrip()

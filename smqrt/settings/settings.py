"""Every setting of the server, in one table: `Settings`.

A field is a setting: its name, its type, its default and its help. A field that `group` makes is a table of settings,
and one that `tables` makes is such tables by name. Made from them: the keys of `smqrt.toml` (`[limits] publish_rate`),
the environment variables (`SMQRT_LIMITS__PUBLISH_RATE`), the flags of `smqrt serve` (`--limits-publish-rate`), the page
of the manual (by `scripts/fix`) and the JSON Schema. `settings_sources.py` reads them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from ipaddress import ip_network

from smqrt.errors import ArgumentError, StartError
from smqrt.settings.limits import LimitSettings, TopicSettings
from smqrt.settings.options import (
    NotThisError,
    Rule,
    choice,
    group,
    number,
    option,
    optional,
    path,
    size,
    switch,
    tables,
    text,
    texts,
    whole,
)
from smqrt.settings.tree import Setting, check, named_settings_of, settings_of

FILE_NAME = "smqrt.toml"


@dataclass(frozen=True)
class PageSettings:
    """Pages of the server itself."""

    manual: bool = option(True, switch(), "Serve the manual at `/help/`.")
    applications: bool = option(
        True, switch(), "Serve a list of the applications at `/`, when no application is mounted there."
    )


@dataclass(frozen=True)
class LuaSettings:
    """The Lua of applications."""

    version: str = option(
        "5.4", choice("5.4", "5.5"), "Version of Lua: `5.4`, or `5.5`, which needs lupa 2.7 (help: lua-api)."
    )


def _pairs() -> Rule[tuple[tuple[str, str], ...]]:
    """Certificates with their keys: `[["site.pem", "site.key"], …]`, tables of `cert` and `key`, or a text."""

    def pair(given: object) -> tuple[str, str]:
        if isinstance(given, str):
            given = [part.strip() for part in given.split(":")]
        elif isinstance(given, dict):
            given = [given.get("cert"), given.get("key")] if given.keys() == {"cert", "key"} else []
        if isinstance(given, list | tuple) and len(given) == 2 and all(one and isinstance(one, str) for one in given):
            return given[0], given[1]
        raise NotThisError

    def read_pairs(value: object) -> tuple[tuple[str, str], ...]:
        several = [one for one in value.split(",") if one.strip()] if isinstance(value, str) else value
        if not isinstance(several, list | tuple):
            raise NotThisError
        return tuple(map(pair, several))

    texts_of_two = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 2, "maxItems": 2}
    words = {name: {"type": "string", "minLength": 1} for name in ("cert", "key")}
    tables_of_two = {"type": "object", "properties": words, "required": list(words), "additionalProperties": False}
    schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [texts_of_two, tables_of_two]}}]}
    says = """a list of pairs of files, [["site.pem", "site.key"], ...], or a text "site.pem:site.key, ...\""""
    return Rule(says, read_pairs, schema=schema)


_CLIENT_CERTIFICATE = choice("none", "optional", "required")
_VERSION = choice("1.2", "1.3")


LETS_ENCRYPT = "https://acme-v02.api.letsencrypt.org/directory"
_HOST_NAME = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*")
_MAX_HOST_NAME, _MAX_HOST_NAMES = 253, 100


def _host_names() -> Rule[tuple[str, ...]]:
    """Host names as certificates have them: no address, no `*`."""

    def read_names(value: object) -> tuple[str, ...]:
        found = []
        for one in texts().read(value):
            try:
                name = one.rstrip(".").encode("idna").decode().lower()
            except UnicodeError:
                name = ""
            if not _HOST_NAME.fullmatch(name) or len(name) > _MAX_HOST_NAME or name.replace(".", "").isdigit():
                raise NotThisError(f"host names such as example.com, without * and no addresses; {one!r} is none")
            found.append(name)
        if len(found) > _MAX_HOST_NAMES:
            raise NotThisError(f"at most {_MAX_HOST_NAMES} host names")
        return tuple(dict.fromkeys(found))

    return replace(texts(), read=read_names)


def _directory() -> Rule[str]:
    def read_url(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(r"https?://[^\s/?#]+[^\s?#]*", value):
            raise NotThisError
        return value

    return Rule("the URL of an ACME directory, https://...", read_url)


@dataclass(frozen=True)
class TlsSettings:
    """TLS of every listener whose own table does not say otherwise."""

    acme: tuple[str, ...] = option(
        (),
        _host_names(),
        "Host names whose certificate the server orders and renews by itself, for all ports with TLS that have none of "
        "their own; needs `pip install 'smqrt[acme]'`. You agree to the terms of the authority (help: tls-server).",
        shown="",
    )
    acme_contact: str = option("", text(), "Mail address that the authority may write to.")
    acme_directory: str = option(
        LETS_ENCRYPT,
        _directory(),
        "The certificate authority: the URL of its ACME directory; Let's Encrypt by default.",
    )
    acme_challenge: str | None = option(
        None,
        optional(choice("http-01", "tls-alpn-01")),
        "How the authority verifies the names: `http-01` at port 80, `tls-alpn-01` at port 443. When not given: "
        "`http-01` where a port without TLS is open; after a failure the other.",
    )
    acme_folder: str | None = option(
        None,
        optional(path()),
        "Where account, keys and certificates are kept. `~/.local/state/smqrt/acme` by default; under systemd in its "
        "state directory.",
    )
    acme_ca: str | None = option(
        None, optional(path()), "Authorities (PEM) that the directory itself is checked against, for one of your own."
    )
    acme_eab_id: str = option(
        "", text(), "Key identifier of your account at authorities that ask for one (external account binding)."
    )
    acme_eab_key: str = option("", text(), "Its HMAC key, as the authority gives it (base64url).", secret=True)
    client_crl: str | None = option(
        None,
        optional(text()),
        "Revocation lists (PEM) of the authorities in `client_ca`, one of each: clients with a revoked certificate are "
        "refused, and all with a certificate when a list is missing or has expired.",
        live=True,
    )
    client_certificate: str | None = option(
        None,
        optional(_CLIENT_CERTIFICATE),
        "Whether clients show a certificate: `none`, `optional` or `required`. When not given: `optional` where there "
        "is a `client_ca`.",
        live=True,
    )
    minimum_version: str = option(
        "1.2", _VERSION, "The oldest version of TLS that is spoken: `1.2` or `1.3`.", live=True
    )
    alpn: tuple[str, ...] = option(
        ("http/1.1",),
        texts(),
        "Protocols offered by ALPN, the best first. A client that names none of them goes on without.",
        shown="`http/1.1`",
        live=True,
    )
    handshake_s: float = option(5.0, number(0, above=True), "Seconds that a TLS handshake may take.", live=True)
    key_password: str | None = option(
        None,
        optional(text()),
        "Password of the private keys, of all listeners, that are protected by one.",
        live=True,
        secret=True,
    )


@dataclass(frozen=True)
class ListenerSettings:
    """A port. The flat settings make the listeners `http` and `https`; a table of these names changes them."""

    host: str | None = option(None, optional(text()), "Address to listen on; that of the setting `host` by default.")
    port: int | None = option(None, optional(whole(0, 0xFFFF)), "Port; 0 picks a free one.")
    enabled: bool = option(True, switch(), "Off: this port is not opened. `http` off leaves TLS only.")
    tls: bool | None = option(
        None, optional(switch()), "Speak TLS. On where `cert` or `certificates` is given, and for `https`."
    )
    cert: str | None = option(
        None, optional(text()), "Certificate chain, a PEM file; that of `cert` by default.", live=True
    )
    key: str | None = option(None, optional(text()), "Private key of it, a PEM file.", live=True)
    certificates: tuple[tuple[str, str], ...] = option(
        (),
        _pairs(),
        "More certificates with their keys, chosen by the name that a client asks for: "
        '`[["site.pem", "site.key"]]`, or a text `site.pem:site.key` with commas between. The first of all is for '
        "clients that ask for no name, or another.",
        shown="",
        live=True,
    )
    client_ca: str | None = option(
        None, optional(text()), "Authorities of client certificates, a PEM file; `client_ca` by default.", live=True
    )
    client_crl: str | None = option(
        None, optional(text()), "Their revocation lists, a PEM file; `tls.client_crl` by default.", live=True
    )
    client_certificate: str | None = option(
        None,
        optional(_CLIENT_CERTIFICATE),
        "Whether clients show one: `none`, `optional` or `required`; as in `[tls]` by default.",
        live=True,
    )
    minimum_version: str | None = option(
        None, optional(_VERSION), "The oldest version of TLS: `1.2` or `1.3`; as in `[tls]` by default.", live=True
    )
    alpn: tuple[str, ...] | None = option(
        None, optional(texts()), "Protocols offered by ALPN; as in `[tls]` by default.", live=True
    )
    max_connections: int = option(
        0,
        whole(0),
        "Connections of this port that may be open at once; beyond, 503. 0: only `max_connections` of all.",
        live=True,
    )
    proxy_protocol: bool = option(
        False,
        switch(),
        "Every connection begins with a header of the PROXY protocol, version 1 or 2, before TLS too, and comes from a "
        "network of `proxy.trusted`; others are refused.",
    )


def _networks() -> Rule[tuple[str, ...]]:
    def read_networks(value: object) -> tuple[str, ...]:
        several = texts().read(value)
        try:
            return tuple(str(ip_network(one)) for one in several)
        except ValueError as error:
            raise ArgumentError(f"{error}; write addresses and networks such as 10.0.0.0/8 or ::1") from None

    return replace(texts(), read=read_networks)


@dataclass(frozen=True)
class ProxySettings:
    """Proxies in front of the server."""

    trusted: tuple[str, ...] = option(
        (),
        _networks(),
        "Addresses and networks of proxies that say for whom they speak: `10.0.0.0/8`, `::1`. What others say is not "
        "believed, and by default nobody is.",
        shown="none",
        live=True,
    )
    headers: str = option(
        "auto",
        choice("auto", "x-forwarded", "forwarded"),
        "The header fields in which they say it: `x-forwarded` for `X-Forwarded-For` and its like, `forwarded` for "
        "`Forwarded`. `auto`: those that are there; where both are and differ, the request is refused.",
        live=True,
    )
    header_s: float = option(5.0, number(0, above=True), "Seconds that the header of the PROXY protocol may take.")


@dataclass(frozen=True)
class DrainSettings:
    """How the server ends."""

    delay_s: float = option(
        0.0,
        number(0),
        "Seconds that the server goes on as before while `/readyz` says 503: for a load balancer to see it.",
    )
    window_s: float | None = option(
        None,
        optional(number(0)),
        "Seconds over which the SMQ clients are closed one by one, so that they do not all come back at once. "
        "When not given: none below 100 clients, else one for each 2,000, 5 at most.",
    )
    timeout_s: float = option(
        60.0, number(0), "Seconds that the end may take in all; then the process ends with exit code 1. 0: no limit."
    )


LOG_LEVELS = ("debug", "info", "warning", "error")


def _logger_levels() -> Rule[str]:
    """Levels by logger, as a text: `smqrt.close=debug,smqrt.lua=warning`."""

    def read(value: object) -> str:
        parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else [""]
        pairs = [part.partition("=") for part in parts if part or len(parts) > 1]
        if not isinstance(value, str) or not all(name and level in LOG_LEVELS for name, _, level in pairs):
            raise NotThisError
        return value

    return Rule(f"levels by logger, such as smqrt.close=debug; a level is one of {', '.join(LOG_LEVELS)}", read)


def _access_log() -> Rule[str]:
    """True or "-", a path, or false."""

    def read(value: object) -> str:
        if isinstance(value, bool):
            return "-" if value else ""
        if not isinstance(value, str):
            raise NotThisError
        return {"true": "-", "yes": "-", "on": "-", "false": "", "no": "", "off": ""}.get(value.lower(), value)

    return Rule("true, false or the path of a file", read)


@dataclass(frozen=True)
class LogSettings:
    """The log, on standard error."""

    level: str | None = option(
        None,
        optional(choice(*LOG_LEVELS)),
        "What is less important is left out: `debug`, `info`, `warning` or `error`.",
        live=True,
        shown="`warning` for text, `info` for JSON",
    )
    levels: str = option(
        "",
        _logger_levels(),
        "The same for single loggers: `smqrt.close=warning,smqrt.lua=debug`.",
        live=True,
    )
    format: str = option("text", choice("text", "json"), "Lines for people, or a JSON object in each line.")
    time: bool = option(False, switch(), "Begin each line of text with the time and the level.")
    color: bool | None = option(
        None, optional(switch()), "Colour for warnings and errors.", shown="on a terminal, without `NO_COLOR`"
    )
    access: str = option(
        "",
        _access_log(),
        "A line for each request and each SMQ connection that ended: into this file, or with `true` to standard "
        "output.",
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
    service: str = option("smqrt", text(), "What the traces call this server.")


@dataclass(frozen=True)
class AdminSettings:
    """The admin listener: health, metrics, an API and the console (help: metrics)."""

    enabled: bool = option(True, switch(), "Listen for operators, on a port of its own.")
    host: str = option(
        "127.0.0.1",
        text(),
        "Address to listen on. One that others reach needs `auth.users`, so that they log in, and TLS.",
    )
    port: int | None = option(
        None,
        optional(whole(0, 0xFFFF)),
        "The port; 0 picks a free one.",
        shown="9356, or a free one when that is taken",
    )
    tls: bool | None = option(
        None, optional(switch()), "Speak TLS there. On where `admin.cert` is given.", shown="`false`"
    )
    cert: str | None = option(
        None, optional(text()), "Certificate chain, a PEM file; that of `cert` by default.", live=True
    )
    key: str | None = option(None, optional(text()), "Private key of it, a PEM file.", live=True)
    client_ca: str | None = option(
        None,
        optional(text()),
        "Authorities of client certificates, a PEM file: who shows none of them does not come in.",
        live=True,
    )
    console: bool = option(True, switch(), "Show the console there, at `/console/`.")


@dataclass(frozen=True)
class LastValueSettings:
    """How many last values there may be, of each hub (help: last-value)."""

    max_values: int = option(100_000, whole(0), "Last values that a hub keeps; further ones are not kept, and counted.")
    max_bytes: int = option(64 << 20, size(), "Bytes of memory that they may take.", shown="`64MiB`")
    sync_s: float = option(
        1.0, number(0.01, 3600), "Seconds from a change to its commit, for hubs with `persist`: what a crash may lose."
    )


@dataclass(frozen=True)
class AuthSettings:
    """Who may connect to hubs, and what they may do there (help: identity)."""

    users: str | None = option(
        None, optional(path()), "File with users, their hashed passwords and their groups; `smqrt passwd` writes it."
    )
    acl: str | None = option(
        None,
        optional(path()),
        "File with the access control list: who may read, write, observe and create which topics.",
    )
    anonymous: bool = option(
        False,
        switch(),
        "Let clients in that say nothing of who they are; the access control list calls them `anonymous`.",
    )
    certificate_user: str | None = option(
        None,
        optional(text()),
        "Take the user from the client certificate: `{cn}`, `{dns}`, `{email}`, …; for clients that show nothing else.",
    )
    certificate_groups: str | None = option(
        None, optional(text()), "The user's groups from the certificate, with commas between: `{ou}`."
    )
    jwt_key: str | None = option(
        None,
        optional(path()),
        "File with the public keys or certificates (PEM), or the JWKS, that JSON Web Tokens are signed with.",
    )
    jwt_secret: str | None = option(
        None, optional(path()), "File with a secret of at least 32 bytes that tokens are signed with (HS256)."
    )
    jwt_jwks: str | None = option(
        None, optional(text()), "Address of the JWKS, of https or on loopback; it is fetched in the background."
    )
    jwt_algorithms: tuple[str, ...] = option(
        ("RS256", "PS256", "ES256", "EdDSA", "HS256"),
        texts(),
        "Algorithms that tokens may be signed with, each only by a key of its kind.",
        shown="`RS256, PS256, ES256, EdDSA, HS256`",
    )
    jwt_issuer: str | None = option(None, optional(text()), "What tokens must have as `iss`.")
    jwt_audience: str | None = option(None, optional(text()), "What tokens must have as `aud`.")
    jwt_required: tuple[str, ...] = option(("exp",), texts(), "Claims that a token must have.", shown="`exp`")
    jwt_leeway_s: float = option(10.0, number(0, 300), "Seconds by which the clock of who made a token may differ.")
    jwt_user: str = option("sub", text(), "The claim that names the user; `a.b` is `b` in `a`.")
    jwt_groups: str = option("groups", text(), "The claim with the groups: a list, or a text with spaces or commas.")
    jwt_disconnect: bool = option(True, switch(), "End a connection when its token expires.")


@dataclass(frozen=True)
class RestartSettings:
    """Hot restart."""

    socket: str = option(
        "",
        text(),
        "Unix socket at which `smqrt restart` and a new process with `--take-over` find this server; for this user "
        "only. When not given: SIGUSR2 alone restarts it.",
    )
    load_s: float = option(
        60.0,
        number(0, above=True),
        "Seconds that the new process may take to load the applications; then the old one goes on.",
    )


@dataclass(frozen=True)
class ClusterSettings:
    """Other nodes (help: cluster)."""

    listen: str = option(
        "", text(), "Address and port for links of other nodes: `0.0.0.0:1900`. When not given: none come in."
    )
    nodes: tuple[str, ...] = option(
        (),
        texts(),
        "Other nodes, `10.0.0.2:1900`; also a list that has this one itself in it. Or servers of NATS, "
        "`nats://10.0.0.9`, through which all nodes find each other.",
        shown="none",
    )
    password: str | None = option(
        None, optional(text()), "The same at all nodes: without it nobody is joined.", secret=True
    )
    ca: str | None = option(
        None,
        optional(path()),
        "Authority that signs for nodes only, a PEM file. With it links speak TLS, and both sides show a certificate "
        "of it. For NATS: the authority of its servers.",
    )
    cert: str | None = option(None, optional(path()), "This node's certificate with its chain, a PEM file.")
    key: str | None = option(None, optional(path()), "Its key. When not given: in the same file.")
    credentials: str | None = option(None, optional(path()), "File with a user's credentials for NATS (`.creds`).")
    node: int = option(0, whole(0, 1023), "A fixed number for this node; workers have the next ones. 0: draw one.")
    hubs: bool = option(
        False,
        switch(),
        "Join all hubs, also those that were created without `cluster`: each with those of the same "
        "application and name.",
    )
    directory: str | None = option(
        None, optional(path()), "All processes of this machine that share this folder are joined, without a network."
    )
    ping_s: float = option(1.0, number(0.05, 3600), "Seconds between questions whether another node is there.")
    silence_s: float = option(5.0, number(0.2, 3600), "A node that has said nothing for so many seconds is lost.")
    queue_bytes: int = option(
        16 << 20, size(1 << 18), "What may wait for one node; more, and its link begins anew.", shown="`16MiB`"
    )


MAX_WORKERS = 128


def _workers() -> Rule[int]:
    """A number of processes, or "auto", which is 0."""

    def read_workers(value: object) -> int:
        return 0 if value == "auto" else whole(0, MAX_WORKERS).read(value)

    schema = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": MAX_WORKERS}, {"const": "auto"}]}
    return Rule(f'a whole number from 1 to {MAX_WORKERS}, or "auto"', read_workers, int, schema)


@dataclass(frozen=True)
class Settings:
    """What `smqrt serve` can be told. Paths are relative to the current folder."""

    host: str = option("127.0.0.1", text(), "Address to listen on; 0.0.0.0 or :: for every interface.")
    port: int = option(9357, whole(0, 0xFFFF), "Port for HTTP, WebSocket and raw SMQ; 0 picks a free one.")
    tls_port: int | None = option(
        None, optional(whole(0, 0xFFFF)), "Port for the same over TLS; 0 picks a free one. Off when not given."
    )
    cert: str | None = option(
        None,
        optional(text()),
        "Certificate chain for TLS, a PEM file. A self-signed pair is made when none is given.",
        live=True,
    )
    key: str | None = option(None, optional(text()), "Private key for TLS, a PEM file.", live=True)
    client_ca: str | None = option(
        None, optional(text()), "Authorities (PEM) that client certificates are checked against.", live=True
    )
    tpm_key_file: str | None = option(
        None,
        optional(text()),
        "File with the keys of `ba.tpm`; a name in `.key` is never served. `~/.config/smqrt/tpm.key` by default.",
    )
    workers: int = option(
        1,
        _workers(),
        "Processes that serve the ports together; `auto` (or 0): as many as there are cores (help: workers).",
    )
    hosts: str = option(
        "",
        text(),
        "Names the server answers to, with commas between: `example.com`, `*.example.com`, an address, `*` for all. "
        "When not given: every name; on loopback only those of loopback.",
        live=True,
    )
    origins: str = option(
        "",
        text(),
        "Origins whose pages may connect, send and read, beside the server's own: `https://example.com`, "
        "`https://*.example.com`, `null`, with commas between; `*` for all.",
        live=True,
    )
    debug: bool | None = option(
        None,
        optional(switch()),
        "Show clients the traceback of an error instead of a number that stands in the log. "
        "On when the server listens on loopback, for clients of this machine.",
        live=True,
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
        live=True,
    )
    connections_per_address: int = option(
        2000,
        whole(0),
        "Connections of one IP address; beyond, 503. 0: no limit. Addresses of this machine have none. "
        "More when all clients come through one proxy elsewhere.",
        live=True,
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
    drain_s: float = option(
        2.0,
        number(0),
        "Seconds that requests under way, and clients that have not read everything, get when the server stops.",
        live=True,
    )
    lua_loop_s: float = option(
        10.0,
        number(0),
        "Seconds that Lua may compute without giving way before it gets an error; 0 for as long as it likes.",
    )
    limits: LimitSettings = group(LimitSettings, "What strangers may have; see [limits](limits.md).")
    topics: Mapping[str, TopicSettings] = tables(
        TopicSettings,
        "What holds for the topics that a filter names, the name of the table: `+` stands for one level, `#` for the "
        'rest, as in `[topics."sensors/#"]`. The first that matches counts.',
    )
    tls: TlsSettings = group(TlsSettings, "TLS of all listeners.")
    listener: Mapping[str, ListenerSettings] = tables(
        ListenerSettings, "Ports beside `port` and `tls_port`, each with a name of its own."
    )
    proxy: ProxySettings = group(ProxySettings, "Proxies in front of the server: whom they speak for.")
    drain: DrainSettings = group(DrainSettings, "How the server ends.")
    strict: bool = option(
        False, switch(), "An application that failed makes the server unready: `/readyz` answers 503."
    )
    log: LogSettings = group(LogSettings, "The log, on standard error, and the access log.")
    otel: OtelSettings = group(OtelSettings, "Traces for OpenTelemetry.")
    admin: AdminSettings = group(AdminSettings, "Where operators look: health, metrics, an API and the console.")
    restart: RestartSettings = group(
        RestartSettings, "Hot restart: a new process takes over sockets and sessions (help: hot-restart)."
    )
    lua: LuaSettings = group(LuaSettings, "The Lua of applications.")
    pages: PageSettings = group(PageSettings, "The server's own pages, beside those of applications.")
    auth: AuthSettings = group(AuthSettings, "Who may connect to hubs, and what they may do there.")

    cluster: ClusterSettings = group(ClusterSettings, "Hubs that work as one with those of other processes.")
    last_value: LastValueSettings = group(LastValueSettings, "Limits of what `last_value` of topics keeps.")

    def __post_init__(self) -> None:
        """Raises StartError for a value that breaks its rule."""
        try:
            check(self)
        except ArgumentError as error:
            raise StartError(str(error)) from None


@cache
def table() -> tuple[Setting, ...]:
    """Returns the settings that have one place, in the order of the manual."""
    return tuple(settings_of(Settings))


@cache
def named_table() -> tuple[Setting, ...]:
    """Returns the settings of tables that users name, in the order of the manual."""
    return tuple(named_settings_of(Settings))

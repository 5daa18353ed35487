"""The options of a NATS client, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass

from smqrt.errors import ArgumentError
from smqrt.settings.options import instance, number, option, optional, path, switch, text, whole
from smqrt.transport.tls_contexts import ClientTls

_LONGEST_S = 86_400.0
_TEXT = optional(text())
_FILE = optional(path())
_WHOLE = 1 << 53


@dataclass(kw_only=True)
class NatsOptions:
    """What a client can be told."""

    name: str = option("smqrt", text(), "what the server's lists of connections show")
    user: str | None = option(None, _TEXT, "for servers whose address names none")
    password: str | None = option(None, _TEXT, "the same", secret=True)
    token: str | None = option(None, _TEXT, "the same, for servers that want a token", secret=True)
    nkey_file: str | None = option(None, _FILE, "file with the seed of a user's nkey; read for each connection")
    credentials_file: str | None = option(
        None, _FILE, "file with a user's JWT and seed, as `nsc` makes it; read for each connection"
    )
    tls: ClientTls | None = option(
        None, optional(instance("a ClientTls", ClientTls)), "whom to trust and who one is, instead of the files below"
    )
    tls_ca: str | None = option(None, _FILE, "PEM file with certificates to trust instead of those of this machine")
    tls_cert: str | None = option(None, _FILE, "PEM file with one's own certificate")
    tls_key: str | None = option(None, _FILE, "PEM file with its key, when it is not in the same file")
    tls_hostname: str | None = option(None, _TEXT, "the name in the servers' certificates, when it is not their host")
    tls_first: bool = option(
        False, switch(), "TLS before the server says anything, as its `handshake_first` wants it; else behind INFO"
    )
    echo: bool = option(True, switch(), "get what one publishes oneself and subscribes to")
    shuffle: bool = option(True, switch(), "try the servers in any order, so that clients spread over them")
    queue_bytes: int = option(
        8 << 20, whole(0, _WHOLE, "bytes"), "what may wait for a server that is slow; more is refused", shown="8 MiB"
    )
    reconnect_queue_bytes: int = option(
        8 << 20, whole(0, _WHOLE, "bytes"), "what may wait while there is no connection; 0: nothing", shown="8 MiB"
    )
    connect_timeout_s: float = option(
        5.0, number(0, _LONGEST_S, "seconds", above=True), "in so long one server has to accept, name and TLS included"
    )
    ping_s: float = option(
        10.0,
        number(0, _LONGEST_S, "seconds", above=True),
        "after so long in silence the server is asked whether it is there",
    )
    pong_s: float = option(
        5.0, number(0, _LONGEST_S, "seconds", above=True), "so long it may take to answer, or to take any byte of ours"
    )
    reconnect_s: float = option(
        0.1, number(0, _LONGEST_S, "seconds", above=True), "before a server is tried again; doubles each time"
    )
    longest_reconnect_s: float = option(5.0, number(0, _LONGEST_S, "seconds", above=True), "the most of that")
    refused_s: float = option(
        30.0, number(0, _LONGEST_S, "seconds", above=True), "before a server is tried again that does not let us in"
    )

    def __post_init__(self) -> None:
        ways = ("user", "token", "nkey_file", "credentials_file")
        given = [name for name in ways if getattr(self, name) is not None]
        if len(given) > 1:
            raise ArgumentError(f"{' and '.join(given)}: give one of them, a server takes one")
        if self.tls is not None and (self.tls_ca or self.tls_cert):
            raise ArgumentError("tls: give a ClientTls or files, not both")

    @property
    def wants_tls(self) -> bool:
        """Whether servers are spoken to with TLS only, whatever their address says."""
        return self.tls is not None or self.tls_first or bool(self.tls_ca or self.tls_cert)

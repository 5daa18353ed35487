"""Options of SMQ clients and of their subscriptions."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from smqrt.clients.smq.protocol import check_header
from smqrt.clients.smq.session import Handler
from smqrt.errors import ArgumentError
from smqrt.settings.option_types import (
    InvalidValueError,
    Rule,
    choice,
    function,
    instance,
    number,
    option,
    optional,
    path,
    switch,
    whole,
)
from smqrt.transport.proxy_address import Proxy
from smqrt.transport.tls_contexts import ClientTls, Trust
from smqrt.wire.smq import MIN_UID_BYTES
from smqrt.wire.url import Url, parse_url, without_password

log = logging.getLogger("smqrt.client")

Callback = Callable[..., object] | None
_MAX_UID_BYTES = 255
_FILE = optional(path())
_FUNCTION = optional(function())
_SECONDS = number(0, unit="seconds", above=True)
_DECODERS: dict[str, Callable[[bytes], object]] = {"json": json.loads, "text": bytes.decode}


def _uid(value: object) -> str | bytes:
    if not isinstance(value, str | bytes) or not MIN_UID_BYTES <= len(to_bytes(value)) <= _MAX_UID_BYTES:
        raise InvalidValueError
    return value


def _headers(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise InvalidValueError
    for name, text in value.items():
        check_header(name, text)
    return dict(value)


@dataclass(kw_only=True)
class SmqClientOptions:
    """Options of a client (spec: smq §7). Times are seconds."""

    uid: str | bytes = option(
        lambda: secrets.token_hex(8),
        Rule(f"{MIN_UID_BYTES} to {_MAX_UID_BYTES} bytes", _uid),
        "id of this client, at least 6 bytes; the same uid takes over the older connection and, in the same "
        "[worker](workers.md) or node, its ETID",
        shown="random, the same for all connections",
    )
    info: str | bytes | None = option(
        None,
        optional(instance("a string or bytes", str, bytes)),
        "text for the broker's application",
        shown="the local address",
    )
    onauth: Callback = option(None, _FUNCTION, "`f(rnd, ip)` → credentials, str or bytes", shown="none")
    onconnect: Callback = option(None, _FUNCTION, "`f(etid, rnd, ip)` after the first connection", shown="none")
    onreconnect: Callback = option(
        None, _FUNCTION, "`f(etid, rnd, ip)` after later connections", shown="none; with `cleanstart`, `onconnect`"
    )
    onclose: Callback = option(
        None, _FUNCTION, "`f(err, canreconnect)` → None (as `reconnect` says), False, True or seconds", shown="none"
    )
    onmsg: Callback = option(
        None, _FUNCTION, "`f(data, ptid, tid, subtid)` for messages without a handler", shown="none"
    )
    timeout: float = option(5.0, _SECONDS, "time limit for connecting, including the handshake", shown="5 s")
    ping: float = option(120.0, _SECONDS, "time without a packet after which the broker is pinged", shown="120 s")
    pong: float = option(10.0, _SECONDS, "time limit of the response; otherwise the connection is closed", shown="10 s")
    reconnect: bool = option(True, switch(), "whether to connect again after a lost connection or a failed attempt")
    reconnect_delay: float = option(
        5.0,
        _SECONDS,
        "delay before a reconnect; it doubles with every failure, less a random part of up to a half",
        shown="5 s",
    )
    reconnect_delay_max: float = option(60.0, _SECONDS, "longest delay before a reconnect", shown="60 s")
    cleanstart: bool = option(
        False, switch(), "drop subscriptions, names and queued messages when the connection is lost"
    )
    headers: Mapping[str, str] = option(
        dict, Rule("a mapping of strings", _headers), "additional fields of the HTTP request", shown="none"
    )
    queue_bytes: int = option(
        1 << 20, whole(1), "size of the send queue; messages that do not fit are dropped and counted", shown="1 MiB"
    )
    cafile: str | None = option(
        None,
        _FILE,
        "with https and wss, PEM file with certificates to trust",
        shown="the system's certificate authorities",
    )
    certfile: str | None = option(None, _FILE, "PEM file with the certificate of the client")
    keyfile: str | None = option(None, _FILE, "PEM file with the private key of the client")
    verify: bool = option(True, switch(), "False accepts any certificate")
    tls: ClientTls | None = option(
        None,
        optional(instance("a ClientTls", ClientTls)),
        "a `smqrt.transport.tls_contexts.ClientTls` instead of the files",
        shown="none",
    )
    proxy: Proxy | None = option(
        None,
        optional(instance("a Proxy", Proxy)),
        "a `smqrt.transport.outgoing_proxy.Proxy(host, port, socks, user, password)` to connect through",
        shown="none",
    )


def to_bytes(text: str | bytes) -> bytes:
    """Return bytes unchanged, and str as UTF-8."""
    return text.encode() if isinstance(text, str) else bytes(text)


@dataclass(frozen=True, slots=True)
class SubscriptionOptions:
    """Options of one subscription; see `SmqClient.subscribe`."""

    onmsg: Callback = option(None, _FUNCTION, "`f(data, ptid, tid, subtid)` for messages")
    onack: Callback = option(None, _FUNCTION, "called with the broker's response")
    datatype: str | None = option(None, optional(choice(*_DECODERS)), "how messages are decoded; None for bytes")


def message_handler(settings: SubscriptionOptions, general: Handler) -> Handler | None:
    """Return the handler of a subscription, None for `general`, which also receives undecodable messages."""
    onmsg = settings.onmsg
    if onmsg is None or settings.datatype is None:
        return onmsg
    decode = _DECODERS[settings.datatype]

    def handle(data: bytes, ptid: int, tid: int, subtid: int) -> None:
        try:
            value = decode(data)
        except (ValueError, RecursionError) as error:  # RecursionError: JSON that is nested too deep
            log.warning("a message for topic %d is not %s: %s", tid, settings.datatype, error)
            general(data, ptid, tid, subtid)
        else:
            onmsg(value, ptid, tid, subtid)

    return handle


TRUST_FAULTS = {
    Trust.CERTCN: "the certificate is not valid at this time",
    Trust.CERT: "the certificate is for another name",
    Trust.CN: "no trusted authority has signed the certificate",
    Trust.NONE: "the certificate is for another name, and no trusted authority has signed it",
}
"""The verdicts on untrusted certificates in words."""


def broker_url(text: str) -> Url:
    """Parse the URL of a broker: `http(s)://` for raw SMQ after an HTTP request, `ws(s)://` for WebSocket.

    Raises:
        ArgumentError: an invalid URL.
    """
    try:
        return parse_url(text)
    except ValueError as error:
        raise ArgumentError(f"url {without_password(text)!r} is not valid: {error}") from None

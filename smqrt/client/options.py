"""The options of a client and of its subscriptions, with their defaults."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from smqrt.client.topics import Handler
from smqrt.client.transport import check_header
from smqrt.errors import ArgumentError
from smqrt.net.contexts import ClientTls
from smqrt.net.proxy import Proxy
from smqrt.wire.smq import MIN_UID_BYTES

log = logging.getLogger("smqrt.client")

Callback = Callable[..., Any] | None
_MAX_UID_BYTES = 255


@dataclass(kw_only=True)
class SmqClientOptions:
    """What a client can be told (specification: smq.md §7). Times are seconds.

    Attributes:
        uid: 6 to 255 bytes that name this client; the same uid takes over the older connection and its ETID. Default:
            random, kept over reconnects.
        info: text about the client, shown to the broker's application. Default: the local IP address.
        timeout: for making a connection, handshake included.
        ping: after this long without a byte from the broker, ask whether it is there.
        pong: how long to wait for the answer before the connection counts as dead.
        reconnect: whether to come back after a lost connection, and after a first one that could not be made.
        reconnect_delay: the first waiting time; it doubles with every failure, is shortened at random by up to a half,
            and starts anew after a success.
        reconnect_delay_max: the longest waiting time.
        cleanstart: forget subscriptions, names and waiting messages when the connection is lost.
        headers: more fields for the HTTP request.
        queue_bytes: how much may wait to be sent; what does not fit is dropped and counted.
        cafile: with https and wss, a file with certificates to trust; default: the system's store.
        certfile, keyfile: one's own certificate.
        verify: False accepts any certificate.
        tls: whom to trust and one's own certificates, instead of the files.
        proxy: to go through.
        onauth: `f(rnd, ip) -> credentials` (str or bytes).
        onconnect: `f(etid, rnd, ip)` after the first connection.
        onreconnect: the same after later ones; default: onconnect with cleanstart, else nothing.
        onclose: `f(err, canreconnect)`; returns None (as `reconnect` says), False (stay away), True (come back) or
            seconds.
        onmsg: `f(data, ptid, tid, subtid)` for messages without a handler of their own.
    """

    uid: str | bytes = field(default_factory=lambda: secrets.token_hex(8))
    info: str | bytes | None = None
    timeout: float = 5.0
    ping: float = 120.0
    pong: float = 10.0
    reconnect: bool = True
    reconnect_delay: float = 5.0
    reconnect_delay_max: float = 60.0
    cleanstart: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    queue_bytes: int = 1 << 20
    cafile: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    verify: bool = True
    tls: ClientTls | None = None
    proxy: Proxy | None = None
    onauth: Callback = None
    onconnect: Callback = None
    onreconnect: Callback = None
    onclose: Callback = None
    onmsg: Callback = None

    def __post_init__(self) -> None:
        if not MIN_UID_BYTES <= len(to_bytes(self.uid)) <= _MAX_UID_BYTES:
            raise ArgumentError(f"uid {self.uid!r} must have {MIN_UID_BYTES} to {_MAX_UID_BYTES} bytes")
        for name in ("timeout", "ping", "pong", "reconnect_delay", "reconnect_delay_max", "queue_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ArgumentError(f"{name} must be a number greater than 0, not {value!r}")
        for name, value in self.headers.items():
            check_header(name, value)


def make_options(options: Mapping[str, Any] | None, more: Mapping[str, Any]) -> SmqClientOptions:
    """Options from a mapping and keyword arguments; the latter win.

    Raises:
        ArgumentError: an unknown name or a wrong value.
    """
    merged = {**(options or {}), **more}
    known = {option.name for option in fields(SmqClientOptions)}
    if unknown := sorted(set(merged) - known):
        raise ArgumentError(f"unknown option {unknown[0]!r}; there are: {', '.join(sorted(known))}")
    return SmqClientOptions(**merged)


def to_bytes(text: str | bytes) -> bytes:
    """`text` as bytes, UTF-8 when it is str."""
    return text.encode() if isinstance(text, str) else bytes(text)


_DECODERS: dict[str, Callable[[bytes], Any]] = {"json": json.loads, "text": bytes.decode}


@dataclass(frozen=True, slots=True)
class SubscriptionOptions:
    """The settings of one subscription; see `SmqClient.subscribe`."""

    onmsg: Callable[[Any, int, int, int], Any] | None = None
    onack: Callable[..., Any] | None = None
    datatype: str | None = None

    @classmethod
    def make(cls, settings: Mapping[str, Any] | None, more: Mapping[str, Any]) -> SubscriptionOptions:
        """Settings from a mapping and keyword arguments.

        Raises:
            ArgumentError: an unknown name or datatype.
        """
        merged = {**(settings or {}), **more}
        if unknown := sorted(set(merged) - set(cls.__slots__)):
            raise ArgumentError(f"unknown setting {unknown[0]!r}; there are: {', '.join(cls.__slots__)}")
        made = cls(**merged)
        if made.datatype not in (None, *_DECODERS):
            raise ArgumentError(f"datatype {made.datatype!r} must be None, {', '.join(map(repr, _DECODERS))}")
        return made


def message_handler(settings: SubscriptionOptions, general: Handler) -> Handler | None:
    """The handler of a subscription; None leaves messages to `general`, which also gets what can't be decoded."""
    onmsg = settings.onmsg
    if onmsg is None or settings.datatype is None:
        return onmsg
    decode = _DECODERS[settings.datatype]

    def handle(data: bytes, ptid: int, tid: int, subtid: int) -> None:
        try:
            value = decode(data)
        except (ValueError, RecursionError) as error:  # the latter: nested without end
            log.warning("a message for topic %d is not %s: %s", tid, settings.datatype, error)
            general(data, ptid, tid, subtid)
        else:
            onmsg(value, ptid, tid, subtid)

    return handle

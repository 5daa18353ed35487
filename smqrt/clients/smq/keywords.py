"""Types of the keyword arguments of `SmqClient`, for type checkers; the options are checked by their tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict

from smqrt.transport.outgoing_proxy import Proxy
from smqrt.transport.tls_contexts import ClientTls

OnConnect = Callable[[int, int, Any], object]
"""`f(etid, rnd, ip)`."""
OnMessage = Callable[[Any, int, int, int], object]
"""`f(data, ptid, tid, subtid)`; the data are bytes, str with `datatype="text"`, any value with `"json"`."""


class SmqClientKeywords(TypedDict, total=False):
    """The options of `SmqClientOptions`."""

    uid: str | bytes
    info: str | bytes | None
    onauth: Callable[[int, Any], str | bytes | None] | None
    onconnect: OnConnect | None
    onreconnect: OnConnect | None
    onclose: Callable[..., object] | None
    onmsg: OnMessage | None
    timeout: float
    ping: float
    pong: float
    reconnect: bool
    reconnect_delay: float
    reconnect_delay_max: float
    cleanstart: bool
    headers: Mapping[str, str]
    queue_bytes: int
    cafile: str | None
    certfile: str | None
    keyfile: str | None
    verify: bool
    tls: ClientTls | None
    proxy: Proxy | None


class SubscriptionKeywords(TypedDict, total=False):
    """The options of `SubscriptionOptions`."""

    onmsg: OnMessage | None
    onack: Callable[..., object] | None
    datatype: Literal["text", "json"] | None

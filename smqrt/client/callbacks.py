"""What an application's `onauth` and `onclose` answer, checked: the client goes on, or ends in words."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import gevent

from smqrt.client.close_reason import ConnectionEnd
from smqrt.client.protocol import Init

log = logging.getLogger("smqrt.client")

MAX_CREDENTIALS_BYTES = 255


def credentials_of(onauth: Callable[..., Any] | None, hello: Init, timeout_s: float) -> bytes:
    """What `onauth(seed, address)` returns. It runs in a greenlet of its own, since one of the other callbacks may wait
    for this connection.

    Raises:
        ConnectionEnd: it failed, took too long, or returned what can't be sent.
    """
    if onauth is None:
        return b""
    failures: list[Exception] = []

    def asked() -> Any:
        try:
            return onauth(hello.seed, hello.address)
        except Exception as error:
            log.exception("onauth failed")
            failures.append(error)

    greenlet = gevent.spawn(asked)
    greenlet.join(timeout_s)
    if failures:
        raise _final(f"onauth failed: {failures[0]}")
    if not greenlet.ready():
        raise ConnectionEnd("timeout", f"onauth gave no answer within {timeout_s:g} s")
    return _sendable(greenlet.value or b"")


def _sendable(credentials: object) -> bytes:
    if isinstance(credentials, str):
        credentials = credentials.encode()
    if not isinstance(credentials, bytes | bytearray):
        raise _final(f"onauth returned {type(credentials).__name__}; credentials are str or bytes")
    if len(credentials) > MAX_CREDENTIALS_BYTES:
        raise _final(f"onauth returned {len(credentials)} bytes; at most {MAX_CREDENTIALS_BYTES} can be sent")
    return bytes(credentials)


def _final(message: str) -> ConnectionEnd:
    return ConnectionEnd("onauth", message, can_reconnect=False)


def delay_of(decision: object) -> bool | float | None:
    """What `onclose` decided: a bool, None, or seconds, at least 0; anything else is logged and taken as None."""
    if decision is None or isinstance(decision, bool):
        return decision
    if isinstance(decision, int | float) and not math.isnan(decision):
        return max(float(decision), 0.0)
    log.error("onclose returned %r: it may be None, False, True or a number of seconds; taken as None", decision)
    return None

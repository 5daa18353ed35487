"""Messages of applications: payloads, received messages, and requests with their answers.

Payloads are the same for the hub, the client and Lua: bytes are sent unchanged, text as UTF-8, other values as JSON.
NaN and the infinities, which JSON does not have, become null.

A request is a message to the ETID of one client; its sub-topic id is the number of the request. The answer goes to the
ETID of the requester, with the same sub-topic id. Other clients can't forge it, because the broker checks publishers.
The sub-topic id needs no name.
"""

from __future__ import annotations

import json
import math
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from smqrt.broker.deferred import Deferred
from smqrt.broker.mqtt.application import MqttAttributes
from smqrt.errors import ArgumentError, NoAnswer
from smqrt.wire.smq import MAX_PAYLOAD_BYTES

Payload = (
    str | bytes | bytearray | memoryview | dict[str, Any] | list[Any] | tuple[Any, ...] | int | float | bool | None
)
"""Types of values that can be published: see `payload`."""

REMEMBERED_REQUESTS = 256
"""Number of finished requests that are remembered, so that their late answers do not reach the application."""


def payload(data: object) -> bytes:
    """Return `data` as the bytes of a message.

    Args:
        data: bytes, bytearray or memoryview are sent unchanged; a str as UTF-8, with surrogate escapes as their bytes;
            a dict, list, tuple, number, bool or None as JSON, with null for NaN and the infinities.

    Raises:
        ArgumentError: JSON can't represent `data`, or it has more than 65520 bytes.
    """
    if isinstance(data, bytes):
        made = data
    elif isinstance(data, bytearray | memoryview):
        made = bytes(data)
    elif isinstance(data, str):
        try:
            made = data.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            raise ArgumentError(f"data: {error}; send bytes when it is not text") from None
    else:
        made = json_bytes(data)
    if len(made) > MAX_PAYLOAD_BYTES:
        raise ArgumentError(f"data: {len(made)} bytes; a message carries at most {MAX_PAYLOAD_BYTES}, split it")
    return made


def json_bytes(value: object) -> bytes:
    """Return any `value`, including a str, as JSON, with null for NaN and the infinities. Raises as `payload`."""
    try:
        try:
            return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
        except ValueError:  # usually NaN or an infinity; checking every value first would be slower
            return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"data: {error}; send bytes, text, or values that JSON supports") from None


def json_value(data: bytes) -> Any:
    """Return the value of the JSON text `data`, by the rules of Lua's decoder: UTF-8, no NaN and no infinity.

    Raises:
        ValueError: `data` is not JSON, or not UTF-8.
        RecursionError: `data` is nested too deeply.
    """

    def reject(word: str) -> Any:
        raise ValueError(f"{word} is not JSON")

    return json.loads(data.decode(), parse_constant=reject)


def _finite(value: Any) -> Any:
    """Return `value` with None in place of NaN and the infinities."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message; the subclasses have the `reply` of their event loop.

    Attributes:
        data: the payload.
        etid: the ETID of the publisher, 1 for the server; callbacks of a hub name it `ptid`.
        tid: the id of the topic, or the receiver's own ETID.
        subtid: the id of the sub-topic, 0 for none; the number of a request.
        topic: the topic as it was subscribed to; for an answer, the ETID that the request was sent to.
        mqtt: QoS, retain flag, expiry and properties of a message of an MQTT client to a hub; None for others.
    """

    data: bytes
    etid: int
    tid: int
    subtid: int
    topic: str | bytes | int
    _publish: Callable[[Any, int, int], object] = field(repr=False, compare=False)
    mqtt: MqttAttributes | None = None

    @property
    def text(self) -> str:
        """The payload as text; invalid UTF-8 becomes U+FFFD."""
        return self.data.decode("utf-8", "replace")

    @property
    def json(self) -> Any:
        """The value of a JSON payload. Raises ValueError when it is not JSON."""
        try:
            return json_value(self.data)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"a message from {self.etid} to {self.topic!r} is not JSON: {error}") from None


class Message(ReceivedMessage):
    """A message, as functions registered by `on` get it and `request` returns it. See `ReceivedMessage`."""

    __slots__ = ()

    def reply(self, data: Payload) -> None:
        """Send `data` to the publisher, with the same sub-topic; this answers a `request`.

        Raises:
            ArgumentError: as `publish`.
        """
        self._publish(data, self.etid, self.subtid)


class OpenRequests:
    """The open requests of one client or hub, without waiting for their answers."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], Deferred[bytes]] = {}
        self._over: OrderedDict[tuple[int, int], None] = OrderedDict()
        # Random, so that an answer to a request of an earlier process is not taken for one of this process.
        self._last = random.getrandbits(32)

    def open(self, etid: int) -> tuple[Deferred[bytes], int]:
        """Return the future answer of `etid`, and the number that the request must have; `end` ends the request."""
        self._last = self._last % 0xFFFFFFFF + 1  # 1 to 0xFFFFFFFF: 0 would be no sub-topic
        while (etid, self._last) in self._open:
            self._last = self._last % 0xFFFFFFFF + 1
        answer = self._open[etid, self._last] = Deferred()
        return answer, self._last

    def end(self, etid: int, number: int) -> None:
        """End a request; its late answers are discarded."""
        del self._open[etid, number]
        self._over[etid, number] = None
        if len(self._over) > REMEMBERED_REQUESTS:
            self._over.popitem(last=False)

    def take(self, data: bytes, etid: int, subtid: int) -> bool:
        """Deliver a message from `etid` if it is an answer; return whether it is. Called before the handlers.

        A late answer is discarded.
        """
        answer = self._open.get((etid, subtid))
        if answer is not None and not answer.done:  # a second answer is discarded
            answer.resolve(data)
            return True
        return answer is not None or (etid, subtid) in self._over

    def give_up(self, why: str, etid: int | None = None) -> None:
        """Raise NoAnswer in the requests to `etid`, or in all, for example when the connection is closed."""
        for (asked, _), answer in list(self._open.items()):
            if etid is None or asked == etid:
                answer.reject(NoAnswer(why))

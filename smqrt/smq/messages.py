"""Messages as applications see them: what may be sent, what a handler gets, and which answer belongs to which request.

Payloads, the same for the hub, the client and Lua: bytes go as they are, text as UTF-8, everything else as JSON. NaN
and the infinities, which JSON does not have, are null.

Requests: the asker puts a number into the sub-topic id of its message, to the ETID of who shall answer. The answer goes
to the ETID of the asker, with the same sub-topic id. Nobody else can give it, since the broker checks publishers; and
no name is made for it.
"""

from __future__ import annotations

import json
import math
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gevent.event import AsyncResult

from smqrt.errors import ArgumentError, NoAnswer
from smqrt.wire.smq import MAX_PAYLOAD_BYTES

Payload = (
    str | bytes | bytearray | memoryview | dict[str, Any] | list[Any] | tuple[Any, ...] | int | float | bool | None
)
"""What can be published: see `payload`."""

REMEMBERED_REQUESTS = 256
"""So many requests that are over are remembered: their late answers are no news to the application."""


def payload(data: object) -> bytes:
    """Returns `data` as the bytes of a message.

    Args:
        data: bytes, bytearray or memoryview as they are; a str as UTF-8 (with the bytes behind surrogate escapes); a
            dict, list, tuple, number, bool or None as JSON, with null for what is no number.

    Raises:
        ArgumentError: JSON does not know it, or it has more than 65520 bytes.
    """
    if isinstance(data, bytes):
        made = data
    elif isinstance(data, bytearray | memoryview):
        made = bytes(data)
    elif isinstance(data, str):
        made = _utf8(data)
    else:
        made = json_bytes(data)
    if len(made) > MAX_PAYLOAD_BYTES:
        raise ArgumentError(f"data: {len(made)} bytes; a message carries at most {MAX_PAYLOAD_BYTES}, split it")
    return made


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ArgumentError(f"data: {error}; send bytes when it is no text") from None


def json_bytes(value: object) -> bytes:
    """Returns `value`, a str as well, as JSON, with null for what is no number. Raises ArgumentError as `payload`."""
    try:
        try:
            return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
        except ValueError:
            return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"data: {error}; send bytes, text, or what JSON knows") from None


def json_value(data: bytes) -> Any:
    """Returns the value that `data` is the JSON of, by the rules of Lua's decoder: UTF-8, no NaN and no infinity.

    Raises:
        ValueError: it is no JSON; UnicodeDecodeError is one.
        RecursionError: it is nested too deeply.
    """
    return json.loads(data.decode(), parse_constant=_no_json)


def _no_json(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _finite(value: Any) -> Any:
    """`value` with None for every number that is none."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True)
class Message:
    """A message as the functions of `on` get it, and as `request` returns it.

    Attributes:
        data: the payload as it came.
        etid: the address of who published it, 1 for the server; `ptid` elsewhere.
        tid: the number of the topic, or one's own ETID.
        subtid: the number of the sub-topic, 0 for none; of a request, its number.
        topic: the topic as it was subscribed to; of an answer, the ETID that was asked.
    """

    data: bytes
    etid: int
    tid: int
    subtid: int
    topic: str | bytes | int
    _publish: Callable[[Any, int, int], object] = field(repr=False, compare=False)

    @property
    def text(self) -> str:
        """The payload as text; what is no UTF-8 shows as U+FFFD."""
        return self.data.decode("utf-8", "replace")

    @property
    def json(self) -> Any:
        """The value that the payload is the JSON of. Raises ValueError: it is no JSON."""
        try:
            return json_value(self.data)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"a message from {self.etid} to {self.topic!r} is no JSON: {error}") from None

    def reply(self, data: Payload) -> None:
        """Send `data` to who published this, with the same sub-topic: so it answers a `request`.

        Raises:
            ArgumentError: as `publish`.
        """
        self._publish(data, self.etid, self.subtid)


class Requests:
    """The requests of one side that wait for their answers."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], AsyncResult[bytes]] = {}
        self._over: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._last = random.getrandbits(32)

    def ask(self, etid: int, send: Callable[[int], object], timeout_s: float) -> tuple[bytes, int]:
        """Call `send(number)` and wait for the answer of `etid` with that number.

        Returns:
            the answer's payload, and the number.

        Raises:
            NoAnswer: none came in time, or `give_up` was called.
        """
        key = etid, self._next_number(etid)
        answer = self._open[key] = AsyncResult()
        try:
            send(key[1])
            answer.wait(timeout_s)
            if not answer.ready():
                raise NoAnswer(f"no answer from {etid} in {timeout_s:g} s")
            return answer.get() or b"", key[1]
        finally:
            del self._open[key]
            self._over[key] = None
            if len(self._over) > REMEMBERED_REQUESTS:
                self._over.popitem(last=False)

    def _next_number(self, etid: int) -> int:
        while True:
            self._last = number = self._last % 0xFFFFFFFF + 1
            if (etid, number) not in self._open:
                return number

    def take(self, data: bytes, etid: int, subtid: int) -> bool:
        """Whether a message of `etid` to oneself is an answer, to be called before any handler. A late answer is one
        too: nobody gets it.
        """
        answer = self._open.get((etid, subtid))
        if answer is not None and not answer.ready():
            answer.set(data)
            return True
        return answer is not None or (etid, subtid) in self._over

    def give_up(self, why: str, etid: int | None = None) -> None:
        """Let the requests to `etid`, or all, fail with NoAnswer: the connection has ended, for example."""
        for (asked, _), answer in self._open.items():
            if not answer.ready() and (etid is None or asked == etid):
                answer.set_exception(NoAnswer(why))

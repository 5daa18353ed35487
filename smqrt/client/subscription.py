"""What a subscription does with its messages."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from smqrt.client.routes import Handler
from smqrt.errors import ArgumentError

log = logging.getLogger("smqrt.client")

_DECODERS: dict[str, Callable[[bytes], Any]] = {"json": json.loads, "text": bytes.decode}


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one subscription; see `SmqClient.subscribe`."""

    onmsg: Callable[[Any, int, int, int], Any] | None = None
    onack: Callable[..., Any] | None = None
    datatype: str | None = None

    @classmethod
    def make(cls, settings: Mapping[str, Any] | None, more: Mapping[str, Any]) -> Settings:
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


def message_handler(settings: Settings, general: Handler) -> Handler | None:
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

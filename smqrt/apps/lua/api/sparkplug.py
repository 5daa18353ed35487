"""Sparkplug B for Lua: `require "SparkplugB"` (spec: bas-api §12)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from gevent import get_hub

from smqrt.apps.lua import bridge
from smqrt.apps.lua.bridge import Function, LuaValue, LuaValues, fail, utf8
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm
from smqrt.clients.mqtt import sparkplug
from smqrt.clients.mqtt.sparkplug import TYPES, payload_class
from smqrt.errors import ArgumentError
from smqrt.loop.scheduling import Turn

SHORT_BYTES = 4096  # worked off at once; longer ones let others run in between


def encode(fields: bytes, breathe: Callable[[], object] = bool) -> bytes:
    """A payload of a packed table. Raises ArgumentError."""
    return sparkplug.encode(_named(bridge.load(fields)), breathe)


def decode(data: bytes, breathe: Callable[[], object] = bool) -> LuaValues:
    """The packed table of a payload; None and a sentence when it is none."""
    try:
        payload = sparkplug.decode(data, breathe)
    except ArgumentError as error:
        return fail(str(error))
    metrics = bridge.dump_list(map(_signed, payload.pop("metrics")), breathe)
    packed = {name: bridge.dump(_signed(value)) for name, value in payload.items()}
    return (bridge.dump_packed(packed | {"metrics": metrics}),)


def _named(value: Any) -> Any:
    """Tables with names as text; values stay bytes."""
    if not isinstance(value, dict):
        return value
    items = value.items()
    fields = {key.decode("utf-8", "replace") if isinstance(key, bytes) else key: _named(item) for key, item in items}
    for name in _NUMBERS & fields.keys():
        fields[name] = _number(fields[name])
    for name in _TEXTS & fields.keys():
        fields[name] = bridge.as_text(fields[name])
    if "value" in fields:
        fields["value"] = _of_type(fields.get("datatype", fields.get("type")), fields["value"])
    return fields


_NUMBERS = {"timestamp", "seq", "alias", "size"}
_TEXTS = {"name", "uuid"}
_OF_TEXT = (b"String", b"Text", b"UUID")
_OF_NUMBER = re.compile(rb"U?Int\d+|Float|Double|DateTime")


def _number(value: Any) -> Any:
    """The number that a text is; a float without a fraction is an integer."""
    found = bridge.as_number(value.decode("latin-1")) if isinstance(value, bytes) else value
    if isinstance(found, bytes | str):
        return value
    return int(found) if isinstance(found, float) and found.is_integer() else found


def _of_type(kind: Any, value: Any) -> Any:
    if kind in _OF_TEXT:
        return bridge.as_text(value)
    return _number(value) if isinstance(kind, bytes) and _OF_NUMBER.fullmatch(kind) else value


def _signed(value: Any) -> Any:
    """Integers of 64 bits as Lua has them: from 2^63 on they are negative."""
    if isinstance(value, dict):
        return {key: _signed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_signed(item) for item in value]
    return value - (1 << 64) if type(value) is int and value >> 63 == 1 else value


def install_sparkplug(vm: Vm, services: Services) -> None:
    """Give Lua the encoder and the decoder."""

    def encode_long(fields: bytes) -> LuaValue:
        return encode(fields, Turn().yield_if_due)

    def decode_long(data: bytes) -> LuaValues:
        return decode(data, Turn().yield_if_due)

    names = tuple(map(utf8, TYPES))
    direct: dict[str, Function] = {
        "encode": encode,
        "decode": decode,
        "types": lambda: names,
        "short": lambda: SHORT_BYTES,
    }
    blocking: dict[str, Function] = {"encode_long": encode_long, "decode_long": decode_long, "prepare": _prepare}
    vm.namespace("ba.sparkplug", direct, blocking)


def _prepare() -> None:
    """Load protobuf, in a thread: it takes some 40 ms."""
    get_hub().threadpool.apply(payload_class)

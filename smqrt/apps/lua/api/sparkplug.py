"""Python half of `SparkplugB` (spec: bas-api §12)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from smqrt.apps.lua import bridge
from smqrt.apps.lua.bridge import Function, LuaValue, LuaValues, fail, utf8
from smqrt.apps.lua.vm import Services, Vm
from smqrt.clients.mqtt import sparkplug
from smqrt.clients.mqtt.sparkplug import TYPES, payload_class
from smqrt.errors import ArgumentError
from smqrt.loop.scheduling import Turn
from smqrt.loop.threads import in_thread

SHORT_BYTES = 4096  # larger payloads are processed in portions, with a greenlet switch in between


def encode(fields: bytes, yield_if_due: Callable[[], object] = bool) -> bytes:
    """Return the payload of a packed table. Raises ArgumentError."""
    return sparkplug.encode(_named(bridge.load(fields)), yield_if_due)


def decode(data: bytes, yield_if_due: Callable[[], object] = bool) -> LuaValues:
    """Return the packed table of a payload; None and a message if it is invalid."""
    try:
        payload = sparkplug.decode(data, yield_if_due)
    except ArgumentError as error:
        return fail(str(error))
    metrics = bridge.dump_list(map(_signed, payload.pop("metrics")), yield_if_due)
    packed = {name: bridge.dump(_signed(value)) for name, value in payload.items()}
    return (bridge.dump_packed(packed | {"metrics": metrics}),)


def _named(value: Any) -> Any:
    """Return a value with the field names of tables as text and with fields of the types that Sparkplug expects."""
    if not isinstance(value, dict):
        return value
    items = value.items()
    fields = {key.decode("utf-8", "replace") if isinstance(key, bytes) else key: _named(item) for key, item in items}
    for name in _NUMBERS & fields.keys():
        fields[name] = _number(fields[name])
    for name in _TEXTS & fields.keys():
        fields[name] = bridge.as_text(fields[name])
    if "value" in fields:
        kind, item = fields.get("datatype", fields.get("type")), fields["value"]
        if kind in _OF_TEXT:
            fields["value"] = bridge.as_text(item)
        elif isinstance(kind, bytes) and _OF_NUMBER.fullmatch(kind):
            fields["value"] = _number(item)
    return fields


_NUMBERS = {"timestamp", "seq", "alias", "size"}
_TEXTS = {"name", "uuid"}
_OF_TEXT = (b"String", b"Text", b"UUID")
_OF_NUMBER = re.compile(rb"U?Int\d+|Float|Double|DateTime")


def _number(value: Any) -> Any:
    """Convert the text of a number to the number, and a float without a fraction to an integer."""
    found = bridge.as_number(value.decode("latin-1")) if isinstance(value, bytes) else value
    if isinstance(found, bytes | str):
        return value
    return int(found) if isinstance(found, float) and found.is_integer() else found


def _signed(value: Any) -> Any:
    """Convert unsigned 64-bit integers to Lua's signed ones: from 2^63 on they become negative."""
    if isinstance(value, dict):
        return {key: _signed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_signed(item) for item in value]
    return value - (1 << 64) if type(value) is int and value >> 63 == 1 else value


def install_sparkplug(vm: Vm, services: Services) -> None:
    """Install the encoder and decoder of Sparkplug B."""

    def encode_long(fields: bytes) -> LuaValue:
        return encode(fields, Turn().yield_if_due)

    def decode_long(data: bytes) -> LuaValues:
        return decode(data, Turn().yield_if_due)

    def prepare() -> None:
        in_thread(payload_class)  # loads protobuf, which takes about 40 ms

    names = tuple(map(utf8, TYPES))
    direct: dict[str, Function] = {
        "encode": encode,
        "decode": decode,
        "types": lambda: names,
        "short": lambda: SHORT_BYTES,
    }
    blocking: dict[str, Function] = {"encode_long": encode_long, "decode_long": decode_long, "prepare": prepare}
    vm.namespace("ba.sparkplug", direct, blocking)

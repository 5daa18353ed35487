"""Properties of MQTT 5 as applications see them: a dict with the standard's names in lower case (smq.md §8).

`{"contenttype": "text/plain", "messageexpiryinterval": 60, "colour": "red"}`: what is no property of the packet is a
user property. Paho has them as objects with attributes of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paho.mqtt.exception import MQTTException
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from smqrt.errors import ArgumentError

__all__ = ["PacketTypes", "Properties", "Props", "as_dict", "as_paho", "packed"]

Props = Mapping[str, Any]

_REASON = "$reason"  # the name of a reason string in the older documentation
_TEMPLATE = Properties(PacketTypes.CONNECT)
_PAHO_NAME = {name.replace(" ", "").lower(): name.replace(" ", "") for name in _TEMPLATE.names}
_PACKETS = {name.replace(" ", "").lower(): _TEMPLATE.properties[number][1] for name, number in _TEMPLATE.names.items()}
_LOWER = {paho: lower for lower, paho in _PAHO_NAME.items()}
_BINARY = ("correlationdata", "authenticationdata")


def as_paho(properties: Props | None, packet: int) -> Properties | None:
    """The properties of a packet to be sent, None when there are none.

    Args:
        properties: names in lower case; what this packet does not know goes as a user property.
        packet: one of `PacketTypes`.

    Raises:
        ArgumentError: a value is out of its range or of a wrong type.
    """
    if not properties:
        return None
    result = Properties(packet)
    for name, value in properties.items():
        try:
            _set(result, packet, name, value)
        except (MQTTException, TypeError, ValueError) as error:
            raise ArgumentError(f"property {name!r} can't be {value!r}: {error}") from None
    try:
        result.pack()
    except Exception as error:
        raise ArgumentError(f"properties {dict(properties)!r} can't be sent: {error}") from None
    return result


def packed(properties: Props, packet: int) -> bytes:
    """The same as bytes, without their length in front."""
    paho = as_paho(properties, packet)
    data: bytes = paho.pack() if paho is not None else b"\0"
    length = next(index for index, byte in enumerate(data) if byte < 128) + 1
    return data[length:]


def _set(result: Properties, packet: int, name: str, value: Any) -> None:
    name = "reasonstring" if name == _REASON else name
    if packet in _PACKETS.get(name, ()) and name != "userproperty":
        setattr(result, _PAHO_NAME[name], _converted(name, value))
        return
    for item in value if isinstance(value, list | tuple) else [value]:
        result.UserProperty = (name, _text(item))


def _converted(name: str, value: Any) -> Any:
    if name in _BINARY:
        return value.encode() if isinstance(value, str) else bytes(value)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    return value


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def as_dict(properties: Properties | None) -> dict[str, Any]:
    """What was received, by names in lower case. Of several user properties with one name all values are in a list;
    so are several subscription identifiers."""
    if properties is None:
        return {}
    found: dict[str, Any] = {}
    for name, value in vars(properties).items():
        if name in _LOWER and name != "UserProperty":
            found[_LOWER[name]] = value[0] if isinstance(value, list) and len(value) == 1 else value
    for name, value in getattr(properties, "UserProperty", ()):
        _add(found, name, value)
    return found


def _add(found: dict[str, Any], name: str, value: str) -> None:
    if name not in found:
        found[name] = value
    elif isinstance(found[name], list):
        found[name].append(value)
    elif name not in _LOWER.values():
        found[name] = [found[name], value]

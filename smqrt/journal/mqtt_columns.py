"""Properties of MQTT messages in the journal: a JSON object as text, and back.

The keys are those of the clients of smqrt: the standard's names without spaces, in lower case, and user properties with
their own names. A user property that occurs several times has a list of values.

    {"contenttype": "application/json", "messageexpiryinterval": 60, "unit": "C"}

Correlation data are bytes: the JSON has them in base64.
"""

from __future__ import annotations

import base64
import binascii
import json
from math import ceil

from smqrt.broker.mqtt.messages import NO_EXPIRY_S, MqttBatch
from smqrt.errors import JournalError
from smqrt.wire.mqtt.fields import PacketType, Properties, unpack_properties

MAX_JSON_BYTES = 64 << 10
"""Longer properties are not recorded; the row has their size instead."""
TOO_LONG = "omittedbytes"
_EXPIRY, _CORRELATION = "messageexpiryinterval", "correlationdata"

Key = tuple[bytes, int | None]
"""The packed properties of a message, and its remaining seconds; None without an expiry."""
NO_PROPERTIES: Key = (b"", None)


def key_of(batch: MqttBatch, now_s: float) -> Key:
    """Return what the properties of a batch consist of.

    Args:
        batch: the messages.
        now_s: the time of the clock of `MqttBatch.expires_s`.
    """
    if batch.expires_s == NO_EXPIRY_S:
        return batch.properties, None
    return batch.properties, max(ceil(batch.expires_s - now_s), 0)


def properties_json(key: Key) -> str:
    """Return the JSON for the column `properties`."""
    packed, expiry_s = key
    found: dict[str, object] = dict(unpack_properties(packed, 0, len(packed), PacketType.PUBLISH))
    data = found.get(_CORRELATION)
    if isinstance(data, bytes):
        found[_CORRELATION] = base64.b64encode(data).decode("ascii")
    if expiry_s is not None:
        found[_EXPIRY] = expiry_s
    text = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
    return text if len(text.encode()) <= MAX_JSON_BYTES else json.dumps({TOO_LONG: len(packed)})


def properties_of(text: str | None) -> Properties:
    """Return the properties of a row, as a client of smqrt publishes them.

    Args:
        text: the value of the column.

    Raises:
        JournalError: it is not one that a hub has written.
    """
    try:
        found: Properties = json.loads(text or "{}")
        if _CORRELATION in found:
            found[_CORRELATION] = base64.b64decode(str(found[_CORRELATION]), validate=True)
    except (ValueError, TypeError, RecursionError, binascii.Error) as error:
        raise JournalError(
            f"The column properties has {text[:80] if text else text!r}, not MQTT properties: {error}."
        ) from None
    found.pop(TOO_LONG, None)
    return found

"""Brokers with fewer features than a hub: what they announce, and what they refuse."""

from __future__ import annotations

import pytest

from smqrt.broker.mqtt.features import ALL_FEATURES, Features
from smqrt.errors import MqttError
from smqrt.wire.mqtt.fields import Reason
from smqrt.wire.mqtt.packets import ConnectPacket, WillMessage, encode
from tests.broker.mqtt.memory_devices import DeviceHub

BASIC = Features(0, False, wildcards=False, shared=False)


def test_what_is_missing_is_announced() -> None:
    assert ALL_FEATURES.missing == {}
    assert BASIC.missing == {
        "maximumqos": 0,
        "retainavailable": 0,
        "wildcardsubscriptionavailable": 0,
        "sharedsubscriptionavailable": 0,
    }


@pytest.mark.parametrize(
    ("qos", "retain", "version", "code"),
    [
        (0, False, 5, None),
        (1, False, 5, Reason.QOS_NOT_SUPPORTED),
        (1, False, 4, Reason.QOS_NOT_SUPPORTED),
        (0, True, 5, Reason.RETAIN_NOT_SUPPORTED),
        (0, True, 4, None),
    ],
)
def test_messages_are_checked(qos: int, retain: bool, version: int, code: Reason | None) -> None:
    ALL_FEATURES.check(qos, retain, version, "PUBLISH")
    if code is None:
        BASIC.check(qos, retain, version, "PUBLISH")
        return
    with pytest.raises(MqttError) as failure:
        BASIC.check(qos, retain, version, "PUBLISH")
    assert failure.value.code == code


def test_a_will_of_3_1_1_loses_its_qos_and_is_not_retained() -> None:
    hub = DeviceHub()
    hub.devices.features = BASIC
    reader, ada = hub.device(), hub.device()
    reader.feed(encode(ConnectPacket(4, "reader"), 4) + b"\x82\x06\0\1\0\1w\2")
    ada.feed(encode(ConnectPacket(4, "ada", will=WillMessage("w", b"gone", 1, True)), 4))
    reader.take()
    ada.lost()
    assert reader.take() == b"\x30\x07\0\1wgone"
    assert not hub.devices.retained.by_name

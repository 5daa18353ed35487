"""Features of MQTT that a broker offers to its clients; CONNACK of MQTT 5 announces the others."""

from __future__ import annotations

from typing import NamedTuple

from smqrt.errors import MqttError
from smqrt.wire.mqtt.fields import Reason


class Features(NamedTuple):
    """The features of a broker; a hub offers all.

    Attributes:
        max_qos: the highest QoS of messages; subscriptions with a higher one get this one.
        retain: whether messages can be retained.
        wildcards: whether topic filters may have wildcards.
        shared: whether there are shared subscriptions.
        level_3: whether clients of MQTT 3.1 may connect.
        own_topics: whether `$SYS` and `$smq` are topics of the broker; otherwise they are topics like all others.
    """

    max_qos: int = 2
    retain: bool = True
    wildcards: bool = True
    shared: bool = True
    level_3: bool = True
    own_topics: bool = True

    @property
    def missing(self) -> dict[str, object]:
        """The properties of CONNACK that announce what the broker does not offer [MQTT-3.2.2-9], [MQTT-3.2.2-13]."""
        found: dict[str, object] = {}
        if self.max_qos < 2:
            found["maximumqos"] = self.max_qos
        if not self.retain:
            found["retainavailable"] = 0
        if not self.wildcards:
            found["wildcardsubscriptionavailable"] = 0
        if not self.shared:
            found["sharedsubscriptionavailable"] = 0
        return found

    def check(self, qos: int, retain: bool, version: int, what: str) -> None:
        """Check a message or will of a client.

        Args:
            qos: its QoS.
            retain: whether it is to be retained.
            version: the version of the client. CONNACK announces nothing before MQTT 5, so the flag `retain` and the
                QoS of a will are ignored there.
            what: "PUBLISH" or "the will", for the error.

        Raises:
            MqttError: QOS_NOT_SUPPORTED [MQTT-3.2.2-11], [MQTT-3.2.2-12], or RETAIN_NOT_SUPPORTED [MQTT-3.2.2-14].
        """
        if qos > self.max_qos:
            text = f"{what} has QoS {qos}; this broker supports QoS {self.max_qos} at most"
            raise MqttError(Reason.QOS_NOT_SUPPORTED, text)
        if retain and not self.retain and version == 5:
            raise MqttError(
                Reason.RETAIN_NOT_SUPPORTED, f"{what} has the retain flag; this broker does not retain messages"
            )


ALL_FEATURES = Features()

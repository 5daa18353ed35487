"""How a connection to a broker ends, or does not come about: what `onstatus` is told (smq.md §8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from paho.mqtt.enums import ConnackCode
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.reasoncodes import ReasonCode

_EMPTY: Mapping[str, Any] = MappingProxyType({})

WORTH_ANOTHER_TRY = {3, 0x88, 0x89, 0x8B, 0x8D, 0x96, 0x97, 0x9F}
"""Refusals and disconnects that time may cure: unavailable, busy, shutting down, keep-alive timeout, rates, quota."""

_V3_WORDS = {code.value: code.name.removeprefix("CONNACK_REFUSED_").replace("_", " ").lower() for code in ConnackCode}


@dataclass(frozen=True)
class End:
    """Why a connection ended.

    Attributes:
        type: "mqtt" or "sock".
        code: with "mqtt": "connect" (refused), "disconnect", "protocolerror", "pingtimeout"; with "sock": an error word
            (bas-api §15) or the trust status of a certificate: "cn", "cert", "certcn", "none".
        status: with "connect" `{"sessionpresent", "reasoncode", "properties"}`, with "disconnect" the latter two.
        detail: one sentence for a log.
    """

    type: str
    code: str
    status: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    detail: str = ""

    @property
    def can_reconnect(self) -> bool:
        """Whether another attempt may help; what clients without an `onstatus` go by."""
        if self.type == "sock":
            return self.code not in ("cn", "cert", "certcn", "none", "sysshutdown")
        if self.code in ("connect", "disconnect"):
            return self.status["reasoncode"] in WORTH_ANOTHER_TRY
        return True

    def __str__(self) -> str:
        return self.detail or f"{self.type}: {self.code}"


def refused(code: int, version: int, status: Mapping[str, Any]) -> End:
    """The end of a connection whose CONNECT was refused."""
    return End("mqtt", "connect", status, f"the broker refused the connection: {reason_words(code, version)}")


def disconnected(status: Mapping[str, Any]) -> End:
    """The end that a DISCONNECT of the broker brings."""
    words = reason_words(status["reasoncode"], 5, PacketTypes.DISCONNECT)
    return End("mqtt", "disconnect", status, f"the broker ended the connection: {words}")


def reason_words(code: int, version: int, packet: int = PacketTypes.CONNACK) -> str:
    """What a reason code says, such as "not authorized"."""
    if version != 5:
        return _V3_WORDS.get(code, f"reason {code}")
    try:
        return str(ReasonCode(packet, identifier=code)).lower()
    except (KeyError, ValueError):
        return f"reason {code}"

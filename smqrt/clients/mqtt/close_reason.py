"""Close reasons of connections to a broker, and what `onstatus` wants to be done then (spec: smq §8)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import cast

from smqrt.wire.mqtt.reasons import Reason, reason_words

log = logging.getLogger("smqrt.mqtt")

DEFAULT_DELAY_S = 5.0
LONGEST_DELAY_S = 86_400.0
_EMPTY: Mapping[str, object] = MappingProxyType({})
_RUN_WORDS: dict[object, str] = {
    Reason.PACKET_TOO_LARGE: "overflow",
    Reason.PROTOCOL_ERROR: "unknowncp",
    Reason.MALFORMED_PACKET: "invalidresp",
}
WORTH_ANOTHER_TRY = {
    3,  # of MQTT 3.1.1: server unavailable
    Reason.SERVER_UNAVAILABLE,
    Reason.SERVER_BUSY,
    Reason.SERVER_SHUTTING_DOWN,
    Reason.KEEP_ALIVE_TIMEOUT,
    Reason.MESSAGE_RATE_TOO_HIGH,
    Reason.QUOTA_EXCEEDED,
    Reason.CONNECTION_RATE_EXCEEDED,
}
"""Refusals and disconnects that time may cure."""

OnStatus = Callable[[str, str, Mapping[str, object]], object]
"""`f(type, code, status)`, called when a connection stands, was refused, or ended; see `MqttCloseReason` for the words.

On `("mqtt", "connect", {"sessionpresent", "reasoncode": 0, "properties"})`: a true value keeps the connection.
Otherwise: None or False gives up, True tries again after 5 seconds, a number after so many seconds. When it raises, or
answers something else, the client goes on as one without `onstatus`, and the log tells; so it does, without a word,
when the answer is NotImplemented."""


@dataclass(frozen=True)
class MqttCloseReason:
    """Why a connection ended.

    Attributes:
        type: "mqtt" or "sock".
        code: with "mqtt": "connect" (refused), "disconnect", "protocolerror", "pingtimeout"; with "sock": an error word
            (spec: bas-api §15) or the trust status of a certificate: "cn", "cert", "certcn", "none".
        status: with "connect" `{"sessionpresent", "reasoncode", "properties"}`, with "disconnect" the latter two.
        detail: one sentence for a log.
    """

    type: str
    code: str
    status: Mapping[str, object] = field(default_factory=lambda: _EMPTY)
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


def refused(code: int, version: int, status: Mapping[str, object]) -> MqttCloseReason:
    """The broker refused CONNECT."""
    return MqttCloseReason(
        "mqtt", "connect", status, f"the broker refused the connection: {reason_words(code, version)}"
    )


def disconnected(code: int, properties: Mapping[str, object]) -> MqttCloseReason:
    """The broker sent DISCONNECT."""
    status = {"reasoncode": code, "properties": dict(properties)}
    words = "normal disconnection" if code == 0 else reason_words(code, 5)
    return MqttCloseReason("mqtt", "disconnect", status, f"the broker ended the connection: {words}")


def violated(code: int, error: Exception) -> MqttCloseReason:
    """The broker broke a rule, or did not answer a ping."""
    if code == Reason.KEEP_ALIVE_TIMEOUT:
        return MqttCloseReason("mqtt", "pingtimeout", detail=str(error))
    return MqttCloseReason(
        "mqtt", "protocolerror", {"reasoncode": int(code)}, f"the broker broke the protocol: {error}"
    )


def connect_error(end: MqttCloseReason | None) -> tuple[str | int, str | bool]:
    """Return how `mqtt3c.connect` failed: the error, and its kind (spec: smq §9).

    Returns:
        A CONNACK number and True, "invalidresp" and "mqtt", or a socket or trust word and "sock".
    """
    if end is None:
        return "socketclosed", "sock"
    if end.code == "connect":
        return cast(int, end.status["reasoncode"]), True
    return ("invalidresp", "mqtt") if end.type == "mqtt" else (end.code, "sock")


def run_word(end: MqttCloseReason | None) -> str:
    """Return the word with which `run` ends (spec: smq §9): "disconnect" when this side asked for it."""
    if end is None:
        return "disconnect"
    if end.code == "pingtimeout":
        return "pingresp"
    if end.code == "protocolerror":
        return _RUN_WORDS.get(end.status.get("reasoncode"), "invalidresp")
    return end.code


def delay_of(answer: object, default_s: float | None) -> float | None:
    """Seconds until the next attempt, as `onstatus` wants it; None for never."""
    if answer is None or answer is False:
        return None
    if answer is True:
        return DEFAULT_DELAY_S
    if answer is NotImplemented:
        return default_s
    if isinstance(answer, int | float) and 0 <= answer <= LONGEST_DELAY_S:
        return float(answer)
    log.error(
        "onstatus answered %r; it must answer None or False, True, or seconds from 0 to %.0f", answer, LONGEST_DELAY_S
    )
    return default_s

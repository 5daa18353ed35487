"""Situations of the MQTT standards (`mqtt.json`), played against both sides of `smqrt.wire.mqtt`; see README.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smqrt.errors import MqttError
from smqrt.wire.mqtt.client import MqttClientEndpoint
from smqrt.wire.mqtt.endpoint import ConnectionState, MqttEndpoint, MqttSession, OutgoingMessage
from smqrt.wire.mqtt.fields import Props, is_topic_filter
from smqrt.wire.mqtt.packets import ConnectPacket, PublishPacket, SubscribePacket, Subscription, UnsubscribePacket
from smqrt.wire.mqtt.server import MqttServerEndpoint
from tests.conformance.mqtt_script import data_of

CASES = json.loads(Path(__file__).with_name("mqtt.json").read_text())
PLAYED = [(case, version) for case in CASES for version in case.get("versions", [4, 5])]


class ToldMessage(OutgoingMessage):
    """A message that tells when it is done."""

    told: Callable[[str], None]

    def finish(self, error: str | int | None = None) -> None:
        self.told(f"finished {error}")


class Player:
    """One side of a connection, over as many connections as the case has, and what it was told."""

    def __init__(self, case: dict[str, Any], version: int) -> None:
        self.case, self.version = case, version
        self.told: list[str] = []
        self.now_s = 0.0
        self.session: MqttSession | None = None
        self.endpoint: MqttEndpoint
        self.connect(True)

    def connect(self, is_first: bool) -> None:
        if self.case["side"] == "server":
            self.endpoint = MqttServerEndpoint(self, self.case.get("limit", 1000))
            return
        if is_first:
            self.endpoint = MqttClientEndpoint(self, self.version, "c", **self.case.get("client", {}))
        assert isinstance(self.endpoint, MqttClientEndpoint)
        self.endpoint.connect(is_first, self.case.get("keepalive", 0), self.case.get("connect", {}))

    def run(self) -> None:
        for step in self.case["steps"]:
            error = self.play(step)
            where = f"{self.case['name']}, MQTT {self.version}, {step}"
            sent = self.endpoint.take(self.now_s)
            self.endpoint.written()
            assert sent.hex(" ") == data_of(step.get("expect", ""), self.version).hex(" "), where
            assert error == step.get("code"), where
            assert self.told == step.get("told", []), where
            self.told.clear()
            if "state" in step:
                assert self.endpoint.state is ConnectionState[step["state"]], where

    def play(self, step: dict[str, Any]) -> int | None:
        if "do" in step:
            name, *arguments = step["do"].split(" ")
            getattr(self, f"do_{name}")(*arguments)
        self.now_s = step.get("at", self.now_s)
        if "send" in step:
            self.endpoint.feed(data_of(step["send"], self.version), self.now_s)
        try:
            while self.endpoint.next():
                pass
            self.endpoint.check_alive(self.now_s)  # type: ignore[attr-defined]
        except MqttError as error:
            self.endpoint.fail(error)
            return error.code
        return None

    # ---- what this side does by itself

    def do_publish(self, topic: str, payload: str, qos: str) -> None:
        message = ToldMessage(topic.encode(), payload.encode(), int(qos), False, b"")
        message.told = self.told.append
        assert self.endpoint.can_send(int(qos))
        self.endpoint.send(message)

    def do_cannot_send(self, qos: str) -> None:
        assert not self.endpoint.can_send(int(qos))

    def do_send_again(self) -> None:
        self.endpoint.send_again()

    def do_subscribe(self, topic: str, options: str) -> None:
        assert isinstance(self.endpoint, MqttClientEndpoint)
        self.endpoint.subscribe([Subscription(topic, int(options))], {})

    def do_unsubscribe(self, topic: str) -> None:
        assert isinstance(self.endpoint, MqttClientEndpoint)
        self.endpoint.unsubscribe([topic], {})

    def do_disconnect(self) -> None:
        self.endpoint.disconnect()

    def do_reconnect(self) -> None:
        self.endpoint.abort()
        self.connect(False)

    # ---- events

    def on_wake(self) -> None:
        pass

    def on_room(self) -> None:
        pass

    def on_left_out(self) -> None:
        self.told.append("left out")

    def on_message(self, message: PublishPacket) -> int:
        self.told.append(f"{message.topic} {message.payload.decode()} {message.flags:x}")
        return int(self.case.get("refuse", 0))

    def on_disconnect(self, code: int, properties: Props) -> None:
        self.told.append(f"disconnect {code:x}")

    def on_connack(self, code: int, is_session_present: bool, properties: Props) -> None:
        self.told.append(f"connack {code:x} {is_session_present}")

    def on_answer(self, packet_identifier: int, codes: bytes, properties: Props) -> None:
        self.told.append(f"answer {packet_identifier} {codes[0]:x}")

    def on_connect(self, packet: ConnectPacket) -> None:
        assert isinstance(self.endpoint, MqttServerEndpoint)
        is_kept = self.session is not None and not packet.clean_start
        self.session = self.session if is_kept and self.session else MqttSession()
        if code := self.case.get("refuse_connect", 0):
            self.endpoint.refuse(code)
        else:
            self.endpoint.accept(self.session, is_kept, self.case.get("connack", {}) if self.version == 5 else {})

    def on_subscribe(self, packet: SubscribePacket) -> None:
        assert isinstance(self.endpoint, MqttServerEndpoint)
        wanted = packet.subscriptions
        self.endpoint.answer(packet, bytes(one.options & 3 if is_topic_filter(one.topic) else 0x8F for one in wanted))

    def on_unsubscribe(self, packet: UnsubscribePacket) -> None:
        assert isinstance(self.endpoint, MqttServerEndpoint)
        self.endpoint.answer(packet, bytes(0x11 for _ in packet.topics))


@pytest.mark.parametrize(("case", "version"), PLAYED, ids=[f"{c['side']}-{c['name']}-{v}" for c, v in PLAYED])
def test_situation(case: dict[str, Any], version: int) -> None:
    Player(case, version).run()


def test_names_are_unique_and_statements_named() -> None:
    names = [(case["side"], case["name"]) for case in CASES]
    assert len(set(names)) == len(names)
    assert all(case["statements"] for case in CASES)

"""Situations of the MQTT standards (`mqtt.json`), played against our client and our server; see README.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smqrt.broker.mqtt.features import Features
from smqrt.broker.mqtt.messages import Message
from smqrt.broker.sessions import SessionState
from smqrt.broker.state import Hooks
from smqrt.errors import MqttError
from smqrt.settings.limits import MqttSettings
from smqrt.wire.mqtt.client import MqttClientEndpoint
from smqrt.wire.mqtt.endpoint import ConnectionState, OutgoingMessage
from smqrt.wire.mqtt.fields import Props
from smqrt.wire.mqtt.packets import PacketSplitter, PublishPacket, Subscription
from tests.broker.mqtt.memory_devices import DeviceHub
from tests.conformance.mqtt_script import data_of

CASES = json.loads(Path(__file__).with_name("mqtt.json").read_text())
PLAYED = {
    side: [(case, version) for case in CASES if case["side"] == side for version in case.get("versions", [4, 5])]
    for side in ("client", "server")
}


class ToldMessage(OutgoingMessage):
    """A message that tells when it is done."""

    told: Callable[[str], None]

    def finish(self, error: str | int | None = None) -> None:
        self.told(f"finished {error}")


class Player:
    """Our client, over as many connections as the case has, and what it was told."""

    def __init__(self, case: dict[str, Any], version: int) -> None:
        self.case, self.version = case, version
        self.told: list[str] = []
        self.now_s = 0.0
        self.endpoint = MqttClientEndpoint(self, version, "c", **case.get("client", {}))
        self.connect(True)

    def connect(self, is_first: bool) -> None:
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
            self.endpoint.check_alive(self.now_s)
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
        self.endpoint.subscribe([Subscription(topic, int(options))], {})

    def do_unsubscribe(self, topic: str) -> None:
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


class ServerPlayer:
    """A hub with one client, over as many connections as the case has."""

    def __init__(self, case: dict[str, Any], version: int) -> None:
        self.case, self.version = case, version
        connack = case.get("connack", {})
        limits = MqttSettings(
            packet_bytes=case.get("limit", 1000),
            receive_maximum=connack.get("receivemaximum", 20),
            aliases=connack.get("topicaliasmaximum", 0),
        )
        hooks = Hooks(
            authenticate=self.refuse if "refuse_connect" in case else None,
            permittop=(lambda name, is_sub, session: is_sub) if "refuse" in case else None,
        )
        self.hub = DeviceHub(hooks, limits)
        max_qos, retain = connack.get("maximumqos", 2), bool(connack.get("retainavailable", 1))
        self.hub.devices.features = Features(max_qos, retain, level_3=False)
        self.told: list[str] = []
        self.hub.broker.subscribe_filter("#", self.on_message)
        self.client = self.hub.device()

    def refuse(self, credentials: bytes, session: Any) -> None:
        session.refuse_mqtt(self.case["refuse_connect"])

    def on_message(self, data: Any, *numbers: int) -> None:
        name = self.hub.broker.topic_table.by_key[numbers[1].to_bytes(4)].name
        assert name is not None
        qos, retain, *_ = data.attributes(0.0)
        self.told.append(f"{name.decode()} {data.decode()} {qos << 1 | retain:x}")

    def run(self) -> None:
        """Play all steps. What a session sends again comes with its CONNACK, so all packets are compared at the end."""
        expected, told, got = b"", list[str](), b""
        for step in self.case["steps"]:
            if "do" in step:
                name, *arguments = step["do"].split(" ")
                getattr(self, f"do_{name}")(*arguments)
            if "send" in step:
                self.client.feed(data_of(step["send"], self.version))
            got += self.client.take()
            expected += data_of(step.get("expect", ""), self.version)
            told += [self.without_dup(one) for one in step.get("told", []) if not one.startswith(("finish", "disc"))]
            if step.get("state") == "CLOSED":
                assert self.client.session.closed, step
            elif step.get("state") == "OPEN":
                assert self.client.session.state is SessionState.CONNECTED, step
        assert self.comparable(got) == self.comparable(expected)
        assert self.told == ([] if "refuse" in self.case else told)

    @staticmethod
    def without_dup(told: str) -> str:
        return f"{told[:-1]}{int(told[-1], 16) & 7:x}"

    def comparable(self, data: bytes) -> list[tuple[int, bytes]]:
        """Packets without the properties of CONNACK, CONNACK with a reason, and DISCONNECT, which the hub chooses."""
        splitter, found = PacketSplitter(), list[tuple[int, bytes]]()
        splitter.feed(data)
        while (packet := splitter.next()) is not None:
            first, body = packet
            found.append((first, body[:2] if first == 0x20 else body[:1] if first == 0xE0 else body))
        assert splitter.is_empty
        return found

    # ---- what the hub does by itself

    def do_publish(self, topic: str, payload: str, qos: str) -> None:
        device = self.client.session.device
        assert device is not None
        message = Message(topic.encode(), payload.encode(), int(qos), False)
        if message.qos:
            device.enqueue(message)
        else:
            self.client.session.send_message(message, 0, False)

    def do_send_again(self) -> None:
        pass

    def do_reconnect(self) -> None:
        self.client.lost()
        self.client = self.hub.device()


def names(side: str) -> list[str]:
    return [f"{case['name']}-{version}" for case, version in PLAYED[side]]


@pytest.mark.parametrize(("case", "version"), PLAYED["client"], ids=names("client"))
def test_client(case: dict[str, Any], version: int) -> None:
    Player(case, version).run()


@pytest.mark.parametrize(("case", "version"), PLAYED["server"], ids=names("server"))
def test_server(case: dict[str, Any], version: int) -> None:
    ServerPlayer(case, version).run()


def test_names_are_unique_and_statements_named() -> None:
    names = [(case["side"], case["name"]) for case in CASES]
    assert len(set(names)) == len(names)
    assert all(case["statements"] for case in CASES)

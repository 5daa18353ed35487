"""A hub with MQTT sessions but without sockets and packets: what reaches each client."""

from __future__ import annotations

from collections.abc import Iterable

from smqrt.broker.broker import Broker
from smqrt.broker.mqtt.device import Device
from smqrt.broker.mqtt.devices import Devices
from smqrt.broker.mqtt.filters import Options
from smqrt.broker.mqtt.messages import Message, Run, mqtt_batch
from smqrt.broker.routes import destination
from smqrt.broker.state import Hooks
from smqrt.settings.limits import MqttSettings
from smqrt.wire import smq
from tests.broker.memory_clients import Crowd, settle


class Receiver:
    """A connected client.

    Attributes:
        got: (topic, payload, qos, retain, identifiers) of each message.
        numbers: the packet identifiers that wait for an acknowledgement.
    """

    peer_limit_bytes = 1 << 20  # with a limit, messages with QoS 1 and 2 come one by one

    def __init__(self, etid: int, window: int = 20) -> None:
        self.etid, self.window, self.has_room = etid, window, True
        self.got: list[tuple[bytes, bytes, int, bool, bytes]] = []
        self.numbers: list[int] = []
        self.released: list[int] = []
        self.again: list[int] = []

    def send_run(self, run: Run, retain: bool, identifiers: bytes) -> None:
        self.got += [(run.name, payload, 0, retain, identifiers) for payload, _ in run.payloads]

    def send_message(self, message: Message, number: int, is_dup: bool) -> bool:
        self.got.append((message.name, message.payload, message.qos, message.retain, message.identifiers))
        if number:
            (self.again if is_dup else self.numbers).append(number)
        return True

    def send_encoded(self, packets: bytes) -> None:
        raise AssertionError("messages come one by one")

    def send_release(self, number: int) -> None:
        self.released.append(number)

    def take(self) -> list[bytes]:
        """The payloads since the last call."""
        settle()
        got, self.got = self.got, []
        return [payload for _, payload, *_ in got]


class MqttHub:
    """A hub whose clock is `now_s`."""

    def __init__(self, hooks: Hooks | None = None, settings: MqttSettings | None = None) -> None:
        self.crowd = Crowd(hooks)
        self.now_s = 0.0
        self.later: list[tuple[float, object]] = []
        self.broker: Broker = self.crowd.broker
        self.broker.clock = lambda: self.now_s
        self.broker.call_later = lambda delay_s, function: self.later.append((delay_s, function))
        self.devices = Devices(self.broker, settings)
        self._etids = iter(range(5000, 6000))

    def tick(self, seconds: float) -> None:
        """Let time pass, and do what is due every second."""
        self.now_s += seconds
        due, self.later = self.later, []
        for _, function in due:
            function()  # type: ignore[operator]
        settle()

    def client(self, client_id: str, *filters: str, qos: int = 0, clean: bool = True) -> tuple[Device, Receiver]:
        """A connected client with subscriptions; its session is kept."""
        device, _ = self.devices.open(client_id, clean)
        device.expiry_s = 60
        receiver = Receiver(next(self._etids))
        device.resume(receiver)
        for text in filters:
            self.subscribe(device, text, Options(qos))
        return device, receiver

    def subscribe(self, device: Device, text: str, options: Options) -> None:
        for _ in self.devices.subscribe(device, text, options):
            pass
        settle()

    def publish(self, name: bytes, *payloads: bytes, qos: int = 0, retain: bool = False, publisher: int = 7) -> bool:
        """Publish as an MQTT client; gives whether the topic was needed."""
        topic = self.devices.topic_for(name)
        if retain:
            for payload in payloads:
                self.devices.retained.set(Message(name, payload, qos, True))
        if topic is None:
            return False
        frames = b"".join(smq.publish_frame(topic.id, publisher, 0, payload) for payload in payloads)
        destination(self.broker, topic.id, publisher, self.broker.server).deliver(mqtt_batch(frames, qos, retain))
        settle()
        return True

    def retained(self, text: str, qos: int = 2) -> Iterable[tuple[bytes, bytes]]:
        """Names and payloads of the retained messages for a new subscription."""
        found = self.devices.retained.matching(text, Options(qos))
        return [(one.name, one.payload) for one in found if one is not None]

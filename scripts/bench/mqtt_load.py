"""One contestant of scripts/bench/mqtt: sends messages to itself over a broker for a while, and prints what it did.

A thousand messages are on their way at any time: each that arrives sends the next. Prints the messages a second, and
the longest time that another greenlet had to wait, in ms: by the clock, and how much of it this process computed.
"""

from __future__ import annotations

import sys
import time

ON_THEIR_WAY = 1000
PAYLOAD = b"x" * 64
INFLIGHT = 100
WARM_UP_S = 0.3

LUA = """
local port, qos, total, report = PORT, {qos = QOS}, 0, report
local mqtt
mqtt = require"mqttc".create("127.0.0.1", function(_, code)
  if code ~= "connect" then return false end
  mqtt:subscribe("bench", function() for _ = 1, ON_THEIR_WAY do mqtt:publish("bench", PAYLOAD, qos) end end, qos)
  return true
end, function(topic, payload)
  total = total + 1
  if total % 100 == 0 then report(total) end
  mqtt:publish(topic, payload, qos)
end, {port = port})
"""


def paho(port: int, qos: int, seconds: float) -> None:
    """The threaded loop of paho itself."""
    import paho.mqtt.client as mqtt
    from paho.mqtt.enums import MQTTProtocolVersion

    total = 0

    def on_message(client: mqtt.Client, _data: object, message: mqtt.MQTTMessage) -> None:
        nonlocal total
        total += 1
        client.publish(message.topic, message.payload, qos)

    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, protocol=MQTTProtocolVersion.MQTTv5)
    client.max_inflight_messages = INFLIGHT
    client.on_message = on_message
    client.on_connect = lambda *_: client.subscribe("bench", qos)
    client.on_subscribe = lambda *_: [client.publish("bench", PAYLOAD, qos) for _ in range(ON_THEIR_WAY)]
    client.connect("127.0.0.1", port)
    client.loop_start()
    time.sleep(WARM_UP_S)
    before, began = total, time.monotonic()
    time.sleep(seconds)
    print((total - before) / (time.monotonic() - began), 0.0, 0.0)
    client.disconnect()


def python(port: int, qos: int, seconds: float) -> None:
    """smqrt.mqtt."""
    from smqrt.mqtt import MqttClient

    total = 0

    def onpub(topic: str, payload: bytes, _properties: object, _cpt: int) -> None:
        nonlocal total
        total += 1
        client.publish(topic, payload, qos)

    client = MqttClient(f"127.0.0.1:{port}", onpub=onpub, inflight=INFLIGHT)
    client.subscribe(
        "bench", onsuback=lambda *_: [client.publish("bench", PAYLOAD, qos) for _ in range(ON_THEIR_WAY)], qos=qos
    )
    watch(lambda: total, seconds)


def lua(port: int, qos: int, seconds: float) -> None:
    """require"mqttc"."""
    from smqrt.apps.lua import api
    from smqrt.apps.lua.vm import Services, Vm

    total = 0

    def report(count: int) -> None:
        nonlocal total
        total = count

    vm = Vm()
    api.install(vm, Services())
    vm.namespace("bench", {"report": report}, source=b"local core, py = ... report = py.report")
    values = {"PORT": port, "QOS": qos, "ON_THEIR_WAY": ON_THEIR_WAY, "PAYLOAD": f"'{PAYLOAD.decode()}'"}
    header = "".join(f"local {name} <const> = {value} " for name, value in values.items())
    vm.eval(header + LUA)
    watch(lambda: total, seconds)


def watch(total: object, seconds: float) -> None:
    """Measures, with a greenlet that wants to run every millisecond."""
    import gevent

    waits: list[float] = []
    held: list[float] = []

    def tick() -> None:
        while True:
            before, computed = time.monotonic(), time.process_time()
            gevent.sleep(0.001)
            waits.append(time.monotonic() - before - 0.001)
            held.append(time.process_time() - computed)

    gevent.sleep(WARM_UP_S)
    gevent.spawn(tick)
    before, began = total(), time.monotonic()  # type: ignore[operator]
    gevent.sleep(seconds)
    print((total() - before) / (time.monotonic() - began), 1000 * max(waits), 1000 * max(held))  # type: ignore[operator]


if __name__ == "__main__":
    name, port, qos, seconds = sys.argv[1:]
    {"paho": paho, "python": python, "lua": lua}[name](int(port), int(qos), float(seconds))

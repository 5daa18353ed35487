"""Sessions of MQTT clients that are damaged at random: every error is one of MQTT, and nothing is left of them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from smqrt.settings.limits import MqttSettings
from tests.broker.mqtt.memory_devices import DeviceHub
from tests.conformance.mqtt_script import data_of

SESSIONS = 20_000
PACKETS = """
C x
K x
10: M V ee 00 3c P 'x' P 'w/x' 'gone' 'user' 'secret'
5| 10: M V 26 00 00 { 11 00000005 21 0003 27 00000100 } 'y' { 02 00000009 18 00000001 } 'will' 'x'
82: 00 01 P 't' 00 'a/+' 01 '#' 02
82: 00 02 P '$share/g/t' 01 '+/b' 02 'a/b/c/d' 00
a2: 00 03 P 't' 'a/+'
30: 't' P ~hello / 30: 't' P ~again / 30: 't' P ~more
31: 'a/b' P ~kept
32: 'a/b' 00 04 P ~one
34: 'a/c' 00 05 P ~two / 62: 00 05
35: '$x/y' 00 06 P ~kept
40: 00 01
50: 00 01 / 70: 00 01
50: 00 02
c0:
5| 30: 't' { 23 00 01 26 'k' 'v' 03 'text' 02 00 00 00 09 } ~x / 5| 30: '' { 23 00 01 } ~y
5| 32: 'r' 00 07 { 08 'answer' 09 'id' 01 01 } ~q
5| 82: 00 08 { 0b 05 26 'k' 'v' } 'r' 2d
5| e0: 04 { 11 00 00 00 03 }
e0:
"""


def scripts(version: int) -> list[bytes]:
    return [data for line in PACKETS.strip().splitlines() if (data := data_of(line, version))]


def flipped(data: bytearray, random: Random) -> None:
    data[random.randrange(len(data))] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))


def inserted(data: bytearray, random: Random) -> None:
    at = random.randrange(len(data))
    data[at:at] = random.randbytes(random.randrange(1, 4))


def removed(data: bytearray, random: Random) -> None:
    at = random.randrange(len(data))
    del data[at : at + random.randrange(1, 5)]


def repeated(data: bytearray, random: Random) -> None:
    at = random.randrange(len(data))
    data[at:at] = data[at : at + random.randrange(1, 20)]


def cut(data: bytearray, random: Random) -> None:
    del data[random.randrange(1, len(data)) :]


def one_more(data: bytearray, random: Random) -> None:
    at = random.randrange(len(data))
    data[at] = (data[at] + random.choice((1, -1))) % 256


DAMAGES: tuple[Callable[[bytearray, Random], None], ...] = (flipped, inserted, removed, repeated, cut, one_more)


def test_damaged_sessions() -> None:
    random = Random(20261129)
    hub = DeviceHub(limits=MqttSettings(packet_bytes=4096, retained=50, filters=20, queued_messages=20))
    packets = {version: scripts(version) for version in (3, 4, 5)}
    answered = 0
    for number in range(SESSIONS):
        known = packets[random.choice((3, 4, 5, 5))]
        first = random.choice([data for data in known if data[0] == 0x10])
        rest = b"".join(random.choices([data for data in known if data[0] != 0x10], k=random.randrange(3, 12)))
        is_first_damaged = random.random() < 0.2
        data = bytearray(first + rest if is_first_damaged else rest)
        for _ in range(random.randrange(1, 4)):
            if len(data) > 1:
                random.choice(DAMAGES)(data, random)
        device = hub.device()
        device.feed(bytes(data) if is_first_damaged else first + data)
        answered += bool(device.take())
        device.lost()
        if not number % 100:
            hub.at(hub.now_s + 10)
    assert answered > SESSIONS // 2
    hub.at(hub.now_s + 8 * 86400)  # no session is kept for longer
    hub.at(hub.now_s + 1)
    assert not hub.left(), hub.left()
    assert len(hub.devices.retained.by_name) <= 50
    assert hub.devices.retained.size_bytes == sum(one.size_bytes for one in hub.devices.retained.by_name.values())
    assert sum(hub.broker.stats.ends.values()) == SESSIONS

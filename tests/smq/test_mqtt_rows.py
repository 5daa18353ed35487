"""Many messages of MQTT clients: none is lost, doubled or reordered, however the bytes are cut."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import gevent
import pytest

from smqrt.broker.outbox import Drop
from smqrt.server.mqtt import take_mqtt
from smqrt.smq import connection_kinds
from smqrt.wire.mqtt.fields import varint
from smqrt.wire.mqtt.packets import PacketSplitter
from tests.support.device import Site, publish
from tests.support.waiting import wait_until

MakeSite = Callable[..., Site]


def packet(first: int, body: bytes) -> bytes:
    return bytes((first,)) + varint(len(body)) + body


class Stream:
    """An MQTT client on a socket, which reads when the test asks."""

    def __init__(self, site: Site, name: bytes, version: int) -> None:
        self.version = version
        self.block = b"\0" if version == 5 else b""
        self.sock = gevent.socket.create_connection(site.address(), 10)
        self._splitter = PacketSplitter()
        head = struct.pack(">H", 4) + b"MQTT" + bytes((version, 2, 0, 0)) + self.block
        self.send(packet(0x10, head + struct.pack(">H", len(name)) + name))
        assert self.packet()[0] == 0x20

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def packet(self) -> tuple[int, bytes]:
        while (found := self._splitter.next()) is None:
            data = self.sock.recv(65536)
            assert data, "the hub has closed the connection"
            self._splitter.feed(data)
        return found

    def subscribe(self, topic: bytes, qos: int) -> None:
        body = b"\0\1" + self.block + struct.pack(">H", len(topic)) + topic + bytes((qos,))
        self.send(packet(0x82, body))
        assert self.packet()[0] == 0x90

    def message(self, topic: bytes, payload: bytes, qos: int = 0, number: int = 0) -> bytes:
        identifier = struct.pack(">H", number) if qos else b""
        return packet(0x30 | qos << 1, struct.pack(">H", len(topic)) + topic + identifier + self.block + payload)

    def payloads(self, count: int, topic: bytes, qos: int = 0) -> Iterator[bytes]:
        """The next messages; those with QoS 1 are acknowledged."""
        start = 2 + len(topic) + 2 * bool(qos) + len(self.block)
        for _ in range(count):
            first, body = self.packet()
            assert first & 0xF0 == 0x30, hex(first)
            if qos:
                self.send(b"\x40\x02" + body[2 + len(topic) : 4 + len(topic)])
            yield body[start:]


@pytest.fixture
def mqtt_site(make_site: MakeSite) -> Site:
    site = make_site(mqtt=True, budget=64 << 20)
    site.server.take_mqtt = take_mqtt
    return site


def sent_in_pieces(data: bytes, draw: random.Random) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        end = at + draw.choice([1, 7, 100, 3000, 50_000])
        yield data[at:end]
        at = end


@pytest.mark.parametrize("version", [4, 5])
def test_messages_keep_their_order_however_they_are_cut(mqtt_site: Site, version: int) -> None:
    draw = random.Random(version)
    topics = [b"t", b"house/kitchen/temp"]
    readers = [Stream(mqtt_site, b"r%d" % at, at) for at in (4, 5)]
    for reader in readers:
        for topic in topics:
            reader.subscribe(topic, 0)
    device = mqtt_site.device(b"smq-client")
    for topic in topics:
        device.subscribe(topic)
    publisher = Stream(mqtt_site, b"publisher", version)
    messages, current = [], 0
    for at in range(8000):
        if draw.random() < 0.01:
            current = 1 - current
        messages.append((current, b"%d " % at + b"x" * draw.choice([0, 3, 130, 900])))
    data = b"".join(publisher.message(topics[topic], payload) for topic, payload in messages)
    for piece in sent_in_pieces(data, draw):
        publisher.send(piece)
    for reader in readers:
        found = []
        for _ in messages:
            _, body = reader.packet()
            size = int.from_bytes(body[:2])
            found.append((topics.index(body[2 : 2 + size]), body[2 + size + len(reader.block) :]))
        # The order of one topic, as the standard demands; a turn delivers the batches of a topic in order too.
        assert found == messages
    got = [device.receive() for _ in messages]
    assert [one[13:] for one in got] == [payload for _, payload in messages]


def test_smq_messages_become_packets_of_both_versions(mqtt_site: Site) -> None:
    readers = [Stream(mqtt_site, b"r%d" % at, at) for at in (4, 5)]
    for reader in readers:
        reader.subscribe(b"t", 0)
    device = mqtt_site.device(b"smq-client")
    number = device.create(b"t")
    payloads = [b"%d" % at for at in range(3000)]
    device.send(*[publish(number, device.etid, one) for one in payloads])
    assert list(readers[0].payloads(3000, b"t")) == payloads
    for one in payloads:
        _, body = readers[1].packet()
        assert body.endswith(b"publisher" + struct.pack(">H", len(b"%d" % device.etid)) + b"%d" % device.etid + one)


@pytest.mark.parametrize("version", [4, 5])
def test_a_slow_subscriber_loses_nothing_with_qos_1(mqtt_site: Site, version: int) -> None:
    """More messages than may wait for a client: their publisher gets its acknowledgements later."""
    reader, publisher = Stream(mqtt_site, b"reader", version), Stream(mqtt_site, b"publisher", version)
    reader.subscribe(b"t", 1)
    count = 4000
    sending = gevent.spawn(
        publisher.send, b"".join(publisher.message(b"t", b"%d" % at, 1, at + 1) for at in range(count))
    )
    found = []
    for at, payload in enumerate(reader.payloads(count, b"t", qos=1)):
        found.append(payload)
        if at % 200 == 0:
            gevent.sleep(0.01)
    assert found == [b"%d" % at for at in range(count)]
    acknowledged = [publisher.packet()[1][:2] for _ in range(count)]
    assert acknowledged == [struct.pack(">H", at + 1) for at in range(count)]
    sending.get(timeout=5)
    assert not any(mqtt_site.state.stats.drops.values())


def test_a_subscriber_that_acknowledges_nothing_delays_others_once(
    mqtt_site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smqrt.broker.mqtt.devices.PRESSURE_S", 0.2)
    stuck, reader = Stream(mqtt_site, b"stuck", 5), Stream(mqtt_site, b"reader", 5)
    stuck.subscribe(b"t", 1)
    reader.subscribe(b"t", 1)
    publisher = Stream(mqtt_site, b"publisher", 5)
    count = 3000
    publisher.send(b"".join(publisher.message(b"t", b"%d" % at, 1, at + 1) for at in range(count)))
    with gevent.Timeout(10):
        assert len(list(reader.payloads(count, b"t", qos=1))) == count
    device = mqtt_site.state.devices.sessions["stuck"]
    wait_until(lambda: device.dropped, "the oldest messages of the stuck client are lost")
    assert len(device.waiting) == 1000
    stuck.sock.close()
    wait_until(lambda: "stuck" not in mqtt_site.state.devices.sessions, "its session ends")


def test_qos_2_messages_come_once(mqtt_site: Site) -> None:
    reader, publisher = Stream(mqtt_site, b"reader", 4), Stream(mqtt_site, b"publisher", 4)
    reader.subscribe(b"t", 2)
    found: list[Any] = []

    def read() -> None:
        while len(found) < 200:
            first, body = reader.packet()
            if first & 0xF0 == 0x30:
                found.append(body[5:])
                reader.send(b"\x50\x02" + body[3:5])
            else:
                assert first == 0x62
                reader.send(b"\x70\x02" + body)

    reading = gevent.spawn(read)
    for at in range(200):
        message = publisher.message(b"t", b"%d" % at, 2, at + 1)
        publisher.send(message)
        assert publisher.packet() == (0x50, struct.pack(">H", at + 1))
        if at % 7 == 0:  # the answer got lost
            publisher.send(bytes((message[0] | 8,)) + message[1:])
            assert publisher.packet() == (0x50, struct.pack(">H", at + 1))
        publisher.send(b"\x62\x02" + struct.pack(">H", at + 1))
        assert publisher.packet() == (0x70, struct.pack(">H", at + 1))
    reading.get(timeout=10)
    assert found == [b"%d" % at for at in range(200)]


class QuickReader:
    """A subscriber that answers all packets of a receive together, without reason codes."""

    def __init__(self, stream: Stream, topic: bytes, qos: int, draw: random.Random) -> None:
        self.stream, self.qos, self._start, self._draw = stream, qos, 2 + len(topic), draw
        self.found: list[bytes] = []
        self._splitter = PacketSplitter()

    def read(self, count: int) -> None:
        """Read until so many messages have arrived, and are acknowledged."""
        completed = 0
        while completed < count:
            self._splitter.feed(self.stream.sock.recv(self._draw.choice([40, 500, 65536])))
            answers = b""
            while (packet := self._splitter.next()) is not None:
                first, body = packet
                if first & 0xF0 == 0x30:
                    start, end = self._start, self._start + 2
                    self.found.append(body[end + len(self.stream.block) :])
                    answers += (b"\x40\2" if self.qos == 1 else b"\x50\2") + body[start:end]
                else:
                    assert first == 0x62, hex(first)
                    answers += b"\x70\2" + body
                completed += (first == 0x62) if self.qos == 2 else (first & 0xF0 == 0x30)
            self.stream.send(answers)


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [1, 2])
def test_rows_of_messages_and_acknowledgements(mqtt_site: Site, version: int, qos: int) -> None:
    """Rows of all kinds, mixed and cut anywhere, of two topics: nothing is lost, doubled or reordered."""
    draw = random.Random(qos * 10 + version)
    topics = [b"t", b"house/kitchen"]
    readers = [QuickReader(Stream(mqtt_site, b"r%d" % at, at), topics[at - 4], qos, draw) for at in (4, 5)]
    for reader, topic in zip(readers, topics, strict=True):
        reader.stream.subscribe(topic, qos)
    publisher = Stream(mqtt_site, b"publisher", version)
    count, limit = 1000, 20
    reading = [gevent.spawn(reader.read, count) for reader in readers]
    free, answered, released = list(range(1, limit + 1)), [], 0
    sent: list[list[bytes]] = [[], []]
    while released < 2 * count:
        out = b""
        while free and len(sent[0]) + len(sent[1]) < 2 * count:
            at = draw.choice([one for one in (0, 1) if len(sent[one]) < count])
            for _ in range(min(draw.choice([1, 3, 10]), len(free), count - len(sent[at]))):
                payload = b"%d" % len(sent[at]) + b"x" * draw.choice([0, 3, 150])
                sent[at].append(payload)
                out += publisher.message(topics[at], payload, qos, free.pop(0))
        out += b"".join(b"\x62\2" + number for number in answered)
        answered.clear()
        cut = draw.randrange(len(out) + 1)
        publisher.send(out[:cut])
        if draw.random() < 0.2:
            gevent.sleep(0)
        publisher.send(out[cut:])
        for _ in range(min(draw.choice([1, 5, 15]), limit - len(free) - len(answered))):
            first, body = publisher.packet()
            assert len(body) == 2, body
            if first == 0x50:
                answered.append(body)
                continue
            assert first == (0x40 if qos == 1 else 0x70), hex(first)
            free.append(int.from_bytes(body))
            released += 1
    for greenlet in reading:
        greenlet.get(timeout=30)
    assert [reader.found for reader in readers] == sent
    devices = mqtt_site.state.devices
    sessions = [devices.sessions[name] for name in ("r4", "r5", "publisher")]
    wait_until(lambda: not any(one.in_flight for one in sessions), "all is acknowledged")
    assert not any(one.unreleased or one.waiting or one.waiting_bytes for one in sessions)
    assert devices.counts.published == devices.counts.delivered == 2 * count
    assert devices.counts.packets == 5 + 4 * count * qos  # CONNECT, SUBSCRIBE, and what the others send
    assert devices.counts.answers == 5 + 2 * count * (1 if qos == 1 else 3)


def test_acknowledgements_of_unknown_messages(mqtt_site: Site) -> None:
    """PUBACK and PUBCOMP are ignored; PUBREC and PUBREL are answered with a reason in MQTT 5."""
    client = Stream(mqtt_site, b"client", 5)
    rows = [b"".join(bytes((first, 2, 0, number)) for number in (1, 2, 2)) for first in (0x40, 0x50, 0x62, 0x70)]
    client.send(b"".join(rows) + b"\xc0\0")
    found = [client.packet() for _ in range(7)]
    expected = [(first, bytes((0, number, 0x92))) for first in (0x62, 0x70) for number in (1, 2, 2)]
    assert found == [*expected, (0xD0, b"")]


@pytest.mark.parametrize("row", [b"\x40\2\0\7\x40\2\0\0", b"\x50\2\0\7\x50\2\0\1", b"\x70\2\0\7\x70\2\0\1"])
def test_a_wrong_acknowledgement_in_a_row_closes_the_connection(mqtt_site: Site, row: bytes) -> None:
    """The packet identifier 0, PUBREC of a message with QoS 1, and PUBCOMP instead of PUBACK."""
    client = Stream(mqtt_site, b"client", 5)
    client.subscribe(b"t", 1)
    client.send(client.message(b"t", b"x", 1, 1))
    assert {client.packet()[0] for _ in range(2)} == {0x32, 0x40}
    client.send(row)
    while True:
        first, body = client.packet()
        if first == 0xE0:
            break
        assert first == 0x62, hex(first)
    assert body[0] in (0x81, 0x82)


def test_a_long_row_is_published_in_portions(mqtt_site: Site) -> None:
    """Publishers with QoS 1 and 2 wait for slow subscribers between two portions."""
    reader, publisher = Stream(mqtt_site, b"reader", 4), Stream(mqtt_site, b"publisher", 4)
    reader.subscribe(b"t", 1)
    publisher.send(publisher.message(b"t", b"first", 1, 1))
    assert publisher.packet()[0] == 0x40
    device = mqtt_site.state.devices.sessions["reader"]
    publisher.send(b"".join(publisher.message(b"t", b"%d" % at, 1, at) for at in range(1, 3001)))
    wait_until(lambda: device.is_pressed, "the publisher waits")
    assert len(device.waiting) <= 700
    assert not device.dropped
    assert list(reader.payloads(3001, b"t", 1)) == [b"first", *(b"%d" % at for at in range(1, 3001))]


@pytest.mark.parametrize("qos", [0, 1])
def test_messages_that_do_not_fit_an_smq_packet(mqtt_site: Site, qos: int) -> None:
    """They reach MQTT clients and handlers in order, and are retained; SMQ clients miss them, which is counted."""
    handled: list[bytes] = []
    mqtt_site.smq.subscribe("t", onmsg=lambda data, *rest: handled.append(bytes(data)))
    device = mqtt_site.device(b"smq-client")
    device.subscribe(b"t")
    readers = [Stream(mqtt_site, b"r%d" % at, at) for at in (4, 5)]
    for reader in readers:
        reader.subscribe(b"t", qos)
    publisher = Stream(mqtt_site, b"publisher", 5)
    payloads = [b"before", b"x" * 200_000, b"after"]
    publisher.send(b"".join(publisher.message(b"t", one, qos, at) for at, one in enumerate(payloads, 1)))
    for reader in readers:
        assert list(reader.payloads(3, b"t", qos)) == payloads
    wait_until(lambda: handled == payloads, "the handler gets all")
    assert [device.receive()[13:] for _ in range(2)] == [b"before", b"after"]
    assert mqtt_site.state.stats.drops[Drop.TOO_LARGE] == 1
    retained = publisher.message(b"kept", b"y" * 100_000, 1, 9)
    publisher.send(bytes((retained[0] | 1,)) + retained[1:])
    late = Stream(mqtt_site, b"late", 4)
    wait_until(lambda: mqtt_site.state.devices.retained.by_name, "it is retained")
    late.subscribe(b"kept", 1)
    assert list(late.payloads(1, b"kept", 1)) == [b"y" * 100_000]


def test_an_application_subscribes_to_a_filter(mqtt_site: Site) -> None:
    """Topics that only MQTT clients publish to appear when the application has a filter for them."""
    handled: list[tuple[str, bytes]] = []
    smq = mqtt_site.smq
    smq.subscribe(
        filter="house/+/temp", onmsg=lambda data, _, tid, __: handled.append((smq.tid2topic(tid), bytes(data)))
    )
    publisher = Stream(mqtt_site, b"publisher", 5)
    for at, topic in enumerate([b"house/kitchen/temp", b"garden/temp"], 1):
        publisher.send(publisher.message(topic, b"21", 1, at))
        assert publisher.packet()[1][2:] == (b"" if at == 1 else b"\x10")
    wait_until(lambda: handled == [("house/kitchen/temp", b"21")], "the handler is called")
    smq.unsubscribe("house/+/temp")
    wait_until(lambda: not mqtt_site.state.topic_table.by_name, "the topic goes")


def test_a_message_that_a_hook_swallows_is_not_retained(make_site: MakeSite) -> None:
    site = make_site(mqtt=True, onpublish=lambda data, *rest: bytes(data) != b"bad")
    site.server.take_mqtt = take_mqtt
    publisher = Stream(site, b"publisher", 5)
    for at, payload in enumerate([b"good", b"bad", b"x" * 70_000], 1):
        message = publisher.message(b"t", payload, 1, at)
        publisher.send(bytes((message[0] | 1,)) + message[1:])
    assert [publisher.packet()[1][2:] for _ in range(3)] == [b"\x10", b"\x83", b"\x83"]
    assert [one.payload for one in site.state.devices.retained.by_name.values()] == [b"good"]


def test_a_client_may_not_subscribe_with_too_many_wildcards(mqtt_site: Site) -> None:
    client = Stream(mqtt_site, b"client", 5)
    codes = []
    for at in range(30):
        topic = b"%d/" % at + b"/".join([b"+"] * 100)
        client.send(packet(0x82, b"\0\1\0" + struct.pack(">H", len(topic)) + topic + b"\0"))
        codes.append(client.packet()[1][-1])
    assert codes == [0] * 20 + [0x97] * 10


def test_a_large_connect_packet_is_refused_before_the_login(mqtt_site: Site) -> None:
    sock = gevent.socket.create_connection(mqtt_site.address(), 10)
    sock.sendall(b"\x10" + varint(300_000))
    sock.settimeout(10)
    assert sock.recv(100) == b""
    assert not mqtt_site.state.devices.sessions


def test_the_check_for_idle_clients_leaves_mqtt_clients_alone(mqtt_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_kinds, "silent_s", lambda connection: 1000.0)
    client = Stream(mqtt_site, b"client", 4)
    device = mqtt_site.device(b"smq-client")
    idle = connection_kinds.IdleClients(mqtt_site.state.clients)
    idle._idle_s, idle._answer_s = 10.0, 0.0
    for _ in range(3):
        idle._check_all()
        gevent.sleep(0.02)
    assert device.receive()[:1] == b"\x0c"
    client.send(b"\xc0\0")
    assert client.packet() == (0xD0, b"")

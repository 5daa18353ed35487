"""The answers of mqttbroker to packets, without sockets: sessions in both versions, every refusal, any bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gevent
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smqrt.apps.lua.vm import Services, Vm
from smqrt.broker.outbox import Outbox
from smqrt.errors import CloseReason, MqttError
from smqrt.smq.port_broker import PortBroker, PortClient
from smqrt.wire.mqtt.packets import PacketSplitter
from smqrt.wire.smq import Type
from tests.apps.lua.mqtt_packets import (
    PINGREQ,
    PINGRESP,
    connect,
    disconnect,
    packet,
    publish,
    split,
    subscribe,
    text,
    unsubscribe,
    varint,
)
from tests.broker.memory_clients import settle
from tests.support.waiting import wait_until

START = """
reports = {}
op = {address = "127.0.0.1"}
function op.onerror(client, etype, status) reports[#reports + 1] = etype .. ' ' .. status end
"""
CONNACK4 = packet(0x20, b"\0\0")


class Ear(Outbox):
    """What a client gets."""

    has_room = True

    def __init__(self, peer: Peer) -> None:
        super().__init__()
        self.peer, self.got, self.ended = peer, b"", False

    def send_packet(self, data: bytes) -> None:
        self.got += data

    def send_packets(self, data: bytes, key: bytes) -> None:
        self.got += data

    def reply(self, control: bytes) -> None:
        if control[0] == Type.CONNACK:
            self.peer.session.connack()

    def finish(self, reason: CloseReason) -> None:
        self.ended = True

    def resume(self) -> None:
        session = self.peer.session
        if not session.is_subscribing and not session.skips_resume:
            gevent.get_hub().loop.run_callback(self.peer.resume)
        session.skips_resume = False


class Peer:
    """A client of the broker whose connection is in memory; it feeds bytes as `MqttConnection` does."""

    def __init__(self, broker: PortBroker) -> None:
        self.ear = Ear(self)
        self.session = PortClient(broker, self.ear, ("192.0.2.1", 50_000), False)
        broker.connections.add(self.session)
        self.splitter = PacketSplitter(broker.options.packet_bytes)
        self.splitter.only, self.paused = 0x10, False

    def feed(self, data: bytes) -> None:
        self.splitter.feed(data)
        if not self.paused:
            self.handle(lambda: False)
        wait_until(lambda: not self.paused or self.session.closed)

    def handle(self, before: Callable[[], bool]) -> None:
        session, splitter = self.session, self.splitter
        try:
            self.paused = before()
            while not (self.paused or session.closed) and (found := splitter.next()) is not None:
                splitter.only = 0
                self.paused = session.packet(*found)
            self.paused = self.paused or session.publish_collected()
        except MqttError as error:
            session.publish_collected()
            session.fail_mqtt(error)

    def resume(self) -> None:
        if self.paused and not self.session.closed:
            self.handle(self.session.continue_packets)


class Peers:
    """Clients of a broker."""

    def __init__(self, vm: Vm, services: Services, options: str = "") -> None:
        self.vm, self.peers = vm, dict[str, Peer]()
        vm.eval(f"{START} {options} broker = assert(require 'mqttbroker'.create(0, op))")
        self.broker: PortBroker = services.mqtt_brokers.brokers[vm.eval("return broker.number")[0]]

    def peer(self, name: str) -> Peer:
        """A new connection."""
        self.peers[name] = Peer(self.broker)
        return self.peers[name]

    def gone(self, name: str) -> None:
        """Break a connection."""
        self.peers[name].session.disconnect(CloseReason.PEER_CLOSED)

    def send(self, name: str, *packets: bytes) -> bytes:
        """Give packets to the session of `name`; returns what it answers."""
        for one in packets:
            self.peers[name].feed(one)
        return self.taken(name)[0]

    def taken(self, name: str) -> tuple[bytes, bool]:
        """What a client got since the last call, and whether the broker has ended the connection."""
        settle()
        ear = self.peers[name].ear
        data, ear.got = ear.got, b""
        return data, ear.ended

    def join(self, name: str, version: int = 4, **keywords: Any) -> bytes:
        """Connect a client; returns the CONNACK."""
        self.peer(name)
        return self.send(name, connect(version, name, **keywords))

    @property
    def reports(self) -> list[str]:
        joined = self.vm.eval("return table.concat(reports, '\\0')")[0].decode()
        return joined.split("\0") if joined else []


New = Callable[..., Peers]


@pytest.fixture
def new(vm: Vm, services: Services) -> Iterator[New]:
    """Starts a broker with more options: `new("op.maxPacketSize = 200")`."""
    yield lambda options="": Peers(vm, services, options)
    vm.eval("if broker then broker:close() end")


@pytest.fixture
def peers(new: New) -> Peers:
    return new()


def prop(identifier: int, value: bytes) -> bytes:
    return bytes([identifier]) + value


USER = prop(0x26, text("k") + text("v"))
ANY = prop(0x01, b"\1") + prop(0x03, text("t")) + prop(0x08, text("r")) + prop(0x09, text(b"\xff"))


def test_connack_3(peers: Peers) -> None:
    assert peers.join("a") == CONNACK4


def test_connack_5_says_what_the_broker_has_not(peers: Peers) -> None:
    [(first, body)] = split(peers.join("a", 5))
    assert first == 0x20
    maximum = prop(0x27, (262144).to_bytes(4, "big"))
    assert body == b"\0\0" + varint(11) + prop(0x24, b"\0") + prop(0x25, b"\0") + prop(0x2A, b"\0") + maximum


def test_connack_5_without_wildcards(new: New) -> None:
    assert prop(0x28, b"\0") in new("op.allowWildcards = false").join("a", 5)


def test_connack_5_ends_the_session_with_the_connection(peers: Peers) -> None:
    assert prop(0x11, bytes(4)) in peers.join("a", 5, properties=prop(0x11, b"\0\0\1\0"))


def test_client_without_identifier_gets_one(peers: Peers) -> None:
    peers.peer("a")
    body = split(peers.send("a", connect(5, "")))[0][1]
    assert b"\x12\0\x16smqrt-" in body
    peers.peer("b")
    assert peers.send("b", connect(4, "")) == CONNACK4


@pytest.mark.parametrize("publisher", [4, 5])
@pytest.mark.parametrize("subscriber", [4, 5])
def test_messages_cross_versions(peers: Peers, publisher: int, subscriber: int) -> None:
    peers.join("s", subscriber)
    peers.join("p", publisher)
    peers.send("s", subscribe(subscriber, "t/+"))
    assert peers.send("p", publish(publisher, "t/1", b"\0\xff")) == b""
    assert peers.taken("s")[0] == publish(subscriber, "t/1", b"\0\xff")


def test_properties_of_a_message_go_with_it(peers: Peers) -> None:
    for name, version in (("three", 4), ("five", 5), ("p", 5)):
        peers.join(name, version)
        peers.send(name, subscribe(version, "t"))
    peers.send("p", publish(5, "t", b"x", properties=ANY + USER + USER))
    assert peers.taken("five")[0] == publish(5, "t", b"x", properties=ANY + USER + USER)
    assert peers.taken("three")[0] == publish(4, "t", b"x")


def test_the_expiry_of_a_message_comes_last(peers: Peers) -> None:
    expiry = prop(0x02, b"\0\0\0\5")
    for name in ("s", "p"):
        peers.join(name, 5)
    peers.send("s", subscribe(5, "t"))
    peers.send("p", publish(5, "t", b"x", properties=expiry + USER))
    assert peers.taken("s")[0] == publish(5, "t", b"x", properties=USER + expiry)


def test_overlapping_subscriptions_deliver_once_with_all_identifiers(peers: Peers) -> None:
    peers.join("a", 5)
    peers.send("a", subscribe(5, "t", "#", properties=prop(0x0B, varint(200))))
    peers.send("a", subscribe(5, "+", properties=prop(0x0B, varint(5))))
    [(first, body)] = split(peers.send("a", publish(5, "t", b"x")))
    found = body[len(text("t")) + 1 : -1]
    assert first == 0x30
    assert body.endswith(b"x")
    assert len(found) == 8
    assert found.count(prop(0x0B, varint(200))) == 2
    assert prop(0x0B, b"\5") in found


def test_no_local(peers: Peers) -> None:
    peers.join("a", 5)
    peers.send("a", subscribe(5, "t", options=4))
    assert peers.send("a", publish(5, "t", b"x")) == b""
    peers.send("a", subscribe(5, "t", options=0))
    assert peers.send("a", publish(5, "t", b"x")) == publish(5, "t", b"x")


def test_retain_is_kept_on_request(peers: Peers) -> None:
    for name, options in (("kept", 8), ("plain", 0)):
        peers.join(name, 5)
        peers.send(name, subscribe(5, "t", options=options))
    peers.join("p", 4)
    peers.send("p", publish(4, "t", b"x", first=0x31))
    assert peers.taken("kept")[0] == publish(5, "t", b"x", first=0x31)
    assert peers.taken("plain")[0] == publish(5, "t", b"x")


def test_nothing_is_retained(peers: Peers) -> None:
    peers.join("p", 4)
    peers.send("p", publish(4, "t", b"x", first=0x31))
    peers.join("s", 4)
    assert peers.send("s", subscribe(4, "t")) == packet(0x90, b"\0\1\0")


def test_internal_topics_match_no_wildcard_at_the_first_level(peers: Peers) -> None:
    peers.join("a")
    peers.send("a", subscribe(4, "#", "+/x", identifier=1))
    assert peers.send("a", publish(4, "$SYS/x", b"1")) == b""
    peers.send("a", subscribe(4, "$SYS/#", identifier=2))
    assert peers.send("a", publish(4, "$SYS/x", b"2")) == publish(4, "$SYS/x", b"2")


def test_unsubscribe(peers: Peers) -> None:
    peers.join("a", 5)
    peers.send("a", subscribe(5, "t"))
    assert peers.send("a", unsubscribe(5, "t", "u", identifier=9)) == packet(0xB0, b"\0\x09\0\0\x11")
    assert peers.send("a", publish(5, "t")) == b""
    peers.join("b", 4)
    assert peers.send("b", unsubscribe(4, "u", identifier=9)) == packet(0xB0, b"\0\x09")


def test_ping(peers: Peers) -> None:
    peers.join("a")
    assert peers.send("a", PINGREQ) == PINGRESP


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_packets_in_pieces(peers: Peers, size: int) -> None:
    peers.peer("a")
    stream = connect(4, "a") + subscribe(4, "t") + publish(4, "t", bytes(300)) + PINGREQ + publish(4, "t", b"x")
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    got = split(peers.send("a", *pieces))
    assert got[:2] == [(0x20, b"\0\0"), (0x90, b"\0\1\0")]
    assert sorted(got[2:]) == sorted(split(publish(4, "t", bytes(300)) + PINGRESP + publish(4, "t", b"x")))


# ---- wills


WILL4 = text("w") + text("gone")


def test_will_is_published_when_the_connection_breaks(peers: Peers) -> None:
    peers.join("s")
    peers.send("s", subscribe(4, "w"))
    peers.join("a", flags=0x06, rest=WILL4)
    peers.gone("a")
    assert peers.taken("s")[0] == publish(4, "w", b"gone")
    assert peers.reports == ["sock socketclosed"]


@pytest.mark.parametrize(
    ("version", "last", "told"),
    [
        (4, disconnect(), False),
        (5, disconnect(), False),
        (5, disconnect(0), False),
        (5, disconnect(4), True),
        (4, b"\xff\0", True),
    ],
)
def test_will_and_disconnect(peers: Peers, version: int, last: bytes, told: bool) -> None:
    peers.join("s")
    peers.send("s", subscribe(4, "w"))
    will = (b"\0" if version == 5 else b"") + WILL4
    peers.join("a", version, flags=0x06, rest=will)
    peers.send("a", last)
    peers.gone("a")
    assert (peers.taken("s")[0] == publish(4, "w", b"gone")) is told


def test_onpublish_decides_about_wills_too(new: New) -> None:
    peers = new("op.onpublish = function(client, topic) ba.sleep(1) return topic ~= 'secret' end")
    peers.join("s")
    peers.send("s", subscribe(4, "#"))
    for name, topic in (("a", "secret"), ("b", "open")):
        peers.join(name, flags=0x06, rest=text(topic) + text("gone"))
        peers.gone(name)
    assert wait_until(lambda: peers.taken("s")[0]) == publish(4, "open", b"gone")


def test_take_over(peers: Peers) -> None:
    peers.peer("old")
    peers.send("old", connect(5, "same", flags=0x06, rest=b"\0" + WILL4))
    peers.join("s")
    peers.send("s", subscribe(4, "w"))
    peers.peer("new")
    assert peers.send("new", connect(4, "same")) == CONNACK4
    data, ended = peers.taken("old")
    assert ended
    assert split(data)[0][0] == 0xE0
    assert split(data)[0][1][0] == 0x8E
    assert peers.taken("s")[0] == publish(4, "w", b"gone")
    assert peers.send("old", PINGREQ) == b""


# ---- refusals


BAD_FILTERS = ["", "a#", "a/#/b", "+a", "a/b+", "##"]


@pytest.mark.parametrize("wrong", BAD_FILTERS)
def test_bad_filters(peers: Peers, wrong: str) -> None:
    peers.join("a", 4)
    peers.join("b", 5)
    assert peers.send("a", subscribe(4, "ok", wrong)) == packet(0x90, b"\0\1\0\x80")
    assert peers.send("b", subscribe(5, wrong, "ok")) == packet(0x90, b"\0\1\0\x8f\0")


def test_wildcards_that_are_not_allowed(new: New) -> None:
    peers = new("op.allowWildcards = false")
    peers.join("a", 4)
    peers.join("b", 5)
    assert peers.send("a", subscribe(4, "a/#", "+", "#", "t")) == packet(0x90, b"\0\1\x80\x80\x80\0")
    assert peers.send("b", subscribe(5, "a/#", "+", "#", "t")) == packet(0x90, b"\0\1\0\xa2\xa2\xa2\0")


def test_shared_subscriptions(peers: Peers) -> None:
    peers.join("a", 4)
    peers.join("b", 5)
    assert peers.send("a", subscribe(4, "$share/g/t")) == packet(0x90, b"\0\1\x80")
    assert peers.send("b", subscribe(5, "$share/g/t")) == packet(0x90, b"\0\1\0\x9e")


def test_subscriptions_of_a_client_are_bounded(peers: Peers) -> None:
    peers.join("a", 5)
    filters = [f"t{i}" for i in range(1001)]
    answers = split(peers.send("a", subscribe(5, *filters[:1000]), subscribe(5, *filters[1000:])))
    assert [answer[1][3:] for answer in answers] == [bytes(1000), b"\x97"]


def test_granted_qos_is_0(peers: Peers) -> None:
    peers.join("a", 4)
    assert peers.send("a", subscribe(4, "t", options=2)) == packet(0x90, b"\0\1\0")


CONNECT_REFUSED = {
    "level 3": (connect(3, "c", name="MQIsdp"), packet(0x20, b"\0\1")),
    "MQTT level 3": (connect(3, "c"), packet(0x20, b"\0\1")),
    "MQTT level 6": (connect(6, "c"), 0x84),
    "another protocol": (connect(4, "c", name="AMQP"), b""),
    "no identifier, not clean": (connect(4, "", flags=0), packet(0x20, b"\0\2")),
    "reserved flag": (connect(4, "c", flags=3), b""),
    "reserved flag in 5": (connect(5, "c", flags=3), 0x81),
    "will flags without a will": (connect(5, "c", flags=0x22), 0x81),
    "will QoS 3": (connect(5, "c", flags=0x1E, rest=b"\0" + WILL4), 0x81),
    "will QoS 1": (connect(5, "c", flags=0x0E, rest=b"\0" + WILL4), 0x9B),
    "will retained": (connect(5, "c", flags=0x26, rest=b"\0" + WILL4), 0x9A),
    "will topic with a wildcard": (connect(5, "c", flags=0x06, rest=b"\0" + text("#") + text("x")), 0x90),
    "password without user name": (connect(4, "c", flags=0x42, rest=text("p")), b""),
    "bytes behind the end": (connect(5, "c", rest=b"x"), 0x81),
    "truncated": (connect(5, "c", flags=0x82), 0x81),
    "identifier is not UTF-8": (connect(5, b"\xed\xa0\x80"), 0x81),  # type: ignore[arg-type]
    "identifier has NUL": (connect(5, "a\0"), 0x81),
    "enhanced authentication": (connect(5, "c", properties=prop(0x15, text("SCRAM"))), 0x8C),
    "receive maximum 0": (connect(5, "c", properties=prop(0x21, b"\0\0")), 0x82),
    "maximum packet size 0": (connect(5, "c", properties=prop(0x27, bytes(4))), 0x82),
    "property twice": (connect(5, "c", properties=prop(0x21, b"\0\1") * 2), 0x82),
    "property of another packet": (connect(5, "c", properties=prop(0x23, b"\0\1")), 0x81),
    "reason string in CONNECT": (connect(5, "c", properties=prop(0x1F, text("x"))), 0x81),
    "unknown property": (connect(5, "c", properties=prop(0x7F, b"")), 0x81),
    "property cut off": (connect(5, "c", properties=prop(0x11, b"\0")), 0x81),
    "flag is 2": (connect(5, "c", properties=prop(0x17, b"\2")), 0x82),
    "wrong flags in the first byte": (b"\x11" + connect(4, "c")[1:], b""),
    "no CONNECT": (PINGREQ, b""),
    "nothing known": (b"\0\0", b""),
    "a web browser": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b""),
    "length of five bytes": (b"\x10\xff\xff\xff\xff\x01", b""),
    "too large": (b"\x10\xff\xff\x7f", b""),
}


@pytest.mark.parametrize("name", CONNECT_REFUSED)
def test_connect_refused(peers: Peers, name: str) -> None:
    sent, expected = CONNECT_REFUSED[name]
    peers.peer("a")
    peers.peers["a"].feed(sent)
    data, ended = peers.taken("a")
    assert ended
    assert len(peers.reports) == 1
    assert peers.reports[0].startswith("mqtt ")
    if isinstance(expected, bytes):
        assert data == expected
    else:
        [(first, body)] = split(data)
        assert (first, body[:2]) == (0x20, bytes([0, expected]))


REFUSED = {
    "QoS 1": (publish(5, "t", first=0x32), 0x9B),
    "QoS 2": (publish(5, "t", first=0x34), 0x9B),
    "QoS 3": (publish(5, "t", first=0x36), 0x81),
    "sent again": (publish(5, "t", first=0x38), 0x81),
    "topic alias": (publish(5, "t", properties=prop(0x23, b"\0\1")), 0x94),
    "topic alias instead of a topic": (publish(5, "", properties=prop(0x23, b"\0\1")), 0x94),
    "no topic": (publish(5, ""), 0x82),
    "wildcard in a topic": (publish(5, "a/#"), 0x90),
    "plus in a topic": (publish(5, "a/+"), 0x90),
    "topic is not UTF-8": (publish(5, b"\xff"), 0x81),
    "topic has NUL": (publish(5, "a\0b"), 0x81),
    "topic cut off": (packet(0x30, b"\0\5ab"), 0x81),
    "empty PUBLISH": (packet(0x30), 0x81),
    "subscription identifier of a client": (publish(5, "t", properties=prop(0x0B, b"\1")), 0x82),
    "response topic with a wildcard": (publish(5, "t", properties=prop(0x08, text("r/#"))), 0x82),
    "properties cut off": (packet(0x30, text("t") + b"\x05\x01"), 0x81),
    "SUBSCRIBE flags": (subscribe(5, "t", first=0x80), 0x81),
    "SUBSCRIBE without filters": (subscribe(5), 0x82),
    "SUBSCRIBE identifier 0": (subscribe(5, "t", identifier=0), 0x82),
    "SUBSCRIBE QoS 3": (subscribe(5, "t", options=3), 0x81),
    "SUBSCRIBE reserved bits": (subscribe(5, "t", options=0x40), 0x81),
    "retain handling 3": (subscribe(5, "t", options=0x30), 0x82),
    "subscription identifier 0": (subscribe(5, "t", properties=prop(0x0B, b"\0")), 0x82),
    "subscription identifier twice": (subscribe(5, "t", properties=prop(0x0B, b"\1") * 2), 0x82),
    "filter is not UTF-8": (subscribe(5, b"\xc0\x80"), 0x81),
    "UNSUBSCRIBE flags": (unsubscribe(5, "t", first=0xA0), 0x81),
    "UNSUBSCRIBE without filters": (unsubscribe(5), 0x82),
    "second CONNECT": (connect(5, "x"), 0x82),
    "PINGREQ with a body": (packet(0xC0, b"x"), 0x81),
    "PINGREQ flags": (packet(0xC1), 0x81),
    "DISCONNECT flags": (packet(0xE1), 0x81),
    "DISCONNECT with a session": (disconnect(0, prop(0x11, b"\0\0\0\1")), 0x82),
    "AUTH": (packet(0xF0), 0x82),
    "type 0": (packet(0x00), 0x82),
    "too large": (b"\x30\xff\xff\x7f", 0x95),
    "length of five bytes": (b"\x30\xff\xff\xff\xff\x01", 0x81),
    **{f"type {kind} of the broker": (packet(kind << 4, b"\0\1"), 0x82) for kind in (2, 9, 11, 13)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_5(peers: Peers, name: str) -> None:
    sent, code = REFUSED[name]
    peers.join("other")
    peers.join("a", 5)
    peers.peers["a"].feed(sent)
    data, ended = peers.taken("a")
    [(first, body)] = split(data)
    assert (ended, first, body[0]) == (True, 0xE0, code)
    assert peers.reports == [f"mqtt {code}"]
    assert peers.send("other", PINGREQ) == PINGRESP


REFUSED_3 = {
    "QoS 1": publish(4, "t", first=0x32),
    "QoS 2": publish(4, "t", first=0x34),
    "sent again": publish(4, "t", first=0x38),
    "no topic": publish(4, ""),
    "wildcard": publish(4, "#"),
    "no local": subscribe(4, "t", options=4),
    "QoS 3 wanted": subscribe(4, "t", options=3),
    "no filter": subscribe(4),
    "identifier 0": subscribe(4, "t", identifier=0),
    "DISCONNECT with a body": disconnect(0),
    "AUTH": packet(0xF0),
    "second CONNECT": connect(4, "x"),
    "too large": b"\x30\xff\xff\x7f",
}


@pytest.mark.parametrize("name", REFUSED_3)
def test_refused_in_3_without_a_word(peers: Peers, name: str) -> None:
    peers.join("a", 4)
    peers.peers["a"].feed(REFUSED_3[name])
    assert peers.taken("a") == (b"", True)
    assert len(peers.reports) == 1


def test_largest_packet_passes(new: New) -> None:
    peers = new("op.maxPacketSize = 200")
    peers.join("a", 5)
    peers.send("a", subscribe(5, "t"))
    largest = publish(5, "t", bytes(193))
    assert len(largest) == 200
    assert peers.send("a", largest) == largest
    [(first, body)] = split(peers.send("a", publish(5, "t", bytes(194))))
    assert (first, body[0]) == (0xE0, 0x95)


def test_maximum_packet_size_of_the_client_is_kept(peers: Peers) -> None:
    peers.join("a", 5, properties=prop(0x27, (60).to_bytes(4, "big")))
    peers.send("a", subscribe(5, "t"))
    assert peers.send("a", publish(5, "t", bytes(100))) == b""
    assert peers.send("a", publish(5, "t", b"x")) == publish(5, "t", b"x")


# ---- the application


AUTH = "op.auth = function(client, user, password) return user == 'u' and password == 'p' end"
GOOD = text("u") + text("p")


@pytest.mark.parametrize(
    ("version", "flags", "rest", "code"),
    [
        (4, 0xC2, GOOD, 0),
        (5, 0xC2, GOOD, 0),
        (4, 0xC2, text("u") + text("x"), 4),
        (5, 0xC2, text("u") + text("x"), 0x86),
        (4, 0x02, b"", 5),
        (5, 0x02, b"", 0x87),
        (5, 0x42, text("p"), 0x87),
    ],
)
def test_auth(new: New, version: int, flags: int, rest: bytes, code: int) -> None:
    peers = new(AUTH)
    body = split(peers.join("a", version, flags=flags, rest=rest))[0][1]
    assert body[1] == code
    assert peers.taken("a")[1] is (code != 0)


@pytest.mark.parametrize(("version", "code"), [(4, 3), (5, 0x88)])
def test_a_failing_auth_rejects_all_clients(new: New, version: int, code: int) -> None:
    peers = new("op.auth = function() error('no database') end")
    assert split(peers.join("a", version))[0][1][1] == code
    assert peers.reports[0].startswith("callback")
    assert "no database" in peers.reports[0]


def test_clients_closed_during_auth_are_not_accepted(new: New) -> None:
    peers = new("op.auth = function() ba.sleep(20) return true end")
    peer = peers.peer("a")
    peer.splitter.feed(connect(4, "a"))
    peer.handle(lambda: False)
    peers.gone("a")
    gevent.sleep(0.05)
    assert peers.taken("a") == (b"", True)
    assert not peers.broker.sessions


def test_onpublish(new: New) -> None:
    peers = new(
        """
        seen = {}
        op.onpublish = function(client, topic, payload, retain)
          seen[#seen + 1] = client.clientidentifier .. topic .. payload .. tostring(retain)
          if topic == 'broken' then error('oops') end
          return topic ~= 'secret' and nil
        end""",
    )
    peers.join("a", 4)
    peers.send("a", subscribe(4, "#"))
    assert peers.send("a", publish(4, "t", b"1")) == publish(4, "t", b"1")
    assert peers.send("a", publish(4, "secret", b"2", first=0x31), publish(4, "broken", b"3")) == b""
    assert peers.vm.eval("return table.concat(seen, ' ')") == (b"at1false asecret2true abroken3false",)
    assert len(peers.reports) == 1
    assert "oops" in peers.reports[0]


def test_a_failing_onerror_affects_no_others(new: New) -> None:
    peers = new("op.onerror = function() error('oops') end")
    peers.join("a", 5)
    assert split(peers.send("a", packet(0xF0)))[0][0] == 0xE0


# ---- any bytes


VALID = [
    connect(5, "f", properties=prop(0x21, b"\0\1")),
    connect(4, "f", flags=0xC6, rest=WILL4 + GOOD),
    publish(5, "t/1", b"payload", properties=ANY + USER),
    publish(4, "t/1", b"payload"),
    subscribe(5, "t/#", "+/+", properties=prop(0x0B, b"\1") + USER),
    unsubscribe(5, "t/#"),
    PINGREQ,
    disconnect(4, prop(0x1F, text("bye"))),
]


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Packets with wrong bytes in them, or just bytes."""
    stream = bytearray(b"".join(draw(st.lists(st.sampled_from(VALID), min_size=1, max_size=5))))
    for _ in range(draw(st.integers(0, 4))):
        stream[draw(st.integers(0, len(stream) - 1))] = draw(st.integers(0, 255))
    return draw(st.sampled_from([b"", connect(5, "g"), connect(4, "g")])) + bytes(stream) + draw(st.binary(max_size=8))


def test_any_bytes_end_their_sender_only(new: New) -> None:
    peers = new()
    peers.join("other", 5)
    peers.send("other", subscribe(5, "alive"))

    @settings(max_examples=400)
    @given(streams(), st.integers(1, 40))
    def check(stream: bytes, cut: int) -> None:
        peers.peer("a")
        peers.send("a", stream[:cut], stream[cut:])
        split(peers.taken("a")[0])
        peers.gone("a")
        assert peers.send("other", publish(5, "alive", b"yes")) == publish(5, "alive", b"yes")

    check()
    assert not [report for report in peers.reports if report == "mqtt 128"]
    assert len(peers.broker.sessions) == 1


def test_a_packet_has_at_most_1000_filters(peers: Peers) -> None:
    filters = [f"t{i}" for i in range(1001)]
    for name, data in (("a", subscribe(5, *filters)), ("b", unsubscribe(5, *filters))):
        peers.join(name, 5)
        peers.peers[name].feed(data)
        answer, ended = peers.taken(name)
        assert (ended, split(answer)[0][1][0]) == (True, 0x97)


def test_a_packet_has_at_most_1000_properties(peers: Peers) -> None:
    peers.join("a", 5)
    assert peers.send("a", publish(5, "t", properties=USER * 1000), PINGREQ) == PINGRESP
    peers.peers["a"].feed(publish(5, "t", properties=USER * 1001))
    answer, ended = peers.taken("a")
    assert (ended, split(answer)[0][1][0]) == (True, 0x97)


LIMITED = {
    "wildcards of filters": [f"{i}" + "/+" * 100 for i in range(21)],
    "bytes of filters": [f"{i}" + "x" * 60_000 for i in range(5)],
}


@pytest.mark.parametrize("what", LIMITED)
def test_what_the_filters_of_a_client_are(peers: Peers, what: str) -> None:
    peers.join("a", 5)
    codes = b"".join(split(peers.send("a", subscribe(5, one)))[0][1][3:] for one in LIMITED[what])
    assert codes == bytes(len(LIMITED[what]) - 1) + b"\x97"
    peers.send("a", unsubscribe(5, LIMITED[what][0]))
    assert split(peers.send("a", subscribe(5, LIMITED[what][-1])))[0][1][3:] == b"\0"


def test_nothing_is_left_of_filters(peers: Peers) -> None:
    for number in range(3):
        peers.join(f"c{number}", 5)
        peers.send(f"c{number}", subscribe(5, *[f"{number}/{i}" + "/+" * 20 for i in range(50)]))
    for number in range(3):
        peers.gone(f"c{number}")
    settle()
    assert not peers.broker.devices.filters.by_text
    assert not peers.broker.connections


def test_user_properties_do_not_pass_for_others(peers: Peers) -> None:
    peers.join("a", 5)
    peers.vm.eval(
        """
        here = broker:createClient(nil, function(topic, payload, properties)
          seen = tostring(properties.responsetopic) .. properties.k
        end)
        here:subscribe("t")
        """
    )
    wait_until(lambda: peers.broker.devices.filters.by_text)
    peers.send("a", publish(5, "t", properties=b"\x26" + text("responsetopic") + text("mine") + USER))
    wait_until(lambda: peers.vm.eval("return seen") == (b"nilv",))

"""Brokers that refuse, limit, keep silent or break the rules: what the client tells, and what it sends."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import gevent
import pytest

from smqrt.errors import DroppedError
from smqrt.mqtt import MqttClient, MqttCloseReason
from tests.clients.mqtt.scripted import (
    CONNECT,
    DISCONNECT,
    PINGREQ,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    ScriptedBroker,
    packet,
    publish,
    stall,
)
from tests.support.waiting import let_others_run, wait_until

Connect = Callable[..., MqttClient]
Scripted = Callable[..., ScriptedBroker]

V3_REFUSALS = [1, 2, 3, 4, 5]
V5_REFUSALS = [0x80, 0x81, 0x82, 0x83, 0x84, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8A, 0x8C, 0x90, 0x95, 0x97, 0x99, 0x9A]
V5_REFUSALS += [0x9B, 0x9C, 0x9D, 0x9F]
DISCONNECTS = [0, 0x80, 0x81, 0x82, 0x83, 0x87, 0x89, 0x8B, 0x8D, 0x8E, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x9C, 0xA2]


def give_up(log: list[Any]) -> Callable[..., bool]:
    """An onstatus that keeps connections and never tries again."""

    def onstatus(kind: str, code: str, status: Any) -> bool:
        log.append((kind, code, status))
        return (kind, code) == ("mqtt", "connect") and status["reasoncode"] == 0

    return onstatus


@pytest.mark.parametrize(("version", "code"), [(4, code) for code in V3_REFUSALS] + [(5, code) for code in V5_REFUSALS])
def test_every_refusal_is_reported(scripted: Scripted, connect: Connect, version: int, code: int) -> None:
    log: list[Any] = []
    properties = b"\x1f\0\x04away" if version == 5 else b""
    client = connect(scripted(version, code=code, properties=properties).address, give_up(log), version=version)
    assert client.end
    assert (client.end.type, client.end.code) == ("mqtt", "connect")
    assert not client.connected
    told = {"reasonstring": "away"} if version == 5 else {}
    assert log == [("mqtt", "connect", {"sessionpresent": False, "reasoncode": code, "properties": told})]
    assert "refused" in str(client.end)


def test_what_time_may_cure_is_tried_again_by_itself(scripted: Scripted, connect: Connect) -> None:
    for code in (0x88, 0x89, 0x9F):
        assert MqttCloseReason("mqtt", "connect", {"reasoncode": code}).can_reconnect
    for code in (0x86, 0x87, 0x8A):
        assert not MqttCloseReason("mqtt", "connect", {"reasoncode": code}).can_reconnect
    client = connect(scripted(5, code=0x87).address)
    assert client.closed


@pytest.mark.parametrize("code", DISCONNECTS)
def test_every_disconnect_of_the_broker_is_reported(scripted: Scripted, connect: Connect, code: int) -> None:
    log: list[Any] = []
    broker = scripted(on_open=lambda wire: wire.send(packet(DISCONNECT, bytes((code, 0)))))
    client = connect(broker.address, give_up(log))
    wait_until(lambda: client.closed)
    assert log[-1] == ("mqtt", "disconnect", {"reasoncode": code, "properties": {}})


def test_the_decision_after_an_end_is_heeded(scripted: Scripted, connect: Connect) -> None:
    broker = scripted(on_open=lambda wire: wire.send(packet(DISCONNECT)) if broker.connections < 3 else None)
    client = connect(broker.address, lambda *_: 0.02)
    wait_until(lambda: broker.connections == 3 and client.connected)
    gone: list[Any] = []
    connect("127.0.0.1:1", lambda *what: gone.append(what))
    assert gone == [("sock", "cannotconnect", {})]


def test_a_falsy_answer_to_connect_closes(scripted: Scripted, connect: Connect) -> None:
    broker = scripted()
    client = connect(broker.address, lambda *_: False)
    wait_until(lambda: client.closed and broker.of_kind(DISCONNECT))
    assert len(broker.of_kind(DISCONNECT)) == 1
    assert client.end is None


@pytest.mark.parametrize("version", [4, 5])
def test_a_half_open_link_is_noticed(scripted: Scripted, connect: Connect, version: int) -> None:
    log: list[Any] = []
    broker = scripted(version, on_packet=lambda wire, first, body: first == PINGREQ and (stall(), True)[1])
    client = connect(broker.address, give_up(log), version=version, keepalive=1)
    wait_until(lambda: client.closed)
    assert broker.of_kind(PINGREQ) == [b""]
    assert log[-1] == ("mqtt", "pingtimeout", {})


def test_pings_keep_an_idle_link(scripted: Scripted, connect: Connect) -> None:
    broker = scripted(4)
    client = connect(broker.address, version=4, keepalive=1)
    gevent.sleep(1.8)
    assert client.connected
    assert 2 <= len(broker.of_kind(PINGREQ)) <= 4


def test_the_servers_keep_alive_counts(scripted: Scripted, connect: Connect) -> None:
    broker = scripted(properties=b"\x13\0\x01")
    client = connect(broker.address, keepalive=600)
    wait_until(lambda: broker.of_kind(PINGREQ))
    assert client.connected
    silent = scripted(properties=b"\x13\0\0")
    connect(silent.address, keepalive=1)
    gevent.sleep(1.2)  # it would ping after a second
    assert silent.of_kind(PINGREQ) == []


def test_a_slow_callback_does_not_lose_the_link(scripted: Scripted, connect: Connect) -> None:
    flood = [("in", 0, b"x")] * 2500
    broker = scripted(4, push=flood)
    got: list[bytes] = []

    def onpub(topic: str, payload: bytes, *_: Any) -> None:
        if not got:
            gevent.sleep(1.5)
        got.append(payload)

    client = connect(broker.address, None, onpub, version=4, keepalive=1)
    client.subscribe("in")
    wait_until(lambda: len(got) == len(flood))
    assert client.connected
    assert broker.connections == 1


def test_a_broker_that_never_answers_connect(scripted: Scripted, connect: Connect) -> None:
    log: list[Any] = []
    broker = scripted(on_packet=lambda wire, first, body: first == CONNECT and (stall(), True)[1])
    connect(broker.address, give_up(log), timeout=0.2)
    assert log == [("sock", "timeout", {})]


def test_no_more_in_flight_than_the_receive_maximum(scripted: Scripted, connect: Connect) -> None:
    waiting: list[bytes] = []
    most = 0

    def hold(wire: Any, first: int, body: bytes) -> bool:
        nonlocal most
        if first & 0xF0 != PUBLISH:
            return False
        waiting.append(body[5:7])
        most = max(most, len(waiting))
        gevent.spawn_later(0.01, lambda: waiting and wire.send(packet(PUBACK, waiting.pop(0))))
        return True

    client = connect(scripted(properties=b"\x21\0\x03", on_packet=hold).address)
    deliveries = [client.publish("top", str(number), 1) for number in range(20)]
    assert client.flush(5)
    assert all(item.wait(0) for item in deliveries)
    assert most == 3


def test_the_receive_maximum_holds_for_what_is_sent_again(scripted: Scripted, connect: Connect) -> None:
    seen: list[int] = []

    def first_connection(wire: Any, first: int, body: bytes) -> bool:
        if broker.connections == 1 and first & 0xF0 == PUBLISH:
            seen.append(first)
            if len(seen) == 10:
                broker.properties = b"\x21\0\x02"
                wire.sock.close()
            return True
        if first & 0xF0 == PUBLISH:
            seen.append(first)
            return len(seen) < 13  # two are not acknowledged for a while
        return False

    broker = scripted(on_packet=first_connection)
    client = connect(broker.address, lambda *_: 0.01, properties={"sessionexpiryinterval": 9})
    for number in range(10):
        client.publish("t", str(number), 1)
    wait_until(lambda: len(seen) == 12)
    let_others_run()
    assert len(seen) == 12, "the third would break the receive maximum"


def test_a_broker_that_breaks_our_receive_maximum(scripted: Scripted, connect: Connect) -> None:
    log: list[Any] = []
    flood = b"".join(publish("in", b"x", 2, mid, properties=b"") for mid in (1, 2, 3))
    broker = scripted(on_open=lambda wire: wire.send(flood), on_packet=lambda wire, first, body: first >> 4 in (5, 6))
    client = connect(broker.address, give_up(log), properties={"receivemaximum": 2})
    wait_until(lambda: client.closed)
    assert log[-1][:2] == ("mqtt", "protocolerror")
    wait_until(lambda: broker.of_kind(DISCONNECT))
    assert broker.of_kind(DISCONNECT) == [b"\x93"]


def test_topic_aliases_of_the_broker(scripted: Scripted, connect: Connect) -> None:
    def alias(number: int) -> bytes:
        return struct.pack("!BH", 0x23, number)

    sent = [("one", alias(1)), ("two", alias(2)), ("", alias(1)), ("", alias(2)), ("three", alias(1)), ("", alias(1))]
    data = b"".join(publish(topic, b"", properties=props) for topic, props in sent)
    got: list[str] = []
    broker = scripted(on_open=lambda wire: wire.send(data))
    connect(broker.address, None, lambda topic, *_: got.append(topic), properties={"topicaliasmaximum": 2})
    wait_until(lambda: len(got) == len(sent))
    assert got == ["one", "two", "one", "two", "three", "three"]


@pytest.mark.parametrize(
    ("topic", "number", "code"), [("one", 3, 0x94), ("", 2, 0x82), ("", None, 0x82), ("one", 0, 0x82)]
)
def test_wrong_topic_aliases_end_the_connection(
    scripted: Scripted, connect: Connect, topic: str, number: int | None, code: int
) -> None:
    properties = b"" if number is None else struct.pack("!BH", 0x23, number)
    broker = scripted(on_open=lambda wire: wire.send(publish(topic, b"", properties=properties)))
    client = connect(broker.address, give_up([]), properties={"topicaliasmaximum": 2})
    wait_until(lambda: client.closed and broker.of_kind(DISCONNECT))
    assert broker.of_kind(DISCONNECT) == [bytes((code,))]


def test_topic_aliases_to_the_broker(scripted: Scripted, connect: Connect) -> None:
    broker = scripted(properties=b"\x22\0\x02")
    client = connect(broker.address, topicalias=True)
    for topic in ("one", "two", "three", "one", "two", "three"):
        client.publish(topic, b"x", 1)
    assert client.flush(5)
    bodies = broker.of_kind(PUBLISH)
    assert [body[2 : 2 + body[1]] for body in bodies] == [b"one", b"two", b"three", b"", b"", b"three"]
    assert [body[-4:-1] for body in bodies[:2]] == [b"\x23\0\x01", b"\x23\0\x02"]


def test_what_is_too_large_for_the_broker_fails(scripted: Scripted, connect: Connect) -> None:
    broker = scripted(properties=b"\x27\0\0\0\x40")
    client = connect(broker.address)
    large, small = client.publish("t", b"x" * 64, 1), client.publish("t", b"x" * 40, 1)
    assert client.flush(5)
    assert (large.error, small.error) == ("toolarge", None)
    assert [payload for _, payload in broker.received] == [b"x" * 40]


def test_a_subscription_above_the_broker_maximum_is_refused(scripted: Scripted, connect: Connect) -> None:
    broker = scripted(properties=b"\x27\0\0\0\x40")
    client = connect(broker.address)
    told: list[tuple[str, int]] = []
    client.subscribe("x" * 80, None, lambda topic, reason, _: told.append((topic, reason)))
    client.subscribe("short", None, lambda topic, reason, _: told.append((topic, reason)))
    assert client.flush(5)
    wait_until(lambda: len(told) == 2)
    assert told == [("x" * 80, 0x95), ("short", 0)]
    assert client.connected


def test_what_is_too_large_for_us_ends_the_connection(scripted: Scripted, connect: Connect) -> None:
    log: list[Any] = []
    broker = scripted(on_open=lambda wire: wire.send(publish("t", b"x" * 100, properties=b"")))
    client = connect(broker.address, give_up(log), properties={"maximumpacketsize": 100})
    wait_until(lambda: client.closed and broker.of_kind(DISCONNECT))
    assert log[-1][:2] == ("mqtt", "protocolerror")
    assert broker.of_kind(DISCONNECT) == [b"\x95"]


def test_a_broker_that_can_do_less(scripted: Scripted, connect: Connect) -> None:
    broker = scripted(properties=b"\x24\x01\x25\0")
    client = connect(broker.address)
    assert client.publish("t", b"x", 2, retain=True).wait(5)
    assert [first for first, _ in broker.packets if first & 0xF0 == PUBLISH] == [0x32]


RUBBISH = {
    "a second CONNACK": packet(0x20, b"\0\0\0"),
    "a packet of a client": packet(0x80, b"\0\x01\0"),
    "QoS 3": packet(0x36, b"\0\x01t\0\x01\0"),
    "a topic that is cut": packet(0x30, b"\0\x09t"),
    "a topic that is not UTF-8": packet(0x30, b"\0\x01\xff\0"),
    "a packet identifier of 0": packet(0x32, b"\0\x01t\0\0\0"),
    "an unknown property": packet(0x30, b"\0\x01t\x02\x7f\0"),
    "a length of five bytes": b"\x30\x80\x80\x80\x80\x01",
    "packet type 0": packet(0x00),
    "AUTH": packet(0xF0),
}


@pytest.mark.parametrize("what", RUBBISH)
def test_invalid_bytes_close_the_connection(scripted: Scripted, connect: Connect, what: str) -> None:
    log: list[Any] = []
    broker = scripted(on_open=lambda wire: wire.send(RUBBISH[what]))
    client = connect(broker.address, give_up(log))
    wait_until(lambda: client.closed)
    assert log[-1][:2] == ("mqtt", "protocolerror")


def test_something_that_is_no_broker(connect: Connect, scripted: Scripted) -> None:
    log: list[Any] = []
    broker = scripted(on_packet=lambda wire, first, body: (wire.send(b"HTTP/1.1 400 Bad Request\r\n\r\n"), True)[1])
    connect(broker.address, give_up(log), timeout=2)
    assert log[0][:2] in (("mqtt", "protocolerror"), ("sock", "timeout"))


def test_a_session_that_was_not_asked_for(scripted: Scripted, connect: Connect) -> None:
    log: list[Any] = []
    answer = packet(0x20, b"\x01\0\0")
    broker = scripted(on_packet=lambda wire, first, body: first == CONNECT and (wire.send(answer), True)[1])
    connect(broker.address, give_up(log))
    assert log[0][:2] == ("mqtt", "protocolerror")


def test_a_refused_message_is_reported(scripted: Scripted, connect: Connect) -> None:
    def refuse(wire: Any, first: int, body: bytes) -> bool:
        if first & 0xF0 != PUBLISH:
            return False
        wire.send(packet(0x40 if first & 6 == 2 else 0x50, body[3:5] + b"\x87"))
        return True

    client = connect(scripted(on_packet=refuse).address)
    one, two = client.publish("t", b"x", 1), client.publish("t", b"x", 2)
    for item in (one, two):
        with pytest.raises(DroppedError, match="not authorized") as caught:
            item.wait(5)
        assert caught.value.reason == 0x87
    assert one.error == two.error == 0x87
    assert client.backlog == 0


def test_a_client_may_end_while_it_connects(scripted: Scripted, connect: Connect) -> None:
    silent = scripted(on_packet=lambda *_: True)
    for address in ("192.0.2.1:1883", silent.address):
        client = connect(address, wait=False, timeout=30)
        let_others_run()
        client.disconnect()
        wait_until(lambda client=client: client.closed)


def test_a_callback_that_fails_costs_nothing_else(
    scripted: Scripted, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    broker = scripted(push=[("in", 1, b"1"), ("in", 1, b"2")])
    got: list[bytes] = []

    def onpub(topic: str, payload: bytes, *_: Any) -> None:
        got.append(payload)
        raise RuntimeError("oh no")

    connect(broker.address, None, onpub).subscribe("in")
    wait_until(lambda: len(got) == 2)
    wait_until(lambda: caplog.text.count("oh no") >= 2)


def test_a_packet_identifier_is_used_again(scripted: Scripted, connect: Connect) -> None:
    numbers = iter(range(1, 4))

    def on_packet(wire: Any, first: int, body: bytes) -> bool:
        if first & 0xF0 == PUBREC:
            wire.send(packet(0x62, body[:2]))
        elif first & 0xF0 == PUBCOMP and (number := next(numbers, None)):
            wire.send(publish("in", str(number).encode(), 2, 1, properties=b""))
        return first & 0xF0 in (PUBREC, PUBCOMP)

    got: list[bytes] = []
    broker = scripted(on_open=lambda wire: wire.send(publish("in", b"0", 2, 1, properties=b"")), on_packet=on_packet)
    connect(broker.address, None, lambda topic, payload, *_: got.append(payload))
    wait_until(lambda: len(got) == 4)
    assert got == [b"0", b"1", b"2", b"3"]


def test_process_exit_is_reported(scripted: Scripted, connect: Connect) -> None:
    log: list[Any] = []
    broker = scripted()
    client = connect(broker.address, lambda *told: log.append(told) or True)
    client.shutdown()
    wait_until(lambda: client.closed and broker.of_kind(DISCONNECT))
    assert [told[:2] for told in log] == [("mqtt", "connect"), ("sock", "sysshutdown")]
    assert len(broker.of_kind(DISCONNECT)) == 1

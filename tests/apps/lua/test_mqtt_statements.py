"""`mqttc` and `mqtt3c`: packets, callbacks and methods as the documents state them (spec: smq §8, §9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.apps.lua.mqtt_languages import (
    HOST,
    ONCE,
    Case,
    PythonHalf,
    flags,
    keep,
    last,
)
from tests.clients.mqtt.scripted import (
    CONNECT,
    DISCONNECT,
    PUBLISH,
    SUBSCRIBE,
    UNSUBSCRIBE,
    ScriptedBroker,
    packet,
    publish,
    stall,
)
from tests.support.waiting import wait_until

FULL = {"port": 0, "clientidentifier": "me", "keepalive": 77, "username": "anna", "password": "secret"}
WILL = {"topic": "gone", "payload": "bye", "qos": 1, "retain": True, "properties": {"willdelayinterval": 5}}
# ---- what is sent

V5 = b"\0\x04MQTT\x05"
SIZE = b"\x05\x27\0\x10\0\0"
"""The properties of CONNECT when none are given: the largest packet that is taken."""
V4 = b"\0\x04MQTT\x04"
CONNECTS: dict[str, Case] = {
    "options": Case(
        ONCE
        + "mqttc.create('127.0.0.1', keep, {port = port, clientidentifier = 'me', keepalive = 77, username = 'anna',"
        " password = 'secret'})",
        lambda it: it.mqttc.create(HOST, keep, {**FULL, "port": it.port}),
        sent={CONNECT: V5 + b"\xc2\0\x4d" + SIZE + b"\0\x02me\0\x04anna\0\x06secret"},
    ),
    "keepalive 0": Case(
        ONCE + "mqttc.create('127.0.0.1', keep, {port = port, keepalive = 0})",
        lambda it: it.mqttc.create(HOST, keep, {"port": it.port, "keepalive": 0}),
        sent={CONNECT: V5 + b"\x02\0\0" + SIZE},
    ),
    "will": Case(
        ONCE + "mqttc.create('127.0.0.1', keep, {port = port, clientidentifier = 'me', keepalive = 0, will = {"
        "topic = 'gone', payload = 'bye', qos = 1, retain = true, properties = {willdelayinterval = 5}}})",
        lambda it: it.mqttc.create(HOST, keep, port=it.port, clientidentifier="me", keepalive=0, will=WILL),
        sent={CONNECT: V5 + b"\x2e\0\0" + SIZE + b"\0\x02me\x05\x18\0\0\0\x05\0\x04gone\0\x03bye"},
    ),
    "will of QoS 0": Case(
        ONCE + "mqttc.create('127.0.0.1', keep, {port = port, clientidentifier = 'me', keepalive = 0, will = {"
        "topic = 'gone', payload = 'bye'}})",
        lambda it: it.mqttc.create(
            HOST, keep, port=it.port, clientidentifier="me", keepalive=0, will={"topic": "gone", "payload": "bye"}
        ),
        sent={CONNECT: V5 + b"\x06\0\0" + SIZE + b"\0\x02me\0\0\x04gone\0\x03bye"},
    ),
    "properties": Case(
        ONCE + "mqttc.create('127.0.0.1', keep, nil, {port = port, keepalive = 0}, {sessionexpiryinterval = 9, "
        "maximumpacketsize = 1000, requestresponseinformation = 1, requestprobleminformation = 0, colour = 'red'})",
        lambda it: it.mqttc.create(
            HOST,
            keep,
            None,
            {"port": it.port, "keepalive": 0},
            {
                "sessionexpiryinterval": 9,
                "maximumpacketsize": 1000,
                "requestresponseinformation": 1,
                "requestprobleminformation": 0,
                "colour": "red",
            },
        ),
        has={CONNECT: [b"\x11\0\0\0\x09", b"\x27\0\0\x03\xe8", b"\x19\x01", b"\x17\0", b"\x26\0\x06colour\0\x03red"]},
    ),
    "the older module, create": Case(
        ONCE + "mqtt3c.create('127.0.0.1', keep, put, {port = port, clientidentifier = 'me', keepalive = 77, "
        "username = 'anna', password = 'secret', will = {topic = 'gone', payload = 'bye'}})",
        lambda it: it.mqtt3c.create(
            HOST, keep, it.put, {**FULL, "port": it.port, "will": {"topic": "gone", "payload": "bye"}}
        ),
        sent={CONNECT: V4 + b"\xc6\0\x4d\0\x02me\0\x04gone\0\x03bye\0\x04anna\0\x06secret"},
        broker={"version": 4},
    ),
    "the older form": Case(
        "mqtt = mqtt3c.connect('127.0.0.1', put, {port = port, id = 'me', uname = 'anna', passwd = 'secret',"
        " will = {topic = 'gone', message = 'bye'}})",
        lambda it: it.mqtt3c.connect(
            HOST, it.put, port=it.port, id="me", uname="anna", passwd="secret", will={"topic": "gone", "message": "bye"}
        ),
        sent={CONNECT: V4 + b"\xc6\x02\x58\0\x02me\0\x04gone\0\x03bye\0\x04anna\0\x06secret"},
        broker={"version": 4},
    ),
    "the older form, payload of the will": Case(
        "mqtt = mqtt3c.connect('127.0.0.1', put, {port = port, id = 'me', keepalive = 61,"
        " will = {topic = 'gone', payload = 'bye'}})",
        lambda it: it.mqtt3c.connect(
            HOST, it.put, port=it.port, id="me", keepalive=61, will={"topic": "gone", "payload": "bye"}
        ),
        sent={CONNECT: V4 + b"\x06\0\x3d\0\x02me\0\x04gone\0\x03bye"},
        broker={"version": 4},
    ),
    "the older form, short keepalive": Case(
        "mqtt = mqtt3c.connect('127.0.0.1', put, {port = port, id = 'me', keepalive = 5})",
        lambda it: it.mqtt3c.connect(HOST, it.put, port=it.port, id="me", keepalive=5),
        sent={CONNECT: V4 + b"\x02\0\x3c\0\x02me"},
        broker={"version": 4},
    ),
    "the older form of mqttc": Case(
        "mqtt = mqttc.connect('127.0.0.1', put, {port = port, id = 'me'})",
        lambda it: it.mqttc.connect(HOST, it.put, port=it.port, id="me"),
        sent={CONNECT: V4 + b"\x02\x02\x58\0\x02me"},
        broker={"version": 4},
    ),
}


@pytest.mark.parametrize("what", CONNECTS)
def test_connect_packets(run: Callable[[Case], ScriptedBroker], what: str) -> None:
    broker = run(CONNECTS[what])
    body = last(broker, CONNECT)
    if what == "keepalive 0":  # without a name: a random one
        size = int.from_bytes(body[16:18])
        assert len(body) == 18 + size
        assert size >= 8
    assert flags(body) & 2, "a clean start"


# ---- what is told

ON = "local mqtt mqtt = mqttc.create('127.0.0.1', function(...) %s end, %s, {port = port%s}%s)"
ALL = bytes.fromhex(
    "120003 626f78  13 0009  21 0014  22 0007  24 01  25 00  1f 0002 6869  28 00  29 01  2a 00".replace(" ", "")
)
ALL += b"\x26\0\x06colour\0\x03red"
NAMES = {
    "assignedclientidentifier": "box",
    "serverkeepalive": 9,
    "receivemaximum": 20,
    "topicaliasmaximum": 7,
    "maximumqos": 1,
    "retainavailable": 0,
    "reasonstring": "hi",
    "wildcardsubscriptionavailable": 0,
    "subscriptionidentifieravailable": 1,
    "sharedsubscriptionavailable": 0,
    "colour": "red",
}
LUA_NAMES = f"for _, name in ipairs{{{', '.join(map(repr, NAMES))}}} do put(name, status.properties[name]) end"


def told_properties(it: PythonHalf, status: Any) -> bool:
    for name in NAMES:
        it.put(name, status["properties"].get(name))
    return True


def of_python(**options: Any) -> Callable[[PythonHalf], object]:
    """A client of mqttc that tells type and code, and what `more` says of the status; `answers` are its decisions."""
    answers = iter(options.pop("answers", ()))

    def make(it: PythonHalf) -> None:
        def onstatus(kind: str, code: str, status: Any) -> Any:
            it.put(kind, code, status.get("reasoncode"))
            return next(answers, False)

        it.mqttc.create(HOST, onstatus, {"port": it.port, **options})

    return make


def of_lua(*answers: str, options: str = "") -> str:
    return f"""local answers = {{n = 0, {", ".join(answers)}}}
    mqttc.create('127.0.0.1', function(kind, code, status)
      put(kind, code, status and status.reasoncode)
      answers.n = answers.n + 1
      return answers[answers.n]
    end, {{port = port{options}}})"""


def ends(wire: Any) -> None:
    wire.send(packet(DISCONNECT, b"\x8b\0"))


def rubbish(wire: Any) -> None:
    wire.send(packet(0x36, b"\0\x01t\0\x01\0"))


def silent(wire: Any, first: int, body: bytes) -> bool:
    return first == 0xC0 and (stall(), True)[1]


def disconnects(it: PythonHalf, *reason: int) -> None:
    def onstatus(kind: str, code: str, status: Any) -> object:
        if reason:
            mqtt.disconnect(*reason)
            return True
        it.put(kind, code)
        it.put(mqtt.disconnect())
        it.put(mqtt.disconnect())
        return 0.01

    mqtt, _ = it.mqttc.create(HOST, onstatus, port=it.port)


ACCEPTED, ENDED = ("mqtt", "connect", 0), ("mqtt", "disconnect", 139)
STATUS: dict[str, Case] = {
    "properties of CONNACK": Case(
        ON % (f"local status = select(3, ...) {LUA_NAMES} return true", "nil", "", ""),
        lambda it: it.mqttc.create(HOST, lambda kind, code, status: told_properties(it, status), port=it.port),
        list(NAMES.items()),
        broker={"properties": ALL},
    ),
    "a refusal": Case(of_lua(), of_python(), [("mqtt", "connect", 135)], broker={"code": 135}),
    "a DISCONNECT": Case(of_lua("true"), of_python(answers=[True]), [ACCEPTED, ENDED], broker={"on_open": ends}),
    "rubbish": Case(
        of_lua("true"),
        of_python(answers=[True]),
        [ACCEPTED, ("mqtt", "protocolerror", 129)],
        broker={"on_open": rubbish},
    ),
    "no answer to a ping": Case(
        of_lua("true", options=", keepalive = 1"),
        of_python(answers=[True], keepalive=1),
        [ACCEPTED, ("mqtt", "pingtimeout", None)],
        broker={"on_packet": silent},
    ),
    "a lost connection": Case(
        of_lua("true"),
        of_python(answers=[True]),
        [ACCEPTED, ("sock", "socketreadfailed", None)],
        broker={"on_open": lambda wire: wire.sock.shutdown(2)},
    ),
    "a number of seconds": Case(
        of_lua("true", "0.01", "true"),
        of_python(answers=[True, 0.01, True]),
        [ACCEPTED, ENDED] * 2,
        broker={"on_open": ends},
    ),
    "true after an end": Case(
        of_lua("true", "true", "true"),
        of_python(answers=[True, True, True]),
        [ACCEPTED, ENDED] * 2,
        broker={"on_open": ends},
    ),
    "a falsy answer to an accepted connection": Case(
        of_lua("false"), of_python(answers=[False]), [ACCEPTED], sent={DISCONNECT: b""}
    ),
    "its own disconnect": Case(
        ON % ("local a, b = ... put(a, b) put(mqtt:disconnect()) put(mqtt:disconnect()) return 0.01", "nil", "", ""),
        lambda it: disconnects(it),
        [("mqtt", "connect"), (True,), (False,)],
        sent={DISCONNECT: b""},
    ),
    "its own disconnect with a reason": Case(
        ON % ("mqtt:disconnect(4) return true", "nil", "", ""),
        lambda it: disconnects(it, 4),
        sent={DISCONNECT: b"\x04"},
    ),
}


@pytest.mark.parametrize("what", STATUS)
def test_onstatus(run: Callable[[Case], ScriptedBroker], what: str) -> None:
    broker = run(STATUS[what])
    assert len(broker.of_kind(CONNECT)) == STATUS[what].told.count(ACCEPTED) or what not in SEVERAL


SEVERAL = ("a number of seconds", "true after an end", "a falsy answer to an accepted connection")


# ---- messages and subscriptions

SET = {
    "payloadformatindicator": 1,
    "messageexpiryinterval": 7,
    "contenttype": "text",
    "responsetopic": "r/a",
    "correlationdata": b"id",
    "colour": "red",
}
PIECES = [
    b"\x01\x01",
    b"\x02\0\0\0\x07",
    b"\x03\0\x04text",
    b"\x08\0\x03r/a",
    b"\x09\0\x02id",
    b"\x26\0\x06colour\0\x03red",
]
LUA_SET = """{payloadformatindicator = 1, messageexpiryinterval = 7, contenttype = "text", responsetopic = "r/a",
  correlationdata = "id", colour = "red"}"""
KEEP = ONCE + "local mqtt = mqttc.create('127.0.0.1', keep, function(topic, payload, prop, cpt)"
KEEP += " put(topic, payload, prop.contenttype, cpt) end, {port = port})"
KEEP3 = "local mqtt = mqtt3c.create('127.0.0.1', function() return true end, put, {port = port})"


def kept(
    act: Callable[[PythonHalf, Any], object], module: str = "mqttc", **options: Any
) -> Callable[[PythonHalf], object]:
    """A client that keeps its connections, and what is done with it."""

    def make(it: PythonHalf) -> None:
        def onpub(topic: str, payload: bytes, prop: Any, cpt: int) -> None:
            it.put(topic, payload, prop.get("contenttype"), cpt)

        mqtt, _ = getattr(it, module).create(
            HOST, keep, it.put if module == "mqtt3c" else onpub, port=it.port, **options
        )
        act(it, mqtt)

    return make


def acks(kind: int, body: bytes) -> Callable[[Any, int, bytes], bool]:
    """Answers a request, whose kind this is, with an acknowledgement: `body` behind the packet identifier."""

    def on_packet(wire: Any, first: int, request: bytes) -> bool:
        if first & 0xF0 != kind:
            return False
        wire.send(packet(kind + 0x10, request[:2] + body))
        return True

    return on_packet


def by_identifier(wire: Any, first: int, request: bytes) -> bool:
    """Messages come with the identifier of a subscription, whatever their topics are."""
    if first & 0xF0 != SUBSCRIBE:
        return False
    wire.send(packet(0x90, request[:2] + b"\0\0"))
    if request[-2:] == b"b\0":
        wire.send(publish("any", b"1", properties=b"\x0b\x01") + publish("a", b"2", properties=b""))
    return True


def with_flags(wire: Any) -> None:
    wire.send(packet(0x3B, b"\0\x01t\0\x07\x07\x03\0\x04texthello"))


def twice(wire: Any) -> None:
    wire.send(publish("t", b"x", 2, 1, properties=b"") + publish("t", b"x", 2, 1, properties=b"", dup=True))
    wire.send(publish("t", b"behind", properties=b""))


MESSAGES: dict[str, Case] = {
    "publish with options and properties": Case(
        KEEP + f"mqtt:publish('t', 'hello', {{qos = 1, retain = true}}, {LUA_SET})",
        kept(lambda it, mqtt: mqtt.publish("t", "hello", {"qos": 1, "retain": True}, SET)),
        has={PUBLISH: [*PIECES, b"\0\x01t\0\x01", b"hello"]},
    ),
    "publish is false without a connection, and waits": Case(
        KEEP + "put(mqtt:publish('t', 'hello')) local n, on, off = mqtt:status() put(n, on, off)",
        kept(lambda it, mqtt: (it.put(mqtt.publish("t", "hello")), it.put(*mqtt.status()))),
        [(False,), (1, False, False)],
        sent={PUBLISH: b"\0\x01t\0hello"},
    ),
    "calls are true with a connection": Case(
        """local mqtt mqtt = mqttc.create('127.0.0.1', function()
          put(mqtt:publish('t', 'x'), mqtt:subscribe 't', mqtt:unsubscribe 't')
          local n, on, off = mqtt:status() put(on, off)
          return true
        end, {port = port})""",
        lambda it: connected(it),
        [(True, True, True), (True, False)],
    ),
    "after disconnect": Case(
        KEEP
        + """mqtt:disconnect() put(mqtt:publish('t', 'x'), mqtt:subscribe 't', mqtt:unsubscribe 't')
        while not select(3, mqtt:status()) do ba.sleep(5) end put((select(3, mqtt:status())))""",
        kept(
            lambda it, mqtt: (
                mqtt.disconnect(),
                it.put(mqtt.publish("t", "x"), mqtt.subscribe("t"), mqtt.unsubscribe("t")),
                wait_until(lambda: mqtt.status()[2]),
                it.put(mqtt.status()[2]),
            )
        ),
        [(False, False, False), (True,)],
    ),
    "subscribe with options": Case(
        KEEP + "mqtt:subscribe('t', {qos = 1, nolocal = true, retainaspublished = true, retainhandling = 2})",
        kept(
            lambda it, mqtt: mqtt.subscribe(
                "t", {"qos": 1, "nolocal": True, "retainaspublished": True, "retainhandling": 2}
            )
        ),
        sent={SUBSCRIBE: b"\0\x01\0\0\x01t\x2d"},
    ),
    "onsuback": Case(
        KEEP + "mqtt:subscribe('t', function(topic, reason, prop) put(topic, reason, prop.reasonstring) end, {qos = 1},"
        " {colour = 'red'})",
        kept(
            lambda it, mqtt: mqtt.subscribe(
                "t",
                lambda topic, reason, prop: it.put(topic, reason, prop["reasonstring"]),
                {"qos": 1},
                {"colour": "red"},
            )
        ),
        [("t", 128, "no")],
        has={SUBSCRIBE: [b"\x26\0\x06colour\0\x03red"]},
        broker={"on_packet": acks(SUBSCRIBE, b"\x05\x1f\0\x02no\x80")},
    ),
    "onunsuback": Case(
        KEEP + "mqtt:unsubscribe('t', function(topic, reason, prop) put(topic, reason, prop.reasonstring) end,"
        " {colour = 'red'})",
        kept(
            lambda it, mqtt: mqtt.unsubscribe(
                "t", lambda topic, reason, prop: it.put(topic, reason, prop["reasonstring"]), {"colour": "red"}
            )
        ),
        [("t", 17, "no")],
        has={UNSUBSCRIBE: [b"\x26\0\x06colour\0\x03red"]},
        broker={"on_packet": acks(UNSUBSCRIBE, b"\x05\x1f\0\x02no\x11")},
    ),
    "onpub of a subscription": Case(
        KEEP
        + "mqtt:subscribe('a', {onpub = function(topic, payload) put('own', topic, payload) end}) mqtt:subscribe 'b'",
        kept(
            lambda it, mqtt: (
                mqtt.subscribe("a", {"onpub": lambda topic, payload, *_: it.put("own", topic, payload)}),
                mqtt.subscribe("b"),
            )
        ),
        [("own", "any", "1"), ("a", "2", None, 0x30)],
        broker={"on_packet": by_identifier},
    ),
    "onpub gets properties and the first byte": Case(
        KEEP, kept(lambda it, mqtt: None), [("t", "hello", "text", 0x3B)], broker={"on_open": with_flags}
    ),
    "a message of QoS 2 that comes twice": Case(
        KEEP,
        kept(lambda it, mqtt: None),
        [("t", "x", None, 0x34), ("t", "behind", None, 0x30)],
        broker={"on_open": twice},
    ),
    "the older module: onpub, suback and unsuback": Case(
        KEEP3
        + """mqtt:subscribe('t', function(...) put('suback', ...) end)
        mqtt:subscribe('own', {onpub = function(...) put('own', ...) end})
        mqtt:unsubscribe('t', function(...) put('unsuback', ...) end)""",
        kept(
            lambda it, mqtt: (
                mqtt.subscribe("t", lambda *code: it.put("suback", *code)),
                mqtt.subscribe("own", {"onpub": lambda *message: it.put("own", *message)}),
                mqtt.unsubscribe("t", lambda *code: it.put("unsuback", *code)),
            ),
            "mqtt3c",
        ),
        [("suback", 0), ("own", "own", "1"), ("t", "2"), ("unsuback",)],
        broker={"version": 4, "push": [("own", 0, b"1"), ("t", 0, b"2")]},
    ),
    "the older module: publish waits for the connection": Case(
        KEEP3 + "put(mqtt:publish('t', 'hello'))",
        kept(lambda it, mqtt: it.put(mqtt.publish("t", "hello")), "mqtt3c"),
        [(False,)],
        sent={PUBLISH: b"\0\x01thello"},
        broker={"version": 4},
    ),
}


def connected(it: PythonHalf) -> None:
    def onstatus(*_: object) -> bool:
        it.put(mqtt.publish("t", "x"), mqtt.subscribe("t"), mqtt.unsubscribe("t"))
        return it.put(*mqtt.status()[1:])

    mqtt, _ = it.mqttc.create(HOST, onstatus, port=it.port)


@pytest.mark.parametrize("what", MESSAGES)
def test_messages(run: Callable[[Case], ScriptedBroker], what: str) -> None:
    broker = run(MESSAGES[what])
    if what == "publish with options and properties":
        assert [first for first, _ in broker.packets if first & 0xF0 == PUBLISH] == [0x33]

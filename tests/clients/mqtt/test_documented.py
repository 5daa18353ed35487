"""`smqrt.mqttc` and `smqrt.mqtt3c`: the documented interface in Python."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
import gevent.socket
import gevent.ssl
import pytest

from smqrt import mqtt3c, mqttc
from smqrt.errors import ArgumentError, QueueFullError
from smqrt.transport.stream import Stream
from smqrt.transport.tls_contexts import CertStore, ClientTls
from tests.clients.mqtt.mosquitto import Mosquitto, secure
from tests.clients.mqtt.scripted import CONNECT, PINGREQ, ScriptedBroker, publish, stall
from tests.support.pki import Authority
from tests.support.waiting import wait_until

__all__ = ["secure"]

pytestmark = pytest.mark.servers

Scripted = Callable[..., ScriptedBroker]
Log = list[Any]


@pytest.fixture
def clients() -> Iterator[Log]:
    """Clients that end with the test."""
    made: Log = []
    yield made
    for mqtt in made:
        mqtt.disconnect()


def port_of(broker: ScriptedBroker) -> int:
    return int(broker.address.split(":")[1])


def keep(*_: object) -> bool:
    return True


# ---- create


def test_mqttc_create_publishes_and_receives(mosquitto: Mosquitto, clients: Log) -> None:
    log: Log = []

    def onstatus(kind: str, code: str, status: Any) -> bool:
        log.append((kind, code, status["reasoncode"]))
        mqtt.subscribe("doc/#", lambda *ack: log.append(ack), {"qos": 1})
        mqtt.publish("doc/a", "text", {"qos": 1}, {"contenttype": "x"})
        return True

    mqtt, err = mqttc.create(
        "127.0.0.1", onstatus, lambda *message: log.append(message), {"port": mosquitto.port}, {"receivemaximum": 7}
    )
    clients.append(mqtt)
    assert err is None
    assert mqtt.status() == (0, False, False)
    wait_until(lambda: len(log) == 3, log)
    assert log[:2] == [("mqtt", "connect", 0), ("doc/#", 1, {})]
    topic, payload, prop, cpt = log[2]
    assert (topic, payload, prop["contenttype"], cpt & 6) == ("doc/a", bytearray(b"text"), "x", 2)
    assert type(payload) is bytearray
    assert mqtt.status() == (0, True, False)
    assert mqtt.disconnect() is True
    assert mqtt.publish("doc/a", "late") is False
    assert mqtt.subscribe("doc/late") is mqtt.unsubscribe("doc/late") is False
    wait_until(lambda: mqtt.status() == (0, False, True))


def test_the_third_argument_may_be_op(mosquitto: Mosquitto, clients: Log) -> None:
    log: Log = []
    op = {"port": mosquitto.port, "recbta": False}
    mqtt, _ = mqttc.create("127.0.0.1", lambda *what: log.append(what) or True, op, {"requestprobleminformation": 1})
    clients.append(mqtt)
    mqtt.subscribe("third", {"onpub": lambda *message: log.append(message)}, {"colour": "red"})
    mqtt.publish("third", 42, qos=1)
    wait_until(lambda: len(log) == 2, log)
    assert log[1][:2] == ("third", b"42")
    assert type(log[1][1]) is bytes


def test_recbta_is_for_messages_of_one_subscription_too(mosquitto: Mosquitto, clients: Log) -> None:
    log: Log = []
    mqtt, _ = mqttc.create("127.0.0.1", keep, port=mosquitto.port)
    clients.append(mqtt)
    mqtt.subscribe("one", onpub=lambda topic, payload, *_: log.append((topic, type(payload))))
    mqtt.publish("one", b"1")
    wait_until(lambda: log)
    assert log == [("one", bytearray)]


def test_mqtt3c_create_speaks_3_1_1_with_bytes(scripted: Scripted, clients: Log) -> None:
    broker, log = scripted(4, push=[("t", 0, b"hi")]), []
    will = {"topic": "gone", "message": "bye"}
    op = {"id": "me", "uname": "anna", "passwd": "secret", "will": will, "keepalive": 7, "intf": "127.0.0.1"}
    mqtt, err = mqtt3c.create(broker.address, keep, lambda *message: log.append(message), op)
    clients.append(mqtt)
    assert err is None
    mqtt.subscribe("t", lambda *code: log.append(code))
    wait_until(lambda: len(log) == 2, log)
    assert log == [(0,), ("t", b"hi")]
    mqtt.unsubscribe("t", lambda: log.append("gone"))
    wait_until(lambda: log[-1] == "gone")
    body = broker.of_kind(CONNECT)[0]
    assert body == b"\0\x04MQTT\x04\xc6\0\x07\0\x02me\0\x04gone\0\x03bye\0\x04anna\0\x06secret"


def test_invalid_addresses_are_reported_to_onstatus() -> None:
    for addr in (None, 5, "h:x", "mqtt://[::1", "no.such.host.invalid"):
        log: Log = []
        mqtt, err = mqttc.create(addr, lambda *what: log.append(what))  # noqa: B023
        assert (log, err) == ([], None)
        wait_until(lambda: log)  # noqa: B023
        assert log == [("sock", "cannotresolve", {})]
        wait_until(lambda: mqtt.status()[2])  # noqa: B023


WRONG: dict[str, Callable[[], object]] = {
    "onstatus must be a function": lambda: mqttc.create("h", None),  # type: ignore[arg-type]
    "onpub must be a function": lambda: mqttc.create("h", keep, 5),  # type: ignore[arg-type]
    "op must be a dict": lambda: mqttc.create("h", keep, None, 5),  # type: ignore[arg-type]
    "port must be a whole number": lambda: mqttc.create("h", keep, port="x"),
    "will must be a mapping": lambda: mqttc.create("h", keep, will={}),
    "timeout must be a number greater than 0, at most 86400000 (milliseconds)": lambda: mqttc.create(
        "h", keep, timeout=0
    ),
    "receivemaximum": lambda: mqttc.create("h", keep, None, {}, {"receivemaximum": 0}),
    "recbta must be true or false": lambda: mqttc.create("h", keep, recbta="no"),
    "addr must be a host name": lambda: mqtt3c.connect(None, keep),
    "addr must be": lambda: mqtt3c.connect(lambda *_: None, keep),
    "onpub must be": lambda: mqtt3c.connect("h", None),  # type: ignore[arg-type]
    "onmessage must be a function": lambda: mqttc.create("h", keep, onmessage=5),
    "onmessage must be": lambda: mqtt3c.connect("h", None, onmessage="x"),
    "keepalive must be a whole number": lambda: mqttc.connect("h", keep, keepalive="x"),
    "intf must be a string": lambda: mqttc.create("h", keep, intf=5),
    "passwd must be a string or bytes": lambda: mqtt3c.connect("h", keep, uname="anna", passwd=5),
    "port must be": lambda: mqtt3c.connect("h", keep, {"port": 0}),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_wrong_arguments_are_named(sentence: str) -> None:
    with pytest.raises(ArgumentError) as error:
        WRONG[sentence]()
    assert sentence in str(error.value)


def test_a_full_queue_raises(scripted: Scripted, clients: Log) -> None:
    mqtt, _ = mqttc.create("127.0.0.1:1", lambda *_: 60, queuesize=2)
    clients.append(mqtt)
    assert mqtt.publish("a", "1") is False
    assert mqtt.publish("a", "2") is False
    with pytest.raises(QueueFullError):
        mqtt.publish("a", "3")
    assert mqtt.status() == (2, False, False)
    small, _ = mqttc.create(scripted().address, keep, maxpacketsize=64)
    clients.append(small)
    with pytest.raises(ArgumentError, match="maxpacketsize"):
        small.publish("a", b"x" * 65)


@pytest.mark.parametrize("make", [mqttc.create, mqtt3c.create, mqttc.connect, mqtt3c.connect])
def test_unknown_options_are_one_warning(
    scripted: Scripted, clients: Log, caplog: pytest.LogCaptureFixture, make: Any
) -> None:
    broker = scripted(5 if make is mqttc.create else 4)
    mqtt, err = make(broker.address, keep, op={"colour": "red", "shark": None}, timeout=4000)
    clients.append(mqtt)
    assert err is None
    mqtt.publish("a", "b", {"qos": 0, "size": 1})
    mqtt.subscribe("a", {"onpub": keep}, nosuch=1)
    told = [line.partition(": ")[2] for line in caplog.messages if "unknown" in line]
    assert told == [f"unknown option {name!r} is ignored" for name in ("colour", "size", "nosuch")]
    assert caplog.messages[0].startswith("mqttc.create:" if make is mqttc.create else "mqtt3c.")


# ---- connections that the application makes


def plain(port: int) -> object:
    return socket.create_connection(("127.0.0.1", port))


def of_gevent(port: int) -> object:
    return gevent.socket.create_connection(("127.0.0.1", port))


def stream(port: int) -> object:
    return Stream.connect("127.0.0.1", port)


SOCKETS = {"socket": plain, "gevent": of_gevent, "stream": stream}


@pytest.mark.parametrize("kind", SOCKETS)
def test_ready_sockets(mosquitto: Mosquitto, kind: str, clients: Log) -> None:
    log: Log = []
    sock: Any = SOCKETS[kind](mosquitto.port)
    mqtt, err = mqtt3c.connect(sock, lambda *message: (log.append(message), mqtt.disconnect()))
    assert mqtt is not None
    assert err is None
    assert mqtt.sock is not None
    assert mqtt.sock.peername() == ("127.0.0.1", mosquitto.port)
    if kind != "stream":
        assert sock.fileno() == -1, "it belongs to the client"
    mqtt.subscribe("ready")
    mqtt.publish("ready", "hi")
    assert mqtt.run() == (None, "disconnect")
    assert log == [("ready", b"hi")]
    other, _ = mqttc.create(SOCKETS[kind](mosquitto.port), keep)
    clients.append(other)
    wait_until(lambda: other.status()[1])
    assert other.sock is not None


def test_sockets_that_are_none(mosquitto: Mosquitto) -> None:
    closed = socket.create_connection(("127.0.0.1", mosquitto.port))
    closed.close()
    for sock, word in ((socket.socket(), "socketclosed"), (closed, "socketclosed")):
        assert mqtt3c.connect(sock, keep) == (None, word)
        log: Log = []
        mqttc.create(sock, lambda *what: log.append(what[:2]))  # noqa: B023
        wait_until(lambda: log)  # noqa: B023
        assert log == [("sock", word)]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.connect(("127.0.0.1", mosquitto.port))
        assert mqtt3c.connect(udp, keep) == (None, "invalidsocketcon")


def test_a_function_makes_the_connection(mosquitto: Mosquitto, clients: Log, caplog: pytest.LogCaptureFixture) -> None:
    log: Log = []

    def connect(mqtt: object, op: dict[str, Any]) -> object:
        log.append((mqtt is made[0], op["port"] if op["mine"] else None))
        match len(log):
            case 1:
                return None, "notyet"
            case 3:
                raise ValueError("oh no")
            case 5:
                raise ConnectionRefusedError
            case 7:
                return 5
        return SOCKETS["gevent"](op["port"])

    def onstatus(kind: str, code: str, _status: object) -> float:
        log.append((kind, code))
        return 0.001

    made = mqttc.create(connect, onstatus, port=mosquitto.port, mine=True)
    clients.append(made[0])
    wait_until(lambda: len(log) == 10, log)
    assert log[::2] == [(True, mosquitto.port)] * 5
    assert [code for _, code in log[1::2]] == ["notyet", "failed", "cannotconnect", "failed", "connect"]
    assert "oh no" in caplog.text


def tls_socket(kind: Any, port: int, authority: Path | None, verify: bool = True) -> Any:
    context = kind.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = verify
    context.verify_mode = ssl.CERT_REQUIRED if verify else ssl.CERT_NONE
    if authority is not None:
        context.load_verify_locations(authority)
    sock: Any = SOCKETS["gevent" if kind is gevent.ssl else "socket"](port)
    return context.wrap_socket(sock, server_hostname="localhost")


@pytest.mark.parametrize("kind", [ssl, gevent.ssl])
def test_ready_tls_sockets(secure: Mosquitto, tmp_path: Path, kind: Any) -> None:
    big, log = b"x" * 60_000, []
    sock = tls_socket(kind, secure.port, tmp_path / "ca.pem")
    mqtt, err = mqtt3c.connect(sock, lambda topic, payload: log.append(payload), uname="anna", passwd="secret")
    assert mqtt is not None, err
    mqtt.subscribe("tls")
    for _ in range(40):
        mqtt.publish("tls", big, qos=1)
    gevent.spawn(lambda: (wait_until(lambda: len(log) == 40), mqtt.disconnect()))
    assert mqtt.run() == (None, "disconnect")
    assert log == [big] * 40
    wait_until(lambda: sock.fileno() == -1)


# ---- trust


def test_connect_to_an_untrusted_broker_without_credentials(secure: Mosquitto, caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    for make in (mqttc.connect, mqtt3c.connect):
        caplog.clear()
        mqtt, err = make("localhost", keep, {"port": secure.port, "secure": True, "id": "me"})
        assert mqtt is not None, err
        mqtt.close()
        assert len(caplog.messages) == 1
        assert "the certificate of localhost is not trusted (cn)" in caplog.text


SECRETS: list[dict[str, object]] = [{"uname": "anna"}, {"username": "anna", "passwd": b"x"}]


@pytest.mark.parametrize("secrets", SECRETS)
def test_with_credentials_the_broker_must_be_trusted(silent_tls: tuple[int, Log], secrets: dict[str, object]) -> None:
    port, received = silent_tls
    op: dict[str, object] = {"port": port, "secure": True}
    assert mqtt3c.connect("localhost", keep, op, **secrets) == (None, "cn")
    for kind in (ssl, gevent.ssl):
        sock = tls_socket(kind, port, None, False)
        assert mqtt3c.connect(sock, keep, op, **secrets) == (None, "cn")
        assert sock.fileno() == -1
    assert mqtt3c.connect(f"mqtts://anna:x@localhost:{port}", keep) == (None, "cn")
    ready = Stream.connect("localhost", port)
    ready.starttls(ClientTls().context(), "localhost")
    assert mqttc.connect(ready, keep, **secrets) == (None, "cn")
    log: Log = []
    mqttc.create("localhost", lambda *what: log.append(what[:2]), port=port, secure=True)
    wait_until(lambda: log)
    assert log == [("sock", "cn")]
    gevent.sleep(0.05)
    assert received == []


@pytest.fixture
def silent_tls(tmp_path: Path) -> Iterator[tuple[int, Log]]:
    """A TLS server in a thread that keeps what it receives, and never answers: its port, and what came."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*Authority(tmp_path).pair("server", "localhost"))
    received: Log = []

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                sock, _ = listener.accept()
                with contextlib.suppress(OSError), context.wrap_socket(sock, server_side=True) as secured:
                    while data := secured.recv(4096):
                        received.append(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield listener.getsockname()[1], received
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("kind", [ssl, gevent.ssl])
def test_a_verified_chain_for_another_name_is_not_trusted(secure: Mosquitto, tmp_path: Path, kind: Any) -> None:
    for name, expected in (("localhost", None), ("broker.example", "cert")):
        context = kind.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(tmp_path / "ca.pem")
        sock: Any = SOCKETS["gevent" if kind is gevent.ssl else "socket"](secure.port)
        mqtt, err = mqtt3c.connect(context.wrap_socket(sock, server_hostname=name), keep, uname="anna")
        assert err == expected
        if mqtt is not None:
            mqtt.close()


def test_credentials_are_sent_to_a_trusted_broker(secure: Mosquitto, tmp_path: Path, caplog: Any) -> None:
    store = CertStore()
    store.add((tmp_path / "ca.pem").read_bytes())
    tls = ClientTls(store)
    ready = Stream.connect("localhost", secure.port)
    ready.starttls(tls.context(), "localhost")
    tries: list[tuple[object, dict[str, object]]] = [
        ("localhost", {"secure": tls}),
        ("localhost", {"secure": True, "shark": tls}),
        ("localhost", {"secure": True, "nocheck": True}),
        (ready, {"secure": tls}),
        (tls_socket(ssl, secure.port, None, False), {"secure": tls}),
        (tls_socket(ssl, secure.port, None, False), {"nocheck": True}),
    ]
    for addr, op in tries:
        mqtt, err = mqtt3c.connect(addr, keep, op, port=secure.port, uname="anna", passwd="secret")
        assert mqtt is not None, err
        mqtt.close()
    assert not [line for line in caplog.messages if "trusted" in line]


# ---- connect and run


def test_connect_waits_for_the_broker(scripted: Scripted, mosquitto: Mosquitto) -> None:
    for number in (1, 2, 3, 4, 5):
        assert mqtt3c.connect(scripted(4, code=number).address, keep) == (None, number)
    wrong = scripted(4, on_packet=lambda wire, *_: wire.send(b"\x20\x02\x09\x09") or True)
    assert mqtt3c.connect(wrong.address, keep) == (None, "invalidresp")
    assert mqtt3c.connect("127.0.0.1", keep, port=1) == (None, "cannotconnect")
    assert mqtt3c.connect("no.such.host.invalid", keep) == (None, "cannotresolve")
    assert mqtt3c.connect("h:x", keep) == (None, "cannotresolve")
    silent = scripted(4, on_packet=lambda *_: True)
    assert mqtt3c.connect(silent.address, keep, timeout=200) == (None, "timeout")


@pytest.mark.parametrize(("given", "sent"), [(None, 600), (5, 60), (61, 61)])
def test_keepalive_of_connect(scripted: Scripted, given: int | None, sent: int) -> None:
    broker = scripted(4)
    mqtt, _ = mqttc.connect(broker.address, keep, {"keepalive": given, "will": {"topic": "t", "payload": "w"}})
    assert mqtt is not None
    assert int.from_bytes(broker.of_kind(CONNECT)[0][8:10]) == sent
    mqtt.close()


def test_callbacks_are_called_inside_run(mosquitto: Mosquitto) -> None:
    log: Log = []
    here = gevent.getcurrent()
    mqtt, err = mqtt3c.connect("127.0.0.1", lambda *message: message_came(message), {"port": mosquitto.port})
    assert mqtt is not None, err

    def message_came(message: tuple[str, bytes]) -> None:
        log.append((message, gevent.getcurrent() is here))
        if message[1] == b"2":
            mqtt.unsubscribe("run/#", lambda: (log.append("unsubscribed"), mqtt.close()))

    mqtt.subscribe("run/single", {"onpub": lambda *message: log.append(("single", *message))})
    mqtt.subscribe("run/#", lambda code: (log.append(code), mqtt.publish("run/x", "1"), mqtt.publish("run/x", "2")))
    mqtt.publish("run/single", "s")
    gevent.sleep(0.1)
    assert log == [], "before run"
    assert mqtt.run() == (None, "disconnect")
    assert ("single", "run/single", b"s") in log
    log.remove(("single", "run/single", b"s"))
    assert [line for line in log if line in (0, "unsubscribed")] == [0, "unsubscribed"]
    assert (("run/x", b"1"), True) in log
    assert (("run/x", b"2"), True) in log
    assert mqtt.run() == (None, "socketclosed")


ENDS: dict[str, dict[str, Any]] = {
    "invalidresp": {"on_open": lambda wire: gevent.spawn_later(0.05, wire.send, b"\x30\x02\0\x09")},
    "unknowncp": {"on_open": lambda wire: gevent.spawn_later(0.05, wire.send, b"\x00\x00")},
    "overflow": {"on_open": lambda wire: gevent.spawn_later(0.05, wire.send, publish("t", b"x" * 66000))},
    "socketreadfailed": {"on_open": lambda wire: gevent.spawn_later(0.05, wire.sock.shutdown, socket.SHUT_RDWR)},
    "pingresp": {"on_packet": lambda wire, first, body: first == PINGREQ and (stall(), True)[1]},
}


@pytest.mark.parametrize("word", ENDS)
def test_how_run_ends(scripted: Scripted, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if word == "pingresp":
        monkeypatch.setattr("smqrt.wire.mqtt.client.PINGS_PER_KEEPALIVE", 3000)
    mqtt, err = mqtt3c.connect(scripted(4, **ENDS[word]).address, keep)
    assert mqtt is not None, err
    assert mqtt.run() == (None, word)
    assert mqtt.status() == (0, False, True)


def test_a_second_run_is_refused(mosquitto: Mosquitto) -> None:
    mqtt, _ = mqtt3c.connect("127.0.0.1", keep, port=mosquitto.port)
    assert mqtt is not None
    first = gevent.spawn(mqtt.run)
    gevent.sleep(0.02)
    with pytest.raises(ArgumentError, match="another run of this client is active"):
        mqtt.run()
    assert mqtt.status()[1]
    mqtt.disconnect()
    assert first.get(timeout=5) == (None, "disconnect")
    created, _ = mqttc.create("127.0.0.1", keep, port=mosquitto.port)
    with pytest.raises(ArgumentError, match="only for clients of connect"):
        created.run()
    created.close()


def test_what_a_callback_raises_ends_run(scripted: Scripted) -> None:
    broker = scripted(4, push=[("t", 0, b"hi")])
    mqtt, _ = mqtt3c.connect(broker.address, lambda *_: 1 / 0)
    assert mqtt is not None
    mqtt.subscribe("t")
    with pytest.raises(ZeroDivisionError):
        mqtt.run()
    wait_until(lambda: mqtt.status()[2])


def test_an_unstarted_client_closes_with_messages_waiting(scripted: Scripted) -> None:
    broker = scripted(4, on_open=lambda wire: wire.send(publish("t", b"x" * 50) * 5000))
    mqtt, _ = mqtt3c.connect(broker.address, keep)
    assert mqtt is not None
    gevent.sleep(0.1)
    with mqtt:
        mqtt.setwill({"topic": "t", "message": "w"})
        mqtt.setwill(None)
    assert mqtt.status() == (0, False, True)
    assert mqtt._client.closed, "its greenlet has ended"


def test_setwill_is_for_the_next_connection(scripted: Scripted, clients: Log) -> None:
    broker = scripted(on_open=lambda wire: wire.sock.shutdown(socket.SHUT_RDWR) if broker.connections == 1 else None)

    def onstatus(*_: object) -> float:
        mqtt.setwill({"topic": "last", "message": "word"})
        return 0.01

    mqtt, _ = mqttc.create(broker.address, onstatus)
    clients.append(mqtt)
    wait_until(lambda: broker.connections == 2 and len(broker.of_kind(CONNECT)) == 2)
    assert b"last\0\x04word" in broker.of_kind(CONNECT)[1]
    assert b"last" not in broker.of_kind(CONNECT)[0]
    with pytest.raises(ArgumentError, match="will"):
        mqtt.setwill({"payload": "without a topic"})


def test_close_delivers(scripted: Scripted) -> None:
    broker = scripted()
    mqtt, _ = mqttc.create(broker.address, keep)
    mqtt.publish("t", "a", qos=1)
    mqtt.close()
    assert broker.received == [(1, b"a")]


# ---- plain scripts


SCRIPT = """
import socket, sys, threading
from smqrt import mqtt3c, mqttc
import smqrt
assert smqrt.mqttc is mqttc and smqrt.mqtt3c is mqtt3c
port = int(sys.argv[1])

def onpub(topic, payload):
    print(topic, payload.decode())
    mqtt.close()

mqtt, err = mqtt3c.connect("127.0.0.1", onpub, {"port": port})
if not mqtt:
    sys.exit(err)
mqtt.subscribe("script", lambda code: print("granted", code))
sender, _ = mqttc.create(socket.create_connection(("127.0.0.1", port)), lambda *what: True)
sender.publish("script", "hello")
sender.close()
print(mqtt.run())
print(sys.modules["threading"].current_thread() is threading.main_thread())
"""


PATCHED = """
from gevent import monkey
monkey.patch_all()
import socket
"""


@pytest.mark.parametrize("before", ["", PATCHED])
def test_a_script_with_and_without_monkey_patching(mosquitto: Mosquitto, tmp_path: Path, before: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(before + SCRIPT)
    done = subprocess.run(
        [sys.executable, script, str(mosquitto.port)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines() == ["granted 0", "script hello", "(None, 'disconnect')", "True"], done.stderr
    assert done.stderr == ""

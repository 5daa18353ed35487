"""Connections of MQTT clients: pauses for hooks, WebSocket frames, keep-alive, hot paths that take turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gevent
import pytest

from smqrt.broker.mqtt.messages import Message
from smqrt.broker.outbox import Drop
from smqrt.errors import CloseReason
from smqrt.server.mqtt import take_mqtt
from smqrt.smq import data_path, mqtt_connection
from smqrt.wire import websocket
from tests.conformance.mqtt_script import data_of, packets_of
from tests.conformance.test_mqtt_hub import Client
from tests.support.device import RAW, WS, Site, masked
from tests.support.waiting import let_others_run, wait_until

MakeSite = Callable[..., Site]


@pytest.fixture
def make_mqtt_site(make_site: MakeSite) -> MakeSite:
    def make(**options: Any) -> Site:
        site = make_site(mqtt=True, **options)
        site.server.take_mqtt = take_mqtt
        return site

    return make


def expect(client: Client, script: str) -> None:
    for packet in packets_of(script, 5):
        got = client.receive()
        assert got == packet, f"{got!r} instead of {packet!r}"


def connected(site: Site, name: str = "a", kind: str = RAW) -> Client:
    client = Client(site, kind, "mqtt")
    client.send(data_of(f"C {name}", 5))
    expect(client, "A")
    return client


def subscriber(site: Site, topic: str = "t", name: str = "b", options: str = "00") -> Client:
    client = connected(site, name)
    client.send(data_of(f"82: 00 01 P '{topic}' {options}", 5))
    expect(client, f"90: 00 01 P {options}")
    return client


@pytest.mark.parametrize("kind", [RAW, WS])
def test_packets_wait_for_hooks(make_mqtt_site: MakeSite, kind: str) -> None:
    """Each hook takes its time; all packets come in one write, and are answered in order."""

    def slow(*arguments: Any) -> Any:
        gevent.sleep(0.005)
        return True

    def authenticate(credentials: bytes, info: Any) -> int:
        gevent.sleep(0.005)
        return 0

    site = make_mqtt_site(authenticate=authenticate, permittop=slow, permitfilter=slow, onpublish=slow)
    client = Client(site, kind, "mqtt")
    client.send(
        data_of(
            "10: M V 06 00 00 P 'a' P 'w' 'x' / 82: 00 01 P 't' 00 '#' 01 'u' 00 / 30: 't' P ~1 / 30: 't' P ~2 / c0: /"
            " 32: 't' 00 02 P ~3 / 34: 'v' 00 03 P ~4 / c0: / a2: 00 04 P '#' / 32: 'v' 00 05 P ~5 / c0:",
            5,
        )
    )
    answers = []
    while len(answers) < 13:
        packet = client.receive()
        assert packet is not None
        answers.append(packet)
    messages = [packet for packet in answers if packet[0] >> 4 == 3]
    assert [packet[-1:] for packet in messages] == [b"1", b"2", b"3", b"4"]
    others = [packet for packet in answers if packet[0] >> 4 != 3]
    assert others == packets_of(
        "A / 90: 00 01 P 00 01 00 / d0: / 40: 00 02 / 50: 00 03 / d0: / b0: 00 04 P 00 / 40: 00 05 10 / d0:", 5
    )


def test_a_hook_that_swallows_and_one_that_denies(make_mqtt_site: MakeSite) -> None:
    def onpublish(data: Any, *arguments: Any) -> Any:
        gevent.sleep(0)
        return None if bytes(data) == b"bad" else data

    site = make_mqtt_site(onpublish=onpublish, permittop=lambda topic, issub, peer: topic != "secret")
    reader, client = subscriber(site), connected(site)
    client.send(data_of("32: 't' 00 01 P ~bad / 32: 'secret' 00 02 P ~x / 32: 't' 00 03 P ~good", 5))
    expect(client, "40: 00 01 83 / 40: 00 02 87 / 40: 00 03")
    expect(reader, "30: 't' P ~good")


def test_a_client_that_leaves_while_a_hook_runs(make_mqtt_site: MakeSite) -> None:
    running: list[str] = []

    def onpublish(data: Any, *arguments: Any) -> Any:
        running.append("")
        gevent.sleep(0.02)
        running.append("done")
        return data

    site = make_mqtt_site(onpublish=onpublish)
    client = connected(site)
    subscriber(site)
    client.send(data_of("32: 't' 00 01 P ~x", 5))
    wait_until(lambda: running, "the hook runs")
    client.close()
    wait_until(lambda: running[-1] == "done", "the hook ends")
    let_others_run()
    assert len(site.state.devices.sessions) == 1


def test_many_small_frames(make_mqtt_site: MakeSite) -> None:
    """More frames in one write than a turn handles, and a close frame behind them."""
    site = make_mqtt_site()
    reader, client = subscriber(site), connected(site, kind=WS)
    count = 2 * mqtt_connection.FRAMES_PER_TURN // 6
    data = data_of(" / ".join(["30: 't' P ~x"] * count) + " / e0:", 5)
    frames = b"".join(masked(data[at : at + 1]) for at in range(len(data)))
    client.send_frame(frames + masked(websocket.close_payload(1000), websocket.CLOSE))
    for _ in range(count):
        expect(reader, "30: 't' P ~x")
    assert client.receive() is None
    assert client.close_code == 1000
    assert site.state.stats.ends[CloseReason.CLIENT_DISCONNECT] == 1


def test_one_large_frame_in_small_segments(make_mqtt_site: MakeSite) -> None:
    site = make_mqtt_site()
    reader, client = subscriber(site, options="01"), connected(site, kind=WS)
    frame = masked(data_of("32: 't' 00 01 P 61*60000", 5))
    for at in range(0, len(frame), 1500):
        client.send_frame(frame[at : at + 1500])
        let_others_run(1)
    expect(client, "40: 00 01")
    expect(reader, "32: 't' 00 01 P 61*60000")


def test_a_frame_that_is_too_large(make_mqtt_site: MakeSite) -> None:
    site = make_mqtt_site()
    client = connected(site, kind=WS)
    client.send_frame(b"\x82\xff" + (2 << 20).to_bytes(8))
    assert client.receive() is None or client.receive() is None
    assert client.close_code == 1009


def test_the_keep_alive_does_not_end_a_client_that_waits(make_mqtt_site: MakeSite) -> None:
    """The hub does not read while a hook runs, so it cannot see the packets of the client."""

    def onpublish(data: Any, *arguments: Any) -> Any:
        gevent.sleep(1.8)
        return data

    site = make_mqtt_site(onpublish=onpublish)
    subscriber(site)
    client = Client(site, RAW, "mqtt")
    client.send(data_of("10: M V 02 00 01 P 'a'", 5))
    expect(client, "A")
    client.send(data_of("32: 't' 00 01 P ~x / c0:", 5))
    expect(client, "40: 00 01 / d0:")


def test_retained_messages_do_not_fill_the_queue_of_a_new_subscriber(make_mqtt_site: MakeSite) -> None:
    site = make_mqtt_site()
    devices, payload = site.state.devices, bytes(30_000)
    count = 600
    for at in range(count):
        devices.retained.set(Message(b"kept/%d" % at, payload, 0, True))
    client = connected(site)
    site.state.uids[b"mqtt:a"].outbox.budget_bytes = 200_000
    client.send(data_of("82: 00 01 P 'kept/#' 00", 5))
    expect(client, "90: 00 01 P 00")
    names = [(client.receive() or b"")[6:].partition(b"\0")[0] for _ in range(count)]
    assert names == [b"kept/%d" % at for at in range(count)]
    assert not site.state.stats.drops[Drop.OVER_BUDGET]


def test_a_connection_without_connect_ends(make_mqtt_site: MakeSite) -> None:
    site = make_mqtt_site(readtmo=300)
    client = Client(site, RAW, "mqtt")
    client.send(b"\x10\x0d\0\4MQ")
    assert client.receive() is None
    assert site.state.stats.ends[CloseReason.CONNECT_TIMEOUT] == 1


def test_a_raw_client_of_a_hub_without_mqtt(make_site: MakeSite) -> None:
    """The first byte is none of HTTP."""
    site = make_site()
    site.server.take_mqtt = take_mqtt
    device = site.open(RAW)
    device.send_bytes(data_of("C a", 4) + b"\r\n\r\n")
    assert b"400" in device.read_head().head


@pytest.mark.parametrize("kind", [RAW, WS])
def test_system_topics_count_the_bytes_of_connections(make_mqtt_site: MakeSite, kind: str) -> None:
    site = make_mqtt_site()
    gone = connected(site, "gone", kind)
    gone.send(data_of("30: 't' P 78*5000 / e0:", 5))
    assert gone.receive() is None
    client = connected(site, "a", kind)
    client.send(data_of("82: 00 01 P '$SYS/broker/version' 00 '$SYS/broker/bytes/received' 00", 5))
    expect(client, "90: 00 01 P 00 00")
    version, received = client.receive(), client.receive()
    assert version is not None
    assert b"smqrt version " in version
    assert received is not None
    assert 5000 < int(received.rpartition(b"\0")[2]) < 7000, received


@pytest.mark.parametrize("kind", [RAW, WS])
def test_an_authentication_method_of_the_application(make_mqtt_site: MakeSite, kind: str) -> None:
    """The hook may block, and keeps what it knows of the client in `peer.data`."""

    def mqttauth(method: str, data: bytes, peer: Any) -> Any:
        gevent.sleep(0.005)
        if method != "sum":
            return None
        if data == b"":
            peer.data["sum"] = b"5"
            return "2+3"
        return (True, b"right", "ada") if data == peer.data["sum"] else (False, "wrong")

    site = make_mqtt_site(mqttauth=mqttauth, authenticate=lambda *_: 3)
    users: list[str | None] = []
    for answer in ("5", "6"):
        client = Client(site, kind, "mqtt")
        client.send(data_of("10: M V 02 00 00 { 15 'sum' } 'a'", 5))
        expect(client, "f0: 18 { 15 'sum' 16 '2+3' }")
        client.send(data_of(f"f0: 18 {{ 15 'sum' 16 '{answer}' }}", 5))
        if answer == "5":
            expect(client, "20: 00 00 { 21 00 14 27 00 10 00 00 22 00 0a 15 'sum' 16 'right' }")
            users += [peer.user for _, peer in site.smq.peers() if peer.uid == "mqtt:a"]
        else:
            expect(client, "20: 00 87 { 1f 'wrong' }")
            assert client.receive() is None
    assert users == ["ada"]
    client = Client(site, kind, "mqtt")
    client.send(data_of("10: M V 02 00 00 { 15 'other' } 'b'", 5))
    packet = client.receive()
    assert packet is not None
    assert packet[2:4] == b"\0\x8c"


def test_a_client_that_does_not_answer_in_time(make_mqtt_site: MakeSite) -> None:
    """It has the time of the handshake, not that of `authenticate`."""
    site = make_mqtt_site(mqttauth=lambda *_: b"?", readtmo=200)
    client = Client(site, RAW, "mqtt")
    client.send(data_of("10: M V 02 00 00 { 15 'sum' } 'a'", 5))
    expect(client, "f0: 18 { 15 'sum' 16 '?' } / 20: 00 88 P")
    assert client.receive() is None


def test_connections_that_break_together_are_closed_in_several_turns(
    make_mqtt_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, deferred = make_mqtt_site(), list[object]()
    real = data_path.DeferredCall

    def counted(function: Callable[[], object]) -> data_path.DeferredCall:
        deferred.append(function)
        return real(function)

    monkeypatch.setattr(data_path, "DeferredCall", counted)
    monkeypatch.setattr(data_path, "defer_at_s", lambda: 0.0)  # the time of each turn is used up
    clients = [connected(site, f"c{at}") for at in range(3)]
    for client in clients:
        client.close()
    wait_until(lambda: not site.state.sessions)
    assert len(deferred) == 3


def test_clients_that_are_silent_since_the_same_time_are_disconnected_in_several_turns(
    make_mqtt_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_mqtt_site()
    connected(site, "c")
    connection = next(iter(site.state.sessions.values())).outbox
    connection.session.keepalive_s, connection.heard_s = 1.0, 0.0
    monkeypatch.setattr(data_path, "defer_at_s", lambda: 0.0)
    connection.expired()
    assert site.state.sessions
    monkeypatch.undo()
    wait_until(lambda: not site.state.sessions)

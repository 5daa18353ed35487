"""MQTT clients stay connected when their hub migrates, in the middle of packets and of acknowledgements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gevent
import pytest

from smqrt.broker.mqtt.client import MqttClient
from smqrt.broker.mqtt.device import Device
from smqrt.broker.mqtt.publishing import PublishingClient
from smqrt.broker.mqtt.retained import RetainedFeed
from smqrt.broker.mqtt.session import MqttSession
from smqrt.broker.mqtt.subscribing import SubscribingClient
from smqrt.broker.outbox import QueuedMemory
from smqrt.server.mqtt import take_mqtt
from smqrt.settings.limits import LimitSettings, MqttSettings, apply_limits, apply_mqtt
from smqrt.smq import data_path
from smqrt.smq.mqtt_connection import MqttConnection, MqttWsConnection
from smqrt.smq.session_migration import FrozenHub
from tests.conformance.mqtt_script import data_of, packets_of
from tests.conformance.test_mqtt_hub import Client
from tests.smq.test_session_migration import move
from tests.support.device import RAW, WS, Site, masked
from tests.support.waiting import let_others_run, wait_until

MakeSite = Callable[..., Site]
REBUILT = {
    MqttSession: {"counts": "the other hub's", "mqtt_outbox": "the new connection", "skips_resume": "no hook is asked"},
    PublishingClient: {
        "_numbers": "messages of a row are published before",
        "_payloads": "the same",
        "_permitted": "asked again",
        "_postponed": "goes along as input",
        "run_first": "the next message begins a row",
        "_unanswered": "answered before",
        "held": "saved before; otherwise the client is closed",
        "is_held_back": "the same",
        "run_name": "the next message begins a row",
    },
    SubscribingClient: {"_is_paused": "the client is not subscribing", "is_subscribing": "the same"},
    MqttClient: {
        "_connect_packet": "it is connected",
        "has_asked": "it has logged in",
        "is_new_id": "for CONNACK only",
        "is_unconfirmed": "a client that waits for CONNACK does not migrate",
    },
    Device: {
        "_stored_bytes": "it is connected",
        "client": "the client's new session",
        "devices": "the other hub's",
        "ends_s": "it is connected",
        "etid": "that of the client",
        "identity": "that of the client",
        "is_checked": "set again by the settings",
        "is_feeding": "begins again",
        "is_pressed": "publishers have got their answers",
        "is_stuck": "the same",
        "large_bytes": "the sum of the messages",
        "left_s": "it is connected",
        "origins": "ids are compared for some seconds after a session has moved",
        "rows": "those of the other hub's file",
        "waiting_bytes": "the sum of the messages",
        "wildcards": "the sum of the subscriptions",
    },
    RetainedFeed: {"_matches": "made of the text", "_retained": "the other hub's"},
    MqttConnection: {
        "_is_resuming": "it is read by itself",
        "deadline_s": "for handshakes",
        "heard_s": "the keep-alive begins again",
    },
    MqttWsConnection: {"_close_sent": "such a client is closed", "_last": "the same"},
}
MOVED = {
    MqttSession: {"client_id", "device", "version"},
    PublishingClient: {"aliases"},
    SubscribingClient: {"aliases_out", "is_bridge", "max_aliases_out", "peer_limit_bytes", "window"},
    MqttClient: {"exchange", "keepalive_s"},
    Device: {
        "_unsent", "client_id", "dropped", "expiry_s", "feeds", "in_flight", "last_number", "subscriptions",
        "unreleased", "user", "version", "waiting", "will",
    },
    RetainedFeed: {"_names", "found", "options", "text"},
    MqttConnection: {"_limit_bytes", "_splitter"},
    MqttWsConnection: {"_frames"},
}  # fmt: skip


@pytest.mark.parametrize("kind", MOVED, ids=lambda kind: kind.__name__)
def test_every_attribute_of_a_client_migrates_or_is_rebuilt(kind: Any) -> None:
    """A new attribute needs an entry here: what becomes of it at a hot restart."""
    assert set(kind.__slots__) == MOVED[kind] | set(REBUILT[kind])
    assert not MOVED[kind] & set(REBUILT[kind])


@pytest.fixture
def make(make_site: MakeSite) -> MakeSite:
    def make(**options: Any) -> Site:
        site = make_site(mqtt=True, **options)
        site.server.take_mqtt = take_mqtt
        return site

    return make


def connected(site: Site, name: str, kind: str = RAW, connect: str = "C {}") -> Client:
    client = Client(site, kind, "mqtt")
    client.send(data_of(connect.replace("{}", name), 5))
    expect(client, "A")
    return client


def subscriber(site: Site, name: str, topic: str = "t", qos: str = "01", connect: str = "C {}") -> Client:
    client = connected(site, name, connect=connect)
    client.send(data_of(f"82: 00 01 P '{topic}' {qos}", 5))
    expect(client, f"90: 00 01 P {qos}")
    return client


def expect(client: Client, script: str) -> None:
    for packet in packets_of(script, 5):
        got = client.receive()
        assert got == packet, f"{got!r} instead of {packet!r}"


PUBLISH = "32: 't' 00 07 P ~hello / C0:"


@pytest.mark.parametrize("at", range(len(data_of(PUBLISH, 5)) + 1))
def test_raw_clients_migrate_between_any_two_bytes(make: MakeSite, at: int) -> None:
    site, other = make(), make()
    one, two = connected(site, "one"), subscriber(site, "two")
    data = data_of(PUBLISH, 5)
    one.send(data[:at])
    let_others_run()
    move(site, other)
    one.send(data[at:])
    expect(one, "40: 00 07 / D0:")
    expect(two, "32: 't' 00 01 P ~hello")
    assert QueuedMemory.total_bytes == 0


@pytest.mark.parametrize("at", range(len(masked(data_of(PUBLISH, 5))) + 1))
def test_websocket_clients_migrate_between_any_two_bytes(make: MakeSite, at: int) -> None:
    site, other = make(), make()
    one, two = connected(site, "one", WS), subscriber(site, "two")
    data = masked(data_of(PUBLISH, 5)[:7]) + masked(data_of(PUBLISH, 5)[7:])
    one.send_frame(data[:at])
    let_others_run()
    move(site, other)
    one.send_frame(data[at:])
    expect(one, "40: 00 07 / D0:")
    expect(two, "32: 't' 00 01 P ~hello")


def test_a_large_packet_migrates_in_its_middle(make: MakeSite) -> None:
    site, other = make(), make()
    one, two = connected(site, "one"), subscriber(site, "two")
    data = data_of("32: 't' 00 07 P 78*300000", 5)
    one.send(data[:200_000])
    wait_until(lambda: len(connection_of(site, "one")._splitter.rest) > 150_000, "it has arrived")
    move(site, other)
    one.send(data[200_000:])
    expect(one, "40: 00 07")
    expect(two, "32: 't' 00 01 P 78*300000")


def connection_of(site: Site, name: str) -> MqttConnection:
    found: MqttConnection = site.state.devices.sessions[name].client.outbox
    return found


def test_acknowledgements_continue(make: MakeSite) -> None:
    """QoS 1 and 2 in both directions: nothing is sent again, and nothing is delivered twice."""
    site, other = make(), make()
    one, two = connected(site, "one"), subscriber(site, "two", qos="02")
    one.send(data_of("34: 't' 00 07 P ~first / 32: 't' 00 08 P ~second", 5))
    expect(one, "50: 00 07 / 40: 00 08")
    expect(two, "34: 't' 00 01 P ~first / 32: 't' 00 02 P ~second")
    two.send(data_of("50: 00 01", 5))
    expect(two, "62: 00 01")
    move(site, other)
    one.send(data_of("34: 't' 00 07 P ~first / 62: 00 07 / 34: 't' 00 09 P ~third", 5))
    expect(one, "50: 00 07 / 70: 00 07 / 50: 00 09")
    expect(two, "34: 't' 00 03 P ~third")
    two.send(data_of("70: 00 01 / 40: 00 02 / 50: 00 03", 5))
    expect(two, "62: 00 03")
    device = other.state.devices.sessions["two"]
    assert list(device.in_flight.items()) == [(3, None)]


def test_messages_beyond_the_window_wait(make: MakeSite) -> None:
    site, other = make(), make()
    two = subscriber(site, "two", connect="10: M V 02 00 00 { 21 00 01 } '{}'")
    one = connected(site, "one")
    one.send(data_of("32: 't' 00 01 P ~1 / 32: 't' 00 02 P ~2", 5))
    expect(one, "40: 00 01 / 40: 00 02")
    expect(two, "32: 't' 00 01 P ~1")
    move(site, other)
    two.send(data_of("C0:", 5))
    expect(two, "D0:")
    two.send(data_of("40: 00 01", 5))
    expect(two, "32: 't' 00 02 P ~2")


def test_retained_messages_that_are_being_sent(make: MakeSite) -> None:
    site, other = make(), make()
    one = connected(site, "one")
    for at in range(1, 5):
        one.send(data_of(f"33: 'r/{at}' 00 0{at} P ~{at}", 5))
        expect(one, f"40: 00 0{at} 10")
    two = subscriber(site, "two", "r/#", connect="10: M V 02 00 00 { 21 00 02 } '{}'")
    expect(two, "33: 'r/1' 00 01 P ~1 / 33: 'r/2' 00 02 P ~2")
    move(site, other)
    two.send(data_of("40: 00 01 / 40: 00 02", 5))
    expect(two, "33: 'r/3' 00 03 P ~3 / 33: 'r/4' 00 04 P ~4")


def test_aliases_and_wills_migrate(make: MakeSite) -> None:
    site, other = make(), make()
    two = subscriber(site, "two", "#")
    one = connected(site, "one", connect="10: M V 0E 00 00 P '{}' P 'gone' 00 03 ~bye")
    one.send(data_of("30: 't' { 23 00 03 } ~1", 5))
    expect(two, "30: 't' P ~1")
    move(site, other)
    one.send(data_of("30: '' { 23 00 03 } ~2", 5))
    expect(two, "30: 't' P ~2")
    one.close()
    expect(two, "32: 'gone' 00 01 P ~bye")


def test_messages_over_the_publish_rate_keep_their_qos(make: MakeSite) -> None:
    apply_limits(replace(LimitSettings(), publish_rate=1.0), {})
    try:
        site, other = make(), make()
    finally:
        apply_limits(LimitSettings(), {})
    one, two = connected(site, "one"), subscriber(site, "two", qos="02")
    one.send(data_of("34: 't' 00 01 P ~1 / 34: 't' 00 02 P ~2 / 34: 't' 00 03 P ~3", 5))
    expect(one, "50: 00 01")
    move(site, other)
    expect(one, "50: 00 02 / 50: 00 03")
    expect(two, "34: 't' 00 01 P ~1 / 34: 't' 00 02 P ~2 / 34: 't' 00 03 P ~3")


def test_publishers_that_wait_for_slow_subscribers_get_their_answer(make: MakeSite) -> None:
    apply_mqtt(MqttSettings(queued_messages=4))
    try:
        site, other = make(), make()
    finally:
        apply_mqtt(MqttSettings())
    two = subscriber(site, "two", connect="10: M V 02 00 00 { 21 00 01 } '{}'")
    one = connected(site, "one")
    for at in range(1, 5):
        one.send(data_of(f"34: 't' 00 0{at} P ~{at}", 5))
        expect(one, f"50: 00 0{at}")
    one.send(data_of("34: 't' 00 05 P ~5", 5))
    wait_until(lambda: connection_of(site, "one").paused, "the publisher waits")
    move(site, other)
    expect(one, "50: 00 05")
    one.send(data_of("34: 't' 00 05 P ~5", 5))
    expect(one, "50: 00 05")
    for at in range(1, 6):
        expect(two, f"32: 't' 00 0{at} P ~{at}")
        two.send(data_of(f"40: 00 0{at}", 5))


def test_clients_whose_hook_has_not_answered_are_closed(make: MakeSite) -> None:
    def permittop(topic: str, is_sub: bool, peer: Any) -> bool:
        gevent.sleep(60)
        return True

    site, other = make(permittop=permittop), make()
    one = connected(site, "one")
    one.send(data_of("32: 't' 00 01 P ~1", 5))
    wait_until(lambda: connection_of(site, "one").paused, "the hook is asked")
    move(site, other)
    expect(one, "E0: 8B")
    assert one.receive() is None


def test_the_keepalive_is_checked_at_the_new_hub(make: MakeSite) -> None:
    site, other = make(), make()
    one = connected(site, "one", connect="10: M V 02 00 01 P '{}'")
    move(site, other)
    (session,) = other.state.sessions.values()
    assert session.keepalive_s == 1.5
    session.outbox.heard_s -= 100
    session.outbox.expired()
    expect(one, "E0: 8D")


def test_sessions_of_clients_that_leave_the_new_hub_are_kept(make: MakeSite) -> None:
    site, other = make(), make()
    two = subscriber(site, "two", connect="10: M V 02 00 00 { 11 00 00 00 64 } '{}'")
    move(site, other)
    two.close()
    wait_until(lambda: other.state.devices.offline, "the session is kept")
    (device,) = other.state.devices.offline
    assert (device.client_id, list(device.subscriptions)) == ("two", ["t"])


def test_clients_are_closed_at_a_hub_that_accepts_no_mqtt_clients_any_more(make: MakeSite, make_site: MakeSite) -> None:
    site, other = make(), make_site()
    one = connected(site, "one")
    move(site, other)
    assert one.receive() is None
    assert not other.state.sessions


def test_a_failed_migration_rolls_back(make: MakeSite) -> None:
    site = make()
    one, two = connected(site, "one"), subscriber(site, "two")
    data = data_of(PUBLISH, 5)
    one.send(data[:6])
    let_others_run()
    standing = FrozenHub(site.state)
    standing.settle(0.01)
    standing.take()
    one.send(data[6:])
    let_others_run()
    standing.roll_back()
    expect(one, "40: 00 07 / D0:")
    expect(two, "32: 't' 00 01 P ~hello")
    assert not data_path.frozen_connections


def test_a_re_authentication_continues_at_the_new_hub(make: MakeSite) -> None:
    def mqttauth(method: str, data: bytes, peer: Any) -> Any:
        return True if data in (b"", b"right") else b"which?"

    site, other = make(mqttauth=mqttauth), make(mqttauth=mqttauth)
    client = Client(site, RAW, "mqtt")
    client.send(data_of("10: M V 02 00 00 { 15 'X' } 'a'", 5))
    expect(client, "20: 00 00 { 21 00 14 27 00 10 00 00 22 00 0a 15 'X' }")
    client.send(data_of("f0: 19 { 15 'X' 16 'hello' }", 5))
    expect(client, "f0: 18 { 15 'X' 16 'which?' }")
    move(site, other)
    client.send(data_of("f0: 18 { 15 'X' 16 'right' } / f0: 19 { 15 'X' }", 5))
    expect(client, "f0: 00 { 15 'X' } / f0: 00 { 15 'X' }")


def test_topic_aliases_of_the_hub_stay_valid(make: MakeSite) -> None:
    site, other = make(), make()
    name = "house/kitchen/temperature"
    reader, writer = connected(site, "reader", connect="10: M V 02 00 00 { 22 00 05 } '{}'"), connected(site, "writer")
    reader.send(data_of(f"82: 00 01 P '{name}' 01", 5))
    expect(reader, "90: 00 01 P 01")
    for number in (1, 2):
        writer.send(data_of(f"32: '{name}' 00 0{number} P ~x", 5))
        expect(writer, f"40: 00 0{number}")
        shown = f"'{name}'" if number == 1 else "00 00"
        expect(reader, f"32: {shown} 00 0{number} {{ 23 00 01 }} ~x")
        if number == 1:
            move(site, other)

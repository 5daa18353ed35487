"""Packets of Tasmota, PubSubClient on an ESP, Zigbee2MQTT and Home Assistant, as they send them with their defaults."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from smqrt.server.mqtt import take_mqtt
from tests.conformance.mqtt_script import data_of, packets_of
from tests.conformance.test_mqtt_hub import CUT, Client
from tests.support.device import RAW, Site
from tests.support.waiting import let_others_run

# CONNECT of MQTT 3.1.1 with a will, QoS 1, retained, and a keep-alive of 30 s: name, clean session or not, will.
CONNECT = "10: 'MQTT' 04 {flags} 00 1e '{name}' '{topic}' '{payload}'"
CONFIG = '{"name":"Kitchen","state_topic":"zigbee2mqtt/kitchen"}'.replace(" ", "")


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    found = make_site(mqtt=True)
    found.server.take_mqtt = take_mqtt
    return found


def send(client: Client, script: str, expected: str = "") -> None:
    client.send(data_of(script, 4))
    expect(client, expected)


def expect(client: Client, script: str) -> None:
    for packet in packets_of(script, 4):
        got = client.receive()
        assert got == packet, f"{got!r} instead of {packet!r}"


def with_will(name: str, topic: str, payload: str, flags: str = "2e") -> str:
    return CONNECT.format(name=name, topic=topic, payload=payload, flags=flags)


def reader(site: Site, script: str, granted: str, name: str = "reader") -> Client:
    client = Client(site, RAW, "mqtt")
    send(client, f"C {name} / 82: 00 01 {script}", f"20: 00 00 / 90: 00 01 {granted}")
    return client


def silent(client: Client) -> None:
    send(client, "c0:", "d0:")


def test_tasmota_comes_back_before_its_old_connection_is_missed(site: Site) -> None:
    """The will of the old connection comes before `Online` of the new one, so `Online` stays."""
    watcher = reader(site, "'tele/+/LWT' 01", "01")
    start = with_will("DVES_1", "tele/lamp/LWT", "Offline") + (
        " / 33: 'tele/lamp/LWT' 00 01 ~Online / 30: 'cmnd/lamp/POWER'"
        " / 82: 00 02 'cmnd/lamp/#' 00 / 82: 00 03 'cmnd/tasmotas/#' 00 / 82: 00 04 'cmnd/DVES_1_fb/#' 00"
    )
    answers = "20: 00 00 / 40: 00 01 / 90: 00 02 00 / 90: 00 03 00 / 90: 00 04 00"
    lamp = Client(site, RAW, "mqtt")
    send(lamp, start, answers)
    expect(watcher, "32: 'tele/lamp/LWT' 00 01 ~Online")
    send(watcher, "40: 00 01")
    again = Client(site, RAW, "mqtt")
    send(again, start, answers)
    assert lamp.receive() is None
    expect(watcher, "32: 'tele/lamp/LWT' 00 02 ~Offline / 32: 'tele/lamp/LWT' 00 03 ~Online")
    late = reader(site, "'tele/#' 00", "00", "late")
    expect(late, "31: 'tele/lamp/LWT' ~Online")
    silent(late)
    again.close()
    expect(watcher, "32: 'tele/lamp/LWT' 00 04 ~Offline")
    expect(late, "30: 'tele/lamp/LWT' ~Offline")


def test_tasmota_gets_commands_of_its_group(site: Site) -> None:
    lamp = reader(site, "'cmnd/lamp/#' 00 'cmnd/tasmotas/#' 00", "00 00", "DVES_1")
    user = reader(site, "'stat/lamp/#' 00", "00", "user")
    send(user, "30: 'cmnd/lamp/Power' ~TOGGLE / 30: 'cmnd/tasmotas/Status' ~0 / 30: 'cmnd/other/Power' ~ON")
    expect(lamp, "30: 'cmnd/lamp/Power' ~TOGGLE / 30: 'cmnd/tasmotas/Status' ~0")
    send(lamp, "30: 'stat/lamp/RESULT' ~{} / 30: 'stat/lamp/POWER' ~ON")
    expect(user, "30: 'stat/lamp/RESULT' ~{} / 30: 'stat/lamp/POWER' ~ON")


@pytest.mark.parametrize("kind", [RAW, CUT])
def test_an_esp_without_a_clean_session(site: Site, kind: str) -> None:
    """PubSubClient writes a packet in several segments. Messages with QoS 1 wait, those with QoS 0 do not."""
    connect = with_will("esp-1", "esp/1/state", "offline", "2c")
    esp = Client(site, kind, "mqtt")
    send(esp, connect, "20: 00 00")
    send(esp, "82: 00 02 'esp/1/set' 01", "90: 00 02 01")
    send(esp, "31: 'esp/1/state' ~online / c0:", "d0:")
    esp.close()
    let_others_run()
    user = reader(site, "'esp/1/state' 00", "00", "user")
    expect(user, "31: 'esp/1/state' ~offline")
    send(user, "32: 'esp/1/set' 00 05 ~1 / 30: 'esp/1/set' ~2 / 32: 'esp/1/set' 00 06 ~3", "40: 00 05 / 40: 00 06")
    esp = Client(site, kind, "mqtt")
    send(esp, connect, "20: 01 00 / 32: 'esp/1/set' 00 01 ~1 / 32: 'esp/1/set' 00 02 ~3")
    send(esp, "40: 00 01 / 40: 00 02 / 31: 'esp/1/state' ~online")
    expect(user, "30: 'esp/1/state' ~online")
    silent(esp)


def test_zigbee2mqtt_hears_itself_and_leaves_its_state(site: Site) -> None:
    bridge = Client(site, RAW, "mqtt")
    send(bridge, with_will("mqttjs_1", "zigbee2mqtt/bridge/state", "off"), "20: 00 00")
    send(bridge, "82: 00 01 'zigbee2mqtt/+/set' 00 'zigbee2mqtt/bridge/#' 00", "90: 00 01 00 00")
    send(bridge, "31: 'zigbee2mqtt/bridge/state' ~on / 31: 'zigbee2mqtt/kitchen' ~21")
    expect(bridge, "30: 'zigbee2mqtt/bridge/state' ~on")
    user = reader(site, "'zigbee2mqtt/#' 00", "00")
    assert sorted([user.receive(), user.receive()], key=str) == sorted(
        packets_of("31: 'zigbee2mqtt/bridge/state' ~on / 31: 'zigbee2mqtt/kitchen' ~21", 4), key=str
    )
    send(user, "30: 'zigbee2mqtt/kitchen/set' ~ON")
    expect(bridge, "30: 'zigbee2mqtt/kitchen/set' ~ON")
    expect(user, "30: 'zigbee2mqtt/kitchen/set' ~ON")
    send(bridge, "31: 'zigbee2mqtt/bridge/state' ~off / e0:")  # a regular stop: no will
    expect(user, "30: 'zigbee2mqtt/bridge/state' ~off")
    silent(user)


@pytest.mark.parametrize("keeps", [False, True])
def test_home_assistant_discovers_devices(site: Site, keeps: bool) -> None:
    """Discovery messages are retained. After its birth message, devices publish them again; an empty one deletes."""
    sensor, light = f"'homeassistant/sensor/1/config' ~{CONFIG}", "'homeassistant/light/2/config' ~{}"
    device = reader(site, "'homeassistant/status' 01", "01", "device")
    send(device, f"33: {sensor.replace(' ', ' 00 02 ')} / 33: {light.replace(' ', ' 00 03 ')}", "40: 00 02 / 40: 00 03")
    for times in (1, 2):
        home = Client(site, RAW, "mqtt")
        send(home, with_will("home", "homeassistant/status", "offline", "2c" if keeps else "2e"))
        expect(home, "20: 01 00" if keeps and times == 2 else "20: 00 00")
        send(home, "82: 00 01 'homeassistant/#' 00", f"90: 00 01 00 / 31: {sensor} / 31: {light}")
        if times == 2:
            expect(home, "31: 'homeassistant/status' ~offline")
        send(home, "30: 'homeassistant/status' ~online", "30: 'homeassistant/status' ~online")
        expect(device, "30: 'homeassistant/status' ~online")
        home.close()
        expect(device, f"32: 'homeassistant/status' 00 0{times} ~offline")
        send(device, f"40: 00 0{times}")
    send(device, "33: 'homeassistant/light/2/config' 00 04", "40: 00 04")
    late = reader(site, "'homeassistant/light/#' 00 'homeassistant/sensor/#' 00", "00 00", "late")
    expect(late, f"31: {sensor}")
    silent(late)

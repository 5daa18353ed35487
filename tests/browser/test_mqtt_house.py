"""app_preload/mqtt-house: a page in Chromium, and devices with MQTT clients that are not ours."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import paho.mqtt.client as paho
import pytest
from playwright.sync_api import expect

from tests.conftest import REPOSITORY, Served
from tests.support.factory import Factory

LAMP = "house/lamp/set"


class MqttDevice:
    """A device with paho's client.

    Args:
        port: the port of the server.
        topics: the topic filters it subscribes to.
    """

    def __init__(self, port: int, *topics: str) -> None:
        self._client = paho.Client(paho.CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
        self._messages: queue.Queue[tuple[str, str, bool]] = queue.Queue()
        ready = threading.Event()
        self._client.on_message = lambda _client, _data, message: self._messages.put(
            (message.topic, message.payload.decode(), message.retain)
        )
        self._client.on_subscribe = lambda *_: ready.set()
        self._client.connect("127.0.0.1", port)
        for topic in topics:
            self._client.subscribe(topic, 1)
        self._client.loop_start()
        assert ready.wait(5) or not topics

    def publish(self, topic: str, text: str) -> None:
        """Publish with QoS 1, and wait for the acknowledgement."""
        self._client.publish(topic, text, 1).wait_for_publish(5)

    def next(self) -> tuple[str, str, bool]:
        """Return topic, text and retain flag of the next message."""
        return self._messages.get(timeout=10)

    def stop(self) -> None:
        """Disconnect."""
        self._client.disconnect()
        self._client.loop_stop()


@pytest.fixture
def house(serve: Callable[..., Served]) -> Served:
    return serve(REPOSITORY / "app_preload" / "mqtt-house")


@pytest.fixture
def mqtt() -> Iterator[Callable[..., MqttDevice]]:
    with Factory(MqttDevice, MqttDevice.stop) as start:
        yield start


def open_page(house: Served, new_page: Callable[..., Any], phone: bool = False) -> Any:
    page = new_page(house.url, phone=phone)
    expect(page.get_by_role("status").first).to_have_text("connected")
    return page


def room(page: Any, name: str) -> Any:
    return page.get_by_role("article", name=name, exact=True)


@pytest.mark.parametrize("phone", [False, True], ids=["desktop", "phone"])
def test_a_tile_appears_for_each_room(
    house: Served, new_page: Callable[..., Any], mqtt: Callable[..., MqttDevice], screenshot: Any, phone: bool
) -> None:
    page, device = open_page(house, new_page, phone), mqtt(house.port)
    expect(page.get_by_text("No temperature yet")).to_be_visible()
    device.publish("house/living-room/temp", "21.5")
    expect(room(page, "living room")).to_contain_text("21.5 °C")
    expect(page.get_by_text("No temperature yet")).to_be_hidden()
    device.publish("house/attic/temp", "28")
    expect(room(page, "attic")).to_contain_text("28.0 °C")
    expect(page.get_by_role("article").first).to_contain_text("attic")
    device.publish("house/living-room/temp", "19.25")
    expect(room(page, "living room")).to_contain_text("19.3 °C")
    device.publish("house/attic/temp", "not a number")
    device.publish("house/attic/humidity", "40")
    device.publish("house/cellar/temp", "8")
    expect(page.get_by_role("article")).to_have_count(3)
    screenshot(page)
    assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")


def test_a_later_page_sees_the_last_temperatures(
    house: Served, new_page: Callable[..., Any], mqtt: Callable[..., MqttDevice]
) -> None:
    device = mqtt(house.port)
    device.publish("house/kitchen/temp", "20")
    device.publish("house/kitchen/temp", "23")
    expect(room(open_page(house, new_page), "kitchen")).to_contain_text("23.0 °C")


def test_the_switch_sends_a_command_which_is_kept(
    house: Served, new_page: Callable[..., Any], mqtt: Callable[..., MqttDevice]
) -> None:
    page, other, lamp = open_page(house, new_page), open_page(house, new_page, phone=True), mqtt(house.port, LAMP)
    page.get_by_role("switch", name="Lamp").click()
    assert lamp.next() == (LAMP, "on", False)
    for one in (page, other):
        expect(one.get_by_role("switch", name="Lamp")).to_have_attribute("aria-checked", "true")
    assert mqtt(house.port, "house/#").next() == (LAMP, "on", True)
    lamp.publish(LAMP, "off")  # another switch, with MQTT
    expect(page.get_by_role("switch", name="Lamp")).to_have_attribute("aria-checked", "false")


def test_the_shown_commands_have_the_address_of_the_page(house: Served, new_page: Callable[..., Any]) -> None:
    page = open_page(house, new_page)
    expect(page.locator("#publish")).to_have_text(
        f"mosquitto_pub -h 127.0.0.1 -p {house.port} -t house/kitchen/temp -m 21.5"
    )


def test_the_console_shows_the_session_of_a_device(
    house: Served, new_page: Callable[..., Any], mqtt: Callable[..., MqttDevice]
) -> None:
    mqtt(house.port, LAMP, "house/+/temp")
    page = new_page(f"{house.admin_url}/console/#/peers")
    row = page.get_by_role("row").filter(has_text="mqtt:")
    expect(row).to_contain_text("mqtt")
    row.click()
    details = page.get_by_role("main")
    expect(details).to_contain_text("version 5, session ends with the connection")
    expect(details).to_contain_text("0 in flight, 0 waiting, 0 lost")
    expect(details.get_by_role("listitem")).to_have_text(["house/+/temp", LAMP])

"""app_preload/mqtt-bridge: a browser, an MQTT client and a real broker with the bridge between them."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pytest
from playwright.sync_api import expect

from tests.clients.mqtt.mosquitto import Mosquitto
from tests.conftest import REPOSITORY, Served


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    running = Mosquitto(tmp_path)
    yield running
    running.stop()


@pytest.fixture
def bridge(broker: Mosquitto, serve: Callable[..., Served]) -> Served:
    return serve(REPOSITORY / "app_preload" / "mqtt-bridge", env={"MQTT_BROKER": broker.address})


def publish(broker: Mosquitto, topic: str, text: str) -> None:
    command = [sys.executable, "-m", "smqrt", "pub", f"mqtt://{broker.address}", topic, text, "--qos", "1"]
    assert subprocess.run(command, timeout=20).returncode == 0


class Listener:
    """Another MQTT client, not ours."""

    def __init__(self, broker: Mosquitto, topic: str) -> None:
        self._client = paho.Client(paho.CallbackAPIVersion.VERSION2)
        self._messages: queue.Queue[tuple[str, int, bytes]] = queue.Queue()
        ready = threading.Event()
        self._client.on_message = lambda _client, _data, message: self._messages.put(
            (message.topic, message.qos, message.payload)
        )
        self._client.on_subscribe = lambda *_: ready.set()
        self._client.connect("127.0.0.1", broker.port)
        self._client.subscribe(topic, 1)
        self._client.loop_start()
        assert ready.wait(5)

    def next(self) -> tuple[str, int, bytes]:
        return self._messages.get(timeout=10)

    def stop(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


def flow(page: Any) -> Any:
    return page.get_by_role("log", name="Messages").locator("p")


def send(page: Any, topic: str, text: str) -> None:
    page.get_by_label("SMQ topic").fill(topic)
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


@pytest.mark.parametrize("phone", [False, True], ids=["desktop", "phone"])
def test_messages_cross_both_ways(
    broker: Mosquitto, bridge: Served, new_page: Callable[..., Any], screenshot: Any, phone: bool
) -> None:
    page = new_page(bridge.url, phone=phone)
    expect(page.get_by_role("status")).to_have_text(f"connected to {broker.address}")
    listener = Listener(broker, "house/#")
    publish(broker, "house/attic", '{"degrees": 21.5}')
    expect(flow(page).first).to_contain_text('home/attic{"degrees": 21.5}')
    send(page, "home/lamp", '{"on": true}')
    expect(flow(page).first).to_contain_text('home/lamphouse/lamp{"on": true}')
    assert listener.next() == ("house/attic", 1, b'{"degrees": 21.5}')
    assert listener.next() == ("house/lamp", 1, b'{"on": true}')
    listener.stop()
    publish(broker, "sensors/raw", "no JSON, and a long line " * 30)
    expect(flow(page)).to_have_count(3)
    screenshot(page)
    assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")


def test_nothing_goes_round_in_circles(broker: Mosquitto, bridge: Served, new_page: Callable[..., Any]) -> None:
    page = new_page(bridge.url)
    expect(page.get_by_role("status")).to_contain_text("connected")
    send(page, "home/a", "[1]")
    publish(broker, "house/b", '{"n": 2}')
    expect(flow(page)).to_have_count(2)
    publish(broker, "house/c", "[3]")  # behind all that would come back
    expect(page.locator("#in")).to_have_text("2")
    expect(flow(page)).to_have_count(3)
    expect(page.locator("#out")).to_have_text("1")


def test_what_does_not_fit_is_left_out(broker: Mosquitto, bridge: Served, new_page: Callable[..., Any]) -> None:
    page = new_page(bridge.url)
    expect(page.get_by_role("status")).to_contain_text("connected")
    send(page, "home/a", "no JSON")
    expect(page.locator("#dropped")).to_have_text("1")
    expect(flow(page).first).to_contain_text("not JSON")
    send(page, "elsewhere", "1")
    publish(broker, "commands/a", "1")
    send(page, "commands/a", "go")
    expect(flow(page)).to_have_count(2)


def test_the_broker_may_come_later(tmp_path: Path, broker: Mosquitto, bridge: Served, page: Any) -> None:
    page.goto(bridge.url)
    expect(page.get_by_role("status")).to_contain_text("connected")
    broker.stop()
    expect(page.get_by_role("status")).to_have_attribute("data-kind", "down")
    expect(page.get_by_role("alert")).to_contain_text("no MQTT broker at this address (cannotconnect)")
    command = page.get_by_role("alert").get_by_role("code")
    expect(command).to_have_text("MQTT_BROKER=mqtt://broker.example smqrt serve app_preload")
    expect(command).to_have_css("font-family", "ui-monospace, monospace")
    send(page, "home/kept", '"while it was away"')
    again = Mosquitto(tmp_path, "", port=broker.port)
    try:
        expect(page.get_by_role("status")).to_have_attribute("data-kind", "up")
        publish(again, "house/back", "[1]")
        expect(flow(page).first).to_contain_text("home/back")
        expect(page.get_by_role("alert")).to_be_hidden()
    finally:
        again.stop()

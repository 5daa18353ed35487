"""The pages of MQTT sessions and retained messages of the console in Chromium."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from playwright.sync_api import expect

from tests.browser.test_console import OUTSIDE
from tests.conftest import REPOSITORY, Served

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"


def device(served: Served, name: str, is_kept: bool = True) -> paho.Client:
    """Return a connected client whose session is kept for an hour."""
    client, ready = paho.Client(paho.CallbackAPIVersion.VERSION2, name, protocol=paho.MQTTv5), threading.Event()
    properties = Properties(PacketTypes.CONNECT)
    properties.SessionExpiryInterval = 3600 if is_kept else 0
    client.on_subscribe = lambda *_: ready.set()
    client.on_connect = lambda *_: client.subscribe("news", 1)
    client.reconnect_delay_set(100, 100)
    client.connect("127.0.0.1", served.port, properties=properties)
    client.loop_start()
    assert ready.wait(10)
    return client


def leave(client: paho.Client) -> None:
    client.disconnect()
    client.loop_stop()


def opened(new_page: Callable[..., Any], served: Served, view: str, phone: bool = False) -> Any:
    page = new_page(f"{served.admin_url}/console/#/{view}", phone)
    expect(page.locator("main")).not_to_have_attribute("aria-busy", "true")
    return page


def test_sessions_and_retained_messages(serve: Callable[..., Served], new_page: Callable[..., Any]) -> None:
    served = serve(REPOSITORY / "app_preload" / "mqtt-house")
    leave(device(served, "asleep"))
    lamp = device(served, HOSTILE)
    lost = threading.Event()
    lamp.on_disconnect = lambda *_: lost.set()
    for topic, payload in (("house/a/temp", "21"), ("house/b/temp", "22"), ("other", HOSTILE * 9)):
        lamp.publish(topic, payload, 1, retain=True).wait_for_publish(10)

    page = opened(new_page, served, "sessions")
    expect(page.locator("tbody tr")).to_have_count(2)
    expect(page.get_by_role("navigation").get_by_role("link", name="Sessions")).to_contain_text("2")
    page.get_by_role("button", name="<img").click()
    expect(page.get_by_role("dialog")).to_contain_text("connected")
    page.get_by_role("button", name="Disconnect …").click()
    page.get_by_role("button", name="Disconnect", exact=True).click()
    expect(page.locator("#toast")).to_have_text("Disconnected.")
    assert lost.wait(10)
    page.get_by_role("combobox", name="State").select_option("offline")
    expect(page.locator("tbody tr")).to_have_count(2)
    page.get_by_label("Search").fill("asl")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_role("button", name="asleep").click()
    page.get_by_role("button", name="Delete session …").click()
    page.get_by_role("button", name="Delete session", exact=True).click()
    expect(page.get_by_text("No session matches")).to_be_visible()

    page = opened(new_page, served, "retained", phone=True)
    expect(page.locator("tbody tr")).to_have_count(3)
    assert page.evaluate(OUTSIDE) == []
    delete = page.get_by_role("button", name="Delete all …")
    expect(delete).to_be_disabled()
    page.get_by_role("button", name="other").click()
    expect(page.get_by_role("dialog")).to_contain_text("<img src=x onerror=")
    expect(page.get_by_role("button", name="Delete …", exact=True)).to_be_in_viewport()
    page.keyboard.press("Escape")
    page.get_by_label("Topic filter").fill("house/#/x")
    expect(page.locator("#banner")).to_contain_text("'#' the whole last level")
    expect(delete).to_be_disabled()
    page.get_by_label("Topic filter").fill("house/+/temp")
    expect(page.locator("tbody tr")).to_have_count(2)
    delete.click()
    expect(page.get_by_role("dialog")).to_contain_text("Delete 2 retained messages of house/+/temp?")
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_text("No retained message matches")).to_be_visible()
    page.get_by_label("Topic filter").fill("")
    expect(page.locator("tbody tr")).to_have_count(1)
    assert page.title() == "Retained · smqrt console"
    lamp.loop_stop()


def test_without_mqtt_the_pages_are_not_in_the_navigation(
    serve: Callable[..., Served], new_page: Callable[..., Any]
) -> None:
    served = serve(REPOSITORY / "app_preload" / "chat")
    page = opened(new_page, served, "retained")
    expect(page.get_by_text("No hub accepts MQTT clients")).to_be_visible()
    expect(page.locator("#nav [data-count=peers]")).to_have_text("0")
    expect(page.get_by_role("navigation").get_by_role("link", name="Retained")).to_have_count(0)

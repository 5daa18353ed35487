"""app_preload/led: switches and lamps, clicked in Chromium."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from playwright.sync_api import expect

from tests.browser.demos import Cable
from tests.conftest import Served


def led(page: Any, lamp: str, colour: str) -> Any:
    lamps = page.get_by_role("article", name=lamp, exact=True)  # "Lamp 79" is part of "Lamp 799"
    return lamps.get_by_role("switch", name=colour)


def open_switch(served: Served, new_page: Callable[..., Any], phone: bool = False) -> Any:
    page = new_page(served.url + "/led/", phone=phone)
    expect(page.get_by_role("status")).to_have_text("connected")
    expect(page.get_by_role("article", name="Lamp in the server")).to_be_visible()
    return page


def open_lamp(served: Served, new_page: Callable[..., Any]) -> tuple[Any, str]:
    lamp = new_page(served.url + "/led/lamp.html", phone=True)
    expect(lamp.get_by_role("status")).to_have_text("connected")
    expect(lamp.get_by_role("heading")).to_contain_text("Lamp ")
    return lamp, lamp.get_by_role("heading").inner_text()


def test_a_switch_changes_the_lamp_in_every_window(served_demos: Served, new_page: Callable[..., Any]) -> None:
    one, other = open_switch(served_demos, new_page), open_switch(served_demos, new_page, phone=True)
    before = led(one, "Lamp in the server", "red").get_attribute("aria-checked")
    after = "false" if before == "true" else "true"
    led(one, "Lamp in the server", "red").click()
    for page in (one, other):
        expect(led(page, "Lamp in the server", "red")).to_have_attribute("aria-checked", after)


def test_a_switch_without_a_connection_is_disabled(served_demos: Served, new_page: Callable[..., Any]) -> None:
    page = new_page()
    cable = Cable(page)
    page.goto(served_demos.url + "/led/")
    red = led(page, "Lamp in the server", "red")
    expect(red).to_be_enabled()
    cable.cut()
    expect(page.get_by_role("status")).to_have_text("reconnecting …")
    expect(red).to_be_disabled()
    cable.mend()
    expect(page.get_by_role("status")).to_have_text("connected")
    expect(red).to_be_enabled()


def test_a_lamp_leads_back_to_the_switch(served_demos: Served, new_page: Callable[..., Any]) -> None:
    lamp, _ = open_lamp(served_demos, new_page)
    lamp.locator("header").get_by_role("link", name="Switch").click()
    expect(lamp.get_by_role("heading", level=1)).to_have_text("Switch")


def test_a_click_goes_to_one_lamp_and_one_colour(served_demos: Served, new_page: Callable[..., Any]) -> None:
    lamp, name = open_lamp(served_demos, new_page)
    dark, other_name = open_lamp(served_demos, new_page)
    switch = open_switch(served_demos, new_page)
    bulb = lamp.get_by_role("img")
    expect(bulb).to_have_accessible_name("off")
    led(switch, name, "red").click()
    expect(bulb).to_have_accessible_name("red")
    led(switch, name, "blue").click()
    expect(bulb).to_have_accessible_name("red and blue")
    expect(bulb).to_have_css("background-color", "rgb(255, 30, 255)")
    led(switch, name, "red").click()
    expect(bulb).to_have_accessible_name("blue")
    expect(dark.get_by_role("img")).to_have_accessible_name("off")
    expect(led(switch, other_name, "blue")).to_have_attribute("aria-checked", "false")


def test_a_lamp_that_comes_and_goes(served_demos: Served, new_page: Callable[..., Any]) -> None:
    switch = open_switch(served_demos, new_page)
    lamp, name = open_lamp(served_demos, new_page)
    expect(switch.get_by_role("article", name=name, exact=True)).to_be_visible()
    lamp.close()
    expect(switch.get_by_role("article", name=name, exact=True)).to_have_count(0)


def test_a_lamp_on_a_device(served_demos: Served, new_page: Callable[..., Any], device: Callable[..., Any]) -> None:
    switch = open_switch(served_demos, new_page)
    lamp = device("led/device.py", served_demos.url + "/led/smq.lsp")
    green = led(switch, "Lamp on a device", "green")
    green.click()
    lamp.wait_for("green on")
    expect(green).to_have_attribute("aria-checked", "true")
    green.click()
    lamp.wait_for("green off")
    late = open_switch(served_demos, new_page)
    expect(late.get_by_role("article", name="Lamp on a device")).to_be_visible()
    lamp.stop()
    expect(switch.get_by_role("article", name="Lamp on a device")).to_have_count(0)

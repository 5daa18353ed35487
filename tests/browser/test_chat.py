"""app_preload/chat: two browsers and a device, clicked in Chromium."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from playwright.sync_api import expect

from tests.browser.demos import Cable, join, people, violations
from tests.conftest import REPOSITORY, Served


def say(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def test_two_people_see_each_other_come_speak_and_go(served_demos: Served, new_page: Callable[..., Any]) -> None:
    ada = join(new_page(served_demos.url + "/chat/"), "Ada")
    bela = join(new_page(served_demos.url + "/chat/", phone=True), "Béla")
    expect(people(ada)).to_have_text(["Ada (you)", "Béla"])
    expect(people(bela)).to_have_text(["Béla (you)", "Ada"])
    expect(ada.get_by_role("log")).to_contain_text("Béla joined")

    say(ada, "Is it <b>sunny</b> ☀?")
    expect(bela.locator(".said")).to_have_text(re.compile(r"AdaIs it <b>sunny</b> ☀\?\d\d:\d\d"))
    say(bela, "It is!")
    expect(ada.get_by_role("log").locator("p").last).to_have_text(re.compile(r"BélaIt is!\d\d:\d\d"))
    expect(ada.locator(".mine")).to_have_text(re.compile(r"Is it <b>sunny</b> ☀\?\d\d:\d\d"))

    bela.close()
    expect(ada.get_by_role("log")).to_contain_text("Béla left")
    expect(people(ada)).to_have_text(["Ada (you)"])


def test_a_single_visitor_is_asked_to_open_another_window(served_demos: Served, new_page: Callable[..., Any]) -> None:
    first = new_page(served_demos.url + "/chat/")
    hint = first.get_by_role("link", name="Open this page in a second window")
    expect(hint).to_be_visible()
    join(first, "Ada")
    expect(first.get_by_text("Only you.")).to_be_visible()
    with first.context.expect_page() as opened:
        hint.click()
    second = join(opened.value, "Bela")
    for page, names in ((first, ["Ada (you)", "Bela"]), (second, ["Bela (you)", "Ada"])):
        expect(people(page)).to_have_text(names)
        expect(page.get_by_text("Only you.")).to_be_hidden()
    second.close()
    expect(first.get_by_text("Only you.")).to_be_visible()


def test_a_device_takes_part(served_demos: Served, new_page: Callable[..., Any], device: Callable[..., Any]) -> None:
    page = join(new_page(served_demos.url + "/chat/"), "Ada")
    clock = device("chat/device.py", served_demos.url + "/chat/smq.lsp")
    expect(page.get_by_role("log")).to_contain_text("Clock joined")
    say(page, "time?")
    expect(page.locator(".said:not(.mine)")).to_contain_text("It is")
    clock.stop()
    expect(page.get_by_role("log")).to_contain_text("Clock left")


def test_the_device_is_notified_of_later_clients(
    served_demos: Served, new_page: Callable[..., Any], device: Callable[..., Any]
) -> None:
    device("chat/device.py", served_demos.url + "/chat/smq.lsp")
    first = join(new_page(served_demos.url + "/chat/"), "Ada")
    expect(people(first)).to_contain_text(["Ada (you)", "Clock"])


def test_messages_without_a_connection_are_pending(served_demos: Served, new_page: Callable[..., Any]) -> None:
    page = new_page()
    cable = Cable(page)
    page.goto(served_demos.url + "/chat/")
    join(page, "Ada")
    other = join(new_page(served_demos.url + "/chat/"), "Bela")
    expect(people(page)).to_have_count(2)
    cable.cut()
    expect(page.get_by_role("status")).to_have_text("reconnecting …")
    for text in ("One", "Two"):
        say(page, text)
    expect(page.locator(".pending")).to_have_text(["Onenot sent yet", "Twonot sent yet"])
    assert violations(page) == []
    cable.mend()
    expect(page.get_by_role("status")).to_have_text("connected")
    expect(page.locator(".pending")).to_have_count(0)
    expect(page.locator(".mine")).to_have_text([re.compile(rf"{text}\d\d:\d\d") for text in ("One", "Two")])
    expect(other.locator(".said")).to_contain_text(["One", "Two"])


def test_messages_that_were_lost_with_the_connection_are_marked(
    served_demos: Served, new_page: Callable[..., Any]
) -> None:
    page = new_page()
    cable = Cable(page)
    page.goto(served_demos.url + "/chat/")
    join(page, "Ada")
    page.evaluate("smq.getsock().send = () => {}")  # the message is on its way when the connection is lost
    say(page, "Lost")
    expect(page.locator(".pending")).to_have_text("Lostnot sent yet")
    cable.cut()
    cable.mend()
    expect(page.locator(".lost")).to_have_text("Lostnot delivered")
    assert violations(page) == []
    expect(page.locator(".pending")).to_have_count(0)


def test_there_are_only_the_topics_of_the_chat(served_demos: Served, new_page: Callable[..., Any]) -> None:
    page = join(new_page(served_demos.url + "/chat/"), "Ada")
    asked = "topic => new Promise(resolve => smq.create(topic, accepted => resolve(accepted)))"
    assert page.evaluate(asked, "say") is True
    assert page.evaluate(asked, "other") is False


def test_a_lost_connection_is_shown_and_comes_back(serve: Callable[..., Served], chromium: Any) -> None:
    apps = [REPOSITORY / "app_preload" / name for name in ("chat", "python")]  # of one alone the address is /
    served = serve(*apps)
    port = served.port
    context = chromium.new_context()
    try:
        page = context.new_page()
        page.goto(served.url + "/chat/")
        join(page, "Ada")
        served.stop()
        expect(page.get_by_role("status")).to_have_text("reconnecting …")
        serve(*apps, "--port", str(port)).wait_for("^listening")
        expect(page.get_by_role("status")).to_have_text("connected")
        expect(people(page)).to_have_text(["Ada (you)"])
        say(page, "Still here.")
        expect(page.locator(".mine")).to_contain_text("Still here.")
    finally:
        context.close()

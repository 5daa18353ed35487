"""app_preload/chat: two browsers and a device, clicked in Chromium."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from playwright.sync_api import expect

from tests.browser.demos import join, people
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
    expect(bela.locator(".said")).to_have_text("AdaIs it <b>sunny</b> ☀?")
    say(bela, "It is!")
    expect(ada.get_by_role("log").locator("p").last).to_have_text("BélaIt is!")
    expect(ada.locator(".mine")).to_have_count(1)

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

"""app_preload/auth: the login with a hash, clicked in Chromium."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from playwright.sync_api import expect

from tests.browser.demos import Cable, violations
from tests.conftest import Served


def sign_in(page: Any, user: str, password: str) -> Any:
    page.get_by_label("Name").fill(user)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Sign in").click()
    return page


def test_a_wrong_password_or_name_is_refused(served_demos: Served, new_page: Callable[..., Any]) -> None:
    page = new_page(served_demos.url + "/auth/")
    for user, password in (("keeper", "open sesame"), ("nobody", "sesame")):
        sign_in(page, user, password)
        expect(page.get_by_role("alert")).to_have_text("wrong name or password")
        expect(page.locator("#panel")).to_be_hidden()
    sign_in(page, "keeper", "sesame")
    expect(page.get_by_role("status").first).to_have_text("signed in")


def test_the_keeper_moves_the_door_for_the_guest(served_demos: Served, new_page: Callable[..., Any]) -> None:
    keeper = sign_in(new_page(served_demos.url + "/auth/"), "keeper", "sesame")
    guest = sign_in(new_page(served_demos.url + "/auth/", phone=True), "guest", "welcome")
    move = keeper.locator("#move")
    for verb, state in ((move.inner_text(), None), (None, None)):
        expect(move).to_be_enabled()
        verb = verb or move.inner_text()
        state = {"Open": "open", "Close": "closed"}[verb]
        move.click()
        for page in (keeper, guest):
            expect(page.locator("#door")).to_have_text(state)
            expect(page.locator("#by")).to_have_text("Last moved by keeper.")
    expect(guest.locator("#move")).to_be_disabled()
    expect(guest.get_by_text("Only the keeper may move the door.")).to_be_visible()
    expect(guest.locator("#move")).to_have_accessible_description("Only the keeper may move the door.")
    expect(keeper.get_by_text("Only the keeper may move the door.")).to_have_count(0)
    assert violations(guest) == []


def test_without_a_connection_the_door_does_not_move(served_demos: Served, new_page: Callable[..., Any]) -> None:
    page = new_page()
    cable = Cable(page)
    page.goto(served_demos.url + "/auth/")
    sign_in(page, "keeper", "sesame")
    expect(page.locator("#move")).to_be_enabled()
    cable.cut()
    expect(page.locator("#move")).to_be_disabled()
    cable.mend()
    expect(page.locator("#move")).to_be_enabled()


def test_the_password_does_not_cross_the_wire(served_demos: Served, new_page: Callable[..., Any]) -> None:
    page = new_page()
    sent: list[bytes] = []
    page.on("websocket", lambda socket: socket.on("framesent", lambda payload: sent.append(bytes(payload))))
    page.goto(served_demos.url + "/auth/")
    for _ in range(2):
        sign_in(page, "guest", "welcome")
        expect(page.get_by_role("status").first).to_have_text("signed in")
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("Name")).to_be_visible()
    connects = [frame for frame in sent if frame[0] == 2]
    assert len(connects) == 2
    assert connects[0] != connects[1], "a hash was used twice"
    assert not any(b"welcome" in frame for frame in sent)


def test_a_device_signs_in(served_demos: Served, new_page: Callable[..., Any], device: Callable[..., Any]) -> None:
    url = served_demos.url + "/auth/smq.lsp"
    refused = device("auth/device.py", url, "guest", "sesame")
    assert refused.process.wait(10) == 1
    watcher = device("auth/device.py", url, "guest", "welcome")
    keeper = sign_in(new_page(served_demos.url + "/auth/"), "keeper", "sesame")
    expect(keeper.locator("#move")).to_be_enabled()
    deadline = time.monotonic() + 20
    while not {"open", "closed"} <= set(watcher.lines):  # it may still be starting: nobody tells when it listens
        assert time.monotonic() < deadline, f"the device printed only {watcher.lines}"
        keeper.locator("#move").click()
        keeper.wait_for_timeout(200)

"""All pages of app_preload/ and of the server itself: what each owes to its reader, on a desktop and on a phone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.conftest import REPOSITORY, Served

PAGES = ["/", "/chat/", "/led/", "/led/lamp.html", "/rpc/", "/python/", "/auth/", "/mqtt-bridge/"]
PAGES += [
    "/mqtt-house/",
    "/telemetry/",
    "/cluster/",
    "/help/",
    "/help/serving",
    "/help/hub-api",
    "/help/decisions/0001-http-front",
]
TOO_WIDE = "document.documentElement.scrollWidth > innerWidth"
UNNAMED = """() => [...document.querySelectorAll("input, select, button, a")]
    .filter(item => !item.labels?.length && !item.getAttribute("aria-label") && !item.textContent.trim())
    .map(item => item.outerHTML)"""


@pytest.mark.parametrize("phone", [False, True], ids=["desktop", "phone"])
@pytest.mark.parametrize("path", PAGES)
def test_page(served_demos: Served, new_page: Callable[..., Any], screenshot: Any, path: str, phone: bool) -> None:
    page = new_page(phone=phone)
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.goto(served_demos.url + path)
    page.wait_for_load_state("networkidle")
    screenshot(page)
    outside = [url for url in requested if not url.startswith((served_demos.url, "data:"))]
    assert not outside, "a page asks for something from outside"
    assert page.title()
    assert not page.evaluate(TOO_WIDE), "the page is wider than the screen"
    assert page.evaluate(UNNAMED) == [], "a control without a name for those who can't see it"


BACKGROUND = "[document.documentElement, document.body].map(each => getComputedStyle(each).backgroundColor)"


@pytest.mark.parametrize("path", PAGES)
def test_light_and_dark_differ(served_demos: Served, new_page: Callable[..., Any], path: str) -> None:
    page = new_page(served_demos.url + path)
    backgrounds = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        backgrounds.append(page.evaluate(BACKGROUND))
    assert backgrounds[0] != backgrounds[1]


def test_the_list_leads_to_every_application_and_back(served_demos: Served, new_page: Callable[..., Any]) -> None:
    page = new_page(served_demos.url)
    names = [path.name for path in sorted((REPOSITORY / "app_preload").iterdir()) if path.is_dir()]
    expect(page.locator("main").get_by_role("link")).to_have_text(names)
    expect(page.locator("main li p")).to_have_count(len(names))
    for name in names:
        page.get_by_role("link", name=name, exact=True).click()
        page.get_by_role("link", name="Applications").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Applications")


def test_the_manual(served_demos: Served, new_page: Callable[..., Any]) -> None:
    page = new_page(served_demos.url)
    page.get_by_role("link", name="Manual").click()
    page.get_by_role("main").get_by_role("link", name="Security").click()
    expect(page.get_by_role("heading", level=1, name="Security")).to_be_visible()
    page.get_by_role("main").get_by_role("link", name="Settings").click()
    expect(page).to_have_url(served_demos.url + "/help/settings")
    expect(page.get_by_role("table").first).to_be_visible()


def test_the_javascript_of_the_manual_runs(served_demos: Served, new_page: Callable[..., Any]) -> None:
    manual = (REPOSITORY / "smqrt/help/clients.md").read_text("utf-8")
    source = manual.partition("```js\n")[2].partition("```")[0]
    page = new_page(served_demos.url + "/led/")
    with page.expect_console_message(lambda message: message.text == "connected"):
        page.evaluate(f"() => {{ {source}; window.manual = smq; }}")
    with page.expect_console_message(lambda message: message.text == "21.5"):
        page.evaluate("manual.publish('21.5', 'temperature', 'celsius')")


@pytest.mark.parametrize("name", ["chat", "led", "rpc", "auth", "python", "mqtt-house", "telemetry"])
def test_every_application_has_a_readme(name: str) -> None:
    folder = REPOSITORY / "app_preload" / name
    text = (folder / "README.md").read_text("utf-8")
    assert len(text.splitlines()) < 30
    shown = [path for path in folder.iterdir() if path.name not in ("README.md", ".lua", "__pycache__")]
    assert [path.name for path in shown if f"`{path.name}`" not in text] == []

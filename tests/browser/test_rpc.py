"""app_preload/rpc and app_preload/python: the same remote calls, answered by Lua and by Python."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import requests
from playwright.sync_api import expect

from tests.browser.demos import violations
from tests.conftest import REPOSITORY, Served

APPLICATIONS = {"rpc": "rpc/smq.lsp", "python": "python/smq"}


IS_RED = """element => {
    const [red, green, blue] = getComputedStyle(element).color.match(/\\d+/g).map(Number);
    return red > 2 * green && red > 2 * blue;
}"""


@pytest.fixture(params=list(APPLICATIONS))
def application(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def open_page(served: Served, new_page: Callable[..., Any], application: str) -> Any:
    page = new_page(f"{served.url}/{application}/")
    expect(page.get_by_role("status").first).to_have_text("connected")
    expect(page.get_by_role("option")).to_have_text(["add", "clock", "list", "reverse", "slow"])
    return page


def call(page: Any, name: str, arguments: str | None = None) -> Any:
    """Calls a function and returns its entry."""
    page.get_by_label("Function").select_option(name)
    if arguments is not None:
        page.get_by_label("Arguments").fill(arguments)
    before = page.get_by_role("listitem").count()
    page.get_by_role("button", name="Call").click()
    expect(page.get_by_role("listitem")).to_have_count(before + 1)
    return page.locator("#log li").nth(-1 - before)


def test_functions_answer(served_demos: Served, new_page: Callable[..., Any], application: str) -> None:
    page = open_page(served_demos, new_page, application)
    expect(call(page, "add")).to_contain_text("add(2, 40)")
    expect(page.locator("#log output").first).to_have_text("42")
    expect(call(page, "reverse", '"a\\u00e9"').locator("code")).to_have_text('reverse("aé")')
    expect(call(page, "clock").locator("output")).to_contain_text("20")


def test_an_error_comes_back_as_one(served_demos: Served, new_page: Callable[..., Any], application: str) -> None:
    page = open_page(served_demos, new_page, application)
    entry = call(page, "add", "1, {}")
    expect(entry).to_have_class("card failed")
    assert entry.locator("output").evaluate(IS_RED)
    assert violations(page) == []
    unknown = page.evaluate("call('nothing').catch(error => error.message)")
    assert unknown == "there is no function nothing"


def test_a_call_by_http(served_demos: Served) -> None:
    def post(text: str) -> tuple[int, object]:
        answer = requests.post(f"{served_demos.url}/python/call", data=text)
        return answer.status_code, answer.json() if answer.headers["Content-Type"] == "application/json" else None

    assert post('{"name": "add", "arguments": [2, 40]}') == (200, {"value": 42})
    assert post('{"name": "nothing"}') == (400, {"error": "there is no function nothing"})
    assert post("[1]") == (400, None)
    assert post("{") == (400, None)


def test_arguments_that_are_no_json_are_not_sent(
    served_demos: Served, new_page: Callable[..., Any], application: str
) -> None:
    page = open_page(served_demos, new_page, application)
    page.get_by_label("Arguments").fill("1, oops")
    page.get_by_role("button", name="Call").click()
    error = page.get_by_role("alert")
    expect(error).to_contain_text("not JSON")
    assert error.evaluate(IS_RED)
    assert violations(page) == []
    expect(page.get_by_label("Arguments")).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_role("listitem")).to_have_count(0)
    call(page, "add", "1, 2")
    expect(error).to_be_hidden()
    expect(page.get_by_label("Arguments")).to_have_attribute("aria-invalid", "false")


def test_a_slow_call_does_not_hold_up_another(
    served_demos: Served, new_page: Callable[..., Any], application: str
) -> None:
    page = open_page(served_demos, new_page, application)
    # In one step, and compared by the times of the page: on a busy machine a click may take longer than 1.5 s.
    page.evaluate("perform('slow', [1500]); perform('add', [1, 2])")
    quick, slow = page.get_by_role("listitem").nth(0), page.get_by_role("listitem").nth(1)
    expect(quick.locator("output")).to_have_text("3")
    expect(slow.locator("output")).to_have_text('"waited 1500 ms"')
    quick_ms, slow_ms = (float(entry.locator("small").inner_text().removesuffix(" ms")) for entry in (quick, slow))
    assert quick_ms < slow_ms


def test_two_browsers_get_their_own_answers(
    served_demos: Served, new_page: Callable[..., Any], application: str
) -> None:
    pages = [open_page(served_demos, new_page, application) for _ in range(2)]
    entries = [call(page, "add", f"{number}, 0") for number, page in enumerate(pages)]
    for number, entry in enumerate(entries):
        expect(entry.locator("output")).to_have_text(str(number))


@pytest.mark.servers
def test_a_device_calls(served_demos: Served, application: str) -> None:
    script = REPOSITORY / "app_preload" / application / "call.py"
    command = [sys.executable, script, f"{served_demos.url}/{APPLICATIONS[application]}"]
    answer = subprocess.run([*command, "add", "2", "40"], capture_output=True, text=True, timeout=20, check=True)
    assert answer.stdout == "42\n"


def test_an_answer_does_not_wait(served_demos: Served, new_page: Callable[..., Any], application: str) -> None:
    page = open_page(served_demos, new_page, application)
    took_ms = page.evaluate(
        """async () => {
            const start = performance.now();
            for (let i = 0; i < 40; i++) await call("add", i, 1);
            return performance.now() - start;
        }"""
    )
    assert took_ms < 4000, f"{took_ms / 40} ms for a call"

"""app_preload/telemetry in Chromium. What the pipeline computes is published by the tests: no Spark is needed here."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.demos import INK
from tests.conftest import REPOSITORY, Served

NAMES = ["boiler", "server room", "cellar", "roof"]


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def publish(page: Any, topic: str, value: dict[str, Any]) -> None:
    page.evaluate("([topic, text]) => smq.publish(text, topic)", [topic, json.dumps(value)])


def minute(page: Any, name: str, minutes_ago: int, avg: float, half: float = 1.0, readings: int = 60) -> None:
    """What the pipeline says of a minute."""
    start = time.time() // 60 * 60 - 60 * minutes_ago
    told = {"device": name, "minute": iso(start), "avg": avg, "low": avg - half, "high": avg + half}
    publish(page, f"stats/{name}", told | {"readings": readings})


def alarm(page: Any, name: str, rule: str, state: str, seconds_ago: float = 0) -> None:
    """What the pipeline says when an alarm begins or ends."""
    told = {"device": name, "alert": "alarms", "rule": rule, "state": state, "ts": iso(time.time() - seconds_ago)}
    publish(page, f"alerts/{name}", told)


def card(page: Any, name: str) -> Any:
    return page.get_by_role("article", name=name, exact=True)


def opened(page: Any) -> Any:
    expect(page.locator("#state")).to_have_text("connected")
    expect(page.get_by_role("article")).to_have_count(len(NAMES))
    return page


@pytest.fixture
def telemetry(serve: Callable[..., Served]) -> str:
    """The address of a server of its own: what one test publishes stays there for who comes later."""
    return serve(REPOSITORY / "app_preload" / "telemetry").url


def test_every_sensor_has_a_card_with_current_values(telemetry: str, new_page: Callable[..., Any]) -> None:
    page = opened(new_page(telemetry))
    expect(page.get_by_role("heading", level=2)).to_have_text([*NAMES, "Alerts"])
    for name in NAMES[:3]:  # the roof rests now and then
        expect(card(page, name).locator(".now")).to_contain_text("°C")
    before = card(page, "boiler").locator(".now").inner_text()
    expect(card(page, "boiler").locator(".now")).not_to_have_text(before)


def test_statistics_are_drawn_as_they_come(telemetry: str, new_page: Callable[..., Any], screenshot: Any) -> None:
    page, phone = opened(new_page(telemetry)), opened(new_page(telemetry, phone=True))
    for name, avg in zip(NAMES, (71.5, 27.0, 12.25, 21.0), strict=True):
        for ago in range(9, -1, -1):
            minute(page, name, ago, avg + (ago % 3), readings=60 if ago else 17)
    for window in (page, phone):
        expect(card(window, "boiler").locator(".minute")).to_contain_text("⌀ 71.5° 70.5° to 72.5°, 17 readings")
        expect(card(window, "cellar").locator(".minute")).to_contain_text("⌀ 12.3°")
        assert card(window, "boiler").locator("canvas").evaluate(INK) > 5
    minute(page, "boiler", 0, 80.0, 5, 18)
    expect(card(phone, "boiler").locator(".minute")).to_contain_text("⌀ 80.0° 75.0° to 85.0°, 18 readings")
    alarm(page, "boiler", "when", "raised")
    screenshot(page)
    screenshot(phone, "phone")


def test_alerts_are_raised_and_cleared(telemetry: str, new_page: Callable[..., Any]) -> None:
    page = opened(new_page(telemetry))
    alerts, badge = page.get_by_role("log", name="Alerts"), card(page, "boiler").locator(".badge")
    expect(page.get_by_text("Nothing to report.")).to_be_visible()
    alarm(page, "boiler", "when", "raised", 20)
    expect(badge).to_have_text("too hot")
    alarm(page, "boiler", "absent", "raised", 15)
    expect(badge).to_have_text("too hot, silent")
    alarm(page, "boiler", "when", "cleared", 10)
    expect(badge).to_have_text("silent")
    alarm(page, "boiler", "absent", "cleared", 5)
    expect(badge).to_have_text("")
    told = ["no longer silent", "no longer too hot", "silent", "too hot"]
    expect(alerts.locator("li span")).to_have_text(told)
    expect(page.get_by_text("Nothing to report.")).to_be_hidden()


def test_later_visitors_see_earlier_values(telemetry: str, new_page: Callable[..., Any]) -> None:
    first = opened(new_page(telemetry))
    minute(first, "roof", 1, 20.0)
    minute(first, "roof", 0, 22.5, readings=30)
    alarm(first, "roof", "absent", "raised", 3)
    expect(card(first, "roof").locator(".badge")).to_have_text("silent")
    later = opened(new_page(telemetry))
    expect(card(later, "roof").locator(".minute")).to_contain_text("⌀ 22.5°")
    expect(card(later, "roof").locator(".badge")).to_have_text("silent")
    expect(later.get_by_role("log", name="Alerts").locator("li")).to_have_count(1)


def test_the_page_says_how_to_start_a_pipeline(telemetry: str, new_page: Callable[..., Any]) -> None:
    page = opened(new_page(telemetry))
    expect(page.locator("#hint")).to_be_hidden()
    expect(page.locator("#hint")).to_contain_text("start with --pipelines")
    expect(page.locator("#hint")).to_be_visible()
    minute(page, "roof", 0, 20.0)
    expect(page.locator("#hint")).to_be_hidden()


def test_a_lost_connection_is_shown_and_missed_messages_arrive(serve: Callable[..., Served], chromium: Any) -> None:
    application = REPOSITORY / "app_preload" / "telemetry"
    served = serve(application)
    port = served.port
    context = chromium.new_context()
    try:
        page = context.new_page()
        page.goto(served.url)
        opened(page)
        served.stop()
        expect(page.locator("#state")).to_have_text("reconnecting …")
        serve(application, "--port", str(port)).wait_for("^listening")
        expect(page.locator("#state")).to_have_text("connected")
        expect(page.get_by_role("article")).to_have_count(len(NAMES))
        before = card(page, "cellar").locator(".now").inner_text()
        expect(card(page, "cellar").locator(".now")).not_to_have_text(before)
    finally:
        context.close()


def test_a_second_server_of_an_application_has_no_journal(
    serve: Callable[..., Served], new_page: Callable[..., Any], tmp_path: Path
) -> None:
    shutil.copytree(
        REPOSITORY / "app_preload" / "telemetry",
        tmp_path / "app",
        ignore=shutil.ignore_patterns(".journal", ".pipelines"),
    )
    first = serve(tmp_path / "app")
    expect(opened(new_page(first.url)).locator("#unrecorded")).to_be_hidden()
    second = serve(tmp_path / "app")
    expect(opened(new_page(second.url)).locator("#unrecorded")).to_be_visible()
    assert second.lines[0] == "app app at /: ok"

"""The page of the trace logger, in Chromium."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests
from playwright.sync_api import expect

from tests.conftest import Served


def test_the_page(tmp_path: Path, serve: Callable[..., Served], new_page: Callable[..., Any], chromium: Any) -> None:
    (tmp_path / "mako.conf").write_text("tracelogger = {request = true}")
    (tmp_path / "index.lsp").write_text("<?lsp trace(request:data'say') ?>")
    served = serve("--tracelogger", cwd=tmp_path)
    say = served.url + "/?say="
    requests.get(say + "<b>early</b>")
    page = new_page(served.url + "/rtl/tracelogger/")
    log = page.get_by_role("log")
    expect(page.get_by_role("status")).to_have_text("connected")
    expect(log).to_contain_text("index.lsp 1: <b>early</b>")
    requests.get(say + "late")
    expect(log.get_by_text("GET /?say=late 200 OK")).to_be_visible()

    page.get_by_placeholder("Show lines with").fill("LATE")
    expect(log.get_by_text("early")).to_have_count(2)
    expect(log.get_by_text("early").first).to_be_hidden()
    page.get_by_placeholder("Show lines with").fill("")
    page.get_by_role("button", name="Hold").click()
    requests.get(say + "held")
    expect(page.get_by_role("button", name="Hold")).to_have_text("Hold (2)")
    page.get_by_role("button", name="Hold").click()
    expect(log.get_by_text("index.lsp 1: held")).to_be_visible()

    window = chromium.new_context(viewport={"width": 390, "height": 844})  # a 503 is no trouble here
    other = window.new_page()
    other.goto(served.url + "/rtl/tracelogger.service/")
    expect(other.get_by_role("status")).to_have_text("another viewer is connected")
    other.get_by_role("button", name="Take over").click()
    expect(other.get_by_role("status")).to_have_text("connected")
    expect(page.get_by_role("status")).to_have_text("another viewer has taken over")
    page.get_by_role("button", name="Clear").click()
    expect(log).to_be_empty()
    assert other.evaluate("document.documentElement.scrollWidth <= innerWidth")
    window.close()

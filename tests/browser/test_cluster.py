"""app_preload/cluster: two nodes, each a process of its own, seen in Chromium."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.conftest import REPOSITORY, Served

AGAIN_MS = 60_000
"""Until a node that was killed runs again: five seconds, and a start on a busy machine."""


def node(page: Any, number: int) -> Any:
    return page.get_by_role("region", name=f"Node {number}")


def clients(page: Any, number: int) -> Any:
    return node(page, number).get_by_role("listitem")


def open_page(served: Served, new_page: Callable[..., Any], **how: Any) -> Any:
    page = new_page(served.url + "/cluster/", **how)
    expect(page.get_by_role("status").first).to_have_text("both running", timeout=AGAIN_MS)
    return page


def add_client(page: Any, number: int) -> None:
    count = clients(page, number).count()
    node(page, number).get_by_role("button", name="Add a client").click()
    expect(clients(page, number)).to_have_count(count + 1)


def say(page: Any, number: int, text: str) -> None:
    node(page, number).get_by_label("Message").fill(text)
    node(page, number).get_by_role("button", name="Send").click()


@pytest.fixture(params=[1, 2], ids=["one process", "two workers"])
def served(request: pytest.FixtureRequest, serve: Callable[..., Served], tmp_path: Path) -> Served:
    own = {"XDG_RUNTIME_DIR": str(tmp_path)}
    apps = [REPOSITORY / "app_preload" / name for name in ("chat", "cluster")]  # of one alone the address is /
    return serve(*apps, "--workers", str(request.param), env=own)


def test_both_nodes_know_all_clients_until_one_is_killed(
    served: Served, new_page: Callable[..., Any], device: Callable[..., Any], tmp_path: Path
) -> None:
    page = open_page(served, new_page)
    assert len(list(tmp_path.glob("smqrt/*.json"))) == 1, "commands for operators find the server, not its nodes"
    for number in (1, 2):
        expect(clients(page, number)).to_have_count(2)
    add_client(page, 1)
    add_client(page, 2)
    sensor = device("cluster/device.py", served.url + "/cluster/2")
    expect(clients(page, 1).filter(has_text="Device")).to_have_text(["Deviceat node 2"])
    expect(clients(page, 2).filter(has_text="Device")).to_have_text(["Devicehere"])
    expect(clients(page, 1).filter(has_text="here")).to_have_count(2)
    expect(clients(page, 1).filter(has_text="at node 2")).to_have_count(3)

    say(page, 1, "Is it <b>sunny</b> ☀?")
    expect(node(page, 2).get_by_role("log")).to_contain_text(
        re.compile(r"\w+ \d\d: Is it <b>sunny</b> ☀\?from node 1, [0-9.]+ ms")
    )
    sensor.wait_for(re.sub("from node.*", "", node(page, 2).get_by_role("log").locator("p").last.inner_text()))

    node(page, 2).get_by_role("button", name="kill -9").click()
    expect(page.get_by_role("status").first).to_have_text("1 of 2 running")
    expect(clients(page, 1).filter(has_text="at node 2")).to_have_count(0)
    expect(node(page, 1).get_by_role("log")).to_contain_text("3 clients at node 2 have disconnected.")
    expect(clients(page, 1).filter(has_text="here")).to_have_count(2)
    say(page, 1, "Alone")
    expect(node(page, 1).get_by_role("log")).to_contain_text("Alone")

    expect(page.get_by_role("status").first).to_have_text("both running", timeout=AGAIN_MS)
    expect(clients(page, 1).filter(has_text="at node 2")).to_have_count(3)
    expect(clients(page, 2)).to_have_count(5)
    say(page, 2, "Back again")
    expect(node(page, 1).get_by_role("log")).to_contain_text("Back again")


def test_two_visitors_see_each_other_at_both_nodes(served_demos: Served, new_page: Callable[..., Any]) -> None:
    one, other = open_page(served_demos, new_page), open_page(served_demos, new_page, phone=True)
    for page in (one, other):
        for number in (1, 2):
            expect(clients(page, number)).to_have_count(4)
    other.close()
    for number in (1, 2):
        expect(clients(one, number)).to_have_count(2)

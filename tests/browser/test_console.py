"""The console in Chromium. All tests share one server and a few clients."""

from __future__ import annotations

import re
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from smqrt.wire.smq import Type
from tests.browser.demos import INK, RawDevice
from tests.conftest import Served
from tests.support.factory import Factory
from tests.support.pki import Authority

SHOP = """
from smqrt import hub

smq = hub.create()


def connect(request, relpath):
    if relpath != "smq":
        return False
    smq.connect(request)
    return True


dir.setfunc(connect)
"""
BROKEN = "trace('loading')\nlocal shelf = {}\nshelf.door.lock = true\n"
MENDED = "trace('all is well')\n"
HOSTILE = b"<img src=x onerror=\"document.title='owned'\">\xe2\x80\xaegnp.exe\x1b[2J"
OUTSIDE = """() => [document.documentElement, ...document.querySelectorAll("main *, td *")]
    .filter(one => !one.closest(".unseen, .chart, .lines"))
    .map(one => [one, one.closest(".section") ?? document.documentElement])
    .filter(([one, around]) => one.getBoundingClientRect().right > around.getBoundingClientRect().right + 1)
    .map(([one]) => one)
    .map(one => one.outerHTML.slice(0, 200))"""
VIEWS = (
    "overview",
    "peers",
    "topics",
    "sessions",
    "retained",
    "messages",
    "applications",
    "journals",
    "clusters",
    "limits",
    "closes",
    "log",
)


class Shop:
    """A server with a hub, an application that fails, and clients whose names are not friendly."""

    def __init__(self, folder: Path) -> None:
        for name, code in {"shop/.preload.py": SHOP, "broken/.preload": BROKEN}.items():
            (folder / name).parent.mkdir()
            (folder / name).write_text(code)
        self.broken = folder / "broken" / ".preload"
        self.served = Served(folder)
        self.url = f"{self.served.admin_url}/console/"
        self.lamp = RawDevice(self.served.port, "/shop/smq", b"lamp-0815")
        self.hostile = RawDevice(self.served.port, "/shop/smq", HOSTILE)
        for topic in (HOSTILE, b"long" + b"o" * 65_000, b"light"):
            self.hostile.send(bytes((Type.SUBSCRIBE,)) + topic)
            self.hostile.receive(Type.SUBACK)

    def close(self) -> None:
        self.served.stop()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with Factory(Shop) as start:
        yield start(tmp_path_factory.mktemp("shop"))


def opened(new_page: Callable[..., Any], shop: Shop, view: str = "overview", phone: bool = False) -> Any:
    page = new_page(f"{shop.url}#/{view}", phone)
    expect(page.locator("#link")).to_have_text("live")
    expect(page.locator("main")).not_to_have_attribute("aria-busy", "true")
    return page


def figure(page: Any, name: str) -> Any:
    return page.locator(".figure").filter(has_text=name).locator(".value")


def test_the_overview_is_live_and_charts_survive_reload(shop: Shop, new_page: Callable[..., Any]) -> None:
    page = opened(new_page, shop)
    expect(figure(page, "Peers")).to_have_text("2")
    third = RawDevice(shop.served.port, "/shop/smq", b"third one")
    expect(figure(page, "Peers")).to_have_text("3")
    expect(page.get_by_role("navigation").get_by_role("link", name="Peers")).to_contain_text("3")
    third.close()
    expect(figure(page, "Peers")).to_have_text("2")
    expect(page.get_by_role("region", name="Needs attention")).to_contain_text(
        "The application /broken/ failed: broken/.preload:3"
    )
    for _ in range(2):
        page.wait_for_function("async () => (await (await fetch('history.json')).json()).times.length > 1")
        chart = page.get_by_role("img", name=re.compile("^Peers, last hour: connected [23], highest"))
        expect(chart).to_be_visible()
        assert chart.locator("canvas").evaluate(INK) > 3
        page.reload()
        expect(page.locator("#link")).to_have_text("live")


def test_a_client_is_found_and_disconnected_by_keyboard_alone(shop: Shop, new_page: Callable[..., Any]) -> None:
    going = RawDevice(shop.served.port, "/shop/smq", b"has to go")
    page = opened(new_page, shop)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    expect(page.get_by_role("navigation").get_by_role("link", name="Peers")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Peers")
    expect(page.locator("main")).to_be_focused()
    expect(page.locator("main")).not_to_have_attribute("aria-busy", "true")  # there is something to go to
    page.keyboard.press("Tab")
    expect(page.get_by_label("Search")).to_be_focused()
    page.keyboard.type("has to")
    expect(page.locator("tbody tr")).to_have_count(1)
    name = page.get_by_role("link", name="has to go")
    for _ in range(6):
        page.keyboard.press("Tab")
        if name.evaluate("link => link === document.activeElement"):
            break
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Peer")
    expect(page.locator("main")).to_contain_text("127.0.0.1")
    expect(page.get_by_role("list", name="Subscriptions")).to_have_text("hello")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Disconnect …")).to_be_focused()
    page.keyboard.press("Enter")
    question = page.get_by_role("dialog", name="Disconnect has to go?")
    expect(question.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Disconnected.", exact=True)).to_be_visible()
    going.expect_bare_end()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.locator("main")).to_contain_text("The peer has disconnected")
    expect(page.get_by_role("table", name="Closed connections of this uid")).to_contain_text("by an operator")
    page.goto(f"{shop.url}#/closes")
    reason = page.get_by_role("group").filter(has_text="sysshutdown")
    reason.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(reason.get_by_role("table")).to_contain_text("has to go")


def test_a_row_opens_the_page_of_a_peer(shop: Shop, new_page: Callable[..., Any]) -> None:
    page = opened(new_page, shop, "peers")
    first, second = page.locator("tbody .opener").all()
    first.focus()
    page.keyboard.press("ArrowDown")
    expect(second).to_be_focused()
    page.locator("tbody tr").filter(has_text="lamp-0815").locator("td").nth(3).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Peer")
    expect(page.locator(".title")).to_contain_text("lamp-0815")
    expect(page.get_by_role("navigation").get_by_role("link", name="Peers")).to_have_attribute("aria-current", "page")
    expect(page.get_by_text("No messages yet")).to_be_visible()
    shop.lamp.send(bytes((Type.CREATE,)) + b"light")
    topic = shop.lamp.receive(Type.CREATEACK)[2:6]
    shop.lamp.send(bytes((Type.PUBLISH,)) + topic + struct.pack("!II", shop.lamp.etid, 0) + b"<i>on</i>")
    expect(page.get_by_role("log", name="Last messages").get_by_role("listitem")).to_contain_text("<i>on</i>")
    shop.hostile.receive(Type.PUBLISH)
    second = RawDevice(shop.served.port, "/shop/smq", b"twice-1")
    page.goto(f"{shop.url}#/peer?id=1.{second.etid}")
    expect(page.locator(".title")).to_contain_text("twice-1")
    second.close()
    expect(page.locator("main")).to_contain_text("The peer has disconnected")
    third = RawDevice(shop.served.port, "/shop/smq", b"twice-1")
    page.get_by_role("link", name="show the new connection").click()
    expect(page.locator("dd").filter(has_text=re.compile(f"^{third.etid}$"))).to_be_visible()
    expect(page.get_by_role("table", name="Closed connections of this uid")).to_contain_text("connection ended")
    third.close()
    page.goto(f"{shop.url}#/peer?id=1.5")
    expect(page.locator("main")).to_contain_text("The peer is not connected")


def test_closes_are_grouped_by_reason_and_client(shop: Shop, new_page: Callable[..., Any]) -> None:
    for _ in range(2):
        RawDevice(shop.served.port, "/shop/smq", b"blinking").close()
    page = opened(new_page, shop, "closes")
    reason = page.get_by_role("group").filter(has_text="connection ended")
    reason.locator("summary").click()
    row = reason.get_by_role("row").filter(has_text="blinking")
    expect(row.locator("td").nth(1)).to_have_text("2")
    expect(reason).to_contain_text("A single one is harmless")


def test_unused_limits_are_folded(shop: Shop, new_page: Callable[..., Any]) -> None:
    page = opened(new_page, shop, "limits")
    used = page.get_by_role("table", name="Limits in use")
    expect(used.get_by_role("row").filter(has_text="open connections of an address")).to_contain_text("2,000")
    expect(used.get_by_role("row").filter(has_text="client_subscriptions")).to_contain_text(re.compile("[45]10,000"))
    folded = page.get_by_role("group").filter(has_text="further limits, not reached")
    expect(used).not_to_contain_text("connect_rate_per_address")
    expect(folded.get_by_text("connect_rate_per_address", exact=True)).to_be_hidden()
    folded.locator("summary").click()
    expect(folded.get_by_role("row").filter(has_text="connect_rate_per_address")).to_contain_text("200")


def test_topics_have_rates_and_sparklines(shop: Shop, new_page: Callable[..., Any]) -> None:
    page = opened(new_page, shop, "topics")
    row = page.get_by_role("row").filter(has_text="light")
    shop.lamp.send(bytes((Type.CREATE,)) + b"light")
    topic = shop.lamp.receive(Type.CREATEACK)[2:6]
    before = int(row.locator("td").nth(2).text_content())
    expect(row.locator("td").nth(1)).to_have_text("0")  # there were two readings
    for _ in range(5):
        shop.lamp.send(bytes((Type.PUBLISH,)) + topic + struct.pack("!II", shop.lamp.etid, 0) + b"on")
        shop.hostile.receive(Type.PUBLISH)
    expect(row.locator("td").nth(2)).to_have_text(str(before + 5))
    expect(row.locator("path")).to_have_attribute("d", re.compile(r"^M.*L.* 1\.0"))  # its maximum
    expect(page.locator("main .title")).to_have_text(re.compile("^Topics[0-9]+ topics$"))
    page.get_by_role("button", name="Messages").click()
    expect(page.locator("tbody tr").first).to_contain_text("light")
    expect(page.get_by_role("columnheader", name=re.compile("^Messages[^/]*$"))).to_have_attribute(
        "aria-sort", "descending"
    )


QUERIES = """async data => {
    const {journals} = await import("./views/journals.js");
    const main = document.querySelector("main");
    main.replaceChildren();
    journals({place: main, ready() {}, setSubtitle() {}, live: {watch: (name, options, take) => take(data)}});
}"""


def test_queries_have_state_error_and_lag(shop: Shop, new_page: Callable[..., Any], screenshot: Any) -> None:
    """The data is that of `test_queries_with_an_error_come_first`: processes of pipelines need Spark."""
    page = opened(new_page, shop, "clusters", phone=True)
    fine = {
        "path": "/srv/shop",
        "process": "running",
        "name": "means",
        "kind": "table",
        "state": "running",
        "error": "",
    }
    fine |= {"lag_rows": 3, "lag_s": 0.2, "rows_per_s": 120.5, "batch_ms": 80, "updated_ago_s": 1}
    failed = fine | {"name": "<b>daily</b>", "state": "failed", "error": "no column temperatur", "lag_s": 812.0}
    pipelines = [{"path": "/srv/shop", "state": "running"}]
    page.evaluate(QUERIES, {"journals": [], "readers": [], "pipelines": pipelines, "queries": [failed, fine]})
    rows = page.get_by_role("table", name="Queries of pipelines").locator("tbody tr")
    expect(rows.nth(0)).to_contain_text("<b>daily</b>")
    expect(rows.nth(0)).to_contain_text("no column temperatur")
    expect(rows.nth(0)).to_contain_text("13 min 32 s")
    expect(rows.locator(".mark")).to_have_text(["failed", "running"])
    expect(rows.nth(1)).to_contain_text("< 1 s")
    assert page.evaluate(OUTSIDE) == []
    screenshot(page)


def test_an_application_shows_where_it_failed_and_is_restarted(shop: Shop, new_page: Callable[..., Any]) -> None:
    page = opened(new_page, shop, "applications")
    broken = page.get_by_role("article", name="broken")
    expect(broken).to_contain_text("failed")
    expect(broken.get_by_role("list", name="broken/.preload, around line 3")).to_contain_text("shelf.door.lock = true")
    expect(broken.locator("li.here")).to_have_text(re.compile("^3"))
    shop.broken.write_text(MENDED)
    try:
        broken.get_by_role("button", name="Restart …").click()
        page.get_by_role("dialog").get_by_role("button", name="Restart", exact=True).click()
        expect(broken.locator(".mark")).to_have_text("running")
        expect(broken.locator(".failure")).to_have_count(0)
        expect(page.locator("main")).to_contain_text("all is well")
    finally:
        shop.broken.write_text(BROKEN)
    broken.get_by_role("button", name="Restart …").click()
    page.get_by_role("dialog").get_by_role("button", name="Restart", exact=True).click()
    expect(broken.locator(".mark")).to_have_text("failed")


def test_messages_are_published_and_shown(shop: Shop, new_page: Callable[..., Any]) -> None:
    page = opened(new_page, shop, "messages")
    page.get_by_label("Topic", exact=True).nth(1).fill("light")
    page.get_by_role("button", name="Subscribe").click()
    expect(page.get_by_role("list", name="Subscribed topics")).to_contain_text("light")
    page.get_by_label("Topic", exact=True).first.fill("light")
    page.get_by_label("Sub-topic").fill("kitchen")
    page.get_by_label("JSON").check()
    page.get_by_label("Payload").fill('{"on": tru')
    page.get_by_role("button", name="Publish").click()
    expect(page.get_by_role("alert").filter(has_text="not JSON")).to_be_visible()
    page.get_by_label("Payload").fill('{"on": "<b>true</b>"}')
    page.get_by_role("button", name="Publish").click()
    shown = page.get_by_role("log", name="Messages").get_by_role("listitem")
    expect(shown).to_contain_text('{"on": "<b>true</b>"}')
    expect(shown).to_contain_text("kitchen")
    assert shop.hostile.receive(Type.PUBLISH)[13:] == b'{"on": "<b>true</b>"}'
    etid = shop.lamp.etid
    page.get_by_label("One client").check()
    page.get_by_label("ETID of the client").fill(str(etid))
    page.get_by_role("button", name="Publish").click()
    assert shop.lamp.receive(Type.PUBLISH)[1:5] == struct.pack("!I", etid)


def test_names_from_clients_stay_text(shop: Shop, new_page: Callable[..., Any]) -> None:
    page = opened(new_page, shop, "peers")
    expect(page.locator("tbody")).to_contain_text("<img src=x onerror=")
    page.get_by_role("link", name="<img src=x").click()
    expect(page.locator(".title")).to_contain_text("gnp.exe\\x1b[2J")
    expect(page.get_by_role("list", name="Subscriptions")).to_contain_text("(65,004 characters)")
    page.goto(f"{shop.url}#/topics")
    page.get_by_role("link", name="longooo").click()  # by its number, for its name is too long to be shown
    expect(page.get_by_role("list", name="Subscribed topics")).to_contain_text(re.compile("^number [0-9]+"))
    page.goto(f"{shop.url}#/topics")
    expect(page).to_have_title(re.compile("^Topics"))
    assert page.locator("main img").count() == 0
    policy = page.request.get(shop.url).headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_views_are_accessible_and_fit_a_phone(
    shop: Shop, new_page: Callable[..., Any], screenshot: Any, scheme: str
) -> None:
    page = opened(new_page, shop, phone=scheme == "dark")
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    axe = (resources.files("axe_playwright_python") / "axe.min.js").read_text("utf-8")
    page.evaluate(axe)  # not as a script of the page, which its policy forbids
    (peer,) = page.request.get(f"{shop.served.admin_url}/api/v1/peers?search=0815").json()["items"]
    for view in (*VIEWS, f"peer?id={peer['id']}"):
        page.evaluate("view => { location.hash = `#/${view}` }", view)
        view = view.partition("?")[0]
        expect(page.get_by_role("heading", level=1)).to_have_text(view.capitalize())
        expect(page.locator("main")).not_to_have_attribute("aria-busy", "true")
        for details in page.locator("main details").all():
            details.evaluate("details => { details.open = true }")
        found = page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
        assert [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found] == [], view
        assert page.evaluate(OUTSIDE) == [], view
        screenshot(page, f"{view}-{scheme}")


def test_the_menu_of_a_phone(shop: Shop, new_page: Callable[..., Any]) -> None:
    page = opened(new_page, shop, phone=True)
    navigation = page.get_by_role("navigation")
    expect(navigation).to_be_hidden()
    expect(page.get_by_role("button", name="Menu")).to_have_text(re.compile("^Menu[0-9]+ [0-9]+ alerts?$"))
    page.get_by_role("button", name="Menu").click()
    expect(navigation.get_by_role("link", name="Overview")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Menu")).to_be_focused()
    page.keyboard.press("Enter")
    navigation.get_by_role("link", name="Limits").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Limits")
    expect(navigation).to_be_hidden()


MAX_PAGE_BYTES = 150_000
MAX_PAINT_MS = 200


def test_pages_are_small_and_shown_at_once(shop: Shop, new_page: Callable[..., Any]) -> None:
    """The fastest of several loads counts, since the machine has other work."""
    size = "[...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]"
    painted, fastest_ms = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0", 1e9
    page = opened(new_page, shop)
    for attempt in range(10):
        page.goto(f"{shop.url}?{attempt}")
        expect(page.locator("#link")).to_have_text("live")
        page.wait_for_function(painted)
        fastest_ms = min(fastest_ms, page.evaluate(painted))
        if fastest_ms < MAX_PAINT_MS:
            break
    assert fastest_ms < MAX_PAINT_MS
    fresh = opened(new_page, shop)  # nothing is in the cache
    assert 30_000 < fresh.evaluate(f"{size}.reduce((sum, one) => sum + one.encodedBodySize, 0)") < MAX_PAGE_BYTES


def test_pages_of_others_cannot_act(shop: Shop) -> None:
    with socket.create_connection(("127.0.0.1", int(shop.url.split(":")[2].split("/")[0])), 5) as sock:
        sock.sendall(
            b"POST /api/v1/apps/shop/restart HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: https://evil.example\r\n"
            b"Content-Length: 0\r\n\r\n"
        )
        assert sock.recv(100).startswith(b"HTTP/1.1 403")


def test_a_viewer_looks_and_changes_nothing(
    serve: Callable[..., Served], chromium: Any, tmp_path: Path, screenshot: Any
) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "index.html").touch()
    users = tmp_path / "users.txt"
    for name, group in (("ada", "viewer"), ("bela", "guests")):
        command = [sys.executable, "-m", "smqrt", "passwd", str(users), name, "--stdin", "--groups", group]
        subprocess.run(command, input="correct horse\n", text=True, check=True, timeout=60)
    cert, key = Authority(tmp_path).pair("admin")
    tls = ("--admin-cert", cert, "--admin-key", key)
    served = serve(tmp_path / "app", "--admin-host", "0.0.0.0", "--auth-users", users, *tls)
    url = served.admin_url.replace("0.0.0.0", "127.0.0.1") + "/console/"
    for name, status in (("bela", 403), ("ada", 200)):
        credentials = {"username": name, "password": "correct horse"}
        context = chromium.new_context(http_credentials=credentials, ignore_https_errors=True)
        page = context.new_page()
        assert page.goto(f"{url}#/applications").status == status
        if status == 200:
            expect(page.locator("#link")).to_have_text("live")
            page.get_by_role("button", name="Restart …").click()
            page.get_by_role("dialog").get_by_role("button", name="Restart", exact=True).click()
            expect(page.get_by_role("alert").filter(has_text="is read-only")).to_be_visible()
        context.close()
    context = chromium.new_context(ignore_https_errors=True)
    assert context.request.get(url).status == 401
    context.close()


def test_a_lost_connection_is_reported(serve: Callable[..., Served], chromium: Any, tmp_path: Path) -> None:
    (tmp_path / "index.html").touch()
    served = serve(tmp_path)
    context = chromium.new_context()
    try:
        page = context.new_page()
        page.goto(f"{served.admin_url}/console/")
        expect(page.locator("#link")).to_have_text("live")
        port = served.admin_url.rpartition(":")[2]
        served.stop()
        expect(page.get_by_role("alert").filter(has_text="lost; trying again")).to_be_visible()
        serve(tmp_path, "--admin-port", port).wait_for("^admin at")
        expect(page.locator("#link")).to_have_text("live")
        expect(page.locator("#banner")).to_be_hidden()
    finally:
        context.close()

"""The manual in a browser: search, contents lists, copy buttons, a phone; on a server and as files of a folder."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from smqrt.manual import pages as manual
from smqrt.manual.pages import all_sections, find
from smqrt.manual.render import write_site
from tests.browser.demos import AXE
from tests.conftest import Served

NewPage = Callable[..., Any]
MAX_OF_A_PAGE = 3


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("manual") / "some where"
    write_site(folder)
    return folder


def places(page: Any) -> list[str]:
    """Where the results of the search lead to."""
    expect(page.locator(".results").get_by_role("link").first).to_be_visible()
    return [str(place) for place in page.eval_on_selector_all(".results a", "links => links.map(a => a.href)")]


def expected(query: str, base: str) -> list[str]:
    """What the search of `smqrt help` finds, as the results of a page."""
    counts: Counter[str] = Counter()
    found = []
    for section in (one.section for one in find(all_sections(manual.pages()), query)):
        counts[section.page] += 1
        if counts[section.page] <= MAX_OF_A_PAGE:
            found.append(base.format(section.page) + (f"#{section.anchor}" if section.anchor else ""))
    return found


@pytest.mark.parametrize(
    "query", ["hot restart", "setkeepalive", "LOG", "queue_bytes", "--port", "c++ ({[|.", "journal compact"]
)
def test_search_finds_the_same_as_the_command(served_demos: Served, new_page: NewPage, query: str) -> None:
    page = new_page(f"{served_demos.url}/help/")
    page.get_by_role("searchbox").fill(query)
    wanted = expected(query, f"{served_demos.url}/help/{{}}")
    if not wanted:
        expect(page.get_by_role("status")).to_have_text(f"Nothing found for “{query}”.")
    else:
        assert places(page) == wanted[:40]


def test_search_by_keyboard(served_demos: Served, new_page: NewPage) -> None:
    page = new_page(f"{served_demos.url}/help/security")
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.type("hot restart")
    links = page.locator(".results").get_by_role("link")
    expect(links.first).to_contain_text("Hot restart")
    expect(links.first.locator("mark").first).to_have_text("Hot")
    page.keyboard.press("ArrowDown")
    expect(links.nth(0)).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(links.nth(1)).to_be_focused()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator(".results")).to_be_hidden()
    expect(page.get_by_role("searchbox")).to_have_value("")
    page.keyboard.type("hot restart")
    expect(links.first).to_be_visible()
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{served_demos.url}/help/hot-restart")


def test_a_result_names_and_links_page_heading_and_line(served_demos: Served, new_page: NewPage) -> None:
    page = new_page(f"{served_demos.url}/help/")
    page.get_by_role("searchbox").fill("setkeepalive")
    first = page.locator(".results").get_by_role("link").first
    expect(first.locator(".place")).to_have_text("The hub API › setkeepalive")
    expect(first.locator(".snippet")).to_contain_text("setkeepalive")
    first.click()
    expect(page).to_have_url(f"{served_demos.url}/help/hub-api#setkeepalive")
    heading = page.get_by_role("heading", name="setkeepalive")
    expect(heading).to_be_in_viewport()
    header = page.locator("body > header").bounding_box()
    assert heading.bounding_box()["y"] >= header["y"] + header["height"], "the heading is below the header"


def test_markup_in_a_query_is_text(served_demos: Served, new_page: NewPage) -> None:
    page = new_page(f"{served_demos.url}/help/")
    page.get_by_role("searchbox").fill("<img src=x onerror=alert(1)>")
    expect(page.get_by_role("status")).to_have_text("Nothing found for “<img src=x onerror=alert(1)>”.")
    page.get_by_role("searchbox").fill("xyzzy")
    expect(page.get_by_role("status")).to_have_text("Nothing found for “xyzzy”.")
    page.locator("main").click(position={"x": 5, "y": 300})
    expect(page.locator(".results")).to_be_hidden()


# ---- copy buttons


def test_copy_takes_the_code(served_demos: Served, new_page: NewPage) -> None:
    page = new_page(f"{served_demos.url}/help/logins")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    button = page.get_by_role("button", name="Copy").first
    button.click()
    expect(page.locator(".copy").first).to_have_text("Copied")
    code = page.locator("main pre").first.text_content()
    assert page.evaluate("navigator.clipboard.readText()") == code
    assert code.startswith("-- vault/.preload\n")


def test_copy_takes_commands_without_their_output(served_demos: Served, new_page: NewPage) -> None:
    page = new_page(f"{served_demos.url}/help/logins")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    frame = page.locator(".code").filter(has=page.locator(".language-console")).first
    frame.get_by_role("button").click()
    expect(frame.get_by_role("button")).to_have_text("Copied")
    lines = page.evaluate("navigator.clipboard.readText()").splitlines()
    assert lines[0] == "smqrt serve vault"
    assert not [line for line in lines if line.startswith(("$", "app ", "listening"))]


def test_copy_works_without_a_secure_connection(served_demos: Served, new_page: NewPage) -> None:
    page = new_page()
    page.add_init_script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.goto(f"{served_demos.url}/help/logins")
    page.get_by_role("button", name="Copy").first.click()
    expect(page.locator(".copy").first).to_have_text("Copied")
    page.get_by_role("searchbox").focus()
    page.keyboard.press("Control+v")
    expect(page.get_by_role("searchbox")).to_have_value(re.compile(r"^-- vault/\.preload"))


# ---- contents lists


def test_contents_lists_link_headings_and_mark_the_current(served_demos: Served, new_page: NewPage) -> None:
    page = new_page(f"{served_demos.url}/help/hub-api")
    page.set_viewport_size({"width": 1280, "height": 800})
    contents = page.get_by_role("navigation", name="On this page")
    link = contents.get_by_role("link", name="setkeepalive")
    expect(link).to_be_visible()
    link.click()
    expect(page.get_by_role("heading", name="setkeepalive")).to_be_in_viewport()
    expect(link).to_have_class("current")
    assert page.locator(".contents a.current").count() == 1


def test_on_phones_the_contents_list_starts_closed(served_demos: Served, new_page: NewPage) -> None:
    page = new_page(f"{served_demos.url}/help/hub-api", phone=True)
    link = page.get_by_role("link", name="setkeepalive")
    expect(link).to_be_hidden()
    page.locator(".contents summary").click()
    link.click()
    expect(link).to_be_hidden()
    heading = page.get_by_role("heading", name="setkeepalive")
    expect(heading).to_be_in_viewport()
    header = page.locator("body > header").bounding_box()
    assert heading.bounding_box()["y"] >= header["y"] + header["height"] - 1


# ---- a phone

CUT_OFF = """() => {
    const edge = document.documentElement.clientWidth;
    return [...document.querySelectorAll("main *")].filter(item => {
        const box = item.getBoundingClientRect();
        const scroller = item.closest("pre, .wide");
        return box.width && (scroller ? scroller === item && box.right > edge : box.right > edge + 1);
    }).map(item => item.outerHTML.slice(0, 80));
}"""
"""What ends beyond the right edge and does not lie in a box that scrolls."""


def test_no_page_is_wider_than_a_phone(site: Path, new_page: NewPage) -> None:
    page = new_page(phone=True)
    too_wide = {}
    for name in ("index", *manual.pages()):
        page.goto((site / f"{name}.html").as_uri(), wait_until="domcontentloaded")
        if page.evaluate("document.documentElement.scrollWidth > innerWidth") or page.evaluate(CUT_OFF):
            too_wide[name] = page.evaluate(CUT_OFF)
    assert too_wide == {}


def test_a_wide_table_scrolls_to_its_last_column(served_demos: Served, new_page: NewPage) -> None:
    page = new_page(f"{served_demos.url}/help/settings", phone=True)
    box = page.locator(".wide").filter(has=page.locator("th:nth-child(5)")).first
    box.scroll_into_view_if_needed()  # before that, it is not laid out
    expect(box).to_have_attribute("tabindex", "0")  # the keyboard scrolls it
    assert box.evaluate("box => box.scrollWidth > box.clientWidth && getComputedStyle(box).overflowX == 'auto'")
    box.evaluate("box => { box.scrollLeft = box.scrollWidth; }")
    assert box.locator("th").last.evaluate("cell => cell.getBoundingClientRect().right <= innerWidth")


def test_reading_needs_no_script(served_demos: Served, chromium: Any) -> None:
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{served_demos.url}/help/hub-api")
    expect(page.get_by_role("heading", name="setkeepalive")).to_be_attached()
    expect(page.locator(".search")).to_be_hidden()
    page.get_by_text("On this page").click()
    expect(page.get_by_role("link", name="setkeepalive")).to_be_visible()
    context.close()


# ---- accessibility

STRUCTURE = """async pages => {
    const seen = new Set(), found = [];
    const kind = item => item.parentElement.tagName + item.outerHTML.replace(/ (id|href)="[^"]+"/g, " $1")
        .replace(/>[^<]*\\S[^<]*(?=<)/g, ">x").replace(/(<code>x(<wbr>x)*<.code>x?)+/g, "<code>x</code>");
    for (const [name, text] of pages) {
        const read = new DOMParser().parseFromString(text, "text/html");
        document.title = read.title;
        document.body.replaceWith(document.adoptNode(read.body));
        for (const box of document.querySelectorAll("form, details")) [box.hidden, box.open] = [false, true];
        const ids = [...document.querySelectorAll("[id]")].map(item => item.id);
        const faults = ids.filter((id, at) => ids.indexOf(id) !== at);
        for (const block of document.querySelectorAll("pre")) block.textContent = "code";
        for (const item of document.querySelectorAll("tr, li, dt, dd, p")) {
            if (seen.has(kind(item))) item.remove();
            else seen.add(kind(item));
        }
        const rules = {"color-contrast": {enabled: false}, "scrollable-region-focusable": {enabled: false}};
        for (const one of (await axe.run({resultTypes: ["violations"], preload: false, rules})).violations) {
            faults.push(one.id, ...one.nodes.map(node => node.html.slice(0, 200)));
        }
        if (faults.length) found.push([name, faults]);
    }
    return found;
}"""
"""Replaces the body of the document by that of each page in turn; returns ids that are used twice and what axe-core
finds. It needs a minute for some pages, so each kind of row, item and paragraph is left in the first page that has it.
"""
CONTRAST = """pages => {
    const seen = new Map(), found = new Set();
    const luminance = colour => colour.match(/[0-9.]+/g).slice(0, 3).map(value => value / 255)
        .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
        .reduce((sum, value, at) => sum + value * [0.2126, 0.7152, 0.0722][at], 0);
    const ground = item => {
        const colour = getComputedStyle(item).backgroundColor;
        return colour === "rgba(0, 0, 0, 0)" ? ground(item.parentElement) : colour;
    };
    const own = item => `${item.tagName}.${item.className}.${item.ariaCurrent}`;
    const path = item => item === document.body ? "" : `${own(item)} ${path(item.parentElement)}`;
    for (const [, text] of pages) {
        const read = new DOMParser().parseFromString(text, "text/html");
        document.body.replaceWith(document.adoptNode(read.body));
        for (const item of document.querySelectorAll("body *")) {
            const name = path(item);
            const hasText = [...item.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.data.trim());
            if (seen.has(name) || !hasText) continue;
            const pair = [getComputedStyle(item).color, ground(item)];
            const [low, high] = pair.map(luminance).sort((a, b) => a - b);
            seen.set(name, pair);
            if ((high + 0.05) / (low + 0.05) < 4.5) found.add(`${name}: ${pair.join(" on ")}`);
        }
    }
    return [seen.size, [...found]];
}"""
"""Returns the number of kinds of elements with text on all pages, and those whose colours are too similar."""


def test_every_page_is_accessible(site: Path, new_page: NewPage) -> None:
    page = new_page((site / "index.html").as_uri())
    page.set_viewport_size({"width": 1280, "height": 800})
    page.emulate_media(reduced_motion="reduce")
    page.evaluate(AXE)
    texts = [(name, (site / f"{name}.html").read_text("utf-8")) for name in ("index", *manual.pages())]
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        kinds, too_similar = page.evaluate(CONTRAST, texts)
        assert too_similar == [], scheme
        assert kinds > 100
    assert page.evaluate(STRUCTURE, texts) == []


# ---- the static site


def test_the_site_works_from_a_folder(site: Path, new_page: NewPage) -> None:
    page = new_page((site / "index.html").as_uri())
    page.get_by_role("main").get_by_role("link", name="Security").click()
    expect(page.get_by_role("heading", level=1, name="Security")).to_be_visible()
    page.wait_for_load_state()  # before that, nothing handles the keys
    page.keyboard.press("/")
    page.keyboard.type("httptools parser")
    result = page.locator(".results").get_by_role("link", name="0001")
    result.first.click()
    expect(page).to_have_url((site / "decisions/0001-http-front.html").as_uri())
    page.wait_for_load_state()
    page.keyboard.press("/")
    page.keyboard.type("setkeepalive")
    assert places(page) == expected("setkeepalive", f"{site.as_uri()}/{{}}.html")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="setkeepalive")).to_be_in_viewport()
    page.get_by_role("link", name="smqrt manual").click()
    expect(page).to_have_url((site / "index.html").as_uri())

"""The manual as HTML: every page, every link, nothing that a page of Markdown should not be able to do."""

from __future__ import annotations

import gzip
import re
import time
from html.parser import HTMLParser
from urllib.parse import unquote, urljoin

import gevent
import pytest

from smqrt.manual import pages as manual
from smqrt.manual.pages import Slugs, index_script
from smqrt.manual.render import to_html
from smqrt.manual.web import Manual
from tests.http.http_bench import Answer, Bench


class _Page(HTMLParser):
    """Links, anchors, text and whether every tag was closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.text = ""
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        fields = dict(attrs)
        if tag == "a":
            self.links.append(fields["href"] or "")
        if fields.get("id"):
            self.anchors.add(fields["id"] or "")
        if tag not in ("meta", "link", "br", "hr", "img", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def shown() -> dict[str, _Page]:
    """Every page by its path, `/help/` too."""
    bench = Bench()
    bench.root.insert(Manual())
    found = {}
    for name in ("", *manual.pages()):
        answer = bench.connect().ask(f"/help/{name}")
        assert (answer.status, answer.fields["content-type"]) == (200, "text/html; charset=utf-8"), name
        assert "default-src 'none'" in answer.fields["content-security-policy"]
        found[f"/help/{name}"] = _Page(answer.body.decode())
    bench.close()
    return found


def test_every_page_is_there(shown: dict[str, _Page]) -> None:
    for name, text in manual.pages().items():
        page = shown[f"/help/{name}"]
        assert manual.title(text) in page.text
        assert not page.open
    listed = {link for link in shown["/help/"].links if link.startswith("/help/")}
    assert listed == {f"/help/{name}" for name in manual.pages()} | {"/help/"}


def test_every_link_leads_somewhere(shown: dict[str, _Page]) -> None:
    lost = []
    for path, page in shown.items():
        for link in page.links:
            target, _, anchor = urljoin(path, link).partition("#")
            if "://" in target or target == "/":
                continue
            if target not in shown or (anchor and unquote(anchor) not in shown[target].anchors):
                lost.append((path, link))
    assert lost == []


def test_unknown_pages(bench: Bench) -> None:
    bench.root.insert(Manual())
    for name in ("nothing.html", "security.md", "../../setup.cfg", "decisions/.x", "quick-start/x.y"):
        assert bench.connect().ask(f"/help/{name}").status == 404


def test_an_application_called_help_comes_first(bench: Bench) -> None:
    bench.root.insert(Manual())
    bench.handle(lambda request, relpath: request.response.write(b"mine"), "help")
    assert bench.connect().ask("/help/").body == b"mine"


def test_rendering_delays_no_others(bench: Bench) -> None:
    """All pages are asked for at once by somebody who connects anew for each; another one's turns stay short."""
    bench.root.insert(Manual())
    late: list[float] = []

    def look() -> None:
        while True:
            begin = time.thread_time()
            gevent.sleep(0)
            late.append(time.thread_time() - begin)

    def ask(path: str) -> Answer:
        wire = bench.connect()
        wire.sock.settimeout(60)  # the last page waits until all others are rendered, beside the busy `look`
        return wire.ask(path)

    watch = gevent.spawn(look)
    asking = [gevent.spawn(ask, f"/help/{name}") for name in ("search-index.js", *manual.pages())]
    gevent.joinall(asking, raise_error=True)
    watch.kill()
    assert all(one.value.status == 200 for one in asking)
    assert max(late) < 0.05


def test_no_html_and_no_scripts_pass() -> None:
    html = to_html("<script>alert(1)</script>\n\n<img src=x onerror=alert(1)>\n\n[x](javascript:alert(1)) `<b>`")
    assert not re.search("<script|<img|<b>", html)
    assert 'href="javascript' not in html


def test_anchors() -> None:
    assert Slugs().add("TLS, and `more`") == "tls-and-more"
    assert re.findall('id="([^"]*)"', to_html("# A b\n## A b\n### `c_d`-e")) == ["a-b", "a-b-1", "c_d-e"]


def test_links_lose_their_ending_and_others_stay() -> None:
    html = to_html("[a](b.md#c) [d](https://example.com/x.md) [e](#f)")
    assert re.findall('href="([^"]*)"', html) == ["b#c", "https://example.com/x.md", "#f"]
    assert html.count("noopener") == 1


def test_the_index_of_the_search_comes_compressed_or_not(bench: Bench) -> None:
    bench.root.insert(Manual())
    plain = bench.connect().ask("/help/search-index.js")
    packed = bench.connect().ask("/help/search-index.js", headers="Accept-Encoding: gzip\r\n")
    assert (plain.status, plain.fields["content-type"]) == (200, "text/javascript; charset=utf-8")
    assert plain.body.decode() == index_script(manual.pages())
    assert (packed.fields["content-encoding"], packed.fields["vary"]) == ("gzip", "Accept-Encoding")
    assert gzip.decompress(packed.body) == plain.body
    assert "content-encoding" not in plain.fields


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("# T\n\nOne. Two.", "One."),
        ("# T\n\nA [link](x.md) and `code`\nof **two** lines: yes! And", "A link and code of two lines: yes!"),
        ("# T\n\nv1.2 is out. More", "v1.2 is out."),
        ("# T\n\n```\ncode\n```\n\nText.", ""),
        ("# T\n\n    code. more\n\nText.", ""),
        ("# T\n\n\nText. More", "Text."),
        ("# T\n\n| a |\n|---|", ""),
        ("# T", ""),
        ("", ""),
        ("No heading. Yes", "No heading."),
    ],
)
def test_first_sentences(text: str, sentence: str) -> None:
    assert manual.first_sentence(text) == sentence


def test_a_long_readme_takes_no_time() -> None:
    for text in ("[" * 8192, "[a](" * 2000, "`*" * 4096, "\n\n" * 4096, ". " * 4096, "[]" * 4096):
        begin = time.process_time()
        manual.first_sentence(text)
        assert time.process_time() - begin < 0.05

"""The manual and the list of applications as a server shows them: every page, every link, the search."""

from __future__ import annotations

import gzip
import time
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urljoin

import gevent
import pytest

from smqrt.http.access import Access
from smqrt.manual import pages as manual
from smqrt.manual.pages import index_script
from smqrt.manual.web import ApplicationList, Manual
from tests.http.http_bench import Answer, Bench

_VOID = ("meta", "link", "br", "hr", "img", "input", "wbr")


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
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in _VOID or self.open.pop() == tag

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
    """The longest pages are asked for at once by somebody who connects anew for each; another's turns stay short."""
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
    pages = manual.pages()
    longest = sorted(pages, key=lambda name: len(pages[name]))[-20:]  # who is not late for these is not for others
    asking = [gevent.spawn(ask, f"/help/{name}") for name in ("search-index.js", *longest)]
    gevent.joinall(asking, raise_error=True)
    watch.kill()
    assert all(one.value.status == 200 for one in asking)
    assert max(late) < 0.05


@pytest.mark.parametrize(("name", "kind"), [("search-index.js", "javascript"), ("conformance", "html")])
def test_pages_and_the_index_of_the_search_come_compressed_or_not(bench: Bench, name: str, kind: str) -> None:
    bench.root.insert(Manual())
    plain = bench.connect().ask(f"/help/{name}")
    packed = bench.connect().ask(f"/help/{name}", headers="Accept-Encoding: gzip\r\n")
    assert (plain.status, plain.fields["content-type"]) == (200, f"text/{kind}; charset=utf-8")
    assert kind == "html" or plain.body.decode() == index_script(manual.pages())
    assert (packed.fields["content-encoding"], packed.fields["vary"]) == ("gzip", "Accept-Encoding")
    assert gzip.decompress(packed.body) == plain.body
    assert "content-encoding" not in plain.fields


def application(name: str, about: str = "", error: str | None = None, running: bool = True) -> Any:
    return SimpleNamespace(name=name, about=about, error=error, running=running and error is None)


def listed(bench: Bench, *applications: Any) -> str:
    bench.root.insert(ApplicationList(applications))
    answer = bench.connect().ask("/")
    assert (answer.status, answer.fields["cache-control"]) == (200, "no-store")
    return answer.body.decode()


def test_stopped_applications_are_not_listed(bench: Bench) -> None:
    page = listed(bench, application("one"), application("two", running=False))
    assert "1 application on this server" in page
    assert "two" not in page
    assert bench.connect().ask("/two/").status == 404, "the list is at the root only"


def test_what_applications_say_of_themselves_is_escaped(bench: Bench) -> None:
    bench.server.access = Access(debug=True)
    page = listed(bench, application("a&b ü", "<b>"), application("bad", error="<i>why</i>"))
    assert '<a href="/a%26b%20%C3%BC/">a&amp;b ü</a></h2><p class="soft">&lt;b&gt;</p>' in page
    assert "<pre>&lt;i&gt;why&lt;/i&gt;</pre>" in page
    assert 'href="/bad/"' not in page


def test_errors_are_shown_to_operators_only(bench: Bench) -> None:
    bench.server.access = Access(debug=False)
    page = listed(bench, application("bad", error="a secret"))
    assert "secret" not in page
    assert "See the log of the server." in page


def test_an_application_at_the_root_replaces_the_list(bench: Bench) -> None:
    bench.root.insert(ApplicationList([application("one")]))
    bench.handle(lambda request, relpath: request.response.write(b"mine"))
    assert bench.connect().ask("/").body == b"mine"

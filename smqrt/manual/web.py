"""The pages of the server itself: the manual at `/help/`, each page rendered once, in a thread; at `/` the list of its
applications.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote

from gevent import get_hub
from gevent.lock import BoundedSemaphore

from smqrt.http.message import Request
from smqrt.http.tree import Directory
from smqrt.manual import pages as manual

if TYPE_CHECKING:
    from markdown_it.token import Token

LAST = -127  # applications come first, also one of the name "help"
_PARTS = {
    "Begin": "quick-start application python-api hub-api clients wsgi command-line protocol",
    "Serve": "serving mako-conf trace-logger security logins limits data-path metrics troubleshooting",
    "Lua": "lua-api file-servers cosockets sockets http-client tls xml-lua",
    "MQTT": "mqtt-lua mqtt-python mqtt-bridge mqtt-broker sparkplug",
    "Record and compute": (
        "journal pipelines pipeline-rules pipeline-state exactly-once pipeline-commands format-smq "
        "declarative-pipelines pipeline-cluster duckdb"
    ),
    "Specification": "specification specification/smq specification/bas-api specification/runtime",
}
_OTHERS = "More"
_POLICY = "default-src 'none'; style-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/rtl/page.css">
<link rel="stylesheet" href="/rtl/manual.css">
</head>
<body>
"""
_MANUAL_PAGE = (
    _HEAD
    + """<header>
<h1><a href="/help/">smqrt manual</a></h1>
<p><a class="to-pages" href="#pages">Pages</a> <a href="/">Applications</a></p>
</header>
<div class="columns">
<main>
{body}
</main>
<nav id="pages" aria-label="Pages of the manual">
{navigation}
</nav>
</div>
</body>
</html>
"""
)
_APPLICATIONS_PAGE = (
    _HEAD
    + """<header><h1>Applications</h1><p><a href="/help/">Manual</a></p></header>
<main>
<p class="soft">{count} on this server.</p>
<ul class="applications">
{items}
</ul>
</main>
</body>
</html>
"""
)
_NOT_IN_A_SLUG = re.compile(r"[^\w\- ]")


class Manual(Directory):
    """The directory of the manual."""

    def __init__(self) -> None:
        super().__init__("help", LAST)
        self._pages: dict[str, str] = {}
        self._rendered: dict[str, bytes] = {}
        self._rendering = BoundedSemaphore()

    def service(self, request: Request, relpath: str) -> bool:
        """See `Directory.service`."""
        if not self._pages:
            self._pages = manual.pages()
        if relpath and relpath not in self._pages:
            return False
        response = request.response
        response.headers.set("Content-Type", "text/html; charset=utf-8")
        response.headers.set("Cache-Control", "max-age=300")
        response.headers.set("Content-Security-Policy", _POLICY)
        response.headers.set("X-Content-Type-Options", "nosniff")
        response.write(self._html(relpath))
        return True

    def _html(self, name: str) -> bytes:
        with self._rendering:  # one after the other: nobody keeps all threads busy
            if name not in self._rendered:
                self._rendered[name] = get_hub().threadpool.apply(_html, (self._pages, name))
        return self._rendered[name]


def parts(pages: dict[str, str]) -> dict[str, list[str]]:
    """Returns the names of the pages by part of the manual; those of no other part are in the last one."""
    found = {part: [name for name in names.split() if name in pages] for part, names in _PARTS.items()}
    known = {name for names in found.values() for name in names}
    return found | {_OTHERS: [name for name in pages if name not in known and "/" not in name]}


def _html(pages: dict[str, str], name: str) -> bytes:
    body = to_html(pages[name]) if name else _contents(pages)
    title = manual.title(pages[name]) if name else "Manual"
    navigation = _navigation(pages, name)
    return _MANUAL_PAGE.format(title=f"{escape(title)} · smqrt", body=body, navigation=navigation).encode()


def _contents(pages: dict[str, str]) -> str:
    lines = ["<h1>Manual</h1>"]
    for part, names in parts(pages).items():
        entries = "\n".join(f"<dt>{_link(pages, name)}</dt><dd>{_about(pages[name])}</dd>" for name in names)
        lines.append(f"<h2>{escape(part)}</h2>\n<dl>\n{entries}\n</dl>")
    return "\n".join(lines)


def _about(page: str) -> str:
    about = manual.title(page).partition(": ")[2] or manual.first_sentence(page)
    return escape(about[:1].upper() + about[1:])


def _navigation(pages: dict[str, str], current: str) -> str:
    lines = []
    for part, names in parts(pages).items():
        entries = "".join(f"<li>{_link(pages, name, name == current)}</li>" for name in names)
        lines.append(f"<h2>{escape(part)}</h2><ul>{entries}</ul>")
    return "\n".join(lines)


def _link(pages: dict[str, str], name: str, is_current: bool = False) -> str:
    mark = ' aria-current="page"' if is_current else ""
    return f'<a href="/help/{escape(name)}"{mark}>{escape(manual.title(pages[name]).partition(": ")[0])}</a>'


def to_html(text: str) -> str:
    """Returns the HTML of a page in Markdown (CommonMark with tables): no raw HTML passes, headings have anchors, links
    lead to other pages."""
    from markdown_it import MarkdownIt  # when it is wanted: loading it takes as long as ten pages

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(text)
    slugs: dict[str, int] = {}
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open" and following is not None:
            token.attrSet("id", _unused(slug(following.content), slugs))
        for child in token.children or ():
            _lead_to_page(child)
    return str(markdown.renderer.render(tokens, markdown.options, {}))


def slug(heading: str) -> str:
    """Returns the anchor of a heading, the same as on GitHub: `## TLS, and more` is `tls-and-more`."""
    return _NOT_IN_A_SLUG.sub("", heading.lower()).replace(" ", "-")


def _unused(name: str, slugs: dict[str, int]) -> str:
    count = slugs[name] = slugs.get(name, -1) + 1
    return f"{name}-{count}" if count else name


def _lead_to_page(token: Token) -> None:
    """Have a link lead to the page, and not to its source."""
    href = str(token.attrGet("href") or "") if token.type == "link_open" else ""
    page, mark, anchor = href.partition("#")
    if "://" in href:
        token.attrSet("rel", "noopener noreferrer")
    elif page.endswith(".md"):
        token.attrSet("href", page.removesuffix(".md") + mark + anchor)


class ListedApplication(Protocol):
    """An application in the list."""

    @property
    def name(self) -> str:
        """The path segment it is mounted under."""

    @property
    def about(self) -> str:
        """What it is, one sentence; may be empty."""

    @property
    def error(self) -> str | None:
        """Why it does not run, None when it does or was stopped."""

    @property
    def running(self) -> bool:
        """Whether it answers requests."""


class ApplicationList(Directory):
    """Answers `/` when no application does.

    Args:
        applications: those to list, looked at for every request.
    """

    def __init__(self, applications: Iterable[ListedApplication]) -> None:
        super().__init__(None, LAST)
        self._applications = applications

    def service(self, request: Request, relpath: str) -> bool:
        """See `Directory.service`."""
        if relpath:
            return False
        shows_errors = request.access.shows_errors(request)
        items = [_item(one, shows_errors) for one in self._applications if one.running or one.error]
        count = f"{len(items)} application{'s' if len(items) != 1 else ''}"
        page = _APPLICATIONS_PAGE.format(title="Applications", count=count, items="\n".join(items))
        response = request.response
        response.headers.set("Content-Type", "text/html; charset=utf-8")
        response.headers.set("Cache-Control", "no-store")
        response.write(page.encode("utf-8", "backslashreplace"))
        return True


def _item(application: ListedApplication, shows_errors: bool) -> str:
    name, about = (
        escape(application.name),
        f'<p class="soft">{escape(application.about)}</p>' if application.about else "",
    )
    if application.error is None:
        return f'<li class="card"><h2><a href="/{quote(application.name)}/">{name}</a></h2>{about}</li>'
    failure = f"<pre>{escape(application.error)}</pre>" if shows_errors else "<p>The server's log says why.</p>"
    return f'<li class="card"><h2>{name} <span class="failed">failed</span></h2>{about}{failure}</li>'

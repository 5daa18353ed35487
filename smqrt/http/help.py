"""The manual at `/help/`: every page is rendered once, in a thread."""

from __future__ import annotations

from html import escape

from gevent import get_hub
from gevent.lock import BoundedSemaphore

from smqrt import manual
from smqrt.http.message import Request
from smqrt.http.tree import Directory

LAST = -127  # an application of the same name comes first
_PARTS = {
    "Begin": "quick-start application hub-api clients wsgi command-line protocol",
    "Serve": "serving security limits data-path",
    "Lua": "lua-api cosockets sockets http-client tls",
    "MQTT": "mqtt-lua mqtt-python mqtt-bridge mqtt-broker",
    "Record and compute": (
        "journal pipelines pipeline-rules pipeline-state exactly-once pipeline-commands format-smq "
        "declarative-pipelines pipeline-cluster duckdb"
    ),
}
_OTHERS = "More"
_POLICY = "default-src 'none'; style-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · smqrt</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/rtl/page.css">
<link rel="stylesheet" href="/rtl/manual.css">
</head>
<body>
<header>
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


class Help(Directory):
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
    from smqrt.http.markdown import to_html  # when it is wanted: loading it takes as long as ten pages

    body = to_html(pages[name]) if name else _contents(pages)
    title = manual.title(pages[name]) if name else "Manual"
    return _PAGE.format(title=escape(title), body=body, navigation=_navigation(pages, name)).encode()


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

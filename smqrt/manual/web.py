"""Directories of the manual at `/help/` and of the list of applications at `/`."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from html import escape
from typing import Protocol
from urllib.parse import quote

from gevent.lock import BoundedSemaphore

from smqrt.http.message import Request
from smqrt.http.static_files import accepts_gzip
from smqrt.http.tree import Directory
from smqrt.loop.threads import in_thread
from smqrt.manual import pages as manual
from smqrt.manual.pages import index_script

LAST = -127  # the lowest priority: an application named "help" takes precedence
_INDEX = "search-index.js"
_HTML, _SCRIPT = "text/html; charset=utf-8", "text/javascript; charset=utf-8"
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
_APPLICATIONS_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Applications · smqrt</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/rtl/page.css">
<link rel="stylesheet" href="/rtl/manual.css">
</head>
<body>
<header><h1>Applications</h1><p><a href="/help/">Manual</a></p></header>
<main>
<p class="soft">{count} on this server.</p>
<ul class="applications">
{items}
</ul>
</main>
</body>
</html>
"""


class Manual(Directory):
    """The directory of the manual. Each page is rendered once, in a thread, and kept compressed."""

    def __init__(self) -> None:
        super().__init__("help", LAST)
        self._pages: dict[str, str] = {}
        self._rendered: dict[str, bytes] = {}
        self._lock = BoundedSemaphore()

    def service(self, request: Request, relpath: str) -> bool:
        """See `Directory.service`."""
        with self._lock:
            if not self._pages:
                self._pages = in_thread(manual.pages)
        is_index = relpath == _INDEX
        if relpath and not is_index and relpath not in self._pages:
            return False
        with self._lock:  # one page at a time, so that rendering occupies one thread of the pool
            if relpath not in self._rendered:
                render = _packed_index if is_index else _packed_html
                self._rendered[relpath] = in_thread(render, self._pages, relpath)
        body = self._rendered[relpath]
        headers = request.response.headers
        headers.set("Content-Type", _SCRIPT if is_index else _HTML)
        headers.set("Cache-Control", "max-age=300")
        headers.set("Content-Security-Policy", _POLICY)
        headers.set("X-Content-Type-Options", "nosniff")
        headers.set("Vary", "Accept-Encoding")
        if accepts_gzip(request.get("accept-encoding") or ""):
            headers.set("Content-Encoding", "gzip")
        else:
            body = in_thread(gzip.decompress, body)
        request.response.write(body)
        return True


def _packed_html(pages: dict[str, str], name: str) -> bytes:
    from smqrt.manual.render import Site, render_page  # here, because this import is slow

    site = Site("/help/", "", "/rtl/", "/help/", f"/help/{_INDEX}", '<a href="/">Applications</a>')
    return gzip.compress(render_page(pages, name, site).encode(), 6)


def _packed_index(pages: dict[str, str], _: str) -> bytes:
    return gzip.compress(index_script(pages).encode(), 6)


class ListedApplication(Protocol):
    """An application of the list."""

    @property
    def name(self) -> str:
        """The path segment of its mount."""

    @property
    def about(self) -> str:
        """One sentence about it; may be empty."""

    @property
    def error(self) -> str | None:
        """The error of a failed application; None when it is running or was stopped."""

    @property
    def running(self) -> bool:
        """Whether it is loaded."""


class ApplicationList(Directory):
    """The list of applications at `/`, unless an application is mounted there.

    Args:
        applications: the applications, read at every request.
    """

    def __init__(self, applications: Iterable[ListedApplication]) -> None:
        super().__init__(None, LAST)
        self._applications = applications

    def service(self, request: Request, relpath: str) -> bool:
        """See `Directory.service`."""
        if relpath:
            return False
        shows_errors = request.access.shows_errors(request)
        items = []
        for one in self._applications:
            if not one.running and not one.error:
                continue
            name, about = escape(one.name), f'<p class="soft">{escape(one.about)}</p>' if one.about else ""
            if one.error is None:
                items.append(f'<li class="card"><h2><a href="/{quote(one.name)}/">{name}</a></h2>{about}</li>')
            else:
                error = f"<pre>{escape(one.error)}</pre>" if shows_errors else "<p>See the log of the server.</p>"
                heading = f'<h2>{name} <span class="failed">failed</span></h2>'
                items.append(f'<li class="card">{heading}{about}{error}</li>')
        count = f"{len(items)} application{'s' if len(items) != 1 else ''}"
        page = _APPLICATIONS_PAGE.format(count=count, items="\n".join(items))
        response = request.response
        response.headers.set("Content-Type", "text/html; charset=utf-8")
        response.headers.set("Cache-Control", "no-store")
        response.write(page.encode("utf-8", "backslashreplace"))
        return True

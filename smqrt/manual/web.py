"""The pages of the server itself: the manual at `/help/`, each page rendered once, in a thread; at `/` the list of its
applications.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable
from html import escape
from typing import Protocol
from urllib.parse import quote

from gevent import get_hub
from gevent.lock import BoundedSemaphore

from smqrt.http.message import Request
from smqrt.http.static_files import accepts_gzip
from smqrt.http.tree import Directory
from smqrt.manual import pages as manual
from smqrt.manual.search import index_script

LAST = -127  # applications come first, also one of the name "help"
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
    """The directory of the manual."""

    def __init__(self) -> None:
        super().__init__("help", LAST)
        self._pages: dict[str, str] = {}
        self._made: dict[str, bytes] = {}
        self._making = BoundedSemaphore()

    def service(self, request: Request, relpath: str) -> bool:
        """See `Directory.service`."""
        self._load()
        is_index = relpath == _INDEX
        if relpath and not is_index and relpath not in self._pages:
            return False
        body = self._once(relpath, _packed_index if is_index else _html)
        headers = request.response.headers
        headers.set("Content-Type", _SCRIPT if is_index else _HTML)
        headers.set("Cache-Control", "max-age=300")
        headers.set("Content-Security-Policy", _POLICY)
        headers.set("X-Content-Type-Options", "nosniff")
        if is_index:
            headers.set("Vary", "Accept-Encoding")
            if accepts_gzip(request.get("accept-encoding") or ""):
                headers.set("Content-Encoding", "gzip")
            else:
                body = get_hub().threadpool.apply(gzip.decompress, (body,))
        request.response.write(body)
        return True

    def _load(self) -> None:
        with self._making:
            if not self._pages:
                self._pages = get_hub().threadpool.apply(manual.pages)

    def _once(self, name: str, make: Callable[[dict[str, str], str], bytes]) -> bytes:
        with self._making:  # one after the other, so that rendering takes one thread of the pool
            if name not in self._made:
                self._made[name] = get_hub().threadpool.apply(make, (self._pages, name))
        return self._made[name]


def _html(pages: dict[str, str], name: str) -> bytes:
    from smqrt.manual.render import Site, render_page  # loading it takes as long as ten pages

    site = Site("/help/", "", "/rtl/", "/help/", f"/help/{_INDEX}", '<a href="/">Applications</a>')
    return render_page(pages, name, site).encode()


def _packed_index(pages: dict[str, str], _: str) -> bytes:
    return gzip.compress(index_script(pages).encode(), 6)


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
        page = _APPLICATIONS_PAGE.format(count=count, items="\n".join(items))
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
